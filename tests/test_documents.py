"""Sources: every kind of file gives its texts, in parts that make the whole, and what is broken is named."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freda.data import documents
from freda.data.config import CorpusConfig, DocumentsConfig
from freda.data.documents import Broken, Document, Field, Source, read
from freda.data.files import find
from freda.errors import FredaError

TEXTS = [f"text number {number}, größer als {number - 1}" for number in range(11)]


def texts(config: DocumentsConfig, root: Path, part: int = 0, parts: int = 1) -> list[str]:
    found = list(read(Source(config, root), part=part, parts=parts))
    assert all(isinstance(record, Document) for record in found), found
    return [record.text for record in found]  # type: ignore[union-attr]


def json_lines(values: list[str]) -> bytes:
    return "".join(json.dumps({"text": value, "n": 1}) + "\n" for value in values).encode()


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    packed: bytes = zstandard.ZstdCompressor().compress(content)
    return packed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstd,
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_json_lines_packed_or_not(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(PACKERS[suffix](json_lines(TEXTS)))
    assert texts(DocumentsConfig(path=f"a.jsonl{suffix}"), tmp_path) == TEXTS
    assert texts(DocumentsConfig(path="."), tmp_path) == TEXTS, "a folder is searched for files of the kind"


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("files", [1, 4])
def test_parts_make_the_whole(tmp_path: Path, parts: int, files: int) -> None:
    for number in range(files):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines(TEXTS[number::files]))
    found = [texts(DocumentsConfig(path="."), tmp_path, part, parts) for part in range(parts)]
    assert sorted(text for part in found for text in part) == sorted(TEXTS)
    assert found == [texts(DocumentsConfig(path="."), tmp_path, part, parts) for part in range(parts)]


def test_tables(tmp_path: Path) -> None:
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["What, now?", "A\nB", "x"], ["Who?", 'say "hi"', "y"]])
    config = DocumentsConfig(kind="table", path="a.csv", field="{0}|{1}")
    assert texts(config, tmp_path) == ["What, now?|A\nB", 'Who?|say "hi"']
    (tmp_path / "b.tsv").write_text("question\tanswer\n1+1\t2\n2+2\t4\n")
    config = DocumentsConfig(kind="table", path="b.tsv", field="{question}={answer}")
    assert texts(config, tmp_path) == ["1+1=2", "2+2=4"]
    (tmp_path / "c.csv").write_bytes(b"good,1\nb\xffd,2\nshort\n")
    records = list(read(Source(DocumentsConfig(kind="table", path="c.csv", field="{0} {1}"), tmp_path)))
    reasons = [record.reason if isinstance(record, Broken) else record.text for record in records]
    assert reasons == ["good 1", "not UTF-8", "no field 1"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"text": TEXTS, "n": range(11)}), tmp_path / "a.parquet")
    assert texts(DocumentsConfig(kind="parquet", path="a.parquet"), tmp_path, 1, 2) == TEXTS[1::2]
    records = list(read(Source(DocumentsConfig(kind="parquet", path="a.parquet", field="body"), tmp_path)))
    assert records and all(record == Broken(record.where, "no field body", "it has text, n") for record in records)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(FredaError, match=r"b\.parquet is not a readable Parquet file"):
        texts(DocumentsConfig(kind="parquet", path="b.parquet"), tmp_path)


def test_several_frames_and_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(json_lines(TEXTS[:4])) + zstd(json_lines(TEXTS[4:])))
    assert texts(DocumentsConfig(path="a.jsonl.zst"), tmp_path) == TEXTS
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(TEXTS))
    assert texts(DocumentsConfig(path="b.jsonl"), tmp_path) == TEXTS
    (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbftext,n\nfine,1\n")
    assert texts(DocumentsConfig(kind="table", path="c.csv"), tmp_path) == ["fine"]


def test_a_quote_in_tsv_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('"one\tyes\ntwo"\tno\n')
    assert texts(DocumentsConfig(kind="table", path="a.tsv", field="0"), tmp_path) == ['"one', 'two"']


def test_links_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "data")
    assert texts(DocumentsConfig(kind="text", path="data"), tmp_path) == ["a"]


def test_text_files_and_code(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.txt", "x.py", ".hidden/d.txt", "__pycache__/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(DocumentsConfig(kind="text", path="."), tmp_path) == ["a.md", "b.txt", "sub/c.txt"]
    assert texts(DocumentsConfig(kind="code", path="."), tmp_path) == ["x.py"]
    assert texts(DocumentsConfig(kind="text", path=".", files="sub/*"), tmp_path) == ["sub/c.txt"]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    broken = [r for r in read(Source(DocumentsConfig(kind="text", path="."), tmp_path)) if isinstance(r, Broken)]
    assert [(record.where, record.reason) for record in broken] == [(str(tmp_path / "b.txt"), "not UTF-8")]


def test_files_come_in_a_random_order_that_a_seed_fixes(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(name)
    config = DocumentsConfig(kind="text", path=".")
    order = ["".join(r.text for r in read(Source(config, tmp_path), seed=seed)) for seed in (1, 1, 2)]  # type: ignore[union-attr]
    assert order[0] == order[1] != order[2] and sorted(order[0]) == sorted(order[2]) == list("abcdefgh")


@pytest.mark.parametrize("pattern", ["", "*.py"])
def test_the_standard_library_is_a_source(pattern: str) -> None:
    files = find(DocumentsConfig(kind="code", path="stdlib", files=pattern), Path("/nowhere"))
    assert any(file.path.name == "argparse.py" for file in files)
    assert not any("site-packages" in file.path.parts for file in files)


def test_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as tar:
        for name, content in (("x/one_train.jsonl", TEXTS[:3]), ("x/README", []), ("x/two_test.jsonl", TEXTS[3:])):
            data = json_lines(content)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert texts(DocumentsConfig(path="a.tar.xz"), tmp_path) == TEXTS
    assert [r.text for r in read(Source(DocumentsConfig(path="a.tar.xz"), tmp_path), seed=3)] == TEXTS  # type: ignore[union-attr]
    assert texts(DocumentsConfig(path="a.tar.xz", files="*_train.jsonl"), tmp_path) == TEXTS[:3]
    record = next(iter(read(Source(DocumentsConfig(path="a.tar.xz", field="nope"), tmp_path))))
    assert record == Broken(f"{tmp_path}/a.tar.xz!x/one_train.jsonl:1", "no field nope", "it has text, n")


def test_odd_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
        for name, content in (("./x.jsonl", TEXTS[:2]), ("./x.jsonl", TEXTS[2:4])):
            data = json_lines(content)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("y.jsonl")
        link.type, link.linkname = tarfile.LNKTYPE, "./x.jsonl"
        tar.addfile(link)
    assert texts(DocumentsConfig(path="a.tgz"), tmp_path)[:4] == TEXTS[:4], "two members of one name"
    (tmp_path / "my.targets.jsonl").write_bytes(json_lines(TEXTS))
    assert texts(DocumentsConfig(path="my.targets.jsonl"), tmp_path) == TEXTS
    with pytest.raises(FredaError, match="parquet files cannot be read inside an archive; unpack it"):
        texts(DocumentsConfig(kind="parquet", path="a.tgz"), tmp_path)


@pytest.mark.parametrize("width", [2, 4])
def test_token_files_of_datatrove(tmp_path: Path, width: int) -> None:
    np.array([1, 2, 9, 3, 9], f"<u{width}").tofile(tmp_path / "a.ds")
    np.array([3, 5], "<u8").tofile(tmp_path / "a.ds.index")
    (tmp_path / "a.ds.metadata").write_text(f"some/tokenizer|{width}\n5")
    found = list(read(Source(DocumentsConfig(kind="datatrove", path="."), tmp_path)))
    assert [record.ids.tolist() for record in found] == [[1, 2, 9], [3, 9]]  # type: ignore[union-attr]
    np.array([3, 6], "<u8").tofile(tmp_path / "a.ds.index")
    with pytest.raises(FredaError, match="has 5 tokens, its index ends at 6"):
        list(read(Source(DocumentsConfig(kind="datatrove", path="."), tmp_path)))


def test_damaged_token_files_of_datatrove(tmp_path: Path) -> None:
    source = Source(DocumentsConfig(kind="datatrove", path="."), tmp_path)
    np.array([1, 2**32 - 1, 9], "<u4").tofile(tmp_path / "a.ds")
    np.array([3], "<u8").tofile(tmp_path / "a.ds.index")
    assert [int(record.ids.max()) for record in read(source)] == [2**31 - 1], "never negative"  # type: ignore[union-attr]
    for ends in ([2, 1, 3], [2, 2, 3]):
        np.array(ends, "<u8").tofile(tmp_path / "a.ds.index")
        with pytest.raises(FredaError, match="do not increase"):
            list(read(source))


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "a.jsonl")
    (tmp_path / "folder" / "b.jsonl").write_bytes(json_lines(["b"]))
    assert texts(DocumentsConfig(path="folder"), tmp_path) == ["b"]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("a.jsonl")
        link.type, link.linkname = tarfile.LNKTYPE, "nowhere"
        archive.addfile(link)
    with pytest.raises(FredaError, match=r"a\.jsonl is a link to nothing"):
        texts(DocumentsConfig(path="a.tar"), tmp_path)


def test_hugging_face_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines(TEXTS[number::3]))
    config = DocumentsConfig(kind="huggingface", path=str(tmp_path), split="train")
    found = [texts(config, Path(), part, 3) for part in range(3)]
    assert sorted(text for part in found for text in part) == sorted(TEXTS)
    assert all(found)
    more = [texts(config, Path(), part, 7) for part in range(7)]  # more parts than files
    assert sorted(text for part in more for text in part) == sorted(TEXTS) and all(more)
    with pytest.raises(FredaError, match=r"cannot read the dataset .*/nowhere/train"):
        texts(DocumentsConfig(kind="huggingface", path=str(tmp_path / "nowhere")), Path())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    (tmp_path / "a.parquet").write_bytes(b"x")
    for kind, path, name in (
        ("huggingface", "x/y", "datasets"),
        ("jsonl", "a.jsonl.zst", "pyarrow"),
        ("parquet", "a.parquet", "pyarrow"),
    ):
        with pytest.raises(FredaError, match=rf"'{name}'.*pip install 'freda\[data\]'"):
            texts(DocumentsConfig(kind=kind, path=path), tmp_path)  # type: ignore[arg-type]


def test_the_embedded_generator_says_what_is_held_out() -> None:
    source = Source(DocumentsConfig(kind="sums"), generator=CorpusConfig(problems=6, validation_problems=2))
    records = list(read(source))
    assert [record.split for record in records] == ["train"] * 6 + ["validation"] * 2  # type: ignore[union-attr]
    again = [list(read(source, part=part, parts=3)) for part in range(3)]
    assert [again[index % 3][index // 3] for index in range(8)] == records


def _read_lines(folder: Path, content: bytes) -> list[Broken]:
    (folder / "lines.jsonl").write_bytes(content)
    return [r for r in read(Source(DocumentsConfig(path="lines.jsonl"), folder)) if isinstance(r, Broken)]


def test_broken_lines_are_named(tmp_path: Path) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert [r.reason for r in _read_lines(tmp_path, deep)] == ["not JSON"]
    lines = [b'{"text": "good"}', b"{broken", b"[1]", b'{"body": "x"}', b'{"text": "\xff"}', b"", b'{"text": null}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b'\n{"text": "no line break at the end"}')
    records = list(read(Source(DocumentsConfig(path="a.jsonl"), tmp_path)))
    seen = [(r.where.rpartition(":")[2], r.reason if isinstance(r, Broken) else r.text) for r in records]
    assert seen == [
        ("1", "good"),
        ("2", "not JSON"),
        ("3", "not a JSON object"),
        ("4", "no field text"),
        ("5", "not UTF-8"),
        ("7", "no field text"),
        ("8", "no line break at the end"),
    ]
    assert records[3].detail == "it has body"  # type: ignore[union-attr]


def test_a_line_that_would_fill_the_memory_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE", 40)
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a", "b" * 200, "c"]))
    (tmp_path / "a.txt").write_text("d" * 41)
    records = list(read(Source(DocumentsConfig(path="a.jsonl"), tmp_path)))
    assert [r.reason if isinstance(r, Broken) else r.text for r in records] == ["a", "line too long", "c"]
    whole = list(read(Source(DocumentsConfig(kind="text", path="a.txt"), tmp_path)))
    assert [record.reason for record in whole] == ["file too long"]  # type: ignore[union-attr]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, suffix: str) -> None:
    whole = PACKERS[suffix](json_lines([text * 50 + str(n) for n, text in enumerate(TEXTS * 20)]))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FredaError, match=rf"a\.jsonl{suffix} is cut short or damaged"):
        list(read(Source(DocumentsConfig(path=f"a.jsonl{suffix}"), tmp_path)))


def test_wrong_places(tmp_path: Path) -> None:
    with pytest.raises(FredaError, match=r"there is no .*nowhere; relative paths start from the folder given"):
        read(Source(DocumentsConfig(path="nowhere"), tmp_path))
    with pytest.raises(FredaError, match=r"holds no file of kind jsonl \(\*.jsonl \*.ndjson\); set files to a pattern"):
        read(Source(DocumentsConfig(path="."), tmp_path))
    for template in ("{open", "{}", "{a!r}", "{a:>9}"):
        with pytest.raises(FredaError, match=r"not a template|plain {name}s only"):
            Field(template)


def test_templates() -> None:
    select = Field("Q: {question.stem}\n{choices}\nA: {n}")
    values = {"question": {"stem": "Who?"}, "choices": ["a", "b"], "n": 3}
    assert select("here", values) == Document("here", "Q: Who?\na\nb\nA: 3")
    nested = {"question": {"stem": [{"role": "user"}]}, "choices": [], "n": 1}
    assert select("here", nested) == Broken("here", "field question.stem is not text", "it is [{'role': 'user'}]")
    assert select("here", {"question": "flat"}) == Broken("here", "no field question.stem", "it has question")
