"""A stand-in for the model that comes with the package."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from freda.data import mini
from freda.data.config import MiniConfig
from freda.data.shards import Manifest
from freda.folders.model_folder import save_model
from tests.conftest import answering_model

EASY = MiniConfig(documents=200, validation_documents=10)


def write_stand_in(assets: Path) -> Path:
    """A model with random weights in the place of the packaged one, with the settings of its questions."""
    texts = [mini.item(kind, EASY, "train", number).document for kind in mini.KINDS for number in range(100)]
    made_up = answering_model(texts, 700, seed=3)
    tokenizer = made_up.tokenizer
    save_model(assets / "mini", made_up.model, tokenizer, made_up.method, stage="test")
    (assets / "mini" / "data").mkdir()
    made = {"mini": {"generator": mini.VERSION, **dataclasses.asdict(EASY)}}
    Manifest(made, 16, tokenizer.eos_id, tokenizer.blank_id, tokenizer.fingerprint, {}).write(assets / "mini" / "data")
    return assets / "mini"
