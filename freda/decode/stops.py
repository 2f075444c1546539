"""Stop strings, in a finished text and in one that grows. No torch here: graders in small processes use it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a decoder makes of a character whose last bytes are still to come


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it, or all of it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


class StopMatcher:
    """Decodes a growing sequence of tokens, finds the first stop string in its text, and says what of it is final.

    A call looks only at the newest tokens and at as much text before them as a stop string can reach back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self.found = False
        self._decode, self._stops = decode, tuple(stops)
        self._reach = max(map(len, self._stops), default=1) - 1
        self._text = ""  # decoded so far, up to the stop string once it is found
        self._rest = ""  # text behind it that ends in an unfinished character
        self._taken = 0  # characters that `take` has returned
        self._window: list[int] = []  # the newest tokens of `_text`, and all tokens of `_rest`
        self._known = 0  # how many of them are in `_text`

    def feed(self, tokens: Sequence[int]) -> bool:
        """Take new tokens; returns whether a stop string has appeared."""
        if self.found:
            return True
        self._window += tokens
        # Some known tokens are decoded again: some decoders drop a space at the beginning of what they are given.
        before = self._decode(self._window[: self._known])
        new = self._decode(self._window)[len(before) :]
        searched = max(0, len(self._text) - self._reach)
        if new.endswith(UNFINISHED):
            self._rest = new
        elif new:
            self._text, self._rest = self._text + new, ""
            self._window = self._window[self._known :]
            self._known = len(self._window)
        tail = self._text[searched:] + self._rest
        cut = cut_at_stop(tail, self._stops)
        if len(cut) < len(tail):
            self._text, self._rest, self.found = self._text[:searched] + cut, "", True
        return self.found

    def take(self, *, final: bool = False) -> str:
        """The text that has become final since the last call: no half character, nothing that may begin a stop string.

        With `final` no tokens will follow, and all of it is.
        """
        text = self._text + self._rest
        if not (final or self.found):
            text = text.rstrip(UNFINISHED) if self._rest else text
            text = text[: len(text) - self._begun(text)]
        new, self._taken = text[self._taken :], max(self._taken, len(text))
        return new

    def _begun(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of a stop string."""
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(sizes, default=0)
