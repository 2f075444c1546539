"""The small-scale experiments: what the shell scripts ask for, recorded by a program in freda's place.

`make smoke` runs them with freda itself.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from freda.data import mini
from freda.data.config import load_prepare
from freda.data.mini import settings_in
from freda.data.shards import Manifest, SplitInfo
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError
from freda.eval.config import load_sweep
from freda.eval.report.points import Sweep, read_sweep
from freda.folders.model_folder import load_model
from freda.train import config as configs
from freda.train.config import RunConfig
from tests.helpers import method, write_stand_in

ROOT = Path(__file__).parent.parent
SCRIPTS, CONFIGS = ROOT / "experiments" / "mini", ROOT / "configs" / "mini"
CLAIMS = ("a", "b", "c", "d", "e", "f", "compute")
LAYOUT_CLAIMS = ("layouts", "layouts-compute", "parts", "blocks", "speed", "scorer")
TRAININGS = ("train.sh", "compute.sh", "ablations.sh", "layouts.sh")

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


def runs(calls: Sequence[Sequence[str]]) -> dict[str, RunConfig]:
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
    changed = {
        name.removeprefix("5/"): {
            key: value for key, value in vars(run.method).items() if value != getattr(method(run.method.name), key)
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
    one, *others = (replace(run, method=method()) for run in found.values() if run.method.name != "best-of-n")
    assert all(other == one for other in others)


def test_sweeps_name_what_the_scripts_train(work: Path) -> None:
    calls = [call for script in TRAININGS for call in called(work, script)]
    trained = {f"runs/mini-suite/{name}" for name in runs(calls)}
    named = set()
    for claim in (*CLAIMS, *LAYOUT_CLAIMS):
        for name, system in load_sweep(CONFIGS / f"sweep-{claim}.toml").system.items():
            assert system.models == tuple(f"runs/mini-suite/{seed}/{name}" for seed in range(3))
            named |= set(system.models)
    assert named == trained


def test_layouts_differ_by_their_settings_alone(work: Path) -> None:
    called(work, "train.sh")
    found = runs(called(work, "layouts.sh", SEEDS="5"))
    changed = {
        name.removeprefix("5/"): {
            key: value for key, value in vars(run.method).items() if value != getattr(method(run.method.name), key)
        }
        for name, run in found.items()
    }
    shifted = {"layout": "shifted", "ar_weight": 0.5}
    strong = {"noise_min": 0.3}
    expected: dict[str, dict[str, object]] = {
        "every-level": {},
        "shifted-every-level": shifted,
        "only-shifted": {"layout": "shifted", "context": "block"},
        "only-causal": {"context": "causal"},
        "shifted-hard": {**shifted, "feedback": "hard"},
        "shifted-block-diffusion-compute": {**shifted, **strong},
        "shifted-best-of-n": {"layout": "shifted"},
        "shifted-best-of-n-of-8": {"layout": "shifted", "block_size": 8},
        "shifted-best-of-n-hard": {"layout": "shifted", "feedback": "hard"},
    }
    for name, more in (("self-refine", {}), ("block-diffusion", strong)):
        expected |= {f"shifted-{name}": {**shifted, **more}, f"shifted-{name}-no-ar": {"layout": "shifted", **more}}
        expected |= {f"shifted-{name}-taught": {**shifted, "teacher": "clean", **more}}
        for size in (8, 16):
            expected[f"{name}-of-{size}"] = {"block_size": size, **more}
            expected[f"shifted-{name}-of-{size}"] = {**shifted, "block_size": size, **more}
    assert changed == expected
    base = configs.load(CONFIGS / "self-refine.toml", ["train.seed=5", "train.init=runs/mini-suite/5/base"])
    for name, run in found.items():
        if "best-of-n" not in name and "compute" not in name:
            assert replace(run, method=base.method) == base, f"{name}: same base, rows, order, optimizer and steps"


def test_one_command_trains_and_measures_a_claim(work: Path) -> None:
    calls = called(work, "claim.sh", "layouts", SEEDS="3")
    names = {name.removeprefix("3/") for name in runs(calls)}
    assert {"base", "every-level", "shifted-best-of-n", "shifted-self-refine"} <= names and "only-causal" not in names
    assert calls[0][0] == "prepare" and calls[-1][0] == "sweep" and (work / "results/mini/layouts.json").is_file()
    file = load_sweep(Path(calls[-1][1]), settings(calls[-1]))
    for system in file.system.values():
        assert {model.removeprefix("runs/mini-suite/3/") for model in system.models} <= names, "all of it is trained"
    assert called(work, "claim.sh", "nothing", fails=True) == []
    small = runs(called(work, "claim.sh", "parts", "--smoke", SEEDS="4"))
    assert all(run.train.steps <= 5 and run.train.device == "cpu" for run in small.values()) and len(small) == 11


def test_sweeps_follow_the_seeds(work: Path) -> None:
    (call,) = called(work, "sweep.sh", "b", SEEDS="3 4")
    file = load_sweep(Path(call[1]), settings(call))
    assert file.system["self-refine"].models == ("runs/mini-suite/3/self-refine", "runs/mini-suite/4/self-refine")
    assert (work / "results" / "mini" / "b.json").is_file()
    assert settings(called(work, "sweep.sh", "a")[0]) == []
    assert {call[1] for call in called(work, "sweep.sh")} == {str(CONFIGS / f"sweep-{c}.toml") for c in CLAIMS[2:]}


def test_finished_trainings_are_not_repeated_and_stopped_ones_are_resumed(work: Path) -> None:
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
    """freda exits with 0 after SIGTERM. The script waits for it, marks nothing, and resumes it the next time."""
    program = work / "freda"
    waits = """#!/bin/bash
[ "$1" = prepare ] && { mkdir -p "$3"; touch "$3/manifest.json"; exit; }
trap 'sleep 0.5; echo saved >"$WORK/saved"; echo "resume with: freda train --resume x" >&2; exit 0' TERM
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
    alone = '#!/bin/bash\necho "resume with: freda train --resume x" >&2\n'  # it was told, and the script was not
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
    prepared = load_prepare(Path(calls[0][1]), settings(calls[0]))
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
        config = CONFIGS / ("base.toml" if not init else "self-refine.toml")
        run = configs.load(config, [f"train.init={init}", "train.seed=7"])
        (tmp_path / "runs" / name / "config.toml").write_text(configs.dump(run), encoding="utf-8")
    for kind, right in (("whole", 0.8180), ("int8", 0.8140)):
        for number, task in enumerate(("mini_math", "mini_code", "mini_logic")):
            found = {
                "n": 2000,
                "accuracy": right - number / 10,
                "standard_error": 0.009,
                "tpf": 3.25,
                "device": "a GPU",
                "dtype": "of a kind",
            }
            found |= {"prompts": ["Q: Mia's?\nA:"], "settings": {"passes": 4, "threshold": 0.9}}
            found |= {
                "groups": {f"{family} {n}": {"accuracy": right - n / 10} for family in ("a", "b") for n in (2, 3)}
            }
            folder = tmp_path / "evals" / kind / task
            folder.mkdir(parents=True)
            (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    manifest = Manifest.read(model / "data")
    (tmp_path / "shards").mkdir()
    replace(manifest, splits={"train": SplitInfo(9, 123_456, [])}).write(tmp_path / "shards")
    shutil.rmtree(model / "data")
    named = {"run": "runs/tuned", "model": "mini", "evals": "evals", "data": "shards", "out": "assets/mini"}
    return {name: tmp_path / path for name, path in named.items()}


def make_card(shipping: dict[str, Path], *more: str) -> int:
    """Run card.py as a program; returns its exit status."""
    options = [*more, *(word for name, path in shipping.items() for word in (f"--{name}", str(path)))]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["card.py", *options])
        runpy.run_path(str(SCRIPTS / "card.py"), run_name="__main__")
    return int(left.value.code or 0)


def test_the_card_says_what_the_files_say(shipping: dict[str, Path]) -> None:
    assert make_card(shipping) == 0
    text = (shipping["out"] / "README.md").read_text(encoding="utf-8")
    assert "| mathematics | 2,000 | 81.4 | 0.9 | 3.25 | 81.8 |" in text and "| logic | 2,000 | 61.4 |" in text
    assert "1. autoregressive: 2,000 steps, 65.5 M tokens" in text and "2. self-refine: 800 steps, 26.2 M" in text
    assert "| code, a | 2: 61, 3: 51 |\n| code, b | 2: 61, 3: 51 |\n| logic, a |" in text, "of the int8 model"
    assert "REPLACE=1 experiments/mini/ship.sh tuned 7\n" in text and "SEEDS=7 " in text and "on a GPU:" in text
    assert "of a kind" in text and "123,456 tokens" in text and '"Q: Mia\'s?" --show-drafts' in text and "{" not in text
    settings_in(shipping["out"] / "data", "mini_math")  # freda eval finds its questions there
    assert load_model(shipping["out"]).method.name == "self-refine"
    assert make_card(shipping) == 2, "what is there is not replaced"
    (shipping["out"] / "README.md").write_text("older", encoding="utf-8")
    assert make_card(shipping, "--replace") == 0
    assert (shipping["out"] / "README.md").read_text(encoding="utf-8") == text
    assert [path.name for path in shipping["out"].parent.iterdir()] == ["mini"]


def test_a_model_that_is_there_stops_shipping_before_the_work(work: Path) -> None:
    assets = work / "assets"
    (assets / "mini").mkdir(parents=True)
    assert called(work, "ship.sh", "best-of-n", "0", fails=True, ASSETS=str(assets)) == []
    over = called(
        work, "ship.sh", "best-of-n", "0", fails=True, ASSETS=str(assets), REPLACE="1"
    )  # there is no card of it
    assert {call[0] for call in over} == {"convert", "eval"}


def test_a_model_that_int8_harms_is_not_shipped(shipping: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("mini_math", "mini_code", "mini_logic"):
        path = shipping["evals"] / "int8" / task / "results.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**found, "accuracy": found["accuracy"] - 0.0011}), encoding="utf-8")
    assert make_card(shipping) == 2 and not shipping["out"].exists()
    assert "int8 costs 0.51 points" in capsys.readouterr().err


# -- the tables of the page ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions_once() -> Iterator[None]:
    """The held-out questions of the bundled model, which take seconds to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini, "questions", cache(mini.questions))
        yield


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, questions_once: None) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("report")


def rights(claim: str) -> dict[tuple[str, str, int], list[str]]:
    """By system, task and passes, which questions each seed has right; of a threshold of 0.9 alone."""
    content = json.loads((ROOT / "results" / "mini" / f"{claim}.json").read_text(encoding="utf-8"))
    found: dict[tuple[str, str, int], list[str]] = {}
    for point in content["points"]:
        if point["setting"]["threshold"] == 0.9:
            found.setdefault((point["system"], point["task"], point["setting"]["passes"]), []).append(point["right"])
    return found


def percent(right: str) -> float:
    return 100 * (right.count("1") / len(right))  # as the page rounds it


def test_the_main_numbers_are_those_of_the_points(report: ModuleType) -> None:
    shares = {(system, task): [percent(one) for one in seeds] for (system, task, _), seeds in rights("a").items()}
    tasks = ("mini_math", "mini_code", "mini_logic")
    means = {place: sum(seeds) / 3 for place, seeds in shares.items()}
    for system in {system for system, _ in shares}:
        seeds = [[shares[system, task][seed] for task in tasks] for seed in range(3)]
        cells = (" / ".join(f"{share:.1f}" for share in (*one, sum(one) / 3)) for one in seeds)
        assert f"| {system} | {' | '.join(cells)} |" in report.block("seeds")
    for system in ("autoregressive", "block-diffusion", "self-refine"):
        numbers = " | ".join(f"{means[system, task]:.1f}" for task in tasks)
        assert f"| {system} | {numbers} |" in report.block("readme")
    gains = {
        task: [one - two for one, two in zip(shares["self-refine", task], shares["block-diffusion", task], strict=True)]
        for task in tasks
    }
    first = report.block("claims").splitlines()[2]
    for gain in gains.values():
        assert all(f"{number:+.2f}" in first for number in (sum(gain) / 3, min(gain), max(gain)))
    assert f"{sum(map(sum, gains.values())) / 9:+.2f} |" in first


@pytest.mark.slow
def test_groups_and_ablations_are_those_of_the_points(report: ModuleType) -> None:
    tokenizer, found = Tokenizer.load(report.SHIPPED), rights("a")
    logic, sums = (report.questions(name) for name in ("mini_logic", "mini_math"))
    third = [place for place, example in enumerate(logic) if example.group == "walk 3"]
    given = [place for place, example in enumerate(sums) if len(tokenizer.encode(example.prompt)) % 4 == 2]
    systems = ("base", "autoregressive", "block-diffusion", "self-refine", "best-of-n")
    for table, name, task, places in (
        ("levels", "walk, 3", "mini_logic", third),
        ("given", "mathematics, 2", "mini_math", given),
    ):
        passes = {system: next(k for one, asked, k in found if (one, asked) == (system, task)) for system in systems}
        picked = ("".join(seed[p] for seed in found[s, task, passes[s]] for p in places) for s in systems)
        assert f"| {name} | {len(places)} | {' | '.join(f'{percent(one):.1f}' for one in picked)} |" in report.block(
            table
        )
    ablated = {place: percent(seeds[0]) for place, seeds in rights("e").items()}
    by_passes = {
        task: " / ".join(f"{ablated['passes-1', task, passes]:.1f}" for passes in (1, 2, 4))
        for task in ("mini_math", "mini_code")
    }
    last = f"{ablated['passes-1', 'mini_logic', 4]:.1f}"
    row = next(line for line in report.block("ablations").splitlines() if line.startswith("| passes-1 |"))
    assert row.startswith(f"| passes-1 | {by_passes['mini_math']} | {by_passes['mini_code']} | {last} |")
    lost = sum(ablated["passes-1", task, 4] - ablated["reference", task, 4] for task in by_passes) / 2
    assert row.split(" | ")[-2].startswith(f"{lost:+.2f} ("), "what is generated, then logic"
    assert f"{lost:+.2f} (" in report.block("claims").splitlines()[-1]


def test_the_longest_walks_are_those_of_the_points(report: ModuleType) -> None:
    logic = report.questions("mini_logic")
    row = next(line for line in report.block("walks").splitlines() if line.startswith("| 800 |"))
    for column, system in ((2, "block-diffusion"), (3, "self-refine")):
        ((_, seeds),) = (item for item in rights("a").items() if item[0][:2] == (system, "mini_logic"))
        for shown, right in zip(row.split("|")[column].split(","), seeds, strict=True):
            levels = [
                percent("".join(one for one, e in zip(right, logic, strict=True) if e.group == f"walk {level}")) >= 95
                for level in range(1, 9)
            ]
            assert int(shown) == (levels.index(False) if False in levels else 8)


def test_speed_ups_compare_settings_of_matched_accuracy(report: ModuleType) -> None:
    """One task, one system, worked out from the points: against thresholds, and against fixed schedules alone."""
    sweep = report.sweep_of("c")
    for table, fixed_only in (("speed-up", False), ("fixed-schedules", True)):
        means: dict[str, list[tuple[float, float]]] = {"block-diffusion": [], "self-refine": []}
        for system, scores in means.items():
            by_setting: dict[object, list[tuple[float, float]]] = {}
            for point in sweep.points:
                skipped = fixed_only and system == "block-diffusion" and point.setting.threshold <= 1
                if (point.system, point.task) == (system, "mini_math") and not skipped:
                    by_setting.setdefault(point.setting, []).append((100 * point.accuracy, point.tpf))
            scores += [(sum(a for a, _ in s) / 3, sum(t for _, t in s) / 3) for s in by_setting.values()]
        wanted = max(accuracy for accuracy, _ in means["block-diffusion"]) - 0.5
        slow, fast = (max(tpf for accuracy, tpf in scores if accuracy >= wanted) for scores in means.values())
        row = next(line for line in report.block(table).splitlines() if line.startswith("| self-refine |"))
        assert row.split(" | ")[1] == f"{fast / slow:.2f}"


def test_what_models_write_is_shown_as_it_was_measured(report: ModuleType) -> None:
    found = json.loads((report.RESULTS / "written.json").read_text(encoding="utf-8"))["right"]
    numbers = (f"{100 * found['self-refine'][passes]:.1f}" for passes in "124")
    assert f"| self-refine | {' | '.join(numbers)} |" in report.block("written")
    assert f"| base | {100 * found['base']['1']:.1f} | – | – |" in report.block("written")


def test_the_figures_are_those_of_the_results(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw(tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in report.IMAGES.iterdir()}


def test_groups_of_other_questions_are_refused(report: ModuleType) -> None:
    content = read_sweep(report.RESULTS / "a.json")
    content["checksums"]["self-refine/mini_logic"] = "of another suite"
    with pytest.raises(FredaError, match="mini_logic was asked other questions"):
        report.levels_table(Sweep(content))


def test_the_numbers_of_the_pages_are_those_of_the_results(questions_once: None) -> None:
    module = runpy.run_path(str(ROOT / "docs" / "write_numbers.py"))
    known, marked = module["blocks"](), []
    for page in module["PAGES"]:
        text = page.read_text(encoding="utf-8")
        marked += [found[2] for found in module["MARKED"].finditer(text)]
        assert text.count("<!-- numbers: ") == text.count("<!-- end -->") == len(module["MARKED"].findall(text))
        assert module["filled"](text, known) == text, f"{page.name} is out of date; run: make format"
    assert sorted(marked) == sorted(set(marked)), "a block stands in one place"
    assert set(marked) == set(known), "every block has its place"
