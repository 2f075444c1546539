"""Token shards: what is written is read back, and what is broken says so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freda.data.shards import Documents, Manifest, ShardInfo, ShardWriter, SplitInfo, verify
from freda.errors import FredaError

EOS = 9
DOCUMENTS = [[1, 2, 3], [4], [1, 2, 3, 4], [7] * 9]  # one that leaves no room for EOS before the multiple of 4


def write_folder(folder: Path, documents: list[list[int]] = DOCUMENTS) -> Manifest:
    splits: dict[str, SplitInfo] = {}
    for split, texts in (("train", documents), ("validation", [])):
        with ShardWriter(folder, split, eos_id=EOS, align=4) as writer:
            for ids in texts:
                writer.add(ids)
        splits[split] = SplitInfo.of([writer.info("test")])
    manifest = Manifest(source={"kind": "test"}, align=4, eos_id=EOS, blank_id=10, tokenizer="abc", splits=splits)
    manifest.write(folder)
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- shards ----------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    manifest = write_folder(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    shard = Documents(tmp_path, "train", manifest)
    assert len(shard) == 4
    assert shard.lengths().tolist() == [4, 4, 8, 12]
    assert [shard.document(index).tolist() for index in range(4)] == [
        [1, 2, 3, EOS],
        [4, EOS, EOS, EOS],
        [1, 2, 3, 4, EOS, EOS, EOS, EOS],
        [7] * 9 + [EOS] * 3,
    ]
    for outside in (4, -1):
        with pytest.raises(IndexError):
            shard.document(outside)


def test_bytes_are_as_documented(tmp_path: Path) -> None:
    manifest = write_folder(tmp_path, [[1, 70_000]])
    assert (tmp_path / "train.bin").read_bytes() == b"".join(n.to_bytes(4, "little") for n in (1, 70_000, EOS, EOS))
    assert (tmp_path / "train.idx").read_bytes() == (4).to_bytes(8, "little")
    digest = hashlib.sha256((tmp_path / "train.bin").read_bytes()).hexdigest()
    other = hashlib.sha256((tmp_path / "train.idx").read_bytes()).hexdigest()
    assert manifest.splits["train"] == SplitInfo(1, 4, [ShardInfo("train", "test", 1, 4, digest, other)])
    assert sorted(contents(tmp_path)) == ["manifest.json", "train.bin", "train.idx", "validation.bin", "validation.idx"]


def test_tokens_stay_on_disk(tmp_path: Path) -> None:
    shard = Documents(tmp_path, "train", write_folder(tmp_path))
    with open(tmp_path / "train.bin", "r+b") as file:
        file.write((5).to_bytes(4, "little"))
    assert shard.document(0)[0] == 5  # a copy in memory would still say 1
    with pytest.raises(ValueError, match="read-only"):
        shard.document(0)[0] = 6


def test_an_empty_split_can_be_read(tmp_path: Path) -> None:
    shard = Documents(tmp_path, "validation", write_folder(tmp_path))
    assert len(shard) == 0
    assert shard.lengths().tolist() == []


def test_an_interrupted_writer_leaves_no_finished_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path, "train", eos_id=EOS, align=4) as writer:
        writer.add([1])
        raise KeyboardInterrupt
    assert sorted(contents(tmp_path)) == ["train.bin.part", "train.idx.part"]


def rewrite_manifest(folder: Path, **changes: object) -> None:
    values = {**json.loads((folder / "manifest.json").read_text()), **changes}
    (folder / "manifest.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )


BREAKAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: folder.rename(folder.with_name("elsewhere")), "there is no folder .*freda prepare"),
    (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json.*half written; run freda prepare again"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged .*delete the folder"),
    (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is damaged"),
    (lambda folder: rewrite_manifest(folder, version=3), "format version 3, this freda reads 2; delete the folder"),
    (lambda folder: rewrite_manifest(folder, version=None), "manifest.json is damaged .'version'"),
    (lambda folder: rewrite_manifest(folder, align=None), "manifest.json is damaged .*align"),
    (lambda folder: rewrite_manifest(folder, splits={"train": {}}), "manifest.json is damaged"),
    (lambda folder: (folder / "train.bin").unlink(), "train.bin is missing; delete the folder"),
    (lambda folder: (folder / "train.bin").write_bytes(b"\0" * 8), "train.bin has 8 bytes, its manifest says 112"),
    (lambda folder: (folder / "train.idx").write_bytes(b"\0" * 8), "train.idx has 8 bytes, its manifest says 32"),
    (lambda folder: (folder / "train.idx").write_bytes(b"\0" * 32), "train.idx does not belong to train.bin"),
    (lambda folder: np.array([8, 4, 16, 28], "<i8").tofile(folder / "train.idx"), "train.idx does not belong to"),
]


@pytest.mark.parametrize(("break_it", "message"), BREAKAGES)
def test_broken_folders(tmp_path: Path, break_it: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    write_folder(folder)
    break_it(folder)
    with pytest.raises(FredaError, match=message):
        Documents(folder, "train", Manifest.read(folder))


def test_unknown_split(tmp_path: Path) -> None:
    with pytest.raises(FredaError, match="has no split 'test'; it has train, validation"):
        Documents(tmp_path, "test", write_folder(tmp_path))


def test_several_shards_are_one_split(tmp_path: Path) -> None:
    infos = []
    for number, texts in enumerate(([[1], [2, 2]], [], [[3] * 5])):
        with ShardWriter(tmp_path, f"train-{number}", eos_id=EOS, align=4) as writer:
            for ids in texts:
                writer.add(ids)
        infos.append(writer.info(f"source{number}"))
    splits = {"train": SplitInfo.of(infos)}
    manifest = Manifest(source={}, align=4, eos_id=EOS, blank_id=10, tokenizer="abc", splits=splits)
    documents = Documents(tmp_path, "train", manifest)
    assert [documents.document(index)[0] for index in range(len(documents))] == [1, 2, 3]
    assert documents.lengths().tolist() == [4, 4, 8]
    assert [documents.shard_of(index) for index in range(3)] == [0, 0, 2]
    assert (splits["train"].documents, splits["train"].tokens) == (3, 16)


@pytest.mark.parametrize("name", ["train.bin", "train.idx"])
def test_a_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    manifest = write_folder(tmp_path)
    verify(tmp_path, manifest)
    content = bytearray((tmp_path / name).read_bytes())
    content[0] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FredaError, match=f"{name} has changed: its hash is .* delete the folder"):
        verify(tmp_path, manifest)
