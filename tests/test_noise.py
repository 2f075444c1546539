"""Counter-based noise: uniform, independent of the batch, different for different counters."""

from __future__ import annotations

import torch

from freda.methods.noise import Purpose, gumbel, uniform


def test_a_draw_depends_on_its_counters_alone() -> None:
    rows = torch.arange(6)[:, None]
    place = torch.arange(10)
    whole = uniform(Purpose.MASKING, 1, 2, rows, place)
    assert torch.equal(whole[3:4, 4:7], uniform(Purpose.MASKING, 1, 2, rows[3:4], place[4:7]))
    for other in (
        uniform(Purpose.REPLACEMENT, 1, 2, rows, place),
        uniform(Purpose.MASKING, 2, 2, rows, place),
        uniform(Purpose.MASKING, 1, 3, rows, place),
        uniform(Purpose.MASKING, 1 + 2**32, 2, rows, place),
    ):
        assert (whole != other).all()


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = uniform(Purpose.MASKING, 0, 0, torch.arange(400)[:, None], torch.arange(500))
    assert draws.min() > 0 and draws.max() < 1
    histogram = torch.histc(draws, bins=20, min=0, max=1) / draws.numel()
    assert (histogram - 0.05).abs().max() < 0.002  # 4 standard errors of 200,000 draws
    for pair in (draws[:, :-1] * draws[:, 1:], draws[:-1] * draws[1:]):
        assert abs(float(pair.mean()) - 0.25) < 0.003


def test_gumbel_argmax_samples_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    noise = gumbel(Purpose.SAMPLING, 7, torch.arange(100_000)[:, None], torch.arange(3))
    share = (logits + noise).argmax(-1).bincount(minlength=3) / 100_000
    assert (share - logits.softmax(0)).abs().max() < 0.006
