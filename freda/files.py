"""Files that are whole or absent: reads whose errors name the file, writes that cannot be seen half-done, locks.

A file or folder is written beside its place and renamed. What stands under a name is therefore complete, whatever
killed the process that wrote it; what it leaves behind ends in `.part` and is removed by the next writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import lzma
import os
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freda.errors import FredaError, require

PART = ".part"  # what the name of an unfinished file or folder ends in
MOST_BYTES = 2**29  # of a text file, unpacked; the largest tokenizers have 40 MB


def beside(path: Path) -> Path:
    """The temporary place where `path` is written before it gets its name."""
    return path.with_name(path.name + PART)


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a file, unpacked if its name ends in .xz; an error names the file. What is no plain file, as a pipe
    or a device, or has more than `MOST_BYTES`, is refused before it is read."""
    try:
        kind = path.stat().st_mode
        require(
            stat.S_ISREG(kind), f"{path.name} cannot be read: it is no {'' if stat.S_ISDIR(kind) else 'plain '}file"
        )
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        require(len(content) <= MOST_BYTES, f"{path.name} cannot be read: it has more than {MOST_BYTES >> 20} MB")
        return content.decode("utf-8", errors)
    except (FileNotFoundError, NotADirectoryError):
        raise FredaError(f"{path.name} is missing") from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise FredaError(f"{path.name} cannot be read: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError also for one that is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an error names the file."""
    text = read_text(path)
    try:
        values = parse_json(text)
        if "\\ud" in text.lower():  # JSON can spell half a character, which nothing can write
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise FredaError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise FredaError(f"{path.name} is not a JSON object")
    return values


def write_whole(path: Path, text: str) -> None:
    """Write a file that is, at any moment, as it was or complete."""
    beside(path).write_text(text, encoding="utf-8")
    os.replace(beside(path), path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object into a folder that nobody else sees yet."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file is on the disk; on a file system of many nodes only its writer can."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def written_beside(folder: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` when the body succeeds, and is removed when it does not. With
    `replace` an older folder of that name stays until the new one is complete."""
    folder = folder.absolute()
    if folder.exists() and not replace:
        raise FredaError(f"{folder} exists already; name another folder, or remove it first")
    temporary = beside(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                flush(path)  # before the rename, or a power cut could leave a whole folder of empty files
        _put_in_place(temporary, folder)
    except OSError as error:
        raise FredaError(f"cannot write {folder}: {error}; nothing else was touched") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # renamed, and so gone, when all went well


def _put_in_place(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    older = folder.with_name(folder.name + ".old")
    shutil.rmtree(older, ignore_errors=True)
    folder.rename(older)
    try:
        temporary.rename(folder)
    except BaseException:  # a second Ctrl-C counts: the older folder must get its name back
        older.rename(folder)
        raise
    shutil.rmtree(older, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder` and keep other processes from writing to it. The lock ends with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FredaError(f"another process is writing {folder}; wait for it, or choose another folder") from None
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def located(path: Path) -> Iterator[None]:
    """Begin every error with the folder or file that it is about."""
    try:
        yield
    except FredaError as error:
        raise FredaError(f"{path}: {error}") from None
