"""Sweeps: which points are measured, with models and from the command line; stability."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from freda.cli import run
from freda.data.config import CorpusConfig
from freda.data.shards import Manifest
from freda.errors import FredaError
from freda.eval import config as configs
from freda.eval import sweep as sweeps
from freda.eval.config import SweepConfig, SweepFile, SystemConfig
from freda.eval.report import figures
from freda.eval.report.points import NEVER, WITHOUT_AXES, Decoding, Setting, read_sweep
from freda.eval.report.points import settings_of as settings_of_parts
from freda.eval.sweep import run_sweep
from freda.eval.tasks import TASKS
from freda.eval.tasks.task import Example, checksum
from freda.eval.teacher_forcing import solution_batch, stability
from freda.folders.model_folder import LoadedModel
from freda.model.scorer import Scorer
from tests.helpers import answering_model, init_weights, problems, save_model

SYSTEM = SystemConfig(models=("x",))
OWN = Setting(4, 0.9, 4, 0.1)
SMALL = SweepConfig(tasks=("sums",), passes=(1, 2, 5), thresholds=(0.5, 0.9), taus=(0.0, 0.1), widths=(2, 4))


def decoding(method: str) -> Decoding:
    return Decoding(**WITHOUT_AXES[method], block_size=4)  # type: ignore[arg-type]


def settings_of(sweep: SweepConfig, method: str, *parts: str) -> list[Setting]:
    return settings_of_parts(parts or ("main", *sweep.parts), sweep, SYSTEM, decoding(method))


# -- which points ----------------------------------------------------------------------------------------------------


def test_a_refining_system_gets_passes_times_thresholds_once_each() -> None:
    found = settings_of(SMALL, "self-refine")
    assert found[0] == Setting(4, 0.9, 4, 0.1), "the main table's"
    assert len(found) == len(set(found))
    assert {(s.passes, s.threshold) for s in found} == {
        *((4, 0.9), (1, 0.9)),  # one pass knows no threshold
        *((2, 0.5), (2, 0.9), (5, 0.5), (5, 0.9)),
        (5, NEVER),  # early stop is off from four passes on
    }
    assert {(s.width, s.tau) for s in found} == {(4, 0.1)}, "no scorer, no width"


def test_a_scoring_system_gets_the_ablations_too() -> None:
    found = settings_of(SMALL, "best-of-n")
    own = Setting(4, 0.9, 4, 0.1)
    for wanted in (
        own._replace(tau=0.0),
        own._replace(width=2),
        own._replace(passes=2),
        own._replace(passes=2, width=2),
    ):
        assert wanted in found
    assert sum(setting.passes == 1 for setting in found) == 1, "candidates compete from the second pass on"


def test_baselines_keep_their_own_schedules() -> None:
    found = settings_of(SMALL, "block-diffusion")
    assert {(s.passes, s.threshold) for s in found} == {
        *((4, 0.9), (1, 0.9), (2, NEVER), (3, NEVER), (4, NEVER), (4, 0.5)),
    }
    assert settings_of(SMALL, "autoregressive") == [Setting(1, 0.9, 4, 0.1)]
    only_main = dataclasses.replace(SMALL, parts=("main",))
    assert settings_of(only_main, "self-refine") == [Setting(4, 0.9, 4, 0.1)]


def test_early_stop_is_on_up_to_three_passes_and_off_from_four_on() -> None:
    found = settings_of(SweepConfig(), "self-refine", "passes")
    assert [(s.passes, s.threshold == NEVER) for s in found] == [(k, k >= 4) for k in range(1, 7)]


def test_each_system_reads_its_own_files_and_choices_are_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    example = Example("x", "p", "g", {})
    sums = dataclasses.replace(TASKS["sums"], load=lambda data, rows: read.append(data) or [example])
    mine, other = SystemConfig(models=("x",), data="mine"), SystemConfig(models=("y",))
    file = SweepFile(sweep=SMALL, system={"a": mine, "b": other, "c": other})
    assert len(sweeps._questions(file, [sums], Path("all"), False)) == 3
    assert read == [Path("mine"), Path("all")]
    asked: list[str] = []

    def answer(loaded: object, task: Any, *_: object, **__: object) -> dict[str, float]:
        asked.append(task.name)
        return dict.fromkeys(("n", "accuracy", "standard_error", "nfe", "tpf", "seconds", "errors"), 1.0)

    monkeypatch.setattr("freda.eval.sweep.evaluate", answer)
    monkeypatch.setattr("freda.eval.sweep.read_samples", lambda folder: ({}, {"x": {"correct": True}}))
    both: Any = [(TASKS["mmlu"], [example]), (sums, [example])]
    nobody: Any = None
    subject = sweeps.Subject("a", 0, mine, nobody, decoding("self-refine"), both, tmp_path)
    points = list(sweeps._measure(subject, SMALL))
    assert asked == ["mmlu", *["sums"] * len(settings_of(SMALL, "self-refine"))]
    assert points[0].setting == points[1].setting == OWN


def test_sweep_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    for text, message in (
        ("", r"the sweep has no \[system.NAME\]"),
        ("[system.a]", "system.a: models is empty"),
        (
            '[system.a]\nmodels = ["x"]\nbaseline = true\n[system.b]\nmodels = ["y"]\nbaseline = true',
            "a and b are both",
        ),
        ('[sweep]\nparts = ["mian"]\n[system.a]\nmodels = ["x"]', "sweep.parts has mian; use main, passes"),
        ('[sweep]\npasses = []\n[system.a]\nmodels = ["x"]', "sweep.passes is empty"),
        ('[sweep]\npasses = ["x"]\n[system.a]\nmodels = ["x"]', "sweep.passes is 'x' .*a whole number"),
        ('[system.a]\nmodels = ["x"]\npasses = 0', "system.a: passes is 0"),
        ('[sweep]\npasses = [2, 0]\n[system.a]\nmodels = ["x"]', "passes is 0; use 1 to"),
        ('[sweep]\nthresholds = [0.0]\n[system.a]\nmodels = ["x"]', "threshold is 0.0"),
        ('[sweep]\nwidths = [0]\n[system.a]\nmodels = ["x"]', "width is 0"),
        ('[sweep]\ntaus = [-1.0]\n[system.a]\nmodels = ["x"]', "tau is -1"),
        ('[sweeep]\n[system.a]\nmodels = ["x"]', "unknown section 'sweeep'; did you mean 'sweep'"),
    ):
        path.write_text(text)
        with pytest.raises(FredaError, match=message):
            configs.load_sweep(path)
    path.write_text('[system.a]\nmodels = "one"')
    assert configs.load_sweep(path, ["sweep.passes=[2, 3]"]).system["a"].models == ("one",)


# -- measured with models --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models of all methods, and the manifest of a corpus."""
    out = tmp_path_factory.mktemp("models")
    corpus = CorpusConfig(steps=1, max_number=30)
    Manifest({"corpus": {"generator": 1, **dataclasses.asdict(corpus)}}, 8, 0, 0, "", {}).write(out)
    texts = [problem.document for problem in problems("train", 50, steps=1, max_number=30, seed=0)]
    for name in ("autoregressive", "block-diffusion", "self-refine", "best-of-n"):
        loaded = answering_model(texts, seed=1, method=name)
        if name == "best-of-n":
            loaded.parts.scorer = Scorer(loaded.backbone.config)
            init_weights(loaded.parts.scorer, 1, loaded.backbone)
        save_model(out / name, loaded)
    return out


CONFIG = """
[sweep]
tasks = ["sums"]
limit = 6
passes = [1, 2]
thresholds = [0.3, 0.9]
taus = [0.0, 0.1]
widths = [2, 4]
width_passes = [2]
max_new_tokens = 8
batch_size = 4
stability_examples = 3
"""


def test_a_sweep_from_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = [
        f'[system.{name}]\nmodels = ["{folder / name}"]' for name in ("autoregressive", "self-refine", "best-of-n")
    ]
    systems.append(f'[system.block-diffusion]\nmodels = ["{folder / "block-diffusion"}"]\nbaseline = true')
    (tmp_path / "sweep.toml").write_text(CONFIG + "\n".join(systems))
    out = tmp_path / "out"
    command = ["sweep", str(tmp_path / "sweep.toml"), "--data", str(folder), "--out", str(out)]
    assert run(command) == 0
    shown = capsys.readouterr()
    for part in ("main", "passes", "pareto", "stability", "tau", "width"):
        for kind in ("csv", "md", "png", "svg"):
            assert (out / f"{part}.{kind}").stat().st_size > 40 and str(out / f"{part}.{kind}") in shown.out
    assert "self-refine 0 sums 1/" in shown.err
    content = read_sweep(out)
    assert len(content["points"]) == len({(p.system, p.setting) for p in content["points"]})
    for found in content["points"]:
        kept = json.loads(
            (out / "points" / found.system / "0" / "sums" / found.setting.folder / "results.json").read_text()
        )
        assert (kept["accuracy"], kept["tpf"]) == (found.accuracy, found.tpf) and len(found.right) == 6
    stored = json.loads((out / "sweep.json").read_text())["systems"]
    assert {name: (about["axes"], about["refines"]) for name, about in stored.items()} == {
        name: (list(facts["axes"]), facts["refines"])  # type: ignore[call-overload]
        for name, facts in WITHOUT_AXES.items()
    }
    stable = json.loads((out / "points" / "self-refine" / "0" / "sums" / "stability.json").read_text())
    assert stable["checksum"] == checksum(TASKS["sums"].examples(folder, 3)) and stable["passes"] == 2
    # The same command measures nothing again; --draw needs nothing but the file.
    before = {path: path.stat().st_mtime_ns for path in (out / "points").rglob("stability.json")}
    damaged, old = sorted(before)  # both are measured again
    damaged.write_text('{"model')
    old.write_text(json.dumps({**json.loads(old.read_text()), "model": "another", "rows": []}))
    whole = json.loads((out / "sweep.json").read_text())["stability"]
    with monkeypatch.context() as patch:
        patch.setattr(figures, "draw", lambda *_: [])  # drawing takes most of the time
        assert run(command) == 0 and json.loads((out / "sweep.json").read_text())["stability"] == whole
    before = {path: path.stat().st_mtime_ns for path in before}
    svg = (out / "pareto.svg").read_bytes()
    monkeypatch.setattr("freda.eval.evaluate._generate", None)
    with monkeypatch.context() as patch:
        patch.setattr(figures, "draw", lambda *_: [])
        assert run(command) == 0 and before == {path: path.stat().st_mtime_ns for path in before}
    assert run(["sweep", "--draw", str(out / "sweep.json"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "pareto.svg").read_bytes() == svg
    assert (tmp_path / "again" / "main.md").read_text() == (out / "main.md").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # a machine that only measures
    capsys.readouterr()
    assert run(["sweep", "--draw", str(out / "sweep.json"), "--out", str(tmp_path / "bare")]) == 0
    assert "no figures without matplotlib" in capsys.readouterr().err
    assert {path.suffix for path in (tmp_path / "bare").iterdir()} == {".csv", ".md"}
    assert (tmp_path / "bare" / "width.md").read_text() == (out / "width.md").read_text()


def test_drawing_loads_no_torch(tmp_path: Path) -> None:
    """Tables, figures and comparisons, from files alone."""
    content = json.loads((Path(__file__).parent.parent / "results" / "demo-sweep.json").read_text())
    content["config"]["sweep"]["parts"] = ["main", "pareto"]
    source = tmp_path / "sweep.json"
    source.write_text(json.dumps(content))
    code = (
        "import sys; from freda.cli import run; "
        f"assert run(['sweep', '--draw', {str(source)!r}, '--out', {str(tmp_path)!r}]) == 0; "
        "import freda.eval.report.results; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "main.md").is_file() and (tmp_path / "pareto.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep"], "give a config to measure, or --draw FILE"),
        (["sweep", "--draw", "nowhere"], "there is no nowhere; make it with freda sweep CONFIG"),
        (["sweep", "nowhere.toml"], "there is no config file nowhere.toml"),
    ],
)
def test_what_a_sweep_needs(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_of_missing_or_mixed_models_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(CONFIG + '[system.a]\nmodels = ["nowhere"]')
    with pytest.raises(FredaError, match="nowhere"):
        run_sweep(configs.load_sweep(path), folder, tmp_path / "out")
    path.write_text(CONFIG + f'[system.a]\nmodels = ["{folder / "self-refine"}", "{folder / "block-diffusion"}"]')
    wanted = configs.load_sweep(path, ["sweep.parts=['main']"])
    with pytest.raises(FredaError, match="models of two kinds, method self-refine and block-diffusion"):
        run_sweep(wanted, folder, tmp_path / "out")
    (tmp_path / "sweep.json").write_text('{"format": 99}')
    with pytest.raises(FredaError, match="has format 99; this version reads 1"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text('{"format": 1, "points": []}')
    with pytest.raises(FredaError, match="has no config, systems, tasks, checksums, stability; make it again"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(FredaError, match=r"sweep\.json is not a JSON object"):
        read_sweep(tmp_path)


def test_stability_counts_what_passes_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from freda.folders.model_folder import load_model

    loaded: LoadedModel = load_model(folder / "self-refine")
    examples = TASKS["sums"].load(folder, 5)
    texts = [(example.prompt, example.prompt + TASKS["sums"].reference(example)) for example in examples]
    rows = stability(loaded, texts, 3)
    batch, given, solution = solution_batch(loaded, texts)
    counted = ~given & (batch.document >= 0) & ~batch.fill
    assert torch.equal(solution, counted)
    drafts = list(loaded.method.teacher_forced(loaded.parts, batch, given, 3))
    for number, row in enumerate(rows):
        now, before = drafts[number], drafts[number - 1] if number else None
        share = {"right": now == batch.tokens, "changed": torch.ones_like(counted)}
        if before is not None:
            share["changed"] = now != before
            share["mended"] = (now == batch.tokens) & (before != batch.tokens)
            share["spoiled"] = (now != batch.tokens) & (before == batch.tokens)
        for name, mark in share.items():
            assert row[name] == pytest.approx(float((mark & counted).sum() / counted.sum())), (number, name)
    clean = next(iter(loaded.method.teacher_forced(loaded.parts, batch, given, 3, clean_draft=True)))
    assert rows[0]["kept"] == pytest.approx(float(((clean == batch.tokens) & counted).sum() / counted.sum()))
    assert rows[0]["kept"] != rows[0]["right"], "a clean draft is not a blank one"
    monkeypatch.setattr("freda.eval.teacher_forcing.MOST_LOGITS", 1)
    assert [{k: pytest.approx(v) for k, v in row.items()} for row in rows] == stability(loaded, texts, 3), "row by row"
