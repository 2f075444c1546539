"""The reference loop over blocks: plain, exact, and what every faster path must equal.

All requests of a batch go forward together, each at its own block and pass. One forward carries, for every request,

    [ committed tokens that are not in the cache yet | the current draft ]

so the prompt, and later each finished block, enters the cache in the same forward that drafts the next block (M13);
prefill is nothing but the first commit. Blocks are absolute: the last P mod B tokens of a prompt sit in the first
generated block as given tokens (M12). The autoregressive method has no draft part and predicts after its last
committed token.

Counting (M14): a forward counts once for each request that it chooses tokens or commits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freda.config import DecodeConfig, MethodConfig
from freda.errors import require
from freda.methods.candidates import choose, merge_candidates, propose, sample
from freda.methods.draft import (
    Candidates,
    Draft,
    Rules,
    Sampling,
    Search,
    alone,
    feedback_weight,
    merge,
    predict,
    soft_embedding,
    start,
)
from freda.methods.method import Method, block_size
from freda.model.attention import make_mask
from freda.model.cache import Cache
from freda.model.masks import Tokens, clean_tokens, concat, draft_tokens
from freda.model.scorer import Scorer
from freda.model.transformer import Forward, KeysValues, Transformer


@dataclass(frozen=True, kw_only=True)
class Request(DecodeConfig):
    """One text to continue, and how."""

    prompt: Sequence[int]


@dataclass(frozen=True)
class Output:
    """A finished request."""

    tokens: list[int]  # new tokens, up to and including the stop token
    nfe: int  # forwards that chose or committed tokens of this request
    finish: str  # "stop" or "length"
    seconds: float

    @property
    def tpf(self) -> float:
        """Tokens per forward."""
        return len(self.tokens) / self.nfe


class Pass(NamedTuple):
    """What one pass left of one request's block; for drawing."""

    request: int
    block: int
    number: int  # 1 is the blank draft
    ids: list[int]
    prob: list[float]
    given: list[bool]
    committed: list[bool]
    closed: bool
    candidates: list[list[int]]  # the drafts that this pass has seen
    scores: list[float]  # of the candidates: ℓ + τ·s, without the noise
    winner: int


Watch = Callable[[Pass], None]


class _Text:
    """The progress of one request."""

    def __init__(self, index: int, request: Request, size: int) -> None:
        whole = len(request.prompt) // size * size
        self.index, self.request = index, request
        self.clean = list(request.prompt[:whole])  # committed tokens: whole blocks
        self.tail = list(request.prompt[whole:])  # prompt tokens given in the first generated block
        self.stored = 0  # how many of `clean` are in the cache
        self.new: list[int] = []
        self.nfe = 0

    def close_block(self, ids: list[int], stop_ids: set[int]) -> str | None:
        """Take over a finished block; says why the text is finished, if it is."""
        given, self.tail = len(self.tail), []
        for token in ids[given:]:
            self.new.append(token)
            if token in stop_ids:
                return "stop"
            if len(self.new) == self.request.max_new_tokens:
                return "length"
        self.clean += ids
        return None


@torch.no_grad()
def generate(
    model: Transformer,
    method: Method,
    config: MethodConfig,
    requests: Sequence[Request],
    *,
    stop_ids: Sequence[int],
    stopped: Callable[[Sequence[int]], bool] | None = None,
    fused: bool = True,
    cached: bool = True,
    watch: Watch | None = None,
) -> list[Output]:
    """Continue every request. `stopped` is asked after each block whether the new tokens of a text are enough, for stop
    strings. `fused=False` commits in forwards of their own and `cached=False` keeps no cache: the plain twins, with
    equal tokens."""
    _check(model, method, config, requests)
    begun = time.perf_counter()
    outputs: dict[int, Output] = {}
    loop = _Loop(model, method, config, requests, stop_ids, cached=cached)
    while loop.texts:
        if not fused:
            loop.commit()
        closed = loop.draft_pass()
        if watch is not None:
            loop.show(watch)
        finished = set()
        for row in closed:
            text = loop.texts[row]
            reason = text.close_block(loop.draft.ids[row].tolist(), loop.stop_ids)
            if reason is None and stopped is not None and stopped(text.new):
                reason = "stop"
            if reason:
                finished.add(row)
                outputs[text.index] = Output(text.new, text.nfe, reason, time.perf_counter() - begun)
        loop.next_blocks(finished)
    return [outputs[index] for index in range(len(requests))]


class _Loop:
    """The batch: per-request progress on the host, drafts and cache on the device."""

    def __init__(
        self,
        model: Transformer,
        method: Method,
        config: MethodConfig,
        requests: Sequence[Request],
        stop_ids: Sequence[int],
        *,
        cached: bool,
    ) -> None:
        self.model, self.method, self.config = model, method, config
        self.size, self.stop_ids = block_size(method, config), set(stop_ids)
        self.device = model.embed_tokens.weight.device
        self.texts = [_Text(index, request, self.size) for index, request in enumerate(requests)]
        longest = max((len(r.prompt) + r.max_new_tokens + self.size for r in requests), default=0)
        self.cache = Cache(model, len(requests), longest) if cached else None
        self.rules = Rules(
            self._tensor([r.passes for r in requests], torch.int64),
            self._tensor([r.threshold for r in requests], torch.float32),
            self._tensor(sorted(self.stop_ids), torch.int64),
        )
        self.sampling = Sampling(
            self._tensor([r.temperature for r in requests], torch.float32),
            self._tensor([r.top_p for r in requests], torch.float32),
            self._tensor([r.seed for r in requests], torch.int64),
        )
        self.search = Search(
            self._tensor([r.width for r in requests], torch.int64),
            self._tensor([r.swaps for r in requests], torch.int64),
            self._tensor([r.tau for r in requests], torch.float32),
            self._tensor([r.candidates == "sampled" for r in requests], torch.bool),
            self._tensor([r.select == "gumbel" for r in requests], torch.bool),
            self._tensor([r.seed for r in requests], torch.int64),
        )
        self.most_swaps = max((r.swaps for r in requests), default=0)
        self.draft = self._fresh()
        self.share: Tensor | None = None  # (R, B, V): what the last pass gave, where candidates are drawn from it

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _fresh(self) -> Draft:
        """The next block of every text: blank but for the tail of its prompt."""
        shape = (len(self.texts), self.size)
        ids = [text.tail + [0] * (self.size - len(text.tail)) for text in self.texts]
        given = [[place < len(text.tail) for place in range(self.size)] for text in self.texts]
        tokens, mask = self._tensor(ids, torch.int64).view(shape), self._tensor(given, torch.bool).view(shape)
        return start(tokens, mask, self.model.blank_id)

    def commit(self) -> None:
        """A forward that only commits, where there is something to commit into the cache."""
        waiting = [text for text in self.texts if text.stored < len(text.clean)]
        if waiting and self.cache is not None and self.method.DRAFTS:
            self._forward(with_draft=False)
            for text in waiting:
                text.nfe += 1

    def draft_pass(self) -> list[int]:
        """One forward that commits what is pending and predicts; returns the rows whose block has closed."""
        self.candidates = self._propose()
        hidden = self._forward(with_draft=self.method.DRAFTS)
        for text in self.texts:
            text.nfe += 1
        logits = self.model.logits(self._best(hidden))
        sampling = self.sampling if any(text.request.temperature > 0 for text in self.texts) else None
        prediction = predict(logits, sampling, self._draft_position(), runner_up=self.method.SCORES)
        self.share = logits.softmax(-1) if self._draws() else None
        self.draft = self.method.update(self.draft, prediction, self.rules)
        return [row for row, closed in enumerate(self.draft.closed.tolist()) if closed]

    def _propose(self) -> Candidates:
        """What the forward sees of every draft: the draft itself, or several candidates side by side."""
        if not self.method.SCORES:
            return alone(*self.method.rows(self.draft, self.config))
        width = max(text.request.width for text in self.texts)
        found = propose(self.draft, self.search, width=width, swaps=self.most_swaps)
        if self.share is not None:
            drawn = sample(self.draft, self.share, self.search, self._draft_position(), width=width)
            found = merge_candidates(self.search.sampled, found, drawn)
        count = int(found.valid.sum(-1).max())  # the valid ones come first; a blank draft has one
        found = Candidates(*(part[:, :count] for part in found))
        return found._replace(alpha=feedback_weight(found.alpha, self.config))

    def _draws(self) -> bool:
        """Does a request want its candidates drawn from the proposal?"""
        return self.method.SCORES and any(text.request.candidates == "sampled" for text in self.texts)

    def _best(self, hidden: Tensor) -> Tensor:
        """The hidden states (R, B, D) of the candidate that goes on, out of those of all, (R, C·B, D)."""
        rows, count = self.candidates.valid.shape
        self.scores = self.candidates.log_prob
        self.winner = torch.zeros(rows, dtype=torch.int64, device=self.device)
        if self.model.scorer is None or not self.method.SCORES:
            return hidden
        shape = (rows, count, self.size, -1)
        embedding = self.model.embed_tokens(self.candidates.ids)
        counted = torch.ones_like(self.candidates.ids, dtype=torch.bool).flatten(0, 1)
        soft = self.soft.view(shape).flatten(0, 1)
        score = self.model.scorer(soft, embedding.flatten(0, 1), counted).view(rows, count)
        place = torch.stack([self._draft_position()[:, 0], self.draft.passes], dim=-1)
        self.scores = self.candidates.log_prob + self.search.tau[:, None] * score
        self.winner = choose(self.candidates, score, self.search, place)
        return hidden.view(shape)[torch.arange(rows, device=self.device), self.winner]

    def _draft_position(self) -> Tensor:
        begin = self._tensor([len(text.clean) for text in self.texts], torch.int64)
        return begin[:, None] + torch.arange(self.size, device=self.device)  # (R, B)

    def _forward(self, *, with_draft: bool) -> Tensor:
        """Run [pending clean tokens | draft] over the cache; returns the hidden states that predict, (R, B, D)."""
        pending = [text.clean[text.stored :] for text in self.texts]
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
            where = self._draft_position().repeat(1, count)  # (R, C·B)
            candidate = torch.arange(count, device=self.device).repeat_interleave(self.size).expand_as(where)
            position = torch.cat([position, where], dim=1)
            x = torch.cat([x, self._draft_embedding()], dim=1)
            tokens = concat(tokens, draft_tokens(torch.zeros_like(where), where, self.size, candidate))
        hidden = self._run(x, position, tokens, real)
        if self.method.DRAFTS:
            return hidden[:, width:]
        return hidden[torch.arange(len(pending), device=self.device), counts - 1][:, None]

    def _draft_embedding(self) -> Tensor:
        ids, alpha = self.candidates.ids.flatten(1), self.candidates.alpha.flatten(1)  # (R, C·B)
        return soft_embedding(self.model, ids, alpha, rescale=self.config.rescale)

    def _run(self, x: Tensor, position: Tensor, tokens: Tokens, real: Tensor) -> Tensor:
        """The forward itself; what it commits goes into the cache."""
        past = None if self.cache is None else self.cache.past()
        keys = tokens if self.cache is None else concat(self.cache.tokens(self.size), tokens)
        out: Forward = self.model(x, position, make_mask(tokens, keys, self.model.backend), past)
        if self.method.SCORES and x.shape[1] > real.shape[1]:  # not a forward that only commits
            self.soft = self._soft_channel(out, position, tokens, keys, past, real.shape[1])
        if self.cache is not None:
            self.cache.write(out.new, position[:, : real.shape[1]], real)
            for text in self.texts:
                text.stored = len(text.clean)
        return out.hidden

    def _soft_channel(
        self,
        out: Forward,
        position: Tensor,
        tokens: Tokens,
        keys: Tokens,
        past: Sequence[KeysValues] | None,
        committed: int,
    ) -> Tensor:
        """What the scorer sees of the draft part of a forward, which begins after `committed` tokens: (R, C·B, D)."""
        scorer = self.model.scorer
        assert isinstance(scorer, Scorer)
        out_of_draft = out._replace(hidden=out.hidden[:, committed:], beneath=out.beneath[:, committed:])
        if scorer.last_layer is None:
            return out_of_draft.hidden
        draft = Tokens(*(part[:, committed:] for part in tokens))
        seen = KeysValues(*(part[:, :, :committed] for part in out.new[-1]))
        if past is not None:
            seen = KeysValues(*(torch.cat(pair, dim=2) for pair in zip(past[-1], seen, strict=True)))
        mask = make_mask(draft, keys, self.model.backend)
        return scorer.soft_channel(self.model, out_of_draft, position[:, committed:], mask, seen)

    def show(self, watch: Watch) -> None:
        """Hand the state after a pass to the watcher."""
        draft = [part.tolist() for part in self.draft]
        ids, prob, _, _, given, committed, passes, closed = draft
        candidates, scores = self.candidates.ids.tolist(), self.scores.tolist()
        valid, winner = self.candidates.valid.sum(-1).tolist(), self.winner.tolist()
        for row, text in enumerate(self.texts):
            block, count = len(text.clean) // self.size, valid[row]
            state = (ids[row], prob[row], given[row], committed[row], closed[row])
            seen = (candidates[row][:count], scores[row][:count], winner[row])
            watch(Pass(text.index, block, passes[row], *state, *seen))

    def next_blocks(self, finished: set[int]) -> None:
        """Start the next block where one has closed, and let finished texts leave the batch."""
        self.draft = merge(~self.draft.closed, self.draft, self._fresh())
        if not finished:
            return
        left = [row for row in range(len(self.texts)) if row not in finished]
        self.texts = [self.texts[row] for row in left]
        rows = self._tensor(left, torch.int64)
        self.draft = Draft(*(part[rows] for part in self.draft))
        self.rules = self.rules._replace(passes=self.rules.passes[rows], threshold=self.rules.threshold[rows])
        self.sampling = Sampling(*(part[rows] for part in self.sampling))
        self.search = Search(*(part[rows] for part in self.search))
        self.share = None if self.share is None else self.share[rows]
        if self.cache is not None:
            self.cache.keep(rows)


def _check(model: Transformer, method: Method, config: MethodConfig, requests: Sequence[Request]) -> None:
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
