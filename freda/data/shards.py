"""Token shards: documents as one long file of token ids, which training reads through a memory map.

A folder of shards holds, for each split,

    train.bin       the ids of all documents, one after the other, little-endian int32
    train.idx       where each document ends in it, counted in tokens, little-endian int64
    manifest.json   where the texts came from, counts, hashes, and what a reader must know about the ids

A stored document ends in EOS and is filled with EOS to a multiple of `align`, so that blocks of any size that divides
`align` start on document boundaries. Files are written beside and renamed, the manifest last of all: a folder with a
manifest is complete, and one without was interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freda.errors import FredaError

ShardSplit = Literal["train", "validation"]
SPLITS: tuple[ShardSplit, ...] = ("train", "validation")
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
ID = np.dtype("<i4")
OFFSET = np.dtype("<i8")
START_ANEW = "delete the folder and run freda prepare again"


def part_name(name: str) -> str:
    """What a file is called until it is complete."""
    return f"{name}.part"


# -- the manifest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitInfo:
    """One split: its counts, and the hash of its `.bin` file."""

    documents: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds, and how to read it."""

    source: dict[str, Any]  # where the texts came from: enough to make them again
    align: int
    eos_id: int
    blank_id: int
    tokenizer: str  # fingerprint of the tokenizer that made the ids
    splits: dict[str, SplitInfo]
    dropped: dict[str, int] = field(default_factory=dict)  # documents left out, by reason
    version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Declare the folder complete."""
        part = folder / part_name(MANIFEST)
        part.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(part, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a complete folder."""
        if not folder.is_dir():
            raise FredaError(f"there is no folder {folder}; make it with freda prepare")
        path = folder / MANIFEST
        if not path.exists():
            raise FredaError(f"{folder} has no {MANIFEST}: it is half written; run freda prepare again")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values["version"]
            if version == FORMAT_VERSION:
                splits = {split: SplitInfo(**info) for split, info in values["splits"].items()}
                return cls(**{**values, "splits": splits})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FredaError(f"{path} is damaged ({error}); {START_ANEW}") from None
        raise FredaError(f"{path} has format version {version}, this freda reads {FORMAT_VERSION}; {START_ANEW}")


# -- writing ---------------------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one split, document by document. Use it as a context manager; the files appear when it closes well."""

    def __init__(self, folder: Path, split: ShardSplit, *, eos_id: int, align: int) -> None:
        self._folder = folder
        self._names = (f"{split}.bin", f"{split}.idx")
        self._eos_id = eos_id
        self._align = align
        self._documents = 0
        self._tokens = 0
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> ShardWriter:
        parts = [self._folder / part_name(name) for name in self._names]
        self._bin, self._idx = (open(part, "wb") for part in parts)  # noqa: SIM115 -- closed by __exit__
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bin.close()
        self._idx.close()
        if kind is None:
            for name in self._names:
                os.replace(self._folder / part_name(name), self._folder / name)

    def add(self, ids: Sequence[int]) -> None:
        """Append a document; EOS and the fill are added here."""
        length = (len(ids) // self._align + 1) * self._align  # the next multiple that leaves room for EOS
        document = np.full(length, self._eos_id, ID)
        document[: len(ids)] = ids
        self._bin.write(document.tobytes())
        self._sha256.update(document.tobytes())
        self._documents += 1
        self._tokens += length
        self._idx.write(np.array(self._tokens, OFFSET).tobytes())

    def info(self) -> SplitInfo:
        """What was written, for the manifest."""
        return SplitInfo(documents=self._documents, tokens=self._tokens, sha256=self._sha256.hexdigest())


# -- reading ---------------------------------------------------------------------------------------------------------


class Shard:
    """The documents of one split, left on disk until they are asked for."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        info = manifest.splits.get(split)
        if info is None:
            raise FredaError(f"{folder} has no split '{split}'; it has {', '.join(manifest.splits)}")
        self._tokens: NDArray[np.int32] = _memory_map(folder / f"{split}.bin", ID, info.tokens)
        self._ends: NDArray[np.int64] = _memory_map(folder / f"{split}.idx", OFFSET, info.documents)
        if (self.lengths() <= 0).any() or (len(self) and self._ends[-1] != info.tokens):
            raise FredaError(f"{folder / split}.idx does not belong to {split}.bin; {START_ANEW}")

    def __len__(self) -> int:
        return len(self._ends)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, EOS and fill included."""
        return np.diff(self._ends, prepend=0)

    def document(self, index: int) -> NDArray[np.int32]:
        """The ids of one document, EOS and fill included: a read-only view of the file."""
        if not 0 <= index < len(self):  # -1 would be an empty slice, not the last document
            raise IndexError(f"document {index} of {len(self)}")
        begin = self._ends[index - 1] if index else 0
        return self._tokens[begin : self._ends[index]]


def _memory_map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """A read-only view of a file that must hold `count` numbers."""
    if not path.exists():
        raise FredaError(f"{path} is missing; {START_ANEW}")
    size, wanted = path.stat().st_size, count * dtype.itemsize
    if size != wanted:
        raise FredaError(f"{path} has {size} bytes, its manifest says {wanted}; {START_ANEW}")
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")
