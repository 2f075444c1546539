"""The counts and lengths in the header of a GGUF file, compared with its size before anything is built from them.

The reader of the package `gguf` believes every number: an array of 2⁶⁰ elements fills the memory one by one.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from freda.errors import FredaError, require

MAGIC, VERSIONS = b"GGUF", (2, 3)
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4


def check_header(path: Path) -> None:
    """Refuse a file whose header claims more than the file has."""
    require(path.is_file(), f"{path} is no plain file")
    with path.open("rb") as file:
        header = Header(file, path.stat().st_size)
        magic, version = file.read(4), header.number("<I")
        require(magic == MAGIC and version in VERSIONS, f"not a GGUF file of version {VERSIONS}; download it again")
        tensors, fields = header.number("<Q"), header.number("<Q")
        seen = set[bytes]()
        for _ in range(header.count(fields, least=13)):
            name = header.text()
            require(name not in seen, f"the metadata has {name[:80]!r} twice; download it again")
            seen.add(name)
            header.value(header.number("<I"))
        for _ in range(header.count(tensors, least=24)):
            header.text()
            dimensions = header.number("<I")
            require(dimensions <= MOST_DIMENSIONS, f"a tensor has {dimensions} dimensions; download it again")
            header.skip(8 * dimensions + 12)


class Header:
    """A file that is walked through, field by field."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def number(self, form: str) -> int:
        """The next number."""
        data = self.file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise FredaError("not a whole GGUF file (its header is cut short); download it again")
        return int(struct.unpack(form, data)[0])

    def count(self, number: int, least: int) -> int:
        """A number of things of at least so many bytes, which must fit into what is left of the file."""
        left = self.size - self.file.tell()
        require(
            number * least <= left,
            f"not a whole GGUF file (its header claims {number:,} in {left:,} bytes); download it again",
        )
        return number

    def skip(self, bytes_: int) -> None:
        """Go on behind so many bytes."""
        self.file.seek(self.count(bytes_, 1), 1)

    def text(self) -> bytes:
        """The next string."""
        length = self.count(self.number("<Q"), 1)
        require(length <= 2**26, f"a string of {length:,} bytes in the header; download it again")
        return self.file.read(length)

    def value(self, kind: int) -> None:
        """Walk over a value; arrays hold numbers or strings."""
        if kind == STRING:
            self.skip(self.number("<Q"))
        elif kind == ARRAY:
            inner, length = self.number("<I"), self.number("<Q")
            require(inner != ARRAY, "the metadata has an array of arrays, which no model has; download it again")
            if inner == STRING:
                for _ in range(self.count(length, 8)):
                    self.skip(self.number("<Q"))
            else:
                self.skip(self.count(length, self._width(inner)) * self._width(inner))
        else:
            self.skip(self._width(kind))

    @staticmethod
    def _width(kind: int) -> int:
        require(kind in WIDTHS, f"the metadata has a value of the unknown type {kind}; download it again")
        return WIDTHS[kind]
