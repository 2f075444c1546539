"""The reference loop over blocks: plain, exact, and what every faster path must equal.

All requests go forward together as one batch, each at its own block and pass, until the last is finished; prefill is
nothing but the first commit. One forward carries, for every request,

    [ committed tokens that are not in the cache yet | the current draft ]

so the prompt, and later each finished block, enters the cache in the same forward that drafts the next block (M13).
Where blocks begin, what their slots show and which tokens are committed is a matter of the geometry: in the paper's
layout the last P mod B tokens of a prompt sit in the first generated block as given tokens (M12); in the shifted layout
the first slot shows the last known token, which is committed with the block. The autoregressive method has no draft
part and predicts after its last committed token.

Counting (M14): a forward counts once for each request that it chooses tokens or commits for.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import replace

import torch
from torch import Tensor

from freda.decode.pages import PagedCache, Pages
from freda.decode.request import Decode, Output, Pass, Request, Sequence, Watch
from freda.methods.draft import Candidates, Draft, merge
from freda.methods.method import Method
from freda.methods.state import fresh_drafts, new_state
from freda.model.attention import Tokens, clean_tokens, concat, draft_tokens, make_mask
from freda.model.parts import Parts
from freda.model.transformer import Forward, KeysValues


@torch.no_grad()
def generate(
    parts: Parts,
    method: Method,
    requests: abc.Sequence[Request],
    *,
    stop_ids: abc.Sequence[int],
    decode: Decode | None = None,
    fused: bool = True,
    cached: bool = True,
    watch: Watch | None = None,
) -> list[Output]:
    """Continue every request; stop strings are found if `decode` can turn tokens into text.

    `watch` gets all passes. `fused=False` commits in forwards of their own and `cached=False` keeps no cache: the plain
    twins, with equal tokens.
    """
    requests = [replace(request, watch=watch is not None) for request in requests]
    for request in requests:
        method.check(parts, request, request.prompt)
    begun, geometry = time.perf_counter(), method.geometry
    outputs: dict[int, Output] = {}
    sequences = [Sequence(index, request, method, decode) for index, request in enumerate(requests)]
    cache = None
    if cached and requests:  # one page for each request
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests) + geometry.block
        table = torch.arange(len(requests), device=parts.device)[:, None]
        cache = PagedCache(Pages(parts.backbone, len(requests), longest), table, torch.zeros_like(table[:, 0]))
    loop = RequestBatch(parts, method, sequences, stop_ids, cache)
    while loop.sequences:
        if not fused:
            loop.commit()
        closed = loop.draft_pass()
        if watch is not None:
            for _, seen in loop.passes():
                watch(seen)
        finished = set()
        for row, ids in closed.items():
            one = loop.sequences[row]
            event = one.close_block(ids, loop.stop_ids)
            if event.finish:
                finished.add(row)
                seconds = time.perf_counter() - begun
                outputs[one.index] = Output(one.new, one.nfe, event.finish, seconds, event.error)
        loop.next_blocks(finished)
    return [outputs[index] for index in range(len(requests))]


class RequestBatch:
    """Requests of one method that go forward together, each at its own block and pass."""

    def __init__(
        self,
        parts: Parts,
        method: Method,
        sequences: abc.Sequence[Sequence],
        stop_ids: abc.Sequence[int],
        cache: PagedCache | None,
    ) -> None:
        self.parts, self.model, self.method, self.geometry = parts, parts.backbone, method, method.geometry
        self.size, self.stop_ids, self.device = self.geometry.block, set(stop_ids), parts.device
        self.sequences, self.cache = list(sequences), cache
        stops, asked = self._tensor(sorted(self.stop_ids), torch.int64), [text.request for text in sequences]
        self.state = new_state(asked, self._fresh(), self._begin(), self._known(), stops)

    def _tensor(self, values: abc.Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _fresh(self) -> Draft:
        """The next block of every text: blank but for the tail of its prompt."""
        return fresh_drafts([text.tail for text in self.sequences], self.size, self.model.blank_id, self.device)

    def _begin(self) -> Tensor:
        return self._tensor([len(text.clean) for text in self.sequences], torch.int64)

    def _known(self) -> Tensor:
        return self._tensor([text.known for text in self.sequences], torch.int64)

    def commit(self) -> None:
        """A forward that only commits, where there is something to commit into the cache."""
        waiting = [text for text in self.sequences if text.pending]
        if waiting and self.cache is not None and self.geometry.drafts:  # elsewhere the pass itself commits
            self._forward(None)
            for text in waiting:
                text.nfe += 1

    def draft_pass(self) -> dict[int, list[int]]:
        """One forward that commits what is pending and predicts; returns the ids of closed blocks by row, none where
        the probabilities are not finite."""
        limits = self.method.limits([one.request for one in self.sequences])
        self.candidates = self.method.candidates(self.state, limits)
        rows, count = self.candidates.valid.shape
        hidden = self._forward(self.candidates if self.geometry.drafts else None)
        for one in self.sequences:
            one.nfe += 1
        soft = self._soft if count > 1 else None
        self.winner, self.scores = self.method.choose(self.parts, self.state, self.candidates, soft)
        best = hidden.view(rows, count, self.size, -1)[torch.arange(rows, device=self.device), self.winner]
        self.state = self.method.after_pass(self.state, self.model.logits(best), limits)
        draft, finite = self.state.draft, self.state.draft.prob.isfinite().all(-1).tolist()
        over = enumerate(zip(draft.closed.tolist(), finite, draft.ids.tolist(), strict=True))
        return {row: ids if known else [] for row, (closed, known, ids) in over if closed or not known}

    def _forward(self, drafts: Candidates | None) -> Tensor:
        """Run [pending clean tokens | drafts] over the cache; returns the hidden states that predict, (R, C·B, D).

        Without drafts the last pending token predicts.
        """
        pending = [text.pending for text in self.sequences]
        counts = self._tensor([len(tokens) for tokens in pending], torch.int64)
        width = max(len(tokens) for tokens in pending)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in pending]
        ids = self._tensor(padded, torch.int64).view(len(pending), width)
        place = torch.arange(width, device=self.device)
        real = place < counts[:, None]  # (R, W)
        position = self._tensor([text.stored for text in self.sequences], torch.int64)[:, None] + place
        x = self.model.embed_tokens(ids)
        tokens = clean_tokens(torch.where(real, 0, -1), position, self.geometry.context)
        if drafts is None:
            hidden = self._run(x, position, tokens, real)
            return hidden[torch.arange(len(pending), device=self.device), counts - 1][:, None]
        count = drafts.valid.shape[1]
        where = self.state.position.repeat(1, count) - self.geometry.shift  # (R, C·B): of the slots
        candidate = torch.arange(count, device=self.device).repeat_interleave(self.size).expand_as(where)
        ids, alpha = self.geometry.shown(self.state.known[:, None], drafts.ids, drafts.alpha)
        x = torch.cat([x, self.method.embed(self.model, ids.flatten(1), alpha.flatten(1))], dim=1)
        tokens = concat(tokens, draft_tokens(torch.zeros_like(where), where[:, :1].expand_as(where), candidate))
        return self._run(x, torch.cat([position, where], dim=1), tokens, real)[:, width:]

    def _run(self, x: Tensor, position: Tensor, tokens: Tokens, real: Tensor) -> Tensor:
        """The forward itself; what it commits goes into the cache."""
        past = None if self.cache is None else self.cache.past()
        keys = tokens if self.cache is None else concat(self.cache.tokens(self.geometry.context), tokens)
        out: Forward = self.model(x, position, make_mask(tokens, keys, self.model.backend), past)
        if x.shape[1] > real.shape[1] + self.size:  # several candidates
            self._soft = self._scorer_view(out, position, tokens, keys, past, real.shape[1])
        if self.cache is not None:
            self.cache.write(out.new, position[:, : real.shape[1]], real)
            for text, count in zip(self.sequences, real.sum(-1).tolist(), strict=True):
                text.stored += count
        return out.hidden

    def _scorer_view(
        self,
        out: Forward,
        position: Tensor,
        tokens: Tokens,
        keys: Tokens,
        past: abc.Sequence[KeysValues] | None,
        committed: int,
    ) -> Tensor:
        """What a scorer sees of the draft part of a forward, which begins after `committed` tokens: (R, C·B, D)."""
        scorer = self.parts.scorer
        of_draft = out._replace(hidden=out.hidden[:, committed:], beneath=out.beneath[:, committed:])
        if scorer is None or scorer.last_layer is None:
            return of_draft.hidden
        draft = Tokens(*(part[:, committed:] for part in tokens))
        seen = KeysValues(*(part[:, :, :committed] for part in out.new[-1]))
        if past is not None:
            seen = KeysValues(*(torch.cat(pair, dim=2) for pair in zip(past[-1], seen, strict=True)))
        mask = make_mask(draft, keys, self.model.backend)
        return scorer.soft_channel(self.model, of_draft, position[:, committed:], mask, seen)

    def passes(self) -> abc.Iterator[tuple[Sequence, Pass]]:
        """What the last pass left of the blocks of watched requests."""
        if not any(one.request.watch for one in self.sequences):
            return
        ids, prob, _, _, given, committed, number, closed = (part.tolist() for part in self.state.draft)
        valid, winner = self.candidates.valid.sum(-1).tolist(), self.winner.tolist()
        texts, scores, begin = self.candidates.ids.tolist(), self.scores.tolist(), self.state.begin.tolist()
        for row, one in enumerate(self.sequences):
            if not one.request.watch:
                continue
            cells = (ids[row], prob[row], given[row], committed[row], closed[row])
            seen = (texts[row][: valid[row]], scores[row][: valid[row]], winner[row])
            yield one, Pass(one.index, begin[row] // self.size, number[row], *cells, *seen)

    def next_blocks(self, finished: set[int]) -> None:
        """Start the next block where one has closed, and let finished texts leave the batch."""
        draft = merge(~self.state.draft.closed, self.state.draft, self._fresh())
        self.state = self.state._replace(draft=draft, begin=self._begin(), known=self._known())
        if finished:
            self.leave(finished)

    def leave(self, finished: set[int]) -> None:
        """Drop these rows."""
        left = [row for row in range(len(self.sequences)) if row not in finished]
        self.sequences = [self.sequences[row] for row in left]
        rows = self._tensor(left, torch.int64)
        self.state = self.state.rows(rows)
        if self.cache is not None:
            self.cache.keep(rows)
