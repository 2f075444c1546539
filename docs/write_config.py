"""Writes `docs/config.md` from the help texts of the config classes: `python docs/write_config.py`."""

from __future__ import annotations

from pathlib import Path

from freda.data.config import PrepareFile
from freda.decode.config import DecodeConfig, EngineConfig
from freda.eval.config import SweepFile
from freda.sections import key_lines, reference_lines
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
    lines += ["", "## The engine: keyword arguments of `freda.load`", *key_lines(EngineConfig)]
    lines += ["", "# `freda prepare`", *reference_lines(PrepareFile)]
    lines += ["", "# `freda sweep`", *reference_lines(SweepFile)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
