"""`freda generate` and `chat`: a model at work."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from freda.cli.app import Adapter, Device, Dtype, Method, ModelPath, Stop, app, decode_options
from freda.decode.config import DecodeConfig, EngineConfig
from freda.errors import FredaError, note, require


@app.command(
    epilog="Examples: **freda generate mini $'Q: Mia has 4500 coins. She loses 312. How many?\\nA:' --show-drafts**; "
    '**freda generate runs/demo/self-refine "Q: Mia has 12 shells." --json**'
)
@decode_options
def generate(
    model: ModelPath,
    prompt: Annotated[str, Argument(help="The text to continue; - reads it from stdin.")],
    method: Method = None,
    adapter: Adapter = None,
    decode: DecodeConfig = DecodeConfig(),
    stop: Stop = [],  # noqa: B006
    reference: Annotated[bool, Option("--reference", help="Use the plain loop that the engine must equal.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    show_drafts: Annotated[bool, Option("--show-drafts", help="Show every pass of every block.")] = False,
    pause: Annotated[float, Option(help="Seconds between passes shown on a terminal.")] = 0.15,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Continue a text."""
    from freda.decode.api import Model, named_or_default, open_model
    from freda.decode.request import Request
    from freda.decode.show import LiveDrafts

    text = _from_stdin() if prompt == "-" else prompt
    require(bool(text.strip()), "the prompt is empty; give the text to continue")
    if not _is_model(model) and _is_model(Path(text)):
        raise FredaError(f"there is no model {model}, but {text} is one; name the model first, then the prompt")
    loaded = open_model(model, device, dtype, method, adapter)
    ids, method = loaded.tokenizer.encode(text), named_or_default(method, loaded)
    request = Request(prompt=ids, **asdict(decode), method=method, stop=tuple(stop), watch=show_drafts)
    size = EngineConfig(max_batch=1, max_length=len(ids) + decode.max_new_tokens, on_device=not reference)
    opened = Model(loaded, size)
    run = opened.reference if reference else opened.complete
    with LiveDrafts(ids, loaded.tokenizer, pause=pause, keep=True) if show_drafts else nullcontext() as live:
        found = run(request, live)
    if as_json:
        rounded = {"tpf": round(found.tpf, 4), "seconds": round(found.seconds, 4)}
        numbers = {"tokens": found.tokens, "nfe": found.nfe, **rounded, "accepted": found.accepted}
        numbers |= {"finish": found.finish}
        answer = {"text": found.text, **numbers, "method": method, "settings": asdict(decode)}
        print(json.dumps(answer, ensure_ascii=False))
        return
    print(found.text)
    counts = f"{len(found.tokens)} tokens in {found.nfe} forwards: {found.tpf:.2f} tokens per forward"
    print(f"{counts}, {found.seconds:.2f} s ({method})", file=sys.stderr)


def _from_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise FredaError(f"the prompt on stdin is not valid UTF-8 ({error}); write it as UTF-8") from None


def _is_model(path: Path) -> bool:
    from freda.folders.model_folder import resolve_model_folder

    try:
        return resolve_model_folder(path).is_dir()
    except (FredaError, OSError):  # a prompt may be too long for the name of a file
        return False


@app.command(
    epilog="Examples: **freda chat mini**; **freda chat models/qwen3-0.6b --raw**; from a pipe: "
    "**echo 'Mia has 4500 coins. She loses 312. How many does she have in the end?' | freda chat mini**. "
    "In it: /reset, /set passes=2, /help, /quit"
)
@decode_options
def chat(
    model: ModelPath,
    method: Method = None,
    adapter: Adapter = None,
    decode: DecodeConfig = DecodeConfig(max_new_tokens=256),
    system: Annotated[str, Option(help="System prompt, for a model that has a chat template.")] = "",
    raw: Annotated[bool, Option("--raw", help="Continue what is typed as it is: no template, no Q: and A:.")] = False,
    drafts: Annotated[
        bool | None, Option("--show-drafts/--no-drafts", "--drafts", help="Show every pass; by default on a terminal.")
    ] = None,
    pause: Annotated[float, Option(help="Seconds between passes shown on a terminal.")] = 0.05,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Ask a model questions and watch it refine its answers."""
    from freda.decode.api import Model, named_or_default, open_model
    from freda.decode.chat import Chat, messages, reader, talk

    loaded = open_model(model, device, dtype, method, adapter)
    opened = Model(loaded, EngineConfig(max_batch=1), name=str(model))
    conversation = Chat(opened, decode, method=named_or_default(method, loaded), raw=raw, system=system)
    if sys.stdin.isatty():
        note(f"{model}: ask; /help says what else there is{conversation.suggestions()}")
    shown = sys.stdout.isatty() if drafts is None else drafts
    talk(conversation, messages(reader(sys.stdin)), sys.stdout, drafts=shown, pause=pause, keep=bool(drafts))
