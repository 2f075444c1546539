"""`freda chat`: what the model is asked, commands, pipes, drafts."""

from __future__ import annotations

import io
import os
import pty
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import freda
from freda.cli import run
from freda.data.tokenizer import Tokenizer, train_tokenizer
from freda.decode.api import Model
from freda.decode.chat import Chat, messages, talk
from freda.decode.config import DecodeConfig
from freda.errors import FredaError
from freda.folders.model_folder import LoadedModel
from freda.model.config import ModelConfig
from freda.model.parts import Parts
from freda.model.transformer import Transformer
from tests.helpers import FredaProcess, method, save_model

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SHORT = {"max_new_tokens": 8}


def write_model(folder: Path, template: str = "", positions: int = 256) -> Path:
    plain = train_tokenizer(["Q: one and two?\nA: The answer is 3."] * 20, 300)
    tokenizer = Tokenizer(plain.json_text, {**plain.settings, **({"chat_template": template} if template else {})})
    shape = ModelConfig(
        vocab_size=tokenizer.size,
        dim=32,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=16,
        ffn_dim=48,
        max_positions=positions,
    )
    model = Transformer(shape, tokenizer.blank_id)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # weights large enough that every input changes the output
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    save_model(folder, LoadedModel(Parts(model), tokenizer, method(), "test"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat") / "plain")


@pytest.fixture
def model(folder: Path) -> Model:
    return freda.load(folder, device="cpu", max_batch=1)


def lines(*typed: str) -> Iterator[str]:
    left = [*typed]

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return messages(read)


def test_a_message_becomes_a_question(model: Model) -> None:
    for message, prompt in (
        ("How many?", "Q: How many?\nA:"),
        ("Q: How many?\nA:", "Q: How many?\nA:"),
        ("def f(x):", "Q: def f(x):\nA:"),
    ):
        turn = [{"role": "user", "content": message}]
        assert Chat(model).prompt(turn) == (prompt, ()) and Chat(model, raw=True).prompt(turn) == (message, ())
    assert Chat(model).suggestions() == ""


def test_the_manifest_of_a_bundled_model_decides_how_it_is_asked() -> None:
    from freda.data import mini

    chat = Chat(freda.load("mini", device="cpu", max_batch=1, max_length=64))
    for message in ("How many?", 'def f(x):\n    """Add."""', "Walk from A. left, now at"):
        assert chat.prompt([{"role": "user", "content": message}]) == mini.prompt_of(message)
    assert chat.suggestions().count("\n") >= len(mini.KINDS)


def test_lines_become_messages() -> None:
    assert list(lines("one", "", "two\\", "three", "/quit")) == ["one", "two\nthree", "/quit"]
    assert list(lines("a\\")) == ["a"], "the end of the input ends a message too"


def test_answers_are_those_of_generate_and_do_not_hang_together(model: Model) -> None:
    out = io.StringIO()
    talk(Chat(model, DecodeConfig(**SHORT)), lines("one?", "two?", "one?"), out, drafts=False, pause=0)
    wanted = [model.generate(f"Q: {text}?\nA:", **SHORT).text for text in ("one", "two", "one")]  # type: ignore[arg-type]
    assert out.getvalue() == "".join(f"{text}\n" for text in wanted) and wanted[0] != wanted[1]
    raw = io.StringIO()
    talk(Chat(model, DecodeConfig(**SHORT), raw=True), lines("one?"), raw, drafts=False, pause=0)
    assert raw.getvalue() == model.generate("one?", **SHORT).text + "\n" != f"{wanted[0]}\n"  # type: ignore[arg-type]


def test_drafts_are_shown_before_the_text(model: Model) -> None:
    out = io.StringIO()
    talk(Chat(model, DecodeConfig(**SHORT)), lines("one?"), out, drafts=True, pause=0)
    shown = out.getvalue()
    text = model.generate("Q: one?\nA:", **SHORT).text  # type: ignore[arg-type]
    assert shown.startswith("block ") and "pass 1" in shown and shown.endswith(f"\n{text}\n")


def test_an_answer_says_what_it_cost(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    talk(Chat(model, DecodeConfig(**SHORT)), lines("one?"), io.StringIO(), drafts=False, pause=0)
    made = model.generate("Q: one?\nA:", **SHORT)
    said = capsys.readouterr().err
    assert all(word in said for word in (f"{len(made.tokens)} tokens", f"{made.nfe} forwards", f"{made.tpf:.2f}"))


def test_a_system_prompt_needs_a_template(model: Model) -> None:
    with pytest.raises(FredaError, match="--system"):
        Chat(model, system="Be brief.")


def test_commands(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    chat, out = Chat(model, DecodeConfig(**SHORT)), io.StringIO()
    talk(
        chat,
        lines("/set passes=1", "/set threshold=2", "one?", "/help", "/nothing", " Quit", "two?"),
        out,
        drafts=False,
        pause=0,
    )
    assert (chat.decode.passes, chat.decode.threshold) == (1, 2)
    assert out.getvalue() == model.generate("Q: one?\nA:", **SHORT, passes=1, threshold=2.0).text + "\n"  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "/reset" in said and "there is no command /nothing" in said and not chat.command("/quit")
    assert len(chat.turns) == 2 and chat.command("/reset") and not chat.turns


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set", "/set passes=2"),
        ("/set pases=2", "there is no setting 'pases'"),
        ("/set passes=two", "passes is 'two'"),
        ("/set passes=0", "passes is 0; use 1 to"),
        ("x" * 2000, "the limit is 256"),
    ],
)
def test_what_is_wrong_is_told_and_the_next_message_taken(
    model: Model, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    chat, out = Chat(model, DecodeConfig(**SHORT)), io.StringIO()
    talk(chat, lines(line, "one?"), out, drafts=False, pause=0)
    assert message in capsys.readouterr().err
    assert out.getvalue() == model.generate("Q: one?\nA:", **SHORT).text + "\n"  # type: ignore[arg-type]
    assert len(chat.turns) == 2, "what could not be asked was not said"


def test_a_template_gets_the_conversation_without_what_is_too_old(tmp_path: Path) -> None:
    model = freda.load(write_model(tmp_path / "chat", TEMPLATE, positions=96), device="cpu", max_batch=1)
    chat, asked = Chat(model, DecodeConfig(**SHORT)), []
    plain = model.stream

    def stream(prompt: str, **settings: Any) -> Iterator[Any]:
        asked.append(prompt)
        return plain(prompt, **settings)

    model.stream = stream  # type: ignore[method-assign]
    first = "".join(map(str, chat.ask("one?")))
    list(Chat(model, DecodeConfig(**SHORT), system="Be brief.").ask("one?"))
    assert asked.pop() == "[system] Be brief.\n[user] one?\n[assistant]"
    assert asked[0] == "[user] one?\n[assistant]"
    list(chat.ask("two?"))
    assert asked[1] == f"[user] one?\n[assistant] {first}\n[user] two?\n[assistant]"
    for number in range(8):
        list(chat.ask(f"more {number}?"))
    assert asked[-1].endswith("[user] more 7?\n[assistant]") and "one?" not in asked[-1]
    assert asked[-1].startswith("[user] more "), "a question goes with its answer"
    assert len(model.loaded.tokenizer.encode(asked[-1])) + 8 <= 96
    chat.command("/reset")
    list(chat.ask("new?"))
    assert asked[-1] == "[user] new?\n[assistant]"


def test_a_template_that_fails_is_told(tmp_path: Path) -> None:
    model = freda.load(write_model(tmp_path / "bad", "{{ raise_exception('no') }}"), device="cpu", max_batch=1)
    with pytest.raises(FredaError, match="the model's chat template fails"):
        list(Chat(model, DecodeConfig(**SHORT)).ask("one?"))


def test_an_interrupted_answer_leaves_the_conversation(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            if not self.getvalue():
                super().write("x")
                raise KeyboardInterrupt
            return super().write(text)

    chat, out = Chat(model, DecodeConfig(**SHORT)), Broken()
    talk(chat, lines("one?", "two?"), out, drafts=False, pause=0)
    assert "interrupted" in capsys.readouterr().err
    assert [turn["content"] for turn in chat.turns][:1] == ["two?"] and not model.engine.busy


def test_from_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one?\n/reset\ntwo?\n"))
    assert run(["chat", str(folder), "--max-new-tokens", "8", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    model = freda.load(folder, device="cpu", max_batch=1)
    assert shown.out == "".join(model.generate(f"Q: {text}?\nA:", **SHORT).text + "\n" for text in ("one", "two"))  # type: ignore[arg-type]
    assert ">" not in shown.err, "no prompts for a pipe"
    assert run(["chat", "nowhere"]) == 2 and "there is no model nowhere" in capsys.readouterr().err


def test_in_a_terminal(folder: Path, tmp_path: Path) -> None:
    """A prompt, drafts in place and the end by Ctrl-D, in a terminal of our own."""
    controller, terminal = pty.openpty()
    command = ["chat", folder, "--max-new-tokens", "8", "--pause", "0", "--device", "cpu"]
    process = FredaProcess(*command, folder=tmp_path, terminal=os.ttyname(terminal), TERM="xterm")
    shown, sent, deadline = b"", 0, time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([controller], [], [], 0.1)[0]:
            shown += os.read(controller, 65536)
        elif not process.process.is_alive():
            break
        if shown.count(b"> ") > sent and sent < 2:
            os.write(controller, (b"one?\n", b"\x04")[sent])
            sent += 1
    os.close(terminal)
    os.close(controller)
    assert process.wait().code == 0
    text = freda.load(folder, device="cpu", max_batch=1).generate("Q: one?\nA:", **SHORT).text  # type: ignore[arg-type]
    assert b"committed" in shown and b"\x1b[" in shown, "drafts, drawn in place"
    assert " ".join(text.split()) in " ".join(shown.decode().split())
