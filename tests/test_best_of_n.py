"""Training of Best-of-N: the packed forward, the loss and its optimum, the frozen backbone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.data.tokenizer import train_tokenizer
from freda.errors import FredaError
from freda.folders.model_folder import LoadedModel, load_model
from freda.methods.best_of_n import BestOfN, Slots, block_losses
from freda.methods.candidates import choose
from freda.methods.draft import Candidates, Search
from freda.methods.method import Step
from freda.model.config import ModelConfig
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from freda.train import loop
from tests.helpers import EOS, init_weights, method, packed_batch, save_model, scored_model, small_run

BEST = BestOfN(block_size=4, num_negatives=3)


def proposed(model: Parts, batch: Batch, passes: int = 2, best: BestOfN = BEST) -> Logits:
    return best.proposal(model, batch, passes)[1]


def scores_of(model: Parts, batch: Batch, slots: Slots, best: BestOfN = BEST) -> Tensor:
    return best.score_slots(model, batch, best.proposal(model, batch, 1)[0], slots)


def at(batch: Batch, passes: int = 2, step: int = 0) -> Step:
    return Step(seed=1, step=step, row=torch.arange(len(batch.tokens)), progress=0.0, passes=passes)


@pytest.mark.parametrize("last_layer", [False, True])
def test_packed_slots_equal_one_forward_per_slot_and_do_not_see_each_other(batch: Batch, last_layer: bool) -> None:
    model = scored_model(last_layer=last_layer)
    slots = BEST.sampled_slots(proposed(model, batch), batch, at(batch))
    packed = scores_of(model, batch, slots)
    real = BEST.labels(batch).view(len(batch.tokens), -1, 4)[..., 0]
    for number in range(4):
        one = Slots(
            slots.ids[:, number : number + 1], slots.alpha[:, number : number + 1], slots.target, slots.valid[..., :1]
        )
        torch.testing.assert_close(scores_of(model, batch, one)[real, 0], packed[real, number])
    changed = slots.ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % EOS
    after = scores_of(model, batch, slots._replace(ids=changed))
    assert torch.equal(after[..., [0, 1, 3]], packed[..., [0, 1, 3]]) and not torch.allclose(
        after[..., 2], packed[..., 2]
    )


def test_negatives_are_independent_draws_embedded_alike() -> None:
    model, batch = scored_model(), packed_batch([[4]] * 3000)
    batch = batch._replace(tokens=batch.tokens[:1].expand(3000, -1).contiguous())
    slots = BEST.sampled_slots(proposed(model, batch, passes=1), batch, at(batch, passes=1))
    share = proposed(model, batch, passes=1).all()[0].softmax(-1)  # the same for every row
    for number in (1, 2, 3):
        for place in range(4):
            found = slots.ids[:, number, place].bincount(minlength=share.shape[-1]) / 3000
            assert (found - share[place]).abs().max() < 0.04
    assert torch.equal(slots.ids[:, 0], batch.tokens)
    expected = share[torch.arange(4), slots.ids]
    torch.testing.assert_close(slots.alpha, expected, rtol=1e-4, atol=1e-6)
    pairs = (slots.ids[:, 1] == slots.ids[:, 2]).float().mean(0)
    torch.testing.assert_close(pairs, share.square().sum(-1), rtol=0, atol=0.04)


def test_negatives_belong_to_seed_step_row_and_position() -> None:
    model, batch = scored_model(), packed_batch([[64]] * 2)
    batch = batch._replace(tokens=torch.full_like(batch.tokens, 5))
    logits = Logits(torch.zeros(2, 64, 1), torch.zeros(EOS, 1), EOS)  # nothing but noise tells the draws apart

    def drawn(**change: int) -> Tensor:
        return BEST.sampled_slots(logits, batch, at(batch)._replace(**change)).ids[:, 1:]

    first = drawn()
    assert torch.equal(first, drawn()) and model is not None
    assert (first != drawn(step=1)).float().mean() > 0.8 and (first != drawn(seed=9)).float().mean() > 0.8
    assert (first[0] != first[1]).float().mean() > 0.8, "rows differ"
    assert (first[..., 1:] != first[..., :-1]).float().mean() > 0.8, "positions differ"
    assert (first[:, 0] != first[:, 1]).float().mean() > 0.8, "negatives differ"


@pytest.mark.parametrize("change", [{"feedback": "hard"}, {"rescale": True}])
@pytest.mark.parametrize("negatives", ["sampled", "beam"])
def test_slots_are_embedded_as_the_proposer_embeds_its_drafts(
    batch: Batch, change: dict[str, object], negatives: str
) -> None:
    model, config = scored_model(), replace(BEST, **change)  # type: ignore[arg-type]
    logits = proposed(model, batch, best=config)
    slots = (
        config.sampled_slots(logits, batch, at(batch)) if negatives == "sampled" else config.beam_slots(logits, batch)
    )
    if config.feedback == "hard":
        assert (slots.alpha == 1).all()
    else:
        assert not torch.allclose(scores_of(model, batch, slots, config), scores_of(model, batch, slots))
    loss = replace(config, negatives=negatives).loss(model, batch, at(batch))  # type: ignore[arg-type]
    assert loss.isfinite()


def test_slots_that_hold_no_text_take_part_in_nothing() -> None:
    """A block of two has four candidates: the other slots repeat the first, and must not share its probability."""
    model, batch = scored_model(), packed_batch([[8, 8], [16]])
    config = replace(BEST, block_size=2, num_negatives=6, negatives="beam")
    slots = config.beam_slots(proposed(model, batch, best=config), batch)
    assert slots.valid.sum(-1).unique().tolist() == [4]
    scores = torch.zeros(*slots.target.shape, 7)
    scores[..., 0] = 50.0
    perfect = block_losses(slots._replace(target=torch.zeros_like(slots.target)), scores)
    assert perfect.max() < 1e-6
    even = block_losses(slots._replace(target=torch.zeros_like(slots.target)), torch.zeros_like(scores))
    torch.testing.assert_close(even, torch.full_like(even, 4.0).log())


def test_beam_slots_hold_no_extra_truth(batch: Batch) -> None:
    model = scored_model()
    slots = BEST.beam_slots(proposed(model, batch), batch)
    blocks = slots.ids.view(len(batch.tokens), 4, -1, 4)
    truth = batch.tokens.view(len(batch.tokens), -1, 4)
    for row, block in torch.cartesian_prod(torch.arange(3), torch.arange(6)).tolist():
        among = [number for number in range(4) if torch.equal(blocks[row, number, block], truth[row, block])]
        assert slots.target[row, block] == (among[0] if among else -1)


def test_the_loss_is_the_nce_of_real_blocks(batch: Batch) -> None:
    model = scored_model()
    slots = BEST.sampled_slots(proposed(model, batch), batch, at(batch))
    scores = scores_of(model, batch, slots).detach()
    expected = 0.0
    for row, place in BEST.labels(batch).nonzero().tolist():
        values = scores[row, place // 4]
        expected += float(values.logsumexp(0) - values[0])
    assert BEST.loss(model, batch, at(batch)).item() == pytest.approx(expected, rel=1e-5)


def within_reach(model: Parts, batch: Batch) -> Batch:
    """The batch with texts that a random model can hit: four of five blocks are one of its own candidates."""
    for block in range(batch.tokens.shape[1] // 4):
        slots = BEST.beam_slots(proposed(model, batch), batch)
        tokens, span = batch.tokens.clone(), slice(4 * block, 4 * block + 4)
        for row in range(len(tokens)):
            if (row + block) % 5 < 4:
                tokens[row, span] = slots.ids[row, (row + block) % 5, span]
        batch = batch._replace(tokens=tokens)
    return batch


def test_with_beam_negatives_the_mean_of_the_blocks_that_count_stands_for_all(batch: Batch) -> None:
    model, config = scored_model(), replace(BEST, negatives="beam")
    changed = within_reach(model, batch)
    slots = config.beam_slots(proposed(model, changed), changed)
    real = BEST.labels(batch)[:, ::4]
    counted = (slots.target >= 0) & real
    assert 0 < counted.sum() < real.sum()
    scores = scores_of(model, changed, slots, config).log_softmax(-1)
    losses = [-scores[row, block, slots.target[row, block]] for row, block in counted.nonzero().tolist()]
    expected = torch.stack(losses).mean() * real.sum()
    torch.testing.assert_close(config.loss(model, changed, at(batch)), expected)


@torch.no_grad()
def test_validation_counts_the_choice_among_candidates_and_truth(batch: Batch) -> None:
    model = scored_model(scale=0.8)
    batch = within_reach(model, batch)
    found = BEST.validate(model, batch, at(batch))
    logits = proposed(model, batch)
    log_p, beam = logits.all().log_softmax(-1), BEST.beam_slots(logits, batch)
    wins = dict.fromkeys((0.0, 0.1, 1.0), 0)
    for row, place in BEST.labels(batch).nonzero().tolist():
        span = slice(place, place + 4)
        texts = [batch.tokens[row, span], *beam.ids[row, :, span]]
        values = {tau: list[float]() for tau in wins}
        for text in texts:
            ids = batch.tokens[row : row + 1, None].clone()
            ids[0, 0, span] = text
            alpha = log_p[row].gather(-1, ids[0, 0, :, None]).exp()[None, None, :, 0]
            one = batch.map(lambda part, row=row: part[row : row + 1])  # type: ignore[misc]
            score = scores_of(model, one, Slots(ids, alpha, torch.zeros(1), torch.ones(1)))[0, place // 4, 0]
            likely = log_p[row, span].gather(-1, text[:, None]).sum()
            for tau, list_ in values.items():
                list_.append(float(likely + tau * score))
        for tau, list_ in values.items():
            rivals = [value for text, value in zip(texts, list_, strict=True) if not torch.equal(text, texts[0])]
            wins[tau] += list_[0] > max(rivals)
    assert {f"choice{tau:g}": count for tau, count in wins.items()} == {
        name: int(value) for name, value in found.items() if name.startswith("choice")
    }
    assert len(set(wins.values())) > 1, "the scorer changes choices"
    real = BEST.labels(batch)[:, ::4]
    number = torch.arange(real.shape[0])[:, None] + torch.arange(real.shape[1])
    assert int(found["found"]) == int(((number % 5 < 4) & real).sum())
    slots = BEST.sampled_slots(logits, batch, at(batch))
    scores = scores_of(model, batch, slots)
    ranked = differing = 0
    for row, place in BEST.labels(batch).nonzero().tolist():
        block, span = place // 4, slice(place, place + 4)
        others = [n for n in (1, 2, 3) if not torch.equal(slots.ids[row, n, span], slots.ids[row, 0, span])]
        differing += bool(others)
        ranked += all(scores[row, block, n] < scores[row, block, 0] for n in others)
    assert (int(found["rank_accuracy"]), int(found["true_negatives"])) == (ranked, differing)
    torch.testing.assert_close(found["loss"], BEST.loss(model, batch, at(batch)))


def test_the_learned_score_is_the_log_density_ratio() -> None:
    """On a space of nine texts: minimise the exact expectation of Eq. bon_loss over free scores, N = 2."""
    generator = torch.Generator().manual_seed(0)
    data, proposed = (torch.rand(9, generator=generator, dtype=torch.float64) ** 2 + 0.02 for _ in range(2))
    data, proposed = data / data.sum(), proposed / proposed.sum()
    scores = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([scores], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16)
    weight = data[:, None] * proposed[None, :]  # positive i, negative j
    ids, target = torch.zeros(9, 2, 9, dtype=torch.int64), torch.zeros(9, 9, dtype=torch.int64)
    slots = Slots(ids, ids.float(), target, torch.ones(9, 9, 2, dtype=torch.bool))

    def closure() -> Tensor:
        optimizer.zero_grad()
        pair = torch.stack([scores[:, None].expand(9, 9), scores[None, :].expand(9, 9)], dim=-1)
        losses = block_losses(slots, pair)  # the very loss of the training, in float32
        loss = (weight * losses).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    ratio = data.log() - proposed.log()
    found = scores.detach()
    torch.testing.assert_close(found - found.mean(), ratio - ratio.mean(), rtol=0, atol=2e-3)


def test_the_gumbel_choice_has_the_frequencies_of_the_softmax() -> None:
    """Eq. finite_candidate_softmax with ℓ + τ·s as logits; an invalid candidate is never chosen."""
    count = 40_000
    scores = torch.tensor([[0.3, -1.0, 2.0, 9.0]]).expand(count, -1)
    proposals = torch.tensor([[0.0, -0.4, -1.5, 0.0]]).expand(count, -1)
    valid = torch.tensor([[True, True, True, False]]).expand(count, -1)
    blank = torch.zeros(count, 4, 1, dtype=torch.int64)
    candidates = Candidates(blank, blank.float(), proposals, valid, blank[..., 0])
    full = torch.full((count,), 4)
    search = Search(
        full,
        full,
        torch.full((count,), 0.7),
        torch.zeros(count).bool(),
        torch.ones(count).bool(),
        torch.zeros(count).long(),
    )
    winner = choose(candidates, scores, search, torch.stack([torch.arange(count), torch.zeros(count).long()], dim=-1))
    share = winner.bincount(minlength=4) / count
    assert share[3] == 0
    assert (share[:3] - (proposals + 0.7 * scores)[0, :3].softmax(0)).abs().max() < 0.01
    best = choose(candidates, scores, search._replace(gumbel=torch.zeros(count).bool()), torch.zeros(count, 2).long())
    assert (best == 0).all()


@pytest.mark.parametrize(("negatives", "scorer_layer"), [("sampled", False), ("beam", False), ("sampled", True)])
def test_stage_two_trains_the_scorer_and_leaves_the_backbone_alone(
    negatives: str, scorer_layer: bool, tmp_path: Path
) -> None:
    base = small_run(tmp_path / "data", problems=120, steps=8, batch_rows=4, lr=3e-3, validation_rows=4, save_every=4)
    loop.train(base, tmp_path / "base")
    best = replace(BEST, negatives=negatives, scorer_layer=scorer_layer)  # type: ignore[arg-type]
    config = replace(base, method=best, train=replace(base.train, init=str(tmp_path / "base")))
    result = loop.train(config, tmp_path / "scorer")
    numbers = {"loss", "rank_accuracy", "true_negatives", "found", "choice0", "choice0.1", "choice1"}
    assert numbers <= result.validation.keys()
    before, after = load_model(tmp_path / "base"), load_model(tmp_path / "scorer")
    assert before.scorer is None and after.scorer is not None
    old, new = before.backbone.state_dict(), after.backbone.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in old), "bit for bit"
    fresh = Scorer(after.backbone.config, last_layer=scorer_layer)
    init_weights(fresh, config.train.seed, before.backbone)
    moved = [
        name for name, weight in fresh.state_dict().items() if not torch.equal(weight, after.scorer.state_dict()[name])
    ]
    if negatives == "sampled":  # with the beam, a model this raw has no clean block among its candidates to learn from
        assert "mlp.2.weight" in moved and "fuse.weight" in moved
        assert ("last_layer.self_attn.q_proj.weight" in moved) == scorer_layer
    assert not (tmp_path / "base" / "checkpoints" / "step-8" / "scorer.safetensors").exists()
    with pytest.raises(FredaError, match=r"train\.init is empty"):
        loop.train(replace(base, method=best), tmp_path / "wrong")
    other = replace(config, method=replace(best, scorer_layer=not scorer_layer))
    again = replace(other, train=replace(config.train, init=str(tmp_path / "scorer")))
    with pytest.raises(FredaError, match=r"method.scorer_layer is .* was trained otherwise"):
        loop.train(again, tmp_path / "wrong")
    with pytest.raises(FredaError, match=r"method.feedback is hard, but .* was trained with soft"):
        loop.train(replace(config, method=replace(best, feedback="hard")), tmp_path / "wrong")
    for key, value in (("rescale", True), ("block_size", 2)):
        with pytest.raises(FredaError, match=rf"method.{key} is {value}, but .* was trained with"):
            loop.train(replace(config, method=replace(best, **{key: value})), tmp_path / "wrong")  # type: ignore[arg-type]


def test_a_scorer_judges_a_model_that_refines(tmp_path: Path) -> None:
    base = replace(small_run(tmp_path / "data"), method=method("block-diffusion"))
    loop.train(base, tmp_path / "base")
    config = replace(base, method=BEST, train=replace(base.train, init=str(tmp_path / "base")))
    with pytest.raises(FredaError, match=r"was trained as block-diffusion"):
        loop.train(config, tmp_path / "wrong")
    with pytest.raises(FredaError, match=r"method.committed_hard is true"):
        replace(BEST, committed_hard=True)


def test_resume_of_stage_two_is_exact(tmp_path: Path) -> None:
    base = small_run(tmp_path / "data", steps=2, log_every=1)
    loop.train(base, tmp_path / "base")
    tuned = replace(base.train, init=str(tmp_path / "base"), steps=4, save_every=2, lr=1e-3)
    config = replace(base, method=BEST, train=tuned)
    whole = loop.train(config, tmp_path / "whole")
    (tmp_path / "whole").rename(tmp_path / "cut")
    (tmp_path / "cut" / "latest").write_text("step-2\n")
    again = loop.train(loop.resume_run(tmp_path / "cut"), tmp_path / "cut", resume=True)
    assert again.validation == whole.validation


def test_a_scorer_of_another_width_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["Mia has 12 shells."], 270)
    shape = ModelConfig(vocab_size=tokenizer.size, dim=32, layers=1, heads=2, kv_heads=2, head_dim=16, ffn_dim=48)
    for name, width in (("one", 32), ("two", 64)):
        model = Transformer(replace(shape, dim=width), tokenizer.blank_id)
        save_model(tmp_path / name, LoadedModel(Parts(model, Scorer(model.config)), tokenizer, BEST, "test"))
    assert load_model(tmp_path / "one").scorer is not None
    (tmp_path / "two" / "scorer.safetensors").replace(tmp_path / "one" / "scorer.safetensors")
    with pytest.raises(FredaError, match=r"scorer.safetensors .* fuse.weight"):
        load_model(tmp_path / "one")


@pytest.mark.parametrize("name", ["self-refine", "autoregressive"])
def test_other_methods_start_from_a_model_with_a_scorer(name: str, tmp_path: Path) -> None:
    config = small_run(tmp_path / "data")
    loop.train(config, tmp_path / "base")
    for trained, init, out in ((BEST, "base", "scored"), (method(name), "scored", "after")):
        settings = replace(config.train, init=str(tmp_path / init))
        loop.train(replace(config, method=trained, train=settings), tmp_path / out)
    assert load_model(tmp_path / "scored").scorer is not None
    assert load_model(tmp_path / "after").scorer is None, "it would judge another backbone"
