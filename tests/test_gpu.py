"""What only a GPU can show; run by hand with `pytest -m gpu`. No package beyond torch and the core is needed."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from freda.data.config import CorpusConfig
from freda.data.prepare import prepare_corpus
from freda.decode.generate import generate
from freda.decode.request import Request
from freda.folders.model_folder import About
from freda.methods import method_like
from freda.methods.best_of_n import BestOfN
from freda.methods.draft import likeliest
from freda.methods.method import Step
from freda.model import head
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.scorer import Scorer
from freda.train import checkpoint, loop
from freda.train.config import DataConfig, RunConfig, TrainConfig
from freda.train.optim import make_optimizer
from freda.train.parallel import shard
from freda.train.setup import compile_layers
from tests.helpers import EOS, packed_batch, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


ALL = ["autoregressive", "block-diffusion", "self-refine", "best-of-n"]
SHIFTED = ["block-diffusion:layout=shifted,ar_weight=0.5", "self-refine:layout=shifted,ar_weight=0.5,teacher=clean"]


def model_for(name: str, **shape: object) -> Parts:
    """A tiny model; for Best-of-N with a frozen backbone and a scorer that has a last layer of its own."""
    model = tiny_model(**shape)  # type: ignore[arg-type]
    if name.startswith("best-of-n"):
        scorer = Scorer(model.config, last_layer=True)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name_, weight in scorer.named_parameters():
                if weight.dim() > 1 or name_.endswith("bias"):
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        return Parts(model.requires_grad_(False), scorer)
    return Parts(model)


@pytest.mark.parametrize("name", [*ALL[:3], *SHIFTED])
def test_flex_equals_sdpa_with_gradients(name: str) -> None:
    """The fast attention against the dense one: loss and every gradient, over packed documents and padding."""
    batch = packed_batch([[64, 128, 32], [200, 16], [96]]).map(Tensor.cuda)
    step = Step(seed=1, step=0, row=torch.arange(3), progress=0.0, passes=2)
    found = {}
    for backend in ("sdpa", "flex"):
        parts = model_for(name, head_dim=32).cuda()
        parts.backbone.backend = backend  # type: ignore[assignment]
        loss = method_like(name).loss(parts, batch, step)
        loss.backward()  # type: ignore[no-untyped-call]
        found[backend] = (loss.item(), {n: w.grad for n, w in parts.named_parameters() if w.requires_grad})
    assert found["flex"][0] == pytest.approx(found["sdpa"][0], rel=1e-4)
    for key, gradient in found["sdpa"][1].items():
        error = (found["flex"][1][key] - gradient).norm() / gradient.norm()
        assert error < 2e-3, f"{key}: {error}"


def test_flex_equals_sdpa_for_packed_slots() -> None:
    """The same slots under both: drawn twice, a rounding error could make another draw of a negative."""
    batch, rule = packed_batch([[64, 128, 32], [200, 16], [96]]).map(Tensor.cuda), BestOfN()
    step = Step(seed=1, step=0, row=torch.arange(3), progress=0.0, passes=2)
    found = {}
    slots = None
    for backend in ("sdpa", "flex"):
        parts = model_for("best-of-n", head_dim=32).cuda()
        parts.backbone.backend = backend  # type: ignore[assignment]
        clean, logits = rule.proposal(parts, batch, 2)
        slots = slots or rule.sampled_slots(logits, batch, step)
        scores = rule.score_slots(parts, batch, clean, slots)[(batch.document >= 0)[:, ::4]]
        scores.square().sum().backward()  # type: ignore[no-untyped-call]
        gradients = {n: w.grad for n, w in parts.named_parameters() if w.requires_grad and w.grad is not None}
        found[backend] = (scores.detach(), gradients)
    torch.testing.assert_close(found["flex"][0], found["sdpa"][0], rtol=2e-3, atol=2e-3)
    assert found["flex"][1].keys() == found["sdpa"][1].keys()
    for key, gradient in found["sdpa"][1].items():
        error = (found["flex"][1][key] - gradient).norm() / gradient.norm()
        assert error < 5e-3, f"{key}: {error}"


@pytest.mark.parametrize("name", [*ALL, *(f"{name}:layout=shifted" for name in ALL[1:]), "verified"])
def test_generation_equals_the_cpu(name: str) -> None:
    parts = model_for(name)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, EOS, (n,), generator=generator).tolist() for n in (8, 5, 11, 3)]
    asked = [Request(prompt=p, max_new_tokens=20, threshold=0.3, temperature=t) for p in prompts for t in (0.0, 1.0)]
    texts = []
    for device in ("cpu", "cuda"):
        outputs = generate(parts.to(device), method_like(name), asked, stop_ids=[EOS])
        texts.append([(output.tokens, output.nfe) for output in outputs])
    assert texts[0] == texts[1]


def test_prefetched_batches_are_pinned_and_the_same(tmp_path: Path) -> None:
    prepare_corpus(CorpusConfig(problems=300, validation_problems=32), tmp_path / "data")
    run = loop.setup(
        RunConfig(
            model=ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn_dim=128),
            data=DataConfig(path=str(tmp_path / "data"), seq_len=192),
            train=TrainConfig(steps=20, batch_rows=8, group_rows=4, validation_rows=8, device="cuda"),
        )
    )
    with loop.prefetch(run, 2) as ahead:
        for step in range(2, 20):
            for batch, direct in zip(ahead.take(step), loop.read_batches(run, step), strict=True):
                assert all(part.is_pinned() for part in batch[:4])
                copied = loop.to_device(batch, run.device)
                assert all(torch.equal(one.cpu(), two) for one, two in zip(copied[:4], direct[:4], strict=True))


def test_training_in_bfloat16_with_flex(tmp_path: Path) -> None:
    prepare_corpus(CorpusConfig(problems=300, validation_problems=32), tmp_path / "data")
    base = RunConfig(
        model=ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn_dim=128),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=192),
        train=TrainConfig(steps=40, batch_rows=8, group_rows=4, lr=3e-3, warmup_steps=4, validation_rows=8),
    )
    losses = {}
    for attention, dtype in (("sdpa", "float32"), ("flex", "bfloat16")):
        config = replace(base, train=replace(base.train, attention=attention, dtype=dtype))  # type: ignore[arg-type]
        losses[attention] = loop.train(config, tmp_path / attention).validation["loss"]
    assert losses["flex"] == pytest.approx(losses["sdpa"], rel=0.05) and losses["flex"] < 4


def test_sharding_on_one_gpu_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of FSDP2 but its partners: gathering in bfloat16, flex masks through its hooks, sums in fp32, one rank."""
    prepare_corpus(CorpusConfig(problems=300, validation_problems=32), tmp_path / "data")
    train = TrainConfig(steps=6, batch_rows=8, group_rows=4, lr=3e-3, warmup_steps=2, validation_rows=6, device="cuda")
    config = RunConfig(
        model=ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn_dim=128),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=192),
        train=replace(train, dtype="bfloat16"),
    )
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29511")
    found = []
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    try:
        for sharded in (False, True):
            run = loop.setup(config)
            if sharded:
                shard(run.root, "bfloat16", run.device, run.ranks, reshard=True)
                run.optimizer = make_optimizer(run.parts, config.train, fused=True)
            steps = [loop.take_step(run, step) for step in range(6)]
            found.append([*(n["loss"] for n in steps), *(n["grad_norm"] for n in steps), loop.validate(run)["loss"]])
    finally:
        dist.destroy_process_group()
    assert found[1] == pytest.approx(found[0], rel=2e-2)
    assert found[1][:6] == pytest.approx(found[0][:6], rel=2e-3)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """100 M parameters: copying the state holds training up for less than writing it would."""
    prepare_corpus(CorpusConfig(problems=300, validation_problems=32), tmp_path / "data")
    run = loop.setup(
        RunConfig(
            model=ModelConfig(dim=1024, layers=8, heads=8, kv_heads=8, head_dim=128, ffn_dim=3072),
            data=DataConfig(path=str(tmp_path / "data"), seq_len=192),
            train=TrainConfig(steps=20, batch_rows=8, group_rows=8, device="cuda", dtype="bfloat16"),
        )
    )
    for step in range(3):
        loop.take_step(run, step)
    with checkpoint.Saver(tmp_path / "run", About(run.tokenizer, run.method, "test"), run.ranks, keep=1) as saver:
        begun = time.perf_counter()
        saver.start(run.parts, run.optimizer, 3, None)
        copied = time.perf_counter() - begun
        loop.take_step(run, 3)
        stepped = time.perf_counter() - begun - copied
        saver.wait()
        written = time.perf_counter() - begun
    print(f"copied in {copied:.2f} s, a step beside took {stepped:.2f} s, written after {written:.2f} s")
    assert copied + stepped < written


@pytest.mark.parametrize(
    ("rows", "columns", "vocabulary"), [(5, 64, 64), (33, 20_032, 20_001), (7, 104, 77), (2, 8192, 8192)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_kernel_equals_its_plain_twin(rows: int, columns: int, vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = (torch.randn(rows, columns, device="cuda", generator=generator) * 3).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,), device="cuda", generator=generator)
    weights = torch.rand(rows, device="cuda", generator=generator)
    expected = head.plain_loss_and_gradient(logits.clone(), labels, weights, vocabulary)
    found = head.loss_and_gradient(logits.clone(), labels, weights, vocabulary)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert not found[1][:, vocabulary:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_divergence_from_a_teacher_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, states, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((96, 64), (96, 64), (320, 64)))
    labels, taught = torch.randint(0, 300, (96,), generator=generator), torch.rand(96, generator=generator) < 0.7
    found = []
    for device in ("cpu", "cuda"):
        logits = head.Logits(*(part.to(device).requires_grad_(True) for part in (hidden, weight)), 300)
        others = (labels.to(device), taught.to(device), torch.ones(96, device=device))
        loss = logits.divergence(logits._replace(hidden=states.to(device)), 0.7, *others)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach().cpu(), logits.hidden.grad.cpu(), logits.weight.grad.cpu()])  # type: ignore[union-attr]
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * one.float().norm()


def test_loss_and_tokens_by_chunks_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(*s, device="cuda", generator=generator).bfloat16() for s in ((3, 64, 96), (320, 96)))
    labels, weights = torch.randint(0, 300, (3, 64), device="cuda"), torch.rand(3, 64, device="cuda")
    found = []
    for most in (320 * 50, 1 << 28):
        monkeypatch.setattr(head, "MOST_LOGITS", most)
        logits = head.Logits(hidden.clone().requires_grad_(True), weight.clone().requires_grad_(True), 300)
        loss = logits.cross_entropy(labels, weights)
        (loss / 7).backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), logits.hidden.grad, logits.weight.grad, *likeliest(logits, (48, 4))[:2]])
    plain = head.Logits(hidden.clone().requires_grad_(True), weight.clone().requires_grad_(True), 300)
    losses = torch.nn.functional.cross_entropy(plain.all().flatten(0, 1), labels.flatten(), reduction="none")
    ((losses * weights.flatten()).sum() / 7).backward()  # type: ignore[no-untyped-call]
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found[0][1], plain.hidden.grad, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found[0][2], plain.weight.grad, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["self-refine", "block-diffusion", "best-of-n", *SHIFTED])
def test_compiled_layers_equal_eager_ones(name: str) -> None:
    """Rows long enough for the one product of queries, keys and values, and for compiled masks; new masks each time."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for compiled in (True, False):
        parts = model_for(name, head_dim=32).cuda()
        parts.backbone.backend = "flex"
        if compiled:
            compile_layers(parts.backbone, 1.0)
        for seed, lengths in enumerate(([[1024, 1024], [2048]], [[512, 1536], [1024, 960]])):
            batch = packed_batch(lengths, seed).map(Tensor.cuda)
            step = Step(seed=1, step=seed, row=torch.arange(2), progress=0.0, passes=2)
            loss = method_like(name).loss(parts, batch, step)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.get_total_norm([w.grad for w in parts.parameters() if w.grad is not None])
            found[compiled] += [loss.item(), norm.item()]
    assert found[True] == pytest.approx(found[False], rel=2e-3)


def test_a_run_on_the_gpu_goes_on_where_it_was(tmp_path: Path) -> None:
    """The fused optimizer keeps its count of steps on the device; a resumed run must put it there."""
    prepare_corpus(CorpusConfig(problems=300, validation_problems=32), tmp_path / "data")
    config = RunConfig(
        model=ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn_dim=128),
        data=DataConfig(path=str(tmp_path / "data"), seq_len=192),
        train=TrainConfig(
            steps=6, batch_rows=4, group_rows=4, validation_rows=4, device="cuda", log_every=1, save_every=3, keep=9
        ),
    )
    loop.train(config, tmp_path / "whole")
    (tmp_path / "cut" / "checkpoints").mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "cut" / name)
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step-3", tmp_path / "cut" / "checkpoints" / "step-3")
    loop.train(loop.resume_run(tmp_path / "cut"), tmp_path / "cut", resume=True)
    losses = []
    for run in ("whole", "cut"):
        lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert all("matmul_share" in line and "memory_gb" in line for line in lines if "loss" in line)
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-3)
