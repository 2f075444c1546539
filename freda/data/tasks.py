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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freda.data.config import PrepareFile
from freda.data.decontaminate import Hit, Index
from freda.data.documents import Broken, Document, Record, Source, first_texts, is_unicode, read, sources_of
from freda.data.encode import make_encoder
from freda.data.mini import GENERATORS
from freda.data.shards import FORMAT_VERSION, SPLITS, ShardInfo, ShardWriter
from freda.data.tokenizer import BLANK_TEXT, Tokenizer
from freda.errors import FredaError, require
from freda.files import parse_json, read_text, write_whole

WORK = ".freda-prepare"  # folder of records and the tokenizer until the manifest is written; nobody else has one
EXAMPLES = 3  # kept of every reason for which documents are dropped, per task
JUDGED_FROM = 20  # records; fewer say nothing about the share of broken ones
SAMPLE = (32, 200_000)  # documents and characters of each source on which the encoder is checked


class Task(NamedTuple):
    """A piece of work: continue a part of a source."""

    source: str
    part: int
    wave: int  # a source that needs more continues in waves; all tasks of a wave are independent
    epoch: int
    skip: int  # records of the part that earlier waves of this epoch have read
    want: int  # training tokens to write; 0 writes all there is
    held: float = 0.0  # share of documents to hold out if it is more than prepare.validation_share

    @property
    def name(self) -> str:
        """The stem of the files that the task writes."""
        return f"{self.source}-{self.part:05d}" + (f"-{self.wave}" if self.wave else "")


@dataclass(frozen=True)
class Outcome:
    """The record of a finished task: what it read, wrote and dropped."""

    key: str
    read: int  # records of the part that are used up, earlier waves included
    exhausted: bool  # there are no more
    shards: dict[str, ShardInfo]  # by split, empty ones omitted
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    examples: list[dict[str, str]] = field(default_factory=list)
    contaminated: dict[str, dict[str, Any]] = field(default_factory=dict)  # {benchmark: {documents, items}}
    least_draw: float = 1.0  # any validation_share above this holds out a document

    @property
    def tokens(self) -> int:
        """Training tokens written."""
        return self.shards["train"].tokens if "train" in self.shards else 0

    @classmethod
    def read_from(cls, path: Path) -> Outcome | None:
        """The record of a task, if it is there and whole."""
        try:
            values = parse_json(read_text(path))
            shards = {split: ShardInfo(**info) for split, info in values["shards"].items()}
            return cls(**{**values, "shards": shards})
        except (FredaError, ValueError, TypeError, KeyError, AttributeError):
            return None


def description(file: PrepareFile, root: Path) -> dict[str, Any]:
    """What the shards depend on, apart from the tokenizer: kept in the manifest, it tells corpora apart."""
    values: dict[str, Any] = {"prepare": dataclasses.asdict(file.prepare)}
    del values["prepare"]["tokenizer"]  # its fingerprint counts, not where it lies
    for section, tables in (("source", file.source), ("benchmark", file.benchmark)):
        for name, source in sources_of(file, tables, root).items():
            paths = {file.path for file in source.files()}
            amount = {"found": len(paths), "bytes": sum(path.stat().st_size for path in paths)} if paths else {}
            values[f"{section}.{name}"] = {**dataclasses.asdict(source.config), **amount}
    if file.benchmark:
        values["decontaminate"] = dataclasses.asdict(file.decontaminate)
    for generator in (GENERATORS[source.kind] for source in file.source.values() if source.kind in GENERATORS):
        settings = dataclasses.asdict(getattr(file, generator.section))
        values[generator.section] = {"generator": generator.version, **settings}
    return values


def task_keys(file: PrepareFile, root: Path, tokenizer: Tokenizer) -> Mapping[str, str]:
    """For every source, a hash of everything its tasks depend on except their place in the work."""
    whole, vocabulary = description(file, root), [tokenizer.fingerprint, tokenizer.eos_id]
    kept_out = {name: stamps(source) for name, source in sources_of(file, file.benchmark, root).items()}
    settings = {key: value for key, value in whole["prepare"].items() if key not in ("tokens", "broken_share")}
    shared = {name: value for name, value in whole.items() if not name.startswith(("source.", "prepare"))}
    keys = {}
    for name, source in sources_of(file, file.source, root).items():
        own = {key: value for key, value in whole[f"source.{name}"].items() if key not in ("share", "epochs")}
        keys[name] = fingerprint([FORMAT_VERSION, vocabulary, settings, shared, kept_out, name, own, stamps(source)])
    return keys


def fingerprint(values: Any) -> str:
    """A hash of values that JSON can write."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def stamps(source: Source) -> list[tuple[int, int]]:
    """Size and time of every file of a source on this machine; a dataset of the Hub is known by its revision."""
    paths = [file.path for file in source.files()]
    if source.config.kind == "huggingface":
        paths = sorted(path for path in Path(source.config.path).rglob("*") if path.is_file())
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def benchmark_texts(benchmarks: Mapping[str, Source]) -> Iterator[tuple[str, str]]:
    """(benchmark, text) of everything that must be kept out."""
    for name, benchmark in benchmarks.items():
        empty = True
        for record in read(benchmark):
            empty = False
            if isinstance(record, Broken):  # a benchmark that is not read in full would let its texts through
                raise FredaError(f"benchmark.{name}: {record.where}: {record.reason} ({record.detail}); fix the file")
            yield name, record.text
        odd = f"benchmark.{name} holds no text ({benchmark.config.path})"
        require(not empty, f"{odd}; name its file, or remove the section")


def sample(sources: Mapping[str, Source]) -> list[str]:
    """A few texts of every source."""
    most, characters = SAMPLE
    texts = itertools.chain.from_iterable(first_texts([one], most, characters, seed=0) for one in sources.values())
    return [text[:characters] for text in texts if BLANK_TEXT not in text]


class Worker:
    """Carries out tasks; holds what all of them need: the tokenizer, its encoder, the index of texts to keep out."""

    def __init__(self, file: PrepareFile, root: Path, out: Path, tokenizer: Tokenizer | None = None) -> None:
        self.file, self.out, self.settings = file, out, file.prepare
        self.sources = sources_of(file, file.source, root)
        self.tokenizer = tokenizer or Tokenizer.load(out / WORK)
        self.encoder = make_encoder(self.tokenizer, sample(self.sources))
        benchmarks = benchmark_texts(sources_of(file, file.benchmark, root))
        shortest = {name: benchmark.shortest for name, benchmark in file.benchmark.items()}
        self.index = Index(benchmarks, file.decontaminate, shortest) if file.benchmark else None
        self._keys = task_keys(file, root, self.tokenizer)

    def run(self, task: Task) -> Outcome:
        """Do the task, unless it was done before with these very settings."""
        record = self.out / WORK / f"{task.name}.json"
        found = Outcome.read_from(record)
        if found and found.key == self._key(task) and all(one.is_there(self.out) for one in found.shards.values()):
            return found
        try:
            record.unlink(missing_ok=True)  # it describes shards that are about to change
            record.with_suffix(".begun").touch()
            outcome = self._write(task)
            write_whole(record, json.dumps(dataclasses.asdict(outcome)))  # which declares the task done
        except OSError as error:
            seen, advice = error.strerror or error, "what is finished is kept: fix this and run freda prepare again"
            raise FredaError(f"{task.name}: {seen}: {error.filename or self.out}; {advice}") from error
        return outcome

    def _key(self, task: Task) -> str:
        """A hash of everything that determines what the task will write."""
        return fingerprint([self._keys[task.source], *task])

    def _write(self, task: Task) -> Outcome:
        """Read and write until the task has its tokens, or the part ends."""
        settings, tally = self.settings, Tally(self, task.source, task.part, task.held)
        records = read(self.sources[task.source], part=task.part, parts=settings.parts, seed=settings.seed)
        layout = (self.tokenizer.eos_id, settings.align)
        writers = {str(split): ShardWriter(self.out, f"{split}-{task.name}", *layout) for split in SPLITS}
        number, exhausted = task.skip, True
        with writers["train"], writers["validation"]:
            for number, (record, clean) in enumerate(self._screened(records, task.skip), start=task.skip + 1):
                split, ids = tally.judge(number, record, clean)
                if ids is not None and not (split == "validation" and task.epoch):  # held out once is enough
                    writers[split].add(ids)
                if task.want and writers["train"].tokens >= task.want:
                    exhausted = False
                    break
            tally.check_broken()  # before the files get their names
        shards = {split: writer.info(task.source) for split, writer in writers.items() if writer.documents}
        for split, suffix in itertools.product(writers.keys() - shards.keys(), (".bin", ".idx")):
            (self.out / f"{split}-{task.name}{suffix}").unlink()
        return Outcome(self._key(task), number, exhausted, shards, **tally.results())

    def _screened(self, records: Iterator[Record], skip: int) -> Iterator[tuple[Record, bool]]:
        """The records behind those that are used up, with whether each is known to be clean of benchmarks."""
        wanted = itertools.islice(records, skip, None)
        if self.index is None:
            return ((record, True) for record in wanted)
        return self.index.screened(wanted, self._text)

    def _text(self, record: Record) -> str | None:
        """The text of a record, unless it has none, or is too long to be looked at."""
        known = isinstance(record, Document) and record.ids is None and len(record.text) <= self.settings.longest
        return record.text if isinstance(record, Document) and known else None


class Tally:
    """Decides what happens to each record of a part of a source, and counts what is dropped."""

    def __init__(self, worker: Worker, source: str, part: int, held: float = 0.0) -> None:
        self._worker, self._settings, self._source, self._part = worker, worker.settings, source, part
        self._held = max(held, worker.settings.validation_share)
        self._seen, self._broken, self._least_draw = 0, 0, 1.0
        self._first_broken: Broken | None = None
        self._dropped, self._examples = Counter[str](), list[dict[str, str]]()
        self._hits: dict[str, dict[str, Any]] = {}

    def judge(self, number: int, record: Record, clean: bool = False) -> tuple[str, NDArray[np.int32] | None]:
        """The split of a record of the part, and its ids; none if it is dropped. `clean` if it is known to be so."""
        self._seen += 1
        if isinstance(record, Broken):
            self._broken += 1
            self._first_broken = self._first_broken or record
            self._drop(record.where, record.reason, record.detail)
            if self._seen % 1000 == 0:
                self.check_broken()
            return "", None
        ids = self._ids(record, clean)
        if record.split or ids is None:
            return record.split, ids
        # Whether a record is held out depends on its place alone, so that every epoch and every run agrees.
        place = f"{self._settings.seed}/{self._source}/{self._settings.parts}/{self._part}/{number}"
        draw = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") / 2**64
        self._least_draw = min(self._least_draw, draw)
        return "validation" if draw < self._held else "train", ids

    def _ids(self, document: Document, clean: bool) -> NDArray[np.int32] | None:
        """The ids of a document; None if it must not be written, which is counted."""
        text, ids = document.text, document.ids
        if ids is not None:
            ids = self._own_ids(document, ids)
            text = self._worker.tokenizer.decode(ids.tolist()) if self._worker.index is not None else "(ids)"
        if not text or text.isspace():
            objection = ("empty", "")
        elif len(text) > self._settings.longest:
            objection = ("too long", f"{len(text)} characters")
        elif BLANK_TEXT in text:
            objection = (f"spells {BLANK_TEXT}", "")
        elif not is_unicode(text):
            objection = ("not Unicode", "it has lone surrogates")
        elif hits := [] if clean else self._hits_in(text):
            objection = (f"contaminated by {hits[0].benchmark}", f"item {hits[0].item}: {hits[0].words}")
        else:
            return self._worker.encoder.encode(text) if ids is None else ids
        self._drop(document.where, *objection)
        return None

    def _own_ids(self, document: Document, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Ids that another program made, without the EOS that closes them: the writer adds its own."""
        tokenizer = self._worker.tokenizer
        if len(ids) and int(ids.max()) >= tokenizer.blank_id:
            raise FredaError(f"{document.where} holds id {ids.max()}, the tokenizer ends at {tokenizer.blank_id - 1}")
        return ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids

    def _hits_in(self, text: str) -> list[Hit]:
        """The benchmark items that contaminate a text; they are counted."""
        hits = self._worker.index.hits(text) if self._worker.index is not None else []
        for name in {hit.benchmark for hit in hits}:
            found = self._hits.setdefault(name, {"documents": 0, "items": set()})
            found["documents"] += 1
            found["items"] |= {hit.item for hit in hits if hit.benchmark == name}
        return hits

    def _drop(self, where: str, reason: str, detail: str) -> None:
        self._dropped[reason] += 1
        if self._dropped[reason] <= EXAMPLES:
            self._examples.append({"source": self._source, "where": where, "reason": reason, "detail": detail[:200]})

    def check_broken(self) -> None:
        """Stop if too many records cannot be read, which means that settings are wrong."""
        first = self._first_broken
        if first and self._seen >= JUDGED_FROM and self._broken > self._settings.broken_share * self._seen:
            seen = f"source.{self._source}: {self._broken} of {self._seen} records cannot be read"
            why = f"{first.where}: {first.reason} ({first.detail[:200]})"
            raise FredaError(f"{seen}, first {why}; fix them, or raise prepare.broken_share")

    def results(self) -> dict[str, Any]:
        """The fields of `Outcome` that are counted here."""
        hits = {name: {**found, "items": sorted(found["items"])} for name, found in sorted(self._hits.items())}
        dropped = dict(sorted(self._dropped.items()))
        return {"dropped": dropped, "examples": self._examples, "contaminated": hits, "least_draw": self._least_draw}
