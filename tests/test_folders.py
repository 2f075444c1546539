"""Models by name: folders of the user's, and those that come with the package."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import freda
from freda.cli import run
from freda.data import mini
from freda.decode.chat import Chat, messages
from freda.describe import describe
from freda.errors import FredaError
from freda.folders import model_folder
from freda.folders.model_folder import load_model, model_path, packaged, resolve_model_folder
from tests.benchmarks import resize
from tests.helpers import EASY, write_stand_in


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_folder, "ASSETS", tmp_path / "assets")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return write_stand_in(tmp_path / "assets")


def test_a_packaged_model_is_called_by_its_name(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert packaged() == ["mini"] and resolve_model_folder(Path("mini")) == stand_in
    assert freda.load("mini", device="cpu", pages=16).generate("Q: 1 + 1?\nA:", max_new_tokens=4).nfe > 0
    assert run(["generate", "mini", "Q: 1 + 1?\nA:", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "self-refine"
    assert run(["inspect", "mini"]) == 0 and "method self-refine" in capsys.readouterr().out
    assert run(["convert", "mini", "small", "--int8"]) == 0 and Path("small/model.safetensors").is_file()


def test_folders_of_the_users_go_first(stand_in: Path) -> None:
    Path("mini").mkdir()
    assert model_path(Path("mini")) == stand_in, "a folder that is no model is not meant"
    Path("mini/latest").write_text("step-1", encoding="utf-8")
    assert model_path(Path("mini")) == Path("mini")
    assert model_path(Path("./runs/mini")) == Path("runs/mini"), "a path is a path"
    assert model_path(stand_in) == stand_in


def test_a_run_that_starts_from_a_packaged_model_keeps_its_folder(stand_in: Path) -> None:
    from freda.train.config import RunConfig, TrainConfig
    from freda.train.loop import _with_absolute_paths

    kept = _with_absolute_paths(RunConfig(train=TrainConfig(init="mini")))
    assert kept.train.init == str(stand_in)
    assert _with_absolute_paths(RunConfig(train=TrainConfig(init="runs/x"))).train.init == str(
        Path("runs/x").absolute()
    )


def test_the_packaged_model_brings_its_questions(
    stand_in: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resize(monkeypatch, mini_math=4, mini_code=4, mini_logic=4)
    quick = ["--limit", "2", "--max-new-tokens", "8", "--device", "cpu"]
    assert run(["eval", "mini", *quick]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["mini_math", "mini_code", "mini_logic"]
    assert Path("runs/eval/mini-2/mini_math/results.json").is_file() and not (stand_in / "eval").exists()
    assert run(["eval", "mini", "--task", "mini_math", *quick[2:]]) == 0, "all questions after a first look"
    assert Path("runs/eval/mini/mini_math/results.json").is_file()
    capsys.readouterr()
    assert run(["eval", "mini", "--task", "mini_logic", *quick]) == 0
    assert "mini_logic: " in capsys.readouterr().out
    assert run(["eval", "mini", "--task", "gsm8k", *quick]) == 2
    assert "benchmarks" in capsys.readouterr().err, "other tasks are read from where they always were"


def test_without_packaged_models_all_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_stand_in(tmp_path / "elsewhere")
    monkeypatch.setattr(model_folder, "ASSETS", tmp_path / "nothing")
    assert packaged() == [] and resolve_model_folder(folder) == folder
    with pytest.raises(FredaError, match=r"there is no model mini; .* bundled model \(none"):
        freda.load("mini")
    assert run(["generate", "mini", "Q:"]) == 2
    assert "there is no model mini" in capsys.readouterr().err
    assert run(["eval", "mini"]) == 2
    assert "there is no model mini" in capsys.readouterr().err
    assert run(["eval", str(folder)]) == 2
    assert "name a --task" in capsys.readouterr().err
    assert run(["inspect", "mini"]) == 2
    assert "mini" in capsys.readouterr().err


def test_an_unknown_name_is_told_the_known_ones(stand_in: Path) -> None:
    with pytest.raises(FredaError, match=r"there is no model maxi; .* bundled model \(mini\)"):
        resolve_model_folder(Path("maxi"))
    with pytest.raises(FredaError, match=r"maxi.*mini"):
        describe(Path("maxi"))


def test_the_demo_begins_with_the_packaged_model(
    stand_in: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONGEST_ANSWER", "LONGEST_SOLUTION"):
        monkeypatch.setattr(f"freda.demo.{name}", 8)
    assert run(["demo", "--quick", "--out", "demo"]) == 0
    shown = capsys.readouterr()
    before = shown.out[: shown.out.index("held-out problems")]
    for kind in mini.KINDS:
        assert mini.item(kind, EASY, "test", 0).prompt in before
    assert before.count("tokens in") == 3 and "pass 1" in before
    assert shown.err.index("3 questions to mini") < shown.err.index("1/6 writing a corpus")


def test_packaged_models_are_small_enough_to_ship() -> None:
    for name in packaged():
        size = sum(path.stat().st_size for path in (model_folder.ASSETS / name).rglob("*") if path.is_file())
        assert size <= 25_000_000, f"{name} has {size:,} bytes"


# -- the model that comes with the package, itself -------------------------------------------------------------------


def test_the_shipped_model_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    files = {path.name for path in (model_folder.ASSETS / "mini").rglob("*") if path.is_file()}
    assert {"README.md", "model.safetensors", "scorer.safetensors", "tokenizer.json", "manifest.json"} <= files
    assert run(["inspect", "mini"]) == 0
    assert "a scorer among them, stored as int8" in capsys.readouterr().out
    loaded = load_model(Path("mini"))
    assert loaded.method.name == "best-of-n" and loaded.scorer is not None


def test_the_shipped_model_says_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (model_folder.ASSETS.parent.parent / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ freda (generate mini .+)\n(A: .+)$", page, re.M)
    assert len(shown) == 2 and len({answer for _, answer in shown}) == 2, "one pass, then several, which repair it"
    for command, answer in shown:
        assert run(shlex.split(command)) == 0
        assert capsys.readouterr().out.strip() == answer


@pytest.mark.slow
def test_the_shipped_model_solves_what_it_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of its questions: the card says 56, 91 and 47%, 6 questions each leave room for chance."""
    resize(monkeypatch, mini_math=6, mini_code=6, mini_logic=6)  # the first of 2,000, which take long to make
    assert run(["eval", "mini", "--out", str(tmp_path / "eval")]) == 0
    found = {
        task: json.loads((tmp_path / "eval" / task / "results.json").read_text(encoding="utf-8"))["accuracy"]
        for task in ("mini_math", "mini_code", "mini_logic")
    }
    assert found["mini_math"] >= 0.3 and found["mini_code"] >= 0.7 and found["mini_logic"] >= 0.2, found


def test_the_shipped_model_says_what_it_can_be_asked() -> None:
    chat = Chat(freda.load("mini", device="cpu", max_batch=1))
    typed = chat.suggestions()
    assert typed.count("How many") == 1 and "def " in typed and "Walk from" in typed and "\nA:" not in typed
    *_, function, walk = messages(iter_lines(typed))
    assert function.startswith("def ") and '"""' in function, "one message, though of two lines"
    assert "return" in "".join(str(part) for part in chat.ask(function))
    assert "".join(str(part) for part in chat.ask(walk)).strip() in tuple("ABCD"), "the letter, and nothing behind it"


def iter_lines(text: str) -> Callable[[str], str]:
    """Lines as a terminal would give them."""
    left = iter(text.splitlines())

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read
