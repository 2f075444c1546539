"""Token shards: documents as long files of token ids, which training reads through memory maps.

A folder of shards holds

    train-NAME.bin  the ids of documents, one after the other, little-endian int32; as many shards as there were tasks
    train-NAME.idx  where each document ends in it, counted in tokens, little-endian int64
    validation-...  the documents that are held out, in such files
    manifest.json   where the texts came from, counts, hashes, what was dropped and why, how to read the ids

A stored document ends in EOS and is filled with EOS to a multiple of `align`, so that blocks of any size that divides
`align` start on document boundaries. Files are written beside and renamed, the manifest last of all: a folder with a
manifest is complete, and one without was interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from freda.errors import FredaError, require
from freda.files import beside, parse_json, read_text, write_whole

SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
ID = np.dtype("<i4")
OFFSET = np.dtype("<i8")
MOST_HASHED = 8 * 2**30  # bytes that training reads before it begins: some five seconds
START_ANEW = "delete the folder and run freda prepare again"


@dataclass(frozen=True)
class ShardInfo:
    """One shard: the name of its two files without suffix, what is in it, and their hashes."""

    name: str
    source: str
    documents: int
    tokens: int
    sha256: str  # of the .bin file
    sha256_idx: str

    def is_there(self, folder: Path) -> bool:
        """Whether both files exist in `folder` with the right sizes."""
        sizes = {".bin": self.tokens * ID.itemsize, ".idx": self.documents * OFFSET.itemsize}
        paths = {folder / f"{self.name}{suffix}": size for suffix, size in sizes.items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


@dataclass(frozen=True)
class SplitInfo:
    """One split: its shards, and their counts together."""

    documents: int
    tokens: int
    shards: list[ShardInfo]

    @classmethod
    def of(cls, shards: Sequence[ShardInfo]) -> SplitInfo:
        """The split that consists of these shards."""
        return cls(sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards), list(shards))


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds, and how to read it."""

    source: dict[str, Any]  # where the texts came from: enough to make them again
    align: int
    eos_id: int
    blank_id: int
    tokenizer: str  # fingerprint of the tokenizer that made the ids
    splits: dict[str, SplitInfo]
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)  # documents omitted: {source: {reason: count}}
    examples: list[dict[str, str]] = field(default_factory=list)  # of omitted documents: source, where, reason, detail
    contamination: dict[str, Any] = field(default_factory=dict)  # {benchmark: {items, indexed, ..., by source}}
    version: int = FORMAT_VERSION

    @property
    def shards(self) -> list[ShardInfo]:
        """The shards of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]

    def write(self, folder: Path) -> None:
        """Declare the folder complete."""
        write_whole(folder / MANIFEST, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a complete folder."""
        path = folder / MANIFEST
        require(folder.is_dir(), f"there is no folder {folder}; make it with freda prepare")
        require(path.exists(), f"{folder} has no {MANIFEST}: it is half written; run freda prepare again")
        try:
            values = parse_json(read_text(path))
            seen = f"{path} has format version {values['version']}, this freda reads {FORMAT_VERSION}"
            require(values["version"] == FORMAT_VERSION, f"{seen}; {START_ANEW}")
            if type(values["align"]) is not int or values["align"] < 1:
                raise ValueError(f"align is {values['align']!r}")
            for name, info in values["splits"].items():
                shards = [ShardInfo(**_typed(shard, SHARD_TYPES)) for shard in info["shards"]]
                values["splits"][name] = SplitInfo(**_typed({**info, "shards": shards}, SPLIT_TYPES))
            return cls(**_typed(values, MANIFEST_TYPES))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FredaError(f"{path} is damaged ({error}); {START_ANEW}") from None


WHOLE, TEXTS = ("documents", "tokens"), ("name", "source", "sha256", "sha256_idx")
SHARD_TYPES: dict[str, type] = {**dict.fromkeys(WHOLE, int), **dict.fromkeys(TEXTS, str)}
SPLIT_TYPES: dict[str, type] = dict.fromkeys(WHOLE, int)
MANIFEST_TYPES: dict[str, type] = {
    **{"eos_id": int, "blank_id": int, "tokenizer": str, "source": dict, "dropped": dict, "contamination": dict},
    "examples": list,
}


def _typed(values: dict[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """Values of a manifest, whose types are right, numbers are not negative, and names stay in the folder."""
    for name, kind in types.items():
        value: Any = values.get(name, kind())
        right = 0 <= value < 2**62 if type(value) is int else True
        if type(value) is not kind or not right or (name == "name" and Path(str(value)).name != value):
            raise ValueError(f"{name} is {value!r:.80}")
    return values


def shard_lines(manifest: Manifest) -> list[str]:
    """A summary of a manifest: tokens of every split and source, what was dropped and why, what was kept out."""
    lines = []
    for name, split in manifest.splits.items():
        lines.append(f"{name}: {split.documents:,} documents, {split.tokens:,} tokens")
        for source in dict.fromkeys(shard.source for shard in split.shards):
            own = SplitInfo.of([shard for shard in split.shards if shard.source == source])
            share = 100 * own.tokens / max(1, split.tokens)
            lines.append(f"  {source:<14} {own.documents:>10,} documents {own.tokens:>14,} tokens {share:6.2f}%")
    for source, reasons in manifest.dropped.items():
        lines.append(f"dropped from {source}: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()))
    for name, found in manifest.contamination.items():
        counts = found["sources"].items()
        hits = ", ".join(f"{source}: {n['documents']:,} documents ({n['items']:,} texts)" for source, n in counts)
        lines.append(f"kept out {name} ({found['indexed']:,} of {found['items']:,} texts): {hits or 'nothing found'}")
    return lines


class ShardWriter:
    """Writes one shard, document by document. Use it as a context manager; the files appear when it closes well."""

    def __init__(self, folder: Path, name: str, eos_id: int, align: int) -> None:
        self._name, self._eos_id, self._align = name, eos_id, align
        self._paths = (folder / f"{name}.bin", folder / f"{name}.idx")
        self._hashes = (hashlib.sha256(), hashlib.sha256())
        self.documents = self.tokens = 0

    def __enter__(self) -> Self:
        self._files = [beside(path).open("wb") for path in self._paths]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files:
            file.close()
        for path in self._paths if kind is None else ():
            beside(path).replace(path)

    def add(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Append a document; EOS and the fill are added here."""
        length = (len(ids) // self._align + 1) * self._align  # the next multiple that leaves room for EOS
        document = np.full(length, self._eos_id, ID)
        document[: len(ids)] = ids
        self.documents += 1
        self.tokens += length
        written: tuple[Any, Any] = (document.data, self.tokens.to_bytes(OFFSET.itemsize, "little"))
        for data, file, digest in zip(written, self._files, self._hashes, strict=True):
            file.write(data)
            digest.update(data)

    def info(self, source: str) -> ShardInfo:
        """What was written, for the manifest."""
        digests = (digest.hexdigest() for digest in self._hashes)
        return ShardInfo(self._name, source, self.documents, self.tokens, *digests)


class Documents:
    """The documents of one split, in the order of its shards, read from disk lazily."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        known = ", ".join(manifest.splits)
        require(split in manifest.splits, f"{folder} has no split '{split}'; it has {known}")
        self.shards = manifest.splits[split].shards
        self._ids = [_memory_map(folder / f"{shard.name}.bin", ID, shard.tokens) for shard in self.shards]
        self._ends = [_memory_map(folder / f"{shard.name}.idx", OFFSET, shard.documents) for shard in self.shards]
        for shard, ends in zip(self.shards, self._ends, strict=True):
            whole = bool((np.diff(ends, prepend=0) > 0).all()) and (ends[-1] if len(ends) else 0) == shard.tokens
            require(whole, f"{folder / shard.name}.idx does not belong to {shard.name}.bin; {START_ANEW}")
        self._first = np.cumsum([0, *(len(ends) for ends in self._ends)])  # number of each shard's first document

    def __len__(self) -> int:
        return int(self._first[-1])

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, EOS and fill included."""
        return np.concatenate([np.empty(0, np.int64), *(np.diff(ends, prepend=0) for ends in self._ends)])

    def document(self, index: int) -> NDArray[np.int32]:
        """The ids of one document, EOS and fill included: a read-only view of the file."""
        if not 0 <= index < len(self):  # -1 would be an empty slice, not the last document
            raise IndexError(f"document {index} of {len(self)}")
        shard = self.shard_of(index)
        ends, place = self._ends[shard], index - int(self._first[shard])
        ids: NDArray[np.int32] = self._ids[shard][ends[place - 1] if place else 0 : ends[place]]
        return ids

    def shard_of(self, index: int) -> int:
        """The number of the shard that holds a document."""
        return int(np.searchsorted(self._first, index, "right")) - 1


Stamps = dict[str, list[int]]  # of files: size and time of the last change


def unchanged(
    folder: Path, manifest: Manifest, known: Mapping[str, Any], most: int = MOST_HASHED
) -> tuple[Stamps, int]:
    """Refuse shards that are not what was written; returns the stamps of all files, and how many were not looked at.

    A file whose stamp is `known` was looked at before. The others are hashed, if they have at most `most` bytes in all;
    of more, only the sizes are compared, and the ids when they are read.
    """
    Documents(folder, "train", manifest), Documents(folder, "validation", manifest)  # sizes and ends
    stamps: Stamps = {}
    for name in _hashes(manifest):
        seen = (folder / name).stat()
        stamps[name] = [seen.st_size, seen.st_mtime_ns]
    new = {name for name, stamp in stamps.items() if known.get(name) != stamp}
    if sum(stamps[name][0] for name in new) > most:
        return {name: stamp for name, stamp in stamps.items() if name not in new}, len(new)
    verify(folder, manifest, new)
    return stamps, 0


def _hashes(manifest: Manifest) -> dict[str, str]:
    """The hash of every file of a folder of shards."""
    hashes = {f"{shard.name}.bin": shard.sha256 for shard in manifest.shards}
    return hashes | {f"{shard.name}.idx": shard.sha256_idx for shard in manifest.shards}


def verify(folder: Path, manifest: Manifest, names: Set[str] | None = None) -> None:
    """Read every shard, or those of some names, and compare the hashes with the manifest's."""
    for name, expected in _hashes(manifest).items():
        if names is not None and name not in names:
            continue
        with open(folder / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        changed = f"{folder / name} has changed: its hash is {found[:8]}, not {expected[:8]}"
        require(found == expected, f"{changed}; {START_ANEW}")


def _memory_map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """A read-only view of a file that must hold `count` numbers."""
    require(path.exists(), f"{path} is missing; {START_ANEW}")
    size, wanted = path.stat().st_size, count * dtype.itemsize
    require(size == wanted, f"{path} has {size} bytes, its manifest says {wanted}; {START_ANEW}")
    return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)  # an empty file cannot be mapped
