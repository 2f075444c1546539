"""`prepare` that is interrupted, repeated or changed meanwhile: a killed run ends with the same bytes."""

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

import pytest

from freda.data import tasks
from freda.data.config import DocumentsConfig, PrepareConfig, PrepareFile, SourceConfig
from freda.data.prepare import prepare, with_revisions
from freda.data.shards import Documents, Manifest
from freda.data.tasks import Outcome, Task, Worker
from freda.data.tokenizer import open_tokenizer, train_tokenizer
from freda.errors import FredaError
from tests.helpers import WORDS, contents, mixture, mixture_file, sentence, texts, write_source

ROOT = Path(__file__).parent.parent


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


@pytest.mark.slow
def test_killed_without_mercy(root: Path) -> None:
    """SIGKILL at random moments; each new run goes on; the end is that of a run left in peace."""
    write_source(root / "one.jsonl", 4000)
    code = (
        "import sys; from pathlib import Path; from freda.data.config import load_prepare; "
        "from freda.data.prepare import prepare; "
        "prepare(load_prepare(Path(sys.argv[1])), Path(sys.argv[2]), root=Path(sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, str(mixture_file(root, parts=6)), str(root / "killed"), str(root)]
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled by Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_parent(root: Path, number: signal.Signals) -> None:
    write_source(root / "one.jsonl", 30_000)
    code = (
        "import sys; from pathlib import Path; from freda.data.config import load_prepare\n"
        "from freda.data.prepare import prepare\n"
        "if __name__ == '__main__':\n"
        " prepare(load_prepare(Path(sys.argv[1])), Path(sys.argv[2]), root=Path(sys.argv[3]), workers=2)"
    )
    (root / "run.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(root / "run.py"), str(mixture_file(root, parts=3)), str(root / "out"), str(root)],
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
