"""The size of the package, the walks of two commands, and how far methods and engine leak: `python -m tests.measure`.

A walk is every file of the package of which a function runs during a command, on a CPU and after all imports. Its lines
are the lines of these whole files, because a reader who follows the command opens them. `-v` lists the files.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = Path(__file__).parent.parent / "freda"
FLAGS = {"DRAFTS", "REFINES", "SCORES"}
BESIDE_A_STEP = {  # what a training run does between its steps
    "train/checkpoint.py": None,
    "train/metrics.py": None,
    "train/loop.py": "validate",
}
ENGINE = ("decode/engine.py", "decode/batch.py", "decode/device.py", "decode/shapes.py", "decode/state.py")
ENGINE += ("methods/state.py",)
FACE = {"Engine", "Request", "Handle", "Event", "Pass", "Output"}  # what callers of the engine know

Skipped = Callable[[CodeType], bool]


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def syntax(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


# -- walks -----------------------------------------------------------------------------------------------------------


class Walk:
    """The files of the package whose functions run; what a skipped function calls does not count."""

    def __init__(self, skipped: Skipped = lambda code: False) -> None:
        self.files: set[Path] = set()
        self._skipped = skipped
        self._inside = threading.local()  # how many skipped functions a thread is in

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)) or event not in ("call", "return"):
            return
        depth = getattr(self._inside, "depth", 0)
        if self._skipped(code):
            self._inside.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth and code.co_flags & inspect.CO_OPTIMIZED:  # not a module or a class body
            self.files.add(Path(code.co_filename))

    def of(self, command: Callable[[], None]) -> list[Path]:
        """Follow a command, which has run before so that all its modules are imported."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            command()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        return sorted(self.files)


def beside_a_step(code: CodeType) -> bool:
    name = str(Path(code.co_filename).relative_to(PACKAGE))
    return name in BESIDE_A_STEP and BESIDE_A_STEP[name] in (None, code.co_name)


def generate_walk(root: Path) -> list[Path]:
    from tests.helpers import answering_model, save_model

    save_model(root / "model", answering_model(["one two three four"] * 9, seed=0))
    command = ["generate", str(root / "model"), "one two", "--max-new-tokens", "8", "--device", "cpu"]
    run_quietly(command)
    return Walk().of(lambda: run_quietly(command))


def training_walk(root: Path) -> list[Path]:
    (root / "data.toml").write_text("[corpus]\nproblems = 60\nvalidation_problems = 8\nvocab_size = 280\n")
    run_quietly(["prepare", str(root / "data.toml"), str(root / "data"), "--workers", "1"])
    shape = "dim = 32\nlayers = 1\nheads = 2\nkv_heads = 1\nhead_dim = 16\nffn_dim = 48\n"
    (root / "run.toml").write_text(
        f'[model]\n{shape}[data]\npath = "{root / "data"}"\nseq_len = 96\n[method]\nname = "self-refine"\n'
        '[train]\nsteps = 2\nbatch_rows = 2\ngroup_rows = 2\nvalidation_rows = 2\ndevice = "cpu"\n'
    )
    run_quietly(["train", str(root / "run.toml"), "--out", str(root / "first")])
    return Walk(beside_a_step).of(lambda: run_quietly(["train", str(root / "run.toml"), "--out", str(root / "second")]))


def run_quietly(arguments: list[str]) -> None:
    from freda.cli import run

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run(arguments)
    assert code == 0, said.getvalue()


# -- leaks -----------------------------------------------------------------------------------------------------------


def method_branches() -> list[str]:
    """Where code outside `methods/` asks for a method's flag, compares with a method's name, or tests for its class."""
    from freda.methods import METHODS

    found = []
    for path in package_files():
        if path.relative_to(PACKAGE).parts[0] == "methods":
            continue
        imported = {alias.name for node in syntax(path) if _from_methods(node) for alias in node.names}
        for node in syntax(path):
            if (
                (isinstance(node, ast.Attribute) and node.attr in FLAGS)
                or (isinstance(node, ast.Compare) and _strings(node) & METHODS.keys())
                or (_calls_isinstance(node) and _names(node) & (imported - {"Method"}))
            ):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def _from_methods(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("freda.methods")


def _calls_isinstance(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"


def _strings(node: ast.AST) -> set[object]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def engine_nouns() -> list[str]:
    """Public classes between a request and the forward: what a reader of the engine must learn beside its face."""
    files = [PACKAGE / name for name in ENGINE if (PACKAGE / name).is_file()]
    classes = [node for path in files for node in syntax(path) if isinstance(node, ast.ClassDef)]
    errors = {"FredaError", "Exception"}
    nouns = [node.name for node in classes if not errors & {ast.unparse(base) for base in node.bases}]
    return [name for name in nouns if not name.startswith("_") and name not in FACE]


# -- the table -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Print the table of goals; with `-v` also what was counted."""
    with tempfile.TemporaryDirectory() as folder:
        generate, training = generate_walk(Path(folder)), training_walk(Path(folder))
    branches, nouns = method_branches(), engine_nouns()

    def walk(files: list[Path]) -> str:
        return f"{len(files)} / {sum(map(lines_of, files)):,}"

    rows = [
        ("package lines", "19,749", "19,842", f"{sum(map(lines_of, package_files())):,}", "≤ 16,500"),
        ("walk of `freda generate` on CPU, files / lines", "24 / 4,218", "26 / 3,971", walk(generate), "≤ 17 / 3,000"),
        ("walk of a training step", "19 / 3,603", "26 / 4,275", walk(training), "≤ 18 / 3,300"),
        ("branches on methods outside `methods/`", "49", "59", str(len(branches)), "0"),
        ("engine nouns", "11", "14", str(len(nouns)), "≤ 7"),
    ]
    print("| | counted by hand (20ddb34) | measured then (b4b815b) | now | goal |\n|---|---:|---:|---:|---:|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if "-v" in sys.argv:
        for title, files in (("generate", generate), ("training step", training)):
            print(f"\n{title}:")
            for path in files:
                print(f"  {lines_of(path):5} {path.relative_to(PACKAGE)}")
        print("\nbranches:", *branches, sep="\n  ")
        print("\nengine nouns:", ", ".join(nouns))


if __name__ == "__main__":
    main()
