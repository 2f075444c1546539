"""The forward of decoding by kernels is the Transformer's over gathered pages: hidden states, pages, choices."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from freda.decode.pages import PIECE_TILE, BlockPlaces, BlockTable, ForwardShape, Pages, Pieces
from freda.decode.plain import PlainModel
from freda.folders import tensors
from freda.methods.draft import Prediction, Sampling, predict
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import method, run_interpreted

VOCABULARY, PAGE = 205, 16


class Case(NamedTuple):
    """The sizes of a model, the texts of requests, and the blocks of a forward."""

    sizes: dict[str, Any]
    block: int
    blocks: int
    stored: list[int]
    pending: list[int]
    packed: int = 0  # blocks in the forward; 0: all of them, in order
    absent: tuple[tuple[int, int], ...] = ()  # (request, block) that are not in a packed forward
    few: bool = True  # the products are those of few tokens
    causal: bool = False  # committed text, as in the shifted layout
    ahead: tuple[int, ...] = ()  # tokens of the block of text that each draft stands behind; by default all

    @property
    def shape(self) -> ForwardShape:
        rows = len(self.stored)
        return ForwardShape(rows, self.block, self.blocks, self.packed or rows * self.blocks, causal=self.causal)

    def where(self, generator: torch.Generator) -> Tensor:
        """The places of all blocks (R, J); packed ones are in any order, with padding anywhere among them."""
        rows, _, blocks, packed, *_ = self.shape
        if self.shape.dense:
            return torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
        where = torch.full((rows, blocks), -1, dtype=torch.int32)
        places = iter(torch.randperm(packed, generator=generator).tolist())
        for row, block in itertools.product(range(rows), range(blocks)):
            if (block or self.pending[row]) and (row, block) not in self.absent:
                where[row, block] = next(places)
        return where


FOUR = {"heads": 4, "kv_heads": 2}
CASES = [
    Case({}, 4, 2, [20, 36], [4, 4]),
    Case(FOUR, 4, 2, [0], [4]),  # no text yet
    Case(FOUR, 4, 4, [100, 28], [0, 4]),  # three drafts each, beside a block to commit or none
    Case({"qk_norm": False, "qkv_bias": True}, 4, 2, [64, 4], [0, 0], packed=3),  # nothing to commit
    Case({}, 1, 1, [63, 5, 130], [1, 1, 1]),  # autoregressive
    Case({"heads": 8, "kv_heads": 1, "head_dim": 128}, 8, 3, [136], [8]),
    Case({}, 4, 2, [100], [4]),  # more parts than text
    Case({}, 4, 2, [0, 36], [4, 0], few=False),  # the library's products
    Case({"kv_heads": 2}, 4, 3, [0, 36], [0, 4]),  # every head has its own keys
    Case({}, 4, 3, [20, 0, 36, 60], [4, 4, 0, 0], packed=9, absent=((1, 2), (3, 1), (3, 2))),  # the last one waits
    Case(FOUR, 2, 2, [6, 12, 30], [0, 2, 2], packed=5, few=False),
    Case(FOUR, 4, 3, [21, 7], [4, 0], causal=True),  # texts of any length
    Case({}, 4, 2, [0, 33, 18], [4, 4, 0], packed=5, few=False, causal=True),
    Case(FOUR, 4, 5, [21, 0], [4, 4], causal=True, ahead=(0, 1, 2, 3)),  # a draft that is checked, and its candidates
    Case({}, 4, 3, [17, 9, 30], [4, 4, 4], packed=8, absent=((1, 2),), causal=True, ahead=(3, 1)),
]
WIDE = {"dim": 256, "heads": 8, "kv_heads": 2, "head_dim": 128, "ffn_dim": 640}
EVERY = [
    *CASES,
    # On a GPU, one request in one launch:
    Case(WIDE, 4, 2, [200], [4]),
    Case({"heads": 8, "kv_heads": 8, "dim": 512, "ffn_dim": 1536}, 4, 2, [2500], [0]),  # more than warps take at once
    Case({**WIDE, "qk_norm": False, "qkv_bias": True}, 2, 3, [37], [2], causal=True, ahead=(0, 1)),
]
PLAIN = (
    0,
    3,
)  # cases that are in the interpreter as on a GPU; the others have one layer and the library's products there
GREEDY = set(range(len(EVERY))) - {7}  # tokens are the likeliest ones, not samples


class Twin(PlainModel):
    """The plain twin, with the runner-up of every token; what it has no place for is zero."""

    def __init__(self, model: Transformer, pages: Pages) -> None:
        super().__init__(Parts(model), method("best-of-n"), pages)

    def buffers(self, shape: ForwardShape, long: bool) -> list[Any]:
        self.tokens = shape.tokens
        return []

    @torch.no_grad()
    def run(self, *given: Any) -> None:
        super().run(*given)

    @torch.no_grad()
    def fill(self, *given: Any) -> None:
        super().fill(*given)

    def hidden(self, buffers: list[Any]) -> Tensor:
        return self._packed([ran.out.hidden for ran in buffers], buffers, torch.arange(self.tokens))

    def logits(self, tokens: Tensor, buffers: list[Any]) -> Tensor:
        return self.model.logits(self.hidden(buffers)[tokens])

    def predict(self, tokens: Tensor, buffers: list[Any], *sampled: Any) -> Prediction:
        return predict(self.logits(tokens, buffers), *sampled, runner_up=True)


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


def compare(
    number: int, device: str, dtype: torch.dtype, *, int8: bool = False, whole: bool = False, apart: bool = False
) -> dict[str, float]:
    """How far the kernels are from the Transformer: relative errors, and the share of equal choices.

    With int8, the Transformer has the weights that the int8 ones stand for. `whole`: texts are not cut into parts.
    `apart`: no forward is one launch.
    """
    from freda.decode.kernels import layers, pages, pick, skinny
    from freda.decode.packed import PackedModel, fits

    case = EVERY[number]
    if device == "cpu" and (number not in PLAIN or whole):
        case = case._replace(sizes={**case.sizes, "layers": 1}, few=number in PLAIN)
    shape, usual = case.shape, pages.cut_for

    def cut(*of: Any, long: bool) -> pages.Cut:
        """Smaller chunks for some cases, and few parts in the interpreter, which takes its time for each."""
        made = usual(*of, long=long)
        splits = made.splits if device == "cuda" or number == 6 else min(3, made.splits)
        return made._replace(splits=splits, chunk=16 if number % 2 else made.chunk)

    model = filled_model(device, dtype, **case.sizes, tied=not int8)  # a table of its own for the head
    assert fits(model)
    if int8:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and "embed" not in name:
                    weight.copy_(tensors.unpacked(tensors.packed({"weight": weight}), dtype)["weight"])
    generator = torch.Generator().manual_seed(number)
    width = max(16, -(-max(case.stored) // PAGE) + 1)
    storage = two_storages(model, shape.rows * width, generator)
    table = torch.randperm(shape.rows * width, generator=generator).view(shape.rows, width)
    where = case.where(generator).to(device)
    texts = BlockTable(
        *(torch.as_tensor(part, dtype=torch.int32, device=device) for part in (table, case.stored, case.pending))
    )
    behind = texts.pending[:, None].repeat(1, shape.blocks)
    behind[:, 0] = 0
    if case.ahead:
        behind[:, 1:] = torch.tensor(case.ahead)
    blocks = BlockPlaces(where, behind)
    ids = torch.randint(0, model.blank_id, (shape.packed, shape.block), generator=generator).to(device)
    alpha = torch.rand(shape.packed, shape.block, generator=generator).to(device)
    alpha[where[:, 0][where[:, 0] >= 0].long()] = 1
    there = where >= 0
    there[:, 0] &= texts.pending > 0
    first = where[there].long()[:, None] * shape.block
    tokens = first + torch.arange(shape.block, device=device)  # of all blocks that are no padding
    found = []
    for backend in (Twin(model, storage[0]), PackedModel(model, storage[1], int8=int8)):
        with (
            patch.object(pages, "MANY", 1 if whole else pages.MANY),
            patch.object(pages, "cut_for", cut),
            patch.object(layers, "MOST_TOKENS", 0 if apart else layers.MOST_TOKENS),
            patch.object(skinny, "MOST_ROWS", skinny.MOST_ROWS if case.few else 0),
            patch.object(pick, "IDS_AT_ONCE", 64 if number % 2 else pick.IDS_AT_ONCE),
        ):
            buffers = backend.buffers(shape, long=number == 6)
            backend.run((ids.flatten(), alpha.flatten()), blocks, texts, shape, buffers)  # type: ignore[arg-type]
            hidden = backend.hidden(buffers)[tokens]  # type: ignore[arg-type]
            drawn = () if number in GREEDY else (sampling(len(tokens), device), tokens)
            logits = backend.logits(tokens, buffers)  # type: ignore[arg-type]
            found.append((hidden, logits, backend.predict(tokens, buffers, *drawn)))  # type: ignore[arg-type]
    (plain, plain_logits, wanted), (fast, logits, got) = found
    return {
        "hidden": error(fast, plain),
        "logits": error(logits, plain_logits),
        "stored": stored_error(storage),
        **distances(got, wanted),
    }


def two_storages(model: Transformer, count: int, generator: torch.Generator) -> list[Pages]:
    """Pages with anything in them, twice."""
    storage = [Pages(model, count, PAGE) for _ in range(2)]
    for layer, twin in zip(*(pages.layers for pages in storage), strict=True):
        for part, other in zip(layer, twin, strict=True):
            part.copy_(torch.randn(part.shape, generator=generator))
            other.copy_(part)
    return storage


def stored_error(storage: list[Pages]) -> float:
    """The largest error of keys or values of a layer, in all pages but the spare one, where padding may go."""
    both = zip(*(pages.layers for pages in storage), strict=True)
    return max(error(one[:-1], two[:-1]) for layers in both for one, two in zip(*layers, strict=True))


def error(one: Tensor, two: Tensor) -> float:
    return ((one - two).float().norm() / two.float().norm()).item()


def compare_fill(device: str, dtype: torch.dtype, *, causal: bool = False, **sizes: Any) -> float:
    """The error of all pages after pieces of three prompts, one of which begins here, with padding among them; first
    alone, then with the first blocks behind these prompts in the same forward, and the error of what these become.
    Causal pieces begin and end anywhere."""
    from freda.decode.kernels import prompts
    from freda.decode.packed import PackedModel

    model, generator = filled_model(device, dtype, **sizes), torch.Generator().manual_seed(1)
    storage = two_storages(model, 15, generator)
    table = torch.randperm(15, generator=generator).view(3, 5).to(device, torch.int32)
    small = {"MOST_ROWS": 32, "CHUNK": 16} if device == "cpu" else {}
    tile = 20 if small else PIECE_TILE
    tokens, tiles = [(-1, 0)], [(0, 0)]
    ends = [11, 51, 65] if causal else [12, 52, 68]
    for row, begin, end in ((0, 0, ends[0]), (2, ends[2] - 32, ends[2]), (1, ends[1] - 4, ends[1])):
        tiles += [(len(tokens) + at - begin, min(tile, end - at)) for at in range(begin, end, tile)]
        tokens += [(position, row) for position in range(begin, end)] + [(-1, 0)]
    position, row = torch.tensor(tokens, dtype=torch.int32, device=device).T.contiguous()
    ids = torch.randint(0, model.blank_id, (len(tokens),), generator=generator).to(device, torch.int32)
    pieces = Pieces(ids, row, position, torch.tensor(tiles, dtype=torch.int32, device=device), table)
    shape, rides = (ForwardShape(*of, len(tokens), causal) for of in ((1, 4, 1, 0), (3, 4, 2, 4)))
    where = torch.tensor([[-1, 2], [-1, 0], [-1, 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    texts = BlockTable(table, lengths, torch.zeros_like(lengths))
    given = (ids[:16].long(), torch.rand(16, generator=generator).to(device))
    found = []
    with patch.multiple(prompts, PIECE_TILE=tile, **small):
        for backend in (Twin(model, storage[0]), PackedModel(model, storage[1])):
            backend.fill(pieces, shape, backend.buffers(shape, long=False))  # type: ignore[arg-type]
    alone = stored_error(storage)
    with patch.multiple(prompts, PIECE_TILE=tile, **small):
        for pages, kind in zip(storage, (Twin, PackedModel), strict=True):
            pages.storage.zero_()
            backend = kind(model, pages)
            buffers = backend.buffers(rides, long=False)
            blocks = BlockPlaces(where, torch.zeros_like(where))
            backend.run(given, blocks, texts, rides, buffers, pieces)  # type: ignore[arg-type]
            found.append(backend.hidden(buffers)[:12])  # type: ignore[arg-type]
    return max(alone, stored_error(storage), error(*found[::-1]))


def check_picks() -> None:
    """Of equal logits the lowest ids count, within a tile and across them; of what is no number, some id, unsound."""
    from freda.decode.kernels import pick

    logits = torch.zeros(3, 205)
    logits[1, [70, 150]], logits[2] = 5.0, float("nan")
    greedy = Sampling(torch.zeros(3), torch.full((3,), 0.5), torch.arange(3))
    with patch.object(pick, "IDS_AT_ONCE", 64):
        for found in (pick.pick_of(logits, 200), pick.sample(logits, 200, greedy, torch.zeros(3, 1))):
            ids, prob, second, _ = (part.tolist() for part in found)
            assert (ids[:2], second[:2]) == ([0, 70], [1, 150])
            assert max(ids[2], second[2]) < 200 and prob[2] != prob[2]
        unsound = Sampling(torch.ones(1), torch.full((1,), 0.5), torch.arange(1))
        ids, *_ = pick.sample(logits[2:], 200, unsound, torch.zeros(1, 1))
        assert ids[0] < 200


def sampling(count: int, device: str) -> Sampling:
    """One of each kind, and again, with seeds of many bits and both signs."""
    kinds = [(0.0, 0.5), *itertools.product((0.3, 1.5), (0.1, 0.5, 0.9, 1.0))]
    temperature, top_p = torch.tensor([kinds[at % len(kinds)] for at in range(count)], device=device).T.contiguous()
    seeds = [(-1) ** at * (at + (at << 40)) for at in range(count)]
    return Sampling(temperature, top_p, torch.tensor(seeds, device=device))


def compare_samples(kind: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """How far samples are from those of `predict`, over 203 ids, of which no part is top_p exactly."""
    from freda.decode.kernels import pick

    count, block, generator = 9, 2 if kind == "tied" else 1, torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(count * block, 208, generator=generator)
    logits = {"peaked": logits, "level": logits / 8, "flat": logits * 0, "tied": (logits / 8).round()}[kind]
    logits[:, 203:] = 99.0  # columns that mean no id
    logits, how = logits.to(device, dtype), sampling(count, device)
    position = torch.randint(0, 5000, (count, block), generator=generator).to(device)
    wanted = predict(logits[:, :203].float().view(count, block, -1), how, position, runner_up=True)
    with patch.object(pick, "IDS_AT_ONCE", 128):
        found = pick.sample(logits, 203, how, position)
    got = Prediction(*(part.view(count, block) for part in found))
    return distances(got, wanted)


def distances(got: Prediction, wanted: Prediction) -> dict[str, float]:
    """The share of equal choices, and how far their probabilities are apart."""
    return {
        "choices": (got.ids == wanted.ids).float().mean().item(),
        "seconds": (got.second_ids == wanted.second_ids).float().mean().item(),
        "prob": (got.prob - wanted.prob).abs().max().item(),
        "second_prob": (got.second_prob - wanted.second_prob).abs().max().item(),
    }


SAMPLES = [("peaked", torch.float32), ("level", torch.bfloat16), ("flat", torch.bfloat16), ("tied", torch.float32)]
SHAPES: list[dict[str, Any]] = [
    {"heads": 2, "kv_heads": 2},
    {"heads": 4, "kv_heads": 1, "head_dim": 128},
    {"heads": 7, "kv_heads": 1, "qk_norm": False, "qkv_bias": True},
]


def check_interpreted() -> None:
    check_picks()
    for sizes in SHAPES:
        assert compare_fill("cpu", torch.float32, **sizes) < 1e-5
    assert compare_fill("cpu", torch.float32, causal=True) < 1e-5
    cases: list[tuple[int, dict[str, bool]]] = [(case, {}) for case in range(len(CASES))]
    cases += [(0, {"int8": True})]  # the rest on a GPU
    cases += [(case, {"whole": True}) for case in (3, 4, 5, 9, 11, 13)]
    every = [compare(case, "cpu", torch.float32, **way) for case, way in cases]
    every += [compare_samples(kind, "cpu", dtype) for kind, dtype in SAMPLES]
    for found in every:
        assert found.pop("choices") == found.pop("seconds") == 1
        assert all(value < 1e-5 for value in found.values()), found


@pytest.mark.slow
def test_in_the_interpreter(tmp_path: Path) -> None:
    """In fp32 on a CPU, where Triton is installed: equal but for the order of sums."""
    pytest.importorskip("triton")
    run_interpreted(check_interpreted, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("way", [{}, {"int8": True}, {"whole": True}, {"apart": True}])
@pytest.mark.parametrize("case", range(len(EVERY)))
def test_on_a_gpu(case: int, way: dict[str, bool]) -> None:
    """In bf16: what its 8 bits leave."""
    found = compare(case, "cuda", torch.bfloat16, **way)
    assert found["hidden"] < 2e-2 and found["stored"] < 1e-2 and found["prob"] < 0.05, found
    assert found["choices"] >= 0.8, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_one_launch_is_used_and_gives_the_same_numbers_each_time() -> None:
    """Its thread blocks wait for each other; what they add up does not depend on who comes first."""
    from freda.decode.packed import PackedModel

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = EVERY[len(CASES)]
    model = filled_model("cuda", torch.bfloat16, **case.sizes)
    backend = PackedModel(model, two_storages(model, 32, torch.Generator().manual_seed(0))[0])
    buffers = backend.buffers(case.shape)
    assert buffers.whole is not None
    numbers = (torch.arange(32)[None], case.stored, case.pending)
    texts = BlockTable(*(torch.as_tensor(part, dtype=torch.int32, device="cuda") for part in numbers))
    ids, alpha = torch.arange(8, device="cuda"), torch.ones(8, device="cuda")
    blocks = BlockPlaces(*torch.tensor([[[0, 1]], [[0, 4]]], dtype=torch.int32, device="cuda"))
    seen = []
    for _ in range(50):
        backend.run((ids, alpha), blocks, texts, case.shape, buffers)
        seen.append(backend.hidden(buffers))
    assert all(torch.equal(one, seen[0]) for one in seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("sizes", [*SHAPES, {"causal": True}])
def test_prompts_on_a_gpu(sizes: dict[str, Any]) -> None:
    assert compare_fill("cuda", torch.bfloat16, **sizes) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("kind", "dtype"), SAMPLES)
def test_samples_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """Its logarithms and exponentials differ in their last bits, and so may a rare choice."""
    found = compare_samples(kind, "cuda", dtype)
    assert found["choices"] >= 0.85, found
