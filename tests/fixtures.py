"""Fixtures that many tests share; what they are made of is in `tests/helpers.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from freda.data.config import CorpusConfig
from freda.data.loader import Batch
from freda.data.prepare import prepare_corpus
from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.methods.method import Method
from freda.model.transformer import Transformer
from tests.helpers import method, packed_batch, tiny_model, write_source

torch.set_num_threads(1)  # models this small gain nothing from a second thread, and lose much on a busy machine


@pytest.fixture
def model() -> Transformer:
    return tiny_model()


@pytest.fixture
def batch() -> Batch:
    return packed_batch([[8, 12, 4], [16, 8], [12]])


@pytest.fixture
def settings() -> Method:
    return method(block_size=4)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Word problems of the embedded corpus, for runs that only read them."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    prepare_corpus(CorpusConfig(problems=120, validation_problems=12, vocab_size=300), folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Tom has 12 apples and buys 7 more.\n"] * 3, 280)


@pytest.fixture(scope="session")
def quiet_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two sources of documents for `mixture`."""
    for number, name in enumerate(("one", "two")):
        write_source(tmp_path / f"{name}.jsonl", 150, number)
    return tmp_path


@pytest.fixture(scope="session")
def rates_once() -> Iterator[None]:
    """The rates of this machine, measured once, for tests of what a benchmark makes of them."""
    from freda.bench import decode, rates, train

    with pytest.MonkeyPatch.context() as patch:
        for module in (decode, train):
            patch.setattr(module, "matmul_rate", cache(rates.matmul_rate))
        patch.setattr(decode, "copy_rate", cache(rates.copy_rate))
        yield
