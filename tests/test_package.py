"""The package as it is installed and imported."""

from __future__ import annotations

import os
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
    assert "dev" not in commands("demo") and "-e ." in commands("demo") and "freda demo" in commands("demo")
    assert ".[dev]" in commands("test") and "--numprocesses 2" in commands("test")
    assert all("--quiet" not in commands(target) for target in ("demo", "test")), "minutes without a word"
