"""The Transformer by itself: backends agree, `past` is one forward, and nobody sees what the mask forbids."""

import pytest
import torch
from torch import Tensor

from freda.model import attention
from freda.model.attention import Tokens, make_mask
from freda.model.config import ModelConfig
from freda.model.transformer import KeysValues, Transformer
from tests.helpers import init_weights

BLANK = 30
SHAPE = ModelConfig(vocab_size=32, dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_dim=48)


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(SHAPE, BLANK)
    init_weights(model, seed=0)
    with torch.no_grad():
        for weight in model.parameters():  # large enough that a wrong mask or position shows
            weight.mul_(10.0 if weight.dim() > 1 else 1.0)
    return model.requires_grad_(False)  # flex attention on CPU refuses inputs that could need a gradient


def positions(*lengths: int) -> tuple[Tensor, Tensor]:
    """Document ids and positions (1, T) of documents packed in one row; a negative length is padding."""
    document = [torch.full((abs(n),), -1 if n < 0 else index) for index, n in enumerate(lengths)]
    position = [torch.arange(abs(n)) for n in lengths]
    return torch.cat(document)[None], torch.cat(position)[None]


def random_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, BLANK, (1, length), generator=torch.Generator().manual_seed(seed))


def run(model: Transformer, ids: Tensor, position: Tensor, tokens: Tokens, backend: str = "sdpa") -> Tensor:
    mask = make_mask(tokens, tokens, "flex" if backend == "flex" else "sdpa")
    return model(model.embed_tokens(ids), position, mask)[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_and_sdpa_agree(model: Transformer) -> None:
    document, position = positions(13, 7, -4)
    candidate = (torch.arange(24) % 2)[None]
    tokens = attention.concat(
        attention.draft_tokens(document, position // 4 * 4, candidate), attention.clean_tokens(document, position, 4)
    )
    ids, twice = random_ids(48), position.repeat(1, 2)
    dense, flex = (run(model, ids, twice, tokens, backend) for backend in ("sdpa", "flex"))
    assert (dense - flex).abs().max() < 1e-5
    causal = attention.clean_tokens(document.repeat(1, 2), twice, 1)  # another mask gives another answer
    assert (dense - run(model, ids, twice, causal)).abs().max() > 1e-2


@torch.no_grad()
def test_past_is_one_forward(model: Transformer) -> None:
    document, position = positions(12)
    tokens, x = attention.clean_tokens(document, position, 4), model.embed_tokens(random_ids(12))
    whole, everything, _ = model(x, position, make_mask(tokens, tokens, "sdpa"))
    first, rest = Tokens(*(v[:, :8] for v in tokens)), Tokens(*(v[:, 8:] for v in tokens))
    _, past, _ = model(x[:, :8], position[:, :8], make_mask(first, first, "sdpa"))
    after, new, _ = model(x[:, 8:], position[:, 8:], make_mask(rest, tokens, "sdpa"), past)
    assert (after - whole[:, 8:]).abs().max() < 1e-5
    for old, later, both in zip(past, new, everything, strict=True):
        assert torch.allclose(torch.cat([old.keys, later.keys], 2), both.keys, atol=1e-5)
        assert torch.allclose(torch.cat([old.values, later.values], 2), both.values, atol=1e-5)


@torch.no_grad()
def test_draft_over_the_clean_half_is_the_dual_stream_forward(model: Transformer) -> None:
    document, position = positions(8, 8)
    draft, clean = attention.draft_tokens(document, position // 4 * 4), attention.clean_tokens(document, position, 4)
    both = attention.concat(clean, draft)
    clean_ids, draft_ids = random_ids(16, 1), random_ids(16, 2)
    oracle = run(model, torch.cat([clean_ids, draft_ids], 1), position.repeat(1, 2), both)[:, 16:]
    past: list[KeysValues]
    _, past, _ = model(model.embed_tokens(clean_ids), position, make_mask(clean, clean, "sdpa"))
    hidden, _, _ = model(model.embed_tokens(draft_ids), position, make_mask(draft, both, "sdpa"), past)
    assert (hidden - oracle).abs().max() < 1e-5


@torch.no_grad()
def test_packed_documents_are_strangers(model: Transformer) -> None:
    ids = random_ids(14)
    document, position = positions(6, 8)
    packed = run(model, ids, position, attention.clean_tokens(document, position, 1))
    alone_document, alone_position = positions(8)
    alone = run(model, ids[:, 6:], alone_position, attention.clean_tokens(alone_document, alone_position, 1))
    assert (packed[:, 6:] - alone).abs().max() < 1e-5


@torch.no_grad()
def test_one_token_per_block_is_causal(model: Transformer) -> None:
    ids, (document, position) = random_ids(10), positions(10)
    tokens = attention.clean_tokens(document, position, 1)
    changed = ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % BLANK
    difference = (run(model, ids, position, tokens) - run(model, changed, position, tokens)).abs().amax(-1)[0]
    assert difference[:6].max() == 0
    assert difference[6:].min() > 0


def test_logits_stop_below_blank(model: Transformer) -> None:
    logits = model.logits(torch.ones(1, 3, SHAPE.dim, dtype=torch.float32))
    assert logits.shape == (1, 3, BLANK)
    assert logits.dtype == torch.float32


def test_initial_weights_are_a_function_of_the_seed() -> None:
    states = []
    for seed in (1, 1, 2):
        model = Transformer(SHAPE, BLANK)
        init_weights(model, seed)
        states.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
