"""Batches: a pure function of the row number, with vectors that a plain loop agrees with."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freda.data.config import CorpusConfig
from freda.data.loader import Batch, Loader, Prefetcher, rank_rows
from freda.data.prepare import prepare_corpus
from freda.data.shards import Documents, Manifest, ShardWriter, SplitInfo
from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.errors import FredaError

EOS, ALIGN = 0, 4


def write_folder(folder: Path, documents: list[list[int]]) -> None:
    splits: dict[str, SplitInfo] = {}
    for split, texts in (("train", documents), ("validation", [])):
        with ShardWriter(folder, split, eos_id=EOS, align=ALIGN) as writer:
            for ids in texts:
                writer.add(ids)
        splits[split] = SplitInfo.of([writer.info("test")])
    Manifest(source={}, align=ALIGN, eos_id=EOS, blank_id=999, tokenizer="f" * 64, splits=splits).write(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty documents of 1 to 24 tokens; token ids tell the documents apart."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("shards")
    write_folder(path, [[100 + document] * int(rng.integers(1, 25)) for document in range(50)])
    return path


def equal(one: Batch, two: Batch) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one[:4], two[:4], strict=True))


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
    assert equal(Batch.cat(rows), wanted)  # nor how rows are grouped


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
    assert [part.dtype for part in batch[:4]] == [torch.int64, torch.int32, torch.int32, torch.bool]
    assert all(part.shape == (3, 32) for part in batch[:4])


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
            token, document, position, fill = (part[row, column].item() for part in batch[:4])
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


# -- ranks -----------------------------------------------------------------------------------------------------------


def rows_of_ranks(batch_rows: int, group_rows: int, world: int) -> list[list[range]]:
    return [rank_rows(batch_rows, group_rows, rank=rank, world=world) for rank in range(world)]


@given(world=st.integers(1, 8), share=st.integers(1, 4), groups=st.integers(1, 6))
def test_ranks_share_every_group_and_keep_its_order(world: int, share: int, groups: int) -> None:
    group_rows = world * share
    ranks = rows_of_ranks(groups * group_rows, group_rows, world)
    assert all(len(rows) == share for rank in ranks for rows in rank)
    for group in range(groups):
        together = [row for rank in ranks for row in rank[group]]
        assert together == list(range(group * group_rows, (group + 1) * group_rows)), "as one process has them"


@given(data=st.data(), world=st.sampled_from([1, 2, 3, 4]), groups=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_no_row_twice_in_an_epoch_whoever_reads_and_wherever_it_resumes(
    folder: Path, data: st.DataObject, world: int, groups: int
) -> None:
    """Ranks that are stopped and resumed anywhere read, step by step, what one process reads from the start."""
    loader, batch_rows = Loader(folder, "train", seq_len=32, seed=1), groups * 12
    steps = -(-loader.rows // batch_rows)
    whole = tokens_of(loader.batch(0, steps * batch_rows))
    stops = sorted({0, steps, *data.draw(st.lists(st.integers(0, steps), max_size=3))})
    read: dict[int, tuple[int, ...]] = {}
    for rank in data.draw(st.permutations(range(world))):
        for begin, end in itertools.pairwise(stops):
            resumed = Loader(folder, "train", seq_len=32, seed=1)
            for step in range(begin, end):
                for rows in rank_rows(batch_rows, 12, rank=rank, world=world):
                    numbers = [step * batch_rows + row for row in rows]
                    assert not read.keys() & set(numbers)
                    read.update(zip(numbers, tokens_of(resumed.batch(numbers[0], len(numbers))), strict=True))
    assert [read[number] for number in range(len(whole))] == whole
    assert len(set(whole[: loader.rows])) == loader.rows


@pytest.mark.parametrize(
    ("batch_rows", "group_rows", "world", "advice"),
    [(64, 16, 3, "make train.batch_rows 64 a multiple of 3 too"), (48, 16, 3, "use 12$"), (16, 2, 8, "use 8$")],
)
def test_groups_must_be_shared_evenly(batch_rows: int, group_rows: int, world: int, advice: str) -> None:
    match = f"train.group_rows {group_rows} is not a multiple of the {world} processes; {advice}"
    with pytest.raises(FredaError, match=match):
        rank_rows(batch_rows, group_rows, rank=0, world=world)


def test_a_rank_is_one_of_the_world() -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} of 2"):
            rank_rows(8, 4, rank=rank, world=2)
    with pytest.raises(ValueError, match="groups of 3 of 8 rows"):
        rank_rows(8, 3, rank=0, world=1)


# -- prefetching -----------------------------------------------------------------------------------------------------


def reader(folder: Path) -> Callable[[int], list[Batch]]:
    """Steps of two groups of three rows, from a loader of its own."""
    loader = Loader(folder, "train", seq_len=32, seed=1)
    return lambda step: [loader.batch(step * 6 + row, 3) for row in (0, 3)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize(("first", "ahead"), [(0, 1), (0, 4), (5, 2)])
def test_prefetched_batches_are_those_of_the_loader(folder: Path, first: int, ahead: int) -> None:
    direct = reader(folder)
    with Prefetcher(reader(folder), range(first, 12), ahead=ahead) as prefetcher:
        for step in range(first, 12):  # through several epochs
            taken = prefetcher.take(step)
            assert len(taken) == 2 and all(equal(one, two) for one, two in zip(taken, direct(step), strict=True))
    assert not prefetch_threads()


def test_the_thread_stays_a_few_steps_ahead_and_never_passes_the_last() -> None:
    built: list[int] = []

    def build(step: int) -> list[Batch]:
        built.append(step)
        return []

    with Prefetcher(build, range(3, 9), ahead=2) as prefetcher:
        wait_until(lambda: built == [3, 4])
        time.sleep(0.05)
        assert built == [3, 4], "two steps ahead, no more"
        prefetcher.take(3)
        wait_until(lambda: built == [3, 4, 5])
        for step in range(4, 9):
            prefetcher.take(step)
        with pytest.raises(ValueError, match=r"asked for step 9, next is 9 of range\(3, 9\)"):
            prefetcher.take(9)
    assert built == [3, 4, 5, 6, 7, 8]


def test_steps_are_taken_in_order_and_within_the_context() -> None:
    prefetcher = Prefetcher(lambda step: [], range(4))
    with pytest.raises(RuntimeError, match="asked for step 0 outside of the context"):
        prefetcher.take(0)
    with prefetcher:
        prefetcher.take(0)
        for step in (0, 2):
            with pytest.raises(ValueError, match=f"asked for step {step}, next is 1"):
                prefetcher.take(step)
    with pytest.raises(RuntimeError, match="asked for step 1 outside of the context"):
        prefetcher.take(1)


@pytest.mark.parametrize("built", ["nothing", "all it may"])
def test_the_thread_ends_with_the_context(built: str) -> None:
    """Also by an exception, whether the thread is building or waits for the loop to take a step."""
    begun = threading.Event()

    def build(step: int) -> list[Batch]:
        begun.set()
        time.sleep(0.05 if built == "nothing" else 0)
        return []

    with pytest.raises(KeyboardInterrupt), Prefetcher(build, range(1000), ahead=2) as prefetcher:
        begun.wait()
        if built == "all it may":
            wait_until(lambda: all(future.done() for future in prefetcher._ready))
        raise KeyboardInterrupt
    assert not prefetch_threads()


def test_an_error_in_the_thread_is_raised_where_its_step_is_taken() -> None:
    def broken_disk(step: int) -> list[Batch]:
        if step == 2:
            raise OSError("cannot read row 7")
        return []

    with Prefetcher(broken_disk, range(10), ahead=4) as prefetcher:
        prefetcher.take(0)
        prefetcher.take(1)
        for _ in range(2):  # asking again does not hang
            with pytest.raises(OSError, match="cannot read row 7") as caught:
                prefetcher.take(2)
    assert "broken_disk" in "".join(traceback.format_tb(caught.value.__traceback__))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_row_length_must_fit_the_shards(folder: Path) -> None:
    with pytest.raises(FredaError, match="seq_len 30 is not a multiple of the shards' align 4; use 28 or 32"):
        Loader(folder, "train", seq_len=30, seed=0)


def test_an_empty_split_cannot_be_trained_on(folder: Path) -> None:
    with pytest.raises(FredaError, match=r"the validation split of .* holds no document"):
        Loader(folder, "validation", seq_len=32, seed=0)


def test_tokenizer_must_be_that_of_the_shards(tmp_path: Path) -> None:
    prepare_corpus(CorpusConfig(problems=100, validation_problems=5, vocab_size=300), tmp_path)
    loader = Loader(tmp_path, "validation", seq_len=64, seed=0)
    loader.check_tokenizer(Tokenizer.load(tmp_path))
    other = train_tokenizer(["some other text"], 260)
    ours = loader.manifest.tokenizer[:8]
    with pytest.raises(FredaError, match=f"tokenizer {ours}, the model has {other.fingerprint[:8]}; prepare the data"):
        loader.check_tokenizer(other)


def test_prepared_documents_come_out_as_text(tmp_path: Path) -> None:
    manifest = prepare_corpus(CorpusConfig(problems=60, validation_problems=5, vocab_size=300), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    loader = Loader(tmp_path, "train", seq_len=256, seed=0)
    batch = loader.batch(0, loader.rows)
    texts = {
        tokenizer.decode(tokens[document == index].tolist())
        for tokens, document in zip(batch.tokens, batch.document, strict=True)
        for index in range(int(document.max()) + 1)
    }
    shard = Documents(tmp_path, "train", manifest)
    assert texts == {tokenizer.decode(shard.document(index).tolist()) for index in range(60)}
    assert all(text.startswith("Q: ") and text.endswith(".") for text in texts)


def test_rows_of_one_document_are_known(tmp_path: Path, folder: Path) -> None:
    """The masks of such rows are simpler; the loader says so, and says it of no other."""
    loader = Loader(folder, "train", seq_len=32, seed=1)
    said = [loader.batch(row, 1) for row in range(loader.rows)]
    assert {batch.one_document for batch in said} == {True, False}
    for batch in said:
        assert batch.one_document == (int(batch.document.max()) <= 0) == batch.map(torch.clone).one_document
    whole, packed = (next(batch for batch in said if batch.one_document == one) for one in (True, False))
    assert Batch.cat([whole, whole]).one_document and not Batch.cat([whole, packed]).one_document
    both = loader.batch(0, loader.rows)
    assert not both.one_document and both.map(lambda part: part[:1]).tokens.shape == (1, 32)
