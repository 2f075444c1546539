"""The command line itself: how it is run, how it fails, and the options that several commands share.

Nothing heavy is imported here or at module level of the commands, so that `freda --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer import Argument, Option

from freda import __version__
from freda.decode.config import DecodeConfig
from freda.errors import AgreedError, FredaError

# Typer carries a click of its own or uses the package, by version; either way this is its error for wrong usage.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

LONGEST = 2000  # characters of an error; a path or a value in it may be longer
NO_MEMORY = re.compile("allocate memory|out of memory|bad allocation|Storage size calculation overflowed")
ModelPath = Annotated[Path, Argument(help="A model folder, a run folder, or the name of a bundled model.")]
Adapter = Annotated[Path | None, Option(help="An adapter over the model: its folder, or that of its run.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, Option(help="Precision of the weights: float32, bfloat16, float16, or auto: bfloat16 on a GPU.")]
Method = Annotated[str | None, Option(help="How to decode: NAME, or NAME:KEY=VALUE,...; a wrong name lists them.")]
Stop = Annotated[list[str], Option(help="A string that ends the answer; may be repeated.")]
Settings = Annotated[list[str], Option("--set", metavar="SECTION.KEY=VALUE", help="Override one config value.")]

app = typer.Typer(
    name="freda",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Language models that draft a block of tokens, look at their own draft, and refine it.",
    epilog="Start with **freda chat mini**, a bundled model, and **freda demo**, which trains four small ones and "
    "shows one refining its drafts, in a few minutes on two cores.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"freda {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


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
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 0
    except (FredaError, UsageError, OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, FredaError | UsageError | OSError) and not _is_memory(error):
            raise
        if debug:
            traceback.print_exc()
        told_by_first = isinstance(error, AgreedError | UsageError) and os.environ.get("RANK", "0") != "0"
        return 2 if told_by_first else _complain(_message(error), 2)


def _message(error: Exception) -> str:
    """What an error says; one of wrong usage with the nearest option, or, where something is missing, an example."""
    if _is_memory(error):
        return f"there is not enough memory ({str(error).partition(chr(10))[0][:200] or 'none is left'}); ask for less"
    if isinstance(error, OSError):  # a full disk, a missing permission: the user's to fix, wherever it was met
        return f"{error.strerror or error}: {error.filename or 'while writing'}"
    if not isinstance(error, UsageError):
        return str(error)
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command", None)
    example = (getattr(command, "epilog", None) or "").split("**")[1:2]
    return f"{message}; for example: {example[0]}" if "Missing" in message and example else message


def _is_memory(error: Exception) -> bool:
    """Whether memory could not be had; torch says so by a RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None
    )


def _complain(problem: str, code: int) -> int:
    line = " ".join(problem.split())
    print(f"freda: error: {line if len(line) <= LONGEST else line[:LONGEST] + ' ...'}", file=sys.stderr)
    return code


def decode_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of its `DecodeConfig` parameter, with the field's help and type, and the
    value in the parameter's default."""
    signature = inspect.signature(function, eval_str=True)
    taken = next(one for one in signature.parameters.values() if isinstance(one.default, DecodeConfig))
    kind, made = type(taken.default), list(_options_of(taken.default))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        decode = kind(**{option.name: values.pop(option.name) for option in made})
        function(**values, **{taken.name: decode})

    parameters = [new for one in signature.parameters.values() for new in (made if one is taken else [one])]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _options_of(defaults: DecodeConfig) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(type(defaults))
    for field in dataclasses.fields(defaults):
        hint, metavar = hints[field.name], None
        if typing.get_origin(hint) is Literal:  # the config checks it, and says what is wrong
            hint, metavar = str, "|".join(typing.get_args(hint))
        help = field.metadata["help"]
        option = Option(help=f"{help[0].upper()}{help[1:]}.", metavar=metavar)
        default, kind = getattr(defaults, field.name), inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter(field.name, kind, default=default, annotation=Annotated[hint, option])
