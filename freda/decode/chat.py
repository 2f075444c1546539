"""`freda chat`: questions and answers in a terminal, with drafts that settle, or from a pipe.

A model whose tokenizer has a chat template gets the whole conversation in it, without its oldest turns if it is longer
than the model is made for. To any other model a message is one question, and what was said before is not part of it;
a model that carries the manifest of its training data gets the question in the form of its training documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from freda.data import mini
from freda.data.tokenizer import Tokenizer
from freda.decode.api import Model, checked
from freda.decode.config import DecodeConfig
from freda.decode.request import Output, Pass
from freda.decode.show import LiveDrafts
from freda.errors import FredaError, note, require
from freda.folders.model_folder import resolve_model_folder
from freda.sections import apply_override, build

HELP = """/reset            forget the conversation
/set passes=2     change a setting: passes, threshold, max_new_tokens, temperature, ...
/help             this text
/quit             leave, as the end of the input does
A line that ends in \\ continues on the next one."""
LEAVE = ("quit", "exit")


class Chat:
    """A conversation with a model. `raw` continues each message as it is."""

    def __init__(
        self,
        model: Model,
        decode: DecodeConfig = DecodeConfig(),
        *,
        method: str | None = None,
        raw: bool = False,
        system: str = "",
    ) -> None:
        self.model, self.decode, self.method, self.raw = model, decode, method, raw
        self.turns: list[dict[str, str]] = []  # as chat templates take them: role, content
        self.output: Output | None = None  # of the last answer
        require(not system or bool(self.template), "the model has no chat template that takes --system; omit it")
        self._first = [{"role": "system", "content": system}] if system else []

    @property
    def template(self) -> str:
        """The chat template that is used; empty: none."""
        found = self.model.loaded.tokenizer.settings.get("chat_template")
        return found if isinstance(found, str) and not self.raw else ""

    def ask(self, message: str, *, drafts: bool = False) -> Iterator[str | Pass]:
        """The answer as it is made; it is part of the conversation once it is complete."""
        turns, said = [*self.turns, {"role": "user", "content": message}], ""
        prompt, stop = self.prompt(turns)
        stream = self.model.stream(prompt, method=self.method, stop=stop, drafts=drafts, **asdict(self.decode))
        for one in stream:
            said += one if isinstance(one, str) else ""
            yield one
        self.output = stream.output
        self.turns = [*turns, {"role": "assistant", "content": said}]

    def prompt(self, turns: list[dict[str, str]]) -> tuple[str, tuple[str, ...]]:
        """What the model continues, and the strings that end its answer."""
        message = turns[-1]["content"]
        if self.raw:
            return message, ()
        if not self.template:
            bare = message.strip().removeprefix("Q:").removesuffix("A:").strip()
            return mini.prompt_of(message) if self._data() else (f"Q: {bare}\nA:", ())
        loaded = self.model.loaded
        room = loaded.backbone.config.max_positions - self.decode.max_new_tokens
        while True:
            text = rendered(self.template, loaded.tokenizer, [*self._first, *turns])
            if len(turns) == 1 or len(loaded.tokenizer.encode(text)) <= room:
                return text, ()
            turns = turns[2:]  # the oldest question with its answer

    def suggestions(self) -> str:
        """What the model can be asked: a held-out question of each kind, as it would be typed, if its data is known."""
        if (folder := self._data()) is None or self.raw:
            return ""
        typed = (one.removeprefix("Q: ").removesuffix("\nA:").replace("\n", "\\\n") for one in mini.held_out(folder))
        return ". It was trained on nothing but questions like these:\n" + "\n".join(typed)

    def _data(self) -> Path | None:
        """The folder with the manifest of the training data, where a model carries one, as bundled models do."""
        with contextlib.suppress(FredaError):
            folder = resolve_model_folder(Path(self.model.name)) / "data"
            return folder if (folder / "manifest.json").is_file() else None
        return None

    def command(self, line: str) -> bool:
        """Carry out a line that begins with /; False: the conversation is over."""
        name, _, rest = line.strip().partition(" ")
        if name == "/reset":
            self.turns = []
        elif name == "/set":
            self._change(rest)
        elif name[1:] not in LEAVE:
            note(HELP if name == "/help" else f"there is no command {name}\n{HELP}")
        return name[1:] not in LEAVE

    def _change(self, text: str) -> None:
        key, _, value = (part.strip() for part in text.partition("="))
        require(bool(key and value), "name a setting and its value: /set passes=2")
        changed: dict[str, Any] = {}
        apply_override(changed, f"decode.{key}={value}")
        self.decode = build(DecodeConfig, {**asdict(self.decode), **checked(changed["decode"])}, "")


def rendered(template: str, tokenizer: Tokenizer, turns: list[dict[str, str]]) -> str:
    """The conversation in a chat template, up to where the answer begins."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {key: tokenizer.settings[key] for key in ("bos_token", "eos_token") if tokenizer.settings.get(key)}
    parsed = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    fast = PreTrainedTokenizerFast(tokenizer_object=parsed, chat_template=template, **named)
    try:
        text: str = fast.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template can raise anything
        raise FredaError(f"the model's chat template fails ({error}); use --raw") from None
    return text


def messages(read: Callable[[str], str]) -> Iterator[str]:
    """Messages from lines, which `read` returns for a prompt until it raises EOFError. Empty ones are skipped."""
    lines: list[str] = []
    while True:
        try:
            line = read("… " if lines else "> ")
        except EOFError:
            break
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield from ["\n".join(lines)] if any(lines) else []
            lines = []
    if any(lines):
        yield "\n".join(lines)


def reader(stdin: TextIO) -> Callable[[str], str]:
    """A function that reads lines: with a prompt, a history and editing in a terminal, silently from a pipe."""
    if stdin.isatty():
        with contextlib.suppress(ImportError):  # not every Python has it
            import readline  # noqa: F401 (importing it gives input() editing and a history)
        return input

    def read(prompt: str) -> str:
        for line in stdin:
            return line.rstrip("\n")
        raise EOFError

    return read


def talk(chat: Chat, said: Iterable[str], out: TextIO, *, drafts: bool, pause: float = 0.0, keep: bool = False) -> None:
    """Answer all messages on `out`. After an error, which is reported, the next message is taken."""
    for message in said:
        try:
            if message.strip().lower() in LEAVE:
                return
            if not message.startswith("/"):
                answer(chat, message, out, drafts=drafts, pause=pause, keep=keep)
            elif not chat.command(message):
                return
        except FredaError as error:
            note(str(error))
        except KeyboardInterrupt:
            note("interrupted; /quit leaves")


def answer(chat: Chat, message: str, out: TextIO, *, drafts: bool, pause: float, keep: bool) -> None:
    """Write one answer: the text as its blocks are committed, or with `drafts` first every pass and then the text. On a
    terminal the passes are drawn in place; with `keep` they stay there as a table."""
    live = LiveDrafts((), chat.model.loaded.tokenizer, file=out, pause=pause, keep=keep)
    text = ""
    with live if drafts else contextlib.nullcontext():
        for part in chat.ask(message, drafts=drafts):
            if isinstance(part, Pass):
                live(part)
            elif drafts:
                text += part
            else:
                print(part, end="", file=out, flush=True)
    print(text, file=out, flush=True)
    if chat.output is not None:
        note(f"{len(chat.output.tokens)} tokens in {chat.output.nfe} forwards, {chat.output.tpf:.2f} per forward")
