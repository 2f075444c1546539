"""The package as it is installed and imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "3000"), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "1000"}, "1000")],
)
def test_threads_spin_briefly_unless_the_user_says_otherwise(given: dict[str, str], policy: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import sys, freda, os; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == policy


def test_users_get_the_types() -> None:
    assert (ROOT / "freda" / "py.typed").is_file()


def test_every_extra_is_used() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras) == {"gguf", "data", "eval", "harness", "plot", "track", "dev"}


def commands(target: str) -> str:
    """What make would run in a fresh clone."""
    done = subprocess.run(["make", "-nB", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_demo_installs_the_package_alone_and_the_tests_what_they_need() -> None:
    assert "locks/dev.txt" not in commands("demo") and "-e ." in commands("demo") and "freda demo" in commands("demo")
    assert "locks/dev.txt" in commands("test") and "--numprocesses 2" in commands("test")
    assert all("--quiet" not in commands(target) for target in ("demo", "test")), "minutes without a word"


# -- what make installs ----------------------------------------------------------------------------------------------


def locked(file: str) -> dict[str, tuple[str, int]]:
    """Versions, and numbers of hashes, by package."""
    text = (ROOT / "locks" / file).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if "==" in line]
    return {words[0].split("==")[0]: (words[0].split("==")[1], line_hashes(words)) for words in lines}


def line_hashes(words: list[str]) -> int:
    return len([word for word in words if re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word)])


def test_locks_have_hashes_and_the_versions_of_the_constraints() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    package, dev = locked("package.txt"), locked("dev.txt")
    assert all(count for _, count in (*package.values(), *dev.values()))
    assert {name: dev[name][0] for name in pins if name != "torch"} == {n: v for n, v in pins.items() if n != "torch"}
    assert package.items() <= dev.items() and "torch" not in dev
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["requires"] == [f"hatchling=={package['hatchling'][0]}"]
    wanted = {re.match(r"[\w-]+", one)[0].lower().replace("_", "-") for one in project["project"]["dependencies"]}  # type: ignore[index]
    assert wanted - {"torch"} <= package.keys()


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    for name in {re.match(r"[\w-]+", one)[0] for one in asked}:  # type: ignore[index]
        assert re.search(rf"^\|[^|]*\b{name}\b", page, re.MULTILINE), f"{name} is not in docs/dependencies.md"
