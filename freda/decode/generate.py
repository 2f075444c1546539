"""The reference loop over blocks: plain, exact, and what every faster path must equal.

All requests go forward together as one batch, each at its own block and pass, until the last is finished; prefill is
nothing but the first commit. One forward carries, for every request,

    [ committed tokens that are not in the cache yet | the current draft ]

so the prompt, and later each finished block, enters the cache in the same forward that drafts the next block (M13).
Where blocks begin, what their slots show and which tokens are committed is a matter of the geometry: in the paper's
layout the last P mod B tokens of a prompt sit in the first generated block as given tokens (M12); in the shifted layout
the first slot shows the last known token, which is committed with the block. The autoregressive method has no draft
part and predicts after its last committed token. Where drafts are checked, the draft stands among the committed tokens,
too, and is kept as far as these predict it: a pass closes a prefix of its block. The next one runs that prefix again,
which the engine spares itself.

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
from freda.methods.draft import Candidates
from freda.methods.method import Method
from freda.methods.state import Seen, fresh_drafts, new_state
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
                outputs[one.index] = one.made(event, seconds)
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
        fresh = fresh_drafts([text.tail for text in sequences], self.size, self.model.blank_id, self.device)
        self.state = new_state(asked, fresh, self._begin(), self._known(), stops)

    def _tensor(self, values: abc.Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _begin(self) -> Tensor:
        return self._tensor([len(text.clean) for text in self.sequences], torch.int64)

    def _known(self) -> Tensor:
        return self._tensor([text.known for text in self.sequences], torch.int64)

    def commit(self) -> None:
        """A forward that only commits, where there is something to commit into the cache."""
        waiting = [text for text in self.sequences if text.pending]
        apart = self.geometry.drafts and not self.geometry.checked  # elsewhere the pass itself commits
        if waiting and self.cache is not None and apart:
            self._forward(None)
            for text in waiting:
                text.nfe += 1

    def draft_pass(self) -> dict[int, list[int]]:
        """One forward that commits what is pending and predicts; returns the tokens that have become final by row, none
        where the probabilities are not finite."""
        limits = self.method.limits([one.request for one in self.sequences])
        self.candidates = found = self.method.candidates(self.state, limits)
        rows, count = found.valid.shape
        slots, text = self._forward(found if self.geometry.drafts else None)
        for one in self.sequences:
            one.nfe += 1
        sampling = self.state.sampling if limits.samples else None
        choices = None
        if self.geometry.checked:
            choices = self.method.predict(self.model.logits(text), sampling, self.state.position)
        soft = self._soft if count > 1 else None
        self.winner, self.scores = self.method.choose(self.parts, self.state, found, soft, choices)
        row = torch.arange(rows, device=self.device)
        logits = self.model.logits(slots.view(rows, count, self.size, -1)[row, self.winner])
        position = self.state.position + found.ahead[row, self.winner][:, None]
        prediction, seen = self.method.predict(logits, sampling, position), Seen(found, self.winner, choices)
        self.draft, following = self.method.settle(self.state, prediction, seen, self.model.blank_id)
        self.state = self.state._replace(draft=following, probs=logits.softmax(-1) if limits.draws else None)
        finite = self.draft.prob.isfinite().all(-1).tolist()
        over = enumerate(zip(self.draft.closed.tolist(), finite, self.draft.ids.tolist(), strict=True))
        return {row: ids[:closed] if known else [] for row, (closed, known, ids) in over if closed or not known}

    def _pending(self) -> list[list[int]]:
        """The tokens that the next forward runs as text: what is committed and not stored, and drafts to be checked."""
        pending = [text.pending for text in self.sequences]
        if not self.geometry.checked:
            return pending
        shown, _ = self.geometry.shown(self.state.known, self.state.draft.ids, self.state.draft.prob)
        checks = self.method.checks(self.state.draft).tolist()
        return [tokens + draft * check for tokens, draft, check in zip(pending, shown.tolist(), checks, strict=True)]

    def _forward(self, drafts: Candidates | None) -> tuple[Tensor, Tensor]:
        """Run [pending clean tokens | drafts] over the cache; returns the hidden states that predict, (R, C·B, D), and
        those of the last B pending tokens. Without drafts the last pending token predicts."""
        pending = self._pending()
        counts = self._tensor([len(tokens) for tokens in pending], torch.int64)
        width = max(len(tokens) for tokens in pending)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in pending]
        ids = self._tensor(padded, torch.int64).view(len(pending), width)
        place = torch.arange(width, device=self.device)
        real = place < counts[:, None]  # (R, W)
        position = self._tensor([text.stored for text in self.sequences], torch.int64)[:, None] + place
        x = self.model.embed_tokens(ids)
        tokens = clean_tokens(torch.where(real, 0, -1), position, self.geometry.context)
        last = counts[:, None] + torch.arange(-self.size, 0, device=self.device)
        row = torch.arange(len(pending), device=self.device)[:, None]
        if drafts is None:
            hidden = self._run(x, position, tokens, real)
            return hidden[row[:, 0], counts - 1][:, None], hidden
        begin = (self.state.begin - self.geometry.shift)[:, None] + drafts.ahead  # (R, C): of the slots
        first = begin.repeat_interleave(self.size, dim=1)  # (R, C·B)
        count = drafts.valid.shape[1]
        where = first + torch.arange(self.size, device=self.device).repeat(count)
        candidate = torch.arange(count, device=self.device).repeat_interleave(self.size).expand_as(where)
        ids, alpha = self.state.shown(self.geometry, drafts)
        x = torch.cat([x, self.method.embed(self.model, ids.flatten(1), alpha.flatten(1))], dim=1)
        tokens = concat(tokens, draft_tokens(torch.zeros_like(where), first, candidate))
        hidden = self._run(x, torch.cat([position, where], dim=1), tokens, real)
        return hidden[:, width:], hidden[row, last.clamp_min(0)]

    def _run(self, x: Tensor, position: Tensor, tokens: Tokens, real: Tensor) -> Tensor:
        """The forward itself; what it commits goes into the cache."""
        past, keys = None, tokens
        if self.cache is not None:
            self.cache.lengths = self._tensor([text.stored for text in self.sequences], torch.int64)
            past, keys = self.cache.past(), concat(self.cache.tokens(self.geometry.context), tokens)
        out: Forward = self.model(x, position, make_mask(tokens, keys, self.model.backend), past)
        if x.shape[1] > real.shape[1] + self.size:  # several candidates
            self._soft = self._scorer_view(out, position, tokens, keys, past, real.shape[1])
        if self.cache is not None:
            self.cache.write(out.new, position[:, : real.shape[1]], real)
            for text in self.sequences:
                text.stored = self.geometry.storable(len(text.clean))
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
        ids, prob, _, _, given, committed, number, closed = (part.tolist() for part in self.draft)
        valid, winner = self.candidates.valid.sum(-1).tolist(), self.winner.tolist()
        texts, scores, begin = self.candidates.ids.tolist(), self.scores.tolist(), self.state.begin.tolist()
        for row, one in enumerate(self.sequences):
            if not one.request.watch:
                continue
            cells = (ids[row], prob[row], given[row], committed[row], closed[row])
            seen = (texts[row][: valid[row]], scores[row][: valid[row]], winner[row])
            yield one, Pass(one.index, begin[row] // self.size, number[row], *cells, *seen)

    def next_blocks(self, finished: set[int]) -> None:
        """Go on behind what has closed, and let finished texts leave the batch."""
        self.state = self.state._replace(begin=self._begin(), known=self._known())
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
