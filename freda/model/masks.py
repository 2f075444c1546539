"""Who may see whom: one rule over four numbers per token.

Every forward of `freda` (autoregressive, clean text, drafts beside clean text, candidates, decoding over a cache) uses
`visible` and nothing else. A token is described by

    stream      CLEAN (committed text) or DRAFT (a block being refined)
    document    which document of a packed row it belongs to; padding is -1
    block       index of its block, counted from the start of its document
    candidate   which of several packed drafts of the same block it belongs to (0 when there is one)

and the rule of the paper (figure attn-mask-design) reads: a clean token sees the clean tokens of its own and earlier
blocks; a draft token sees its own block of its own candidate and the clean tokens of strictly earlier blocks; nobody
sees another document, and clean text never sees a draft. With one token per block the clean rule is the causal mask.

Padding sees padding: a row that saw nothing would be NaN, and what it computes is never used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CLEAN, DRAFT = 0, 1


class Tokens(NamedTuple):
    """The four numbers of every token of a batch, each (R, T) int32."""

    stream: Tensor
    document: Tensor
    block: Tensor
    candidate: Tensor


def clean_tokens(document: Tensor, position: Tensor, block_size: int) -> Tokens:
    """Vectors of committed text. `document` and `position` are (R, T); positions restart in each document."""
    block = (position // block_size).int()
    zero = torch.zeros_like(block)
    return Tokens(zero + CLEAN, document.int(), block, zero)


def stored_tokens(lengths: Tensor, block_size: int) -> Tokens:
    """Vectors of committed text of R requests, each as long as its entry of `lengths`, up to the longest: (R, K)."""
    position = torch.arange(int(lengths.max()), device=lengths.device).expand(len(lengths), -1)
    return clean_tokens(torch.where(position < lengths[:, None], 0, -1), position, block_size)


def draft_tokens(document: Tensor, position: Tensor, block_size: int, candidate: Tensor | None = None) -> Tokens:
    """Vectors of a draft; `candidate` (R, T) tells packed drafts of one block apart."""
    _, document, block, zero = clean_tokens(document, position, block_size)
    return Tokens(zero + DRAFT, document, block, zero if candidate is None else candidate.int())


def concat(*parts: Tokens) -> Tokens:
    """Tokens side by side in one row."""
    return Tokens(*(torch.cat(vectors, dim=1) for vectors in zip(*parts, strict=True)))


def visible(query: Tokens, key: Tokens) -> Tensor:
    """Whether `query` may see `key`: elementwise with broadcasting, so dense and flex attention share it."""
    same_document = query.document == key.document
    clean_key = (key.stream == CLEAN) & (key.block < query.block + (query.stream == CLEAN).int())
    drafts = (key.stream == DRAFT) & (query.stream == DRAFT)
    own_draft = drafts & (key.block == query.block) & (key.candidate == query.candidate)
    return same_document & (clean_key | own_draft)


def dense(query: Tokens, key: Tokens) -> Tensor:
    """The whole mask, (R, Q, K) bool: the plain twin of the flex mask, and the mask of SDPA."""
    return visible(Tokens(*(v[:, :, None] for v in query)), Tokens(*(v[:, None, :] for v in key)))
