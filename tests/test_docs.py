"""The documents: what is made from the code is current, what they name exists."""

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


def test_the_mask_picture_is_current() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "draw_masks.py"))
    assert (ROOT / "docs" / "images" / "masks.svg").read_text(encoding="utf-8") == module["draw"](), "run: make format"


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


def test_the_file_tree_of_the_readme_is_complete() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text[text.index("## The files") :]
    for file in sorted((ROOT / "freda").rglob("*.py")):
        if file.name != "__init__.py":
            assert file.name in tree, f"{file.relative_to(ROOT)} is not in the README's file tree"


def test_the_training_page_has_the_numbers_of_its_file() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "results" / "bench-train-h200.json").read_text(encoding="utf-8"))
    for row in found["steps"]:
        name, time = f"{row['passes']} pass{'es' * (row['passes'] > 1)}", f"{1e3 * row['seconds']:,.1f}"
        assert f"| {name} | {time} | {row['tokens_per_s']:,.0f} | {100 * row['share']:.1f}% |" in page
    for row in found["compare"]:
        shown = "out of memory" if "error" in row else f"{1e3 * row['seconds']:,.1f}"
        assert f"| {shown} | " in page or f"({shown} ms, {100 * row['share']:.1f}%)" in page
    kinds, kernels = found["profile"]["kinds_ms"], {row["name"]: row["ms"] for row in found["profile"]["kernels"]}
    assert all(f"| {ms:.0f} |\n" in page for ms in kinds.values()) and f"{sum(kinds.values()):.0f} ms of them" in page
    backward, forward = (next(ms for name, ms in kernels.items() if part in name) for part in ("bprop", "fprop"))
    added = kernels["_merge"] + kernels["_gradients"]
    assert f"cuDNN backward {backward:.0f}, forward {forward:.0f}; what a block adds {added:.0f};" in page


def test_the_decoding_page_has_the_numbers_of_its_file() -> None:
    page = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "results" / "bench-decode-h200.json").read_text(encoding="utf-8"))
    *runs, compared = found["runs"]
    for row in (row for run in runs for row in run["rows"]):
        cells = [row["what"].removeprefix("engine with kernels and graphs, "), row["batch"], f"{row['context']:,}"]
        cells += [f"{1e3 * row['seconds_per_forward']:.2f}", f"{100 * row['weights_share_of_copy']:.1f}%"]
        cells += [f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_with_prefill", "prefill_tokens_per_s")]
        assert f"| {' | '.join(map(str, cells))} | {100 * row['prefill_share_of_matmul']:.1f}% |" in page
        times = {kernel["name"]: f"{kernel['us']:,.0f}" for kernel in row.get("kernels", [])}
        if times and row["batch"] == 1 and "self-refine" in row["what"]:
            assert f"| {times['_skinny']} | {times['_attend_parts']} | {times['_scan']} |" in page
    for row in compared["rows"]:
        speeds = [f"{row[key]:,.0f}" if key in row else "–" for key in ("tokens_per_s", "tokens_per_s_with_prefill")]
        what = row["what"].replace("engine with kernels and graphs", "engine")
        assert f"| {what} | {row['batch']} | {' | '.join(speeds)} |" in page


def test_decisions_cited_in_the_code_are_written_down() -> None:
    known = set(re.findall(r"^\| (M\d+) \|", (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8"), re.M))
    for file in sorted((ROOT / "freda").rglob("*.py")):
        cited = set(re.findall(r"\bM\d{1,2}\b", file.read_text(encoding="utf-8")))
        assert cited <= known, f"{file.name} cites {cited - known}"


def test_versions_agree() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None and newest[1] == __version__


def test_configs_are_valid() -> None:
    found = sorted((ROOT / "configs").rglob("*.toml"))
    assert found
    for file in found:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        read = load_sweep if "sweep" in values else load if "train" in values else load_prepare
        read(file)
