"""Attention of rows of one document: a causal kernel and a few keys more are the mask's rule, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from freda.methods import method_like
from freda.methods.draft import _is_staircase, clean_mask, draft_mask
from freda.methods.geometry import Geometry
from freda.methods.method import Step
from freda.model import staircase
from freda.model.attention import Pair, attend, clean_tokens, concat, draft_tokens, pick_backend
from freda.model.attention import dense as dense_mask
from freda.model.parts import Parts
from freda.model.staircase import Staircase, fits
from tests.helpers import packed_batch, run_interpreted, tiny_model


def tensors(length: int, *, heads: int = 4, kv_heads: int = 2, width: int = 64, dtype: torch.dtype) -> list[Tensor]:
    """Queries, clean keys and values, own keys and values, in the memory order of a layer; and an upstream gradient."""
    generator = torch.Generator().manual_seed(length)
    sizes = (heads, kv_heads, kv_heads, kv_heads, kv_heads, heads)
    made = [torch.randn(2, length, count, width, generator=generator).to(dtype).transpose(1, 2) for count in sizes]
    return [part.requires_grad_(True) for part in made[:5]] + made[5:]


def both(
    parts: list[Tensor], block: int, *, draft: bool, device: str = "cpu", attention: Callable[..., Tensor] = attend
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients by the staircase, and by the dense mask in fp32."""
    q, keys, values, own_keys, own_values, upstream = (part.detach().to(device) for part in parts)
    length = q.shape[2]
    place = torch.arange(length, device=device).expand(2, -1)
    clean = clean_tokens(torch.zeros_like(place), place, block)
    mine = draft_tokens(torch.zeros_like(place), place // block * block)
    dense = dense_mask(mine, concat(clean, mine)) if draft else dense_mask(clean, clean)
    found = []
    for mask, dtype in ((Staircase(block, draft), q.dtype), (dense[:, None], torch.float32)):
        given = [part.to(dtype).requires_grad_(True) for part in (q, keys, values, own_keys, own_values)]
        old: Pair = (given[1], given[2])
        new: Pair = (given[3], given[4])
        function = attention if isinstance(mask, Staircase) else attend
        out = function(given[0], new if draft else old, old if draft else None, mask)
        learnt = given if draft else given[:3]
        found.append([out, *torch.autograd.grad(out, learnt, upstream.to(dtype))])
    return found[0], found[1]


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(("length", "block"), [(4, 4), (8, 4), (36, 4), (40, 8), (64, 32), (12, 1), (6, 2)])
def test_the_staircase_is_the_dense_mask(length: int, block: int, draft: bool) -> None:
    ours, dense = both(tensors(length, dtype=torch.float32), block, draft=draft)
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("length", "block", "draft"), [(256, 4, True), (256, 1, False), (64, 16, True), (64, 32, False)]
)
def test_in_half_precision_only_what_is_given_is_rounded(
    length: int, block: int, draft: bool, dtype: torch.dtype
) -> None:
    ours, dense = both(tensors(length, dtype=dtype), block, draft=draft)
    for one, other in zip(ours, dense, strict=True):
        assert one.dtype == dtype
        assert (one.float() - other).norm() <= torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize(("block", "draft"), [(1, False), (4, False), (4, True)])
def test_compilers_are_told_the_truth(block: int, draft: bool) -> None:
    """The shapes, precisions and strides that the operators say they return are those that they return, whatever the
    memory order of what they are given."""
    parts = (part.detach().contiguous().requires_grad_(True) for part in tensors(16, dtype=torch.bfloat16))
    q, keys, values, own_keys, own_values, upstream = parts
    own = (own_keys, own_values) if draft else ()
    torch.library.opcheck(staircase._attend, (q, keys, values, *(own or (None, None)), block))
    given = [part.detach() for part in (q, keys, values, *own)]
    out, lse = staircase._attend(*given[:3], *(given[3:] or (None, None)), block)
    torch.library.opcheck(staircase._backward, (upstream.detach(), given, out, lse, block))


def test_what_the_kernels_are_made_for() -> None:
    assert fits(32, 8, 128, 4)
    assert fits(4, 4, 64, 32)
    assert not fits(32, 8, 96, 4)  # a head's width
    assert not fits(32, 8, 128, 64)  # a block larger than a tile
    assert not fits(32, 8, 128, 6)  # tiles would cut blocks
    assert not fits(6, 4, 128, 4)  # heads that cannot share keys evenly


SHIFTED = "layout=shifted,ar_weight=0.5"


@pytest.mark.parametrize(
    "name",
    ["autoregressive", "block-diffusion", "self-refine", f"self-refine:{SHIFTED}", f"block-diffusion:{SHIFTED}"],
)
def test_losses_of_whole_rows_are_those_of_the_mask(name: str) -> None:
    """Rows of one document, one of them padded: loss and every gradient."""
    step = Step(seed=1, step=0, row=torch.arange(2), progress=0.0, passes=2)
    batch = packed_batch([[64], [40]])._replace(one_document=True)
    found = []
    for backend in ("sdpa", "staircase"):
        model = tiny_model(head_dim=64, heads=4, kv_heads=2)
        model.backend = backend  # type: ignore[assignment]
        loss = method_like(name).loss(Parts(model), batch, step)
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_which_rows_are_staircases() -> None:
    model = tiny_model(head_dim=64)
    whole, packed = packed_batch([[64], [40]])._replace(one_document=True), packed_batch([[32, 32], [40]])
    assert not isinstance(clean_mask(model, whole, Geometry(4)).seen, Staircase)  # nobody asked for it
    model.backend = "staircase"
    assert clean_mask(model, whole, Geometry(4)).seen == Staircase(4, draft=False)
    assert draft_mask(model, whole, Geometry(4)).seen == Staircase(4, draft=True)
    shifted = Geometry(4, shift=1, causal=True)  # the plain causal kernel, and drafts as ever
    assert clean_mask(model, whole, shifted).seen == Staircase(1, draft=False)
    assert draft_mask(model, whole, shifted).seen == Staircase(4, draft=True)
    for mask in (clean_mask(model, packed, Geometry(4)), draft_mask(model, packed, Geometry(4))):
        assert isinstance(mask.seen, Tensor), "dense, which has a backward on a CPU"
    short = packed_batch([[8]])._replace(one_document=True)
    assert not isinstance(draft_mask(model, short, Geometry(8)).seen, Staircase)
    assert not isinstance(clean_mask(model, whole, Geometry(12)).seen, Staircase)


@pytest.mark.parametrize(
    ("dtype", "cuda", "expected"),
    [
        (torch.bfloat16, True, True),
        (torch.float16, True, True),
        (torch.float32, True, False),
        (torch.float32, False, True),
    ],
)
def test_the_causal_kernel_of_a_gpu_is_not_for_fp32(dtype: torch.dtype, cuda: bool, expected: bool) -> None:
    weight = SimpleNamespace(dtype=dtype, is_cuda=cuda)
    model: Any = SimpleNamespace(
        config=tiny_model(head_dim=64).config, embed_tokens=SimpleNamespace(weight=weight), backend="staircase"
    )
    assert _is_staircase(model, packed_batch([[64]])._replace(one_document=True), 4) == expected


def test_backends_by_device() -> None:
    assert (
        pick_backend("auto", torch.device("cuda")) == "staircase"
        and pick_backend("auto", torch.device("cpu")) == "sdpa"
    )
    assert pick_backend("flex", torch.device("cuda")) == "flex"


def check_interpreted() -> None:
    from freda.model.kernels import staircase as kernels

    torch.use_deterministic_algorithms(True)  # memory that nobody writes to is NaN
    cases = ((36, 4), (64, 8), (48, 16), (32, 32), (70, 2))
    for (length, block), dtype in [(case, torch.float32) for case in cases] + [((36, 4), torch.float16)]:
        for draft in (False, True):
            heads = {} if length == 36 else {"heads": 2, "kv_heads": 1}
            parts = (part.detach() for part in tensors(length, **heads, dtype=dtype))
            q, keys, values, own_keys, own_values, upstream = parts
            clean, own = (keys, values), (own_keys, own_values) if draft else None
            wanted = staircase._plain(q, clean, own, block)
            causal, back = causal_part(upstream, q, clean, block if draft else 0, wanted)
            found = kernels.merge(q, clean, own, causal, block)
            gradients = kernels.gradients(upstream, q, clean, own, wanted, back, block)
            plain = staircase._plain_gradients(upstream, q, clean, own, wanted, block)
            error = 1e-4 if dtype == torch.float32 else 5e-3
            for one, other in zip([*found, *gradients], [*wanted, *plain], strict=True):
                torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=error)


def causal_part(upstream: Tensor, q: Tensor, clean: Pair, shift: int, whole: Pair) -> tuple[Pair, list[Tensor]]:
    """What a library's causal kernel gives: attention and logsumexp of the keys up to the diagonal, and these keys'
    part of the gradients of attention over all keys, whose output and logsumexp are `whole`."""
    q, keys, values = staircase._on_diagonal(q, clean, shift)
    rest = (whole[0][:, :, shift:], whole[1][:, :, shift:])
    gradients = staircase._plain_gradients(upstream[:, :, shift:], q, (keys, values), None, rest, 1)
    return staircase._plain(q, (keys, values), None, 1), gradients


@pytest.mark.slow
def test_the_kernels_equal_their_plain_twins(tmp_path: Path) -> None:
    """In Triton's interpreter, where Triton is installed; on a GPU below."""
    pytest.importorskip("triton")
    run_interpreted(check_interpreted, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(("length", "block", "width"), [(512, 4, 128), (256, 8, 64), (136, 4, 128), (1024, 1, 128)])
def test_on_a_gpu(length: int, block: int, width: int, draft: bool, compiled: bool) -> None:
    """In bf16, against fp32 over the dense mask: the error of a precision with 8 bits, no more."""
    parts = tensors(length, heads=8, kv_heads=2, width=width, dtype=torch.bfloat16)
    attention = torch.compile(attend, fullgraph=True) if compiled else attend
    if not compiled:
        parts[5] = parts[5].contiguous()  # an upstream gradient that is laid out otherwise than the output
    ours, dense = both(parts, block, draft=draft, device="cuda", attention=attention)
    for one, other in zip(ours, dense, strict=True):
        assert ((one.float() - other).norm() / other.norm()).item() < 8e-3
