"""A stand-in for the model that comes with the package."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from freda.config import MethodConfig, MiniConfig, ModelConfig
from freda.data import mini
from freda.data.shards import Manifest
from freda.data.tokenizer import train_tokenizer
from freda.model.transformer import Transformer
from freda.model.weights import save_model

EASY = MiniConfig(documents=200, validation_documents=10)


def write_stand_in(assets: Path) -> Path:
    """A model with random weights in the place of the packaged one, with the settings of its questions."""
    texts = [mini.item(kind, EASY, "train", number).document for kind in mini.KINDS for number in range(100)]
    tokenizer = train_tokenizer(texts, 700)
    shape = ModelConfig(vocab_size=tokenizer.size, dim=32, layers=1, heads=2, kv_heads=2, head_dim=16, ffn_dim=48)
    model = Transformer(shape, tokenizer.blank_id)
    model.init_weights(3)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(20)
    save_model(assets / "mini", model, tokenizer, MethodConfig(name="self-refine"), stage="test")
    (assets / "mini" / "data").mkdir()
    made = {"mini": {"generator": mini.VERSION, **dataclasses.asdict(EASY)}}
    Manifest(made, 16, tokenizer.eos_id, tokenizer.blank_id, tokenizer.fingerprint, {}).write(assets / "mini" / "data")
    return assets / "mini"
