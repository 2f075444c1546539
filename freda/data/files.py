"""Files of a source: found in folders and archives, and decompressed as they are read.

A file that ends early or is damaged is refused by name, and so is a folder that cannot be read.
"""

from __future__ import annotations

import bz2
import contextlib
import fnmatch
import functools
import gzip
import io
import lzma
import os
import re
import sysconfig
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from freda.data.config import DocumentsConfig
from freda.errors import FredaError, optional, require

SUFFIXES = {  # what a folder or archive is searched for, before .gz and the like
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "table": (".csv", ".tsv"),
    "text": (".txt", ".md", ".rst"),
    "code": (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".sh"),
    "datatrove": (".ds",),
}
ARCHIVE = re.compile(r"\.(tar(\.(gz|xz|bz2))?|tgz|txz|tbz2?)$")
CUT_SHORT = (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, OSError)


class File(NamedTuple):
    """A file, or a member of an archive."""

    path: Path
    member: str = ""
    number: int = -1  # of the member: two may have one name
    size: int = -1  # of the member, unpacked

    @property
    def name(self) -> str:
        """The name that shows the format: that of the member, or of the file itself."""
        return self.member or self.path.name

    def __str__(self) -> str:
        return f"{self.path}!{self.member}" if self.member else str(self.path)


def find(config: DocumentsConfig, root: Path) -> list[File]:
    """The files of a source, in a fixed order; none is an error."""
    stdlib = (config.kind, config.path) == ("code", "stdlib")
    base = Path(sysconfig.get_paths()["stdlib"]) if stdlib else root / Path(config.path).expanduser()
    require(base.exists(), f"there is no {base}; relative paths start from the folder given with --data")
    if base.is_file():
        files = _members(base, config) if ARCHIVE.search(base.name) else [File(base)]
    else:
        wanted = (path for path in _walk(base) if _wanted(path.relative_to(base).as_posix(), config))
        files = [File(path) for path in sorted(wanted, key=lambda p: p.relative_to(base).parts)]
    kinds = config.files or " ".join(f"*{suffix}" for suffix in SUFFIXES[config.kind])
    require(bool(files), f"{base} holds no file of kind {config.kind} ({kinds}); set files to a pattern")
    return files


def _walk(base: Path) -> Iterator[Path]:
    """All files of a folder except hidden ones, caches and installed packages."""

    def refuse(error: OSError) -> None:
        raise FredaError(f"cannot read the folder {error.filename}: {error.strerror}; fix that, or move it away")

    seen = set[str]()
    for folder, names, files in os.walk(base, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link led back
            names.clear()
            continue
        seen.add(real)
        names[:] = [name for name in names if not _hidden(name)]
        paths = (Path(folder, name) for name in files if not _hidden(name))
        yield from (path for path in paths if path.is_file() or not path.exists())  # no pipes or devices


def _hidden(name: str) -> bool:
    return name.startswith(".") or name in ("__pycache__", "site-packages")


def _wanted(name: str, config: DocumentsConfig) -> bool:
    """Whether a file matches the pattern of the config or, without one, a suffix of its kind."""
    if config.files:
        return fnmatch.fnmatch(name, config.files)
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(SUFFIXES[config.kind])


def _members(archive: Path, config: DocumentsConfig) -> list[File]:
    mapped = config.kind in ("parquet", "datatrove")
    require(not mapped, f"{archive}: {config.kind} files cannot be read inside an archive; unpack it")
    with told_if_cut_short(archive):
        members = _archive(archive).getmembers()
    plain = [(number, member) for number, member in enumerate(members) if member.isfile() or member.islnk()]
    files = [File(archive, os.path.normpath(member.name), number, member.size) for number, member in plain]
    return [f for f in files if not any(map(_hidden, f.member.split("/"))) and _wanted(f.member, config)]


@contextlib.contextmanager
def told_if_cut_short(file: object) -> Iterator[None]:
    """Refuse a file that ends early or is damaged: its records cannot be counted."""
    try:
        yield
    except CUT_SHORT as error:
        if getattr(error, "errno", None) is not None:  # the disk failed; damage is an OSError without a number
            raise
        raise FredaError(f"{file} is cut short or damaged ({error}); get it again, or exclude it with files") from None


@contextlib.contextmanager
def open_file(file: File) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; one that is cut short or damaged is refused."""
    unpack = OPENERS.get(Path(file.name).suffix, contextlib.nullcontext)
    with told_if_cut_short(file), _opened(file) as stream, unpack(stream) as unpacked:
        yield unpacked


def _opened(file: File) -> IO[bytes]:
    archive = _archive(file.path) if file.member else None
    try:
        opened = archive.extractfile(archive.getmembers()[file.number]) if archive else file.path.open("rb")
    except (KeyError, RecursionError):
        raise FredaError(f"{file} is a link to nothing; remove it from the archive, or exclude it with files") from None
    assert opened is not None, "only plain members are listed"
    return opened


@functools.lru_cache(maxsize=16)
def _archive(path: Path) -> tarfile.TarFile:
    """An archive stays open while its members are read: each opening would unpack it from the start."""
    return tarfile.open(path)


def _zstd(stream: IO[bytes]) -> Any:
    return io.BufferedReader(optional("pyarrow", "data").CompressedInputStream(stream, "zstd"))


OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _zstd}
COMPRESSED = tuple(OPENERS)
