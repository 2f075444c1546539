"""Command-line options that several commands share; those of decoding are made from `DecodeConfig`.

A command that decodes takes one parameter of type `DecodeConfig` and is decorated:

    @app.command()
    @decode_options
    def chat(model: ModelPath, decode: DecodeConfig = DecodeConfig(max_new_tokens=256), device: Device = "auto"): ...

On the command line there is an option for every field in place of that parameter, with the field's help and type, and
the default that the parameter's default has.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from freda.decode.config import DecodeConfig

ModelPath = Annotated[Path, typer.Argument(help="A model folder, a run folder, or the name of a bundled model.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[
    str, typer.Option(help="Precision of the weights: float32, bfloat16, float16, or auto: bfloat16 on a GPU.")
]
Method = Annotated[
    str | None, typer.Option(help="Decode with another method than the model's own; a wrong name lists them.")
]
Stop = Annotated[list[str], typer.Option(help="A string that ends the answer; may be repeated.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one config value.")]


def decode_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of its `DecodeConfig` parameter."""
    signature = inspect.signature(function, eval_str=True)
    taken = next(one for one in signature.parameters.values() if one.annotation is DecodeConfig)
    made = list(_options(taken.default))
    names = [option.name for option in made]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        decode = DecodeConfig(**{name: values.pop(name) for name in names})
        function(**values, **{taken.name: decode})

    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        parameters += made if one is taken else [one]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _options(defaults: DecodeConfig) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(DecodeConfig)
    for field in dataclasses.fields(DecodeConfig):
        hint, metavar = hints[field.name], None
        if typing.get_origin(hint) is Literal:  # the config checks it, and says what is wrong
            hint, metavar = str, "|".join(typing.get_args(hint))
        help = field.metadata["help"]
        option = typer.Option(help=f"{help[0].upper()}{help[1:]}.", metavar=metavar)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=getattr(defaults, field.name),
            annotation=Annotated[hint, option],
        )
