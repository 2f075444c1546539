"""Batches: a pure function of the row number, with vectors that a plain loop agrees with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freda.config import CorpusConfig
from freda.data.loader import Batch, Loader
from freda.data.prepare import prepare
from freda.data.shards import Manifest, Shard, ShardWriter, SplitInfo
from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.errors import FredaError

EOS, ALIGN = 0, 4


def write_folder(folder: Path, documents: list[list[int]]) -> None:
    splits: dict[str, SplitInfo] = {}
    for split, texts in (("train", documents), ("validation", [])):
        with ShardWriter(folder, split, eos_id=EOS, align=ALIGN) as writer:  # type: ignore[arg-type]
            for ids in texts:
                writer.add(ids)
        splits[split] = writer.info()
    Manifest(source={}, align=ALIGN, eos_id=EOS, blank_id=99, tokenizer="f" * 64, splits=splits).write(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty documents of 1 to 24 tokens; token ids tell the documents apart."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("shards")
    write_folder(path, [[100 + document] * int(rng.integers(1, 25)) for document in range(50)])
    return path


def equal(one: Batch, two: Batch) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def tokens_of(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch.tokens.tolist()]


# -- rows by number --------------------------------------------------------------------------------------------------


def test_a_batch_depends_on_its_arguments_alone(folder: Path) -> None:
    loader = Loader(folder, "train", seq_len=32, seed=1)
    wanted = loader.batch(5, 3)
    loader.batch(10 * loader.rows, 2)  # neither what was asked before ...
    assert equal(loader.batch(5, 3), wanted)
    assert equal(Loader(folder, "train", seq_len=32, seed=1).batch(5, 3), wanted)  # ... nor the object matters
    rows = [loader.batch(5 + offset, 1) for offset in range(3)]
    assert equal(Batch(*(torch.cat(parts) for parts in zip(*rows, strict=True))), wanted)  # nor how rows are grouped


def test_a_batch_is_the_callers(folder: Path) -> None:
    loader = Loader(folder, "train", seq_len=32, seed=1)
    wanted = loader.batch(0, 2)
    loader.batch(0, 2).tokens.fill_(7)
    assert equal(loader.batch(0, 2), wanted)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(folder: Path) -> None:
    loader = Loader(folder, "train", seq_len=32, seed=1)
    epochs = [tokens_of(loader.batch(epoch * loader.rows, loader.rows)) for epoch in range(3)]
    assert loader.rows > 10
    assert len(set(epochs[0])) == loader.rows
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    across = tokens_of(loader.batch(loader.rows - 2, 4))
    assert across == epochs[0][-2:] + epochs[1][:2]


def test_the_seed_changes_the_order_only(folder: Path) -> None:
    one, two = (Loader(folder, "train", seq_len=32, seed=seed) for seed in (1, -2))
    first, second = tokens_of(one.batch(0, one.rows)), tokens_of(two.batch(0, two.rows))
    assert first != second
    assert sorted(first) == sorted(second)


def test_no_rows(folder: Path) -> None:
    assert Loader(folder, "train", seq_len=32, seed=1).batch(3, 0).tokens.shape == (0, 32)


# -- the vectors -----------------------------------------------------------------------------------------------------


def test_shapes_and_types(folder: Path) -> None:
    batch = Loader(folder, "train", seq_len=32, seed=1).batch(0, 3)
    assert [part.dtype for part in batch] == [torch.int64, torch.int32, torch.int32, torch.bool]
    assert all(part.shape == (3, 32) for part in batch)


def test_one_row_written_out(tmp_path: Path) -> None:
    write_folder(tmp_path, [[5, 6, 7, 8, 9], [3, 4]])
    batch = Loader(tmp_path, "train", seq_len=16, seed=0).batch(0, 1)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0]]
    assert batch.document.tolist() == [[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1, -1, -1]]
    assert batch.position.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.fill.int().tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0]]


def documents_in(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    """The documents of a batch by a plain loop, with their fill; checks positions and numbering on the way."""
    found: list[tuple[list[int], list[bool]]] = []
    for row in range(len(batch.tokens)):
        previous = -1
        for column in range(batch.tokens.shape[1]):
            token, document, position, fill = (part[row, column].item() for part in batch)
            if document == -1:
                assert (token, position, fill) == (EOS, 0, False)
                assert not (batch.document[row, column:] != -1).any()
                break
            if document != previous:
                assert (document, position) == (previous + 1, 0)
                found.append(([], []))
                previous = int(document)
            assert position == len(found[-1][0])
            found[-1][0].append(int(token))
            found[-1][1].append(bool(fill))
    return found


@given(
    documents=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30).filter(lambda ids: ids[-1]), min_size=1),
    units=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_vectors_against_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], units: int
) -> None:
    """Texts may contain EOS (0), may be longer than a row, and end anywhere in a block."""
    path = tmp_path_factory.mktemp("shards")
    write_folder(path, documents)
    seq_len = units * ALIGN
    loader = Loader(path, "train", seq_len=seq_len, seed=0)
    wanted = []
    for ids in documents:
        closed = [*ids, EOS]
        fill = -len(closed) % ALIGN
        tokens, flags = closed + [EOS] * fill, [False] * len(closed) + [True] * fill
        wanted += [
            (tokens[start : start + seq_len], flags[start : start + seq_len])
            for start in range(0, len(tokens), seq_len)
        ]
    assert sorted(documents_in(loader.batch(0, loader.rows))) == sorted(wanted)
    assert loader.fullness == sum(len(tokens) for tokens, _ in wanted) / (loader.rows * seq_len)


def test_tokens_are_read_from_disk(tmp_path: Path) -> None:
    write_folder(tmp_path, [[5, 6, 7]])
    loader = Loader(tmp_path, "train", seq_len=4, seed=0)
    with open(tmp_path / "train.bin", "r+b") as file:
        file.write((8).to_bytes(4, "little"))
    assert loader.batch(0, 1).tokens.tolist() == [[8, 6, 7, EOS]]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_row_length_must_fit_the_shards(folder: Path) -> None:
    with pytest.raises(FredaError, match="seq_len 30 is not a multiple of the shards' align 4; use 28 or 32"):
        Loader(folder, "train", seq_len=30, seed=0)


def test_an_empty_split_cannot_be_trained_on(folder: Path) -> None:
    with pytest.raises(FredaError, match=r"the validation split of .* holds no document"):
        Loader(folder, "validation", seq_len=32, seed=0)


def test_tokenizer_must_be_that_of_the_shards(tmp_path: Path) -> None:
    prepare(CorpusConfig(problems=100, validation_problems=5, vocab_size=300), tmp_path)
    loader = Loader(tmp_path, "validation", seq_len=64, seed=0)
    loader.check_tokenizer(Tokenizer.load(tmp_path))
    other = train_tokenizer(["some other text"], 260)
    ours = loader.manifest.tokenizer[:8]
    with pytest.raises(FredaError, match=f"tokenizer {ours}, the model has {other.fingerprint[:8]}; prepare the data"):
        loader.check_tokenizer(other)


def test_prepared_documents_come_out_as_text(tmp_path: Path) -> None:
    manifest = prepare(CorpusConfig(problems=60, validation_problems=5, vocab_size=300), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    loader = Loader(tmp_path, "train", seq_len=256, seed=0)
    batch = loader.batch(0, loader.rows)
    texts = {
        tokenizer.decode(tokens[document == index].tolist())
        for tokens, document in zip(batch.tokens, batch.document, strict=True)
        for index in range(int(document.max()) + 1)
    }
    shard = Shard(tmp_path, "train", manifest)
    assert texts == {tokenizer.decode(shard.document(index).tolist()) for index in range(60)}
    assert all(text.startswith("Q: ") and text.endswith(".") for text in texts)
