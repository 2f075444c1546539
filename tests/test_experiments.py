"""The experiments at small scale: what the shell files ask for. A program in freda's place writes it down.

`make smoke` runs them with freda itself.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from freda import config as configs
from freda.config import Config, MethodConfig
from freda.data.generators import settings_in
from freda.data.shards import Manifest, SplitInfo
from freda.errors import FredaError
from freda.eval.sweep import read_sweep
from freda.eval.tables import Sweep
from freda.model.weights import load_model
from tests.stand_in import write_stand_in

ROOT = Path(__file__).parent.parent
SCRIPTS, CONFIGS = ROOT / "experiments" / "mini", ROOT / "configs" / "mini"
CLAIMS = ("a", "b", "c", "d", "e", "f", "compute")

# Writes its arguments down, and makes what the scripts look for. A run whose folder is $BROKEN fails.
PROGRAM = """#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >>"$LOG"
folder=$3
for ((i = 1; i < $#; i++)); do [ "${!i}" = --out ] && { j=$((i + 1)); folder=${!j}; }; done
[ "$1 $2" = "train --resume" ] || [ "$folder" != "${BROKEN:-}" ] || exit 1
mkdir -p "$folder"
touch "$folder/manifest.json" "$folder/config.toml" "$folder/sweep.json"
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    program = tmp_path / "freda"
    program.write_text(PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def called(work: Path, script: str, *arguments: str, fails: bool = False, **extra: str) -> list[list[str]]:
    """What the script had freda do."""
    log = work / "log"
    log.write_text("", encoding="utf-8")
    kept = {
        name: value for name, value in os.environ.items() if name not in ("SEEDS", "JOBS", "ONLY", "TRAIN", "SWEEP")
    }
    environment = {**kept, "WORK": str(work), "FREDA": str(work / "freda"), "LOG": str(log), **extra}
    done = subprocess.run(
        [str(SCRIPTS / script), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode != 0) == fails, done.stderr
    return [shlex.split(line) for line in log.read_text(encoding="utf-8").splitlines()]


def settings(words: Sequence[str]) -> list[str]:
    return [after for word, after in itertools.pairwise(words) if word == "--set"]


def runs(calls: Sequence[Sequence[str]]) -> dict[str, Config]:
    """The trainings among the calls, by the folder below runs/mini-suite, resolved."""
    started = [words for words in calls if words[0] == "train" and "--out" in words]
    return {
        words[words.index("--out") + 1].removeprefix("runs/mini-suite/"): configs.load(Path(words[1]), settings(words))
        for words in started
    }


def test_what_is_compared_differs_by_the_method_alone(work: Path) -> None:
    found = runs(called(work, "train.sh"))
    names = ("base", "autoregressive", "block-diffusion", "self-refine", "best-of-n")
    assert set(found) == {f"{seed}/{name}" for seed in range(3) for name in names}
    for seed in range(3):
        one, *others = (found[f"{seed}/{name}"] for name in names[1:4])
        assert {one.method.name, *(other.method.name for other in others)} == set(names[1:4])
        for other in others:
            assert replace(other, method=one.method) == one, "same base, rows, order, optimizer and clean tokens"
        assert one.train.seed == seed and one.train.init == f"runs/mini-suite/{seed}/base"
        base, scorer = found[f"{seed}/base"], found[f"{seed}/best-of-n"]
        assert one.data.first_row == base.train.steps * base.train.batch_rows, "rows the base has not seen"
        assert scorer.data.first_row == one.data.first_row + one.train.steps * one.train.batch_rows
        assert scorer.train.init == f"runs/mini-suite/{seed}/self-refine"


def test_every_ablation_changes_what_it_says(work: Path) -> None:
    called(work, "train.sh")
    found = runs(called(work, "ablations.sh", SEEDS="5"))
    plain = MethodConfig()
    changed = {
        name.removeprefix("5/"): {
            key: value for key, value in vars(run.method).items() if value != getattr(plain, key) and key != "name"
        }
        for name, run in found.items()
    }
    assert changed == {
        "reference": {},
        "hard-feedback": {"feedback": "hard"},
        "no-replacement": {"replacement_start": 0.0, "replacement_end": 0.0},
        "more-replacement": {"replacement_start": 0.5, "replacement_end": 0.3},
        "committed-hard": {"committed_hard": True},
        "rescaled": {"rescale": True},
        "prefix-replacement": {"replacement": "prefix"},
        "passes-1": {"passes": 1},
        "passes-2": {"passes": 2},
        "passes-5": {"passes": 5},
        "sampled-drafts": {"drafts": "sampled"},
        "block-8": {"block_size": 8},
        "block-diffusion-reference": {"noise_min": 0.3},
        "block-diffusion-all-noise": {},
        "block-diffusion-block-8": {"block_size": 8, "noise_min": 0.3},
        "beam-negatives": {"negatives": "beam"},
        "scorer-layer": {"scorer_layer": True},
    }
    one, *others = (replace(run, method=plain) for run in found.values() if run.method.name != "best-of-n")
    assert all(other == one for other in others)


def test_sweeps_name_what_the_scripts_train(work: Path) -> None:
    calls = [call for script in ("train.sh", "compute.sh", "ablations.sh") for call in called(work, script)]
    trained = {f"runs/mini-suite/{name}" for name in runs(calls)}
    named = set()
    for claim in CLAIMS:
        for name, system in configs.load_sweep(CONFIGS / f"sweep-{claim}.toml").system.items():
            assert system.models == tuple(f"runs/mini-suite/{seed}/{name}" for seed in range(3))
            named |= set(system.models)
    assert named == trained


def test_sweeps_follow_the_seeds(work: Path) -> None:
    (call,) = called(work, "sweep.sh", "b", SEEDS="3 4")
    file = configs.load_sweep(Path(call[1]), settings(call))
    assert file.system["self-refine"].models == ("runs/mini-suite/3/self-refine", "runs/mini-suite/4/self-refine")
    assert (work / "results" / "mini" / "b.json").is_file()
    assert settings(called(work, "sweep.sh", "a")[0]) == []
    assert {call[1] for call in called(work, "sweep.sh")} == {str(CONFIGS / f"sweep-{c}.toml") for c in CLAIMS[2:]}


def test_what_is_done_is_not_done_again_and_what_was_stopped_goes_on(work: Path) -> None:
    broken = "runs/mini-suite/0/self-refine"
    first = called(work, "train.sh", fails=True, SEEDS="0", BROKEN=broken)
    assert set(runs(first)) == {"0/base", "0/autoregressive", "0/block-diffusion", "0/self-refine"}, (
        "no scorer of nothing"
    )
    (work / broken).mkdir()
    (work / broken / "config.toml").touch()  # as a run that was stopped has
    second = called(work, "train.sh", SEEDS="0")
    assert [call[:3] for call in second][:1] == [["train", "--resume", broken]]
    assert set(runs(second)) == {"0/best-of-n"}
    assert called(work, "train.sh", SEEDS="0") == []


def test_a_training_that_is_told_to_stop_is_not_finished(work: Path) -> None:
    """freda leaves with 0 after SIGTERM. The script waits for it, marks nothing, and goes on with it the next time."""
    program = work / "freda"
    waits = """#!/bin/bash
[ "$1" = prepare ] && { mkdir -p "$3"; touch "$3/manifest.json"; exit; }
trap 'sleep 0.5; echo saved >"$WORK/saved"; echo "go on with: freda train --resume x" >&2; exit 0' TERM
mkdir -p "$4"; touch "$4/config.toml"
touch "$WORK/begun"; for _ in {1..300}; do sleep 0.1; done
"""
    program.write_text(waits, encoding="utf-8")
    environment = {**os.environ, "WORK": str(work), "FREDA": str(program), "SEEDS": "0"}
    script = subprocess.Popen([str(SCRIPTS / "train.sh")], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (work / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.terminate()
    assert script.wait(timeout=20) == 143
    assert (work / "saved").exists(), "the training was told, and waited for"
    assert not (work / "runs/mini-suite/0/base/finished").exists()
    alone = '#!/bin/bash\necho "go on with: freda train --resume x" >&2\n'  # it was told, and the script was not
    program.write_text(alone, encoding="utf-8")
    called(work, "train.sh", fails=True, SEEDS="0")
    program.write_text(PROGRAM, encoding="utf-8")
    assert called(work, "train.sh", SEEDS="0")[0] == ["train", "--resume", "runs/mini-suite/0/base"]


def test_less_of_it(work: Path) -> None:
    found = runs(called(work, "train.sh", SEEDS="7", ONLY="base self-refine", PERCENT="10", TRAIN="train.lr=1e-4"))
    assert {name: (run.train.steps, run.train.lr) for name, run in found.items()} == {
        "7/base": (200, 1e-4),
        "7/self-refine": (80, 1e-4),
    }


def test_the_smoke_run_is_small_and_valid(work: Path) -> None:
    calls = called(work, "train.sh", "--smoke")
    prepared = configs.load(Path(calls[0][1]), settings(calls[0]))
    assert prepared.prepare.tokens <= 100_000
    found = runs(calls)
    assert set(found) == {
        f"0/{name}" for name in ("base", "autoregressive", "block-diffusion", "self-refine", "best-of-n")
    }
    assert all(run.train.steps * run.train.batch_rows <= 20 for run in found.values())
    assert all(run.train.device == "cpu" for run in found.values()) and found["0/base"].model.dim == 32


# -- the card of the shipped model -----------------------------------------------------------------------------------


@pytest.fixture
def shipping(tmp_path: Path) -> dict[str, Path]:
    """A trained run behind its base, the model, results and shards, as ship.sh leaves them."""
    model = write_stand_in(tmp_path)
    for name, init in (("base", ""), ("tuned", "/another/machine/base")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        run = configs.load(CONFIGS / ("base.toml" if not init else "self-refine.toml"), [f"train.init={init}"])
        (tmp_path / "runs" / name / "config.toml").write_text(configs.dump(run), encoding="utf-8")
    for kind, right in (("whole", 0.8125), ("int8", 0.8100)):
        for number, task in enumerate(("mini_math", "mini_code", "mini_logic")):
            found = {
                "n": 2000,
                "accuracy": right - number / 10,
                "standard_error": 0.009,
                "tpf": 3.25,
                "device": "a GPU",
            }
            found |= {"prompts": ["Q: Mia's?\nA:"], "settings": {"passes": 4, "threshold": 0.9}}
            found |= {"groups": {"steps 2": {"accuracy": right, "n": 900}, "steps 3": {"accuracy": 0.5, "n": 1100}}}
            folder = tmp_path / "evals" / kind / task
            folder.mkdir(parents=True)
            (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    manifest = Manifest.read(model / "data")
    (tmp_path / "shards").mkdir()
    replace(manifest, splits={"train": SplitInfo(9, 123_456, [])}).write(tmp_path / "shards")
    shutil.rmtree(model / "data")
    named = {"run": "runs/tuned", "model": "mini", "evals": "evals", "data": "shards", "out": "assets/mini"}
    return {name: tmp_path / path for name, path in named.items()}


def make_card(shipping: dict[str, Path]) -> subprocess.CompletedProcess[str]:
    options = [word for name, path in shipping.items() for word in (f"--{name}", str(path))]
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "card.py"), *options], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_card_says_what_the_files_say(shipping: dict[str, Path]) -> None:
    done = make_card(shipping)
    assert done.returncode == 0, done.stderr
    text = (shipping["out"] / "README.md").read_text(encoding="utf-8")
    assert "| mathematics | 2,000 | 81.0 | 0.9 | 3.25 | 81.2 |" in text and "| logic | 2,000 | 61.0 |" in text
    assert "1. autoregressive: 2,000 steps, 65.5 M tokens" in text and "2. self-refine: 800 steps, 26.2 M" in text
    assert "- code: steps 2 81, steps 3 50" in text, "of the int8 model"
    assert "123,456 tokens" in text and r"$'Q: Mia\'s?\nA:'" in text and "{" not in text
    settings_in(shipping["out"] / "data", "mini_math")  # freda eval finds its questions there
    assert load_model(shipping["out"]).method.name == "self-refine"
    assert make_card(shipping).returncode == 2, "what is there is not replaced"


def test_a_model_that_int8_harms_is_not_shipped(shipping: dict[str, Path]) -> None:
    for task in ("mini_math", "mini_code", "mini_logic"):
        path = shipping["evals"] / "int8" / task / "results.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**found, "accuracy": found["accuracy"] - 0.0026}), encoding="utf-8")
    done = make_card(shipping)
    assert done.returncode == 2 and "int8 costs 0.51 points" in done.stderr and not shipping["out"].exists()


# -- the tables of the page ------------------------------------------------------------------------------------------


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("report")


def test_the_page_is_that_of_the_results(report: ModuleType) -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert set(re.findall("<!-- table (.+) -->", page)) == set(report.TABLES), "every table has its place"
    stale = re.sub("(<!-- table .+ -->\n)(?:.+\n)+?(<!-- end -->)", r"\1stale\n\2", page)
    assert stale != page and report.filled(stale) == page, "run python experiments/mini/report.py"
    assert page.count("stale") == 0 and "TODO" not in page
    for picture in re.findall(r"\]\((images/mini/.+?)\)", page):
        assert (ROOT / "docs" / picture).is_file()


def test_the_numbers_of_the_page_are_those_of_the_points(report: ModuleType) -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    content = json.loads((report.RESULTS / "a.json").read_text(encoding="utf-8"))
    shares: dict[tuple[str, str], list[float]] = {}
    for point in content["points"]:
        shares.setdefault((point["system"], point["task"]), []).append(100 * point["accuracy"])
        assert point["right"].count("1") / point["n"] == pytest.approx(point["accuracy"])
    means = {place: sum(values) / len(values) for place, values in shares.items()}
    seeds = page.partition("<!-- table seeds -->")[2]
    for (system, task), values in shares.items():
        assert len(values) == 3 and f"| {means[system, task]:.2f} ± " in page
        assert all(f"{value:.1f}" in seeds for value in values), (system, task)
    for task in content["tasks"]:
        gain = means["self-refine", task] - means["block-diffusion", task]
        assert f"{gain:+.2f} (" in page.partition("<!-- table differences -->")[2]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for shown in ("autoregressive", "block diffusion", "self-refinement"):
        system = shown.replace(" ", "-").removesuffix("ment")
        numbers = " | ".join(f"{means[system, task]:.1f}" for task in content["tasks"])
        assert f"| {shown} | {numbers} |" in readme
    levels = page.partition("<!-- table levels -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in levels.splitlines()[3:]]
    assert sum(int(row[1]) for row in rows) == 2000
    column = list(content["systems"]).index("self-refine") + 2
    whole = sum(int(row[1]) * float(row[column]) for row in rows) / 2000
    assert whole == pytest.approx(means["self-refine", "mini_logic"], abs=0.05), "the levels are all questions"


def test_groups_of_other_questions_are_refused(report: ModuleType) -> None:
    content = read_sweep(report.RESULTS / "a.json")
    content["checksums"]["self-refine/mini_logic"] = "of another suite"
    with pytest.raises(FredaError, match="mini_logic was asked other questions"):
        report.levels_table(Sweep(content))
