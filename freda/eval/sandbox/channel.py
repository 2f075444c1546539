"""Values that two processes exchange: JSON that keeps Python's types, and nothing that could run or pretend.

A value of a built-in type arrives as exactly that type: of a subclass only what the built-in part holds is sent, so an
`__eq__` of its own stays behind. Any other object is kept by its process and sent as a number.

    None, True, 1, 2.0, "text", [1, 2]      as JSON has them
    (1, 2)                                  {"tuple": [1, 2]}
    {"a": 1}                                {"dict": [["a", 1]]}
    an object                               {"object": 7}
"""

from __future__ import annotations

import importlib
import json
import os
import select
from collections.abc import Callable
from typing import Any

MOST_BYTES = 256 * 2**20  # of one message
HEADER = 8  # bytes that say how long a message is
PLAIN = frozenset((type(None), bool, float, str))
SHORT = 2**1000  # longer numbers are sent in hexadecimal: decimal digits take quadratic time, and Python refuses 4,300
KEYS: type[Any] = type({}.keys())
ITEMS: type[Any] = type({}.items())

Refer = Callable[[Any], int]
Resolve = Callable[[int], Any]


class ChannelError(Exception):
    """The other side is gone, or what it sent is no message."""


class Channel:
    """Messages over two pipes, or until `ended`, a file descriptor, can be read: the other side may have left its end
    of the pipes to others."""

    def __init__(self, read: int, write: int, ended: int | None = None) -> None:
        self.read, self.write, self.ended = read, write, ended

    def send(self, message: Any) -> None:
        """Send what `encode` made."""
        data = json.dumps(message).encode()
        view = memoryview(len(data).to_bytes(HEADER, "big") + data)
        try:
            while view:
                view = view[os.write(self.write, view) :]
        except OSError as error:
            raise ChannelError(str(error)) from None

    def receive(self) -> Any:
        """The next message, for `decode`."""
        size = int.from_bytes(self._bytes(HEADER), "big")
        if size > MOST_BYTES:
            raise ChannelError(f"a message of {size:,} bytes")
        try:
            return json.loads(self._bytes(size))
        except (ValueError, RecursionError) as error:
            raise ChannelError(str(error)) from None

    def _bytes(self, size: int) -> bytes:
        parts = []
        while size:
            if self.ended is not None and self.read not in select.select([self.read, self.ended], [], [])[0]:
                raise ChannelError("the other side has ended")
            part = os.read(self.read, min(size, 1 << 20))
            if not part:
                raise ChannelError("the other side has closed the channel")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def encode(value: Any, refer: Refer) -> Any:
    """A value as JSON; `refer` gives the number of an object that is not sent."""
    kind = type(value)
    if kind in PLAIN or (kind is int and -SHORT < value < SHORT) or (kind is list and _is_plain(value)):
        return value
    for base, tag, content in BUILT_IN:
        if issubclass(kind, base):
            made = content(value)
            if base in CONTAINERS:
                made = [encode(one, refer) for one in made]
            return {tag: made} if tag else made
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(kind, "item"):
        value = value.item()  # numpy's numbers are compared as Python's
        return encode(value, refer) if type(value) in (*PLAIN, int, complex, bytes) else {"object": refer(value)}
    name = f"{kind.__module__}.{kind.__qualname__}"
    return {name: NUMBERS[name](value)} if name in NUMBERS else {"object": refer(value)}


def _is_plain(values: list[Any]) -> bool:
    """Whether a list can be sent as it is; found out at the speed of C."""
    kinds = set(map(type, values))
    return kinds <= PLAIN or (kinds == {int} and min(values) > -SHORT and max(values) < SHORT)


def decode(value: Any, resolve: Resolve) -> Any:
    """What `encode` was given; `resolve` finds an object by its number."""
    if type(value) is list:
        return value if _LEAVES.issuperset(map(type, value)) else [decode(one, resolve) for one in value]
    if type(value) is not dict:
        return value
    ((tag, content),) = value.items()
    if tag == "object":
        return resolve(content)
    if tag in NUMBERS:
        module, _, name = tag.rpartition(".")
        number = getattr(importlib.import_module(module), name)
        return number(*content) if isinstance(content, list) else number(content)
    return MADE[tag](decode(content, resolve))


# Of a subclass's value, the methods of the built-in type give the content.
BUILT_IN: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (int, "int", hex),
    (float, "", float.__float__),
    (str, "", str.__str__),
    (list, "", list.__iter__),
    (tuple, "tuple", tuple.__iter__),
    (dict, "dict", dict.items),
    (set, "set", set.__iter__),
    (frozenset, "frozenset", frozenset.__iter__),
    (KEYS, "set", iter),
    (ITEMS, "set", iter),
    (complex, "complex", lambda value: [value.real, value.imag]),
    (bytes, "bytes", lambda value: bytes.decode(value, "latin-1")),
    (bytearray, "bytearray", lambda value: bytearray.decode(value, "latin-1")),
    (range, "range", lambda value: [value.start, value.stop, value.step]),
)
_LEAVES = PLAIN | {int}
CONTAINERS = (list, tuple, dict, set, frozenset, KEYS, ITEMS)
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "decimal.Decimal": str,
}
MADE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "complex": lambda parts: complex(*parts),
    "bytes": lambda text: text.encode("latin-1"),
    "bytearray": lambda text: bytearray(text.encode("latin-1")),
    "range": lambda parts: range(*parts),
}
