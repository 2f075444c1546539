"""AdamW with bf16 copies of the weights: the kernel is the library's optimizer, and copies follow their weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freda.config import Config, CorpusConfig, DataConfig, ModelConfig, TrainConfig
from freda.data.prepare import prepare_corpus
from freda.model.transformer import Transformer
from freda.train import loop, setup
from freda.train.optim import adamw_rates, total_norm
from freda.train.parallel import Root
from tests.conftest import tiny_model

KERNEL = """
import torch
from freda.model.kernels import adamw
from freda.train.optim import adamw_rates

for size, scale in ((5, 1.0), (5000, 0.25)):
    weight = torch.nn.Parameter(torch.randn(size))
    ours, copy = weight.detach().clone(), torch.empty(size, dtype=torch.float16)
    moments = torch.zeros(size), torch.zeros(size)
    plain = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.3)
    for step in (1.0, 2.0, 3.0):
        gradient = torch.randn(size).half()
        weight.grad = gradient.float() * scale
        plain.step()
        adamw.update(ours, copy, gradient, moments, adamw_rates(plain.param_groups[0], step, scale))
    state = plain.state[weight]
    for one, other in ((ours, weight.detach()), (moments[0], state["exp_avg"]), (moments[1], state["exp_avg_sq"])):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(copy, ours.half())
    without = weight.detach().clone()
    adamw.update(without, None, gradient, moments, adamw_rates(plain.param_groups[0], 4.0, scale))
print("equal")
"""


def test_the_kernel_is_the_librarys_adamw() -> None:
    """In Triton's interpreter, where Triton is installed; on a GPU below."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr


def test_its_rates_are_those_of_the_paper() -> None:
    group = {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.2, "eps": 1e-8}
    scale, beta1, beta2, keep, step_size, root, eps = adamw_rates(group, 2.0, 0.5)
    assert (scale, beta1, beta2, eps) == (0.5, 0.5, 0.75, 1e-8)
    assert (keep, step_size) == pytest.approx((0.98, 0.1 / 0.75))
    assert root == pytest.approx((1 - 0.75**2) ** -0.5)


def test_norms_are_summed_in_fp32() -> None:
    gradients = [torch.full((1000,), 1.001, dtype=torch.bfloat16), torch.ones(3)]
    assert total_norm(gradients).item() == pytest.approx(1003**0.5, rel=1e-6)


def sum_of_weights(model: Transformer) -> torch.Tensor:
    assert model.norm.weight.dtype == torch.bfloat16
    return sum((weight.float().sum() for weight in model.parameters()), torch.zeros(()))


def test_copies_follow_their_weights() -> None:
    """Made once, made anew where a weight was written to, and only there; gradients add up in fp32."""
    model = tiny_model()
    root = Root(model)
    first = root.in_bfloat16(sum_of_weights)
    copies = root.copies
    copies[model.norm.weight].data.fill_(7)  # would be noticed if it were made anew
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    second = root.in_bfloat16(sum_of_weights)
    assert root.copies[model.norm.weight] is copies[model.norm.weight]
    assert copies[model.norm.weight].unique().tolist() == [7]
    assert torch.equal(copies[model.embed_tokens.weight], model.embed_tokens.weight.bfloat16())
    for loss in (first, second):
        loss.backward()  # type: ignore[no-untyped-call]
        root.widen_gradients()
    assert all(copy.grad is None for copy in copies.values())
    root.outdate_copies()  # for who writes to weights unseen
    root.in_bfloat16(sum_of_weights)
    assert torch.equal(copies[model.norm.weight], model.norm.weight.bfloat16())
    assert all(weight.grad is not None and weight.grad.unique().tolist() == [2] for weight in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses and weights as with the library's fused update of widened gradients."""
    prepare_corpus(CorpusConfig(problems=300, validation_problems=32), tmp_path / "data")
    config = Config(
        model=ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, head_dim=64, ffn_dim=128),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=192),
        train=TrainConfig(
            steps=8, batch_rows=4, group_rows=4, lr=3e-3, warmup_steps=2, dtype="bfloat16", compile="off"
        ),
    )
    found = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(setup.Run, "updates_copies", False)
        run = loop.setup(config)
        assert run.updates_copies == copies
        losses = [loop.take_step(run, step)["loss"] for step in range(8)]
        found.append((losses, [weight.detach().clone() for weight in run.model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=2e-3)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-2
