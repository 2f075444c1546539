"""Who may see whom, one rule over four numbers per token, and attention by it.

Every forward of `freda` (autoregressive, clean text, drafts beside clean text, candidates, decoding over a cache) uses
`visible` and nothing else. A token is described by

    stream      CLEAN (committed text) or DRAFT (a block being refined)
    document    which document of a packed row it belongs to; padding is -1
    block       position of the first token of its block; a causal token is a block of its own
    candidate   which of several packed drafts of the same block it belongs to (0 when there is one)

and the rule, the paper's (figure attn-mask-design) and that of the shifted layout alike, reads: a clean token sees the
clean tokens of its own and earlier blocks; a draft token sees its own block of its own candidate and the clean tokens
whose blocks begin strictly before it; nobody sees another document, and clean text never sees a draft. With one token
per block the clean rule is the causal mask.

Padding sees padding: a row that saw nothing would be NaN, and what it computes is never used.

Three backends give one answer. `sdpa` builds the dense mask and works everywhere, backward included. `flex` evaluates
`visible` inside the kernel, tile by tile, and skips tiles in which nothing is visible; on CPU it has no backward.
Finding those tiles is compiled too where the mask is large: 0.4 instead of 31 ms for 4,096 drafted tokens over 8,192
keys on an H200, and no dense mask. `staircase` needs no mask for whole rows of one document; other rows are flex's on
CUDA and, so that they have a backward, dense elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from freda.errors import require
from freda.model.staircase import Staircase, attend_rows

CLEAN, DRAFT = 0, 1
Backend = Literal["sdpa", "flex", "staircase"]
Seen = Tensor | BlockMask | Staircase  # who sees whom, as a backend takes it
Drafts = Tensor | bool  # which tokens are draft slots: (R, T) bool, or all of them, or none
Pair = tuple[Tensor, Tensor]  # keys and values
LARGE_MASK = 1 << 22  # pairs of a query and a key; rows of training have more, decoding fewer
# Tiles of the backward pass, bf16, heads of 128, found by trying on an H200: 1.65 instead of 1.86 ms for 4,096 tokens.
FLEX_OPTIONS = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64}
FLEX_OPTIONS |= {"bwd_num_warps": 8, "bwd_num_stages": 3}


class Mask(NamedTuple):
    """What a forward knows of its tokens beside their embeddings: who sees whom, and which are draft slots."""

    seen: Seen
    drafts: Drafts


class Tokens(NamedTuple):
    """The four numbers of every token of a batch, each (R, T) int32."""

    stream: Tensor
    document: Tensor
    block: Tensor
    candidate: Tensor


def clean_tokens(document: Tensor, position: Tensor, block_size: int) -> Tokens:
    """Vectors of committed text in blocks of `block_size`, 1 for causal text. `document` and `position` are (R, T);
    positions restart in each document."""
    block = (position // block_size * block_size).int()
    zero = torch.zeros_like(block)
    return Tokens(zero + CLEAN, document.int(), block, zero)


def stored_tokens(lengths: Tensor, block_size: int) -> Tokens:
    """Vectors of committed text of R requests, each as long as its entry of `lengths`, up to the longest: (R, K)."""
    position = torch.arange(int(lengths.max()), device=lengths.device).expand(len(lengths), -1)
    return clean_tokens(torch.where(position < lengths[:, None], 0, -1), position, block_size)


def draft_tokens(document: Tensor, first: Tensor, candidate: Tensor | None = None) -> Tokens:
    """Vectors of draft slots, the `first` of whose block is at that position, (R, T); `candidate` (R, T) tells packed
    drafts of one block apart."""
    zero = torch.zeros_like(first, dtype=torch.int32)
    return Tokens(zero + DRAFT, document.int(), first.int(), zero if candidate is None else candidate.int())


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


def make_mask(query: Tokens, key: Tokens, backend: Backend, *, drafts: bool | None = None) -> Mask:
    """The mask of one forward, built once and shared by all layers. `drafts`: all queries are draft slots, or none is;
    without it their streams say which."""
    which = query.stream == DRAFT if drafts is None else drafts
    if backend == "sdpa" or (backend == "staircase" and not query.document.is_cuda):
        return Mask(dense(query, key)[:, None], which)  # (R, 1, Q, K)

    def rule(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(Tokens(*(v[row, q] for v in query)), Tokens(*(v[row, k] for v in key)))

    (rows, queries), keys = query.document.shape, key.document.shape[1]
    # Small masks of ever new sizes are found faster by evaluating the rule densely than by compiling for each size.
    large = query.document.is_cuda and rows * queries * keys >= LARGE_MASK
    find_tiles = _compiled(create_block_mask) if large else create_block_mask
    return Mask(find_tiles(rule, rows, None, queries, keys, device=query.document.device), which)


def attend(q: Tensor, new: Pair, past: Pair | None, mask: Seen) -> Tensor:
    """Softmax attention of q (R, H, T, C) over the keys and values of `past` and `new`, each (R, Hkv, K, C) with Hkv
    dividing H; returns (R, H, T, C)."""
    if isinstance(mask, Staircase):
        assert (past is not None) == mask.draft
        return attend_rows(q, past or new, new if past is not None else None, mask.block)
    k, v = new
    if past is not None:
        k, v = (torch.cat([old.to(part.dtype), part], dim=2) for old, part in zip(past, new, strict=True))
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        plain = torch.compiler.is_compiling() or not q.is_cuda  # in a compiled layer it is compiled with the rest
        options = FLEX_OPTIONS if q.is_cuda and q.dtype == torch.bfloat16 else None
        attention: Any = flex_attention if plain else _compiled(flex_attention)  # avoids dense scores
        out: Tensor = attention(q, k, v, block_mask=mask, enable_gqa=grouped, kernel_options=options)
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def pick_backend(name: Literal["auto", "sdpa", "flex", "staircase"], device: torch.device) -> Backend:
    """The backend of a training: resolves `auto` to staircase on CUDA, to sdpa elsewhere."""
    cuda = device.type == "cuda"
    require(cuda or name != "flex", f"train.attention is flex, which does not train on a {device.type}; use auto")
    if name == "auto":
        return "staircase" if cuda else "sdpa"
    return name
