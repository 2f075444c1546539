"""The command line itself: what all commands have in common. Nothing heavy is imported here or beside it."""

from __future__ import annotations

from typing import Annotated

import typer

from freda import __version__

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
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
