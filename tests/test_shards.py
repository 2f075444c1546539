"""Token shards: what is written is read back, and what is broken says so. Then `prepare`, which writes them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freda.config import CorpusConfig, load
from freda.data.prepare import prepare, word_problems
from freda.data.shards import Manifest, Shard, ShardWriter, SplitInfo
from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError

EOS = 9
DOCUMENTS = [[1, 2, 3], [4], [1, 2, 3, 4], [7] * 9]  # one that leaves no room for EOS before the multiple of 4


def write_folder(folder: Path, documents: list[list[int]] = DOCUMENTS) -> Manifest:
    splits: dict[str, SplitInfo] = {}
    for split, texts in (("train", documents), ("validation", [])):
        with ShardWriter(folder, split, eos_id=EOS, align=4) as writer:  # type: ignore[arg-type]
            for ids in texts:
                writer.add(ids)
        splits[split] = writer.info()
    manifest = Manifest(source={"kind": "test"}, align=4, eos_id=EOS, blank_id=10, tokenizer="abc", splits=splits)
    manifest.write(folder)
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- shards ----------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    manifest = write_folder(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    shard = Shard(tmp_path, "train", manifest)
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
    assert manifest.splits["train"] == SplitInfo(documents=1, tokens=4, sha256=digest)
    assert sorted(contents(tmp_path)) == ["manifest.json", "train.bin", "train.idx", "validation.bin", "validation.idx"]


def test_tokens_stay_on_disk(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "train", write_folder(tmp_path))
    with open(tmp_path / "train.bin", "r+b") as file:
        file.write((5).to_bytes(4, "little"))
    assert shard.document(0)[0] == 5  # a copy in memory would still say 1
    with pytest.raises(ValueError, match="read-only"):
        shard.document(0)[0] = 6


def test_an_empty_split_can_be_read(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "validation", write_folder(tmp_path))
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
    (lambda folder: rewrite_manifest(folder, version=2), "format version 2, this freda reads 1; delete the folder"),
    (lambda folder: rewrite_manifest(folder, version=None), "manifest.json is damaged .'version'"),
    (lambda folder: rewrite_manifest(folder, align=None), "manifest.json is damaged .*align"),
    (lambda folder: rewrite_manifest(folder, splits={"train": {}}), "manifest.json is damaged"),
    (lambda folder: (folder / "train.bin").unlink(), "train.bin is missing; delete the folder"),
    (lambda folder: (folder / "train.bin").write_bytes(b"\0" * 8), "train.bin has 8 bytes, its manifest says 112"),
    (lambda folder: (folder / "train.idx").write_bytes(b"\0" * 8), "train.idx has 8 bytes, its manifest says 32"),
    (lambda folder: (folder / "train.idx").write_bytes(b"\0" * 32), "train.idx does not belong to train.bin"),
]


@pytest.mark.parametrize(("break_it", "message"), BREAKAGES)
def test_broken_folders(tmp_path: Path, break_it: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    write_folder(folder)
    break_it(folder)
    with pytest.raises(FredaError, match=message):
        Shard(folder, "train", Manifest.read(folder))


def test_unknown_split(tmp_path: Path) -> None:
    with pytest.raises(FredaError, match="has no split 'test'; it has train, validation"):
        Shard(tmp_path, "test", write_folder(tmp_path))


# -- prepare ---------------------------------------------------------------------------------------------------------

TINY = CorpusConfig(problems=200, validation_problems=20, max_number=30, vocab_size=300)


def test_prepare_writes_the_corpus(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    manifest = prepare(TINY, tmp_path / "new" / "folder", lambda done, total: calls.append((done, total)))
    folder = tmp_path / "new" / "folder"
    tokenizer = Tokenizer.load(folder)
    assert Manifest.read(folder) == manifest
    assert (manifest.tokenizer, manifest.eos_id, manifest.blank_id, manifest.align) == (
        tokenizer.fingerprint,
        tokenizer.eos_id,
        tokenizer.blank_id,
        8,
    )
    assert manifest.dropped == {}
    assert calls == [(done, 220) for done in range(1, 221)]
    for split, count in (("train", 200), ("validation", 20)):
        shard = Shard(folder, split, manifest)
        texts = list(word_problems(TINY).documents(split))  # type: ignore[arg-type]
        assert len(shard) == len(texts) == count
        for index, text in enumerate(texts):
            ids = shard.document(index)
            body = tokenizer.encode(text)
            assert ids[: len(body)].tolist() == body
            assert 1 <= len(ids) - len(body) <= 8
            assert (ids[len(body) :] == tokenizer.eos_id).all()
            assert len(ids) % 8 == 0
        digest = hashlib.sha256((folder / f"{split}.bin").read_bytes()).hexdigest()
        assert manifest.splits[split] == SplitInfo(documents=count, tokens=int(shard.lengths().sum()), sha256=digest)


def test_prepare_gives_the_same_bytes(tmp_path: Path) -> None:
    prepare(TINY, tmp_path / "one")
    prepare(TINY, tmp_path / "two")
    prepare(dataclasses.replace(TINY, seed=1), tmp_path / "other")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert contents(tmp_path / "one")["train.bin"] != contents(tmp_path / "other")["train.bin"]


def test_prepare_again_does_nothing(tmp_path: Path) -> None:
    manifest = prepare(TINY, tmp_path)
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert prepare(TINY, tmp_path, lambda done, total: pytest.fail("it wrote again")) == manifest
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == stamps


def test_prepare_refuses_the_folder_of_another_corpus(tmp_path: Path) -> None:
    prepare(TINY, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(FredaError, match=r"another corpus: problems 200 \(now 201\), seed 0 \(now 5\); choose another"):
        prepare(dataclasses.replace(TINY, problems=201, seed=5), tmp_path)
    assert contents(tmp_path) == before


def test_prepare_notices_a_damaged_folder(tmp_path: Path) -> None:
    prepare(TINY, tmp_path)
    (tmp_path / "validation.bin").write_bytes(b"")
    with pytest.raises(FredaError, match=r"validation\.bin has 0 bytes"):
        prepare(TINY, tmp_path)


@pytest.mark.parametrize("documents_before_the_kill", [1, 150, 215])
def test_a_killed_run_is_started_anew(tmp_path: Path, documents_before_the_kill: int) -> None:
    def kill(done: int, total: int) -> None:
        if done == documents_before_the_kill:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(TINY, tmp_path / "killed", kill)
    assert contents(tmp_path / "killed")
    with pytest.raises(FredaError, match="half written"):
        Manifest.read(tmp_path / "killed")
    prepare(TINY, tmp_path / "killed")
    prepare(TINY, tmp_path / "whole")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("names", [["notes.txt"], ["train.bin", "notes.txt"], ["tokenizer.json"]])
def test_prepare_overwrites_nothing_of_others(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(FredaError, match=f"is in use .{names[-1]}.*choose another folder"):
        prepare(TINY, tmp_path)
    assert contents(tmp_path) == {name: b"mine" for name in names}


def test_prepare_wants_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FredaError, match="is a file; name a folder"):
        prepare(TINY, tmp_path / "file")


def test_an_empty_validation_split_is_allowed(tmp_path: Path) -> None:
    manifest = prepare(dataclasses.replace(TINY, validation_problems=0), tmp_path)
    assert manifest.splits["validation"].documents == 0
    assert np.array_equal(Shard(tmp_path, "validation", manifest).lengths(), [])


def test_the_shipped_config_is_the_default_corpus() -> None:
    shipped = Path(__file__).parent.parent / "configs" / "corpus-sums.toml"
    assert load(shipped).corpus == CorpusConfig()
