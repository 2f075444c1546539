"""How much of a batch is text, and how many pairs of a query and a key attention computes: see `Method.flops`."""

from __future__ import annotations

from freda.data.loader import Batch


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
