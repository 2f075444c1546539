"""log p(continuation given context), in tokens (M15; docs/how-it-works.md, section 8).

There are two readings. `tokens`: the next-token distributions of one causal forward over the text, which the
autoregressive method has, and the clean half of the shifted layout. `blocks`: what drafts say, by the chain rule inside
each block. The conditional of position i is what the first pass says of it when the draft shows the true tokens left of
i and BLANK from i on, over the committed text before the block. In the paper's layout the last tokens of the context
may stand in the first scored block as given tokens (M12).

Every position that drafts score needs one of its own. The drafts of a text are packed as candidates, numbered by the
position in the block that they score, so that one forward over the committed text holds the drafts of all blocks of all
rows. `fast` takes one draft per block, blank but for the given tokens, and reads all its positions: up to B times fewer
draft tokens, and another quantity, for which the tokens of a block are independent.

Shapes: R rows, S drafts and W committed tokens per row, B tokens per block, N scored positions, D width, C choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freda.errors import require
from freda.folders.model_folder import LoadedModel
from freda.methods.draft import start
from freda.methods.method import Method
from freda.model.attention import clean_tokens, concat, draft_tokens, make_mask
from freda.model.transformer import Forward, Transformer

Pair = tuple[Sequence[int], Sequence[int]]  # context, continuation
Reading = Literal["auto", "tokens", "blocks"]
Targets = Sequence[Sequence[int]]  # for each token of a continuation, those whose probability is asked for

MOST_DRAFT = 512  # draft tokens of a row in one forward: a dense mask over drafts grows with the square of this
MOST_LOGITS = 2**26  # logits in memory at once: 256 MiB of fp32, where a batch of a large vocabulary would be gigabytes


class Scored(NamedTuple):
    """What a model says of one continuation."""

    log_prob: float  # sum of `tokens`, in nats
    greedy: bool  # True if every token of the continuation is the most probable one of its conditional
    tokens: list[float]  # log-probability of each token


@torch.no_grad()
def log_likelihood(
    loaded: LoadedModel,
    pairs: Sequence[Pair],
    *,
    reading: Reading = "auto",
    fast: bool = False,
    batch_tokens: int = 16384,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Scored]:
    """Score the continuation of every (context, continuation), in the order given; an empty one has log p 0.

    Texts of like length share a forward of at most `batch_tokens` tokens (a longer text goes alone); a score depends on
    its own pair alone, up to the rounding of sums. `reading`: see `by_drafts`; `fast` concerns drafts alone. Where a
    token is predicted from the one before it, contexts must not be empty. `progress` gets the number of pairs done.
    """
    how = _How(by_drafts(loaded.method, reading), fast, batch_tokens)
    _check(loaded, pairs, batch_tokens)
    found = [Scored(0.0, True, [])] * len(pairs)
    targets: list[Targets] = [[[token] for token in continuation] for _, continuation in pairs]
    scored = _scored(loaded, pairs, targets, how)
    for done, (index, log_p, best) in enumerate(scored, start=1 + sum(not wanted for wanted in targets)):
        tokens = log_p[:, 0].tolist()
        found[index] = Scored(math.fsum(tokens), best.tolist() == list(pairs[index][1]), tokens)
        progress(done)
    return found


@torch.no_grad()
def choice_log_probs(
    loaded: LoadedModel,
    contexts: Sequence[Sequence[int]],
    choices: Sequence[int],
    *,
    reading: Reading = "auto",
    batch_tokens: int = 16384,
) -> Tensor:
    """log p of every one-token choice, an answer letter for example, right after each context: (contexts, C) fp32. All
    are read from one row of one forward and equal `log_likelihood`: a one-token continuation has one conditional."""
    _check(loaded, [(context, choices) for context in contexts], batch_tokens)
    pairs = [(context, choices[:1]) for context in contexts]  # any token holds the place
    table, how = torch.empty(len(contexts), len(choices)), _How(by_drafts(loaded.method, reading), False, batch_tokens)
    for index, log_p, _ in _scored(loaded, pairs, [[choices]] * len(pairs), how):
        table[index] = log_p[0]
    return table


def by_drafts(method: Method, reading: Reading) -> bool:
    """Whether drafts are asked, or the text itself. By default the text where its tokens predict the next ones, as in
    the shifted layout; asked for, what the method has."""
    geometry = method.geometry
    require(reading in ("auto", "tokens", "blocks"), f"likelihood is {reading!r}; use auto, tokens or blocks")
    odd = f"likelihood is tokens, but text of this {method.name} model sees ahead inside its blocks"
    require(reading != "tokens" or geometry.causal, f"{odd}; use auto or blocks")
    require(reading != "blocks" or geometry.drafts, f"likelihood is blocks, but {method.name} has none; use auto")
    return reading == "blocks" or (reading == "auto" and not (geometry.causal and geometry.shift))


def _check(loaded: LoadedModel, pairs: Sequence[Pair], batch_tokens: int) -> None:
    require(batch_tokens >= 1, f"batch_tokens is {batch_tokens}; use 1 or more")
    top, held = loaded.backbone.blank_id, loaded.method.geometry.held
    for context, continuation in pairs:
        odd = next((token for token in (*context, *continuation) if not 0 <= token < top), None)
        require(odd is None, f"token id {odd} is BLANK or beyond the vocabulary; use ids 0 to {top - 1}")
        require(
            len(context) >= held or not continuation,
            f"a context is empty, and this {loaded.method.name} model predicts a token only from one before it; begin "
            "every context with a token that is not scored: BOS if the tokenizer has it, else the text's first token",
        )


def _scored(
    loaded: LoadedModel, pairs: Sequence[Pair], targets: Sequence[Targets], how: _How
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For every pair with a continuation of n tokens, batch by batch: its index, log p of `targets` (n, C) in the
    conditional of each token, and the most probable token of each, (n,); both on the CPU."""
    for rows, hidden in _batches(loaded, pairs, how):
        wanted = torch.tensor([ids for index in rows for ids in targets[index]], device=hidden.device)  # (N, C)
        counts, log_p, best = [len(targets[index]) for index in rows], [], []
        step = max(1, MOST_LOGITS // loaded.backbone.blank_id)
        for states, ids in zip(torch.split(hidden, step), torch.split(wanted, step), strict=True):
            logits = loaded.backbone.logits(states)  # (n, V) fp32
            log_p.append(logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True))
            best.append(logits.argmax(-1))
        values = (torch.split(torch.cat(parts).cpu(), counts) for parts in (log_p, best))
        yield from zip(rows, *values, strict=True)


# -- batches: which texts go together, and the hidden states that predict ---------------------------------------------


class _How(NamedTuple):
    """How texts are scored."""

    drafts: bool  # by drafts, or by the text itself
    fast: bool  # one draft for a block
    batch_tokens: int


class _Size(NamedTuple):
    """What one text asks of a forward: committed tokens, and drafts beside them."""

    clean: int
    drafts: int


def _batches(loaded: LoadedModel, pairs: Sequence[Pair], how: _How) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of some pairs, and the hidden states (N, D) that predict their continuations, pair after pair in order.
    Together they are all that have a continuation, the longest first: if memory does not suffice, it is known at once.
    """
    geometry, sizes = loaded.method.geometry, {}
    for index, (given, scored) in enumerate((len(context), len(continuation)) for context, continuation in pairs):
        begin = geometry.begin(given)
        last = (given + scored - 1 - begin) // geometry.block  # what stands before the last scored block is committed
        drafts = last + 1 if how.fast else scored
        if scored and how.drafts:
            sizes[index] = _Size(begin + last * geometry.block - geometry.shift, drafts)
        elif scored:
            sizes[index] = _Size(given + scored - 1, 0)
    for rows in _grouped(loaded.backbone, sizes, geometry.block, how.batch_tokens):
        text = _Text([pairs[index] for index in rows], loaded.parts.device)
        widest = _Size(*(max(column) for column in zip(*(sizes[index] for index in rows), strict=True)))
        if how.drafts:
            yield rows, _draft_states(loaded, text, widest, how)
        else:
            yield rows, _causal_states(loaded.backbone, text, widest.clean)


def _grouped(model: Transformer, sizes: dict[int, _Size], block_size: int, batch_tokens: int) -> Iterator[list[int]]:
    """Texts of like size, as many as fit: rows times the widest committed and the widest draft part."""
    rows: list[int] = []
    clean = draft = 0
    for index in sorted(sizes, key=lambda index: sizes[index], reverse=True):
        own_clean = _width(model, sizes[index].clean)
        own_draft = min(MOST_DRAFT, _width(model, sizes[index].drafts * block_size))
        clean, draft = max(clean, own_clean), max(draft, own_draft)
        if rows and (len(rows) + 1) * (clean + draft) > batch_tokens:
            yield rows
            rows, clean, draft = [], own_clean, own_draft
        rows.append(index)
    if rows:
        yield rows


def _width(model: Transformer, tokens: int) -> int:
    """The padded length of a row: a power of two for the flex kernel, which is compiled for every shape it is shown."""
    if model.backend == "sdpa" or tokens == 0:
        return tokens
    return max(128, 1 << (tokens - 1).bit_length())


class _Text:
    """The texts of a batch: their `tokens` (R, T), 0 behind the end, and the lengths of the contexts, `given` (R, 1),
    and of contexts and continuations, `length` (R, 1)."""

    def __init__(self, pairs: Sequence[Pair], device: torch.device) -> None:
        texts = [torch.tensor([*context, *continuation]) for context, continuation in pairs]
        self.tokens = pad_sequence(texts, batch_first=True).to(device)
        lengths = [[len(context) for context, _ in pairs], [len(text) for text in texts]]
        self.given, self.length = torch.tensor(lengths, device=device)[:, :, None]

    def at(self, position: Tensor) -> Tensor:
        """The tokens at `position` (R, ...); any token where the text has ended."""
        index = position.clamp_max(self.tokens.shape[1] - 1).flatten(1)
        return self.tokens.gather(1, index).view(position.shape)


def _causal_states(model: Transformer, text: _Text, width: int) -> Tensor:
    """One causal forward: the states (N, D) of the tokens before the scored ones. The last token predicts nothing."""
    position = torch.arange(_width(model, width), device=text.tokens.device).expand(len(text.tokens), -1)
    before = position < text.length - 1
    tokens = clean_tokens(torch.where(before, 0, -1), position, block_size=1)
    x = model.embed_tokens(text.at(position))
    out: Forward = model(x, position, make_mask(tokens, tokens, model.backend))
    return out.hidden[before & (position >= text.given - 1)]


def _draft_states(loaded: LoadedModel, text: _Text, widest: _Size, how: _How) -> Tensor:
    """The committed text once as a cache, then the drafts over it, some tokens of a row at a time: (N, D)."""
    model, geometry = loaded.backbone, loaded.method.geometry
    size, most = geometry.block, min(MOST_DRAFT, how.batch_tokens)
    place = torch.arange(_width(model, widest.clean), device=text.tokens.device).expand(len(text.tokens), -1)  # (R, W)
    origin = geometry.begin(text.given)  # of the first draft
    whole = origin + (text.length - 1 - origin) // size * size - geometry.shift  # what stands before the last block
    committed = clean_tokens(torch.where(place < whole, 0, -1), place, geometry.context)
    past = None
    if widest.clean:
        past = model(model.embed_tokens(text.at(place)), place, make_mask(committed, committed, model.backend)).new
    count, step = -(-_width(model, widest.drafts * size) // size), max(1, most // size)
    states, owners = [], []
    for first in range(0, count, step):
        number = torch.arange(first, min(first + step, count), device=place.device)
        # Draft number d scores token d of the continuation or, with `fast`, all of its block d.
        given = text.given[..., None] + (
            0 if how.fast else number[:, None]
        )  # (R, S, 1): what stands before it is shown
        base = origin[..., None]
        begin = base + (number[:, None] if how.fast else (given - base) // size) * size  # of the draft
        position = begin + torch.arange(size, device=place.device)  # (R, S, B)
        scored = (position >= given if how.fast else position == given) & (position < text.length[..., None])
        real = scored.any(-1, keepdim=True).expand_as(scored).flatten(1)  # a draft without a scored position is padding
        candidate = ((given - begin) % size).expand_as(scored).flatten(1)  # drafts of a block do not see each other
        first = (begin - geometry.shift).expand_as(scored).flatten(1)
        tokens = draft_tokens(torch.where(real, 0, -1), first, candidate)
        mask = make_mask(tokens, concat(committed, tokens), model.backend)
        # What the first pass sees, by the method's own rule: shown tokens with α = 1 and BLANK with 0.
        draft = start(text.at(position).view(-1, size), (position < given).view(-1, size), model.blank_id)
        known = text.at((begin - 1).clamp_min(0)).flatten()
        ids, alpha = (part.view(len(real), -1) for part in geometry.shown(known, *loaded.method.rows(draft)))
        x = loaded.method.embed(model, ids, alpha)
        out: Forward = model(x, position.flatten(1) - geometry.shift, mask, past)
        states.append(out.hidden[scored.flatten(1)])
        owners.append(scored.nonzero()[:, 0])
    return torch.cat(states)[torch.cat(owners).argsort(stable=True)]  # within a row the drafts come in order
