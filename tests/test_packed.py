"""The forward of decoding by kernels is the Transformer's over gathered pages: hidden states, pages, choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from freda.decode.pages import BlockTable, ForwardShape, Pages
from freda.folders import quantize
from freda.model.config import ModelConfig
from freda.model.transformer import Transformer
from tests.helpers import PlainBackend, run_interpreted

VOCABULARY, PAGE = 205, 16
CASES = [
    ({}, ForwardShape(4, 4, 1), [20, 36], [4, 4]),
    ({"heads": 4, "kv_heads": 2}, ForwardShape(4, 4, 1), [0], [4]),  # no text yet
    (
        {"heads": 4, "kv_heads": 2},
        ForwardShape(4, 4, 3),
        [0, 100, 28],
        [4, 0, 4],
    ),  # some commit, some do not; three drafts each
    ({"qk_norm": False, "qkv_bias": True}, ForwardShape(0, 4, 1), [64, 4], [0, 0]),
    ({}, ForwardShape(1, 1, 0), [63, 5, 130], [1, 1, 1]),  # autoregressive
    ({"heads": 8, "kv_heads": 1, "head_dim": 128}, ForwardShape(8, 8, 2), [136], [8]),
    (
        {},
        ForwardShape(4, 4, 1),
        [244],
        [4],
    ),  # sixteen chunks of 16 tokens for fifteen parts: of two each, the rest is empty
    ({}, ForwardShape(4, 4, 1), list(range(0, 180, 20)), [4] * 9),  # more tokens than the kernels of few rows take
    ({"kv_heads": 2}, ForwardShape(4, 4, 2), [0, 36], [0, 4]),  # every head has its own keys
]
TWO_LAYERS = (0, 4)  # cases that have two layers in Triton's interpreter too; on a GPU all have


def filled_model(device: str, dtype: torch.dtype, **shape: Any) -> Transformer:
    sizes = {"dim": 128, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn_dim": 256, **shape}
    model = Transformer(ModelConfig(vocab_size=VOCABULARY, **sizes), VOCABULARY - 5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            spread, middle = (0.15, 0.0) if weight.dim() > 1 else (0.1, 1.0)
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread + middle)
    model = model.to(device, dtype)
    model.inv_freq = model.inv_freq.float()
    return model


def compare(case: int, device: str, dtype: torch.dtype, *, int8: bool = False, whole: bool = False) -> dict[str, float]:
    """How far the kernels are from the Transformer: relative errors, and the share of equal choices.

    With int8, the Transformer has the weights that the int8 ones stand for. `whole`: texts are not cut into parts.
    """
    from freda.decode.kernels import pages, pick
    from freda.decode.packed import PackedModel, fits

    shape, rows, stored, pending = CASES[case]
    usual, chunk = pages.cut_for, {"chunk": 16} if case % 2 else {}

    def cut(*of: Any, long: bool) -> pages.Cut:
        return usual(*of, long=long)._replace(**chunk)

    if device == "cpu" and case not in TWO_LAYERS:
        shape = {**shape, "layers": 1}
    model = filled_model(device, dtype, **shape, tied=not int8)  # a table of its own for the head
    assert fits(model)
    if int8:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and "embed" not in name:
                    weight.copy_(quantize.unpacked(quantize.packed({"weight": weight}), dtype)["weight"])
    generator = torch.Generator().manual_seed(case)
    count, width = len(stored), 16
    storage = [Pages(model, count * width, PAGE) for _ in range(2)]
    for layer, twin in zip(storage[0].layers, storage[1].layers, strict=True):
        for part, other in zip(layer, twin, strict=True):
            part.copy_(torch.randn(part.shape, generator=generator))
            other.copy_(part)
    numbers = torch.randperm(count * width, generator=generator).view(count, width)
    texts = BlockTable(
        *(torch.as_tensor(part, dtype=torch.int32, device=device) for part in (numbers, stored, pending))
    )
    ids = torch.randint(0, model.blank_id, (count, rows.tokens), generator=generator)
    alpha = torch.rand(count, rows.tokens, generator=generator)
    alpha[:, : rows.commit] = 1
    given = ids.flatten().to(device), alpha.flatten().to(device)
    tokens = torch.arange(count * rows.tokens, device=device).view(count, rows.tokens)[:, -rows.block :]
    found = []
    for backend in (PlainBackend(model, storage[0]), PackedModel(model, storage[1], int8=int8)):
        with patch.object(pages, "MANY", 1 if whole else pages.MANY), patch.object(pages, "cut_for", cut):
            buffers = backend.buffers(count, rows, long=case == 6)
            backend.run(given, texts, rows, buffers)  # type: ignore[arg-type]
        with patch.object(pick, "IDS_AT_ONCE", 64 if case % 2 else pick.IDS_AT_ONCE):
            first = backend.predict(tokens, buffers)  # type: ignore[arg-type]
        found.append((backend.hidden(buffers).view(count, rows.tokens, -1), first))  # type: ignore[arg-type]
    real = torch.ones(count, rows.tokens, dtype=torch.bool, device=device)
    real[:, : rows.commit] = (texts.pending > 0)[:, None]
    (plain, wanted), (fast, got) = found
    stored_error = max(
        ((part - other).float().norm() / part.float().norm()).item()
        for layer, twin in zip(storage[0].layers, storage[1].layers, strict=True)
        for part, other in zip((p[:-1] for p in layer), (o[:-1] for o in twin), strict=True)
    )
    return {
        "hidden": ((fast - plain)[real].float().norm() / plain[real].float().norm()).item(),
        "stored": stored_error,
        "choices": (got.ids == wanted.ids).float().mean().item(),
        "seconds": (got.second_ids == wanted.second_ids).float().mean().item(),
        "prob": (got.prob - wanted.prob).abs().max().item(),
        "second_prob": (got.second_prob - wanted.second_prob).abs().max().item(),
    }


def compare_prefill(device: str, dtype: torch.dtype, **shape: Any) -> float:
    """The largest relative error of a layer's pages after whole prompts, two of them, of 20 tokens."""
    from freda.decode.packed import PackedModel

    model = filled_model(device, dtype, **shape)
    generator = torch.Generator().manual_seed(1)
    storage = [Pages(model, 8, PAGE) for _ in range(2)]
    table = torch.randperm(8, generator=generator).view(2, 4).to(device, torch.int32)
    ids = torch.randint(0, model.blank_id, (2, 20), generator=generator).to(device)
    for backend in (PlainBackend(model, storage[0]), PackedModel(model, storage[1])):
        with torch.no_grad():
            backend.prefill(ids, table, 4)
    both = zip(*(pages.layers for pages in storage), strict=True)
    pairs = [pair for layers in both for pair in zip(*layers, strict=True)]
    return max(((one - two).float().norm() / one.float().norm()).item() for one, two in pairs)


def check_picks() -> None:
    """Of equal logits the lowest ids count, within a tile and across them; of what is no number, some id, unsound."""
    from freda.decode.kernels import pick

    logits = torch.zeros(3, 205)
    logits[1, [70, 150]], logits[2] = 5.0, float("nan")
    with patch.object(pick, "IDS_AT_ONCE", 64):
        ids, prob, second, _ = (part.tolist() for part in pick.pick_of(logits, 200))
    assert (ids[:2], second[:2]) == ([0, 70], [1, 150])
    assert max(ids[2], second[2]) < 200 and prob[2] != prob[2]


SHAPES = [{}, {"heads": 4, "kv_heads": 2, "head_dim": 128}, {"qk_norm": False, "qkv_bias": True}]


def check_interpreted() -> None:
    check_picks()
    for shape in SHAPES:
        assert compare_prefill("cpu", torch.float32, layers=1 if shape else 2, **shape) < 1e-5
    cases: list[tuple[int, dict[str, bool]]] = [(case, {}) for case in range(len(CASES))]
    cases += [(0, {"int8": True})]  # the rest on a GPU
    cases += [(case, {"whole": True}) for case in (1, 2, 3, 4, 5)]
    for case, way in cases:
        found = compare(case, "cpu", torch.float32, **way)
        assert found["choices"] == found["seconds"] == 1
        assert all(found[key] < 1e-5 for key in ("hidden", "stored", "prob", "second_prob")), found


@pytest.mark.slow
def test_in_the_interpreter(tmp_path: Path) -> None:
    """In fp32 on a CPU, where Triton is installed: equal but for the order of sums."""
    pytest.importorskip("triton")
    run_interpreted(check_interpreted, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("way", [{}, {"int8": True}, {"whole": True}])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_on_a_gpu(case: int, way: dict[str, bool]) -> None:
    """In bf16: what its 8 bits leave."""
    found = compare(case, "cuda", torch.bfloat16, **way)
    assert found["hidden"] < 2e-2 and found["stored"] < 1e-2 and found["prob"] < 0.05, found
    assert found["choices"] >= 0.8, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_on_a_gpu(shape: dict[str, Any]) -> None:
    assert compare_prefill("cuda", torch.bfloat16, **shape) < 2e-2
