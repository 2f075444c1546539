"""The config: what is legal, what the errors say, and that a stored config is the config."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freda.errors import FredaError
from freda.model.config import ModelConfig
from freda.train import config as configs
from freda.train.config import RunConfig


def load(text: str, tmp_path: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return configs.load(file, overrides)


def test_file_and_overrides(tmp_path: Path) -> None:
    text = "[train]\nlr = 1e-4\nsteps = 7\n[method]\nname = 'block-diffusion'\n"
    config = load(text, tmp_path, "train.lr=3e-4", "data.path=runs/some where", "model.tied=false", "train.clip=2")
    assert (config.train.lr, config.train.steps, config.method.name) == (3e-4, 7, "block-diffusion")
    assert config.data.path == "runs/some where" and config.model.tied is False
    assert config.train.clip == 2.0 and isinstance(config.train.clip, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlrr = 1", r"unknown key 'train.lrr'; did you mean 'train.lr'"),
        ("[train]\nwarmup = 1", r"unknown key 'train.warmup'; did you mean 'train.warmup_steps'"),
        ("[trian]\nlr = 1", r"unknown section 'trian'; did you mean 'train'"),
        ("[train]\nlr = 'fast'", r"train.lr is 'fast' \(str\); it must be a number"),
        ("[train]\nsteps = 1.5", r"train.steps is 1.5 \(float\); it must be a whole number"),
        ("[train]\nsteps = true", r"train.steps is True \(bool\); it must be a whole number"),
        ("[model]\ntied = 1", r"model.tied is 1 \(int\); it must be true or false"),
        (
            "[method]\nname = 'dream'",
            r"method.name is 'dream'; use one of autoregressive, block-diffusion, self-refine",
        ),
        ("train = 3", r"train is 3; it is a section"),
        ("[train]\nlr = 1e-4\nlr = 2", r"not valid TOML"),
        ("[data]\nseq_len = 1000\n[method]\nblock_size = 24", r"block_size 24 does not divide data.seq_len 1000; use"),
        ("[train]\nbatch_rows = 10\ngroup_rows = 4", r"group_rows 4 does not divide train.batch_rows 10"),
        ("[model]\nheads = 6\nkv_heads = 4", r"kv_heads 4 does not divide model.heads 6"),
        ("[model]\nqkv_bias = true", r"both true"),
        ("[train]\nlr = 0.0", r"train.lr is 0.0; use a positive number"),
        ("[train]\nclip = 0.0", r"train.clip is 0.0; use a positive number"),
        ("[train]\nbeta1 = 2.0", r"train.beta1 is 2.0; use 0 to below 1"),
        ("[train]\nsave_every = -1", r"train.save_every is -1; use 0 or more"),
        ("[model]\nrope_scaling = { factor = 8.0 }", r"rope_scaling has no low_freq_factor"),
        ("[method]\nreplacement_start = 1.5", r"replacement_start is 1.5; use 0 to 1"),
    ],
)
def test_errors_name_the_value_and_the_way_out(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FredaError, match=message):
        load(text, tmp_path)


@pytest.mark.parametrize("override", ["train.lr", "lr=3", "=", "train.=1"])
def test_malformed_overrides(override: str) -> None:
    with pytest.raises(FredaError, match=r"--set wants section.key=value"):
        configs.load(None, [override])


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FredaError, match="there is no config file"):
        configs.load(tmp_path / "none.toml")
    with pytest.raises(FredaError, match="is a folder"):
        configs.load(tmp_path)


@given(
    st.floats(1e-8, 1e3),
    st.integers(1, 10**9),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=30),
)
@settings(max_examples=40)
def test_a_stored_config_reads_back_to_the_same_value(lr: float, steps: int, path: str) -> None:
    values = {"train": {"lr": lr, "steps": steps}, "data": {"path": path}, "model": {"tied": False}}
    config = configs.from_dict(values)
    import tomllib

    assert configs.from_dict(tomllib.loads(configs.dump(config))) == config


def test_rope_scaling_survives_the_round_trip(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = RunConfig(model=ModelConfig(rope_scaling=scaling))
    assert load(configs.dump(config), tmp_path) == config
