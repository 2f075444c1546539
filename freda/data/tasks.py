"""One shard task: a part of a source, read, cleaned, decontaminated, encoded and written.

Tasks need nothing of each other. What a task writes is a function of its `key` alone: the settings it depends on, the
files it reads, and its place in the work. Its record is written after its shards, so a task with a record of the right
key is done, and any other is redone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freda.data.config import MADE, DocumentsConfig, PrepareFile, SourceConfig
from freda.data.decontaminate import Index
from freda.data.documents import Broken, Document, is_unicode, read
from freda.data.encode import Encoder, make_encoder
from freda.data.files import find
from freda.data.generators import described
from freda.data.shards import FORMAT_VERSION, SPLITS, ShardInfo, ShardWriter
from freda.data.tokenizer import BLANK_TEXT, Tokenizer
from freda.errors import FredaError
from freda.files import write_whole

WORK = ".freda-prepare"  # folder of records and the tokenizer until the manifest is written; nobody else has one
EXAMPLES = 3  # kept of every reason for which documents are dropped, per task
PATIENCE = 10_000  # records looked at to find a few texts: with a wrong field there is none in a terabyte
JUDGED_FROM = 20  # records; fewer say nothing about the share of broken ones
SAMPLE = (32, 200_000)  # documents and characters of each source on which the encoder is checked


class Task(NamedTuple):
    """A piece of work: go on with a part of a source."""

    source: str
    part: int
    wave: int  # a source that needs more goes on in waves; all tasks of a wave are independent
    epoch: int
    skip: int  # records of the part that earlier waves of this epoch have read
    want: int  # training tokens to write; 0 writes all there is

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.source}-{self.part:05d}" + (f"-{self.wave}" if self.wave else "")


@dataclass(frozen=True)
class Outcome:
    """What a task did."""

    key: str
    read: int  # records of the part that are used up, earlier waves included
    exhausted: bool  # there are no more
    shards: dict[str, ShardInfo]  # by split; empty ones are left out
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    examples: list[dict[str, str]] = field(default_factory=list)
    contaminated: dict[str, dict[str, Any]] = field(default_factory=dict)  # {benchmark: {documents, items}}

    @property
    def tokens(self) -> int:
        """Training tokens written."""
        return self.shards["train"].tokens if "train" in self.shards else 0

    def write(self, path: Path) -> None:
        """Declare the task done."""
        write_whole(path, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read_from(cls, path: Path) -> Outcome | None:
        """The record of a task, if it is there and whole."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            shards = {split: ShardInfo(**info) for split, info in values["shards"].items()}
            return cls(**{**values, "shards": shards})
        except (OSError, ValueError, TypeError, KeyError):
            return None


# -- what a task depends on ------------------------------------------------------------------------------------------


def description(config: PrepareFile, root: Path) -> dict[str, Any]:
    """What the shards depend on, apart from the tokenizer: kept in the manifest, it tells corpora apart."""
    values: dict[str, Any] = {"prepare": dataclasses.asdict(config.prepare)}
    del values["prepare"]["tokenizer"]  # its fingerprint counts, not where it lies
    for name, source in config.source.items():
        values[f"source.{name}"] = {**dataclasses.asdict(source), **_files(source, root)}
    for name, benchmark in config.benchmark.items():
        values[f"benchmark.{name}"] = {**dataclasses.asdict(benchmark), **_files(benchmark, root)}
    if config.benchmark:
        values["decontaminate"] = dataclasses.asdict(config.decontaminate)
    return {**values, **described(config)}


def _files(config: DocumentsConfig, root: Path) -> dict[str, int]:
    if config.kind == "huggingface" or config.kind in MADE:
        return {}
    paths = {file.path for file in find(config, root)}
    return {"found": len(paths), "bytes": sum(path.stat().st_size for path in paths)}


def task_keys(config: PrepareFile, root: Path, tokenizer: Tokenizer) -> Mapping[str, str]:
    """For every source, the hash of all that its tasks depend on but their place in the work."""
    whole = description(config, root)
    vocabulary = [tokenizer.fingerprint, tokenizer.eos_id]
    kept_out = {name: stamps(benchmark, root) for name, benchmark in config.benchmark.items()}
    settings = {key: value for key, value in whole["prepare"].items() if key not in ("tokens", "broken_share")}
    shared = {name: value for name, value in whole.items() if not name.startswith(("source.", "prepare"))}
    keys = {}
    for name, source in config.source.items():
        own = {key: value for key, value in whole[f"source.{name}"].items() if key not in ("share", "epochs")}
        parts = [FORMAT_VERSION, vocabulary, settings, shared, kept_out, name, own, stamps(source, root)]
        keys[name] = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return keys


def stamps(config: DocumentsConfig, root: Path) -> list[tuple[int, int]]:
    """Size and time of every file of a source on this machine; of a dataset of the Hub its revision tells."""
    if config.kind in MADE:
        return []
    if config.kind == "huggingface":
        paths = sorted(path for path in Path(config.path).rglob("*") if path.is_file())
    else:
        paths = [file.path for file in find(config, root)]
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


# -- doing it --------------------------------------------------------------------------------------------------------


class Tools:
    """What makes ids of texts: the tokenizer, its fast encoder, and the index of texts to keep out, if any."""

    def __init__(self, config: PrepareFile, root: Path, tokenizer: Tokenizer) -> None:
        texts = (text for source in config.source.values() for text in sample(source, root, config))
        self.tokenizer = tokenizer
        self.encoder: Encoder = make_encoder(tokenizer, texts)
        limits = config.decontaminate
        self.index = (
            Index(
                benchmark_texts(config, root),
                ngram=limits.ngram,
                shortest=limits.shortest,
                threshold=limits.threshold,
            )
            if config.benchmark
            else None
        )


def benchmark_texts(config: PrepareFile, root: Path) -> Iterator[tuple[str, str]]:
    """(benchmark, text) of everything that must be kept out."""
    for name, benchmark in config.benchmark.items():
        for record in read(benchmark, root, config):
            if isinstance(record, Broken):  # a benchmark that is not read in full would let its texts through
                raise FredaError(f"benchmark.{name}: {record.where}: {record.reason} ({record.detail}); mend the file")
            yield name, record.text


class Worker:
    """Carries out tasks; holds what all of them need."""

    def __init__(self, config: PrepareFile, root: Path, out: Path) -> None:
        self.config, self.root, self.out = config, root, out
        self.tools = Tools(config, root, Tokenizer.load(out / WORK))
        self.keys = task_keys(config, root, self.tools.tokenizer)

    def key(self, task: Task) -> str:
        """Names what the task will write."""
        return hashlib.sha256(json.dumps([self.keys[task.source], *task]).encode()).hexdigest()

    def done(self, task: Task) -> Outcome | None:
        """The outcome of the task, if it was done before with these very settings."""
        found = Outcome.read_from(self._record(task))
        if found is None or found.key != self.key(task):
            return None
        return found if all(shard.is_there(self.out) for shard in found.shards.values()) else None

    def run(self, task: Task) -> Outcome:
        """Do the task, unless it is done."""
        found = self.done(task)
        if found is not None:
            return found
        try:
            self._record(task).unlink(missing_ok=True)  # it speaks of shards that are about to change
            self._record(task).with_suffix(".begun").touch()
            outcome = self._write(task)
            outcome.write(self._record(task))
        except OSError as error:
            raise FredaError(
                f"{task.name}: {error.strerror or error}: {error.filename or self.out}; what is finished is kept: "
                "mend it and run freda prepare again"
            ) from error
        return outcome

    def _record(self, task: Task) -> Path:
        return self.out / WORK / f"{task.name}.json"

    def _write(self, task: Task) -> Outcome:
        """Read and write until the task has its tokens, or the part ends."""
        source, tally = self.config.source[task.source], Tally(self.tools, self.config, task.source, task.part)
        settings = self.config.prepare
        place = {"part": task.part, "parts": settings.parts, "seed": settings.seed}
        records = read(source, self.root, self.config, **place)
        number, exhausted = 0, True
        with ExitStack() as stack:
            layout = {"eos_id": self.tools.tokenizer.eos_id, "align": settings.align}
            writers: dict[str, ShardWriter] = {
                split: stack.enter_context(ShardWriter(self.out, f"{split}-{task.name}", **layout)) for split in SPLITS
            }
            for number, record in enumerate(records, start=1):
                if number <= task.skip:
                    continue
                split, ids = tally.judge(number, record)
                if ids is not None and not (split == "validation" and task.epoch):  # held out once is enough
                    writers[split].add(ids)
                if task.want and writers["train"].tokens >= task.want:
                    exhausted = False
                    break
            tally.check_broken()  # before the files get their names
        shards = {split: writer.info(task.source) for split, writer in writers.items() if writer.documents}
        for split, suffix in itertools.product(writers.keys() - shards.keys(), (".bin", ".idx")):
            (self.out / f"{split}-{task.name}{suffix}").unlink()
        return Outcome(self.key(task), number, exhausted, shards, **tally.results())


class Tally:
    """Decides about the records of a part of a source and counts what it drops."""

    def __init__(self, tools: Tools, config: PrepareFile, source: str, part: int) -> None:
        self._tools, self._source, self._part = tools, source, part
        self._settings = config.prepare
        self._seen = self._broken = 0
        self._first_broken: Broken | None = None
        self._dropped: Counter[str] = Counter()
        self._examples: list[dict[str, str]] = []
        self._hits: dict[str, dict[str, Any]] = {}

    def judge(self, number: int, record: Document | Broken) -> tuple[str, NDArray[np.int32] | None]:
        """The split of a record of the part, and its ids; none if it is dropped."""
        self._seen += 1
        if isinstance(record, Broken):
            self._broken += 1
            self._first_broken = self._first_broken or record
            self._drop(record.where, record.reason, record.detail)
            if self._seen % 1000 == 0:
                self.check_broken()
            return "", None
        return record.split or self._split(number), self._ids(record)

    def _split(self, number: int) -> str:
        """Held out or not: a matter of the record's place, so that every epoch and every run agrees."""
        place = f"{self._settings.seed}/{self._source}/{self._settings.parts}/{self._part}/{number}"
        draw = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") / 2**64
        return "validation" if draw < self._settings.validation_share else "train"

    def _ids(self, document: Document) -> NDArray[np.int32] | None:
        text, ids = document.text, document.ids
        if ids is not None:
            ids = self._own_ids(document, ids)
            text = self._tools.tokenizer.decode(ids.tolist()) if self._tools.index is not None else "(ids)"
        objection = self._objection(text)
        if objection is None and ids is None:
            try:
                ids = self._tools.encoder.encode(text)
            except FredaError as error:
                objection = ("not Unicode", str(error))
        if objection is not None:
            self._drop(document.where, *objection)
            return None
        return ids

    def _objection(self, text: str) -> tuple[str, str] | None:
        """Why a text must not be written, in few words and in more; None if it may."""
        if not text or text.isspace():
            return "empty", ""
        if len(text) > self._settings.longest:
            return "too long", f"{len(text)} characters"
        if BLANK_TEXT in text:
            return f"spells {BLANK_TEXT}", ""
        return self._contaminated(text)

    def _own_ids(self, document: Document, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Ids from elsewhere without the EOS that closes them: the writer adds its own."""
        tokenizer = self._tools.tokenizer
        if len(ids) and int(ids.max()) >= tokenizer.blank_id:
            raise FredaError(f"{document.where} holds id {ids.max()}, the tokenizer ends at {tokenizer.blank_id - 1}")
        return ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids

    def _contaminated(self, text: str) -> tuple[str, str] | None:
        hits = self._tools.index.hits(text) if self._tools.index is not None else []
        for name in dict.fromkeys(hit.benchmark for hit in hits):
            found = self._hits.setdefault(name, {"documents": 0, "items": set()})
            found["documents"] += 1
        for hit in hits:
            self._hits[hit.benchmark]["items"].add(hit.item)
        return (f"contaminated by {hits[0].benchmark}", f"item {hits[0].item}: {hits[0].words}") if hits else None

    def _drop(self, where: str, reason: str, detail: str = "") -> None:
        self._dropped[reason] += 1
        if self._dropped[reason] <= EXAMPLES:
            example = {"source": self._source, "where": where, "reason": reason, "detail": detail[:200]}
            self._examples.append(example)

    def check_broken(self) -> None:
        """Too many unreadable records mean wrong settings: better said than counted."""
        first = self._first_broken
        if first and self._seen >= JUDGED_FROM and self._broken > self._settings.broken_share * self._seen:
            raise FredaError(
                f"source.{self._source}: {self._broken} of {self._seen} records cannot be read, first {first.where}: "
                f"{first.reason} ({first.detail[:200]}); mend it, or raise prepare.broken_share"
            )

    def results(self) -> dict[str, Any]:
        """The fields of the outcome."""
        hits = {name: {**found, "items": sorted(found["items"])} for name, found in sorted(self._hits.items())}
        return {"dropped": dict(sorted(self._dropped.items())), "examples": self._examples, "contaminated": hits}


def sample(source: SourceConfig, root: Path, config: PrepareFile) -> list[str]:
    """The first texts of a source."""
    texts: list[str] = []
    most, characters = SAMPLE
    for record in itertools.islice(read(source, root, config, seed=config.prepare.seed), PATIENCE):
        if isinstance(record, Document) and is_unicode(record.text) and BLANK_TEXT not in record.text:
            texts.append(record.text[:characters])
        if len(texts) == most or sum(map(len, texts)) >= characters:
            break
    return texts
