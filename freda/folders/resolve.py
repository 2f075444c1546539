"""Which folder a model's name means: a model folder, a run folder, or a model bundled with the package.

A bundled model is a folder in `freda/assets`. Its name stands for it wherever a model folder can be named: `freda
generate mini`, `freda.load("mini")`, `train.init = "mini"`. A model or run folder of that name in the current folder
takes precedence.
"""

from __future__ import annotations

import re
from pathlib import Path

from freda.errors import FredaError
from freda.files import read_text

ASSETS = Path(__file__).parent.parent / "assets"
MARKS = ("config.json", "latest", "checkpoints")  # what a model folder or a run folder has


def packaged() -> list[str]:
    """Names of the bundled models; an install may have none."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def packaged_folder(path: Path) -> Path | None:
    """The folder of the bundled model that `path` names; None if it names a folder of the user's."""
    own = any((path / mark).exists() for mark in MARKS)
    return ASSETS / path.name if not own and str(path) in packaged() else None


def model_path(path: Path) -> Path:
    """`path`, or the folder of the bundled model of that name."""
    return packaged_folder(path) or path


def resolve_model_folder(path: Path) -> Path:
    """The model folder that `path` means: itself, the newest checkpoint of a run folder, or a bundled model's."""
    path = model_path(path)
    if not path.exists():
        raise missing_model(path)
    if path.is_file():
        advice = f"run: freda convert {path} TARGET" if path.suffix == ".gguf" else "name a model folder"
        raise FredaError(f"{path} is a file, not a model folder; {advice}")
    if (path / "config.json").is_file():
        return path
    if (path / "latest").is_file():
        name = read_text(path / "latest").strip()
        folder = path / "checkpoints" / name
        if not (name and folder.is_dir()):
            raise FredaError(f"{path / 'latest'} names the checkpoint {name!r}, but there is no folder {folder}")
        return folder
    if (path / "checkpoints").is_dir():
        raise FredaError(f"the run {path} has no finished checkpoint yet; let it train until it saves one")
    file = min(path.glob("*.gguf"), default=None)
    advice = "" if file is None else f"; convert its GGUF file: freda convert {file} TARGET"
    raise FredaError(f"{path} is not a model folder: it has no config.json{advice}")


def missing_model(path: Path) -> FredaError:
    """The error for a model that is not on this machine; a name like `Qwen/Qwen3-0.6B` gets the download commands."""
    bundled = ", ".join(packaged()) or "none in this install"
    problem = f"there is no model {path}; name a model folder, a run folder or a bundled model ({bundled})"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or path.parent.is_dir():
        return FredaError(problem)
    local = Path("models") / path.name.lower()
    return FredaError(
        f"{problem}; for the model of that name on the Hugging Face Hub run: hf download {path} --local-dir {local}, "
        f"then: freda convert {local} {local}-freda"
    )
