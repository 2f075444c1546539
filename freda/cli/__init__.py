"""The command line: parse, call, print. Answers go to stdout, everything else to stderr.

Nothing heavy is imported at module level, so that `freda --help` answers at once; every command imports what it needs.
Only `main` ends the process.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Any, NoReturn

import typer

from freda.cli.app import app
from freda.errors import AgreedError, FredaError

# Each module adds its commands to the app; `--help` lists them in this order.
from freda.cli import train  # isort: skip
from freda.cli import decode  # isort: skip
from freda.cli import folders  # isort: skip
from freda.cli import evaluate  # isort: skip
from freda.cli import bench  # isort: skip

__all__ = ["app", "bench", "decode", "evaluate", "folders", "main", "run", "train"]

# Typer carries a click of its own or uses the package, by version; either way this is its error for wrong usage.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> NoReturn:
    """Run the command line; the only exit of the program."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1  # accepted anywhere on the line
    sys.exit(run(arguments, debug=debug))


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Carry out one command line; returns the exit code."""
    logging.getLogger("freda").setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        code = app(args=arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", 130)
    except (FredaError, UsageError) as error:
        if debug:
            traceback.print_exc()
        told_by_first = isinstance(error, AgreedError | UsageError) and os.environ.get("RANK", "0") != "0"
        return 2 if told_by_first else _complain(_usage(error), 2)
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a missing permission: the user's to fix, wherever it was met
        if debug:
            traceback.print_exc()
        return _complain(f"{error.strerror or error}: {error.filename or 'while writing'}", 2)


def _usage(error: Exception) -> str:
    """What an error says; one of wrong usage with the nearest option, or, where something is missing, an example."""
    if not isinstance(error, UsageError):
        return str(error)
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command", None)
    example = (getattr(command, "epilog", None) or "").split("**")[1:2]
    return f"{message}; for example: {example[0]}" if "Missing" in message and example else message


def _complain(problem: Any, code: int) -> int:
    message = " ".join(str(problem).split())
    print(f"freda: error: {message}", file=sys.stderr)
    return code
