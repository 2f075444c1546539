"""`freda generate` and `chat`: a model at work."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from freda.cli.app import app
from freda.cli.options import Device, Dtype, Method, ModelPath, Stop, decode_options
from freda.decode.config import DecodeConfig, EngineConfig
from freda.errors import FredaError, note


@app.command(
    epilog="Examples: **freda generate mini $'Q: Mia has 4500 coins. She loses 312. How many?\\nA:' --show-drafts**; "
    '**freda generate runs/demo/self-refine "Q: Mia has 12 shells." --json**'
)
@decode_options
def generate(
    model: ModelPath,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    method: Method = None,
    decode: DecodeConfig = DecodeConfig(),
    stop: Stop = [],  # noqa: B006
    reference: Annotated[
        bool, typer.Option("--reference", help="Decode with the plain loop that the engine must equal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Show every pass of every block.")] = False,
    pause: Annotated[float, typer.Option(help="Seconds between passes shown on a terminal.")] = 0.15,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Continue a text."""
    from freda.decode.command import complete, open_model
    from freda.decode.request import Request

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise FredaError("the prompt is empty; give the text to continue")
    how: dict[str, Any] = {**asdict(decode), "method": method, "stop": stop, "watch": show_drafts}
    loaded = open_model(model, device, dtype, method=method, prompt=text)
    answer = complete(loaded, Request(prompt=loaded.tokenizer.encode(text), **how), reference=reference, pause=pause)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    print(answer["text"])
    counts = f"{len(answer['tokens'])} tokens in {answer['nfe']} forwards: {answer['tpf']:.2f} tokens per forward"
    print(f"{counts}, {answer['seconds']:.2f} s ({answer['method']})", file=sys.stderr)


@app.command(
    epilog="Examples: **freda chat mini**; **freda chat models/qwen3-0.6b --raw**; from a pipe: "
    "**echo 'Mia has 4500 coins. She loses 312. How many does she have in the end?' | freda chat mini**. "
    "In it: /reset, /set passes=2, /help, /quit"
)
@decode_options
def chat(
    model: ModelPath,
    method: Method = None,
    decode: DecodeConfig = DecodeConfig(max_new_tokens=256),
    system: Annotated[str, typer.Option(help="System prompt, for a model that has a chat template.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue what is typed as it is: no template, no Q: and A:.")
    ] = False,
    drafts: Annotated[
        bool | None,
        typer.Option(
            "--show-drafts/--no-drafts",
            "--drafts",
            help="Show every pass of every block; by default if stdout is a terminal.",
        ),
    ] = None,
    pause: Annotated[float, typer.Option(help="Seconds between passes shown on a terminal.")] = 0.05,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Ask a model questions and watch it refine its answers."""
    from freda.decode.api import Model
    from freda.decode.chat import Chat, messages, reader, talk
    from freda.decode.command import open_model

    opened = Model(open_model(model, device, dtype, method=method), EngineConfig(max_batch=1), name=str(model))
    conversation = Chat(opened, decode, method=method, raw=raw, system=system)
    if sys.stdin.isatty():
        note(f"{model}: ask; /help says what else there is{conversation.suggestions()}")
    shown = sys.stdout.isatty() if drafts is None else drafts
    talk(conversation, messages(reader(sys.stdin)), sys.stdout, drafts=shown, pause=pause, keep=bool(drafts))
