"""Training: what the losses are, what they see, and where their gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from freda.data.loader import Batch
from freda.decode.generate import generate
from freda.decode.request import Request
from freda.methods.autoregressive import Autoregressive, next_token_logits
from freda.methods.block_diffusion import BlockDiffusion
from freda.methods.draft import clean_half, draft_logits, label_loss, soft_embedding
from freda.methods.geometry import Geometry
from freda.methods.method import Step
from freda.methods.self_refine import SelfRefine, sampled
from freda.model.attention import clean_tokens, concat, draft_tokens, make_mask
from freda.model.head import Logits
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import BLANK, EOS, method, packed_batch

PAPER = Geometry(4)
NOISELESS: dict[str, dict[str, Any]] = {  # losses without noise that depends on the place in a row
    "autoregressive": {},
    "block-diffusion": {"noise_min": 1.0},
    "self-refine": {"replacement_start": 0, "replacement_end": 0},
}


def at(batch: Batch, passes: int = 1, step: int = 0, progress: float = 0.0) -> Step:
    return Step(seed=1, step=step, row=torch.arange(len(batch.tokens)), progress=progress, passes=passes)


def single_forward_logits(model: Transformer, x: Tensor, batch: Batch, size: int = 4) -> Logits:
    """The paper's forward: [draft | clean] in one sequence under one mask. The oracle of M7."""
    tokens = concat(
        draft_tokens(batch.document, batch.position // size * size), clean_tokens(batch.document, batch.position, size)
    )
    both = torch.cat([x, model.embed_tokens(batch.tokens)], dim=1)
    hidden, _, _ = model(both, torch.cat([batch.position] * 2, dim=1), make_mask(tokens, tokens, "sdpa"))
    return model.head(hidden[:, : x.shape[1]])


def gradients(model: Transformer, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def random_draft(model: Transformer, batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, EOS, batch.tokens.shape, generator=generator)
    alpha = torch.rand(batch.tokens.shape, generator=generator)
    return soft_embedding(model, ids, alpha)


def test_clean_half_as_cache_equals_the_single_forward(model: Transformer, batch: Batch) -> None:
    real = batch.document >= 0
    cached = draft_logits(model, random_draft(model, batch), clean_half(model, batch, PAPER))
    single = single_forward_logits(model, random_draft(model, batch), batch)
    torch.testing.assert_close(cached.all()[real], single.all()[real])
    got, expected = (gradients(model, label_loss(logits, PAPER.targets(batch))) for logits in (cached, single))
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_draft_equal_to_the_clean_text_gives_the_block_causal_forward(model: Transformer, batch: Batch) -> None:
    tokens = clean_tokens(batch.document, batch.position, 4)
    with torch.no_grad():
        hidden, _, _ = model(model.embed_tokens(batch.tokens), batch.position, make_mask(tokens, tokens, "sdpa"))
        doubled = draft_logits(model, model.embed_tokens(batch.tokens), clean_half(model, batch, PAPER))
    torch.testing.assert_close(doubled.all(), model.logits(hidden))


def test_gradient_of_a_step_is_that_of_its_last_pass_on_a_fixed_draft(
    model: Transformer, batch: Batch, settings: SelfRefine
) -> None:
    """No backpropagation through the loop: two passes made beforehand, then frozen, give the same gradient."""
    step = at(batch, passes=3)
    got = gradients(model, settings.loss(Parts(model), batch, step))
    with torch.no_grad():
        clean = clean_half(model, batch, PAPER)
        draft = settings.initial_draft(model, batch, step)
        for _ in range(2):
            _, draft = settings.refine(model, clean, draft)
    ids, alpha = (part.view_as(batch.tokens) for part in settings.rows(draft))
    logits = single_forward_logits(model, soft_embedding(model, ids, alpha), batch)
    expected = gradients(model, label_loss(logits, PAPER.targets(batch)))
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=name)
    earlier = gradients(model, settings.loss(Parts(model), batch, at(batch, passes=2)))
    assert any(not torch.allclose(got[name], earlier[name], rtol=1e-3) for name in got)


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made inside the block held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.live = {ref: size for ref, size in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def peak_bytes(compute: Callable[[], Tensor]) -> int:
    """Peak memory of `compute` and its backward pass."""
    with PeakMemory() as memory:
        compute().backward()
    return memory.peak


def test_memory_does_not_grow_with_the_passes(model: Transformer, batch: Batch, settings: SelfRefine) -> None:
    one, many = (peak_bytes(lambda t=t: settings.loss(Parts(model), batch, at(batch, passes=t))) for t in (1, 6))
    assert many <= one * 1.05, "the peak must not depend on the number of passes"
    unrolled = peak_bytes(lambda: _through_time(model, batch, settings))
    assert unrolled > 2 * one, "the measure must notice a loop that is kept"


def _through_time(model: Transformer, batch: Batch, settings: SelfRefine) -> Tensor:
    clean = clean_half(model, batch, PAPER)
    draft = settings.blank_draft(model, batch)
    total = torch.zeros(())
    for _ in range(4):
        logits, draft = settings.refine(model, clean, draft)
        total = total + label_loss(logits, PAPER.targets(batch))
    return total


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("switch", [{}, {"feedback": "hard"}, {"rescale": True}])
def test_training_drafts_are_decoding_drafts(model: Transformer, passes: int, switch: dict[str, object]) -> None:
    """The draft a training pass leaves in block j is what `generate` makes after the clean blocks before it."""
    settings = SelfRefine(block_size=4, **switch)  # type: ignore[arg-type]
    batch = packed_batch([[12, 16], [20, 8]])
    with torch.no_grad():
        clean = clean_half(model, batch, PAPER)
        draft = settings.blank_draft(model, batch)
        for _ in range(passes):
            _, draft = settings.refine(model, clean, draft)
    for row, (begin, end) in [(0, (0, 12)), (0, (12, 28)), (1, (0, 20)), (1, (20, 28))]:
        document = batch.tokens[row, begin:end].tolist()
        asked = [
            Request(prompt=document[:place], max_new_tokens=4, passes=passes, threshold=2.0)
            for place in range(0, len(document), 4)
        ]
        made = generate(Parts(model), settings, asked, stop_ids=[])
        expected = draft.ids.view_as(batch.tokens)[row, begin:end].tolist()
        assert [token for output in made for token in output.tokens] == expected


@pytest.mark.parametrize("name", ["autoregressive", "block-diffusion", "self-refine"])
def test_documents_do_not_see_each_other(model: Transformer, name: str) -> None:
    """The loss of packed documents is the sum of the losses of each alone."""
    batch, trained = packed_batch([[8, 12]]), method(name, block_size=4, **NOISELESS[name])
    parts = [Batch(*(part[:, begin:end] for part in batch[:4])) for begin, end in ((0, 8), (8, 20))]
    whole, *alone = (trained.loss(Parts(model), part, at(part, passes=2)) for part in (batch, *parts))
    torch.testing.assert_close(whole, alone[0] + alone[1])


@pytest.mark.parametrize("name", ["autoregressive", "block-diffusion", "self-refine"])
def test_padding_changes_nothing(model: Transformer, name: str) -> None:
    short, trained = packed_batch([[8]]), method(name, block_size=4)
    padded = Batch(
        torch.cat([short.tokens, torch.full((1, 8), EOS)], dim=1),
        torch.cat([short.document, torch.full((1, 8), -1, dtype=torch.int32)], dim=1),
        torch.cat([short.position, torch.zeros(1, 8, dtype=torch.int32)], dim=1),
        torch.cat([short.fill, torch.zeros(1, 8, dtype=torch.bool)], dim=1),
    )
    one, two = (trained.loss(Parts(model), b, at(b, passes=2)) for b in (short, padded))
    torch.testing.assert_close(one, two)
    assert trained.labels(padded).sum() == trained.labels(short).sum()


def test_future_text_is_invisible(model: Transformer) -> None:
    """Changing clean blocks from j on leaves the draft logits of blocks up to j alone."""
    batch = packed_batch([[16]])
    changed = batch._replace(tokens=torch.cat([batch.tokens[:, :8], (batch.tokens[:, 8:] + 1) % EOS], dim=1))
    with torch.no_grad():
        x = random_draft(model, batch)
        before, after = (draft_logits(model, x, clean_half(model, b, PAPER)).all() for b in (batch, changed))
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_autoregressive_loss_skips_fill_and_document_starts(model: Transformer) -> None:
    batch = packed_batch([[8, 4]])
    assert Autoregressive().labels(batch)[0].int().tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0]
    with torch.no_grad():
        logits = next_token_logits(Parts(model), batch).all().log_softmax(-1)[0]
    expected = -sum(logits[place - 1, batch.tokens[0, place]] for place in (1, 2, 3, 4, 5, 6, 9, 10))
    torch.testing.assert_close(Autoregressive().loss(Parts(model), batch, at(batch)), torch.as_tensor(expected))


def test_block_methods_learn_to_fill_the_last_block() -> None:
    batch = packed_batch([[8, 4]])
    assert SelfRefine().labels(batch).all() and BlockDiffusion().labels(batch).all()


def test_block_diffusion_loss_is_the_weighted_sum(model: Transformer, batch: Batch) -> None:
    step, diffusion = at(batch), BlockDiffusion(block_size=4)
    level, masked = diffusion.noise(batch, step)
    blocks = level.view(len(batch.tokens), -1, 4)
    assert (blocks == blocks[..., :1]).all() and blocks[..., 0].unique().numel() > 10, "one t per block"
    ids = torch.where(masked, BLANK, batch.tokens)
    with torch.no_grad():
        log_p = single_forward_logits(model, model.embed_tokens(ids), batch).all().log_softmax(-1)
    expected = 0.0
    for row, place in (masked & (batch.document >= 0)).nonzero().tolist():
        expected -= float(log_p[row, place, batch.tokens[row, place]] / level[row, place])
    assert diffusion.loss(Parts(model), batch, step).item() == pytest.approx(expected, rel=1e-4)


def test_block_diffusion_masks_a_share_t_of_each_block() -> None:
    batch = packed_batch([[512]] * 64)
    level, masked = BlockDiffusion(noise_min=0.2, noise_max=0.4).noise(batch, at(batch))
    assert level.min() >= 0.2 and level.max() <= 0.4
    assert float(masked.float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float((masked / level).mean()) == pytest.approx(1.0, abs=0.03), "1/t makes every token count once"


@pytest.mark.parametrize("kind", ["iid", "prefix"])
def test_replacement_shows_its_share_of_the_truth(model: Transformer, kind: str) -> None:
    batch = packed_batch([[512]] * 64)
    config = SelfRefine(replacement=kind, replacement_start=0.3, replacement_end=0.1)  # type: ignore[arg-type]
    for progress, share in ((0.0, 0.3), (0.25, 0.2), (0.5, 0.1), (1.0, 0.1)):
        shown = config.replaced(batch, at(batch, progress=progress))
        assert float(shown.float().mean()) == pytest.approx(share, abs=0.01)
    prefixes = (shown.int().diff(dim=-1) <= 0).all()
    assert bool(prefixes) == (kind == "prefix")
    draft = config.initial_draft(model, batch, at(batch))
    shown = config.replaced(batch, at(batch))
    truth = batch.tokens.view(-1, 4)
    assert torch.equal(draft.ids, torch.where(shown, truth, BLANK)) and torch.equal(draft.prob, shown.float())
    assert not draft.given.any(), "later passes may overwrite what was shown"


def test_validation_has_a_loss_for_every_pass(model: Transformer, batch: Batch, settings: SelfRefine) -> None:
    with torch.no_grad():
        numbers = settings.validate(Parts(model), batch, at(batch))
        blank = SelfRefine(replacement_start=0, replacement_end=0).loss(Parts(model), batch, at(batch, passes=2))
    assert {f"pass{n}" for n in (1, 2, 3, 4)} <= numbers.keys()
    torch.testing.assert_close(numbers["pass2"], blank)
    torch.testing.assert_close(numbers["loss"], numbers["pass3"])


def test_sampled_drafts_follow_the_marginals_and_change_from_pass_to_pass(model: Transformer) -> None:
    batch = packed_batch([[64]] * 200)
    batch = batch._replace(tokens=batch.tokens[:1].expand_as(batch.tokens).contiguous())  # the same row, 200 times
    config = SelfRefine(block_size=4, drafts="sampled")
    with torch.no_grad():
        clean = clean_half(model, batch, PAPER)
        blank = config.blank_draft(model, batch)
        logits = config.pass_logits(model, clean, blank)
        draft = config.training_pass(model, clean, blank, at(batch))
        again, later = (sampled(logits, state, at(batch)) for state in (blank, blank._replace(passes=blank.passes + 1)))
        other = sampled(logits, blank, at(batch, step=1))
        greedy = config.refine(model, clean, blank)[1]
    share = logits.all()[0].detach().softmax(-1)
    ids, prob = draft.ids.view_as(batch.tokens), draft.prob.view_as(batch.tokens)
    torch.testing.assert_close(prob, share.expand(200, -1, -1).gather(-1, ids[..., None])[..., 0])
    often = torch.nn.functional.one_hot(ids, share.shape[-1]).float().mean(0)
    assert float((often - share).abs().max()) < 0.15 and float((often - share).abs().mean()) < 0.02
    assert torch.equal(again.ids, draft.ids), "noise belongs to a place"
    assert not torch.equal(later.ids, draft.ids) and not torch.equal(other.ids, draft.ids)
    assert torch.equal(greedy.ids.view_as(ids), share.argmax(-1).expand_as(ids)), "as decoding refines it"


def test_sampled_drafts_reach_the_loss_of_later_passes_only(model: Transformer, batch: Batch) -> None:
    greedy, drawn = SelfRefine(block_size=4), SelfRefine(block_size=4, drafts="sampled")
    with torch.no_grad():
        one, two = (
            [float(config.loss(Parts(model), batch, at(batch, passes=t))) for config in (greedy, drawn)] for t in (1, 2)
        )
    assert one[0] == one[1] and two[0] != two[1]
