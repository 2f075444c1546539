"""Logits by chunks say what all logits say."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from freda.methods.draft import likeliest, loss_and_hit, predict
from freda.model import head
from freda.model.head import Logits, aligned, chunks
from tests.helpers import BLANK, run_interpreted, tiny_model


def some_logits(dtype: torch.dtype = torch.float32, *, learn: bool = False) -> Logits:
    """14 positions over 29 ids, of a head with 40 rows."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 7, 16), (40, 16)))
    return Logits(*(part.to(dtype).requires_grad_(learn) for part in (hidden, weight)), 29)


@pytest.fixture(params=[1, 40 * 3, 40 * 14, 1 << 28])
def many_or_few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One position a chunk, three, all but one chunk, all in one."""
    monkeypatch.setattr(head, "MOST_LOGITS", request.param)


@pytest.mark.usefixtures("many_or_few")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradients_are_those_of_all_logits(dtype: torch.dtype) -> None:
    labels = torch.arange(14).view(2, 7)
    weights = torch.linspace(0, 2, 14).view(2, 7)
    found, plain = some_logits(dtype, learn=True), some_logits(dtype, learn=True)
    loss = found.cross_entropy(labels, weights)
    (loss / 7).backward()  # type: ignore[no-untyped-call]
    expected = (
        F.cross_entropy(plain.all().flatten(0, 1), labels.flatten(), reduction="none") * weights.flatten()
    ).sum()
    (expected / 7).backward()  # type: ignore[no-untyped-call]
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(loss, expected, **close)  # type: ignore[arg-type]
    for ours, theirs in ((found.hidden, plain.hidden), (found.weight, plain.weight)):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad, theirs.grad, **close)  # type: ignore[arg-type]
    assert found.weight.grad is not None and not found.weight.grad[29:].any(), "ids beyond the vocabulary learn nothing"


@pytest.mark.usefixtures("many_or_few")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_divergence_and_its_gradients_are_those_of_all_logits(temperature: float) -> None:
    """From a teacher where it teaches, from labels elsewhere; the teacher's weights learn as the pupil's head alone."""
    labels, weights = torch.arange(14).view(2, 7), torch.linspace(0, 2, 14).view(2, 7)
    taught = torch.arange(14).view(2, 7) % 3 > 0
    found, plain = some_logits(learn=True), some_logits(learn=True)
    states = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    loss = found.divergence(found._replace(hidden=states), temperature, labels, taught, weights)
    (loss / 7).backward()  # type: ignore[no-untyped-call]
    target = (plain._replace(hidden=states).all() / temperature).softmax(-1).detach()
    target = torch.where(taught[..., None], target, F.one_hot(labels, 29).float())
    losses = F.kl_div(plain.all().log_softmax(-1), target, reduction="none").sum(-1)
    expected = (losses * weights).sum()
    (expected / 7).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected)
    assert states.grad is None
    for ours, theirs in ((found.hidden, plain.hidden), (found.weight, plain.weight)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("many_or_few")
def test_chunks_keep_the_order_of_positions() -> None:
    logits = some_logits()
    best = likeliest(logits, (7, 2))
    expected = predict(logits.all().view(7, 2, -1))
    assert torch.equal(best.ids, expected.ids)
    torch.testing.assert_close(best.prob, expected.prob)
    two = likeliest(logits, (7, 2), runner_up=True)
    wanted = predict(logits.all().view(7, 2, -1), runner_up=True)
    assert torch.equal(two.second_ids, wanted.second_ids) and not torch.equal(two.second_ids, two.ids)
    torch.testing.assert_close(two.second_prob, wanted.second_prob)
    labels = best.ids.view(2, 7).clone()
    labels[0, 0] = (labels[0, 0] + 1) % 29
    losses, hit = logits.map(loss_and_hit, labels)
    assert losses.shape == (2, 7) and hit.tolist() == [[False] + [True] * 6, [True] * 7]


def test_a_loss_without_gradient_makes_none() -> None:
    logits = some_logits()
    labels = torch.zeros(2, 7, dtype=torch.int64)
    with torch.no_grad():
        loss = logits.cross_entropy(labels, torch.ones(2, 7))
    assert not loss.requires_grad
    frozen = Logits(logits.hidden.clone().requires_grad_(True), logits.weight, 29)
    frozen.cross_entropy(labels, torch.ones(2, 7)).backward()  # type: ignore[no-untyped-call]
    assert frozen.hidden.grad is not None and logits.weight.grad is None


def test_logits_of_a_chunk_are_all_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = head.plain_loss_and_gradient

    def watch(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        seen.append(logits.numel())
        return plain(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(head, "MOST_LOGITS", 40 * 4)
    monkeypatch.setattr(head, "plain_loss_and_gradient", watch)
    some_logits().cross_entropy(torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7))
    assert max(seen) <= 40 * 4 and sum(seen) == 40 * 14


def test_chunks_are_equal_where_they_can_be() -> None:
    assert [part.stop - part.start for part in chunks(8192, 151_680)] == [2048] * 4
    for positions in (1, 7, 4096, 5000):
        parts = chunks(positions, 151_680)
        assert [parts[0].start, parts[-1].stop] == [0, positions]
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert max(part.stop - part.start for part in parts) * 151_680 <= head.MOST_LOGITS + 151_680


def test_the_head_multiplies_with_aligned_rows() -> None:
    assert (aligned(151_669, 151_936), aligned(28, 29), aligned(64, 300), aligned(65, 300)) == (151_680, 29, 64, 128)
    model = tiny_model()
    hidden = torch.randn(3, 32)
    assert model.head(hidden).all().shape == (3, BLANK) and model.head(hidden).weight.shape == (29, 32)


def check_kernel() -> None:
    from freda.model.kernels.cross_entropy import loss_and_gradient

    for rows, columns, vocabulary in ((5, 64, 64), (3, 20032, 20001), (7, 100, 77), (2, 8192, 8192)):
        logits = torch.randn(rows, columns) * 3
        asked = torch.randint(0, vocabulary, (rows,)), torch.rand(rows), vocabulary
        expected, found = (
            head.plain_loss_and_gradient(logits.clone(), *asked),
            loss_and_gradient(logits.clone(), *asked),
        )
        torch.testing.assert_close(found, expected)
        assert not found[1][:, vocabulary:].any()


def test_the_kernel_of_the_loss_equals_its_plain_twin(tmp_path: Path) -> None:
    """In Triton's interpreter, where Triton is installed; on a GPU by tests/test_gpu.py."""
    pytest.importorskip("triton")
    run_interpreted(check_kernel, tmp_path)
