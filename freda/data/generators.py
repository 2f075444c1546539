"""Sources that are made and not read: the embedded word problems and the mini suite, by the kind of a source.

For each the section of the config that says what it makes, which the manifest of the shards keeps with the version of
the texts; so an evaluation can ask held-out questions of the very kind that a model has trained on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from freda.data import mini, synthetic
from freda.data.config import CorpusConfig, MadeKind, MiniConfig, PrepareFile
from freda.data.shards import generator_settings
from freda.data.synthetic import Split

Made = Iterator[tuple[Split, int, str]]  # split, number in it, text


class Generator(NamedTuple):
    """One kind of source."""

    section: str  # of the config
    version: int  # of the texts
    documents: Callable[[Any, int, int], Made]  # one part, from the section, the part and their number


def _sums(corpus: CorpusConfig, part: int, parts: int) -> Made:
    """The embedded word problems, training first, then those that are held out."""
    return itertools.islice(_all_sums(corpus), part, None, parts)


def _all_sums(corpus: CorpusConfig) -> Made:
    counts: dict[Split, int] = {"train": corpus.problems, "validation": corpus.validation_problems}
    for split, count in counts.items():
        for number, problem in enumerate(itertools.islice(synthetic.problems_of(corpus, split), count)):
            yield split, number, problem.document


def _mini(kind: mini.MiniKind) -> Generator:
    def documents(config: MiniConfig, part: int, parts: int) -> Made:
        return mini.documents(kind, config, part, parts)

    return Generator(mini.SECTION, mini.VERSION, documents)


GENERATORS: dict[MadeKind, Generator] = {
    "sums": Generator("corpus", synthetic.VERSION, _sums),
    **{kind: _mini(kind) for kind in mini.KINDS},
}


def made(kind: MadeKind, config: PrepareFile, part: int, parts: int) -> Made:
    """One part of a source of that kind."""
    generator = GENERATORS[kind]
    return generator.documents(getattr(config, generator.section), part, parts)


def described(config: PrepareFile) -> dict[str, dict[str, Any]]:
    """The sections that the config's sources are made from, each with the version of its generator."""
    used = [GENERATORS[source.kind] for source in config.source.values() if source.kind in GENERATORS]
    return {
        generator.section: {"generator": generator.version, **dataclasses.asdict(getattr(config, generator.section))}
        for generator in used
    }


def settings_in(folder: Path, kind: MadeKind) -> dict[str, Any]:
    """The section that a folder of shards was made with."""
    return generator_settings(folder, GENERATORS[kind].section, GENERATORS[kind].version)
