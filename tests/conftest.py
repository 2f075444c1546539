"""Small things that many tests share: tiny models, packed rows."""

from __future__ import annotations

import pytest
import torch

from freda.data.loader import Batch
from freda.data.tokenizer import train_tokenizer
from freda.methods.config import MethodConfig
from freda.model.config import ModelConfig
from freda.model.transformer import Transformer
from freda.folders.model_folder import LoadedModel

VOCAB, BLANK, EOS = 29, 28, 27

torch.set_num_threads(1)  # models this small gain nothing from a second thread, and lose much on a busy machine


def tiny_model(seed: int = 0, **shape: object) -> Transformer:
    """Two layers, grouped heads, weights large enough that every input changes the output."""
    config = ModelConfig(
        **{
            "vocab_size": VOCAB,
            "dim": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "ffn_dim": 48,
            **shape,
        }
    )
    model = Transformer(config, blank_id=BLANK)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return model


def answering_model(
    texts: list[str], vocab_size: int = 300, *, seed: int, method: str = "self-refine", **shape: int
) -> LoadedModel:
    """One layer of random weights with a tokenizer of `texts`; its embedding is so large that it answers something."""
    tokenizer = train_tokenizer(texts, vocab_size)
    values = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn_dim": 48, **shape}
    network = Transformer(ModelConfig(vocab_size=tokenizer.size, **values), tokenizer.blank_id)  # type: ignore[arg-type]
    network.init_weights(seed)
    with torch.no_grad():
        network.embed_tokens.weight.mul_(20)
    return LoadedModel(network, tokenizer, MethodConfig(name=method), "test")  # type: ignore[arg-type]


def packed_batch(lengths: list[list[int]], seed: int = 0) -> Batch:
    """Rows of documents of the given lengths, padded to the longest row, with random tokens."""
    width = max(sum(row) for row in lengths)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, EOS, (len(lengths), width), generator=generator)
    document = torch.full((len(lengths), width), -1, dtype=torch.int32)
    position = torch.zeros_like(document)
    fill = torch.zeros_like(document, dtype=torch.bool)
    for row, pieces in enumerate(lengths):
        begin = 0
        for number, length in enumerate(pieces):
            document[row, begin : begin + length] = number
            position[row, begin : begin + length] = torch.arange(length)
            tokens[row, begin + length - 2 : begin + length] = EOS
            fill[row, begin + length - 1] = True
            begin += length
    return Batch(tokens, document, position, fill)


@pytest.fixture
def model() -> Transformer:
    return tiny_model()


@pytest.fixture
def batch() -> Batch:
    return packed_batch([[8, 12, 4], [16, 8], [12]])


@pytest.fixture
def settings() -> MethodConfig:
    return MethodConfig(block_size=4)
