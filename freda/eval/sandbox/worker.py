"""The process that runs a program: first all of it, then, one by one, the calls that its tests make.

It holds the program and nothing else: no test, no expected value, no way to say "passed". Whatever a program does to
this process, it changes only what its own functions return.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from freda.eval.sandbox.channel import Channel, ChannelError, decode, encode

PROGRAM = "<program>"
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": operator.call,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "contains": operator.contains,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "repr": repr,
}


def work(program: str, names: Sequence[str], channel: Channel) -> NoReturn:
    """Run the program, tell which of `names` it defined, and do what its tests ask for until they are through."""
    own, leave, flush, objects = os.getpid(), os._exit, sys.stdout.flush, list[Any]()
    module = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "freda"]:
        del sys.modules[name]
    sys.modules["__main__"], sys.argv = module, [""]

    def defined() -> dict[str, Any]:
        exec(compile(program, PROGRAM, "exec"), vars(module))
        return {name: vars(module)[name] for name in names if name in vars(module)}

    with contextlib.suppress(ChannelError, SystemExit):
        reply = _reply(objects, defined)
        while os.getpid() == own:  # a child of the program has nothing to say
            channel.send(reply)
            operation, arguments, options = decode(channel.receive(), objects.__getitem__)
            reply = _reply(objects, OPERATIONS[operation], *arguments, **options)
    with contextlib.suppress(Exception):  # the program may have closed or replaced it
        flush()
        sys.stdout.flush()
    leave(0)


def _reply(objects: list[Any], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The message that says what a function returned, or how it failed."""

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    try:
        return ["value", encode(function(*arguments, **options), refer)]
    except SystemExit:
        raise
    except BaseException as error:
        show(error, PROGRAM)
        return ["error", [kind.__name__ for kind in type(error).__mro__], _text(error)]


def show(error: BaseException, file: str) -> None:
    """Print an exception with the part of its traceback that is in `file`, if there is one."""
    frames, trace = list[types.TracebackType](), error.__traceback__
    while trace:
        frames += [trace] if trace.tb_frame.f_code.co_filename == file else []
        trace = trace.tb_next
    for frame, following in zip(frames, [*frames[1:], None], strict=False):
        frame.tb_next = following
    with contextlib.suppress(Exception):  # the program may have replaced or closed anything
        if frames or getattr(error, "filename", None) == file:  # a SyntaxError has no frame
            sys.excepthook(type(error), error.with_traceback(frames[0] if frames else None), None)


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error)).strip()[:500]
    except BaseException as other:  # the program's own __str__
        return f"({type(other).__name__} when shown)"
