"""Options of decoding are those of the decode config."""

from __future__ import annotations

import dataclasses
import re

import pytest
import typer

from freda.cli import app, run
from freda.cli.app import Stop, decode_options
from freda.decode.config import DecodeConfig

NAMES = {field.name: f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(DecodeConfig)}


def test_every_knob_is_an_option_with_its_default_and_help() -> None:
    found: list[tuple[str, DecodeConfig, list[str]]] = []
    small = typer.Typer(add_completion=False)

    @small.command()
    @decode_options
    def decode(
        name: str,
        how: DecodeConfig = DecodeConfig(passes=7),
        stop: Stop = [],  # noqa: B006
    ) -> None:
        found.append((name, how, stop))

    small(["x"], standalone_mode=False)
    small(["x", "--passes", "2", "--top-p", "0.5", "--select", "gumbel", "--stop", "a"], standalone_mode=False)
    assert found[0] == ("x", DecodeConfig(passes=7), [])
    assert found[1] == ("x", DecodeConfig(passes=2, top_p=0.5, select="gumbel"), ["a"])


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_names_them_all(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    app([command, "--help"], standalone_mode=False)
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for field in dataclasses.fields(DecodeConfig):
        help = field.metadata["help"]
        assert NAMES[field.name] in shown and f"{help[0].upper()}{help[1:]}." in shown, field.name


def test_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["generate", "mini", "x", "--temprature", "1"], ["--temprature", "--temperature"]),
        (["generate", "mini", "x", "--passes", "two"], ["--passes"]),
        (["generate", "mini", "x", "--candidates", "best"], ["'best'", "beam", "sampled"]),
        (["generate", "mini"], ["prompt", "freda generate mini"]),
        (["generate", "mini", "  "], ["prompt", "empty"]),
        (["generate", "How many?", "mini"], ["no model How many?", "mini"]),
        (["generate", "How many? " * 40, "mini"], ["mini"]),
        (["chat"], ["model", "freda chat mini"]),
        (["chat", "mini", "--system", "Be brief."], ["--system"]),
    ):
        assert run(arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and all(word in said for word in words), said
