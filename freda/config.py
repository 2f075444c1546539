"""Every knob of `freda`: frozen dataclasses, one per stage, read from TOML with `section.key=value` overrides.

A run is described by one `Config`. Functions get the section they need, never the whole. The resolved config is written
beside every run (`dump`), which is enough to repeat or resume it. How tables become dataclasses is in `sections`.

`docs/config.md` is made from the help texts here: `python -m freda.config > docs/config.md`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from freda.errors import require
from freda.sections import build, knob, read_tables, reference_lines, tables_as_toml, to_dict

LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SWEEP_PARTS = ("main", "passes", "pareto", "stability", "tau", "width")
FilesKind = Literal["jsonl", "parquet", "table", "text", "code", "huggingface", "datatrove"]
MadeKind = Literal["sums", "mini_math", "mini_code", "mini_logic"]  # by generators; there are no files
DocumentsKind = Literal[FilesKind, MadeKind]
MADE: tuple[MadeKind, ...] = get_args(MadeKind)
MethodName = Literal["autoregressive", "block-diffusion", "self-refine", "best-of-n"]


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """`[corpus]`: the embedded word problems that `freda prepare` writes as token shards."""

    problems: int = knob(20_000, "training problems to write")
    validation_problems: int = knob(512, "held-out problems in the validation shard")
    steps: int = knob(1, "arithmetic steps per problem")
    max_number: int = knob(99, "largest number in a problem, results included")
    max_change: int = knob(0, "largest number added or taken in a step; 0 sets no limit but max_number")
    carry: bool = knob(True, "false leaves out sums that carry or borrow: a small model learns them in seconds")
    varied: bool = knob(True, "several wordings of a solution; false: the question determines each of its tokens")
    vocab_size: int = knob(512, "most rows of the tokenizer's table, BLANK included")
    align: int = knob(8, "documents are filled with EOS to a multiple of this (a multiple of the block size)")
    seed: int = knob(0, "seed of the generator")

    def __post_init__(self) -> None:
        for name, least in {"problems": 1, "validation_problems": 0, "steps": 1, "max_number": 9, "align": 1}.items():
            require(getattr(self, name) >= least, f"corpus.{name} is {getattr(self, name)}; use {least} or more")
        require(
            self.max_change == 0 or self.max_change >= 2,
            f"corpus.max_change is {self.max_change}; use 2 or more, or 0 for no limit",
        )


@dataclass(frozen=True, kw_only=True)
class MiniConfig:
    """`[mini]`: the mini suite, as sources of the kinds mini_math, mini_code and mini_logic; see docs/mini.md."""

    documents: int = knob(4_000_000, "training documents of each kind that there are; prepare.tokens may take fewer")
    validation_documents: int = knob(2_000, "held-out documents of each kind in the validation shards")
    math_steps_from: int = knob(2, "fewest steps of a word problem")
    math_steps_to: int = knob(6, "most steps of a word problem")
    math_max_number: int = knob(9_999, "largest number in a word problem, results included")
    math_max_factor: int = knob(99, "largest factor or divisor; products of two such numbers are the hard steps")
    math_distractors: float = knob(0.3, "share of word problems with a sentence that does not matter")
    code_steps_from: int = knob(2, "fewest transformations in a function")
    code_steps_to: int = knob(5, "most transformations in a function")
    code_shown: float = knob(0.7, "share of functions one step of which is shown by an example instead of said")
    logic_hops_from: int = knob(1, "fewest hops of a deduction: facts or swaps that lead to the answer")
    logic_hops_to: int = knob(2, "most hops of a deduction; a walk has up to four moves for each")
    logic_conclusions: int = knob(6, "most conclusions in a training document; the first is what a test asks for")
    seed: int = knob(0, "seed of the generators; what is a test question does not depend on it")

    def __post_init__(self) -> None:
        counts = (("documents", 1, 10**9), ("validation_documents", 0, 10**9), ("logic_conclusions", 1, 24))
        numbers = (("math_max_number", 50, 10**6), ("math_max_factor", 2, 999))
        for name, least, most in (*counts, *numbers, ("math_distractors", 0, 1), ("code_shown", 0, 1)):
            value = getattr(self, name)
            require(least <= value <= most, f"mini.{name} is {value}; use {least} to {most}")
        for name, most in (("math_steps", 8), ("code_steps", 8), ("logic_hops", 6)):
            least, last = getattr(self, f"{name}_from"), getattr(self, f"{name}_to")
            told = f"mini.{name}_from is {least} and mini.{name}_to {last}"
            require(1 <= least <= last <= most, f"{told}; use 1 to {most}, in this order")


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig:
    """`[benchmark.NAME]`: where texts lie. Text of benchmarks is kept out of the training data."""

    kind: DocumentsKind = knob("jsonl", "how to read it; sums ([corpus]) and mini_* ([mini]) are made, not read")
    path: str = knob("", "file, folder or tar archive, from --data; huggingface: name; code: also stdlib, Python's own")
    files: str = knob("", "which files of a folder or an archive, for example *_train.tsv; empty takes all of the kind")
    field: str = knob("text", "where the text is: a field, or several as in '{question} {answer}'; a table's by number")
    config: str = knob("", "huggingface: configuration of the dataset")
    split: str = knob("train", "huggingface: split of the dataset")
    revision: str = knob("", "huggingface: commit or tag; empty takes the newest")

    def __post_init__(self) -> None:
        require(bool(self.path) or self.kind in MADE, "path is empty; name a file, a folder or a dataset")
        require(bool(self.field), "field is empty; name the field that holds the text")


@dataclass(frozen=True, kw_only=True)
class SourceConfig(DocumentsConfig):
    """`[source.NAME]`: one stream of documents; as many as you like."""

    share: float = knob(1.0, "part of prepare.tokens; shares are taken relative to their sum")
    epochs: int = knob(1, "how often the stream may be read when it runs dry; then the run stops")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.share > 0, f"share is {self.share}; use a positive number")
        require(self.epochs >= 1, f"epochs is {self.epochs}; use 1 or more")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """`[prepare]`: how the documents of all `[source.NAME]` become token shards."""

    tokenizer: str = knob("", "folder of a model or tokenizer; empty trains a new one on the documents")
    eos: str = knob("", "token that ends documents, for example <|endoftext|>; empty takes the tokenizer's own")
    vocab_size: int = knob(8192, "most ids of a new tokenizer, BLANK included")
    tokens: int = knob(0, "training tokens in all; 0 takes every document once, whatever the shares")
    parts: int = knob(8, "shard tasks per source: as many processes or machines can share the work")
    align: int = knob(8, "documents are filled with EOS to a multiple of this (a multiple of the block size)")
    validation_share: float = knob(0.005, "share of documents held out for validation")
    longest: int = knob(10_000_000, "longest document in characters; longer ones are dropped and counted")
    broken_share: float = knob(0.05, "stop when more than this share of a part cannot be read")
    seed: int = knob(42, "seed of the order of files and of what is held out")

    def __post_init__(self) -> None:
        for name in ("parts", "align", "longest"):
            require(getattr(self, name) >= 1, f"prepare.{name} is {getattr(self, name)}; use 1 or more")
        require(self.tokens >= 0, f"prepare.tokens is {self.tokens}; use 0 (all) or more")
        for name in ("validation_share", "broken_share"):
            require(0 <= getattr(self, name) < 1, f"prepare.{name} is {getattr(self, name)}; use 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class DecontaminateConfig:
    """`[decontaminate]`: when a document holds text of a `[benchmark.NAME]` and is dropped."""

    ngram: int = knob(13, "words in a row that give a document away")
    shortest: int = knob(8, "benchmark texts of fewer words than ngram, but as many as this, count as a whole")
    threshold: float = knob(0.0, "share of one benchmark text's n-grams that a document must hold; 0: any single one")

    def __post_init__(self) -> None:
        require(1 <= self.shortest <= self.ngram, f"decontaminate.shortest is {self.shortest}; use 1 to {self.ngram}")
        require(0 <= self.threshold <= 1, f"decontaminate.threshold is {self.threshold}; use 0 to 1")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`[model]`: the shape of a Transformer trained from scratch. With `train.init` the checkpoint's shape is used."""

    vocab_size: int = knob(0, "rows of the embedding table; 0 takes the tokenizer's")
    dim: int = knob(128, "width of the residual stream")
    layers: int = knob(4, "number of transformer layers")
    heads: int = knob(4, "query heads")
    kv_heads: int = knob(4, "key and value heads (grouped-query attention when fewer than heads)")
    head_dim: int = knob(32, "width of one head")
    ffn_dim: int = knob(384, "inner width of the feed-forward")
    max_positions: int = knob(4096, "longest document the model is meant for")
    rope_theta: float = knob(10_000.0, "base of the rotary frequencies")
    rope_scaling: Mapping[str, Any] | None = knob(None, "Llama-3 frequency scaling, as in the checkpoint's config")
    norm_eps: float = knob(1e-6, "epsilon of RMSNorm")
    qk_norm: bool = knob(True, "RMSNorm on queries and keys (Qwen3)")
    qkv_bias: bool = knob(False, "bias on the query, key and value projections (Qwen2.5)")
    tied: bool = knob(True, "head and embedding share one matrix")

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim"):
            require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}; use 1 or more")
        require(
            self.heads % self.kv_heads == 0,
            f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}",
        )
        require(
            not (self.qk_norm and self.qkv_bias),
            "model.qk_norm and model.qkv_bias are both true; Qwen3 has the norm, Qwen2.5 the bias, no family has both",
        )
        missing = [key for key in LLAMA3_SCALING if self.rope_scaling is not None and key not in self.rope_scaling]
        require(not missing, f"model.rope_scaling has no {', '.join(missing)}; only the scaling of Llama 3 is known")
        require(self.head_dim % 2 == 0, f"model.head_dim is {self.head_dim}; rotary embedding needs an even number")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`[data]`: the token shards a run reads, and how documents become rows."""

    path: str = knob("", "folder of token shards made by `freda prepare`")
    seq_len: int = knob(128, "tokens per row")
    first_row: int = knob(0, "row to begin with, in the order of the seed: a second stage goes on behind the first")

    def __post_init__(self) -> None:
        require(self.seq_len >= 1, f"data.seq_len is {self.seq_len}; use 1 or more")
        require(self.first_row >= 0, f"data.first_row is {self.first_row}; use 0 or more")


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """`[method]`: what is trained. Everything decoding must repeat is stored in the model folder."""

    name: MethodName = knob("self-refine", "autoregressive, block-diffusion, self-refine or best-of-n")
    block_size: int = knob(4, "tokens per block, B")
    passes: int = knob(3, "self-refine, best-of-n: most passes in training, K; a step runs t ~ Unif{1..K}")
    feedback: Literal["soft", "hard"] = knob("soft", "self-refine, best-of-n: what the next pass sees of a prediction")
    rescale: bool = knob(False, "self-refine, best-of-n: rescale the soft embedding to its expected norm (DMax)")
    committed_hard: bool = knob(False, "self-refine: show committed positions as hard tokens")
    drafts: Literal["greedy", "sampled"] = knob("greedy", "self-refine: tokens of drafts that training passes leave")
    replacement: Literal["iid", "prefix"] = knob("iid", "self-refine: which blanks show the truth in the first draft")
    replacement_start: float = knob(0.3, "self-refine: share of blanks that show the truth at the start")
    replacement_end: float = knob(0.1, "self-refine: the same share from half of the run on")
    negatives: Literal["sampled", "beam"] = knob("sampled", "best-of-n: what the scorer learns to tell from the truth")
    num_negatives: int = knob(4, "best-of-n: negatives per block")
    scorer_layer: bool = knob(False, "best-of-n: the scorer trains a copy of the backbone's last layer, kept with it")
    noise_min: float = knob(1e-3, "block-diffusion: least noise level t of a block")
    noise_max: float = knob(1.0, "block-diffusion: greatest noise level t of a block")

    def __post_init__(self) -> None:
        require(self.block_size >= 1, f"method.block_size is {self.block_size}; use 1 or more")
        require(self.passes >= 1, f"method.passes is {self.passes}; use 1 or more")
        require(self.num_negatives >= 1, f"method.num_negatives is {self.num_negatives}; use 1 or more")
        require(
            not (self.name == "best-of-n" and self.committed_hard),
            "method.committed_hard is true; best-of-n shows every candidate by its probability: leave it false",
        )
        for name in ("replacement_start", "replacement_end"):
            require(0 <= getattr(self, name) <= 1, f"method.{name} is {getattr(self, name)}; use 0 to 1")
        require(
            0 < self.noise_min <= self.noise_max <= 1,
            f"method.noise_min {self.noise_min} and noise_max {self.noise_max} must satisfy 0 < min <= max <= 1",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`[train]`: the loop and its optimizer."""

    init: str = knob("", "model folder to start from; empty trains from scratch with [model]")
    steps: int = knob(1000, "optimizer steps")
    batch_rows: int = knob(32, "rows per optimizer step")
    group_rows: int = knob(16, "rows per forward; the rows of one group share the number of passes")
    lr: float = knob(5e-5, "peak learning rate")
    backbone_lr_scale: float = knob(1.0, "factor on lr for everything but a scorer")
    warmup_steps: int = knob(250, "linear warm-up")
    schedule: Literal["constant", "cosine"] = knob("constant", "learning rate after the warm-up")
    weight_decay: float = knob(0.01, "AdamW decay of matrices; norms and biases are left alone")
    beta1: float = knob(0.9, "AdamW")
    beta2: float = knob(0.999, "AdamW")
    clip: float = knob(1.0, "largest gradient norm")
    seed: int = knob(42, "seed of initial weights, row order and all noise")
    validate_every: int = knob(0, "steps between validations; 0 validates at the end only")
    validation_rows: int = knob(64, "rows of the validation shard that are used")
    save_every: int = knob(0, "steps between checkpoints; 0 saves at the end only")
    keep: int = knob(2, "newest checkpoints kept; the one of the lowest validation loss is kept too")
    log_every: int = knob(10, "steps between lines of metrics.jsonl")
    tensorboard: bool = knob(False, "write the metrics for TensorBoard too, into the run folder")
    wandb: str = knob("", "project of Weights & Biases to send the metrics to; empty sends nothing")
    device: str = knob("auto", "auto, cpu or cuda")
    dtype: Literal["float32", "bfloat16"] = knob("float32", "compute precision; master weights are always float32")
    attention: Literal["auto", "sdpa", "flex", "staircase"] = knob("auto", "auto is staircase on CUDA, sdpa elsewhere")
    compile: Literal["auto", "on", "off"] = knob("auto", "compile the layers; auto does on CUDA")
    activations: float = knob(1.0, "compiled layers: share of activations kept for backward; the rest is recomputed")
    reshard: bool = knob(True, "several processes: free a layer's weights after each forward; false gathers less often")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_rows", "group_rows", "keep", "log_every", "validation_rows"):
            require(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}; use 1 or more")
        require(
            self.batch_rows % self.group_rows == 0,
            f"train.group_rows {self.group_rows} does not divide train.batch_rows {self.batch_rows}",
        )
        for name in ("lr", "clip", "backbone_lr_scale"):
            require(getattr(self, name) > 0, f"train.{name} is {getattr(self, name)}; use a positive number")
        for name in ("warmup_steps", "validate_every", "save_every", "weight_decay"):
            require(getattr(self, name) >= 0, f"train.{name} is {getattr(self, name)}; use 0 or more")
        require(0 <= self.activations <= 1, f"train.activations is {self.activations}; use 0 to 1")
        require(
            self.activations == 1 or self.compile != "off",
            f"train.activations is {self.activations}, but only compiled layers recompute; leave train.compile on",
        )
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"train.{name} is {getattr(self, name)}; use 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How one text is continued; not a section of a run's config, but the options of `freda generate`."""

    max_new_tokens: int = knob(128, "most tokens to make")
    passes: int = knob(4, "most passes per block, K")
    threshold: float = knob(0.9, "probability η from which a token is committed; above 1 never")
    temperature: float = knob(0.0, "0 takes the most probable token")
    top_p: float = knob(1.0, "sample from the smallest set of tokens with this probability")
    seed: int = knob(0, "seed of the sampling")
    width: int = knob(4, "best-of-n: most candidates per pass, N")
    tau: float = knob(0.1, "best-of-n: weight of the scorer, τ")
    swaps: int = knob(2, "best-of-n: most positions a candidate changes, R")
    candidates: Literal["beam", "sampled"] = knob("beam", "best-of-n: cheapest changes to the draft, or random draws")
    select: Literal["argmax", "gumbel"] = knob("argmax", "best-of-n: take the best beam candidate, or choose by chance")

    def __post_init__(self) -> None:
        require(1 <= self.width <= 256, f"width is {self.width}; use 1 to 256")
        require(0 <= self.tau <= 1e6, f"tau is {self.tau}; use 0 to 1e6")
        require(self.swaps >= 0, f"swaps is {self.swaps}; use 0 or more")
        require(self.candidates in ("beam", "sampled"), f"candidates is {self.candidates!r}; use beam or sampled")
        require(self.select in ("argmax", "gumbel"), f"select is {self.select!r}; use argmax or gumbel")
        require(1 <= self.max_new_tokens <= 2**20, f"max_new_tokens is {self.max_new_tokens}; use 1 to {2**20}")
        require(self.passes >= 1, f"passes is {self.passes}; use 1 or more")
        require(
            0 < self.threshold < math.inf,
            f"threshold is {self.threshold}; use a probability above 0, or a number above 1 for never",
        )
        require(self.temperature >= 0, f"temperature is {self.temperature}; use 0 (greedy) or more")
        require(0 < self.top_p <= 1, f"top_p is {self.top_p}; use a share above 0, at most 1")
        require(abs(self.seed) < 2**63, f"seed is {self.seed}; use a number of at most 63 bits")


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """`[system.NAME]`: one system of a sweep, a row of its tables and a curve of its figures."""

    models: tuple[str, ...] = knob((), "model or run folders: one, or several trained with different seeds")
    data: str = knob("", "folder of benchmark files for this system alone; empty takes --data")
    baseline: bool = knob(False, "the system that others are compared with; at most one")
    passes: int = knob(4, "most passes per block in the main table, K")
    threshold: float = knob(0.9, "commitment threshold in the main table, η")
    width: int = knob(4, "best-of-n: candidates, N")
    tau: float = knob(0.1, "best-of-n: weight of the scorer, τ")

    def __post_init__(self) -> None:
        require(bool(self.models), "models is empty; name one model or run folder, or several")
        self.decoding(0)

    def decoding(self, max_new_tokens: int, **changed: Any) -> DecodeConfig:
        """How its answers are made; 0 tokens takes the default."""
        names = ("passes", "threshold", "width", "tau")
        limit = {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
        return DecodeConfig(**{**{name: getattr(self, name) for name in names}, **limit, **changed})


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """`[sweep]`: what `freda sweep` measures with every `[system.NAME]`, and draws."""

    parts: tuple[str, ...] = knob(SWEEP_PARTS, "tables and figures to make, by name")
    tasks: tuple[str, ...] = knob(("gsm8k", "math500", "humaneval", "humaneval_plus"), "benchmarks, see freda eval")
    limit: int = knob(0, "only the first questions of each; 0 asks all")
    passes: tuple[int, ...] = knob((1, 2, 3, 4, 5, 6), "passes, pareto: numbers of passes")
    early_stop_passes: int = knob(3, "passes: most passes with the threshold on; with more, every block gets them all")
    thresholds: tuple[float, ...] = knob((0.5, 0.7, 0.8, 0.9, 0.95, 0.99), "pareto: commitment thresholds")
    taus: tuple[float, ...] = knob((0.0, 0.1, 0.3, 1.0), "tau: weights of the scorer")
    widths: tuple[int, ...] = knob((2, 4), "width: numbers of candidates")
    width_passes: tuple[int, ...] = knob((2, 4), "width: numbers of passes")
    stability_examples: int = knob(200, "stability: questions of each task whose published answers are refined")
    max_new_tokens: int = knob(1024, "most tokens of an answer; a task may set less")
    batch_size: int = knob(64, "questions answered side by side")

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in SWEEP_PARTS]
        require(not unknown, f"sweep.parts has {', '.join(unknown)}; use {', '.join(SWEEP_PARTS)}")
        for name in ("parts", "tasks", "passes", "thresholds", "taus", "widths", "width_passes"):
            require(bool(getattr(self, name)), f"sweep.{name} is empty; name one or more")
        for name in ("stability_examples", "batch_size", "max_new_tokens"):
            require(getattr(self, name) >= 1, f"sweep.{name} is {getattr(self, name)}; use 1 or more")
        for count in (*self.passes, *self.width_passes):
            DecodeConfig(passes=count)  # a value that cannot be is told now, not after hours of work
        for width in self.widths:
            DecodeConfig(width=width)
        for threshold in self.thresholds:
            DecodeConfig(threshold=threshold)
        for tau in self.taus:
            DecodeConfig(tau=tau)
        for name in ("limit", "early_stop_passes"):
            require(getattr(self, name) >= 0, f"sweep.{name} is {getattr(self, name)}; use 0 or more")


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """One sweep: what is measured, and of what."""

    sweep: SweepConfig = SweepConfig()
    system: Mapping[str, SystemConfig] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.system), "the sweep has no [system.NAME]; name at least one, with its models")
        marked = [name for name, system in self.system.items() if system.baseline]
        require(len(marked) <= 1, f"{' and '.join(marked)} are both a baseline; mark one")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, resolved."""

    corpus: CorpusConfig = CorpusConfig()
    mini: MiniConfig = MiniConfig()
    prepare: PrepareConfig = PrepareConfig()
    source: Mapping[str, SourceConfig] = dataclasses.field(default_factory=dict)
    benchmark: Mapping[str, DocumentsConfig] = dataclasses.field(default_factory=dict)
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self) -> None:
        block, row = self.method.block_size, self.data.seq_len
        legal = ", ".join(str(n) for n in range(2, 65) if row % n == 0) or "1"
        require(row % block == 0, f"method.block_size {block} does not divide data.seq_len {row}; use one of {legal}")


# -- reading and writing ---------------------------------------------------------------------------------------------


def load(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """The config in a TOML file (or the defaults) with `section.key=value` overrides applied, in order."""
    return from_dict(read_tables(path, overrides))


def load_sweep(path: Path, overrides: Iterable[str] = ()) -> SweepFile:
    """The sweep in a TOML file, likewise."""
    sweep: SweepFile = build(SweepFile, read_tables(path, overrides), "")
    return sweep


def from_dict(values: Mapping[str, Any]) -> Config:
    """A `Config` from nested dictionaries; unknown keys and wrong types are errors."""
    config: Config = build(Config, values, "")
    return config


def dump(config: Config) -> str:
    """The config as TOML; `load` reads it back to the same value."""
    return tables_as_toml(to_dict(config))


def reference() -> str:
    """The page `docs/config.md`."""
    lines = [
        "# Config reference",
        "",
        "Made by `python -m freda.config > docs/config.md`; do not edit by hand. A run is one TOML file with these",
        "sections, a sweep one with `[sweep]` and `[system.NAME]`; `--set section.key=value` overrides a value on the",
        "command line.",
    ]
    return "\n".join([*lines, *reference_lines(Config), *reference_lines(SweepFile)])


if __name__ == "__main__":
    print(reference())
