"""A submitted request, for its reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from freda.decode.request import Event, Output, Pass, Sequence

if TYPE_CHECKING:
    from freda.decode.engine import Engine


class Handle:
    """A submitted request: iterate over its events, wait for its result, or cancel it.

    A request whose reader goes away is cancelled: when the iteration ends early, or nobody holds the handle any more.
    """

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine, self._sequence = engine, sequence

    @property
    def number(self) -> int:
        """The number of the request, as the engine counts them."""
        return self._sequence.index

    @property
    def finished(self) -> bool:
        """Whether the request has ended, one way or another."""
        return self._sequence.output is not None

    def __iter__(self) -> Iterator[Event | Pass]:
        mail = self._sequence.mail
        try:
            while True:
                finished = self.finished  # asked first: the last event is filed before the output
                if mail:
                    yield mail.popleft()
                elif finished:
                    return
                else:
                    self._engine.step(lambda: bool(mail) or self.finished)
        finally:
            self.cancel()

    def take(self) -> list[Event | Pass]:
        """The events that were filed since the last call, or none; does not wait."""
        mail = self._sequence.mail
        return [mail.popleft() for _ in range(len(mail))]

    def result(self) -> Output:
        """Wait for the end of the request."""
        while self._sequence.output is None:
            self._engine.step(lambda: self.finished)
        return self._sequence.output

    def cancel(self) -> None:
        """End the request and free its pages, now or after the current step."""
        if not self.finished:
            self._engine.cancel(self._sequence)

    def __del__(self) -> None:
        if not self.finished:  # this may run anywhere, so it must not wait for a lock
            self._engine.flagged.append(self._sequence)
