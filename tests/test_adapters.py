"""Adapters: committed text is the base's bit for bit, training learns nothing else, and what a forward makes of them is
the same in training, in the reference loop and in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.decode.config import EngineConfig
from freda.decode.engine import Engine
from freda.decode.request import Request
from freda.errors import FredaError
from freda.eval.likelihood import log_likelihood
from freda.folders.model_folder import LoadedModel
from freda.methods.draft import clean_half, soft_embedding
from freda.methods.method import Step
from freda.methods.self_refine import SelfRefine
from freda.model import transformer
from freda.model.adapter import merge
from freda.model.attention import clean_tokens, concat, draft_tokens, make_mask
from freda.model.config import TARGETS, AdapterConfig, adapter_parameters
from freda.model.low_rank import LowRank
from freda.model.parts import ADAPTER, Parts
from freda.model.transformer import Attention, Forward, KeysValues
from tests.helpers import BLANK, Letters, alone, method, mixed_settings, packed_batch, random_prompts, tiny_model

SHIFTED = SelfRefine(layout="shifted")
DRAFT, ALL = AdapterConfig(rank=3, alpha=4.0), AdapterConfig(rank=3, alpha=4.0, rows="all")
STEP = Step(0, 0, torch.arange(2), 0.0, 2)


@torch.no_grad()
def adapted(config: AdapterConfig, **shape: object) -> Parts:
    """A tiny model with an adapter that changes much."""
    parts = Parts(tiny_model(**shape))
    parts.adapt(config)
    generator = torch.Generator().manual_seed(5)
    for part, _, weight in parts.weights():
        if part == ADAPTER:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return parts


def over(parts: Parts, rule: SelfRefine = SHIFTED) -> LoadedModel:
    return LoadedModel(parts, Letters(), rule, "test")


def drafts_behind(parts: Parts, *, some: bool) -> Forward:
    """A forward over 12 tokens of text and a draft of 4 behind the first 8; told which are drafts token by token, or by
    two forwards, each of one kind."""
    model, generator = parts.backbone, torch.Generator().manual_seed(1)
    ids = torch.randint(0, BLANK, (2, 16), generator=generator)
    position = torch.cat([torch.arange(12), torch.arange(8, 12)]).expand(2, -1)
    text, draft = slice(0, 12), slice(12, None)
    clean = clean_tokens(torch.zeros_like(ids[:, text]), position[:, text], block_size=1)
    slots = draft_tokens(torch.zeros_like(ids[:, draft]), torch.full_like(ids[:, draft], 8))
    alpha = torch.rand(2, 4, generator=generator)
    x = torch.cat([model.embed_tokens(ids[:, text]), soft_embedding(model, ids[:, draft], alpha)], dim=1)
    both = concat(clean, slots)
    if some:
        out: Forward = model(x, position, make_mask(both, both, "sdpa"))
        return out
    first = model(x[:, text], position[:, text], make_mask(clean, clean, "sdpa", drafts=False))
    mask = make_mask(slots, both, "sdpa", drafts=True)
    second = model(x[:, draft], position[:, draft], mask, first.new)
    pairs = zip(first.new, second.new, strict=True)
    new = [KeysValues(*(torch.cat(pair, dim=2) for pair in zip(*layer, strict=True))) for layer in pairs]
    hidden, beneath = (torch.cat(pair, dim=1) for pair in zip(first[::2], second[::2], strict=True))
    return Forward(hidden, new, beneath)


# -- the forward -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_committed_text_is_the_bases_bit_for_bit() -> None:
    """States, keys, values and logits of the text, beside drafts in one forward, with the adapter and without."""
    base, parts = Parts(tiny_model()), adapted(DRAFT)
    plain, changed = (drafts_behind(one, some=True) for one in (base, parts))
    assert torch.equal(plain.hidden[:, :12], changed.hidden[:, :12])
    assert torch.equal(base.backbone.logits(plain.hidden[:, :12]), parts.backbone.logits(changed.hidden[:, :12]))
    for old, new in zip(plain.new, changed.new, strict=True):
        assert all(torch.equal(a[:, :, :12], b[:, :, :12]) for a, b in zip(old, new, strict=True))
    assert (plain.hidden[:, 12:] - changed.hidden[:, 12:]).abs().mean() > 0.3


@torch.no_grad()
@pytest.mark.parametrize("config", [DRAFT, ALL])
def test_drafts_told_token_by_token_are_those_of_a_forward_of_drafts(config: AdapterConfig) -> None:
    parts = adapted(config)
    together, apart = (drafts_behind(parts, some=some) for some in (True, False))
    assert (together.hidden - apart.hidden).abs().max() < 1e-5
    for old, new in zip(together.new, apart.new, strict=True):
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(old, new, strict=True))


@torch.no_grad()
def test_an_adapter_on_all_rows_changes_text_too_and_can_be_merged() -> None:
    parts = adapted(ALL)
    before, plain = drafts_behind(parts, some=True), drafts_behind(Parts(tiny_model()), some=True)
    assert (before.hidden - plain.hidden)[:, :12].abs().mean() > 0.3
    merge(parts.backbone)
    assert not any(isinstance(module, LowRank) for module in parts.modules()) and parts.backbone.blank is None
    assert (drafts_behind(parts, some=True).hidden - before.hidden).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("target", TARGETS)
def test_each_target_changes_drafts(target: str) -> None:
    base = drafts_behind(Parts(tiny_model()), some=True).hidden
    parts = adapted(replace(DRAFT, targets=(target,)))
    assert sum(isinstance(module, LowRank) for module in parts.modules()) == 2, "one in each layer"
    parts.backbone.blank = None
    assert (drafts_behind(parts, some=True).hidden - base)[:, 12:].abs().mean() > 0.01


@torch.no_grad()
def test_blank_has_a_row_of_its_own() -> None:
    parts = adapted(DRAFT)
    row, table = parts.backbone.blank, parts.backbone.embed_tokens.weight
    assert row is not None
    blank, token = torch.tensor([[BLANK]]), torch.tensor([[3]])
    assert torch.equal(soft_embedding(parts.backbone, blank, torch.zeros(1, 1))[0], row)
    half = soft_embedding(parts.backbone, token, torch.full((1, 1), 0.25))[0, 0]
    torch.testing.assert_close(half, 0.25 * table[3] + 0.75 * row[0])


@pytest.mark.parametrize("config", [DRAFT, AdapterConfig(rank=5, targets=("k_proj", "o_proj", "down_proj"))])
def test_the_number_of_weights(config: AdapterConfig) -> None:
    parts = adapted(config)
    found = sum(weight.numel() for part, _, weight in parts.weights() if part == ADAPTER)
    assert found == adapter_parameters(parts.backbone.config, config)


# -- decoding ----------------------------------------------------------------------------------------------------------


def requests(count: int, **settings: object) -> list[Request]:
    return [
        Request(prompt=prompt, **{**mixed_settings(number), "candidates": "beam", **settings})
        for number, prompt in enumerate(random_prompts(count))
    ]


def run(loaded: LoadedModel, asked: Sequence[Request]) -> list[tuple[list[int], int, str]]:
    outputs = Engine(loaded, EngineConfig(max_batch=3, page_size=8, prefill=16)).run(asked)
    return [(output.tokens, output.nfe, output.finish) for output in outputs]


def test_autoregressive_texts_are_the_bases() -> None:
    """By the reference loop and by the engine, greedy and sampled."""
    base, loaded = over(Parts(tiny_model())), over(adapted(DRAFT))
    asked = requests(6, method="autoregressive")
    expected = [alone(base, request) for request in asked]
    assert [alone(loaded, request) for request in asked] == expected
    assert run(loaded, asked) == expected
    assert [alone(over(adapted(ALL)), request) for request in asked] != expected


@pytest.mark.parametrize("config", [DRAFT, ALL])
@pytest.mark.parametrize("rule", [SHIFTED, SelfRefine(block_size=4)], ids=["shifted", "paper"])
def test_the_engine_drafts_with_an_adapter_as_the_reference_loop_does(rule: SelfRefine, config: AdapterConfig) -> None:
    loaded, asked = over(adapted(config), rule), requests(8)
    expected = [alone(loaded, request) for request in asked]
    assert run(loaded, asked) == expected
    base = over(Parts(tiny_model()), rule)
    assert sum(alone(base, request) != found for request, found in zip(asked, expected, strict=True)) > 4


def test_likelihood_of_the_text_is_the_bases() -> None:
    pairs = [(prompt, prompt[::-1]) for prompt in random_prompts(5)]
    base, loaded = over(Parts(tiny_model())), over(adapted(DRAFT))
    assert log_likelihood(loaded, pairs, reading="tokens") == log_likelihood(base, pairs, reading="tokens")
    assert log_likelihood(loaded, pairs, reading="blocks") != log_likelihood(base, pairs, reading="blocks")


def test_teacher_forced_drafts_go_through_the_adapter(batch: Batch) -> None:
    given = torch.zeros_like(batch.tokens, dtype=torch.bool)

    def made(parts: Parts) -> list[Tensor]:
        return [made[:, 0] for made in SHIFTED.choices(parts, batch, given, 2, width=2, swaps=1)]

    changed, plain = made(adapted(DRAFT)), made(Parts(tiny_model()))
    assert all((a != b).float().mean() > 0.3 for a, b in zip(changed, plain, strict=True))
    alone = SHIFTED.teacher_forced(adapted(DRAFT), batch, given, 2)
    assert all(torch.equal(a, b) for a, b in zip(changed, alone, strict=True)), "candidates are drafts, too"


# -- training ----------------------------------------------------------------------------------------------------------


def loss_of(parts: Parts, rule: SelfRefine, batch: Batch) -> Tensor:
    step = STEP._replace(row=torch.arange(len(batch.tokens)))
    return rule.loss(parts, batch, step)


def test_a_new_adapter_changes_nothing_and_learns_alone(batch: Batch) -> None:
    """B is zero, and BLANK's row that of the table: the first loss is the base's, bit for bit."""
    parts, base = adapted(DRAFT), Parts(tiny_model())
    with torch.no_grad():
        for name, value in parts.random_weights(ADAPTER, seed=0):
            parts.backbone.get_parameter(name).copy_(value)
        assert parts.backbone.blank is not None
        parts.backbone.blank.copy_(base.backbone.embed_tokens.weight[BLANK])
    loss = loss_of(parts, SHIFTED, batch)
    assert torch.equal(loss, loss_of(base, SHIFTED, batch))
    loss.backward()  # type: ignore[no-untyped-call]
    learnt = {
        (part, name.rpartition(".")[0].rpartition(".")[2]) for part, name, w in parts.weights() if w.grad is not None
    }
    assert learnt == {(ADAPTER, "lora_A"), (ADAPTER, "lora_B"), (ADAPTER, "")}


@pytest.mark.parametrize(("config", "gradient"), [(DRAFT, False), (ALL, True)])
def test_only_text_that_an_adapter_changes_has_a_gradient(config: AdapterConfig, gradient: bool, batch: Batch) -> None:
    clean = clean_half(adapted(config).backbone, batch, SHIFTED.geometry)
    assert clean.hidden is not None
    assert all(part.requires_grad == gradient for part in (clean.hidden, *clean.past[0], *clean.past[-1]))


def test_the_teacher_of_a_draft_row_adapter_is_the_frozen_base(batch: Batch) -> None:
    """The divergence is that of the adapter's drafts from the base's next-token distributions."""
    rule, parts, base = replace(SHIFTED, teacher="clean", passes=1), adapted(DRAFT), Parts(tiny_model())
    step = STEP._replace(row=torch.arange(len(batch.tokens)), passes=1, progress=1.0)
    text = clean_half(base.backbone, batch, rule.geometry)
    assert text.hidden is not None
    drafts = rule.initial_draft(parts.backbone, batch, step)
    own = rule.pass_logits(parts.backbone, clean_half(parts.backbone, batch, rule.geometry), drafts)
    expected = rule.draft_loss(base.backbone, batch, text, own, step, 1.0)
    torch.testing.assert_close(rule.loss(parts, batch, step), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "settings", "rows"),
    [
        ("autoregressive", {}, "draft"),
        ("self-refine", {"layout": "shifted", "ar_weight": 0.5}, "draft"),
        ("block-diffusion", {"layout": "shifted", "ar_weight": 0.5}, "draft"),
        ("best-of-n", {}, "draft"),
        ("best-of-n", {}, "all"),
    ],
)
def test_methods_that_train_no_such_adapter(name: str, settings: dict[str, object], rows: str) -> None:
    with pytest.raises(FredaError):
        method(name, **settings).check_adapter(rows)
    if not name.startswith("best"):
        method(name, **settings).check_adapter("all")


def test_rows_of_one_document_have_the_same_drafts() -> None:
    """Whole rows attend without a mask; which half they are is known all the same."""
    parts, whole = adapted(DRAFT, head_dim=64), packed_batch([[32], [32]])._replace(one_document=True)
    dense = loss_of(parts, SHIFTED, whole)
    parts.backbone.backend = "staircase"
    torch.testing.assert_close(loss_of(parts, SHIFTED, whole), dense, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_queries_keys_and_values_in_one_product_are_changed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many tokens on a GPU they are projected together, with an adapter and without: text stays the base's."""
    parts = adapted(DRAFT)
    attention, x = parts.backbone.layers[0].get_submodule("self_attn"), torch.randn(2, 6, 32)
    drafts = torch.arange(6).expand(2, -1) > 2
    assert isinstance(attention, Attention)
    apart = attention._project(x, drafts)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(transformer, "ONE_PRODUCT", 1)
    monkeypatch.setattr(LowRank, "forward", None)
    for one, other in zip(apart, attention._project(x, drafts), strict=True):
        torch.testing.assert_close(one, other)
