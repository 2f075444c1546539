"""Best-of-N: the packed forward, the loss and its optimum, the frozen backbone, and decoding's invariants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from freda.methods.config import MethodConfig
from torch import Tensor

from freda.data.config import CorpusConfig
from freda.data.loader import Batch
from freda.data.prepare import prepare_corpus
from freda.data.tokenizer import train_tokenizer
from freda.decode.generate import Output, Pass, Request, generate
from freda.errors import FredaError
from freda.folders.model_folder import load_model, save_model
from freda.methods import METHODS, best_of_n
from freda.methods.best_of_n import (
    Slots,
    beam_slots,
    block_losses,
    frozen_clean_half,
    proposal,
    sampled_slots,
    score_slots,
)
from freda.methods.candidates import choose
from freda.methods.draft import Candidates, Search
from freda.methods.method import Step
from freda.model.attention import make_mask
from freda.model.config import ModelConfig
from freda.model.head import Logits
from freda.model.masks import clean_tokens
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer
from freda.train import loop
from freda.train.config import DataConfig, RunConfig, TrainConfig
from tests.conftest import EOS, packed_batch, tiny_model

SETTINGS = MethodConfig(name="best-of-n", block_size=4, num_negatives=3)


def scored_model(seed: int = 0, scale: float = 0.4, *, last_layer: bool = False) -> Transformer:
    """A tiny model with a scorer that has opinions."""
    model = tiny_model(seed)
    scorer = Scorer(model.config, last_layer=last_layer)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in scorer.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.scorer = scorer
    return model


def proposed(model: Transformer, batch: Batch, passes: int = 2, config: MethodConfig = SETTINGS) -> Logits:
    return proposal(model, batch, frozen_clean_half(model, batch, config), config, passes)


def scores_of(model: Transformer, batch: Batch, slots: Slots, config: MethodConfig) -> Tensor:
    return score_slots(model, batch, frozen_clean_half(model, batch, config), slots, config)


def at(batch: Batch, passes: int = 2, step: int = 0) -> Step:
    return Step(seed=1, step=step, row=torch.arange(len(batch.tokens)), progress=0.0, passes=passes)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_layer", [False, True])
def test_packed_slots_equal_one_forward_per_slot_and_do_not_see_each_other(batch: Batch, last_layer: bool) -> None:
    model = scored_model(last_layer=last_layer)
    slots = sampled_slots(proposed(model, batch), batch, SETTINGS, at(batch))
    packed = scores_of(model, batch, slots, SETTINGS)
    real = best_of_n.labels(batch, SETTINGS).view(len(batch.tokens), -1, 4)[..., 0]
    for number in range(4):
        one = Slots(
            slots.ids[:, number : number + 1], slots.alpha[:, number : number + 1], slots.target, slots.valid[..., :1]
        )
        torch.testing.assert_close(scores_of(model, batch, one, SETTINGS)[real, 0], packed[real, number])
    changed = slots.ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % EOS
    after = scores_of(model, batch, slots._replace(ids=changed), SETTINGS)
    assert torch.equal(after[..., [0, 1, 3]], packed[..., [0, 1, 3]]) and not torch.allclose(
        after[..., 2], packed[..., 2]
    )


def test_negatives_are_independent_draws_embedded_alike() -> None:
    model, batch = scored_model(), packed_batch([[4]] * 3000)
    batch = batch._replace(tokens=batch.tokens[:1].expand(3000, -1).contiguous())
    slots = sampled_slots(proposed(model, batch, passes=1), batch, SETTINGS, at(batch, passes=1))
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
        return sampled_slots(logits, batch, SETTINGS, at(batch)._replace(**change)).ids[:, 1:]

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
    model, config = scored_model(), replace(SETTINGS, **change)  # type: ignore[arg-type]
    logits = proposed(model, batch, config=config)
    slots = (
        sampled_slots(logits, batch, config, at(batch)) if negatives == "sampled" else beam_slots(logits, batch, config)
    )
    if config.feedback == "hard":
        assert (slots.alpha == 1).all()
    else:
        assert not torch.allclose(scores_of(model, batch, slots, config), scores_of(model, batch, slots, SETTINGS))
    loss = best_of_n.loss(model, batch, replace(config, negatives=negatives), at(batch))  # type: ignore[arg-type]
    assert loss.isfinite()


def test_slots_that_hold_no_text_take_part_in_nothing() -> None:
    """A block of two has four candidates: the other slots repeat the first, and must not share its probability."""
    model, batch = scored_model(), packed_batch([[8, 8], [16]])
    config = replace(SETTINGS, block_size=2, num_negatives=6, negatives="beam")
    slots = beam_slots(proposed(model, batch, config=config), batch, config)
    assert slots.valid.sum(-1).unique().tolist() == [4]
    scores = torch.zeros(*slots.target.shape, 7)
    scores[..., 0] = 50.0
    perfect = block_losses(slots._replace(target=torch.zeros_like(slots.target)), scores)
    assert perfect.max() < 1e-6
    even = block_losses(slots._replace(target=torch.zeros_like(slots.target)), torch.zeros_like(scores))
    torch.testing.assert_close(even, torch.full_like(even, 4.0).log())


def test_beam_slots_hold_no_extra_truth(batch: Batch) -> None:
    model = scored_model()
    slots = beam_slots(proposed(model, batch), batch, SETTINGS)
    blocks = slots.ids.view(len(batch.tokens), 4, -1, 4)
    truth = batch.tokens.view(len(batch.tokens), -1, 4)
    for row, block in torch.cartesian_prod(torch.arange(3), torch.arange(6)).tolist():
        among = [number for number in range(4) if torch.equal(blocks[row, number, block], truth[row, block])]
        assert slots.target[row, block] == (among[0] if among else -1)


def test_the_loss_is_the_nce_of_real_blocks(batch: Batch) -> None:
    model = scored_model()
    slots = sampled_slots(proposed(model, batch), batch, SETTINGS, at(batch))
    scores = scores_of(model, batch, slots, SETTINGS).detach()
    expected = 0.0
    for row, place in best_of_n.labels(batch, SETTINGS).nonzero().tolist():
        values = scores[row, place // 4]
        expected += float(values.logsumexp(0) - values[0])
    assert best_of_n.loss(model, batch, SETTINGS, at(batch)).item() == pytest.approx(expected, rel=1e-5)


def within_reach(model: Transformer, batch: Batch) -> Batch:
    """The batch with texts that a random model can hit: four of five blocks are one of its own candidates."""
    for block in range(batch.tokens.shape[1] // 4):
        slots = beam_slots(proposed(model, batch), batch, SETTINGS)
        tokens, span = batch.tokens.clone(), slice(4 * block, 4 * block + 4)
        for row in range(len(tokens)):
            if (row + block) % 5 < 4:
                tokens[row, span] = slots.ids[row, (row + block) % 5, span]
        batch = batch._replace(tokens=tokens)
    return batch


def test_with_beam_negatives_the_mean_of_the_blocks_that_count_stands_for_all(batch: Batch) -> None:
    model, config = scored_model(), replace(SETTINGS, negatives="beam")
    changed = within_reach(model, batch)
    slots = beam_slots(proposed(model, changed), changed, config)
    real = best_of_n.labels(batch, SETTINGS)[:, ::4]
    counted = (slots.target >= 0) & real
    assert 0 < counted.sum() < real.sum()
    scores = scores_of(model, changed, slots, config).log_softmax(-1)
    losses = [-scores[row, block, slots.target[row, block]] for row, block in counted.nonzero().tolist()]
    expected = torch.stack(losses).mean() * real.sum()
    torch.testing.assert_close(best_of_n.loss(model, changed, config, at(batch)), expected)


@torch.no_grad()
def test_validation_counts_the_choice_among_candidates_and_truth(batch: Batch) -> None:
    model = scored_model(scale=0.8)
    batch = within_reach(model, batch)
    found = best_of_n.validate(model, batch, SETTINGS, at(batch))
    logits = proposed(model, batch)
    log_p, beam = logits.all().log_softmax(-1), beam_slots(logits, batch, SETTINGS)
    wins = dict.fromkeys((0.0, 0.1, 1.0), 0)
    for row, place in best_of_n.labels(batch, SETTINGS).nonzero().tolist():
        span = slice(place, place + 4)
        texts = [batch.tokens[row, span], *beam.ids[row, :, span]]
        values = {tau: list[float]() for tau in wins}
        for text in texts:
            ids = batch.tokens[row : row + 1, None].clone()
            ids[0, 0, span] = text
            alpha = log_p[row].gather(-1, ids[0, 0, :, None]).exp()[None, None, :, 0]
            one = batch.map(lambda part, row=row: part[row : row + 1])  # type: ignore[misc]
            score = scores_of(model, one, Slots(ids, alpha, torch.zeros(1), torch.ones(1)), SETTINGS)[0, place // 4, 0]
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
    real = best_of_n.labels(batch, SETTINGS)[:, ::4]
    number = torch.arange(real.shape[0])[:, None] + torch.arange(real.shape[1])
    assert int(found["found"]) == int(((number % 5 < 4) & real).sum())
    slots = sampled_slots(logits, batch, SETTINGS, at(batch))
    scores = scores_of(model, batch, slots, SETTINGS)
    ranked = differing = 0
    for row, place in best_of_n.labels(batch, SETTINGS).nonzero().tolist():
        block, span = place // 4, slice(place, place + 4)
        others = [n for n in (1, 2, 3) if not torch.equal(slots.ids[row, n, span], slots.ids[row, 0, span])]
        differing += bool(others)
        ranked += all(scores[row, block, n] < scores[row, block, 0] for n in others)
    assert (int(found["rank_accuracy"]), int(found["true_negatives"])) == (ranked, differing)
    torch.testing.assert_close(found["loss"], best_of_n.loss(model, batch, SETTINGS, at(batch)))


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
    candidates = Candidates(blank, blank.float(), proposals, valid)
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
    prepare_corpus(CorpusConfig(problems=120, validation_problems=12, vocab_size=300), tmp_path / "data")
    base = RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=96),
        train=TrainConfig(
            steps=8, batch_rows=4, group_rows=2, lr=3e-3, warmup_steps=1, validation_rows=4, save_every=4
        ),
    )
    loop.train(base, tmp_path / "base")
    method = replace(SETTINGS, negatives=negatives, scorer_layer=scorer_layer)  # type: ignore[arg-type]
    config = replace(base, method=method, train=replace(base.train, init=str(tmp_path / "base")))
    result = loop.train(config, tmp_path / "scorer")
    numbers = {"loss", "rank_accuracy", "true_negatives", "found", "choice0", "choice0.1", "choice1"}
    assert numbers <= result.validation.keys()
    before, after = load_model(tmp_path / "base").model, load_model(tmp_path / "scorer").model
    assert before.scorer is None and after.scorer is not None
    backbone = before.state_dict()
    assert all(torch.equal(backbone[name], after.state_dict()[name]) for name in backbone), "bit for bit"
    fresh = Scorer(after.config, last_layer=scorer_layer)
    fresh.init_weights(config.train.seed, before)
    moved = [
        name for name, weight in fresh.state_dict().items() if not torch.equal(weight, after.scorer.state_dict()[name])
    ]
    if negatives == "sampled":  # with the beam, a model this raw has no clean block among its candidates to learn from
        assert "mlp.2.weight" in moved and "fuse.weight" in moved
        assert ("last_layer.self_attn.q_proj.weight" in moved) == scorer_layer
    assert not (tmp_path / "base" / "checkpoints" / "step-8" / "scorer.safetensors").exists()
    with pytest.raises(FredaError, match=r"train\.init is empty; best-of-n starts from a self-refine model"):
        loop.train(replace(base, method=method), tmp_path / "wrong")
    other = replace(config, method=replace(method, scorer_layer=not scorer_layer))
    again = replace(other, train=replace(config.train, init=str(tmp_path / "scorer")))
    with pytest.raises(FredaError, match=r"method.scorer_layer is .* was trained otherwise"):
        loop.train(again, tmp_path / "wrong")
    with pytest.raises(FredaError, match=r"method.feedback is hard, but .* was trained with soft; use the same"):
        loop.train(replace(config, method=replace(method, feedback="hard")), tmp_path / "wrong")
    for key, value in (("rescale", True), ("block_size", 2)):
        with pytest.raises(FredaError, match=rf"method.{key} is {value}, but .* was trained with"):
            loop.train(replace(config, method=replace(method, **{key: value})), tmp_path / "wrong")  # type: ignore[arg-type]


def test_a_scorer_judges_a_model_that_refines(tmp_path: Path) -> None:
    prepare_corpus(CorpusConfig(problems=40, validation_problems=8, vocab_size=300), tmp_path / "data")
    base = RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=96),
        method=MethodConfig(name="block-diffusion"),
        train=TrainConfig(steps=1, batch_rows=2, group_rows=2, warmup_steps=1, validation_rows=2),
    )
    loop.train(base, tmp_path / "base")
    config = replace(base, method=SETTINGS, train=replace(base.train, init=str(tmp_path / "base")))
    with pytest.raises(FredaError, match=r"was trained as block-diffusion; best-of-n starts from a self-refine model"):
        loop.train(config, tmp_path / "wrong")
    with pytest.raises(FredaError, match=r"method.committed_hard is true"):
        replace(SETTINGS, committed_hard=True)


def test_resume_of_stage_two_is_exact(tmp_path: Path) -> None:
    prepare_corpus(CorpusConfig(problems=60, validation_problems=8, vocab_size=300), tmp_path / "data")
    base = RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=96),
        train=TrainConfig(steps=2, batch_rows=2, group_rows=2, warmup_steps=1, validation_rows=2, log_every=1),
    )
    loop.train(base, tmp_path / "base")
    tuned = replace(base.train, init=str(tmp_path / "base"), steps=4, save_every=2, lr=1e-3)
    config = replace(base, method=SETTINGS, train=tuned)
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
        model.scorer = Scorer(model.config)
        save_model(tmp_path / name, model, tokenizer, SETTINGS, stage="test")
    loaded = load_model(tmp_path / "one").model
    assert loaded.scorer is not None
    (tmp_path / "two" / "scorer.safetensors").replace(tmp_path / "one" / "scorer.safetensors")
    with pytest.raises(FredaError, match=r"scorer.safetensors does not belong to the model: fuse.weight has shape"):
        load_model(tmp_path / "one")


# -- decoding --------------------------------------------------------------------------------------------------------


def requests(**settings: object) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, EOS, (length,), generator=generator).tolist() for length in (8, 5, 10, 3)]
    return [
        Request(prompt=p, seed=i, **{"max_new_tokens": 14, "threshold": 0.3, **settings}) for i, p in enumerate(prompts)
    ]  # type: ignore[arg-type]


def run(model: Transformer, name: str, asked: list[Request], **options: object) -> list[Output]:
    return generate(model, METHODS[name], SETTINGS, asked, stop_ids=[EOS], **options)  # type: ignore[index, arg-type]


def texts(outputs: list[Output]) -> list[tuple[list[int], int]]:
    return [(output.tokens, output.nfe) for output in outputs]


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{"width": 1}, {"tau": 0.0}, {"swaps": 0}])
def test_without_a_choice_it_is_self_refinement(
    settings: dict[str, object], temperature: float, last_layer: bool
) -> None:
    model = scored_model(last_layer=last_layer)
    plain = texts(run(model, "self-refine", requests(temperature=temperature)))
    chosen = {"tau": 5.0, "temperature": temperature}
    assert texts(run(model, "best-of-n", requests(**{**chosen, **settings}))) == plain
    assert texts(run(model, "best-of-n", requests(**chosen))) != plain, "the scorer does change something"


def test_hard_feedback_shows_candidates_hard() -> None:
    model = scored_model()
    hard = replace(SETTINGS, feedback="hard")
    plain, chosen = (
        generate(model, METHODS[name], hard, requests(tau=tau), stop_ids=[EOS])  # type: ignore[index]
        for name, tau in (("self-refine", 0.0), ("best-of-n", 0.0))
    )
    assert texts(plain) == texts(chosen) != texts(run(model, "best-of-n", requests(tau=0.0)))


def test_chance_belongs_to_seed_and_pass() -> None:
    count = 400
    valid = torch.ones(count, 4, dtype=torch.bool)
    blank = torch.zeros(count, 4, 1, dtype=torch.int64)
    even = Candidates(blank, blank.float(), torch.zeros(count, 4), valid)
    full, yes = torch.full((count,), 4), torch.ones(count, dtype=torch.bool)

    def winners(seed: int, number: int, *, gumbel: bool = True, sampled: bool = False) -> Tensor:
        search = Search(full, full, torch.zeros(count), yes & sampled, yes & gumbel, torch.full((count,), seed))
        place = torch.stack([torch.arange(count), torch.full((count,), number)], dim=-1)
        return choose(even, torch.zeros(count, 4), search, place)

    first = winners(0, 1)
    assert torch.equal(first, winners(0, 1))
    assert (first != winners(1, 1)).float().mean() > 0.6 and (first != winners(0, 2)).float().mean() > 0.6
    assert torch.equal(winners(0, 1, gumbel=False, sampled=True), first), "draws carry ℓ in their frequency (M10)"
    assert (winners(0, 1, gumbel=False) == 0).all()


def test_a_scorers_own_layer_starts_as_the_backbones() -> None:
    model = tiny_model(qk_norm=False, qkv_bias=True)
    scorer = Scorer(model.config, last_layer=True)
    scorer.init_weights(0, model)
    assert scorer.layer.self_attn.q_norm.weight.shape == (8,), "the scorer's layer is of Qwen3's kind"
    position = torch.arange(8)[None]
    tokens = clean_tokens(torch.zeros_like(position), position, 4)
    x, mask = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)), make_mask(tokens, tokens, "sdpa")
    out = model(x, position, mask)
    torch.testing.assert_close(scorer.soft_channel(model, out, position, mask, None), out.hidden)


@pytest.mark.parametrize("name", ["self-refine", "autoregressive"])
def test_other_methods_start_from_a_model_with_a_scorer(name: str, tmp_path: Path) -> None:
    prepare_corpus(CorpusConfig(problems=60, validation_problems=8, vocab_size=300), tmp_path / "data")
    config = RunConfig(
        model=ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=48),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=96),
        train=TrainConfig(steps=1, batch_rows=2, group_rows=2, warmup_steps=1, validation_rows=2),
    )
    loop.train(config, tmp_path / "base")
    for method, init, out in ((SETTINGS, "base", "scored"), (MethodConfig(name=name), "scored", "after")):  # type: ignore[arg-type]
        settings = replace(config.train, init=str(tmp_path / init))
        loop.train(replace(config, method=method, train=settings), tmp_path / out)
    assert load_model(tmp_path / "scored").model.scorer is not None
    assert load_model(tmp_path / "after").model.scorer is None, "it would judge another backbone"


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"select": "gumbel", "tau": 0.5},
        {"temperature": 1.0},
        {"width": 20, "swaps": 4},
        {"candidates": "sampled", "select": "gumbel", "tau": 1.0},
    ],
)
def test_batch_cache_and_fused_commit_change_nothing(settings: dict[str, object], last_layer: bool) -> None:
    model = scored_model(last_layer=last_layer)
    asked = requests(**{"tau": 5.0, **settings})
    together = run(model, "best-of-n", asked)
    assert texts(together) == texts([run(model, "best-of-n", [request])[0] for request in asked])
    assert [o.tokens for o in together] == [o.tokens for o in run(model, "best-of-n", asked, cached=False)]
    assert [o.tokens for o in together] == [o.tokens for o in run(model, "best-of-n", asked, fused=False)]


def test_requests_have_their_own_width_and_weight() -> None:
    model = scored_model()
    asked = [
        replace(request, width=w, tau=t)
        for request, w, t in zip(requests(), (1, 2, 4, 8), (5.0, 0.0, 5.0, 1.0), strict=True)
    ]
    assert texts(run(model, "best-of-n", asked)) == texts([run(model, "best-of-n", [request])[0] for request in asked])


def test_a_layer_of_its_own_scores_as_in_training() -> None:
    """What decoding gives to a candidate is what the packed forward of training gives to the same text."""
    model, seen = scored_model(last_layer=True), list[Pass]()
    request = replace(requests(tau=1.0)[0], max_new_tokens=4)
    run(model, "best-of-n", [request], watch=seen.append)
    step = seen[1]
    assert len(step.candidates) == 4
    texts_ = torch.tensor([[*request.prompt, *ids] for ids in step.candidates])
    batch = Batch(
        texts_[:1], torch.zeros(1, 12).int(), torch.arange(12).int()[None], torch.zeros(1, 12, dtype=torch.bool)
    )
    logits = proposed(model, batch, passes=1).all().log_softmax(-1)
    prob = logits.expand(4, -1, -1).gather(-1, texts_[..., None])[..., 0]
    slots = Slots(texts_[None], prob.exp()[None], torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, 4).bool())
    values = prob[:, 8:].sum(-1) + scores_of(model, batch, slots, SETTINGS)[0, 2]
    torch.testing.assert_close(values, torch.tensor(step.scores), rtol=1e-4, atol=1e-4)


def test_requests_may_differ_in_how_candidates_are_found() -> None:
    model = scored_model()
    kinds = ("beam", "sampled", "sampled", "beam")
    asked = [replace(r, candidates=kind) for r, kind in zip(requests(tau=2.0), kinds, strict=True)]  # type: ignore[arg-type]
    assert texts(run(model, "best-of-n", asked)) == texts([run(model, "best-of-n", [request])[0] for request in asked])


def test_a_pass_shows_its_candidates_and_counts_once() -> None:
    model, seen = scored_model(), list[Pass]()
    output = run(model, "best-of-n", requests(tau=5.0)[:1], watch=seen.append)[0]
    assert output.nfe == len(seen), "a packed forward is one forward"
    assert all(len(step.candidates) == 1 for step in seen if step.number == 1), "the blank draft has no rivals"
    later = [step for step in seen if step.number > 1]
    assert later and all(len(step.candidates) == len(step.scores) == 4 for step in later)
    assert all(step.winner == max(range(4), key=step.scores.__getitem__) for step in later)
    assert any(step.winner > 0 for step in later)


def test_bad_input() -> None:
    with pytest.raises(FredaError, match="the model has no scorer"):
        run(tiny_model(), "best-of-n", requests())
    with pytest.raises(FredaError, match="swaps is 5, more than a block has positions; use 0 to 4"):
        run(scored_model(), "best-of-n", requests(swaps=5))
    for settings, message in (
        ({"width": 0}, "width is 0"),
        ({"width": 1000}, "width is 1000; use 1 to 256"),
        ({"tau": float("inf")}, "tau is inf"),
        ({"tau": float("nan")}, "tau is nan"),
        ({"threshold": float("inf")}, "threshold is inf"),
        ({"tau": -1.0}, "tau is -1.0"),
        ({"select": "x"}, "select is 'x'"),
        ({"candidates": "x"}, "candidates is 'x'; use beam or sampled"),
    ):
        with pytest.raises(FredaError, match=message):
            requests(**settings)
