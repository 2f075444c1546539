"""`freda.load`, `model.generate`, `model.stream`, and `freda generate` through the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import freda
from freda.cli import run
from freda.decode.api import Completion, Model
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.generate import generate
from freda.decode.plain import PlainModel
from freda.decode.request import Pass, Request
from freda.errors import FredaError
from freda.folders.model_folder import load_model
from freda.model.parts import Parts, pick_dtype
from tests.helpers import answering_model, save_model

PROMPTS = ["Q: one and two?", "Ünïcödé and ünïcödé", "", "a longer prompt that says nothing at all, but goes on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "model"
    save_model(out, answering_model([*PROMPTS, "The answer is 3."] * 20, seed=4))
    return out


@pytest.fixture
def model(folder: Path) -> Model:
    return freda.load(folder, device="cpu", max_batch=2, page_size=8, pages=64)


def expected(folder: Path, prompt: str, **settings: object) -> list[int]:
    loaded = load_model(folder)
    request = Request(prompt=loaded.tokenizer.encode(prompt), **settings)  # type: ignore[arg-type]
    return generate(loaded.parts, loaded.method, [request], stop_ids=loaded.tokenizer.stop_ids)[0].tokens


def test_prompts_alone_and_side_by_side(folder: Path, model: Model) -> None:
    many = model.generate(PROMPTS, max_new_tokens=20, threshold=0.5)
    for prompt, found in zip(PROMPTS, many, strict=True):
        assert found.tokens == expected(folder, prompt, max_new_tokens=20, threshold=0.5)
        assert found.text == model.loaded.tokenizer.decode(found.tokens) and found.finish in ("stop", "length")
    one = model.generate(PROMPTS[0], max_new_tokens=20, threshold=0.5)
    assert isinstance(one, Completion) and (one.tokens, one.nfe) == (many[0].tokens, many[0].nfe)
    assert one.tpf == len(one.tokens) / one.nfe
    assert not model.engine.busy, "nothing is left behind"


def test_one_bad_prompt_among_good_ones(model: Model) -> None:
    good, bad = model.generate([PROMPTS[0], "x" * 5000], max_new_tokens=8)
    assert good.finish != "error" and bad.finish == "error" and "the limit is 4096" in bad.error
    with pytest.raises(FredaError, match="the limit is 4096"):
        model.generate("x" * 5000, max_new_tokens=8)
    with pytest.raises(FredaError, match="there is no setting 'temprature'; use candidates, max_new_tokens"):
        model.generate("x", temprature=1.0)
    with pytest.raises(FredaError, match="passes is 0"):
        model.generate(["x"], passes=0)
    with pytest.raises(FredaError, match="max_new_tokens is 0"):
        model.generate("x", max_new_tokens=0)


def test_streams_add_up_to_the_text(model: Model) -> None:
    whole = model.generate(PROMPTS[1], max_new_tokens=30, threshold=0.5)
    pieces = list(model.stream(PROMPTS[1], max_new_tokens=30, threshold=0.5))
    assert "".join(map(str, pieces)) == whole.text and len(pieces) > 1
    mixed = list(model.stream(PROMPTS[1], max_new_tokens=30, threshold=0.5, drafts=True))
    assert "".join(piece for piece in mixed if isinstance(piece, str)) == whole.text
    passes = [piece for piece in mixed if isinstance(piece, Pass)]
    assert len(passes) == whole.nfe and isinstance(mixed[0], Pass)


def test_stop_strings_never_show(model: Model) -> None:
    whole = model.generate(PROMPTS[0], max_new_tokens=40, threshold=2.0).text
    assert len(whole) > 12, "the test needs a text"
    stop = whole[7:10]
    wanted = whole[: whole.find(stop)]
    settings = {"max_new_tokens": 40, "threshold": 2.0}
    assert model.generate(PROMPTS[0], stop=[stop], **settings).text == wanted
    pieces = [str(piece) for piece in model.stream(PROMPTS[0], stop=[stop, "never there"], **settings)]
    assert "".join(pieces) == wanted


def test_leaving_a_stream_cancels_it(model: Model) -> None:
    stream = model.stream(PROMPTS[0], max_new_tokens=100, threshold=2.0)
    next(stream)
    assert model.engine.busy
    stream.close()  # type: ignore[attr-defined]
    assert not model.engine.busy and model.engine.pages.available == 64


def test_loading(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FredaError, match=r"'max_bach'.*int8, max_batch, max_length, on_device, page_size"):
        freda.load(folder, max_bach=3)
    with pytest.raises(FredaError, match="there is no dtype 'float8'"):
        freda.load(folder, dtype="float8")
    with pytest.raises(FredaError, match="there is no model"):
        freda.load(tmp_path / "nowhere")


def test_precision_follows_the_device(model: Model) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert (pick_dtype("auto", cpu), pick_dtype("auto", cuda)) == (torch.float32, torch.bfloat16)
    assert pick_dtype("float32", cuda) == model.loaded.backbone.embed_tokens.weight.dtype == torch.float32


def test_an_engine_says_once_why_it_does_without_kernels(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(folder)
    Engine(loaded)
    assert capsys.readouterr().err == "", "there are none for a CPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    Engine(loaded, EngineConfig(pages=8, on_device=False))
    assert capsys.readouterr().err == "", "as asked for"
    for dtype, words in ((torch.float32, "float32"), (torch.bfloat16, "shape")):
        made = loaded._replace(parts=Parts(load_model(folder, dtype=dtype).backbone))
        Engine(made, EngineConfig(pages=8))
        assert words in capsys.readouterr().err
    monkeypatch.setattr(Engine, "_packed_model", lambda engine: object())
    rescaled = replace(loaded.method, rescale=True)
    engine = Engine(loaded._replace(method=rescaled), EngineConfig(pages=8))
    assert isinstance(engine._backend(rescaled), PlainModel) and isinstance(engine._backend(rescaled), PlainModel)
    assert capsys.readouterr().err.count("rescale") == 1


def test_a_base_model_is_not_decoded_by_blocks_without_a_word(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    save_model(base, load_model(folder)._replace(stage="base"))
    ask = ["generate", str(base), "x", "--max-new-tokens", "2"]
    for method, warned in (("self-refine", True), ("autoregressive", False)):
        assert run([*ask, "--method", method]) == 0
        said = capsys.readouterr().err
        assert ("never trained" in said and "--method autoregressive" in said) == warned
    assert run(["generate", str(folder), "x", "--max-new-tokens", "2"]) == 0
    assert "never trained" not in capsys.readouterr().err


def test_the_command_line_takes_the_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(folder), PROMPTS[0], "--max-new-tokens", "24", "--threshold", "0.5", "--json"]
    found = []
    for extra in ([], ["--reference"], ["--stop", "\u0000"], ["--show-drafts", "--pause", "0"]):
        assert run([*command, *extra]) == 0
        answer = json.loads(capsys.readouterr().out)
        found.append((answer["tokens"], answer["nfe"], answer["text"], answer["finish"]))
    assert found[0] == found[1] == found[2] == found[3]
    text = found[0][2]
    for extra in ([], ["--reference"]):
        assert run([*command, "--stop", text[3:5], *extra]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == text[: text.find(text[3:5])]


WRONG_TYPES: dict[str, tuple[object, ...]] = {
    "max_new_tokens": ("x", None, 5.5, True, [], 0),
    "passes": ("x", None, 1.5, True),
    "threshold": ("x", None, [], True, float("nan"), -1),
    "temperature": ("x", None, [], True, -1, float("inf"), float("nan")),
    "top_p": ("x", None, [], True, 2),
    "seed": ("x", None, 1.5, 2**70),
    "width": ("x", None, 1.5, True),
    "tau": ("x", None, [], True),
    "swaps": ("x", None, 1.5, True),
    "candidates": (5, None, []),
    "select": (5, None, []),
    "stop": (5, None, [5], [""], 1.5),
    "method": (5, [], "x", ""),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_settings_of_wrong_types_are_refused_at_the_call(name: str) -> None:
    """And the engine is as it was: the next call gives what it gave before."""
    model = Model(answering_model(["Tom has 12 apples."] * 3, seed=1), EngineConfig(max_batch=2))
    before = model.generate("Tom has", max_new_tokens=4).tokens
    for value in WRONG_TYPES[name]:
        with pytest.raises((FredaError, TypeError), match=r".{10,300}"):
            model.generate("Tom has", **{name: value})
        with pytest.raises((FredaError, TypeError)):
            model.stream("Tom has", **{name: value})
    assert not model.engine.busy and model.generate("Tom has", max_new_tokens=4).tokens == before


def test_calls_with_wrong_types_are_refused() -> None:
    model = Model(answering_model(["Tom has 12 apples."] * 3, seed=1), EngineConfig(max_batch=2))
    odd: tuple[Any, ...] = (5, None, b"Tom", {"a": 1}, 1.5)
    for one in odd:
        for call in (model.generate, model.stream, model.complete, model.reference, model.engine.submit, freda.load):
            with pytest.raises((FredaError, TypeError)):
                call(one)
    prompts: tuple[Any, ...] = (5, "Tom", b"Tom", [1.5], [None], [[1]], [-1], [10**9], [2**70], None)
    for prompt in prompts:
        with pytest.raises((FredaError, TypeError)):
            model.complete(Request(prompt=prompt))
    sizes: tuple[Any, ...] = ("x", 1.5, None, -1, [])
    for name, size in ((name, size) for name in ("max_batch", "max_length", "page_size", "queue") for size in sizes):
        with pytest.raises((FredaError, TypeError)):
            Model(model.loaded, EngineConfig(**{name: size}))
    many = model.generate(["Tom", 5, None], max_new_tokens=2)  # type: ignore[list-item]
    assert [one.finish for one in many][1:] == ["error", "error"] and "use a string" in many[1].error
    assert not model.engine.busy
