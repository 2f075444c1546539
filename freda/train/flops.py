"""How much arithmetic a step must do: the useful part, without what recomputation adds.

A product of a weight with a token is 2 operations, 6 with its backward. Attention counts pairs of a query and a key it
may see, 4 · heads · width operations forward and twice as many backward. Passes without gradient count their forward.
"""

from __future__ import annotations

from freda.data.loader import Batch
from freda.methods.config import MethodConfig
from freda.model.config import ModelConfig
from freda.model.shapes import head_parameters, layer_parameters


def visible_pairs(lengths: list[int], block_size: int) -> int:
    """Pairs of a token and a key it sees in clean documents of these lengths; drafts over them have as many.

    A clean token of block j sees j + 1 blocks; a drafted one j clean blocks and its own draft.
    """
    blocks = [-(-length // block_size) for length in lengths]
    return sum(block_size * block_size * count * (count + 1) // 2 for count in blocks)


def counted(batch: Batch, block_size: int) -> tuple[int, int]:
    """Tokens of packed rows without padding, and pairs as `visible_pairs` counts them."""
    real = batch.document >= 0
    return int(real.sum()), int(((batch.position // block_size + 1) * block_size * real).sum())


def step_flops(shape: ModelConfig, method: MethodConfig, tokens: int, pairs: int, passes: int) -> float:
    """Useful operations of forward and backward of `tokens` clean tokens with `pairs` visible pairs."""
    layers, head = 2.0 * layer_parameters(shape) * tokens, 2.0 * head_parameters(shape) * tokens
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * pairs
    one_pass = layers + head + attention  # over a draft, forward
    if method.name == "autoregressive":
        return 3 * one_pass
    if method.name == "best-of-n":  # the backbone has no backward; the scorer is small beside it
        return layers + attention + passes * one_pass + (1 + method.num_negatives) * (layers + attention)
    drafts = passes - 1 if method.name == "self-refine" else 0
    return 3 * (2 * layers + head + 2 * attention) + drafts * one_pass
