"""A batch of requests in decoding: their progress on the host, their drafts and their cache on the device.

One forward carries, for every request,

    [ committed tokens that are not in the cache yet | the current draft ]

so the prompt, and later each finished block, enters the cache in the same forward that drafts the next block (M13).
Blocks are absolute: the last P mod B tokens of a prompt sit in the first generated block as given tokens (M12). The
autoregressive method has no draft part and predicts after its last committed token.

`generate` makes one batch and runs it to its end; the engine lets requests join and leave between passes.

Counting (M14): a forward counts once for each request that it chooses tokens or commits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from freda.decode.request import Pass, Request, Watch
from freda.decode.request import Sequence as Text
from freda.decode.state import (
    Choice,
    DecodeState,
    after_pass,
    candidates_of,
    chosen,
    embedded,
    fresh_drafts,
    joined,
    limits_of,
    new_state,
    soft_channel,
)
from freda.errors import require
from freda.methods.config import MethodConfig
from freda.methods.draft import Candidates, Draft, merge
from freda.methods.method import Method, block_size
from freda.model.attention import make_mask
from freda.model.masks import Tokens, clean_tokens, concat, draft_tokens
from freda.model.transformer import Forward, KeysValues, Transformer


class CommittedText(Protocol):
    """Keys and values of committed text, a row for each request: `Cache`, or the engine's pages."""

    def write(self, new: Sequence[KeysValues], position: Tensor, real: Tensor) -> None:
        """Store the first tokens of a forward."""

    def past(self) -> list[KeysValues]:
        """What is stored, every layer's."""

    def tokens(self, block_size: int) -> Tokens:
        """The mask vectors of what `past` returns."""

    def keep(self, rows: Tensor) -> None:
        """Drop all texts but `rows`."""


class Batch:
    """Requests of one method that go forward together, each at its own block and pass."""

    watched = False  # will `show` be called after this pass?

    def __init__(
        self,
        model: Transformer,
        method: Method,
        config: MethodConfig,
        texts: Sequence[Text],
        stop_ids: Sequence[int],
        cache: CommittedText | None,
    ) -> None:
        self.model, self.method, self.config = model, method, config
        self.size, self.stop_ids = block_size(method, config), set(stop_ids)
        self.device = model.embed_tokens.weight.device
        self.texts, self.cache = list(texts), cache
        stops = self._tensor(sorted(self.stop_ids), torch.int64)
        self.state = new_state([text.request for text in texts], self._fresh(), self._begin(), stops)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _fresh(self) -> Draft:
        """The next block of every text: blank but for the tail of its prompt."""
        return fresh_drafts([text.tail for text in self.texts], self.size, self.model.blank_id, self.device)

    def _begin(self) -> Tensor:
        return self._tensor([len(text.clean) for text in self.texts], torch.int64)

    def commit(self) -> None:
        """A forward that only commits, where there is something to commit into the cache."""
        waiting = [text for text in self.texts if text.stored < len(text.clean)]
        if waiting and self.cache is not None and self.method.DRAFTS:
            self._forward(with_draft=False)
            for text in waiting:
                text.nfe += 1

    def prefill(self, most: int) -> None:
        """Bring all that is committed into the cache before the first pass, about `most` tokens in a forward.

        What predicts without a draft keeps its last token for the first pass. Not counted: a first pass that carries
        the prompt, as in `generate`, would not be either.
        """
        last = 0 if self.method.DRAFTS else 1
        width = max(self.size, most // max(1, len(self.texts)) // self.size * self.size)
        while any(text.stored < len(text.clean) - last for text in self.texts):
            self._forward(with_draft=False, most=width, but=last)

    def draft_pass(self) -> list[int]:
        """One forward that commits what is pending and predicts; returns the rows whose block has closed."""
        limits = limits_of(self.method, [text.request for text in self.texts])
        self.candidates = candidates_of(self.state, self.method, self.config, limits)
        hidden = self._forward(with_draft=self.method.DRAFTS)
        for text in self.texts:
            text.nfe += 1
        self.choice = chosen(self.model, self.method, self.state, self.candidates, self.soft)
        rows, count = self.candidates.valid.shape
        best = hidden.view(rows, count, self.size, -1)[torch.arange(rows, device=self.device), self.choice.winner]
        self.state = after_pass(self.state, self.method, self.model.logits(best), limits)
        return [row for row, closed in enumerate(self.state.draft.closed.tolist()) if closed]

    def _forward(self, *, with_draft: bool, most: int | None = None, but: int = 0) -> Tensor:
        """Run [pending clean tokens | draft] over the cache; returns the hidden states that predict, (R, C·B, D).

        `most` bounds the pending tokens, `but` leaves out the last ones.
        """
        ends = [
            len(text.clean) - but if most is None else min(len(text.clean) - but, text.stored + most)
            for text in self.texts
        ]
        pending = [text.clean[text.stored : end] for text, end in zip(self.texts, ends, strict=True)]
        counts = self._tensor([len(tokens) for tokens in pending], torch.int64)
        width = max(len(tokens) for tokens in pending)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in pending]
        ids = self._tensor(padded, torch.int64).view(len(pending), width)
        place = torch.arange(width, device=self.device)
        real = place < counts[:, None]  # (R, W)
        position = self._tensor([text.stored for text in self.texts], torch.int64)[:, None] + place
        x = self.model.embed_tokens(ids)
        tokens = clean_tokens(torch.where(real, 0, -1), position, self.size)
        if with_draft:
            count = self.candidates.valid.shape[1]
            where = self.state.position.repeat(1, count)  # (R, C·B)
            candidate = torch.arange(count, device=self.device).repeat_interleave(self.size).expand_as(where)
            position = torch.cat([position, where], dim=1)
            x = torch.cat([x, embedded(self.model, self.candidates, self.config)], dim=1)
            tokens = concat(tokens, draft_tokens(torch.zeros_like(where), where, self.size, candidate))
        hidden = self._run(x, position, tokens, real)
        if self.method.DRAFTS:
            return hidden[:, width:]
        return hidden[torch.arange(len(pending), device=self.device), counts - 1][:, None]

    def _run(self, x: Tensor, position: Tensor, tokens: Tokens, real: Tensor) -> Tensor:
        """The forward itself; what it commits goes into the cache."""
        past = None if self.cache is None else self.cache.past()
        keys = tokens if self.cache is None else concat(self.cache.tokens(self.size), tokens)
        out: Forward = self.model(x, position, make_mask(tokens, keys, self.model.backend), past)
        scored = self.method.SCORES and x.shape[1] > real.shape[1]  # not a forward that only commits
        self.soft = soft_channel(self.model, out, position, tokens, keys, past, real.shape[1]) if scored else None
        if self.cache is not None:
            self.cache.write(out.new, position[:, : real.shape[1]], real)
            for text, count in zip(self.texts, real.sum(-1).tolist(), strict=True):
                text.stored += count
        return out.hidden

    def sound(self) -> list[bool]:
        """Whose probabilities are numbers?"""
        sound: list[bool] = self.state.draft.prob.isfinite().all(-1).tolist()
        return sound

    def block(self, row: int) -> list[int]:
        """The tokens of a draft after the last pass."""
        ids: list[int] = self.state.draft.ids[row].tolist()
        return ids

    def show(self, watch: Watch) -> None:
        """Hand the state after a pass to the watcher."""
        for seen in passes_of([text.index for text in self.texts], self.state, self.candidates, self.choice):
            watch(seen)

    def next_blocks(self, finished: set[int]) -> None:
        """Start the next block where one has closed, and let finished texts leave the batch."""
        draft = merge(~self.state.draft.closed, self.state.draft, self._fresh())
        self.state = self.state._replace(draft=draft, begin=self._begin())
        if finished:
            self.leave(finished)

    def join(self, other: Batch) -> None:
        """Take over the requests of another batch, whose cache is of the same storage."""
        self.texts += other.texts
        self.state = joined(self.state, other.state)

    def leave(self, finished: set[int]) -> None:
        """Drop these rows."""
        left = [row for row in range(len(self.texts)) if row not in finished]
        self.texts = [self.texts[row] for row in left]
        rows = self._tensor(left, torch.int64)
        self.state = self.state.rows(rows)
        if self.cache is not None:
            self.cache.keep(rows)


def passes_of(requests: Sequence[int], state: DecodeState, candidates: Candidates, choice: Choice) -> Iterator[Pass]:
    """What a pass left of every request's block."""
    ids, prob, _, _, given, committed, passes, closed = (part.tolist() for part in state.draft)
    texts, scores = candidates.ids.tolist(), choice.scores.tolist()
    valid, winner, begin = candidates.valid.sum(-1).tolist(), choice.winner.tolist(), state.begin.tolist()
    size = state.draft.ids.shape[1]
    for row, request in enumerate(requests):
        cells = (ids[row], prob[row], given[row], committed[row], closed[row])
        seen = (texts[row][: valid[row]], scores[row][: valid[row]], winner[row])
        yield Pass(request, begin[row] // size, passes[row], *cells, *seen)


def check_requests(model: Transformer, method: Method, config: MethodConfig, requests: Sequence[Request]) -> None:
    """Refuse what cannot be decoded, before anything is done."""
    require(
        not method.SCORES or model.scorer is not None, "the model has no scorer; train one with method.name=best-of-n"
    )
    for request in requests:
        require(
            all(0 <= token < model.blank_id for token in request.prompt),
            f"a prompt holds a token id that is BLANK or beyond the vocabulary; use ids 0 to {model.blank_id - 1}",
        )
        require(method.DRAFTS or bool(request.prompt), "the prompt is empty; autoregressive decoding needs one token")
        require(
            not method.SCORES or request.swaps <= config.block_size,
            f"swaps is {request.swaps}, more than a block has positions; use 0 to {config.block_size}",
        )
