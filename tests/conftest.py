"""Fixtures that many tests share; what they are made of is in `tests/helpers.py`."""

from __future__ import annotations

import pytest
import torch

from freda.data.loader import Batch
from freda.methods.method import Method
from freda.model.transformer import Transformer
from tests.helpers import method, packed_batch, tiny_model

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
