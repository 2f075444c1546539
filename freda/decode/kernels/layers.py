"""All layers of a forward over few tokens of one request in one launch (`layers.cu`).

A kernel for each product and for attention leaves the memory idle at every end of one and beginning of the next. In
one launch the weights of the next product are under way meanwhile. The plain twin is the Transformer; the kernels of
`skinny` and `pages` do the same, and are faster for more tokens.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freda.decode.kernels import cuda
from freda.decode.kernels.rowwise import Heads
from freda.decode.kernels.skinny import Stream
from freda.decode.pages import BlockPlaces, BlockTable, ForwardShape
from freda.model.config import ModelConfig

SOURCE = Path(__file__).with_suffix(".cu")
MOST_TOKENS, LEAST_MEMORY = 8, 200_000  # bytes of shared memory: of a ring that hides how long an exchange takes
WARPS, COMPUTING, PHASES, MOST_ROWS = 10, 8, 5, 32  # as the source has them; the last: of x, for a thread block
WEIGHTS = ("qkv", "out", "gate_up", "down", "input_norms", "post_norms", "q_norms", "k_norms", "biases")
TEXTS = ("pages", "behind", "table", "stored", "pending", "cosine", "sine")
BUFFERS = ("x", "scaled", "squares", "attended", "inner", "projected", "mixed", "lse", "done")
POINTERS = (*WEIGHTS, *TEXTS, *BUFFERS)


class Args(ctypes.Structure):
    """What the kernel is given."""

    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [
        ("table_pages", ctypes.c_longlong),
        ("pages_step", ctypes.c_longlong),
    ]


class Whole(NamedTuple):
    """The kernel for one model and one shape of a forward, and its memory."""

    kernel: cuda.Kernel
    blocks: int
    projected: Tensor
    mixed: Tensor
    lse: Tensor
    done: Tensor


def fits(heads: Heads, width: int, shape: ForwardShape, device: torch.device) -> bool:
    """Whether the kernel is made for a forward, of a stream of this width, and faster than others: one request that
    drafts, on a Hopper GPU or a later one."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    queries = shape.tokens * heads.heads // heads.kv_heads
    blocks, memory = _size_of(device)
    one = shape.rows == 1 and shape.prompts == 0 and 1 < shape.tokens <= MOST_TOKENS
    large = memory >= LEAST_MEMORY and heads.kv_heads <= blocks and width <= MOST_ROWS * blocks
    return one and large and queries <= 16 * COMPUTING


def _size_of(device: torch.device) -> tuple[int, int]:
    """The multiprocessors of a GPU, and the bytes of shared memory that a thread block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def new_whole(config: ModelConfig, shape: ForwardShape, page: int, device: torch.device) -> Whole | None:
    """The kernel for forwards of this shape over pages of so many tokens; None, with a warning, where it cannot be
    compiled."""
    blocks, memory = _size_of(device)
    defines: dict[str, Any] = {"LAYERS": config.layers, "DIM": config.dim, "FFN": config.ffn_dim}
    defines |= {"HEADS": config.heads, "KV": config.kv_heads, "WIDTH": config.head_dim, "EPS": f"{config.norm_eps!r}f"}
    defines |= {"NORM": int(config.qk_norm), "BIAS": int(config.qkv_bias), "PAGE": page, "CAUSAL": int(shape.causal)}
    defines |= {
        "TOKENS": shape.tokens,
        "BLOCK": shape.block,
        "CAUSAL": int(shape.causal),
        "GRID": blocks,
        "MEMORY": memory,
    }
    try:
        kernel = _kernel(tuple(defines.items()), memory)
    except cuda.Unavailable as error:
        warnings.warn(f"one request is decoded by more kernels than necessary: {error}", stacklevel=2)
        return None
    strips = -(-shape.tokens * config.heads // config.kv_heads // 16)
    found = config.kv_heads * (blocks // config.kv_heads) * (COMPUTING // strips) * strips * 16

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, device=device)

    return Whole(
        kernel,
        blocks,
        projected=empty(shape.tokens, (config.heads + 2 * config.kv_heads) * config.head_dim),
        mixed=empty(found, config.head_dim),
        lse=empty(found),
        done=torch.zeros(config.layers * (PHASES + config.kv_heads), dtype=torch.int32, device=device),
    )


@functools.cache
def _kernel(defines: tuple[tuple[str, Any], ...], memory: int) -> cuda.Kernel:
    return cuda.kernel(SOURCE, "run", dict(defines), memory)


def run(
    whole: Whole,
    weights: dict[str, Tensor | None],
    pages: Tensor,
    blocks: BlockPlaces,
    texts: BlockTable,
    buffers: tuple[Stream, Tensor, Tensor, Tensor],
) -> None:
    """All layers over what the stream holds.

    `weights`: those that `WEIGHTS` names, of all layers; `pages`: all of them, (L, 2, ·); `buffers`: the stream, cosine
    and sine of its tokens, what was attended, and what was gated.
    """
    stream, rotary, attended, inner = buffers
    whole.done.zero_()
    given = {**weights, "pages": pages, **blocks._asdict(), **texts._asdict(), "cosine": rotary[0], "sine": rotary[1]}
    given |= {**stream._asdict(), "attended": attended, "inner": inner, **whole._asdict()}
    pointers = [given[name] for name in POINTERS]
    args = Args(*(None if tensor is None else tensor.data_ptr() for tensor in pointers))
    args.table_pages, args.pages_step = texts.table.shape[1], pages.stride(1)
    whole.kernel.launch(args, whole.blocks, 32 * WARPS)
