"""Which folder a model's name means: a model folder, a run folder, or one of the models that come with the package.

A packaged model is a folder in `freda/assets` and is called by its name, wherever a model folder is: `freda generate
mini`, `freda.load("mini")`, `train.init = "mini"`. A model or run folder of that name in the current folder goes first.
"""

from __future__ import annotations

from pathlib import Path

from freda.errors import FredaError
from freda.files import read_text

ASSETS = Path(__file__).parent.parent / "assets"
MARKS = ("config.json", "latest", "checkpoints")  # what a model folder or a run folder has


def packaged() -> list[str]:
    """Names of the models that come with this install; there may be none."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def packaged_folder(path: Path) -> Path | None:
    """The folder of the packaged model that `path` means; None if it means a folder of the user's."""
    own = any((path / mark).exists() for mark in MARKS)
    return ASSETS / path.name if not own and str(path) in packaged() else None


def model_path(path: Path) -> Path:
    """`path`, or the folder of the packaged model of that name."""
    return packaged_folder(path) or path


def resolve_model_folder(path: Path) -> Path:
    """The model folder that `path` means: itself, the newest checkpoint of a run folder, or a packaged model's."""
    path = model_path(path)
    if not path.exists():
        names = ", ".join(packaged())
        also = f"or a model that comes with freda: {names}" if names else "no model comes with this install of freda"
        raise FredaError(f"there is no model {path}; name a model folder or a run folder on this machine; {also}")
    if path.is_file():
        raise FredaError(f"{path} is a file; a model is a folder (GGUF files: run freda convert {path} TARGET)")
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
    raise FredaError(f"{path} is not a model folder: it has no config.json")
