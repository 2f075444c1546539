"""The documents: what is made from code and results is current, and what they name exists."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from freda import __version__
from freda.cli import app
from freda.data.config import load_prepare
from freda.eval.config import load_sweep
from freda.train.config import load

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_config_page_is_current() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "write_config.py"))
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == module["reference"](), "run: make format"


def test_the_mask_pictures_are_current() -> None:
    pictures = runpy.run_path(str(ROOT / "docs" / "draw_masks.py"))["pictures"]()
    assert len(pictures) == 3
    for path, picture in pictures.items():
        assert path.read_text(encoding="utf-8") == picture, "run: make format"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_functions_named_in_links_exist(page: Path) -> None:
    for name, target in re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", page.read_text(encoding="utf-8")):
        source = (page.parent / target).read_text(encoding="utf-8")
        last = name.rsplit(".", 1)[-1]
        assert last == "py" or re.search(rf"(def|class) {last}\b", source), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_parse(page: Path) -> None:
    """Every `freda ...` line of a code block names a command and options that exist."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for block in re.findall(r"```(?:sh|bash)?\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for line in re.findall(r"^(?:\$ )?freda (.*)$", block, re.M):
            words = shlex.split(line, comments=True)
            assert words[0] in commands or words[0].startswith("-"), line
            command = commands[words[0]]
            command = getattr(command, "commands", {}).get(words[1], command) if len(words) > 1 else command
            known = {flag for option in command.params for flag in option.opts}
            assert all(word in known for word in words if word.startswith("--")), line


def test_the_file_list_is_complete() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = text[text.index("## The files") :]
    for file in sorted((ROOT / "freda").rglob("*.py")):
        if file.name != "__init__.py":
            assert f"`{file.name}`" in listed, f"{file.relative_to(ROOT)} is not in the list of docs/architecture.md"


def test_stale_numbers_are_replaced() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "write_numbers.py"))
    page = "7 before\n<!-- numbers: speed -->\nstale\n| 1 |\n<!-- end -->\n8 after\n"
    assert module["filled"](page, {"speed": lambda: "| 2 |"}) == (
        "7 before\n<!-- numbers: speed -->\n| 2 |\n<!-- end -->\n8 after\n"
    )


def test_tables_of_speed_hold_what_was_measured() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "write_numbers.py"))
    train, decode = (
        json.loads((ROOT / "results" / f"bench-{name}-h200.json").read_text(encoding="utf-8"))
        for name in ("train", "decode")
    )
    for row in train["steps"]:
        cells = (f"{1e3 * row['seconds']:,.1f}", f"{row['tokens_per_s']:,.0f}", f"{100 * row['share']:.1f}%")
        assert f" | {' | '.join(cells)} |" in module["BLOCKS"]["training/steps"]()
    assert module["BLOCKS"]["training/compare"]().count("out of memory") == sum("error" in r for r in train["compare"])
    for run in decode["runs"][:-1]:
        for row in run["rows"]:
            cells = (f"{1e3 * row['seconds_per_forward']:.2f}", f"{100 * row['weights_share_of_copy']:.1f}%")
            assert f" | {' | '.join(cells)} | {row['tokens_per_s']:,.0f} |" in module["BLOCKS"]["decoding/speed"]()


def test_decisions_cited_in_the_code_are_written_down() -> None:
    known = set(re.findall(r"^\| (M\d+) \|", (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8"), re.M))
    for file in sorted((ROOT / "freda").rglob("*.py")):
        cited = set(re.findall(r"\bM\d{1,2}\b", file.read_text(encoding="utf-8")))
        assert cited <= known, f"{file.name} cites {cited - known}"


def test_versions_agree() -> None:
    headings = re.findall(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    released = next(version for version, mark in headings if "unreleased" not in mark)
    assert __version__ in (headings[0][0], released)


def test_configs_are_valid() -> None:
    found = sorted((ROOT / "configs").rglob("*.toml"))
    assert found
    for file in found:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        read = load_sweep if "sweep" in values else load if "train" in values else load_prepare
        read(file)
