"""Writes `docs/config.md` from the help texts of the config classes: `python docs/write_config.py`."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from freda.data.config import PrepareFile
from freda.decode.config import DecodeConfig, EngineConfig
from freda.eval.config import SweepFile
from freda.methods import METHODS
from freda.methods.method import Method
from freda.sections import NAMED, section_kind, toml_value
from freda.train.config import RunConfig

PAGE = Path(__file__).parent / "config.md"
HEAD = """# Config reference

You want to look up a setting. Config files are TOML; `--set section.key=value` overrides a value of a file on the
command line. This page is made by `python docs/write_config.py`; do not edit it by hand."""


def reference() -> str:
    """The whole page."""
    lines = [HEAD, "", "# `freda train`", *reference_lines(RunConfig)]
    lines += ["", "# `freda generate`, `chat`, `eval`", "", "Options on the command line, keyword arguments in Python."]
    lines += ["", "## A request", *key_lines(DecodeConfig)]
    for name, kind in METHODS.items():
        if not kind.trains:  # what is stored belongs to the model
            lines += ["", f"## `--method {name}:KEY=VALUE,...`", *key_lines(kind, stored=False)]
    lines += ["", "## The engine: keyword arguments of `freda.load`", *key_lines(EngineConfig)]
    lines += ["", "# `freda prepare`", *reference_lines(PrepareFile)]
    lines += ["", "# `freda sweep`", *reference_lines(SweepFile)]
    return "\n".join(lines) + "\n"


def reference_lines(kind: type) -> list[str]:
    """Documentation in Markdown: for every section of a dataclass its docstring and a table of its keys."""
    lines = []
    for name, hint in typing.get_type_hints(kind).items():
        section = typing.get_args(hint)[1] if name in NAMED else section_kind(hint)
        methods = [(name, kind) for name, kind in METHODS.items() if kind.trains]
        for title, one in methods if section is Method else [("", section)]:
            named = f'`[method]` with `name = "{title}"`: ' if title else ""
            lines += ["", f"## {named}{(one.__doc__ or '').strip()}", *key_lines(one)]
    return lines


def key_lines(section: type, *, stored: bool = True) -> list[str]:
    """A table in Markdown of the keys of one section, with or without those that model folders store."""
    lines = ["", "| key | default | meaning |", "|---|---|---|"]
    shown = [field for field in dataclasses.fields(section) if field.init]
    for field in (field for field in shown if stored or not field.metadata.get("stored")):
        default = "none" if field.default is None else toml_value(field.default)
        lines.append(f"| `{field.name}` | `{default}` | {field.metadata['help']} |")
    return lines


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
