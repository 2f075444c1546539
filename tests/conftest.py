"""The order of the tests, and where fixtures are: the process that deals out tests to others needs no torch."""

from __future__ import annotations

import gc

import pytest

LONGEST = [
    "test_parallel",
    "test_mini",
    "test_packed",
    "test_setup",
    "test_experiments",
    "test_likelihood",
    "test_train",
]


def pytest_configure(config: pytest.Config) -> None:
    """Load `tests/fixtures.py` where tests run."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files begin, so that of two processes none is left with one of them at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Imported modules are not looked through for garbage again and again: torch alone has a million objects."""
    gc.collect()
    gc.freeze()
