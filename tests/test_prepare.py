"""`prepare`: mixtures, waves and epochs, what is dropped, and that a killed run ends with the same bytes."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest

from freda.data.config import CorpusConfig, DocumentsConfig, PrepareConfig, PrepareFile, SourceConfig, load_prepare
from freda.data.estimate import duration, estimate, plan_lines
from freda.data.prepare import budgets, next_wave, prepare, prepare_corpus
from freda.data.shards import Documents, Manifest, ShardInfo
from freda.data.synthetic import problems_of
from freda.data.tasks import Outcome, Task
from freda.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from freda.errors import FredaError
from tests.helpers import WORDS, contents, freda_on_ranks, mixture, mixture_file, sentence, texts, write_source

ROOT = Path(__file__).parent.parent


# -- the whole -------------------------------------------------------------------------------------------------------


def test_every_document_is_written_once(root: Path) -> None:
    manifest = prepare(mixture(), root / "out", root=root)
    written = texts(root / "out") + texts(root / "out", "validation")
    lines = [line for name in ("one", "two") for line in (root / f"{name}.jsonl").read_text().splitlines()]
    expected = [json.loads(line)["text"] for line in lines]
    assert sorted(written) == sorted(expected)
    assert 10 < manifest.splits["validation"].documents < 60
    assert manifest.dropped == {} and manifest.contamination == {}
    names = {path.name for path in (root / "out").iterdir()}
    shards = {f"{split}-{source}-{part:05d}.{kind}" for split in ("train", "validation") for source in ("one", "two")
              for part in range(3) for kind in ("bin", "idx")}  # fmt: skip
    assert names == shards | {"manifest.json", "tokenizer.json", "tokenizer_config.json"}, "records are gone"
    documents = Documents(root / "out", "train", manifest)
    ids = documents.document(0)
    assert len(ids) % 8 == 0 and ids[-1] == manifest.eos_id


def test_the_embedded_corpus(tmp_path: Path) -> None:
    corpus = CorpusConfig(problems=200, validation_problems=20, max_number=30, vocab_size=300)
    manifest = prepare_corpus(corpus, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    for split, count in (("train", 200), ("validation", 20)):
        problems = problems_of(corpus, split)  # type: ignore[arg-type]
        assert texts(folder, split) == [next(problems).document for _ in range(count)]
    tokenizer = Tokenizer.load(folder)
    seen = (manifest.tokenizer, manifest.eos_id, manifest.blank_id, manifest.align)
    assert seen == (tokenizer.fingerprint, tokenizer.eos_id, tokenizer.blank_id, 8)
    assert Manifest.read(folder) == manifest
    none = prepare_corpus(dataclasses.replace(corpus, validation_problems=0), tmp_path / "none")
    assert none.splits["validation"].documents == 0
    shipped = Path(__file__).parent.parent / "configs" / "corpus-sums.toml"
    assert load_prepare(shipped).corpus == CorpusConfig()


def test_the_same_bytes_whatever_the_number_of_processes(root: Path) -> None:
    config = mixture(tokens=6000)
    prepare(config, root / "one process", root=root)
    prepare(config, root / "two processes", root=root, workers=2)
    assert contents(root / "one process") == contents(root / "two processes")
    prepare(mixture(tokens=6000, seed=7), root / "other", root=root)
    assert contents(root / "one process") != contents(root / "other")
    assert not multiprocessing.active_children()


def test_on_two_ranks(root: Path) -> None:
    """The engine for many machines, here with two processes on one."""
    file = mixture_file(root, parts=3, tokens=6000)
    command = ["prepare", file, root / "many", "--data", root, "--workers", "1"]
    said = freda_on_ranks(*command, world=2, folder=root / "said")
    assert [one.code for one in said] == [0, 0], said
    assert "".join(one.out for one in said).count("train: ") == 1, "one process speaks"
    prepare(mixture(tokens=6000), root / "alone", root=root)
    assert contents(root / "many") == contents(root / "alone")


# -- mixture by tokens -----------------------------------------------------------------------------------------------


def test_the_mixture_is_by_tokens(root: Path) -> None:
    write_source(root / "two.jsonl", 400, words=3)  # short documents: shares of documents would differ
    config = mixture(tokens=6000, validation_share=0.0)
    assert budgets(6000, config.source) == {"one": 4500, "two": 1500}
    assert budgets(1, config.source) == {"one": 1, "two": 1} and budgets(0, config.source) == {"one": 0, "two": 0}
    manifest = prepare(config, root / "out", root=root)
    tokens = {
        name: sum(s.tokens for s in manifest.splits["train"].shards if s.source == name) for name in ("one", "two")
    }
    longest = 150  # each of three parts may exceed its share by less than a document
    assert 4500 <= tokens["one"] < 4500 + 3 * longest and 1500 <= tokens["two"] < 1500 + 3 * longest


def test_a_stream_that_runs_dry_stops_the_run_or_is_repeated(root: Path) -> None:
    config = mixture(tokens=60_000, validation_share=0.0)
    with pytest.raises(
        FredaError, match=r"source.one ran dry: [\d,]+ of 45,000 tokens after 1 epochs; (\d) epochs would do"
    ):
        prepare(config, root / "out", root=root)
    kept = {path.name: path.stat().st_mtime_ns for path in (root / "out").glob("train-*")}
    assert kept
    more = {name: dataclasses.replace(source, epochs=9) for name, source in config.source.items()}
    manifest = prepare(dataclasses.replace(config, source=more), root / "out", root=root)
    assert {name: (root / "out" / name).stat().st_mtime_ns for name in kept} == kept, "what was done is not done again"
    assert manifest.splits["train"].tokens >= 60_000
    written = texts(root / "out")
    assert max(written.count(text) for text in written) > 1


def test_held_out_documents_are_not_trained_on_in_later_epochs(root: Path) -> None:
    config = mixture(tokens=60_000)
    more = {name: dataclasses.replace(source, epochs=9) for name, source in config.source.items()}
    prepare(dataclasses.replace(config, source=more), root / "out", root=root)
    held_out = texts(root / "out", "validation")
    assert held_out and not set(held_out) & set(texts(root / "out"))
    assert len(held_out) == len(set(held_out))


def outcome(tokens: int, read: int, exhausted: bool) -> Outcome:
    return Outcome("", read, exhausted, {"train": ShardInfo("", "s", 1, tokens, "", "")} if tokens else {})


def test_waves() -> None:
    """What is planned follows from what is done: shares, then gaps, then another epoch, then dry."""
    first, word = next_wave("s", 100, 2, 3, [])
    assert first == [Task("s", part, 0, 0, 0, 34) for part in range(3)] and not word
    wave = list(zip(first, [outcome(40, 5, False), outcome(10, 2, True), outcome(34, 9, False)], strict=True))
    second, _ = next_wave("s", 100, 2, 3, wave)
    assert second == [Task("s", 0, 1, 0, 5, 8), Task("s", 2, 1, 0, 9, 8)], "the others fill the gap, where they were"
    dry = list(zip(second, [outcome(3, 6, True), outcome(2, 10, True)], strict=True))
    third, _ = next_wave("s", 100, 2, 3, [*wave, *dry])
    assert third == [Task("s", part, 2, 1, 0, 4) for part in range(3)], "another epoch, from the start"
    last = list(zip(third, [outcome(1, 1, True)] * 3, strict=True))
    assert next_wave("s", 100, 2, 3, [*wave, *dry, *last]) == (
        [],
        "source.s ran dry: 92 of 100 tokens after 2 epochs; 3 epochs would do",
    )
    assert next_wave("s", 89, 2, 3, [*wave, *dry]) == ([], ""), "enough"
    assert next_wave("s", 0, 9, 3, wave) == ([], ""), "0 takes all there is, once"
    nothing = list(zip(first, [outcome(0, 4, True)] * 3, strict=True))
    assert next_wave("s", 100, 9, 3, nothing)[1] == "source.s ran dry: 0 of 100 tokens after 1 epochs"


# -- what is dropped -------------------------------------------------------------------------------------------------


def test_nothing_is_dropped_without_a_word(root: Path) -> None:
    lines = ['{"text": ""}', '{"text": " \\n "}', "{broken", '{"text": "<|blank|> here"}', '{"text": "\\ud800"}']
    lines.append(json.dumps({"text": "long " * 100}))
    with open(root / "one.jsonl", "a") as file:
        file.write("\n".join(lines) + "\n")
    manifest = prepare(mixture(longest=400), root / "out", root=root)
    expected = {"empty": 2, "not JSON": 1, "not Unicode": 1, "spells <|blank|>": 1, "too long": 1}
    assert manifest.dropped == {"one": expected}
    total = sum(split.documents for split in manifest.splits.values())
    assert total == 300
    where = {example["reason"]: example["where"] for example in manifest.examples}
    assert where["not JSON"].endswith("one.jsonl:153") and len(manifest.examples) == 6


def test_too_many_broken_records_stop_the_run(root: Path) -> None:
    config = mixture()
    wrong = dataclasses.replace(config, source={"one": SourceConfig(path="one.jsonl", field="body")})
    with pytest.raises(
        FredaError, match=r"source.one: 50 of 50 records cannot be read, first .*one.jsonl:1: no field body"
    ):
        prepare(wrong, root / "out", root=root)
    with open(root / "one.jsonl", "a") as file:
        file.write("{broken\n" * 30)
    with pytest.raises(FredaError, match=r"1\d of 6\d records .*one.jsonl:151: not JSON .*raise prepare.broken_share"):
        prepare(config, root / "more", root=root)
    assert prepare(mixture(broken_share=0.3), root / "more", root=root).dropped == {"one": {"not JSON": 30}}


def test_decontamination_is_counted_by_benchmark_and_source(root: Path) -> None:
    generator = random.Random(5)
    questions = [sentence(generator, 20) for _ in range(4)]
    (root / "exam.jsonl").write_text("\n".join(json.dumps({"question": q}) for q in [*questions, "too short"]))
    with open(root / "one.jsonl", "a") as file:
        for text in (f"Before. {questions[0].upper()} After.", questions[1], questions[1] + " again"):
            file.write(json.dumps({"text": text}) + "\n")
    exam = DocumentsConfig(path="exam.jsonl", field="question")
    config = dataclasses.replace(mixture(), benchmark={"exam": exam})
    manifest = prepare(config, root / "out", root=root)
    assert manifest.dropped == {"one": {"contaminated by exam": 3}}
    found = manifest.contamination["exam"]
    assert (found["items"], found["indexed"], found["too_short"]) == (5, 4, 1)
    assert found["sources"] == {"one": {"documents": 3, "items": 2}}
    assert any("item 0: " in example["detail"] for example in manifest.examples)
    assert not any(question in text for question in questions for text in texts(root / "out"))
    (root / "exam.jsonl").write_text("{broken")
    with pytest.raises(FredaError, match=r"benchmark.exam: .*exam.jsonl:1: not JSON"):
        prepare(config, root / "again", root=root)


def test_tokens_of_datatrove_become_shards(root: Path) -> None:
    tokenizer = train_tokenizer(WORDS, 300)
    tokenizer.save(root / "tokenizer")
    bodies = [tokenizer.encode(text) for text in ("alpha beta", "river stone cloud")]
    ids = [token for body in bodies for token in [*body, tokenizer.eos_id]]
    np.array(ids, "<u4").tofile(root / "a.ds")
    np.cumsum([len(body) + 1 for body in bodies]).astype("<u8").tofile(root / "a.ds.index")
    config = PrepareFile(
        prepare=PrepareConfig(tokenizer="tokenizer", parts=1, validation_share=0.0),
        source={"ready": SourceConfig(kind="datatrove", path="a.ds")},
    )
    manifest = prepare(config, root / "out", root=root)
    assert texts(root / "out") == ["alpha beta", "river stone cloud"]
    assert manifest.splits["train"].tokens == sum(len(body) // 8 * 8 + 8 for body in bodies)
    np.array([400] * len(ids), "<u4").tofile(root / "a.ds")
    with pytest.raises(FredaError, match="holds id 400, the tokenizer ends at"):
        prepare(config, root / "other", root=root)


# -- validation documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("documents", "tokens"), [(2, 0), (20, 0), (20, 300)])
def test_a_small_corpus_holds_out_one_document(root: Path, documents: int, tokens: int) -> None:
    write_source(root / "one.jsonl", documents)
    settings = PrepareConfig(vocab_size=300, parts=2, validation_share=1e-6, tokens=tokens)
    config = PrepareFile(prepare=settings, source={"one": SourceConfig(path="one.jsonl", epochs=5)})
    notes: list[str] = []
    manifest = prepare(config, root / "out", root=root, note=notes.append)
    held_out = texts(root / "out", "validation")
    assert len(held_out) == 1 and held_out[0] not in texts(root / "out")
    assert tokens or manifest.splits["train"].documents == documents - 1
    assert any("validation_share" in note for note in notes)
    assert prepare(config, root / "out", root=root) == manifest, "the folder is still that of the config"
    shared = prepare(config, root / "shared", root=root, workers=2)
    assert shared == manifest and contents(root / "shared") == contents(root / "out")


def test_no_document_is_held_out_where_there_is_one_or_none_is_wanted(root: Path) -> None:
    assert prepare(mixture(validation_share=0.0), root / "out", root=root).splits["validation"].documents == 0
    write_source(root / "one.jsonl", 1)
    settings = PrepareConfig(vocab_size=300, validation_share=1e-6)
    single = PrepareFile(prepare=settings, source={"one": SourceConfig(path="one.jsonl")})
    manifest = prepare(single, root / "single", root=root)
    assert [manifest.splits[split].documents for split in ("train", "validation")] == [1, 0]


def test_another_corpus_can_be_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(mixture(parts=5), root / "out", root=root)
    with pytest.raises(FredaError, match=r"prepare.parts 5 \(now 3\).*--replace"):
        prepare(mixture(), root / "out", root=root)
    with monkeypatch.context() as patch:
        patch.setattr("freda.data.prepare._provide_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(mixture(), root / "out", root=root, replace_other=True)
    prepare(mixture(), root / "out", root=root)  # what was interrupted is resumed, without being asked again
    prepare(mixture(), root / "fresh", root=root)
    assert contents(root / "out") == contents(root / "fresh")


# -- tokenizers and the plan -----------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_checkpoint_gets_blank(tmp_path: Path) -> None:
    import lzma

    own = train_tokenizer(WORDS, 300)
    own.save(tmp_path / "own")
    values = json.loads((tmp_path / "own" / "tokenizer.json").read_text())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] != "<|blank|>"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json.xz").write_bytes(lzma.compress(json.dumps(values).encode()))
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    opened = open_tokenizer(tmp_path / "other")
    assert (opened.blank_id, opened.eos_id) == (own.blank_id, own.eos_id)
    assert open_tokenizer(tmp_path / "own").fingerprint == own.fingerprint
    with pytest.raises(FredaError, match="there is no folder"):
        open_tokenizer(tmp_path / "nowhere")
    (tmp_path / "other" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FredaError, match=r"other: tokenizer_config.json names no eos_token"):
        open_tokenizer(tmp_path / "other")


def test_the_plan_is_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large source only the beginning is read; other fields of its records do not count as text."""
    lines = [json.dumps({"text": sentence(random.Random(n), 40), "url": "u" * 1500}) for n in range(600)]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    source = {"one": SourceConfig(path="one.jsonl")}
    config = PrepareFile(prepare=PrepareConfig(vocab_size=300, validation_share=0.0), source=source)
    whole = prepare(config, tmp_path / "out", root=tmp_path).splits["train"].tokens
    monkeypatch.setattr("freda.data.estimate.PROBED", 20_000)
    found = estimate(config, tmp_path)[0][0]
    assert found.tokens == pytest.approx(whole, rel=0.05)


def test_the_plan_says_what_would_be_done(root: Path) -> None:
    exam = DocumentsConfig(path="two.jsonl")
    config = dataclasses.replace(mixture(tokens=60_000), benchmark={"exam": exam})
    lines = "\n".join(plan_lines(config, root, 2))
    assert "60,000 tokens" in lines and "with 2 processes" in lines and "encoding with" in lines
    assert "would run dry: one, with epochs=1" in lines
    assert "keeps out exam: " in lines
    assert not (root / "out").exists()
    with open(root / "one.jsonl", "a") as file:
        file.write('{"text": "\\ud800"}\n{"text": "<|blank|>"}\n')
    (root / "two.jsonl").write_text("")
    assert "two " in "\n".join(plan_lines(mixture(), root, 1)), "what a run would drop does not stop a plan"
    assert [duration(s) for s in (5, 600, 9000)] == ["5 s", "10 min", "2.5 h"]


def test_the_plan_of_generated_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("freda.data.estimate.PROBED", 20_000)
    corpus = CorpusConfig(problems=2000, validation_problems=10, vocab_size=300)
    found = estimate(PrepareFile(corpus=corpus), Path())[0][0]
    whole = prepare_corpus(corpus, tmp_path / "out").splits["train"].tokens
    assert found.tokens == found.wanted == pytest.approx(whole, rel=0.05) and found.files == 0
    line = plan_lines(PrepareFile(corpus=corpus), Path(), 1)[1]
    assert "unknown" not in line and "?" not in line and line.split()[:3] == ["sums", "-", "-"]


def test_a_missing_tokenizer_names_the_folder_of_relative_paths(root: Path) -> None:
    with pytest.raises(FredaError, match=r"prepare.tokenizer: .*nowhere.*--data"):
        prepare(mixture(tokenizer="nowhere"), root / "out", root=root)


def test_an_empty_benchmark_is_refused(root: Path, tmp_path: Path) -> None:
    """It would keep nothing out, and nobody would notice."""
    (root / "asked.jsonl").write_text("")
    asked = {"asked": DocumentsConfig(path="asked.jsonl", field="question")}
    with pytest.raises(FredaError, match=r"benchmark.asked holds no text \(asked.jsonl\); name its file"):
        prepare(dataclasses.replace(mixture(), benchmark=asked), tmp_path / "out", root=root, workers=1)
