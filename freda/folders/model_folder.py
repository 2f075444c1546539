"""Model folders: Hugging Face files with a `freda` section, read and written without pickle and without remote code.

    config.json         the shape, as `transformers` reads it, and what decoding must repeat of the training (`freda`)
    model.safetensors   the backbone's weights under their Hugging Face names
    scorer.safetensors  the Best-of-N scorer, where there is one
    tokenizer files     see `freda.data.tokenizer`

A folder is written beside its place and renamed, so whatever stands under its name is whole. Loading checks everything
that could make a model silently wrong: every tensor must be there in its shape, and the tokenizer must be the one the
weights were trained with.

A model bundled with the package is a folder in `freda/assets`. Its name stands for it wherever a model folder can be
named: `freda generate mini`, `freda.load("mini")`, `train.init = "mini"`. A model or run folder of that name in the
current folder takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from freda.data.tokenizer import Tokenizer
from freda.errors import FredaError, require
from freda.files import located, read_json, read_text, write_json
from freda.folders.hugging_face import check_tensors, dtype_name, hugging_face_config, hugging_face_name, model_config
from freda.folders.tensors import fill_parts, read_safetensors, save_tensors, weight_files
from freda.methods import METHODS
from freda.methods.method import Method
from freda.model.adapter import BLANK
from freda.model.config import AdapterConfig, ModelConfig
from freda.model.parts import ADAPTER, BACKBONE, Part, Parts
from freda.model.scorer import Scorer
from freda.model.transformer import Transformer, rotary_frequencies

SCORER_FILE, ADAPTER_FILE, ADAPTER_CONFIG = "scorer.safetensors", "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model.model."  # of an adapter's weights: PEFT's wrappers around the model of transformers
PEFT_BLANK = "embed_tokens.token_adapter.trainable_tokens_delta"
ASSETS = Path(__file__).parent.parent / "assets"
MARKS = ("config.json", "latest", "checkpoints")  # what a model folder or a run folder has
M = TypeVar("M", Transformer, Scorer)


class Over(NamedTuple):
    """An adapter, and the base that it is trained over."""

    adapter: AdapterConfig
    base: Path
    fingerprint: str  # of the base's weights


class About(NamedTuple):
    """What a model folder says beside its weights, or an adapter's folder."""

    tokenizer: Tokenizer
    method: Method
    stage: str  # "base" for a converted checkpoint, else what trained it
    over: Over | None = None


class LoadedModel(NamedTuple):
    """A model folder in memory."""

    parts: Parts
    tokenizer: Tokenizer
    method: Method
    stage: str

    @property
    def backbone(self) -> Transformer:
        """The Transformer."""
        return self.parts.backbone

    @property
    def scorer(self) -> Scorer | None:
        """The Best-of-N scorer, where there is one."""
        return self.parts.scorer


# -- names -------------------------------------------------------------------------------------------------------------


def packaged() -> list[str]:
    """Names of the bundled models; an install may have none."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def packaged_folder(path: Path) -> Path | None:
    """The folder of the bundled model that `path` names; None if it names a folder of the user's."""
    own = any((path / mark).exists() for mark in MARKS)
    return ASSETS / path.name if not own and str(path) in packaged() else None


def model_path(path: Path) -> Path:
    """`path`, or the folder of the bundled model of that name."""
    return packaged_folder(path) or path


def resolve_model_folder(path: Path) -> Path:
    """The model folder that `path` means: itself, the newest checkpoint of a run folder, or a bundled model's."""
    path = model_path(path)
    if not path.exists():
        raise missing_model(path)
    if path.is_file():
        advice = f"run: freda convert {path} TARGET" if path.suffix == ".gguf" else "name a model folder"
        raise FredaError(f"{path} is a file, not a model folder; {advice}")
    folder = newest_checkpoint(path) or path
    adapter = (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()
    require(not adapter, f"{path} is an adapter, not a model; name its base, and the adapter with --adapter {path}")
    if folder != path or (path / "config.json").is_file():
        return folder
    file = min(path.glob("*.gguf"), default=None)
    advice = "" if file is None else f"; convert its GGUF file: freda convert {file} TARGET"
    raise FredaError(f"{path} is not a model folder: it has no config.json{advice}")


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run folder; None if it is a folder of another kind."""
    if (run / "config.json").is_file():
        return None
    if (run / "latest").is_file():
        name = read_text(run / "latest").strip()
        folder = run / "checkpoints" / name
        missing = f"{run / 'latest'} names the checkpoint {name!r}, but there is no folder {folder}"
        require(bool(name) and folder.is_dir(), missing)
        return folder
    unfinished = f"the run {run} has no finished checkpoint yet; let it train until it saves one"
    require(not (run / "checkpoints").is_dir(), unfinished)
    return None


def missing_model(path: Path) -> FredaError:
    """The error for a model that is not on this machine; a name like `Qwen/Qwen3-0.6B` gets the download commands."""
    bundled = ", ".join(packaged()) or "none in this install"
    problem = f"there is no model {path}; name a model folder, a run folder or a bundled model ({bundled})"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or path.parent.is_dir():
        return FredaError(problem)
    local = Path("models") / path.name.lower()
    commands = f"hf download {path} --local-dir {local}, then: freda convert {local} {local}-freda"
    return FredaError(f"{problem}; for the model of that name on the Hugging Face Hub run: {commands}")


# -- reading ---------------------------------------------------------------------------------------------------------


def load_model(path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The model in a model or run folder, every tensor read from it: nothing is left at a random value. On the device
    `meta` it has all but values: everything is checked, and `fill_part` reads what a process holds."""
    folder = resolve_model_folder(path)
    with located(folder):
        values = read_json(folder / "config.json")
        section: Any = values.get("freda")
        require(isinstance(section, dict), f"a plain Hugging Face checkpoint; run: freda convert {folder} TARGET")
        config, method = model_config(values), method_of(section)
    tokenizer = Tokenizer.load(folder)
    with located(folder):
        _check_tokenizer(tokenizer, section, config)
        tensors = read_safetensors(weight_files(folder), device, dtype)
        check_tensors(tensors, config)
        with torch.device("meta"):
            backbone = Transformer(config, tokenizer.blank_id)
        filled(backbone, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
        path = folder / SCORER_FILE
        scorer = _load_scorer(path, config, device, dtype) if path.is_file() else None
    return LoadedModel(Parts(backbone, scorer), tokenizer, method, str(section["stage"]))


def fill_part(folder: Path, part: str, weights: Mapping[str, Part]) -> None:
    """Read rows of the weights of one part of a model that `load_model` has found in `folder`, by their names in it."""
    with located(folder):
        files = weight_files(folder) if part == BACKBONE else [folder / part_file(part)]
        fill_parts(files, {name_in_file(part, name): rows for name, rows in weights.items()})


def name_in_file(part: str, name: str) -> str:
    """A weight's name in the file of its part: that of Hugging Face, or of PEFT."""
    if part == ADAPTER:
        return PEFT_PREFIX + (PEFT_BLANK if name == BLANK else name)
    return hugging_face_name(name) if part == BACKBONE else name


def part_file(part: str) -> str:
    """The file of a part; a backbone may be cut into several."""
    return {BACKBONE: "model.safetensors", ADAPTER: ADAPTER_FILE}.get(part, f"{part}.safetensors")


def filled(module: M, tensors: Mapping[str, Tensor]) -> M:
    """A module built without storage, because random weights take a while, that holds `tensors` themselves."""
    module.load_state_dict(tensors, assign=True)
    device = next(iter(tensors.values())).device
    module.inv_freq = rotary_frequencies(module.config).to(device)  # a buffer that is never stored
    return module


def _load_scorer(path: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Scorer:
    """The Best-of-N scorer beside a backbone, checked against its width."""
    tensors = read_safetensors([path], device, dtype)
    with torch.device("meta"):
        scorer = Scorer(config, last_layer=any(name.startswith("last_layer.") for name in tensors))
    expected = scorer.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        wanted, seen = (tuple(state[name].shape) if name in state else "none" for state in (expected, tensors))
        problem = f"{path.name} does not belong to the model: {name} has shape {seen}, the model needs {wanted}"
        require(wanted == seen, f"{problem}; train the scorer again")
    return filled(scorer, tensors)


def method_of(section: Mapping[str, Any]) -> Method:
    """The method that the `freda` section names, with the settings stored there."""
    missing = {"blank_token_id", "method", "stage"} - section.keys()
    require(not missing, f"the freda section of config.json has no {', '.join(sorted(missing))}; write the model again")
    name = section["method"]
    require(name in list(METHODS), f"config.json names the method {name!r}; this version has {', '.join(METHODS)}")
    return METHODS[name].restored(section)


def _check_tokenizer(tokenizer: Tokenizer, section: Mapping[str, Any], config: ModelConfig) -> None:
    """The tokenizer must be the one that the weights were trained with."""
    trained, hint = section.get("tokenizer"), "put back the tokenizer files of this model"
    wrong = ""
    if tokenizer.blank_id != section["blank_token_id"]:
        wrong = f"its BLANK is {tokenizer.blank_id}, config.json says {section['blank_token_id']}"
    elif tokenizer.size > config.vocab_size:
        wrong = f"it has {tokenizer.size} ids, the embedding table {config.vocab_size} rows"
    elif tokenizer.fingerprint != trained:
        wrong = f"it is {tokenizer.fingerprint[:8]}, they were trained with {str(trained)[:8]}"
    require(not wrong, f"the tokenizer does not belong to the weights: {wrong}; {hint}")


# -- writing ---------------------------------------------------------------------------------------------------------


def write_files(
    folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor], about: About, *, file: str = "model.safetensors"
) -> None:
    """config.json, `file` (the backbone under its Hugging Face names, with the embedding) and the tokenizer's files."""
    tokenizer, method, stage, _ = about
    section = {"blank_token_id": tokenizer.blank_id, "tokenizer": tokenizer.fingerprint}
    section |= {"method": method.name, "stage": stage, **method.stored()}
    stops = {"bos_token_id": None, "eos_token_id": list(tokenizer.stop_ids)}
    values = {**hugging_face_config(config), "dtype": dtype_name(tensors), **stops, "freda": section}
    write_json(folder / "config.json", values)
    save_tensors(tensors, folder / file)
    tokenizer.save(folder)
