"""Where texts come from: files of many kinds, Hugging Face datasets, the embedded generator, all as one stream.

A source is a sequence of records, always in the same order. `read` gives one part of it: record i belongs to part
i mod parts, or, where there are files enough, file i does. Parts are independent of each other, so that any number of
processes or machines can share a source. What cannot be read is yielded as `Broken`, with its place and the reason:
nothing is lost without a word.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import fnmatch
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import random
import string
import sysconfig
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freda.config import CorpusConfig, DocumentsConfig
from freda.data import synthetic
from freda.errors import FredaError

SUFFIXES = {  # what a folder or archive is searched for, before .gz and the like
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "table": (".csv", ".tsv"),
    "text": (".txt", ".md", ".rst"),
    "code": (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".sh"),
    "datatrove": (".ds",),
}
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
LONGEST_LINE = 1 << 28  # bytes; a file without line breaks must not fill the memory
CUT_SHORT = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, tarfile.TarError)


class Document(NamedTuple):
    """One text, or its ids where the source holds tokens."""

    where: str
    text: str
    ids: NDArray[np.int32] | None = None
    split: str = ""  # train or validation where the source itself says so


class Broken(NamedTuple):
    """A record that is no document."""

    where: str
    reason: str  # few words, the same for all records of this kind
    detail: str = ""


class File(NamedTuple):
    """A file, or a member of an archive."""

    path: Path
    member: str = ""

    @property
    def name(self) -> str:
        """The name that tells the format: the member's, or its own."""
        return self.member or self.path.name

    def __str__(self) -> str:
        return f"{self.path}!{self.member}" if self.member else str(self.path)


Record = Document | Broken
Pending = Callable[[], Record]  # a record not yet parsed: what belongs to other parts never is


def read(
    config: DocumentsConfig,
    root: Path,
    corpus: CorpusConfig,
    *,
    part: int = 0,
    parts: int = 1,
    seed: int | None = None,
) -> Iterator[Record]:
    """The records of one part. Relative paths start from `root`; `corpus` says what `sums` makes.

    With a `seed` files come in a random order, so that the beginning of a folder is a sample of it. Records keep their
    order within a file.
    """
    if config.kind == "huggingface":
        return _hugging_face(config, part, parts)
    if config.kind == "sums":
        return itertools.islice(_sums(corpus), part, None, parts)
    files = find(config, root)
    if seed is not None:
        random.Random(seed).shuffle(files)
    if len(files) >= parts:
        pending: Iterable[Pending] = itertools.chain.from_iterable(_records(f, config) for f in files[part::parts])
    else:
        whole = itertools.chain.from_iterable(_records(f, config) for f in files)
        pending = itertools.islice(whole, part, None, parts)
    return (parse() for parse in pending)


def find(config: DocumentsConfig, root: Path) -> list[File]:
    """The files of a source, in a fixed order; none is an error."""
    base = Path(sysconfig.get_paths()["stdlib"]) if (config.kind, config.path) == ("code", "stdlib") else None
    base = base or root / Path(config.path).expanduser()
    if not base.exists():
        raise FredaError(f"there is no {base}; relative paths start from the folder given with --data")
    if base.is_file():
        files = _members(base, config) if ".tar" in base.name else [File(base)]
    else:
        wanted = (path for path in _walk(base) if _wanted(path.relative_to(base).as_posix(), config))
        files = [File(path) for path in sorted(wanted, key=lambda p: p.relative_to(base).parts)]
    if not files:
        kinds = config.files or " ".join(f"*{suffix}" for suffix in SUFFIXES[config.kind])
        raise FredaError(f"{base} holds no file of kind {config.kind} ({kinds}); set files to a pattern")
    return files


def _walk(base: Path) -> Iterator[Path]:
    """All files of a folder; hidden ones, caches and installed packages are not meant, and not looked into."""
    for folder, names, files in os.walk(base):
        names[:] = [name for name in names if not _hidden(name)]
        yield from (Path(folder, name) for name in files if not _hidden(name))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name in ("__pycache__", "site-packages")


def _wanted(name: str, config: DocumentsConfig) -> bool:
    """By the pattern of the config, or by the suffix of the kind."""
    if config.files:
        return fnmatch.fnmatch(name, config.files)
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(SUFFIXES[config.kind])


def _members(archive: Path, config: DocumentsConfig) -> list[File]:
    with _told_if_cut_short(archive):
        names = [m.name for m in _archive(archive) if m.isfile() and not any(map(_hidden, m.name.split("/")))]
    return [File(archive, name) for name in names if _wanted(name, config)]


# -- opening files ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _told_if_cut_short(file: object) -> Iterator[None]:
    """A file that ends early or is damaged cannot be counted record by record: it is refused."""
    try:
        yield
    except CUT_SHORT as error:
        raise FredaError(
            f"{file} is cut short or damaged ({error}); get it again, or leave it out with files"
        ) from None


@contextlib.contextmanager
def _open(file: File) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked."""
    opened = _archive(file.path).extractfile(file.member) if file.member else open(file.path, "rb")  # noqa: SIM115
    assert opened is not None, "only plain members are listed"
    with opened as stream, _unpacked(stream, file.name) as unpacked:
        yield unpacked


@functools.lru_cache(maxsize=1)
def _archive(path: Path) -> tarfile.TarFile:
    """An archive stays open while its members are read: each opening would unpack it from the start."""
    return tarfile.open(path)


def _unpacked(stream: IO[bytes], name: str) -> Any:
    if name.endswith(".gz"):
        return gzip.open(stream)
    if name.endswith(".xz"):
        return lzma.open(stream)
    if name.endswith(".bz2"):
        return bz2.open(stream)
    if name.endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise FredaError(f"{name} needs the package zstandard; pip install 'freda[data]'") from None
        return io.BufferedReader(_Chunks(_zstd_chunks(stream, zstandard)))
    return contextlib.nullcontext(stream)


def _zstd_chunks(stream: IO[bytes], zstandard: Any) -> Iterator[bytes]:
    """The unpacked bytes of all frames. The package's own reader takes a file that was cut off for its end."""
    frame = None
    try:
        while chunk := stream.read(1 << 20):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from None
    if frame is not None:
        raise EOFError("the last frame is not complete")


class _Chunks(io.RawIOBase):
    """A stream of what an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, memoryview(b"")

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or as much of it as there is."""
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


# -- one file as records ---------------------------------------------------------------------------------------------


def _records(file: File, config: DocumentsConfig) -> Iterator[Pending]:
    """The records of one file, in order, not yet parsed."""
    readers = {
        "jsonl": _json_lines,
        "table": _table,
        "parquet": _parquet,
        "text": _whole_file,
        "code": _whole_file,
        "datatrove": _datatrove,
    }
    return readers[config.kind](file, config)


def _json_lines(file: File, config: DocumentsConfig) -> Iterator[Pending]:
    select = Field(config.field)

    def parse(number: int, line: bytes) -> Record:
        where = f"{file}:{number}"
        try:
            values = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return Broken(where, "not UTF-8", str(error))
        except ValueError as error:
            return Broken(where, "not JSON", str(error))
        return select(where, values) if isinstance(values, dict) else Broken(where, "not a JSON object")

    for number, line in _lines(file):
        if len(line) > LONGEST_LINE:
            yield functools.partial(Broken, f"{file}:{number}", "line too long", f"more than {LONGEST_LINE} bytes")
        elif not line.isspace():
            yield functools.partial(parse, number, line)


def _lines(file: File) -> Iterator[tuple[int, bytes]]:
    """(number, line) of all lines; of one that is too long only its beginning."""
    with _told_if_cut_short(file), _open(file) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            yield number, line
            while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                line = stream.readline(LONGEST_LINE + 1)


def _table(file: File, config: DocumentsConfig) -> Iterator[Pending]:
    """CSV or TSV. A field that is a number means a column of a table without header."""
    select = Field(config.field)
    headed = not all(name.isdigit() for name in select.names)
    tabs = ".tsv" in file.name
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}  # in TSV " is a character

    def parse(number: int, header: list[str] | None, row: list[str]) -> Record:
        where = f"{file}:{number}"
        if not "".join(row).isascii() and any("\udc80" <= c <= "\udcff" for value in row for c in value):
            return Broken(where, "not UTF-8")
        names = header if header is not None else [str(column) for column in range(len(row))]
        return select(where, dict(zip(names, row, strict=False)))

    with _told_if_cut_short(file), _open(file) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        csv.field_size_limit(LONGEST_LINE)
        rows = csv.reader(text, **options)
        header = next(rows, None) if headed else None
        try:
            for row in rows:
                if row:
                    yield functools.partial(parse, rows.line_num, header, row)
        except csv.Error as error:
            raise FredaError(
                f"{file}:{rows.line_num} is no line of a table ({error}); mend it or leave it out"
            ) from None


def _parquet(file: File, config: DocumentsConfig) -> Iterator[Pending]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise FredaError(f"{file} needs the package pyarrow; pip install 'freda[data]'") from None
    select = Field(config.field)
    try:
        table = parquet.ParquetFile(file.path)
        columns = [name for name in dict.fromkeys(name.split(".")[0] for name in select.names)]
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=[c for c in columns if c in table.schema_arrow.names]):
            for values in batch.to_pylist():
                number += 1
                yield functools.partial(select, f"{file}:{number}", values)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise FredaError(f"{file} is no readable Parquet file ({error}); get it again") from None


def _whole_file(file: File, config: DocumentsConfig) -> Iterator[Pending]:
    def parse() -> Record:
        try:
            with _told_if_cut_short(file), _open(file) as stream:
                content = stream.read(LONGEST_LINE + 1)
        except PermissionError:
            return Broken(str(file), "not readable")
        if len(content) > LONGEST_LINE:
            return Broken(str(file), "file too long", f"more than {LONGEST_LINE} bytes")
        try:
            return Document(str(file), content.decode("utf-8"))
        except UnicodeDecodeError as error:
            return Broken(str(file), "not UTF-8", str(error))

    yield parse


def _datatrove(file: File, config: DocumentsConfig) -> Iterator[Pending]:
    """Token files of datatrove: ids in `.ds`, ends of documents in `.ds.index`, bytes per id in `.ds.metadata`."""
    index, metadata = (file.path.with_name(file.path.name + suffix) for suffix in (".index", ".metadata"))
    if not index.is_file():
        raise FredaError(f"{file} has no {index.name} beside it; copy both")
    width = 4
    if metadata.is_file():
        first = metadata.read_text(encoding="utf-8").split("\n")[0]
        width = int(first.rpartition("|")[2]) if first.rpartition("|")[2] in ("2", "4") else 4
    ids = np.memmap(file.path, "<u2" if width == 2 else "<u4", "r")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    if len(ends) and ends[-1] != len(ids):
        raise FredaError(f"{file} has {len(ids)} tokens, its index ends at {ends[-1]}; copy both again")

    def parse(number: int) -> Record:
        begin = int(ends[number - 1]) if number else 0
        return Document(f"{file}:{number + 1}", "", ids[begin : int(ends[number])].astype(np.int32))

    for number in range(len(ends)):
        yield functools.partial(parse, number)


# -- sources that are no files ---------------------------------------------------------------------------------------


def _hugging_face(config: DocumentsConfig, part: int, parts: int) -> Iterator[Record]:
    """A dataset of the Hugging Face Hub, or a folder that `datasets` can read, streamed."""
    try:
        import datasets
        from datasets.distributed import split_dataset_by_node
    except ImportError:
        raise FredaError(f"the dataset {config.path} needs the package datasets; pip install 'freda[data]'") from None
    select = Field(config.field)
    title = "/".join(name for name in (config.path, config.config, config.split) if name)
    try:
        stream = datasets.load_dataset(
            config.path,
            config.config or None,
            split=config.split,
            revision=config.revision or None,
            streaming=True,
        )
        own = split_dataset_by_node(stream, rank=part, world_size=parts)
        for number, values in enumerate(own):
            yield select(f"{title} part {part} of {parts}:{number + 1}", values)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise FredaError(f"cannot read the dataset {title}: {error}") from None


def _sums(corpus: CorpusConfig) -> Iterator[Document]:
    """The embedded word problems, training first, then those that are held out."""
    counts = {"train": corpus.problems, "validation": corpus.validation_problems}
    for split, count in counts.items():
        made = itertools.islice(synthetic.problems_of(corpus, split), count)  # type: ignore[arg-type]
        for number, problem in enumerate(made):
            yield Document(f"problem {number} of {split}", problem.document, split=split)


def is_unicode(text: str) -> bool:
    """False for a text with lone surrogates, which JSON can spell and no encoding can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Field:
    """Takes the text out of a record: one field, or a template of several; `a.b` looks inside."""

    def __init__(self, field: str) -> None:
        template = field if "{" in field else f"{{{field}}}"
        try:
            self._pieces = [(literal, name) for literal, name, _, _ in string.Formatter().parse(template)]
        except ValueError as error:
            raise FredaError(f"field is {field!r}, which is no template ({error}); write {{name}}") from None
        self.names = [name for _, name in self._pieces if name]

    def __call__(self, where: str, values: Mapping[str, Any]) -> Record:
        """The document in `values`, or what is missing."""
        text = []
        for literal, name in self._pieces:
            text.append(literal)
            if name:
                value: Any = values
                for key in name.split("."):
                    value = value.get(key) if isinstance(value, Mapping) else None
                if value is None:
                    return Broken(where, f"no field {name}", f"it has {', '.join(map(str, values))}")
                text.append("\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
        return Document(where, "".join(text))
