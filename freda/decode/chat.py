"""`freda chat`: questions and answers in a terminal, with drafts that settle, or from a pipe.

A model whose tokenizer has a chat template gets the whole conversation in it, without its oldest turns if it is longer
than the model is meant for. Others were trained on documents that are one question with its solution each, so a message
becomes such a question, and what was said before is not part of it.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from freda.data import mini, mini_logic
from freda.data.config import MiniConfig
from freda.data.generators import settings_in
from freda.data.tokenizer import Tokenizer
from freda.decode.api import Model, checked
from freda.decode.batch import Pass
from freda.decode.config import DecodeConfig
from freda.decode.show import LiveDrafts
from freda.errors import FredaError, note, require
from freda.folders.resolve import packaged_folder

HELP = """/reset            forget the conversation
/set passes=2     change a setting: passes, threshold, max_new_tokens, temperature, ...
/help             this text
/quit             leave, as the end of the input does
A line that ends in \\ goes on with the next one."""
OPTIONS = "\nA. "  # a question with answers to choose from
LEAVE = ("quit", "exit")


class Chat:
    """A conversation with a model. `raw` continues each message as it is."""

    def __init__(self, model: Model, settings: dict[str, Any], *, method: str | None = None, raw: bool = False) -> None:
        self.model, self.method, self.raw = model, method, raw
        self.settings = asdict(DecodeConfig(**checked(settings)))
        self.turns: list[dict[str, str]] = []  # as chat templates take them: role, content

    @property
    def template(self) -> str:
        """The chat template that is used; empty: none."""
        found = self.model.loaded.tokenizer.settings.get("chat_template")
        return found if isinstance(found, str) and not self.raw else ""

    def ask(self, message: str, *, drafts: bool = False) -> Iterator[str | Pass]:
        """The answer as it is made; it counts as said once it is there to its end."""
        turns = [*self.turns, {"role": "user", "content": message}]
        said = []
        prompt = self.prompt(turns)
        # A document goes on behind the answer to a deduction, with what else follows.
        stop = (".",) if prompt.startswith((mini_logic.WALK, mini_logic.FACTS)) and not self.raw else ()
        for one in self.model.stream(prompt, method=self.method, stop=stop, drafts=drafts, **self.settings):
            said += [one] if isinstance(one, str) else []
            yield one
        self.turns = [*turns, {"role": "assistant", "content": "".join(said)}]

    def prompt(self, turns: list[dict[str, str]]) -> str:
        """What the model continues."""
        if not self.template:
            return turns[-1]["content"] if self.raw else as_question(turns[-1]["content"])
        loaded = self.model.loaded
        room = loaded.backbone.config.max_positions - self.settings["max_new_tokens"]
        while True:
            text = rendered(self.template, loaded.tokenizer, turns)
            if len(turns) == 1 or len(loaded.tokenizer.encode(text)) <= room:
                return text
            turns = turns[2:]  # the oldest question with its answer

    def command(self, line: str) -> bool:
        """Carry out a line that begins with /; False: the conversation is over."""
        name, _, rest = line.strip().partition(" ")
        if name == "/reset":
            self.turns = []
        elif name == "/set":
            self._change(rest)
        elif name not in ("/quit", "/exit"):
            note(HELP if name == "/help" else f"there is no command {name}\n{HELP}")
        return name not in ("/quit", "/exit")

    def _change(self, text: str) -> None:
        key, equals, value = (part.strip() for part in text.partition("="))
        require(bool(key and equals and value), "say which setting: /set passes=2")
        try:
            changed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changed = value
        known = asdict(DecodeConfig()).get(key)
        number = isinstance(changed, int | float) and not isinstance(changed, bool)
        right = number if isinstance(known, float) else type(changed) is type(known)
        require(known is None or right, f"{key} is {known!r} by default, {value} is of another kind")
        self.settings = asdict(DecodeConfig(**checked({**self.settings, key: changed})))


def as_question(message: str) -> str:
    """A message as the training documents of the mini suite and the demo begin: question, function or choice."""
    text = message.strip()
    if text.startswith(("def ", mini_logic.WALK)) or "\nAnswer:" in text:
        return text
    if OPTIONS in text or text.startswith(mini_logic.FACTS):
        return f"{text}\nAnswer:"
    return f"Q: {text.removeprefix('Q:').removesuffix('A:').strip()}\nA:"


def held_out(folder: Path) -> list[str]:
    """The first test question of each kind, of the suite that a packaged model was trained on."""
    settings = {kind: MiniConfig(**settings_in(folder / "data", kind)) for kind in mini.KINDS}
    return [mini.item(kind, config, "test", 0).prompt for kind, config in settings.items()]


def suggestions(model: Path) -> str:
    """What a packaged model can be asked, a held-out question of each kind as it would be typed; else nothing."""
    folder = packaged_folder(model)
    if folder is None or not (folder / "data").is_dir():
        return ""
    prompts = held_out(folder)
    typed = (prompt.removeprefix("Q: ").removesuffix("\nA:").replace("\n", "\\\n") for prompt in prompts)
    return ". It was trained on nothing but questions like these:\n" + "\n".join(typed)


def rendered(template: str, tokenizer: Tokenizer, turns: list[dict[str, str]]) -> str:
    """The conversation in a chat template, up to where the answer begins."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {key: tokenizer.settings[key] for key in ("bos_token", "eos_token") if tokenizer.settings.get(key)}
    parsed = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    fast = PreTrainedTokenizerFast(tokenizer_object=parsed, chat_template=template, **named)
    try:
        text: str = fast.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template of somebody else's raises
        raise FredaError(f"the model's chat template fails ({error}); use --raw") from None
    return text


def messages(read: Callable[[str], str]) -> Iterator[str]:
    """Messages from lines, which `read` gives for a prompt, until it raises EOFError. Empty ones are left out."""
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
    """How lines are read: with a prompt, a history and editing in a terminal, silently from a pipe."""
    if stdin.isatty():
        with contextlib.suppress(ImportError):  # it is not everywhere
            import readline  # noqa: F401 (input() has them from it)
        return input

    def read(prompt: str) -> str:
        line = stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def talk(chat: Chat, said: Iterable[str], out: TextIO, *, drafts: bool, pause: float) -> None:
    """Answer all messages on `out`. What is wrong with one is told, and the next is taken."""
    for message in said:
        try:
            if message.strip().lower() in LEAVE:
                return
            if not message.startswith("/"):
                answer(chat, message, out, drafts=drafts, pause=pause)
            elif not chat.command(message):
                return
        except FredaError as error:
            note(str(error))
        except KeyboardInterrupt:
            note("interrupted; /quit leaves")


def answer(chat: Chat, message: str, out: TextIO, *, drafts: bool, pause: float) -> None:
    """One answer: with `drafts` every pass over a block, in place on a terminal, and then the text; else the text as
    its blocks are committed."""
    parts = chat.ask(message, drafts=drafts)
    if not drafts:
        for part in parts:
            print(part, end="", file=out, flush=True)
        print(file=out, flush=True)
        return
    text = ""
    with LiveDrafts((), chat.model.loaded.tokenizer, file=out, pause=pause) as live:
        for part in parts:
            if isinstance(part, Pass):
                live(part)
            else:
                text += part
    print(text, file=out, flush=True)
