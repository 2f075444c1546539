"""Propositions 1, 3 and 4 of the paper, exactly, on a space small enough to enumerate.

The space is all blocks of two tokens over three symbols. The draft distribution and the refinement kernel are those of
a real `Transformer` through freda's own functions: p_T is the prediction from the blank draft, K(x | x') the
factorised prediction (Eq. self_refine_transition) after draft x'. All sums run over the whole space in fp64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from freda.data.loader import Batch
from freda.methods.draft import clean_half, label_loss, start
from freda.methods.method import Step
from freda.methods.self_refine import SelfRefine
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.transformer import Transformer

SYMBOLS, SIZE = 3, 2
SPACE = torch.tensor(list(itertools.product(range(SYMBOLS), repeat=SIZE)))  # (9, 2)
METHOD = SelfRefine(block_size=SIZE)


@pytest.fixture(scope="module")
def toy() -> Transformer:
    shape = ModelConfig(vocab_size=4, dim=16, layers=2, heads=2, kv_heads=2, head_dim=8, ffn_dim=32)
    model = Transformer(shape, blank_id=SYMBOLS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.6)
    return model.double()


def rows(tokens: Tensor) -> Batch:
    zero = torch.zeros(tokens.shape, dtype=torch.int32)
    return Batch(tokens, zero, torch.arange(SIZE).expand_as(tokens), zero.bool())


@torch.no_grad()
def predictions(model: Transformer, drafts: Tensor | None) -> Tensor:
    """log K(x | x') for every x of the space (columns) after every draft (rows; None is the blank draft)."""
    tokens = SPACE[:1] if drafts is None else drafts
    draft = start(tokens, torch.zeros_like(tokens, dtype=torch.bool), SYMBOLS)
    if drafts is not None:
        draft = draft._replace(ids=drafts, prob=torch.ones(drafts.shape, dtype=torch.float64))
    logits = METHOD.pass_logits(model, clean_half(model, rows(tokens), METHOD.geometry), draft).all().double()
    log_p = logits.log_softmax(-1)  # (drafts, SIZE, SYMBOLS)
    return sum(log_p[:, place, SPACE[:, place]] for place in range(SIZE))  # type: ignore[return-value]


def kl(p: Tensor, q: Tensor) -> float:
    return float(torch.special.xlogy(p, p / q).sum())


@pytest.fixture(scope="module")
def target() -> Tensor:
    """p_0: random and far from factorised."""
    weights = torch.rand(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 3
    return weights / weights.sum()


@pytest.fixture(scope="module")
def blank_draft(toy: Transformer) -> Tensor:
    return predictions(toy, None)[0].exp()


@pytest.fixture(scope="module")
def kernel(toy: Transformer) -> Tensor:
    """K[x', x]; every row is a distribution."""
    return predictions(toy, SPACE).exp()


def random_coupling(left: Tensor, right: Tensor, seed: int) -> Tensor:
    """A joint γ[x', x] with marginals `left` (over x') and `right` (over x), by Sinkhorn's iteration."""
    joint = torch.rand(9, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    for _ in range(2000):
        joint = joint * (left / joint.sum(1))[:, None]
        joint = joint * (right / joint.sum(0))[None, :]
    return joint


def test_the_model_defines_distributions_that_depend_on_the_draft(blank_draft: Tensor, kernel: Tensor) -> None:
    ones = torch.ones(9, dtype=torch.float64)
    torch.testing.assert_close(kernel.sum(1), ones)
    assert float(blank_draft.sum()) == pytest.approx(1)
    assert (kernel - kernel[:1]).abs().max() > 0.05


def test_proposition_1_joint_surrogate_bounds_the_marginal(blank_draft: Tensor, kernel: Tensor, target: Tensor) -> None:
    model_joint = blank_draft[:, None] * kernel  # K(x | x') p_T(x')
    marginal = kl(target, model_joint.sum(0))
    independent = blank_draft[:, None] * target
    gaps = [kl(independent, model_joint) - marginal]
    gaps += [kl(random_coupling(blank_draft, target, seed), model_joint) - marginal for seed in range(5)]
    assert min(gaps) > 1e-6, "a coupling with these marginals is never below the marginal objective"
    posterior = target * model_joint / model_joint.sum(0)  # p_0(x) q(x' | x)
    assert kl(posterior, model_joint) == pytest.approx(marginal, abs=1e-12), "equality at the exact posterior"


def test_the_training_loss_is_the_surrogate_up_to_the_entropy_of_the_data(
    toy: Transformer, blank_draft: Tensor, kernel: Tensor, target: Tensor
) -> None:
    """Eq. conditional_refinement_loss, with freda's own loss over all pairs (x', x) weighted by p_T(x') p_0(x)."""
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9))
    drafts, texts = SPACE[pairs[:, 0]], SPACE[pairs[:, 1]]
    draft = start(drafts, torch.zeros_like(drafts, dtype=torch.bool), SYMBOLS)
    draft = draft._replace(ids=drafts, prob=torch.ones(drafts.shape, dtype=torch.float64))
    with torch.no_grad():
        logits = METHOD.pass_logits(toy, clean_half(toy, rows(texts), METHOD.geometry), draft)
        weights = blank_draft[pairs[:, 0]] * target[pairs[:, 1]]
        loss = float(label_loss(logits, METHOD.geometry.targets(rows(texts)), weights[:, None]))
    entropy = -float(torch.special.xlogy(target, target).sum())
    joint = kl(blank_draft[:, None] * target, blank_draft[:, None] * kernel)
    assert joint == pytest.approx(loss - entropy, abs=1e-6)


def test_the_loss_of_the_first_pass_is_the_initial_matching_objective(
    toy: Transformer, blank_draft: Tensor, target: Tensor
) -> None:
    """Eq. init_kl: training with one pass from the blank draft minimises KL(p_0 || p_T)."""
    plain = SelfRefine(block_size=SIZE, replacement_start=0.0, replacement_end=0.0)
    losses = []
    for text in SPACE:
        step = Step(seed=0, step=0, row=torch.arange(1), progress=0.0, passes=1)
        losses.append(plain.loss(Parts(toy), rows(text[None]), step).item())
    loss = float((torch.tensor(losses, dtype=torch.float64) * target).sum())
    entropy = -float(torch.special.xlogy(target, target).sum())
    assert kl(target, blank_draft) == pytest.approx(loss - entropy, abs=1e-6)


def test_proposition_3_marginal_consistency(blank_draft: Tensor, kernel: Tensor, target: Tensor) -> None:
    for share in (0.0, 0.01, 0.1, 0.5, 1.0):
        mixed = (1 - share) * target.expand(9, 9) + share * kernel
        joint = kl(blank_draft[:, None] * target, blank_draft[:, None] * mixed)
        marginal = kl(target, blank_draft @ mixed)
        assert marginal <= joint + 1e-12, "a small surrogate means a small marginal gap"
        if share == 0:
            assert joint == pytest.approx(0, abs=1e-12)
            torch.testing.assert_close(blank_draft @ mixed, target)


def test_proposition_4_ideal_refinement_never_increases_the_gap(
    blank_draft: Tensor, kernel: Tensor, target: Tensor
) -> None:
    """The family holds the identity: mixtures of it, the model's kernel and its square. The ideal step is the best."""
    target = 0.3 * target + 0.7 * blank_draft @ kernel  # a target that the model's kernel moves towards
    identity = torch.eye(9, dtype=torch.float64)
    weights = [(a, b) for a in torch.linspace(0, 1, 11) for b in torch.linspace(0, 1, 11) if a + b <= 1]
    family = [a * kernel + b * (kernel @ kernel) + (1 - a - b) * identity for a, b in weights]
    marginal, gaps = blank_draft, [kl(target, blank_draft)]
    for _ in range(6):
        best = min(family, key=lambda k: kl(target, marginal @ k))
        marginal = marginal @ best
        gaps.append(kl(target, marginal))
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(gaps))
    assert gaps[1] < gaps[0], "and here it does improve"
