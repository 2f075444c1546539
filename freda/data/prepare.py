"""`freda prepare`: documents to token shards, by independent tasks.

    plan the tasks of a wave  →  run them, here in processes or on many machines under torchrun  →  plan the next wave

A source is cut into `parts`; every part first writes its equal share of the source's tokens. Parts that run dry leave a
gap, which the others fill in the next wave; when all are dry, the source is read again, as often as `epochs` allows.
The plan follows from what is done, and what a task writes from its settings: killed at any moment and started again,
the run resumes and ends with the same bytes. A folder that holds anything else is never touched.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from freda.data.config import MADE, CorpusConfig, PrepareConfig, PrepareFile, SourceConfig
from freda.data.decontaminate import Index
from freda.data.documents import first_texts, newest_commit, sources_of
from freda.data.shards import MANIFEST, SPLITS, Documents, Manifest, SplitInfo
from freda.data.tasks import EXAMPLES, WORK, Outcome, Task, Worker, description, fingerprint, stamps
from freda.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from freda.data.workers import Runner, progress, runner, torchrun
from freda.errors import FredaError, require
from freda.files import beside, locked, read_json, write_whole

TOKENIZER_TEXT = (10_000, 30_000_000)  # documents and characters to train a tokenizer on; more would only take longer
Note = Callable[[str], None]
Outcomes = list[tuple[Task, Outcome]]


def prepare_corpus(corpus: CorpusConfig, out: Path) -> Manifest:
    """The embedded word problems alone."""
    return prepare(PrepareFile(corpus=corpus), out)


def prepare(
    file: PrepareFile,
    out: Path,
    *,
    root: Path = Path(),
    workers: int = 1,
    replace_other: bool = False,
    note: Note | None = None,
) -> Manifest:
    """Write the shards of all sources to the folder `out`, unless they are there already.

    Shards of another corpus are an error, or are removed with `replace_other`. With `note` the run says what it does,
    and shows its progress on a terminal.
    """
    file = with_sources(file)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if (out / MANIFEST).exists():
        both = replace_other and world > 1
        require(not both, f"--replace and torchrun cannot be combined; delete {out} first")
        if found := _finished(file, root, out, replace_other=replace_other):
            return found
    _check_leftovers(out)
    with locked(out) if rank == 0 else contextlib.nullcontext():
        if rank == 0:
            (out / WORK).mkdir(exist_ok=True)
            file = with_revisions(file, out)
            _provide_tokenizer(file, root, out)
        with torchrun(file, root, out) if world > 1 else runner(file, root, out, workers) as (worker, run):
            if rank:
                _all_waves(worker.file.source, worker.settings, run)
                return Manifest(description(worker.file, root), 0, 0, 0, "", {})  # rank 0 writes the true one
            if note and any(source.kind not in MADE for source in worker.file.source.values()):
                note(f"tokenizing with {worker.encoder}")
            with progress(out, worker.settings.tokens) if note else contextlib.nullcontext():
                outcomes, held = _all_waves(worker.file.source, worker.settings, run)
            if note and held:
                note(f"prepare.validation_share {worker.settings.validation_share} holds out no document; held out one")
            return _finish(worker, root, outcomes)


def with_sources(file: PrepareFile) -> PrepareFile:
    """A file that names no source means the embedded corpus."""
    if file.source:
        return file
    corpus = file.corpus
    settings = PrepareConfig(vocab_size=corpus.vocab_size, align=corpus.align, parts=1, seed=corpus.seed)
    return replace(file, prepare=settings, source={"sums": SourceConfig(kind="sums")})


def with_revisions(file: PrepareFile, out: Path, known: Mapping[str, Any] | None = None) -> PrepareFile:
    """The file with a commit for every dataset of the Hub that names none, so that a run that is resumed or repeated
    reads the same: from `known` (the description in a manifest), from an interrupted run's notes, or the newest."""
    mark = out / WORK / "revisions.json"
    notes: dict[str, Any] = read_json(mark) if mark.is_file() else {}
    notes |= {key: table["revision"] for key, table in (known or {}).items() if "revision" in table}

    def pinned(section: str, tables: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(tables)
        for name, table in tables.items():
            if table.kind == "huggingface" and not table.revision and not Path(table.path).exists():
                key = f"{section}.{name}"
                notes[key] = notes.get(key) or newest_commit(table.path)
                found[name] = replace(table, revision=notes[key])
        return found

    file = replace(file, source=pinned("source", file.source), benchmark=pinned("benchmark", file.benchmark))
    if notes and known is None:
        write_whole(mark, json.dumps(notes))
    return file


def budgets(tokens: int, sources: Mapping[str, SourceConfig]) -> dict[str, int]:
    """Training tokens of each source; 0 is all, which only `tokens = 0` means, and not a tiny share."""
    whole, least = sum(source.share for source in sources.values()), 1 if tokens else 0
    return {name: max(least, round(tokens * source.share / whole)) for name, source in sources.items()}


def next_wave(source: str, budget: int, epochs: int, parts: int, done: Outcomes) -> tuple[list[Task], str]:
    """The tasks that a source needs next, given its finished ones; or none, with a message if the source ran dry."""
    if not done:
        return [Task(source, part, 0, 0, 0, math.ceil(budget / parts)) for part in range(parts)], ""
    have = sum(outcome.tokens for _, outcome in done)
    if not budget or have >= budget:
        return [], ""
    epoch, wave = done[-1][0].epoch, done[-1][0].wave + 1
    last = {task.part: outcome for task, outcome in done if task.epoch == epoch}
    live = {part: outcome.read for part, outcome in last.items() if not outcome.exhausted}
    if not live:
        useful = any(outcome.tokens for task, outcome in done if task.epoch == epoch)
        if epoch + 1 >= epochs or not useful:
            needed = f"; {math.ceil(budget * (epoch + 1) / have)} epochs would do" if have else ""
            return [], f"source.{source} ran dry: {have:,} of {budget:,} tokens after {epoch + 1} epochs{needed}"
        epoch, live = epoch + 1, dict.fromkeys(range(parts), 0)
    want = math.ceil((budget - have) / len(live))
    return [Task(source, part, wave, epoch, skip, want) for part, skip in sorted(live.items())], ""


def _all_waves(sources: Mapping[str, SourceConfig], settings: PrepareConfig, run: Runner) -> tuple[Outcomes, bool]:
    """Run every source to its budget, and again if a small corpus came out without a validation document: then the one
    is held out that a larger share would hold out first. Returns what all tasks did, and whether they ran again."""
    outcomes = _waves(sources, settings, run, held=0.0)
    splits, least = _splits(outcomes), min((outcome.least_draw for _, outcome in outcomes), default=1.0)
    if not settings.validation_share or splits["validation"].documents or splits["train"].documents < 2 or least == 1:
        return outcomes, False
    return _waves(sources, settings, run, held=math.nextafter(least, 1)), True


def _waves(sources: Mapping[str, SourceConfig], settings: PrepareConfig, run: Runner, held: float) -> Outcomes:
    """Run every source to its budget, all sources side by side."""
    wanted = budgets(settings.tokens, sources)
    done: dict[str, Outcomes] = {name: [] for name in sources}
    while True:
        plans = [next_wave(name, wanted[name], sources[name].epochs, settings.parts, done[name]) for name in sources]
        tasks = [task._replace(held=held) for own, _ in plans for task in own]
        if not tasks:
            break
        for task, outcome in zip(tasks, run(tasks), strict=True):
            done[task.source].append((task, outcome))
        for name, found in done.items():
            _check_useful(name, [outcome for _, outcome in found])
    if dry := [message for _, message in plans if message]:
        advice = "Raise epochs, lower the share or prepare.tokens, or add documents"
        raise FredaError(f"{'; '.join(dry)}. {advice}; what is written is kept for the next run")
    return list(itertools.chain.from_iterable(done.values()))


def _check_useful(source: str, outcomes: Collection[Outcome]) -> None:
    """Stop if nothing of a source can be used, which means that its settings are wrong."""
    examples = [example for outcome in outcomes for example in outcome.examples]
    if examples and not any(outcome.shards for outcome in outcomes):
        count, first = sum(sum(outcome.dropped.values()) for outcome in outcomes), examples[0]
        why = "{where}: {reason} ({detail}); check path, kind and field".format(**first)
        raise FredaError(f"source.{source}: none of its {count} records can be used, first {why}")


def _splits(outcomes: Outcomes) -> dict[str, SplitInfo]:
    return {split: SplitInfo.of([one.shards[split] for _, one in outcomes if split in one.shards]) for split in SPLITS}


def _finished(file: PrepareFile, root: Path, out: Path, *, replace_other: bool) -> Manifest | None:
    """The manifest of a folder that holds this very corpus, undamaged; None if it held another that may be replaced."""
    manifest = Manifest.read(out)
    changes = _changes(manifest, with_revisions(file, out, known=manifest.source), root)
    if changes and replace_other:
        with locked(out):
            (out / WORK).mkdir(exist_ok=True)
            for shard in manifest.shards:
                _, _, task = shard.name.partition("-")
                (out / WORK / f"{task}.begun").touch()  # removed in the end, unless the new corpus has it too
            (out / MANIFEST).unlink()
        return None
    advice = "choose another folder, or replace it with --replace"
    require(not changes, f"{out} holds another corpus: {', '.join(changes)}; {advice}")
    for split in manifest.splits:
        Documents(out, split, manifest)
    if (out / WORK).is_dir() and int(os.environ.get("RANK", "0")) == 0:  # killed while it cleaned up
        with locked(out):
            _clean_up(out, manifest)
    return manifest


def _changes(manifest: Manifest, file: PrepareFile, root: Path) -> list[str]:
    """In what a finished corpus differs from the one that a file describes."""
    both = (manifest.source, description(file, root))
    old, new = ({f"{name}.{key}": value for name, table in one.items() for key, value in table.items()} for one in both)
    if file.prepare.tokenizer:
        tokenizer = named_tokenizer(file.prepare, root)
        old |= {"tokenizer": manifest.tokenizer[:8], "eos_id": manifest.eos_id}
        new |= {"tokenizer": tokenizer.fingerprint[:8], "eos_id": tokenizer.eos_id}
    return [f"{key} {old.get(key)} (now {new.get(key)})" for key in {**old, **new} if old.get(key) != new.get(key)]


def _check_leftovers(out: Path) -> None:
    """Refuse a folder with files in it, unless an interrupted run has left its records there."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    require(existing.is_dir(), f"{existing} is a file; name a folder")
    first = min((path.name for path in out.iterdir()), default="") if existing == out else ""
    ours = not first or (out / WORK).is_dir()
    require(ours, f"{out} is in use ({first} is there); choose another folder")


def _provide_tokenizer(file: PrepareFile, root: Path, out: Path) -> None:
    """Put the tokenizer where all processes of the run find it: the one named, or one trained on the documents."""
    if file.prepare.tokenizer:
        named_tokenizer(file.prepare, root).save(out / WORK)
        return
    sources = list(sources_of(file, file.source, root).values())
    key = fingerprint([description(file, root), [stamps(source) for source in sources]])
    mark = out / WORK / "tokenizer.key"
    if mark.is_file() and mark.read_text(encoding="utf-8") == key:
        return
    mark.unlink(missing_ok=True)
    texts = first_texts(sources, *TOKENIZER_TEXT, seed=file.prepare.seed, held_out=False)
    train_tokenizer(texts, file.prepare.vocab_size).save(out / WORK)
    write_whole(mark, key)


def named_tokenizer(settings: PrepareConfig, root: Path) -> Tokenizer:
    """The tokenizer that `[prepare]` names."""
    folder = root / Path(settings.tokenizer).expanduser()
    advice = "relative paths start from the folder given with --data"
    require(folder.is_dir(), f"prepare.tokenizer: there is no folder {folder}; {advice}")
    return open_tokenizer(folder, settings.eos)


def _finish(worker: Worker, root: Path, outcomes: Outcomes) -> Manifest:
    """Write the tokenizer and then the manifest, which declares the shards complete; remove the records."""
    out, tokenizer = worker.out, worker.tokenizer
    splits = _splits(outcomes)
    advice = "check the sources with freda prepare --plan"
    require(splits["train"].documents > 0, f"no document is left to train on; {advice}")
    first = [item for item in outcomes if item[0].epoch == 0]  # later epochs drop the same
    ids = (worker.settings.align, tokenizer.eos_id, tokenizer.blank_id, tokenizer.fingerprint)
    manifest = Manifest(description(worker.file, root), *ids, splits, **_report(worker.index, first))
    for split in splits:
        Documents(out, split, manifest)  # nobody has changed them since
    tokenizer.save(out)
    manifest.write(out)
    _clean_up(out, manifest)
    return manifest


def _clean_up(out: Path, manifest: Manifest) -> None:
    """Remove what the run needed, and what was begun with other settings: by our own records, and nothing else."""
    kept = {shard.name for shard in manifest.shards}
    begun = {f"{split}-{mark.stem}" for mark in (out / WORK).glob("*.begun") for split in SPLITS}
    for name, suffix in itertools.product(begun - kept, (".bin", ".idx")):
        path = out / f"{name}{suffix}"
        path.unlink(missing_ok=True)
        beside(path).unlink(missing_ok=True)
    shutil.rmtree(out / WORK)


def _report(index: Index | None, outcomes: Outcomes) -> dict[str, Any]:
    """Fields of the manifest: what was dropped from each source and why, with examples, and what was kept out. For
    every benchmark there are its texts, and for every source how many documents hold some of them, and how many."""
    benchmarks = index.benchmarks if index is not None else {}
    contamination: dict[str, Any] = {name: {**info._asdict(), "sources": {}} for name, info in benchmarks.items()}
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    examples: defaultdict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    items: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for task, outcome in outcomes:
        dropped[task.source].update(outcome.dropped)
        for example in outcome.examples:
            examples[task.source, example["reason"]].append(example)
        for name, found in outcome.contaminated.items():
            items[name, task.source].update(found["items"])
            mine = contamination[name]["sources"].setdefault(task.source, {"documents": 0})
            mine |= {"documents": mine["documents"] + found["documents"], "items": len(items[name, task.source])}
    return {
        "dropped": {source: dict(sorted(reasons.items())) for source, reasons in dropped.items() if reasons},
        "examples": [example for some in examples.values() for example in some[:EXAMPLES]],
        "contamination": contamination,
    }
