"""`prepare`: mixtures, waves and epochs, what is dropped, and that a killed run ends with the same bytes."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freda.data import tasks
from freda.data.config import CorpusConfig, DocumentsConfig, PrepareConfig, PrepareFile, SourceConfig, load_prepare
from freda.data.estimate import duration, estimate, plan_lines
from freda.data.prepare import budgets, next_wave, prepare, prepare_corpus, with_revisions
from freda.data.shards import Documents, Manifest, ShardInfo
from freda.data.synthetic import problems_of
from freda.data.tasks import Outcome, Task, Worker
from freda.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from freda.errors import FredaError

ROOT = Path(__file__).parent.parent
WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "river",
    "stone",
    "cloud",
    "seven",
    "eight",
    "nine",
    "ten",
    "tree",
    "house",
    "walks",
    "talks",
    "sings",
]


def sentence(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(WORDS, k=words)) + "."


def write_source(path: Path, documents: int, seed: int = 0, words: int = 30) -> None:
    generator = random.Random(seed)
    lines = [json.dumps({"text": f"{n} " + sentence(generator, generator.randint(1, words))}) for n in range(documents)]
    path.write_text("\n".join(lines) + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(("one", "two")):
        write_source(tmp_path / f"{name}.jsonl", 150, number)
    return tmp_path


def mixture(**settings: Any) -> PrepareFile:
    values = {"vocab_size": 300, "parts": 3, "validation_share": 0.1, **settings}
    sources = {"one": SourceConfig(path="one.jsonl", share=3.0), "two": SourceConfig(path="two.jsonl", share=1.0)}
    return PrepareFile(prepare=PrepareConfig(**values), source=sources)


def texts(folder: Path, split: str = "train") -> list[str]:
    manifest, tokenizer = Manifest.read(folder), Tokenizer.load(folder)
    documents = Documents(folder, split, manifest)
    return [tokenizer.decode(documents.document(index).tolist()) for index in range(len(documents))]


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


def test_under_torchrun(root: Path) -> None:
    """The engine for many machines, here with two processes on one."""
    (root / "mix.toml").write_text(
        '[prepare]\nvocab_size = 300\nparts = 3\ntokens = 6000\nvalidation_share = 0.1\n'
        '[source.one]\npath = "one.jsonl"\nshare = 3\n[source.two]\npath = "two.jsonl"\n'
    )  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "freda", "prepare"]
    command += [str(root / "mix.toml"), str(root / "many"), "--data", str(root), "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("train: ") == 1, "one process speaks"
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


# -- stopping and going on -------------------------------------------------------------------------------------------


def test_again_does_nothing_and_another_corpus_is_refused(root: Path) -> None:
    config = mixture(tokens=6000)
    manifest = prepare(config, root / "out", root=root)
    stamps = {path.name: path.stat().st_mtime_ns for path in (root / "out").iterdir()}
    assert prepare(config, root / "out", root=root) == manifest
    assert {path.name: path.stat().st_mtime_ns for path in (root / "out").iterdir()} == stamps
    with pytest.raises(FredaError, match=r"another corpus: prepare.tokens 6000 \(now 7000\); choose another"):
        prepare(mixture(tokens=7000), root / "out", root=root)
    write_source(root / "two.jsonl", 10)
    with pytest.raises(FredaError, match=r"another corpus: source.two.bytes \d+ \(now \d+\)"):
        prepare(config, root / "out", root=root)


@pytest.mark.parametrize("kill_after", [1, 3, 5])
def test_a_failed_run_goes_on_with_the_same_bytes(root: Path, kill_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls = mixture(tokens=6000), []
    write = Worker._write

    def failing(self: Worker, task: Task) -> Outcome:
        calls.append(task)
        if len(calls) == kill_after:
            raise KeyboardInterrupt
        return write(self, task)

    monkeypatch.setattr(Worker, "_write", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, root / "killed", root=root)
    with pytest.raises(FredaError, match="half written"):
        Manifest.read(root / "killed")
    begun = len(calls)
    prepare(config, root / "killed", root=root)
    assert not set(calls[begun:]) & set(calls[: kill_after - 1]), "finished tasks are not done again"
    monkeypatch.undo()
    prepare(config, root / "whole", root=root)
    assert contents(root / "killed") == contents(root / "whole")


def test_killed_without_mercy(root: Path) -> None:
    """SIGKILL at random moments; each new run goes on; the end is that of a run left in peace."""
    write_source(root / "one.jsonl", 4000)
    code = (
        "import sys; from pathlib import Path; from tests.test_prepare import mixture; "
        "from freda.data.prepare import prepare; prepare(mixture(parts=6), Path(sys.argv[1]), root=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(root / "killed"), str(root)]
    generator, kills = random.Random(1), 0
    for _ in range(30):
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        try:
            process.wait(generator.uniform(0.3, 1.2) if kills < 4 else 60)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    assert kills and process.returncode == 0
    prepare(mixture(parts=6), root / "whole", root=root)
    assert contents(root / "killed") == contents(root / "whole")


def test_changed_settings_do_not_reuse_what_depends_on_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> Manifest:
        raise KeyboardInterrupt

    for change in ({"align": 16}, {"validation_share": 0.3}, {"longest": 100}):
        with monkeypatch.context() as patch:
            patch.setattr("freda.data.prepare._finish", stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(mixture(), root / "changed", root=root)
        prepare(mixture(**change), root / "changed", root=root)
        prepare(mixture(**change), root / "fresh", root=root)
        assert contents(root / "changed") == contents(root / "fresh"), change
        for name in ("changed", "fresh"):
            subprocess.run(["rm", "-r", str(root / name)], check=True)


def test_a_source_that_changed_meanwhile_is_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> Manifest:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("freda.data.prepare._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(mixture(), root / "out", root=root)
    text = (root / "one.jsonl").read_text()
    time.sleep(0.01)
    (root / "one.jsonl").write_text(text.replace("alpha", "omega"))  # of the same size
    prepare(mixture(), root / "out", root=root)
    assert any("omega" in text for text in texts(root / "out"))


def interrupted(config: PrepareFile, out: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the end."""

    def stop(*_: object) -> Manifest:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("freda.data.prepare._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, out, root=root)


def test_files_beside_ours_stay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale shards go by our own records, not by their names."""
    interrupted(mixture(parts=5), root / "out", root, monkeypatch)
    (root / "out" / "train-notes.txt").write_text("mine")
    prepare(mixture(parts=2), root / "out", root=root)
    names = {path.name for path in (root / "out").iterdir()}
    assert "train-notes.txt" in names and "train-one-00003.bin" not in names


def test_a_failed_try_does_not_leave_records_of_shards_that_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(mixture(), root / "out", root, monkeypatch)
    wrong = {"one": SourceConfig(path="one.jsonl", share=3.0, field="txt"), "two": mixture().source["two"]}
    with pytest.raises(FredaError, match="cannot be read"):
        prepare(dataclasses.replace(mixture(), source=wrong), root / "out", root=root)
    (root / "out" / "train-two-00001.bin").unlink()  # and somebody removes one
    prepare(mixture(), root / "out", root=root)
    prepare(mixture(), root / "whole", root=root)
    assert contents(root / "out") == contents(root / "whole")


def test_a_new_tokenizer_is_learned_when_what_it_is_learned_from_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(mixture(), root / "out", root, monkeypatch)
    assert prepare(mixture(vocab_size=290), root / "out", root=root).blank_id == 289
    interrupted(mixture(), root / "broken", root, monkeypatch)
    (root / "broken" / tasks.WORK / "tokenizer_config.json").write_text("")
    (root / "broken" / tasks.WORK / "tokenizer.key").unlink()
    prepare(mixture(), root / "broken", root=root)


def with_exam(root: Path, question: str) -> PrepareFile:
    (root / "exam.jsonl").write_text(json.dumps({"question": question}))
    exam = DocumentsConfig(path="exam.jsonl", field="question")
    return dataclasses.replace(mixture(), benchmark={"exam": exam})


def test_tasks_depend_on_all_that_changes_their_shards(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(WORDS, 300)
    tokenizer.save(root / "tokenizer")
    named = dataclasses.replace(mixture(), prepare=dataclasses.replace(mixture().prepare, tokenizer="tokenizer"))
    interrupted(named, root / "eos", root, monkeypatch)
    settings = json.loads((root / "tokenizer" / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "a", "stop_tokens": ["a"]}
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    manifest = prepare(named, root / "eos", root=root)
    assert Documents(root / "eos", "train", manifest).document(0)[-1] == manifest.eos_id != tokenizer.eos_id
    interrupted(named, root / "other", root, monkeypatch)
    train_tokenizer([*WORDS, "omega omega"], 300).save(root / "tokenizer")
    again = prepare(named, root / "other", root=root)
    assert again.tokenizer == open_tokenizer(root / "tokenizer").fingerprint
    assert all("\ufffd" not in text for text in texts(root / "other"))
    lines = [json.loads(line)["text"] for line in (root / "one.jsonl").read_text().splitlines()]
    found = next(line for line in lines if len(line.split()) > 14)
    interrupted(with_exam(root, "x" * len(found)), root / "exam", root, monkeypatch)
    time.sleep(0.01)
    assert prepare(with_exam(root, found), root / "exam", root=root).dropped == {"one": {"contaminated by exam": 1}}


def test_what_was_left_by_a_kill_at_the_very_end_is_cleaned_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("freda.data.prepare._clean_up", lambda *_: None)
        prepare(mixture(), root / "out", root=root)
    assert (root / "out" / tasks.WORK).is_dir()
    prepare(mixture(), root / "out", root=root)
    assert not (root / "out" / tasks.WORK).exists()
    (root / "out" / "train-one-00000.bin").write_bytes(b"")
    with pytest.raises(FredaError, match=r"train-one-00000\.bin has 0 bytes"):
        prepare(mixture(), root / "out", root=root)


def test_nothing_useful_in_a_source_is_an_error_and_one_broken_line_is_not(root: Path) -> None:
    (root / "one.jsonl").write_text("\n".join(['{"text": "fine"}'] * 7 + ["{broken"]))
    assert prepare(mixture(parts=8), root / "out", root=root).dropped == {"one": {"not JSON": 1}}
    (root / "one.jsonl").write_text('{"body": "x"}\n' * 3)
    with pytest.raises(FredaError, match=r"one: none of its 3 records can be used, first .*one.jsonl:1: no field"):
        prepare(mixture(parts=8), root / "none", root=root)


def test_dropped_documents_are_counted_once_however_often_they_are_read(root: Path) -> None:
    with open(root / "one.jsonl", "a") as file:
        file.write('{"text": " "}\n')
    config = mixture(tokens=60_000)
    more = {name: dataclasses.replace(source, epochs=9) for name, source in config.source.items()}
    assert prepare(dataclasses.replace(config, source=more), root / "out", root=root).dropped == {"one": {"empty": 1}}


def test_a_part_goes_on_where_it_was(root: Path) -> None:
    """A part of short documents runs dry; the others fill the gap with documents that they have not written yet."""
    generator = random.Random(3)
    lines = [json.dumps({"text": f"{n} " + sentence(generator, 1 if n % 3 == 0 else 40)}) for n in range(60)]
    (root / "two.jsonl").write_text("\n".join(lines))
    config = PrepareFile(
        prepare=PrepareConfig(vocab_size=300, parts=3, validation_share=0.0, tokens=2400),
        source={"two": SourceConfig(path="two.jsonl")},
    )
    manifest = prepare(config, root / "out", root=root)
    assert any(shard.name.endswith("-1") for shard in manifest.splits["train"].shards), "there was a second wave"
    found = texts(root / "out")
    assert len(found) == len(set(found)) and manifest.splits["train"].tokens >= 2400


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled by Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_parent(root: Path, number: signal.Signals) -> None:
    write_source(root / "one.jsonl", 30_000)
    code = (
        "import sys; from pathlib import Path; from tests.test_prepare import mixture; "
        "from freda.data.prepare import prepare\n"
        "if __name__ == '__main__':\n prepare(mixture(), Path(sys.argv[1]), root=Path(sys.argv[2]), workers=2)"
    )
    (root / "run.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(root / "run.py"), str(root / "out"), str(root)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    deadline = time.monotonic() + 60
    while not list((root / "out").glob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    process.wait(30)
    workers = [pid for pid in children if "spawn_main" in command_of(pid)]
    while any("spawn_main" in command_of(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children and not [pid for pid in workers if "spawn_main" in command_of(pid)]


def command_of(pid: str) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state == "Z" else Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_killed_worker_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "__reduce__", lambda self: (os._exit, (1,)), raising=False)
    with pytest.raises(FredaError, match=r"killed.*--workers"):
        prepare(mixture(), root / "out", root=root, workers=2)
    alive = [child.pid for child in multiprocessing.active_children() if "spawn_main" in command_of(str(child.pid))]
    assert not alive  # a child that two threads have waited for may be listed, though it is gone


def test_datasets_of_the_hub_are_pinned(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def newest(name: str) -> str:
        asked.append(name)
        return "abc123"

    monkeypatch.setattr("freda.data.prepare.newest_commit", newest)
    config = PrepareFile(source={"web": SourceConfig(kind="huggingface", path="some/dataset")})
    (root / "out" / tasks.WORK).mkdir(parents=True)
    assert with_revisions(config, root / "out").source["web"].revision == "abc123"
    assert with_revisions(config, root / "out").source["web"].revision == "abc123"
    assert asked == ["some/dataset"], "a run that goes on asks once"
    known = {"source.web": {"revision": "old"}}
    assert with_revisions(config, root / "nowhere", known=known).source["web"].revision == "old"
    local = PrepareFile(source={"web": SourceConfig(kind="huggingface", path=str(root))})
    assert with_revisions(local, root / "out").source["web"].revision == ""


def test_two_processes_on_one_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: object) -> Mapping[str, object]:
        prepare(mixture(), root / "out", root=root)
        raise AssertionError("both write")

    monkeypatch.setattr("freda.data.prepare._all_waves", meet)
    with pytest.raises(FredaError, match=r"another process is writing .*out; wait"):
        prepare(mixture(), root / "out", root=root)


def test_a_full_disk_leaves_what_is_finished(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, count = tasks.ShardWriter.add, [0]

    def full(self: Any, ids: Any) -> None:
        count[0] += 1
        if count[0] == 120:
            raise OSError(28, "No space left on device")
        add(self, ids)

    monkeypatch.setattr(tasks.ShardWriter, "add", full)
    with pytest.raises(FredaError, match=r"No space left on device: .*what is finished is kept"):
        prepare(mixture(), root / "out", root=root)
    assert (root / "out" / tasks.WORK / "one-00000.json").exists()
    prepare(mixture(), root / "out", root=root)
    prepare(mixture(), root / "whole", root=root)
    assert contents(root / "out") == contents(root / "whole")


@pytest.mark.parametrize("names", [["notes.txt"], ["train.bin", "notes.txt"], ["tokenizer.json"], ["work"]])
def test_nothing_of_others_is_overwritten(root: Path, names: list[str]) -> None:
    (root / "out").mkdir()
    for name in names:
        (root / "out" / name).write_text("mine")
    with pytest.raises(FredaError, match=r"is in use .*choose another folder"):
        prepare(mixture(), root / "out", root=root)
    assert contents(root / "out") == {name: b"mine" for name in names}
    with pytest.raises(FredaError, match="is a file; name a folder"):
        prepare(mixture(), root / "one.jsonl", root=root)


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
    assert found.tokens == found.wanted == pytest.approx(whole, rel=0.05) and found.files == -1
    line = plan_lines(PrepareFile(corpus=corpus), Path(), 1)[1]
    assert "unknown" not in line and "?" not in line and line.split()[:3] == ["sums", "-", "-"]


def test_a_missing_tokenizer_names_the_folder_of_relative_paths(root: Path) -> None:
    with pytest.raises(FredaError, match=r"prepare.tokenizer: .*nowhere.*--data"):
        prepare(mixture(tokenizer="nowhere"), root / "out", root=root)
