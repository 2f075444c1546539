"""The shape of the code: imports run one way, and nothing grows without being noticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "freda"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import what stands on a line before its own, and from its own folder.
LAYERS = (
    {"errors"},
    {"sections", "files", "options"},
    {"data"},
    {"model"},
    {"methods"},
    {"decode"},
    {"eval", "train"},
    {"bench", "demo", "describe"},
    {"cli"},
    {"__main__"},
)
LEAVES = (".config", ".rates")  # modules that know nothing above `files`, and that everybody may import
MOST_LINES, MOST_FUNCTION_LINES, MOST_POSITIONAL = 450, 60, 6


def layer_of(part: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def part_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("freda"):
            names = [part_of(node.module or "")] if node.module != "freda" else [alias.name for alias in node.names]
            if (node.module or "").endswith(LEAVES):
                continue
            for name in names:
                if name and not name.startswith("__version__") and name != own:
                    assert layer_of(name) < layer_of(own), f"{file.name} imports freda.{name}"


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES, "split it, or raise the limit in the commit that argues for it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)  # flat by nature
            assert length <= MOST_FUNCTION_LINES * (2 if kernel else 1), f"{node.name} has {length} lines"
            many = "import typer" in text or kernel
            assert len(node.args.args) <= MOST_POSITIONAL + 1 or many, f"{node.name} has many arguments"


def test_no_module_is_called_after_nothing() -> None:
    assert not {file.stem for file in FILES} & {"utils", "util", "common", "core", "base", "helpers", "misc"}


def test_every_module_says_what_it_is_for() -> None:
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree) or not tree.body, file
