"""A pass as one function of tensors: what is known of R requests goes from pass to pass, and not through the host.

A pass is candidates, forward, choice, prediction, commitment, and, where a block has closed, or a prefix of it, the
next draft, with the tokens that are to be run as text. Texts end here, too, at a stop token or at their length, so that
the next pass can be started before the host has read the report of this one. On CUDA a pass is captured as a graph,
once for each shape of its forward. What a request is on the device is a row of `Held`: `enter` writes rows in place.

Who does the forward is a `ForwardBackend`: the kernels of `packed.py`, or the Transformer itself (`plain.py`). Who
decides which requests have rows, and reads the reports, is `places.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from freda.decode.config import DecodeConfig
from freda.decode.pages import BlockPlaces, BlockTable, ForwardShape, Pieces
from freda.methods.draft import Candidates, Draft, Prediction, Rules, Sampling, Search, merge, start
from freda.methods.method import Method
from freda.methods.state import DecodeState, Limits, Seen, fresh_drafts, new_state
from freda.model.parts import Parts

# Tokens whose choices read the head once and take no longer than one's: drafts that are checked and their candidates
# choose together, though one candidate will be kept.
CHOSEN_TOGETHER = 64


class ForwardBackend(Protocol):
    """What runs the forwards: `packed.PackedModel` or `plain.PlainModel`."""

    graphs: bool  # can a CUDA graph capture it?

    def buffers(self, shape: ForwardShape, long: bool) -> Any:
        """Memory for a forward; `long`: over long texts."""

    def run(
        self,
        given: tuple[Tensor, Tensor],
        blocks: BlockPlaces,
        texts: BlockTable,
        shape: ForwardShape,
        buffers: Any,
        pieces: Pieces | None = None,
    ) -> None:
        """All layers over blocks of tokens `given` as (ids, α), each (P · B,), and over pieces of prompts; prompts and
        blocks of text go into the pages."""

    def soft(self, tokens: Tensor, buffers: Any) -> Tensor:
        """What a scorer sees of `tokens`, which number those of the last forward: (..., D)."""

    def predict(
        self, tokens: Tensor, buffers: Any, sampling: Sampling | None = None, position: Tensor | None = None
    ) -> Prediction:
        """An id for each of `tokens` (N, B), its probability, and the runner-up where the method looks at it."""

    def logits(self, tokens: Tensor, buffers: Any) -> Tensor:
        """All logits of `tokens` (N, B), in fp32."""

    def fill(self, pieces: Pieces, shape: ForwardShape, buffers: Any) -> None:
        """Keys and values of pieces of prompts into the pages."""


class Held(NamedTuple):
    """What the device knows of R requests between two passes."""

    state: DecodeState
    texts: BlockTable
    pending_ids: Tensor  # (R, B) int64: the block to run as text
    end: Tensor  # (R,) int64: the position behind the last token that the request may write
    real: Tensor  # (R,) bool: whether a request is running in this row

    def rows(self, count: int, *, probs: bool) -> Held:
        """The first rows, in the same memory; with what the last passes predicted, or without."""
        state, texts, *rest = self
        state = state.rows(slice(0, count))
        return Held(
            state if probs else state._replace(probs=None),
            BlockTable(*(part[:count] for part in texts)),
            *(part[:count] for part in rest),
        )


def new_held(rows: int, pages: int, parts: Parts, block: int, stop_ids: abc.Sequence[int]) -> Held:
    """Rows without requests."""
    device, blank = parts.device, parts.backbone.blank_id
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    stops = torch.tensor(stop_ids, dtype=torch.int64, device=device)
    draft = Draft(*(part.clone() for part in fresh_drafts([[]] * rows, block, blank, device)))  # none shares memory
    state = new_state([DecodeConfig()] * rows, draft, zeros, zeros.clone(), stops)
    state = state._replace(search=state.search._replace(seed=zeros.clone()))  # not the memory of `sampling.seed`
    table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
    texts = BlockTable(table, zeros.int(), zeros.int())
    return Held(state, texts, torch.zeros(rows, block, dtype=torch.int64, device=device), zeros.clone(), zeros.bool())


# -- entering --------------------------------------------------------------------------------------------------------

PLACE = ("row", "real", "begin", "known", "end", "stored", "pending", "tail")
WHOLE = (*PLACE, "passes", "seed", "width", "swaps", "sampled", "gumbel")
FLOATS = ("threshold", "temperature", "top_p", "tau")


def record_width(block: int, pages: int) -> int:
    """Numbers in a record of `enter`."""
    return len(WHOLE) + len(FLOATS) + 2 * block + pages


def enter(held: Held, records: Tensor, blank_id: int) -> None:
    """Write rows of `held` anew, each from a record (n, ·) int64.

    A record has what `WHOLE` names, the bits of what `FLOATS` names as float64, the tokens of the first block and of
    the one to commit, and the pages of the text.
    """
    block, counts = held.pending_ids.shape[1], (len(WHOLE), len(FLOATS))
    widths = [*counts, block, block, held.texts.table.shape[1]]
    whole, floats, ids, pending_ids, table = torch.split(records, widths, dim=1)
    w = dict(zip(WHOLE, whole.unbind(1), strict=True))
    f = dict(zip(FLOATS, floats.view(torch.float64).float().unbind(1), strict=True))
    given = torch.arange(block, device=ids.device) < w["tail"][:, None]
    state = DecodeState(
        start(ids, given, blank_id),
        w["begin"],
        w["known"],
        Rules(w["passes"], f["threshold"], held.state.rules.stop_ids),
        Sampling(f["temperature"], f["top_p"], w["seed"]),
        Search(w["width"], w["swaps"], f["tau"], w["sampled"].bool(), w["gumbel"].bool(), w["seed"]),
    )
    texts = BlockTable(table.int(), w["stored"].int(), w["pending"].int())
    new = Held(state, texts, pending_ids, w["end"], w["real"].bool())
    for old, value in zip(_of_rows(held), _of_rows(new), strict=True):
        old.index_copy_(0, w["row"], value)


def _of_rows(held: Held) -> list[Tensor]:
    """All tensors that have a row for each request, but for predictions of a last pass."""
    state, texts, *rest = held
    return [*state.draft, *state[1:3], *state.rules[:2], *state.sampling, *state.search, *texts, *rest]


def changing(held: Held) -> list[Tensor]:
    """The tensors that a pass changes."""
    state, texts, pending_ids, _, real = held
    probs = [] if state.probs is None else [state.probs]
    return [*state.draft, state.begin, state.known, texts.stored, texts.pending, pending_ids, real, *probs]


# -- one pass --------------------------------------------------------------------------------------------------------
# The functions around the forward return tensors and plain tuples: torch 2.11 damages a named tuple that a compiled
# function returns (its fields cannot be taken apart).


def laid_out(held: Held, method: Method, limits: Limits, shape: ForwardShape) -> tuple[Tensor, ...]:
    """What a forward sees: ids and α of its tokens, (P · B,) each; the two parts of `BlockPlaces`; which requests are
    `going` (R,); and the `Candidates` among the blocks.

    Where more blocks want to go than there are places, the last requests wait for the next pass; so does a request with
    several candidates where a forward has room for one.
    """
    state, texts, pending_ids, _, real = held
    drafts = shape.blocks - 1
    found = method.candidates(state, limits, count=max(1, drafts))
    ids, alpha = pending_ids[:, None], torch.ones_like(pending_ids[:, None], dtype=torch.float32)
    wanted, behind = (texts.pending > 0)[:, None], torch.zeros_like(texts.pending)[:, None]
    if drafts:
        shown, weight = state.shown(method.geometry, found)
        ids, alpha = torch.cat([ids, shown], dim=1), torch.cat([alpha, weight], dim=1)  # (R, J, B)
        wanted = torch.cat([wanted, found.valid], dim=1)
        first = (state.begin - method.geometry.shift - texts.stored)[:, None] + found.ahead  # of the slots
        behind = torch.cat([behind, first.int()], dim=1)
    going = real
    if 0 < drafts < limits.width:  # no place for more candidates than one, which is what a blank draft has
        going = going & ((state.draft.passes == 0) | (state.search.width == 1))
    if shape.dense:
        where = torch.arange(shape.packed, dtype=torch.int32, device=ids.device).view(wanted.shape)
        return ids.flatten(), alpha.flatten(), where, behind, going, *found
    wanted = wanted & going[:, None]
    needed = wanted.sum(-1)
    last = needed.cumsum(0)
    going = going & (last <= shape.packed)
    place = (last - needed)[:, None] + wanted.cumsum(-1) - 1
    where = torch.where(wanted & going[:, None], place, -1)
    packed = torch.where(where < 0, shape.packed, where).flatten()
    all_ids = ids.new_zeros(shape.packed + 1, shape.block).index_copy(0, packed, ids.flatten(0, 1))
    all_alpha = alpha.new_zeros(shape.packed + 1, shape.block).index_copy(0, packed, alpha.flatten(0, 1))
    return all_ids[:-1].flatten(), all_alpha[:-1].flatten(), where.int(), behind, going, *found


def choice(
    parts: Parts,
    method: Method,
    state: DecodeState,
    found: abc.Sequence[Tensor],
    soft: Tensor | None,
    text: abc.Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The candidate among `found` that is kept, (R,), and the scores of all, (R, C)."""
    winner, scores = method.choose(parts, state, Candidates(*found), soft, None if text is None else Prediction(*text))
    return winner, scores


class Told(NamedTuple):
    """What `advance` hears of a forward: who is going, the candidates and which of them is kept, and, where drafts are
    checked, the `Prediction` of the text."""

    going: Tensor
    found: abc.Sequence[Tensor]
    winner: Tensor
    scores: Tensor
    text: abc.Sequence[Tensor] | None


def advance(held: Held, method: Method, prediction: abc.Sequence[Tensor], told: Told, blank_id: int) -> Tensor:
    """Bring the requests that are going behind a `Prediction` (R, B); returns the report, as `Report` reads it.

    The new state is written over the old one here, so that compiled, nothing is copied afterwards.
    """
    state, texts, pending_ids, end, real = held
    going, found, winner, scores, text = told
    block, checked = pending_ids.shape[1], method.geometry.checked
    seen = Seen(Candidates(*found), winner, None if text is None else Prediction(*text))
    made = method.settle(state, Prediction(*prediction), seen, blank_id)
    draft, following = (merge(~going, state.draft, part) for part in made)
    finite, closed = draft.prob.isfinite().all(-1), draft.closed * going
    final = torch.arange(block, device=closed.device) < closed[:, None]
    stops = final & torch.isin(draft.ids, state.rules.stop_ids) & ~draft.given & (state.position < end[:, None])
    ended = ((closed > 0) & (stops.any(-1) | (state.begin + closed >= end))) | (going & ~finite)
    numbers = torch.stack([going, closed, finite, ended, draft.passes, following.passes], dim=1)
    parts = [numbers, draft.ids, draft.committed, draft.prob.view(torch.int32)]
    parts += [found[3].sum(-1, keepdim=True), winner[:, None], scores.view(torch.int32), found[0].flatten(1)]
    report = torch.cat([part.int() for part in parts], dim=1)
    known = draft.ids.gather(1, (closed - 1).clamp_min(0)[:, None])[:, 0]
    known = torch.where(closed > 0, known, state.known)
    if checked:  # of the text that was run, what is final stays; the next draft is run as text when it is ready
        stored, commits = texts.stored + closed, method.checks(following)
        slots, _ = method.geometry.shown(known, following.ids, following.prob)
    else:  # all of it stays; a block that has closed is run as text next
        stored, commits = texts.stored + texts.pending, closed > 0
        slots, _ = method.geometry.shown(state.known, draft.ids, draft.prob)
    stored, pending = torch.where(going, stored, texts.stored), torch.where(going, block * commits, texts.pending)
    texts = texts._replace(stored=(stored * ~ended).to(texts.stored), pending=(pending * ~ended).to(texts.pending))
    state = state._replace(draft=following, begin=state.begin + closed, known=known)
    pending_ids = torch.where((commits & going)[:, None], slots, pending_ids)
    after = Held(state, texts, pending_ids, end, real & ~ended)
    for old, new in zip(changing(held), changing(after), strict=True):
        if old is not new:
            old.copy_(new)
    return report


class Report:
    """What a pass has told of R requests, C candidates each, read from its numbers (R, ·) int32 on the host."""

    def __init__(self, numbers: Any, block: int, candidates: int) -> None:
        self.going, self.finite, self.ended = (numbers[:, column] != 0 for column in (0, 2, 3))
        # How many tokens are final now; passes over this draft, and over the one that goes on.
        self.closed, self.passes, self.done = (numbers[:, column] for column in (1, 4, 5))
        ends = list(itertools.accumulate([block, block, block, 1, 1, candidates], initial=6))
        self.ids, self.committed, prob, self.valid, self.winner, scores = (
            numbers[:, begin:end] for begin, end in itertools.pairwise(ends)
        )
        self.prob, self.scores = prob.view("float32"), scores.view("float32")
        self.candidates = numbers[:, ends[-1] :].reshape(len(numbers), candidates, block)


@functools.cache
def _around(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What comes before a forward, the choice among candidates, and what comes after: some hundred small kernels, 350
    with a scorer, or, compiled, a few."""
    functions = (laid_out, choice, advance)
    if not compiled:
        return functions
    import torch._dynamo.config

    # Once for each method, number of requests and shape of a forward: more than the 8 that dynamo allows one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    first, second, third = (torch.compile(function, dynamic=False) for function in functions)
    return first, second, third


class Decoder(NamedTuple):
    """What makes passes: a model, who runs its forwards, a method, and whether what is around them is compiled."""

    parts: Parts
    backend: ForwardBackend
    method: Method
    compiled: bool


class Kind(NamedTuple):
    """What passes of one kind have in common."""

    shape: ForwardShape
    limits: Limits  # of the requests
    long: bool  # some of few texts are long


def pass_of(decoder: Decoder, held: Held, kind: Kind, pieces: Pieces | None = None) -> Callable[[], Tensor]:
    """A pass over all rows of `held`, in which pieces of prompts ride along: a function that returns its report."""
    (parts, backend, method, compiled), (shape, limits, long) = decoder, kind
    before, choose, after = _around(compiled)
    buffers, blank_id = backend.buffers(shape, long), parts.backbone.blank_id
    place, row = (torch.arange(count, device=parts.device) for count in (shape.block, shape.rows))

    checked, every = method.geometry.checked, shape.rows * shape.blocks * shape.block <= CHOSEN_TOGETHER

    def chosen(tokens: Tensor, further: Tensor) -> list[Tensor]:
        """The `Prediction` of blocks `tokens` (R, n, B) that stand `further` (R, n) right than the drafts."""
        sampling, position = None, held.state.position[:, None] + further[..., None]
        if limits.samples:
            sampling = Sampling(*(part.repeat_interleave(tokens.shape[1]) for part in held.state.sampling))
        made = backend.predict(tokens.flatten(0, 1), buffers, sampling, position.flatten(0, 1))
        return [part.view(tokens.shape) for part in made]

    def run() -> Tensor:
        state = held.state
        ids, alpha, where, behind, going, *found = before(held, method, limits, shape)
        backend.run((ids, alpha), BlockPlaces(where, behind), held.texts, shape, buffers, pieces)
        tokens = where.clamp_min(0).long()[..., None] * shape.block + place  # (R, J, B)
        ahead = F.pad(found[4], (1, 0))[:, : shape.blocks]  # (R, J)
        made, text, soft = list[Tensor](), None, None
        if checked:
            made = chosen(tokens, ahead) if every else chosen(tokens[:, :1], ahead[:, :1])
            text = [part[:, 0] for part in made]
        elif shape.blocks > 2:
            soft = backend.soft(tokens[:, 1:].flatten(1), buffers)
        winner, scores = choose(parts, method, state, found, soft, text)
        block = (row, winner + (shape.blocks > 1))
        if checked and every:
            prediction = [part[block] for part in made]
        else:
            prediction = [part[:, 0] for part in chosen(tokens[block][:, None], ahead[block][:, None])]
        if state.probs is not None:
            known = backend.logits(tokens[block], buffers).softmax(-1)
            state.probs.copy_(torch.where(going[:, None, None], known, state.probs))
        report: Tensor = after(held, method, prediction, Told(going, found, winner, scores, text), blank_id)
        return report

    return run


def captured(run: Callable[[], Tensor | None], changed: abc.Sequence[Tensor], pool: Any) -> Callable[[], Tensor | None]:
    """A function as a CUDA graph. What it has `changed` when it was run to warm up is undone; pages are not, where it
    has written what the first replay will write again."""
    before = [tensor.clone() for tensor in changed]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            made = run()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(run: Callable[[], Tensor | None] = run) -> Tensor | None:  # which holds the memory the graph writes to
        graph.replay()
        return made

    return replay
