"""Teacher-forced accuracy against generation."""

from __future__ import annotations

import pytest
import torch

from freda.data.tokenizer import train_tokenizer
from freda.decode.generate import Request, generate
from freda.eval.teacher_forcing import solution_batch, token_accuracy
from freda.folders.model_folder import LoadedModel
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import method, problems

TEST = problems("test", 12, steps=1, max_number=30, seed=0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    tokenizer = train_tokenizer([p.document for p in problems("train", 300, steps=1, max_number=30, seed=0)], 400)
    shape = ModelConfig(vocab_size=tokenizer.size, dim=32, layers=2, heads=2, kv_heads=2, head_dim=16, ffn_dim=48)
    model = Transformer(shape, tokenizer.blank_id)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return LoadedModel(Parts(model), tokenizer, method(), "test")


@pytest.mark.parametrize("name", ["autoregressive", "block-diffusion", "self-refine"])
@pytest.mark.parametrize("passes", [1, 3])
def test_token_accuracy_equals_generation_after_the_true_prefix(loaded: LoadedModel, name: str, passes: int) -> None:
    loaded = loaded._replace(method=method(name))
    right = total = 0
    for problem in TEST[:4]:
        text = [*loaded.tokenizer.encode(problem.document), loaded.tokenizer.eos_id]
        prompt = len(loaded.tokenizer.encode(problem.prompt))
        size = 1 if name == "autoregressive" else 4
        begin = prompt
        while begin < len(text):
            end = min(begin - begin % size + size, len(text))
            asked = [Request(prompt=text[:begin], max_new_tokens=end - begin, passes=passes, threshold=2.0)]
            made = generate(loaded.parts, method(name), asked, stop_ids=[])[0].tokens
            right += sum(a == b for a, b in zip(made, text[begin:end], strict=True))
            total += end - begin
            begin = end
    assert token_accuracy(loaded, TEST[:4], passes) == pytest.approx(right / total)


def test_solution_batch_gives_the_prompt_and_fills_the_last_block(loaded: LoadedModel) -> None:
    batch, given, _ = solution_batch(loaded, [(problem.prompt, problem.document) for problem in TEST])
    for row, problem in enumerate(TEST):
        real = batch.document[row] >= 0
        assert int(real.sum()) % 4 == 0
        text = [*loaded.tokenizer.encode(problem.document), loaded.tokenizer.eos_id]
        assert batch.tokens[row, : len(text)].tolist() == text
        assert int(given[row].sum()) == len(loaded.tokenizer.encode(problem.prompt))
        assert int(batch.fill[row].sum()) == int(real.sum()) - len(text) < 4
