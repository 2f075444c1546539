"""The TOML file of `freda prepare`: sources, benchmarks to keep out, and how documents become shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from freda.errors import require
from freda.sections import build, knob, read_tables

FilesKind = Literal["jsonl", "parquet", "table", "text", "code", "huggingface", "datatrove"]
MadeKind = Literal["sums", "mini_math", "mini_code", "mini_logic"]  # made by generators, not read from files
DocumentsKind = Literal[FilesKind, MadeKind]
MADE: tuple[MadeKind, ...] = get_args(MadeKind)


MOST_IDS, MOST_ALIGN = 2**24, 2**20


def _check(section: str, config: object, **ranges: tuple[float, float]) -> None:
    """Refuse values outside of their closed ranges."""
    for name, (least, most) in ranges.items():
        value, allowed = getattr(config, name), f"{least} or more" if most == math.inf else f"{least} to {most}"
        require(least <= value <= most, f"{section}{name} is {value}; use {allowed}")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """`[corpus]`: the embedded word problems that `freda prepare` writes as token shards."""

    problems: int = knob(20_000, "training problems to write")
    validation_problems: int = knob(512, "held-out problems in the validation shard")
    steps: int = knob(1, "arithmetic steps per problem")
    max_number: int = knob(99, "largest number in a problem, results included")
    max_change: int = knob(0, "largest number added or taken in a step; 0: no limit but max_number")
    carry: bool = knob(True, "false omits sums that carry or borrow: a small model learns the others in seconds")
    varied: bool = knob(True, "several wordings of a solution; false: the question determines each of its tokens")
    vocab_size: int = knob(512, "most ids of the tokenizer, BLANK included")
    align: int = knob(8, "documents are filled with EOS to a multiple of this (a multiple of the block size)")
    seed: int = knob(0, "seed of the generator")

    def __post_init__(self) -> None:
        counts = {
            "problems": (1, 10**9),
            "validation_problems": (0, 10**9),
            "steps": (1, 64),
            "max_number": (5, 10**12),
        }
        _check("corpus.", self, **counts, align=(1, MOST_ALIGN), vocab_size=(1, MOST_IDS))
        refused = f"corpus.max_change is {self.max_change}; use 2 or more, or 0 for no limit"
        require(self.max_change == 0 or self.max_change >= 2, refused)


@dataclass(frozen=True, kw_only=True)
class MiniConfig:
    """`[mini]`: the mini suite, as sources of the kinds mini_math, mini_code and mini_logic; see docs/mini.md."""

    documents: int = knob(4_000_000, "training documents of each kind; prepare.tokens may take fewer")
    validation_documents: int = knob(2_000, "held-out documents of each kind in the validation shards")
    math_steps_from: int = knob(2, "fewest steps of a word problem")
    math_steps_to: int = knob(6, "most steps of a word problem")
    math_max_number: int = knob(9_999, "largest number in a word problem, results included")
    math_max_factor: int = knob(99, "largest factor or divisor; products of two such numbers are the hard steps")
    math_distractors: float = knob(0.3, "share of word problems with an irrelevant sentence")
    code_steps_from: int = knob(2, "fewest transformations in a function")
    code_steps_to: int = knob(5, "most transformations in a function")
    code_shown: float = knob(0.7, "share of functions with a step that is shown by an example instead of words")
    logic_hops_from: int = knob(1, "fewest hops of a deduction: facts or swaps that lead to the answer")
    logic_hops_to: int = knob(2, "most hops of a deduction; a walk has up to four moves for each")
    logic_conclusions: int = knob(6, "most conclusions in a training document; tests ask for the first one")
    seed: int = knob(0, "seed of the generators; which contents are held out does not depend on it")

    def __post_init__(self) -> None:
        counts = {"documents": (1, 10**9), "validation_documents": (0, 10**9), "logic_conclusions": (1, 24)}
        numbers = {"math_max_number": (50, 10**6), "math_max_factor": (2, 999)}
        _check("mini.", self, **counts, **numbers, math_distractors=(0, 1), code_shown=(0, 1))
        for name, most in (("math_steps", 8), ("code_steps", 8), ("logic_hops", 6)):
            least, last = getattr(self, f"{name}_from"), getattr(self, f"{name}_to")
            seen = f"mini.{name}_from is {least} and mini.{name}_to {last}"
            require(1 <= least <= last <= most, f"{seen}; use 1 to {most}, in this order")


GeneratorConfig = CorpusConfig | MiniConfig


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig:
    """`[benchmark.NAME]`: where texts are. Texts of benchmarks are kept out of the training data."""

    kind: DocumentsKind = knob("jsonl", "format; sums ([corpus]) and mini_* ([mini]) are generated, not read")
    path: str = knob("", "file, folder or tar archive, from --data; huggingface: name; code: also stdlib, Python's own")
    files: str = knob("", "pattern of file names in a folder or archive, as in *_train.tsv; empty: all of the kind")
    field: str = knob("text", "the text: a field, or several as in '{question} {answer}'; columns of a table by number")
    config: str = knob("", "huggingface: configuration of the dataset")
    split: str = knob("train", "huggingface: split of the dataset")
    revision: str = knob("", "huggingface: commit or tag; empty takes the newest commit")
    shortest: int = knob(0, "benchmark: fewest words of a text that is looked for; 0 takes decontaminate.shortest")

    def __post_init__(self) -> None:
        require(bool(self.path) or self.kind in MADE, "path is empty; name a file, a folder or a dataset")
        require(bool(self.field), "field is empty; name the field that holds the text")
        _check("", self, shortest=(0, 1000))


@dataclass(frozen=True, kw_only=True)
class SourceConfig(DocumentsConfig):
    """`[source.NAME]`: one stream of documents; there may be any number of sources."""

    share: float = knob(1.0, "part of prepare.tokens; shares are taken relative to their sum")
    epochs: int = knob(1, "how often documents may be read to reach the share; if that is not enough, the run stops")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.share < math.inf, f"share is {self.share}; use a positive number")
        _check("", self, epochs=(1, 10**6))


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """`[prepare]`: how the documents of all `[source.NAME]` become token shards."""

    tokenizer: str = knob("", "folder of a model or tokenizer; empty trains a new one on the documents")
    eos: str = knob("", "token that ends documents, for example <|endoftext|>; empty takes the tokenizer's own")
    vocab_size: int = knob(8192, "most ids of a new tokenizer, BLANK included")
    tokens: int = knob(0, "training tokens in all; 0 takes every document once, whatever the shares")
    parts: int = knob(8, "shard tasks per source: so many processes or machines can share the work")
    align: int = knob(8, "documents are filled with EOS to a multiple of this (a multiple of the block size)")
    validation_share: float = knob(0.005, "share of documents held out; above 0, at least one of two or more")
    longest: int = knob(10_000_000, "longest document in characters; longer ones are dropped and counted")
    broken_share: float = knob(0.05, "stop when more than this share of a part cannot be read")
    seed: int = knob(42, "seed of the order of files and of what is held out")

    def __post_init__(self) -> None:
        _check("prepare.", self, parts=(1, 2**16), align=(1, MOST_ALIGN), longest=(1, 2**30), vocab_size=(1, MOST_IDS))
        require(not self.eos or bool(self.tokenizer), f"prepare.eos is {self.eos!r}; it needs prepare.tokenizer")
        require(self.tokens >= 0, f"prepare.tokens is {self.tokens}; use 0 (all) or more")
        for name in ("validation_share", "broken_share"):
            require(0 <= getattr(self, name) < 1, f"prepare.{name} is {getattr(self, name)}; use 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class DecontaminateConfig:
    """`[decontaminate]`: when a document holds text of a `[benchmark.NAME]` and is dropped."""

    ngram: int = knob(13, "words in a row that mark a document as contaminated")
    shortest: int = knob(8, "benchmark texts of fewer words than ngram, but at least this many, must occur as a whole")
    threshold: float = knob(0.0, "share of one benchmark text's n-grams that a document must hold; 0: any single one")

    def __post_init__(self) -> None:
        _check("decontaminate.", self, ngram=(1, 1000), shortest=(1, self.ngram), threshold=(0, 1))


@dataclass(frozen=True, kw_only=True)
class PrepareFile:
    """The whole file: the sources of a corpus, and how they become shards."""

    corpus: CorpusConfig = CorpusConfig()
    mini: MiniConfig = MiniConfig()
    prepare: PrepareConfig = PrepareConfig()
    source: Mapping[str, SourceConfig] = dataclasses.field(default_factory=dict)
    benchmark: Mapping[str, DocumentsConfig] = dataclasses.field(default_factory=dict)
    decontaminate: DecontaminateConfig = DecontaminateConfig()


def load_prepare(path: Path | None, overrides: Iterable[str] = ()) -> PrepareFile:
    """The corpus that a TOML file describes, with `section.key=value` overrides applied in order."""
    values = read_tables(path, overrides)
    other = next((name for name in ("model", "data", "method", "train") if name in values), "")
    require(not other, f"[{other}] is a section of `freda train`; move it to a file of its own")
    file: PrepareFile = build(PrepareFile, values, "")
    return file
