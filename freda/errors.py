"""The one exception a user is meant to read.

`FredaError` is a mistake the user can fix: it says what is wrong, the value that was seen, and what to do. The command
line prints it as one line and exits with code 2. Everything else that can go wrong is a bug and keeps its traceback.
"""

import importlib
import shutil
import sys
import textwrap
from typing import Any


class FredaError(Exception):
    """A mistake the user can fix."""


class AgreedError(FredaError):
    """One that all processes of a training run raise together; the first of them prints it."""


def missing_package(package: str, extra: str) -> FredaError:
    """The error for an optional dependency that is not installed."""
    return FredaError(f"this needs the package '{package}', which is not installed; run: pip install 'freda[{extra}]'")


def optional(module: str, extra: str) -> Any:
    """A module of an optional dependency, imported."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_package(module.partition(".")[0], extra) from None


def require(condition: bool, message: str) -> None:
    """Reject a value the user can fix."""
    if not condition:
        raise FredaError(message)


def note(message: str) -> None:
    """Tell the person who watches something on stderr; a terminal's lines are broken between words."""
    lines = f"freda: {message}".splitlines()
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines]
    print("\n".join(lines), file=sys.stderr)
