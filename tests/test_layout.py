"""The layouts in training: what slots see, show and predict, and what the clean half learns and teaches beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.decode.generate import generate
from freda.decode.request import Request
from freda.errors import FredaError
from freda.eval.teacher_forcing import solution_batch, stability
from freda.folders.model_folder import load_model
from freda.methods import method_like, method_named
from freda.methods.autoregressive import Autoregressive, next_token_logits
from freda.methods.best_of_n import BestOfN, Slots
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.candidates import marginal_cost_beam
from freda.methods.draft import Prediction, clean_half, likeliest, soft_embedding, start
from freda.methods.geometry import NEXT_TOKEN, Geometry
from freda.methods.method import Method, Step
from freda.methods.self_refine import SelfRefine
from freda.model import attention
from freda.model.attention import clean_tokens, concat, dense, draft_tokens, make_mask
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from freda.train import loop
from tests.helpers import BLANK, EOS, LAYOUTS, edit_json, method, packed_batch, scored, scored_model, small_run

SHIFTED = Geometry(4, shift=1, causal=True)
REFINE = SelfRefine(block_size=4, layout="shifted")


def at(batch: Batch, passes: int = 1, step: int = 0, progress: float = 0.0) -> Step:
    return Step(seed=1, step=step, row=torch.arange(len(batch.tokens)), progress=progress, passes=passes)


def geometry_of(name: str) -> Geometry:
    return method("self-refine", **LAYOUTS[name]).geometry


# -- geometry ----------------------------------------------------------------------------------------------------------


def test_settings_name_the_geometry() -> None:
    assert SelfRefine().geometry == Geometry(4) and SelfRefine(layout="shifted").geometry == SHIFTED
    assert geometry_of("only shifted") == Geometry(4, 1, False) and geometry_of("only causal") == Geometry(4, 0, True)
    assert SelfRefine(layout="shifted", shift=False, context="block").geometry == Geometry(4)
    assert Autoregressive().geometry == NEXT_TOKEN
    assert method_named("block-diffusion", REFINE).geometry == SHIFTED, "another method of the same model"
    assert method_like("self-refine:layout=shifted,block_size=8") == SelfRefine(layout="shifted", block_size=8)


@pytest.mark.parametrize(
    ("geometry", "begins"),
    [
        (Geometry(4), [0, 0, 0, 0, 4, 4, 4, 4, 8]),
        (SHIFTED, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (Geometry(4, 0, True), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (Geometry(4, 1, False), [-3, 1, 1, 1, 1, 5, 5, 5, 5]),
    ],
)
def test_where_the_first_block_begins(geometry: Geometry, begins: list[int]) -> None:
    assert [geometry.begin(prompt) for prompt in range(9)] == begins
    for prompt in range(1, 9):  # in a row that leaves room before the text, that is the border of a block
        assert (geometry.padding(prompt) + geometry.begin(prompt) - geometry.shift) % 4 == 0


def test_what_slots_show() -> None:
    ids, alpha = torch.tensor([[11, 12, 13, 14]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    shown, weight = SHIFTED.shown(torch.tensor([9]), ids, alpha)
    assert shown.tolist() == [[9, 11, 12, 13]] and torch.equal(weight, torch.tensor([[1.0, 0.1, 0.2, 0.3]]))
    assert Geometry(4).shown(torch.tensor([9]), ids, alpha) == (ids, alpha)
    many, _ = SHIFTED.shown(torch.tensor([[9]]), ids[:, None].expand(1, 3, 4), alpha[:, None].expand(1, 3, 4))
    assert many.tolist() == [[[9, 11, 12, 13]] * 3]


@pytest.mark.parametrize("name", LAYOUTS)
def test_who_sees_whom(name: str) -> None:
    """The rule in words, position by position, in rows of two documents."""
    geometry, batch = geometry_of(name), packed_batch([[8, 4], [12]])
    clean = clean_tokens(batch.document, batch.position, geometry.context)
    mask = dense(draft_tokens(batch.document, geometry.first(batch.position)), clean)
    own = dense(clean, clean)
    for row, query, key in torch.cartesian_prod(torch.arange(2), torch.arange(12), torch.arange(12)).tolist():
        same = batch.document[row, query] == batch.document[row, key]
        q, k = int(batch.position[row, query]), int(batch.position[row, key])
        assert mask[row, query, key] == (same and k < q // 4 * 4), "committed text before the block's first slot"
        assert own[row, query, key] == (same and (k <= q if geometry.causal else k // 4 <= q // 4))


def test_a_block_may_begin_anywhere() -> None:
    position = torch.arange(7)[None]
    first = torch.full((1, 4), 6)
    mask = attention.dense(draft_tokens(torch.zeros(1, 4), first), clean_tokens(torch.zeros(1, 7), position, 1))
    assert mask[0].tolist() == [[True] * 6 + [False]] * 4, "not the token that the first slot shows"


def test_targets_stay_inside_documents() -> None:
    batch = packed_batch([[8, 4]])
    targets = SHIFTED.targets(batch)
    assert targets.counted[0].int().tolist() == [1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0]
    assert targets.ids[0, :7].tolist() == batch.tokens[0, 1:8].tolist()
    assert targets.fill[0].nonzero().flatten().tolist() == [6, 10], "the slot before a fill token"
    assert REFINE.labels(batch).sum() == 10
    assert torch.equal(SHIFTED.by_token(SHIFTED.by_slot(batch.tokens))[:, 1:], batch.tokens[:, 1:])


# -- training ----------------------------------------------------------------------------------------------------------


def shown_by_hand(method: Method, batch: Batch, ids: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """What the slots of packed rows show of drafts (R, L), place by place."""
    shift, shown, weight = method.geometry.shift, batch.tokens.clone(), torch.ones_like(alpha)
    for place in range(batch.tokens.shape[1]):
        if place % 4 or not shift:
            shown[:, place], weight[:, place] = ids[:, place - shift], alpha[:, place - shift]
    return shown, weight


def single_forward(model: Transformer, x: Tensor, batch: Batch, geometry: Geometry) -> Tensor:
    """The paper's forward: [draft | clean] in one sequence under one mask. The oracle of M7."""
    tokens = concat(
        draft_tokens(batch.document, batch.position // 4 * 4),
        clean_tokens(batch.document, batch.position, geometry.context),
    )
    both = torch.cat([x, model.embed_tokens(batch.tokens)], dim=1)
    hidden, _, _ = model(both, torch.cat([batch.position] * 2, dim=1), make_mask(tokens, tokens, "sdpa"))
    return model.logits(hidden[:, : x.shape[1]])


def gradients(model: Transformer, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("passes", [1, 3])
def test_the_loss_is_that_of_the_single_forward_on_a_fixed_draft(
    model: Transformer, batch: Batch, name: str, passes: int
) -> None:
    rule = SelfRefine(block_size=4, **LAYOUTS[name])
    step = at(batch, passes)
    got = rule.loss(Parts(model), batch, step)
    with torch.no_grad():
        clean, draft = clean_half(model, batch, rule.geometry), rule.initial_draft(model, batch, step)
        for _ in range(passes - 1):
            _, draft = rule.refine(model, clean, draft)
    x = soft_embedding(model, *shown_by_hand(rule, batch, *(part.view_as(batch.tokens) for part in rule.rows(draft))))
    log_p = single_forward(model, x, batch, rule.geometry).log_softmax(-1)
    expected = torch.zeros(())
    for row, place in (batch.document >= 0).nonzero().tolist():
        target = place + rule.geometry.shift
        if target < batch.tokens.shape[1] and batch.document[row, target] == batch.document[row, place]:
            expected = expected - log_p[row, place, batch.tokens[row, target]]
    torch.testing.assert_close(got, expected)
    ours, theirs = gradients(model, got), gradients(model, expected)
    for name_, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name_], rtol=1e-4, atol=1e-4, msg=name_)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("passes", [1, 2])
def test_training_drafts_are_decoding_drafts(model: Transformer, name: str, passes: int) -> None:
    """What a training pass leaves in a block is what `generate` makes after the text up to the block's first slot."""
    rule, batch = SelfRefine(block_size=4, **LAYOUTS[name]), packed_batch([[12, 16], [20, 8]])
    with torch.no_grad():
        clean, draft = clean_half(model, batch, rule.geometry), rule.blank_draft(model, batch)
        for _ in range(passes):
            _, draft = rule.refine(model, clean, draft)
    ids, shift = draft.ids.view_as(batch.tokens), rule.geometry.shift
    for row, begin, end in [(0, 0, 12), (0, 12, 28), (1, 0, 20), (1, 20, 28)]:
        text = batch.tokens[row, begin:end].tolist()
        places = range(0, len(text), 4)
        asked = [
            Request(prompt=text[: place + shift], max_new_tokens=4, passes=passes, threshold=2.0) for place in places
        ]
        for place, output in zip(places, generate(Parts(model), rule, asked, stop_ids=[]), strict=True):
            assert output.tokens == ids[row, begin + place : begin + place + 4].tolist()


@pytest.mark.parametrize("kind", ["iid", "prefix"])
def test_replacement_shows_tokens_that_have_slots(model: Transformer, kind: Any) -> None:
    batch, rule = packed_batch([[512]] * 16), replace(REFINE, replacement=kind, replacement_start=0.3)
    shown = rule.replaced(batch, at(batch))
    assert not shown[:, -1].any() and float(shown[:, :-1].float().mean()) == pytest.approx(0.3, abs=0.02)
    draft = rule.initial_draft(model, batch, at(batch))
    truth = batch.tokens.view(-1, 4)
    ids, alpha = SHIFTED.shown(truth[:, 0], *rule.rows(draft))
    assert torch.equal(ids[:, 0], truth[:, 0]) and (alpha[:, 0] == 1).all(), "the first slot is given"
    assert torch.equal(ids[:, 1:], torch.where(shown[:, :-1], truth[:, 1:], BLANK))
    assert torch.equal(alpha[:, 1:], shown[:, :-1].float())


@pytest.mark.parametrize("name", LAYOUTS)
def test_block_diffusion_weighs_what_it_masks(model: Transformer, batch: Batch, name: str) -> None:
    """Slots but a given first one are masked at the level of their block; what no slot shows counts once."""
    rule, step = BlockDiffusion(block_size=4, noise_min=0.2, **LAYOUTS[name]), at(batch)
    level, masked = rule.noise(batch, step)
    shift, ids, weight = rule.geometry.shift, batch.tokens.clone(), torch.zeros_like(level)
    for place in range(batch.tokens.shape[1]):
        opens = shift and (place + 1) % 4 == 0  # it predicts the token that opens the next block
        weight[:, place] = 1 if opens else masked[:, place] / level[:, place]
        if place % 4 or not shift:
            ids[:, place] = torch.where(masked[:, place - shift], BLANK, batch.tokens[:, place])
    assert (ids == BLANK).any() and (shift == 0 or (ids[:, ::4] != BLANK).all())
    with torch.no_grad():
        log_p = single_forward(model, model.embed_tokens(ids), batch, rule.geometry).log_softmax(-1)
    targets = rule.geometry.targets(batch)
    losses = -log_p.gather(-1, targets.ids[..., None])[..., 0] * weight * targets.counted
    torch.testing.assert_close(rule.loss(Parts(model), batch, step).detach(), losses.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["self-refine", "block-diffusion"])
def test_documents_do_not_see_each_other_and_padding_changes_nothing(model: Transformer, name: str) -> None:
    noiseless = {"noise_min": 1.0} if name == "block-diffusion" else {"replacement_start": 0.0, "replacement_end": 0.0}
    batch, rule = packed_batch([[8, 12]]), method(name, layout="shifted", ar_weight=0.5, **noiseless)
    parts = [Batch(*(part[:, begin:end] for part in batch[:4])) for begin, end in ((0, 8), (8, 20))]
    whole = rule.counts(batch)
    losses = [rule.loss(Parts(model), part, at(part, 2)._replace(counts=whole)) for part in (batch, *parts)]
    torch.testing.assert_close(losses[0], losses[1] + losses[2])
    padded = packed_batch([[8, 12], [24]]).map(lambda part: part[:1])
    padded = padded._replace(tokens=torch.cat([batch.tokens, padded.tokens[:, 20:]], dim=1))
    torch.testing.assert_close(rule.loss(Parts(model), padded, at(padded, 2)), losses[0])


# -- the clean half ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["self-refine", "block-diffusion"])
def test_the_ar_loss_is_a_mean_beside_a_mean(model: Transformer, batch: Batch, name: str) -> None:
    parts, step = Parts(model), at(batch, 2)
    plain, both = (method(name, layout="shifted", ar_weight=weight) for weight in (0.0, 0.5))
    assert both.counts(batch) == [int(plain.labels(batch).sum()), int(Autoregressive().labels(batch).sum())]
    draft, text = plain.loss(parts, batch, step), Autoregressive().loss(parts, batch, step)
    labels, others = both.counts(batch)
    assert labels > others, "the fill counts in the draft's loss alone"
    expected = (draft / labels + 0.5 * text / others) / 1.5
    found = both.loss(parts, batch, step) / labels
    torch.testing.assert_close(found, expected)
    wanted = gradients(model, expected)
    for key, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-5)


def test_groups_of_rows_share_one_mean(tmp_path: Path) -> None:
    """A step in one group is the step in four, though their rows have labels of both kinds in other proportions."""
    base = small_run(tmp_path / "data", batch_rows=4, group_rows=4, log_every=1, steps=2, lr=1e-2)
    rule = SelfRefine(layout="shifted", ar_weight=2.0, passes=1)
    found: dict[int, list[float]] = {}
    for rows in (4, 1):
        config = replace(base, method=rule, train=replace(base.train, group_rows=rows))
        loop.train(config, tmp_path / str(rows))
        lines = [json.loads(line) for line in (tmp_path / str(rows) / "metrics.jsonl").read_text().splitlines()]
        found[rows] = [line[key] for line in lines if "loss" in line for key in ("loss", "grad_norm")]
        last = next(line["validation"] for line in lines if "validation" in line)
        assert {"loss", "pass1", "ar", "ar_accuracy"} <= last.keys()
    run = loop.setup(replace(base, method=rule))
    (batch,) = loop.read_batches(run, 0)
    whole = rule.loss(run.parts, batch, Step(base.train.seed, 0, torch.arange(4), 0.0, 1)).detach()
    assert found[4] == pytest.approx(found[1], rel=1e-4)
    assert found[4][0] == pytest.approx(float(whole) / rule.counts(batch)[0], rel=1e-5) and found[4][0] != found[4][2]


def test_validation_reports_the_clean_half_over_its_own_labels(tmp_path: Path) -> None:
    base = replace(small_run(tmp_path / "data"), method=SelfRefine(layout="shifted", ar_weight=0.5))
    found = loop.train(base, tmp_path / "run")
    again = replace(base, method=Autoregressive(), train=replace(base.train, init=str(tmp_path / "run"), lr=1e-12))
    plain = loop.train(again, tmp_path / "plain").validation
    assert found.validation["ar"] == pytest.approx(plain["loss"], rel=1e-4)
    assert found.validation["ar_accuracy"] == pytest.approx(plain["accuracy"])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@torch.no_grad()
def test_the_clean_half_teaches(model: Transformer, batch: Batch, temperature: float) -> None:
    rule = replace(REFINE, teacher="clean", teacher_temperature=temperature)
    parts, step, targets = Parts(model), at(batch), SHIFTED.targets(batch)
    log_t = (next_token_logits(parts, batch).all() / temperature).log_softmax(-1)
    clean, draft = clean_half(model, batch, SHIFTED), rule.initial_draft(model, batch, step)
    log_p = rule.pass_logits(model, clean, draft).all().log_softmax(-1)
    expected = 0.0
    for row, place in targets.counted.nonzero().tolist():
        if targets.fill[row, place]:
            expected -= float(log_p[row, place, EOS])
        else:
            expected += float((log_t[row, place].exp() * (log_t[row, place] - log_p[row, place])).sum())
    assert float(rule.loss(parts, batch, step)) == pytest.approx(expected, rel=1e-4)


def test_a_teacher_learns_nothing_from_its_pupil(model: Transformer, batch: Batch) -> None:
    """The gradient is that of cross-entropy with fixed targets: keys and values alone take it to the clean half."""
    rule = replace(REFINE, teacher="clean")
    got = gradients(model, rule.loss(Parts(model), batch, at(batch)))
    targets = SHIFTED.targets(batch)
    with torch.no_grad():
        soft = next_token_logits(Parts(model), batch).all().softmax(-1)
    hard = torch.nn.functional.one_hot(targets.ids, soft.shape[-1]).float()
    wanted = torch.where(targets.fill[..., None], hard, soft) * targets.counted[..., None]
    draft, clean = rule.initial_draft(model, batch, at(batch)), clean_half(model, batch, SHIFTED)
    logits = rule.pass_logits(model, clean, draft).all()
    expected = gradients(model, -(wanted * logits.log_softmax(-1)).sum())
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_arithmetic_counts_the_heads_of_the_clean_half() -> None:
    from freda.model.shapes import SHAPES

    shape, size = SHAPES["qwen3-4b"], SHIFTED.size([4096])
    head = 2.0 * shape.vocab_size * shape.dim * 4096
    plain, ar, taught = (
        replace(REFINE, **changes).flops(shape, size, 1) for changes in ({}, {"ar_weight": 0.5}, {"teacher": "clean"})
    )
    assert ar - plain == pytest.approx(3 * head) and taught - plain == pytest.approx(head)
    assert plain < SelfRefine().flops(shape, Geometry(4).size([4096]), 1), "causal text has fewer pairs"


# -- Best-of-N ---------------------------------------------------------------------------------------------------------

BEST = BestOfN(block_size=4, layout="shifted", num_negatives=3)


@pytest.mark.parametrize("last_layer", [False, True])
def test_packed_slots_are_what_decoding_shows(last_layer: bool) -> None:
    """The score that decoding gives to a candidate is what training gives to the same text: all four predicted tokens
    in the hard channel, three of them in slots."""
    from freda.decode.request import Pass

    model, seen = scored_model(last_layer=last_layer), list[Pass]()
    prompt = packed_batch([[9]]).tokens[0].tolist()
    asked = Request(prompt=prompt, max_new_tokens=4, threshold=2.0, passes=2, tau=1.0)
    generate(model, BEST, [asked], stop_ids=[], watch=seen.append)
    (step,) = (one for one in seen if one.number == 2)
    assert len(step.candidates) == 4
    texts = torch.tensor([[*prompt, *ids, 0, 0, 0] for ids in step.candidates])  # from place 8 on: a block of slots
    place = torch.arange(16).expand(1, -1)
    batch = Batch(texts[:1], torch.zeros(1, 16).int(), place.int(), torch.zeros(1, 16, dtype=torch.bool))
    clean, proposed = BEST.proposal(model, batch, passes=1)
    ids = texts.roll(-1, dims=1)
    prob = proposed.all().log_softmax(-1).expand(4, -1, -1).gather(-1, ids[..., None])[..., 0]
    slots = Slots(ids[None], prob.exp()[None], torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, 4).bool())
    values = prob[:, 8:12].sum(-1) + BEST.score_slots(model, batch, clean, slots)[0, 2]
    torch.testing.assert_close(values, torch.tensor(step.scores), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_slots_of_a_scorer_end_with_their_document() -> None:
    model, batch = scored_model(), packed_batch([[8, 12], [20]])
    clean, logits = BEST.proposal(model, batch, 2)
    truth, counted, _ = SHIFTED.targets(batch)
    for slots in (BEST.sampled_slots(logits, batch, at(batch)), BEST.beam_slots(logits, batch)):
        assert torch.equal(slots.ids[:, :, 7][0], truth[0, 7].expand(4)), "no label: nothing to tell apart"
        differs = (slots.ids != truth[:, None]) & counted[:, None]
        assert differs.any()
    sampled = BEST.sampled_slots(logits, batch, at(batch))
    assert torch.equal(sampled.ids[:, 0], truth), "the clean text, one further"
    other = sampled._replace(ids=torch.where(counted[:, None], sampled.ids, 3))
    scores = [BEST.score_slots(model, batch, clean, one) for one in (sampled, other)]
    torch.testing.assert_close(*scores)
    numbers = BEST.validate(model, batch, at(batch))
    assert all(value.isfinite() for value in numbers.values())


def test_stage_two_keeps_the_layout(tmp_path: Path) -> None:
    base = replace(small_run(tmp_path / "data"), method=SelfRefine(layout="shifted"))
    loop.train(base, tmp_path / "base")
    config = replace(base, method=BestOfN(layout="shifted"), train=replace(base.train, init=str(tmp_path / "base")))
    loop.train(config, tmp_path / "scorer")
    assert load_model(tmp_path / "scorer").method == BestOfN(layout="shifted")
    for rule in (BestOfN(), SelfRefine(), BlockDiffusion(layout="shifted", context="block")):
        with pytest.raises(FredaError, match=r"method\.layout: .* was trained with the shifted layout; use that"):
            loop.train(replace(config, method=rule), tmp_path / "wrong")


# -- teacher forcing ---------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer of letters."""

    eos_id = EOS

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("method_name", ["self-refine", "block-diffusion"])
def test_teacher_forcing_is_generation_after_the_true_prefix(name: str, method_name: str) -> None:
    loaded = scored(method_name, **LAYOUTS[name])._replace(tokenizer=Words())  # type: ignore[arg-type]
    texts = [("abcdefg", "abcdefghijklmnop"), ("xyz", "xyzabcdefgh"), ("k", "kab")]
    batch, given, counted = solution_batch(loaded, texts)
    *_, made = loaded.method.teacher_forced(loaded.parts, batch, given, 2)
    geometry = loaded.method.geometry
    for row, (prompt, whole) in enumerate(texts):
        text, place = [*Words().encode(whole), EOS], geometry.padding(len(prompt))
        assert batch.tokens[row, place : place + len(text)].tolist() == text
        assert batch.position[row, place : place + len(text)].tolist() == list(range(len(text)))
        assert int(counted[row].sum()) == len(text) - len(prompt) and int(given[row].sum()) == place + len(prompt)
        begin = len(prompt)
        while begin < len(text):
            end = min(geometry.begin(begin) + 4, len(text))
            asked = [Request(prompt=text[:begin], max_new_tokens=end - begin, passes=2, threshold=2.0)]
            expected = generate(loaded.parts, loaded.method, asked, stop_ids=[])[0].tokens
            assert made[row, place + begin : place + end].tolist() == expected
            begin = end


@pytest.mark.parametrize("layout", ["paper", "shifted"])
def test_the_oracle_chooses_among_candidates(layout: Any) -> None:
    """By hand: what one pass makes of every candidate of the drafts that one pass left."""
    loaded = scored("self-refine", layout=layout)._replace(tokenizer=Words())  # type: ignore[arg-type]
    texts = [("abcdefg", "abcdefghijklmnop"), ("xyz", "xyzabcdefgh")]
    batch, given, counted = solution_batch(loaded, texts)
    one, two = loaded.method.choices(loaded.parts, batch, given, 2, width=4, swaps=2)
    forced = list(loaded.method.teacher_forced(loaded.parts, batch, given, 2))
    assert torch.equal(one[:, 0], forced[0]) and torch.equal(two[:, 0], forced[1]), "the first goes on"
    assert (one == one[:, :1]).all() and (two != two[:, :1]).any(), "a blank draft has one candidate"
    rule, model, geometry = loaded.method, loaded.backbone, loaded.method.geometry
    assert isinstance(rule, SelfRefine)
    with torch.no_grad():
        clean = clean_half(model, batch, geometry)
        tokens, known = (geometry.by_slot(part).view(-1, 4) for part in (batch.tokens, given))
        draft = start(tokens, known, model.blank_id)
        top = likeliest(rule.pass_logits(model, clean, draft), draft.ids.shape, runner_up=True)
        draft = rule.refined(draft, top)
        most = torch.full_like(draft.passes, 2)
        beam = marginal_cost_beam(Prediction(*draft[:4]), ~known, width=4, swaps=most, most_swaps=2)
        for number in range(4):
            changed = draft._replace(ids=beam.ids[:, number].clone(), prob=beam.alpha[:, number].clone())
            made = rule.refined(changed, likeliest(rule.pass_logits(model, clean, changed), draft.ids.shape)).ids
            same = geometry.by_token(made.view_as(batch.tokens)) == two[:, number]
            valid = geometry.by_token(beam.valid[:, number, None].expand(-1, 4).reshape(batch.tokens.shape).int()) == 1
            assert same[counted & valid].all() and (counted & valid).any()


def test_stability_counts_blocks_and_what_an_oracle_would_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five answer tokens in two blocks, and two candidates, the second of which has the first block right."""
    loaded = scored("self-refine", layout="shifted")._replace(tokenizer=Words())  # type: ignore[arg-type]
    monkeypatch.setattr("freda.eval.teacher_forcing.WIDTH", 2)
    batch, _, _ = solution_batch(loaded, [("abc", "abcdefg")])
    assert batch.tokens.tolist() == [[EOS, EOS, *range(7), *[EOS] * 3]]

    def choices(self: Method, *given: Any, width: int, swaps: int) -> Any:
        for second in (5, 4):
            made = batch.tokens[:, None].expand(1, 2, -1).clone()
            made[0, 0, 5], made[0, 1, second] = 0, 0  # of d, e, f, g, EOS: d; then, in the other candidate, d or c
            yield made

    monkeypatch.setattr(SelfRefine, "choices", choices)
    first, second = stability(loaded, [("abc", "abcdefg")], 2)
    assert (first["blocks"], first["oracle"]) == (0.5, 0.5) and (second["blocks"], second["oracle"]) == (0.5, 1.0)
    assert first["right"] == 0.8


# -- folders and bad input ---------------------------------------------------------------------------------------------


def test_a_folder_keeps_its_layout_and_old_ones_are_the_papers(tmp_path: Path) -> None:
    base = small_run(tmp_path / "data")
    for name, rule in (("new", SelfRefine(layout="shifted", shift=False, ar_weight=0.5)), ("old", SelfRefine())):
        loop.train(replace(base, method=rule), tmp_path / name)
        file = next((tmp_path / name).glob("checkpoints/*/config.json"))
        section = json.loads(file.read_text())["freda"]
        assert section.get("layout") == ("shifted" if name == "new" else None)
        assert load_model(tmp_path / name).method.geometry == rule.geometry
        assert loop.resume_run(tmp_path / name).method == rule
    file = next((tmp_path / "new").glob("checkpoints/*/config.json"))
    edit_json(file, freda=section | {"layout": "other"})
    with pytest.raises(FredaError, match=r"method\.layout is 'other'; use one of paper, shifted"):
        load_model(tmp_path / "new")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("self-refine:layout=other", r"method\.layout is 'other'; use one of paper, shifted"),
        ("self-refine:ar_weight=-1,layout=shifted", r"method\.ar_weight is -1\.0; use 0 or more"),
        ("self-refine:ar_weight=0.5", r"method\.ar_weight is 0\.5, but text that sees ahead"),
        ("block-diffusion:ar_weight=0.5,layout=shifted,context=block", r"sees ahead inside its blocks"),
        ("self-refine:teacher=clean", r"method\.teacher is clean, but the paper's layout has no such teacher"),
        ("self-refine:teacher=clean,context=causal", r"but shift = false and causal context has no such teacher"),
        ("self-refine:teacher_temperature=0", r"method\.teacher_temperature is 0\.0; use a positive"),
        ("best-of-n:layout=shifted,block_size=1", r"method\.block_size is 1: a shifted block of one slot"),
        ("best-of-n:ar_weight=0.5", r"unknown key 'method\.ar_weight'"),
        ("autoregressive:layout=shifted", r"unknown key 'method\.layout'"),
        ("self-refine:shift=1", r"method\.shift is 1 \(int\); it must be true or false"),
    ],
)
def test_bad_settings_are_refused(settings: str, message: str) -> None:
    with pytest.raises(FredaError, match=message):
        method_like(settings)


def test_an_unset_part_is_none_of_the_config() -> None:
    from freda.train import config as config_module

    run = config_module.load(None, ["method.layout=shifted", "method.context=block"])
    text = config_module.dump(run)
    assert 'layout = "shifted"' in text and 'context = "block"' in text and "shift =" not in text
