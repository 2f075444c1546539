"""Where texts come from: files of many kinds, Hugging Face datasets and generators, all as one stream of records.

A source is a sequence of records, always in the same order. `read` gives one part of it: record i belongs to part
i mod parts, or, where there are enough files, file i does. Parts are independent of each other, so that any number of
processes or machines can share a source. What cannot be read is yielded as `Broken`, with its place and the reason:
nothing is lost silently.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freda.data.config import DocumentsConfig, GeneratorConfig, PrepareFile
from freda.data.files import File, find, open_file
from freda.data.mini import GENERATORS
from freda.errors import FredaError, optional, require
from freda.files import parse_json, read_text

MOST_ID = np.iinfo(np.int32).max  # larger ids, which no tokenizer has, become this one and are refused
PATIENCE = 10_000  # records looked at to find a few texts: with a wrong field there is none in a terabyte
LONGEST_LINE = 1 << 28  # bytes; a file without line breaks must not fill the memory


class Document(NamedTuple):
    """One text, or its ids where the source holds tokens."""

    where: str
    text: str
    ids: NDArray[np.int32] | None = None
    split: str = ""  # train or validation where the source itself says so
    size: int = 0  # bytes of the record in its file, where that is known


class Broken(NamedTuple):
    """A record that cannot be used as a document."""

    where: str
    reason: str  # a few words, the same for all such records
    detail: str = ""


Record = Document | Broken
Pending = Callable[[], Record]  # a record not yet parsed: what belongs to other parts never is


class Source(NamedTuple):
    """A section of the prepare file, with what it needs to be read."""

    config: DocumentsConfig
    root: Path = Path()  # where relative paths start
    generator: GeneratorConfig | None = None  # settings of the generator, for kinds that are generated

    def files(self) -> list[File]:
        """The files it consists of; none for datasets of the Hub and generated documents."""
        return [] if self.config.kind in ("huggingface", *GENERATORS) else find(self.config, self.root)


def sources_of(file: PrepareFile, tables: Mapping[str, DocumentsConfig], root: Path) -> dict[str, Source]:
    """The `[source.NAME]` or `[benchmark.NAME]` tables of a prepare file, ready to be read."""
    settings = {kind: getattr(file, generator.section) for kind, generator in GENERATORS.items()}
    return {name: Source(table, root, settings.get(table.kind)) for name, table in tables.items()}


def read(source: Source, *, part: int = 0, parts: int = 1, seed: int | None = None) -> Iterator[Record]:
    """The records of one part. With a `seed` files come in a random order, so that the beginning of a folder is a
    sample of it. Records keep their order within a file."""
    config = source.config
    if config.kind == "huggingface":
        return _hugging_face(config, part, parts)
    if generator := GENERATORS.get(config.kind):
        made = generator.documents(source.generator, part, parts)
        return (Document(f"{config.kind} {number} of {split}", text, split=split) for split, number, text in made)
    files = source.files()
    if seed is not None and not files[0].member:  # an archive is read from front to end: going back unpacks it again
        random.Random(seed).shuffle(files)
    chosen = files[part::parts] if len(files) >= parts else files
    select, reader = Field(config.field), READERS[config.kind]
    pending = itertools.chain.from_iterable(reader(file, select) for file in chosen)
    return (parse() for parse in (pending if len(files) >= parts else itertools.islice(pending, part, None, parts)))


def first_texts(
    sources: Sequence[Source], most: int | None, characters: float, *, seed: int | None = None, held_out: bool = True
) -> Iterator[str]:
    """Texts of all sources in turn until there are `most` of them, or `characters` in all; few if most are unusable."""
    patience = None if most is None else PATIENCE
    streams = [itertools.islice(read(source, seed=seed), patience) for source in sources]
    records = itertools.chain.from_iterable(itertools.zip_longest(*streams))
    documents = (record for record in records if isinstance(record, Document) and is_unicode(record.text))
    texts = (one.text for one in documents if one.text.strip() and (held_out or one.split != "validation"))
    for text in itertools.islice(texts, most):
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def _json_lines(file: File, select: Field) -> Iterator[Pending]:
    def parse(number: int, line: bytes) -> Record:
        where = f"{file}:{number}"
        if len(line) > LONGEST_LINE:
            return Broken(where, "line too long", f"more than {LONGEST_LINE} bytes")
        try:
            values = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            return Broken(where, "not UTF-8", str(error))
        except ValueError as error:
            return Broken(where, "not JSON", str(error))
        if not isinstance(values, dict):
            return Broken(where, "not a JSON object")
        return select(where, values, len(line))

    with open_file(file) as stream:
        for number in itertools.count(1):
            line = stream.readline(LONGEST_LINE + 1)
            if not line:
                return
            if not line.isspace():
                yield functools.partial(parse, number, line)
            while len(line) > LONGEST_LINE and not line.endswith(b"\n"):  # skip the rest of it
                line = stream.readline(LONGEST_LINE + 1)


def _table(file: File, select: Field) -> Iterator[Pending]:
    """Rows of CSV or TSV. A field that is a number means a column of a table without header."""
    options: dict[str, Any] = {}
    if ".tsv" in file.name:
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}  # in TSV " is a character

    def parse(number: int, header: list[str] | None, row: list[str]) -> Record:
        where = f"{file}:{number}"
        if not "".join(row).isascii() and any("\udc80" <= c <= "\udcff" for value in row for c in value):
            return Broken(where, "not UTF-8")
        names = header or [str(column) for column in range(len(row))]
        size = sum(len(value.encode("utf-8", "replace")) + 1 for value in row)
        return select(where, dict(zip(names, row, strict=False)), size)

    with open_file(file) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        csv.field_size_limit(LONGEST_LINE)
        rows = csv.reader(text, **options)
        header = None if all(name.isdigit() for name in select.names) else next(rows, None)
        try:
            for row in filter(None, rows):
                yield functools.partial(parse, rows.line_num, header, row)
        except csv.Error as error:
            where = f"{file}:{rows.line_num}"
            raise FredaError(f"{where} is not a line of a table ({error}); fix it or exclude the file") from None


def _parquet(file: File, select: Field) -> Iterator[Pending]:
    try:
        table = optional("pyarrow.parquet", "data").ParquetFile(file.path)
        names, wanted = table.schema_arrow.names, {name.split(".")[0] for name in select.names}
        batches = table.iter_batches(batch_size=256, columns=sorted(wanted) if wanted <= {*names} else names)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, values in enumerate(rows, start=1):
            yield functools.partial(select, f"{file}:{number}", values)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise FredaError(f"{file} is not a readable Parquet file ({error}); get it again") from None


def rows_of(file: File) -> int:
    """Rows of a Parquet file, according to its footer."""
    return int(optional("pyarrow.parquet", "data").ParquetFile(file.path).metadata.num_rows)


def _whole_file(file: File, select: Field) -> Iterator[Pending]:
    def parse() -> Record:
        try:
            with open_file(file) as stream:
                content = stream.read(LONGEST_LINE + 1)
            if len(content) > LONGEST_LINE:
                return Broken(str(file), "file too long", f"more than {LONGEST_LINE} bytes")
            return Document(str(file), content.decode("utf-8"), size=len(content))
        except PermissionError:
            return Broken(str(file), "not readable")
        except UnicodeDecodeError as error:
            return Broken(str(file), "not UTF-8", str(error))

    yield parse


def _datatrove(file: File, select: Field) -> Iterator[Pending]:
    """Token files of datatrove: ids in `.ds`, document ends in `.ds.index`, the width of an id in `.ds.metadata`."""
    index, metadata = (file.path.with_name(file.path.name + suffix) for suffix in (".index", ".metadata"))
    require(index.is_file(), f"{file} has no {index.name} beside it; copy both")
    said = read_text(metadata, errors="replace") if metadata.is_file() else ""
    width, size = 2 if said.split("\n")[0].rpartition("|")[2] == "2" else 4, file.path.stat().st_size
    require(size % width == 0, f"{file} has {size} bytes, no multiple of {width}; copy it again")
    ids = np.memmap(file.path, f"<u{width}", "r") if size else np.empty(0, f"<u{width}")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    last = int(ends[-1]) if len(ends) else len(ids)
    require(last == len(ids), f"{file} has {len(ids)} tokens, its index ends at {last}; copy both again")
    increase = bool((np.diff(ends, prepend=0) > 0).all())
    require(increase, f"the ends of documents in {index} do not increase; copy both again")

    def parse(number: int) -> Record:
        begin = int(ends[number - 1]) if number else 0
        own = ids[begin : int(ends[number])].clip(max=MOST_ID).astype(np.int32)
        return Document(f"{file}:{number + 1}", "", own, size=width * len(own))

    for number in range(len(ends)):
        yield functools.partial(parse, number)


READERS = {"jsonl": _json_lines, "table": _table, "parquet": _parquet, "datatrove": _datatrove}
READERS |= {"text": _whole_file, "code": _whole_file}


def _hugging_face(config: DocumentsConfig, part: int, parts: int) -> Iterator[Record]:
    """Stream a dataset of the Hugging Face Hub, or a folder that `datasets` can read. Files are distributed over the
    parts. Where there are more parts than files, parts take turns with the examples."""
    datasets, select = optional("datasets", "data"), Field(config.field)
    title = "/".join(name for name in (config.path, config.config, config.split) if name)
    try:
        options = {"split": config.split, "revision": config.revision or None, "streaming": True}
        stream = datasets.load_dataset(config.path, config.config or None, **options)
        files = min(parts, stream.num_shards)
        own = stream.shard(num_shards=files, index=part % files)
        sharing = len(range(part % files, parts, files))
        for number, values in enumerate(itertools.islice(own, part // files, None, sharing)):
            yield select(f"{title} part {part} of {parts}:{number + 1}", values)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise FredaError(f"cannot read the dataset {title}: {error}") from None


def newest_commit(dataset: str) -> str:
    """The newest commit of a dataset on the Hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(dataset).sha)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise FredaError(f"cannot find the dataset {dataset} on the Hub ({error}); set its revision, or path") from None


def is_unicode(text: str) -> bool:
    """False for a text with lone surrogates, which JSON can spell and no encoding can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Field:
    """Extracts the text of a record: one field, or a template of several; `a.b` is a field inside a field."""

    def __init__(self, field: str) -> None:
        template = field if "{" in field else f"{{{field}}}"
        try:
            pieces = list(string.Formatter().parse(template))
        except ValueError as error:
            raise FredaError(f"field is {field!r}, which is not a template ({error}); write {{name}}") from None
        plain = not any(name == "" or spec or conversion for _, name, spec, conversion in pieces)
        require(plain, f"field is {field!r}, but a template takes plain {{name}}s only")
        self._pieces = [(literal, name or "") for literal, name, _, _ in pieces]
        self.names = [name for _, name in self._pieces if name]

    def __call__(self, where: str, values: Mapping[str, Any], size: int = 0) -> Record:
        """The document in `values`, or a `Broken` that says what is missing."""
        found = {"": ""}
        for name in self.names:
            value: Any = values
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is None:
                return Broken(where, f"no field {name}", f"it has {', '.join(map(str, values))}")
            parts = value if isinstance(value, list | tuple) else [value]
            if not all(isinstance(part, str | int | float) for part in parts):
                return Broken(where, f"field {name} is not text", f"it is {str(value)[:60]}")
            found[name] = "\n".join(map(str, parts))
        return Document(where, "".join(literal + found[name] for literal, name in self._pieces), size=size)
