"""Sources that are generated, not read: the embedded word problems and the mini suite, by the kind of a source.

Each is made from a section of the prepare file. The manifest of the shards keeps that section with the version of the
texts, so that an evaluation can ask held-out questions of the very kind that a model was trained on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from freda.data import mini, synthetic
from freda.data.config import CorpusConfig
from freda.data.shards import generator_settings
from freda.data.synthetic import Split

Made = Iterator[tuple[Split, int, str]]  # split, number within the split, text


class Generator(NamedTuple):
    """How the documents of one kind are made."""

    section: str  # of the prepare file
    version: int  # of the texts
    documents: Callable[[Any, int, int], Made]  # of one part, from (section, part, parts)
    training: str  # the key of the section that counts the training documents


def _sums(corpus: CorpusConfig, part: int, parts: int) -> Made:
    """The embedded word problems, training first, then those held out."""
    counts: dict[Split, int] = {"train": corpus.problems, "validation": corpus.validation_problems}
    whole = (
        (split, number, problem.document)
        for split, count in counts.items()
        for number, problem in enumerate(itertools.islice(synthetic.problems_of(corpus, split), count))
    )
    return itertools.islice(whole, part, None, parts)


GENERATORS: dict[str, Generator] = {
    "sums": Generator(synthetic.SECTION, synthetic.VERSION, _sums, "problems"),
    **{
        kind: Generator(mini.SECTION, mini.VERSION, functools.partial(mini.documents, kind), "documents")
        for kind in mini.KINDS
    },
}


def settings_in(folder: Path, kind: str) -> dict[str, Any]:
    """The section that the documents in a folder of shards were generated from."""
    return generator_settings(folder, GENERATORS[kind].section, GENERATORS[kind].version)
