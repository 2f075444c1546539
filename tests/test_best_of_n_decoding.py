"""Decoding by Best-of-N: its invariants, and the scores that it shares with training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.decode.generate import generate
from freda.decode.request import Output, Pass, Request
from freda.errors import FredaError
from freda.methods.best_of_n import BestOfN, Slots
from freda.methods.candidates import choose
from freda.methods.draft import Candidates, Search
from freda.methods.method import Method
from freda.methods.self_refine import SelfRefine
from freda.model.parts import Parts
from tests.helpers import EOS, scored_model, tiny_model

BEST = BestOfN(block_size=4)


def requests(**settings: object) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, EOS, (length,), generator=generator).tolist() for length in (8, 5, 10, 3)]
    return [
        Request(prompt=p, seed=i, **{"max_new_tokens": 14, "threshold": 0.3, **settings}) for i, p in enumerate(prompts)
    ]  # type: ignore[arg-type]


def run(model: Parts, asked: list[Request], by: Method = BEST, **options: object) -> list[Output]:
    return generate(model, by, asked, stop_ids=[EOS], **options)  # type: ignore[arg-type]


def texts(outputs: list[Output]) -> list[tuple[list[int], int]]:
    return [(output.tokens, output.nfe) for output in outputs]


@pytest.mark.parametrize("last_layer", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("settings", [{"width": 1}, {"tau": 0.0}, {"swaps": 0}])
def test_without_a_choice_it_is_self_refinement(
    settings: dict[str, object], temperature: float, last_layer: bool
) -> None:
    model = scored_model(last_layer=last_layer)
    plain = texts(run(model, requests(temperature=temperature), SelfRefine(block_size=4)))
    chosen = {"tau": 5.0, "temperature": temperature}
    assert texts(run(model, requests(**{**chosen, **settings}))) == plain
    assert texts(run(model, requests(**chosen))) != plain, "the scorer does change something"


def test_hard_feedback_shows_candidates_hard() -> None:
    model = scored_model()
    plain, chosen = (
        run(model, requests(tau=0.0), by)
        for by in (SelfRefine(block_size=4, feedback="hard"), replace(BEST, feedback="hard"))
    )
    assert texts(plain) == texts(chosen) != texts(run(model, requests(tau=0.0)))


def test_chance_belongs_to_seed_and_pass() -> None:
    count = 400
    valid = torch.ones(count, 4, dtype=torch.bool)
    blank = torch.zeros(count, 4, 1, dtype=torch.int64)
    even = Candidates(blank, blank.float(), torch.zeros(count, 4), valid, blank[..., 0])
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


@pytest.mark.parametrize(
    ("settings", "last_layer"),
    [
        ({}, False),
        ({}, True),
        ({"select": "gumbel", "tau": 0.5}, False),
        ({"temperature": 1.0}, True),
        ({"width": 20, "swaps": 4}, False),
        ({"candidates": "sampled", "select": "gumbel", "tau": 1.0}, True),
    ],
)
def test_batch_cache_and_fused_commit_change_nothing(settings: dict[str, object], last_layer: bool) -> None:
    model = scored_model(last_layer=last_layer)
    asked = requests(**{"tau": 5.0, **settings})
    together = run(model, asked)
    assert texts(together) == texts([run(model, [request])[0] for request in asked])
    assert [o.tokens for o in together] == [o.tokens for o in run(model, asked, cached=False)]
    assert [o.tokens for o in together] == [o.tokens for o in run(model, asked, fused=False)]


def test_requests_have_their_own_width_and_weight() -> None:
    model = scored_model()
    asked = [
        replace(request, width=w, tau=t)
        for request, w, t in zip(requests(), (1, 2, 4, 8), (5.0, 0.0, 5.0, 1.0), strict=True)
    ]
    assert texts(run(model, asked)) == texts([run(model, [request])[0] for request in asked])


def test_a_layer_of_its_own_scores_as_in_training() -> None:
    """What decoding gives to a candidate is what the packed forward of training gives to the same text."""
    model, seen = scored_model(last_layer=True), list[Pass]()
    request = replace(requests(tau=1.0)[0], max_new_tokens=4)
    run(model, [request], watch=seen.append)
    step = seen[1]
    assert len(step.candidates) == 4
    texts_ = torch.tensor([[*request.prompt, *ids] for ids in step.candidates])
    batch = Batch(
        texts_[:1], torch.zeros(1, 12).int(), torch.arange(12).int()[None], torch.zeros(1, 12, dtype=torch.bool)
    )
    clean, proposed = BEST.proposal(model, batch, passes=1)
    logits = proposed.all().log_softmax(-1)
    prob = logits.expand(4, -1, -1).gather(-1, texts_[..., None])[..., 0]
    slots = Slots(texts_[None], prob.exp()[None], torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, 4).bool())
    values = prob[:, 8:].sum(-1) + BEST.score_slots(model, batch, clean, slots)[0, 2]
    torch.testing.assert_close(values, torch.tensor(step.scores), rtol=1e-4, atol=1e-4)


def test_requests_may_differ_in_how_candidates_are_found() -> None:
    model = scored_model()
    kinds = ("beam", "sampled", "sampled", "beam")
    asked = [replace(r, candidates=kind) for r, kind in zip(requests(tau=2.0), kinds, strict=True)]  # type: ignore[arg-type]
    assert texts(run(model, asked)) == texts([run(model, [request])[0] for request in asked])


def test_a_pass_shows_its_candidates_and_counts_once() -> None:
    model, seen = scored_model(), list[Pass]()
    output = run(model, requests(tau=5.0)[:1], watch=seen.append)[0]
    assert output.nfe == len(seen), "a packed forward is one forward"
    assert all(len(step.candidates) == 1 for step in seen if step.number == 1), "the blank draft has no rivals"
    later = [step for step in seen if step.number > 1]
    assert later and all(len(step.candidates) == len(step.scores) == 4 for step in later)
    assert all(step.winner == max(range(4), key=step.scores.__getitem__) for step in later)
    assert any(step.winner > 0 for step in later)


def test_bad_input() -> None:
    with pytest.raises(FredaError, match="the model has no scorer"):
        run(Parts(tiny_model()), requests())
    with pytest.raises(FredaError, match=r"swaps is 5, .* 0 to 4"):
        run(scored_model(), requests(swaps=5))
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
