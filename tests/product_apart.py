"""One product of `kernels.whole` by several programs, apart from the rest, where programs run one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freda.model.kernels.whole import _product

TOKENS, WIDTH, TILE = 5, 256, 128


@triton.jit  # type: ignore[untyped-decorator]
def _apart(  # type: ignore[no-untyped-def]
    A, W, OUT, X, SCALED, SQUARES, NORM, SUMS, COUNTS, tokens, eps,
    ROWS: tl.constexpr, INNER: tl.constexpr, MODE: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    _product(
        A, W, W, OUT, X, SCALED, SQUARES, NORM, SUMS, COUNTS, tokens, eps,
        ROWS, INNER, MODE, D, P, 16, 128, 128, 2, SLOTS, False,
    )  # fmt: skip


def product(mode: int, programs: int) -> list[Tensor]:
    """What a product leaves: its result, or the stream, its scaled copy and its squares; and the counts."""
    generator = torch.Generator().manual_seed(mode)
    rows, inner = {0: (384, WIDTH), 1: (192, WIDTH), 2: (WIDTH, 640)}[mode]
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    a = x if mode < 2 else torch.randn(TOKENS, inner, generator=generator)
    w = torch.randn(2 * rows if mode == 1 else rows, inner, generator=generator) / inner**0.5
    norm = torch.rand(WIDTH, generator=generator)
    squares = x.view(TOKENS, WIDTH // TILE, TILE).square().sum(-1).T.contiguous()
    out, scaled = torch.zeros(TOKENS, rows), torch.zeros(TOKENS, WIDTH)
    sums, counts = torch.full((8 * programs, TILE, 16), float("nan")), torch.zeros(16, dtype=torch.int32)
    _apart[(programs,)](
        *(a.clone(), w, out, x, scaled, squares, norm, sums, counts, TOKENS, 1e-6),
        ROWS=rows,
        INNER=inner,
        MODE=mode,
        D=WIDTH,
        P=programs,
        SLOTS=8,
    )
    return [out, counts] if mode < 2 else [x, scaled, squares, counts]


def plain(mode: int) -> Tensor:
    """The result alone, in PyTorch."""
    generator = torch.Generator().manual_seed(mode)
    rows, inner = {0: (384, WIDTH), 1: (192, WIDTH), 2: (WIDTH, 640)}[mode]
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    a = x if mode < 2 else torch.randn(TOKENS, inner, generator=generator)
    w = torch.randn(2 * rows if mode == 1 else rows, inner, generator=generator) / inner**0.5
    if mode == 2:
        return x + a @ w.T
    found = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) @ w.T
    return found if mode == 0 else torch.nn.functional.silu(found[:, :rows]) * found[:, rows:]


if __name__ == "__main__":
    for mode in range(3):
        for programs in (1, 2, 3, 4, 5, 7, 11):
            found = product(mode, programs)
            torch.testing.assert_close(found[0], plain(mode), rtol=1e-4, atol=1e-4)
            assert not found[-1].any()
            if mode == 2:
                stream = found[0].view(TOKENS, WIDTH // TILE, TILE)
                torch.testing.assert_close(found[2], stream.square().sum(-1).T, rtol=1e-4, atol=1e-4)
    print("equal")
