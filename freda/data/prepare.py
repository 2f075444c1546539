"""`freda prepare`: documents to token shards, by independent tasks.

    plan the tasks of a wave  →  run them, here in processes or on many machines under torchrun  →  plan the next wave

A source is cut into `parts`; every part first writes its equal share of the source's tokens. Parts that run dry leave a
gap, which the others fill in the next wave; when all are dry, the source is read again, as often as `epochs` allows.
What is planned follows from what is done, and what a task writes from its settings: killed at any moment and started
again, the run goes on and ends with the same bytes. A folder of others is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freda.data.config import MADE, CorpusConfig, PrepareConfig, PrepareFile, SourceConfig
from freda.data.documents import Document, is_unicode, newest_commit, read
from freda.data.shards import MANIFEST, SPLITS, Documents, Manifest, SplitInfo, part_name
from freda.data.tasks import PATIENCE, WORK, Outcome, Task, Worker, description, stamps
from freda.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from freda.data.workers import Runner, progress, runner
from freda.errors import FredaError

LOCK = "lock"
TOKENIZER_TEXT = (10_000, 30_000_000)  # documents and characters to learn a tokenizer from; more would only take longer
Note = Callable[[str], None]


def prepare_corpus(corpus: CorpusConfig, out: Path) -> Manifest:
    """The embedded word problems alone."""
    return prepare(PrepareFile(corpus=corpus), out)


def prepare(
    config: PrepareFile, out: Path, *, root: Path = Path(), workers: int = 1, note: Note | None = None
) -> Manifest:
    """Write the shards of all sources to the folder `out`, unless they are there already.

    With `note`, it says what it does, and on a terminal how far it is.
    """
    config = with_sources(config)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if (out / MANIFEST).exists():
        return _finished(config, root, out)
    _check_leftovers(out)
    with _locked(out) if rank == 0 else contextlib.nullcontext():
        if rank == 0:
            config = with_revisions(config, out)
            _provide_tokenizer(config, root, out)
        with runner(config, root, out, workers, world) as (worker, run):
            config = worker.config
            if rank == 0 and note is not None and any(source.kind not in MADE for source in config.source.values()):
                note(_encoder_note(worker))
            with progress(out, config.prepare.tokens) if rank == 0 and note else contextlib.nullcontext():
                outcomes = _all_waves(config, run)
            if rank == 0:
                return _finish(config, root, out, worker, outcomes)
    return Manifest(description(config, root), 0, 0, 0, "", {})  # another rank writes the true one


def with_sources(config: PrepareFile) -> PrepareFile:
    """A config that names no source means the embedded corpus."""
    if config.source:
        return config
    corpus = config.corpus
    settings = PrepareConfig(vocab_size=corpus.vocab_size, align=corpus.align, parts=1, seed=corpus.seed)
    return replace(config, prepare=settings, source={"sums": SourceConfig(kind="sums")})


def with_revisions(config: PrepareFile, out: Path, known: Mapping[str, Any] | None = None) -> PrepareFile:
    """The config with the commit of every dataset of the Hub that names none, so that a run that is gone on with, or
    repeated, reads the same documents: from `known` (a manifest), from the run's own notes, or the newest."""
    mark = out / WORK / "revisions.json"
    notes: dict[str, str] = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else {}

    def pinned(section: str, tables: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, table in tables.items():
            key = f"{section}.{name}"
            if table.kind == "huggingface" and not table.revision and not Path(table.path).exists():
                commit = (
                    known[key]["revision"] if known and key in known else notes.get(key) or newest_commit(table.path)
                )
                notes[key] = commit
                table = replace(table, revision=commit)
            found[name] = table
        return found

    config = replace(config, source=pinned("source", config.source), benchmark=pinned("benchmark", config.benchmark))
    if notes and known is None:
        mark.write_text(json.dumps(notes), encoding="utf-8")
    return config


def _encoder_note(worker: Worker) -> str:
    encoder = worker.tools.encoder
    return f"tokenizing with {encoder.library}" + (f": {encoder.reason}" if encoder.reason else "")


# -- planning --------------------------------------------------------------------------------------------------------


def budgets(config: PrepareFile) -> dict[str, int]:
    """Training tokens of each source; 0 is all, which only `tokens = 0` means, and not a tiny share."""
    tokens, whole = config.prepare.tokens, sum(source.share for source in config.source.values())
    least = 1 if tokens else 0
    return {name: max(least, round(tokens * source.share / whole)) for name, source in config.source.items()}


def next_wave(
    source: str, budget: int, epochs: int, parts: int, done: Sequence[Mapping[Task, Outcome]]
) -> tuple[list[Task], str]:
    """The tasks that a source needs next, given all its finished waves; or none, and if it ran dry a word about it."""
    if not done:
        return [Task(source, part, 0, 0, 0, math.ceil(budget / parts)) for part in range(parts)], ""
    have = sum(outcome.tokens for wave in done for outcome in wave.values())
    if not budget or have >= budget:
        return [], ""
    epoch = max(task.epoch for task in done[-1])
    last = {task.part: outcome for wave in done for task, outcome in wave.items() if task.epoch == epoch}
    live = {part: outcome.read for part, outcome in last.items() if not outcome.exhausted}
    wave = len(done)
    if not live:
        in_epoch = sum(o.tokens for tasks in done for task, o in tasks.items() if task.epoch == epoch)
        if epoch + 1 >= epochs or not in_epoch:
            needed = f"; {math.ceil(budget * (epoch + 1) / have)} epochs would do" if have else ""
            return [], f"source.{source} ran dry: {have:,} of {budget:,} tokens after {epoch + 1} epochs{needed}"
        epoch, live = epoch + 1, dict.fromkeys(range(parts), 0)
    want = math.ceil((budget - have) / len(live))
    return [Task(source, part, wave, epoch, skip, want) for part, skip in sorted(live.items())], ""


def _all_waves(config: PrepareFile, run: Runner) -> dict[str, list[dict[Task, Outcome]]]:
    """Run every source to its budget, all sources side by side."""
    wanted, parts = budgets(config), config.prepare.parts
    done: dict[str, list[dict[Task, Outcome]]] = {name: [] for name in config.source}
    dry: dict[str, str] = {}
    while True:
        tasks = []
        for name, source in config.source.items():
            mine, dry[name] = next_wave(name, wanted[name], source.epochs, parts, done[name])
            tasks += mine
        if not tasks:
            break
        outcomes = dict(zip(tasks, run(tasks), strict=True))
        for name, found in itertools.groupby(outcomes.items(), key=lambda item: item[0].source):
            done[name].append(dict(found))
            if len(done[name]) == 1:
                _check_useful(name, done[name][0].values())
    messages = [message for message in dry.values() if message]
    if messages:
        raise FredaError(
            f"{'; '.join(messages)}. Raise epochs, lower the share or prepare.tokens, or add documents; "
            "what is written is kept for the next run"
        )
    return done


def _check_useful(source: str, outcomes: Collection[Outcome]) -> None:
    """A source of which nothing can be used has wrong settings."""
    examples = [example for outcome in outcomes for example in outcome.examples]
    if examples and not any(outcome.shards for outcome in outcomes):
        first, count = examples[0], sum(sum(outcome.dropped.values()) for outcome in outcomes)
        raise FredaError(
            f"source.{source}: none of its {count} records can be used, first {first['where']}: {first['reason']} "
            f"({first['detail']}); look at path, kind and field"
        )


# -- the folder ------------------------------------------------------------------------------------------------------


def _finished(config: PrepareFile, root: Path, out: Path) -> Manifest:
    """The manifest of a folder that holds this very corpus, undamaged."""
    manifest = Manifest.read(out)
    config = with_revisions(config, out, known=manifest.source)
    old, new = _flat(manifest.source), _flat(description(config, root))
    changes = [f"{key} {old.get(key)} (now {new.get(key)})" for key in {**old, **new} if old.get(key) != new.get(key)]
    if config.prepare.tokenizer:
        tokenizer = named_tokenizer(config, root)
        if tokenizer.fingerprint != manifest.tokenizer:
            changes.append(f"tokenizer {manifest.tokenizer[:8]} (now {tokenizer.fingerprint[:8]})")
        if tokenizer.eos_id != manifest.eos_id:
            changes.append(f"eos_id {manifest.eos_id} (now {tokenizer.eos_id})")
    if changes:
        raise FredaError(f"{out} holds another corpus: {', '.join(changes)}; choose another folder or delete this one")
    for split in manifest.splits:
        Documents(out, split, manifest)
    if (out / WORK).is_dir() and int(os.environ.get("RANK", "0")) == 0:  # killed while it cleaned up
        with _locked(out):
            _clean_up(out, manifest)
    return manifest


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in values.items() for key, value in table.items()}


def _check_leftovers(out: Path) -> None:
    """An interrupted run may be gone on with, and nothing else: its mark is the folder of its records."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise FredaError(f"{existing} is a file; name a folder")
    names = {path.name for path in out.iterdir()} if existing == out else set()
    if names and not (out / WORK / LOCK).is_file():
        raise FredaError(f"{out} is in use ({min(names)} is there); choose another folder")


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Two processes must not write one folder. The lock goes with the process, however it ends."""
    (out / WORK).mkdir(parents=True, exist_ok=True)
    with open(out / WORK / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FredaError(f"another process is writing {out}; wait for it or choose another folder") from None
        yield


def _provide_tokenizer(config: PrepareFile, root: Path, out: Path) -> None:
    """Put the tokenizer where all processes of the run find it: the one named, or one learned from the documents."""
    if config.prepare.tokenizer:
        named_tokenizer(config, root).save(out / WORK)
        return
    found = [stamps(source, root) for source in config.source.values()]
    text = json.dumps([description(config, root), found], sort_keys=True)
    key, mark = hashlib.sha256(text.encode()).hexdigest(), out / WORK / "tokenizer.key"
    if mark.is_file() and mark.read_text(encoding="utf-8") == key:
        return
    mark.unlink(missing_ok=True)
    train_tokenizer(_tokenizer_texts(config, root), config.prepare.vocab_size).save(out / WORK)
    mark.write_text(key, encoding="utf-8")


def named_tokenizer(config: PrepareFile, root: Path) -> Tokenizer:
    """The tokenizer that the config names."""
    return open_tokenizer(root / Path(config.prepare.tokenizer).expanduser(), config.prepare.eos)


def _tokenizer_texts(config: PrepareFile, root: Path) -> Iterator[str]:
    """Documents of all sources in turn."""
    seed = config.prepare.seed
    streams = [itertools.islice(read(source, root, config, seed=seed), PATIENCE) for source in config.source.values()]
    texts = (
        record.text
        for records in itertools.zip_longest(*streams)
        for record in records
        if isinstance(record, Document) and record.split != "validation" and is_unicode(record.text)
    )
    count, characters = TOKENIZER_TEXT
    for text in itertools.islice(texts, count):
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def _finish(
    config: PrepareFile, root: Path, out: Path, worker: Worker, done: Mapping[str, Sequence[Mapping[Task, Outcome]]]
) -> Manifest:
    """The tokenizer, then the manifest that declares the shards complete, then away with the records."""
    outcomes = [(task, outcome) for waves in done.values() for wave in waves for task, outcome in wave.items()]
    splits: dict[str, SplitInfo] = {
        split: SplitInfo.of([outcome.shards[split] for _, outcome in outcomes if split in outcome.shards])
        for split in SPLITS
    }
    if not splits["train"].documents:
        raise FredaError("no document is left to train on; look at the sources with freda prepare --plan")
    tokenizer = worker.tools.tokenizer
    manifest = Manifest(
        source=description(config, root),
        align=config.prepare.align,
        eos_id=tokenizer.eos_id,
        blank_id=tokenizer.blank_id,
        tokenizer=tokenizer.fingerprint,
        splits=splits,
        dropped=_dropped(outcomes),
        examples=_examples(outcomes),
        contamination=_contamination(worker, outcomes),
    )
    for split in splits:
        Documents(out, split, manifest)  # nobody has changed them since
    tokenizer.save(out)
    manifest.write(out)
    _clean_up(out, manifest)
    return manifest


def _clean_up(out: Path, manifest: Manifest) -> None:
    """Remove what the run needed, and what was begun with other settings: by our own records, and nothing else."""
    kept = {shard.name for info in manifest.splits.values() for shard in info.shards}
    for begun in (out / WORK).glob("*.begun"):
        names = {f"{split}-{begun.stem}" for split in SPLITS} - kept
        for name, suffix in itertools.product(names, (".bin", ".idx")):
            (out / f"{name}{suffix}").unlink(missing_ok=True)
            (out / part_name(f"{name}{suffix}")).unlink(missing_ok=True)
    shutil.rmtree(out / WORK)


def _dropped(outcomes: Sequence[tuple[Task, Outcome]]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for task, outcome in outcomes:
        if task.epoch == 0:  # the same documents are dropped again in every epoch
            mine = counts.setdefault(task.source, {})
            for reason, count in outcome.dropped.items():
                mine[reason] = mine.get(reason, 0) + count
    return {source: dict(sorted(reasons.items())) for source, reasons in counts.items() if reasons}


def _examples(outcomes: Sequence[tuple[Task, Outcome]], most: int = 3) -> list[dict[str, str]]:
    """The first few of every source and reason."""
    kept: dict[tuple[str, str], list[dict[str, str]]] = {}
    for task, outcome in outcomes:
        for example in outcome.examples if task.epoch == 0 else ():
            kept.setdefault((example["source"], example["reason"]), []).append(example)
    return [example for examples in kept.values() for example in examples[:most]]


def _contamination(worker: Worker, outcomes: Sequence[tuple[Task, Outcome]]) -> dict[str, Any]:
    """For every benchmark: its texts, and for every source the documents that hold some of them and how many texts."""
    if worker.tools.index is None:
        return {}
    report = {name: {**info._asdict(), "sources": {}} for name, info in worker.tools.index.benchmarks.items()}
    items: dict[tuple[str, str], set[int]] = {}
    for task, outcome in outcomes:
        for name, found in outcome.contaminated.items() if task.epoch == 0 else ():
            mine = report[name]["sources"].setdefault(task.source, {"documents": 0, "items": 0})
            mine["documents"] += found["documents"]
            hit = items.setdefault((name, task.source), set())
            hit.update(found["items"])
            mine["items"] = len(hit)
    return report
