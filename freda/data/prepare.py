"""From texts to a folder of token shards: train a tokenizer, encode, write.

What is written depends on the source alone, byte for byte. A finished folder is left as it is, an interrupted one is
started anew, and a folder that holds anything else is refused: nothing of the user's is overwritten.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freda.config import CorpusConfig
from freda.data import synthetic
from freda.data.shards import MANIFEST, SPLITS, Manifest, Shard, ShardSplit, ShardWriter, SplitInfo, part_name
from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.errors import FredaError

Progress = Callable[[int, int], None]  # (documents written, documents in all)

TOKENIZER_DOCUMENTS = 10_000  # enough to see every word; more would only take longer
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}
SHARD_FILES = {
    name
    for final in (MANIFEST, *(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")))
    for name in (final, part_name(final))
}


@dataclass(frozen=True)
class Source:
    """Where documents come from. Another corpus is another function that returns one."""

    description: dict[str, Any]  # what the texts depend on; kept in the manifest, it tells corpora apart
    counts: Mapping[ShardSplit, int]
    documents: Callable[[ShardSplit], Iterable[str]]  # the same texts each time it is called


def word_problems(config: CorpusConfig) -> Source:
    """The embedded corpus."""
    counts: dict[ShardSplit, int] = {"train": config.problems, "validation": config.validation_problems}

    def documents(split: ShardSplit) -> Iterable[str]:
        made = itertools.islice(synthetic.problems_of(config, split), counts[split])
        return (problem.document for problem in made)

    description = {"kind": "sums", "generator": synthetic.VERSION, **dataclasses.asdict(config)}
    return Source(description, counts, documents)


def prepare(config: CorpusConfig, out: Path, progress: Progress | None = None) -> Manifest:
    """Write the corpus to the folder `out`, unless it is there already."""
    source = word_problems(config)
    if (out / MANIFEST).exists():
        return _finished(out, source)
    _check_leftovers(out)
    tokenizer = train_tokenizer(itertools.islice(source.documents("train"), TOKENIZER_DOCUMENTS), config.vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    return _write(source, tokenizer, config.align, out, progress or (lambda done, total: None))


def _finished(out: Path, source: Source) -> Manifest:
    """The manifest of a folder that holds this very corpus, undamaged."""
    manifest = Manifest.read(out)
    old, new = manifest.source, source.description
    changes = [f"{key} {old.get(key)} (now {new.get(key)})" for key in {**old, **new} if old.get(key) != new.get(key)]
    if changes:
        raise FredaError(f"{out} holds another corpus: {', '.join(changes)}; choose another folder or delete this one")
    for split in manifest.splits:
        Shard(out, split, manifest)
    return manifest


def _check_leftovers(out: Path) -> None:
    """An interrupted run may be overwritten, and nothing else.

    Shard files come first in a run, so a folder with a tokenizer but no shard is not ours: it may be a model.
    """
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise FredaError(f"{existing} is a file; name a folder")
    names = {path.name for path in out.iterdir()} if existing == out else set()
    foreign = names - SHARD_FILES - TOKENIZER_FILES
    if names and (foreign or not names & SHARD_FILES):
        raise FredaError(f"{out} is in use ({min(foreign or names)} is there); choose another folder")


def _write(source: Source, tokenizer: Tokenizer, align: int, out: Path, progress: Progress) -> Manifest:
    """Shards, then the tokenizer, then the manifest that declares them complete."""
    splits: dict[str, SplitInfo] = {}
    done, total = 0, sum(source.counts.values())
    for split in SPLITS:
        with ShardWriter(out, split, eos_id=tokenizer.eos_id, align=align) as writer:
            for text in source.documents(split):
                writer.add(tokenizer.encode(text))
                done += 1
                progress(done, total)
        splits[split] = writer.info()
    tokenizer.save(out)
    manifest = Manifest(
        source=source.description,
        align=align,
        eos_id=tokenizer.eos_id,
        blank_id=tokenizer.blank_id,
        tokenizer=tokenizer.fingerprint,
        splits=splits,
    )
    manifest.write(out)
    return manifest
