"""The Transformer as decoding kernels see it: weights side by side, and a forward over a few tokens of many requests.

It is `Transformer.forward` over pages, for new tokens of the form that decoding has (`ForwardShape`), written into
memory that is there beforehand, so that a CUDA graph can replay it. The parameters of the model become views of the
packed weights: nothing is held twice. Up to 64 tokens go through the products of `kernels.skinny`, more through the
library's; so do prompts, whose keys and values `fill` computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from freda.decode.kernels import layers, pages, pick, prompts, rowwise, skinny
from freda.decode.kernels.rowwise import Heads
from freda.decode.kernels.skinny import Matrix, Stream
from freda.decode.pages import BlockPlaces, BlockTable, ForwardShape, Pages, Pieces
from freda.folders import tensors
from freda.methods.draft import Prediction, Sampling
from freda.model.config import ModelConfig
from freda.model.transformer import Attention, Layer, Transformer


class Stacked(NamedTuple):
    """The weights of all L layers."""

    qkv: Tensor  # (L, ·, D)
    out: Tensor
    gate_up: Tensor
    down: Tensor
    input_norms: Tensor  # (L + 1, D): of every layer, and the final one
    post_norms: Tensor  # (L, D)
    q_norms: Tensor | None  # (L, width)
    k_norms: Tensor | None
    biases: Tensor | None  # (L, ·)
    scales: tuple[Tensor, ...] = ()  # of the first four, (L, ·) each, where these are int8


class PackedLayer(NamedTuple):
    """The weights of one layer."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    norms: tuple[Tensor, Tensor]
    heads: Heads


class Buffers(NamedTuple):
    """What a forward over M tokens writes to."""

    stream: Stream
    parts: Tensor  # (S, M, ·): queries, keys and values
    attended: Tensor  # (M, heads · width)
    inner: Tensor  # (M, ffn)
    sums: skinny.Scratch
    attention: pages.Scratch
    queries: Tensor  # (T, heads · width), of prompts
    whole: layers.Whole | None  # all layers in one launch, where that fits


def _few(shape: ForwardShape) -> bool:
    """Whether a forward has so few tokens that it waits for the weights; prompts never do."""
    return shape.tokens <= skinny.MOST_ROWS and not shape.prompts


def fits(model: Transformer) -> bool:
    """Whether the kernels are made for a model of this shape."""
    config = model.config
    sizes = (config.dim, config.ffn_dim, config.heads * config.head_dim)
    return config.head_dim in (64, 128) and all(size % 128 == 0 for size in sizes)


def pack(model: Transformer) -> tuple[Stacked, list[PackedLayer]]:
    """All layers' weights in one piece of each kind, and as layers; the model's parameters are views of them from now
    on."""
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]
    attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    stacked = Stacked(
        qkv=_joined([[part.q_proj, part.k_proj, part.v_proj] for part in attentions]),
        out=_joined([[part.o_proj] for part in attentions]),
        gate_up=_joined([[part.gate_proj, part.up_proj] for part in mlps]),
        down=_joined([[part.down_proj] for part in mlps]),
        input_norms=_stack([*(layer.input_layernorm.weight for layer in layers), model.norm.weight]),
        post_norms=_stack([layer.post_attention_layernorm.weight for layer in layers]),
        q_norms=_stack([part.q_norm.weight for part in attentions]) if model.config.qk_norm else None,  # type: ignore[misc]
        k_norms=_stack([part.k_norm.weight for part in attentions]) if model.config.qk_norm else None,  # type: ignore[misc]
        biases=_stack([_bias(part) for part in attentions]) if model.config.qkv_bias else None,
    )
    return stacked, [_layer(stacked, number, model.config) for number in range(len(layers))]


def _layer(stacked: Stacked, number: int, config: ModelConfig) -> PackedLayer:
    extra = (stacked.q_norms, stacked.k_norms, stacked.biases)
    q_norm, k_norm, bias = (None if part is None else part[number] for part in extra)
    heads = Heads(config.heads, config.kv_heads, config.head_dim, config.norm_eps, q_norm, k_norm, bias)
    norms = stacked.input_norms[number], stacked.post_norms[number]

    def matrix(kind: int) -> Matrix:
        whole: Tensor = stacked[kind]  # type: ignore[assignment]
        return Matrix(whole[number], stacked.scales[kind][number] if stacked.scales else None)

    return PackedLayer(matrix(0), matrix(1), matrix(2), matrix(3), norms, heads)


def in_int8(stacked: Stacked) -> Stacked:
    """The weights with matrices of int8 and a scale for each row, as `folders.tensors` stores them."""
    names = Stacked._fields[:4]
    made = tensors.packed(dict(zip(names, stacked[:4], strict=True)))
    values = {name: skinny.packed_by_four(made[name]) for name in names}
    return stacked._replace(**values, scales=tuple(made[name + tensors.SCALE] for name in names))


def _stack(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.detach() for part in parts])


def _bias(attention: Attention) -> Tensor:
    return torch.cat([part.bias.detach() for part in (attention.q_proj, attention.k_proj, attention.v_proj)])


def _joined(layers: Sequence[Sequence[nn.Linear]]) -> Tensor:
    """The weights of every layer's parts below each other, (L, ·, ·); layer by layer, so that none is there twice."""
    first = layers[0]
    rows = [0, *itertools.accumulate(part.out_features for part in first)]
    whole = first[0].weight.new_empty(len(layers), rows[-1], first[0].in_features, requires_grad=False)
    for number, parts in enumerate(layers):
        for part, (begin, end) in zip(parts, itertools.pairwise(rows), strict=True):
            whole[number, begin:end] = part.weight.detach()
            part.weight = nn.Parameter(whole[number, begin:end], requires_grad=part.weight.requires_grad)
    return whole


class PackedModel:
    """A Transformer over the pages of an engine, for the forwards of decoding."""

    graphs = True

    def __init__(self, model: Transformer, pages: Pages, *, int8: bool = False) -> None:
        self.model, self.pages, self.cache = model, pages, pages.layers
        self.stacked, self.layers = pack(model)
        # Few tokens wait for the weights, which as int8 are half as many bytes. Many tokens take them as they are.
        self.few = in_int8(self.stacked) if int8 else self.stacked
        self.few_layers = [_layer(self.few, number, model.config) for number in range(len(self.layers))]
        head = model.head_weight.detach()
        self.head = Matrix(head)
        if int8:
            made = tensors.packed({"head": head})
            self.head = Matrix(skinny.packed_by_four(made["head"]), made["head" + tensors.SCALE])

    def buffers(self, shape: ForwardShape, long: bool = False) -> Buffers:
        """Memory for a forward of this shape, over texts that are `long` or not."""
        layer, (_, width, _), kind = self.layers[0], self.stacked.out.shape, self.stacked.out.dtype
        tokens, heads, device = shape.tokens, layer.heads, self.stacked.out.device
        few, exact, whole = _few(shape), torch.float32, None
        if few and kind == torch.bfloat16 and not self.few.scales and layers.fits(heads, width, shape, device):
            whole = layers.new_whole(self.model.config, shape, self.pages.page_size, device)

        def empty(*sizes: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.empty(sizes, device=device, dtype=dtype)

        return Buffers(
            stream=skinny.new_stream(tokens, width, device, kind, 0 if whole is None else whole.blocks),
            parts=empty(
                skinny.PROJECT.splits if few else 1, tokens, len(layer.qkv.values), dtype=exact if few else kind
            ),
            attended=empty(tokens, heads.heads * heads.width).zero_(),  # where padding stays
            inner=empty(tokens, len(layer.gate_up.values) // 2),
            sums=skinny.new_scratch(tokens if few else 0, width, device),
            attention=pages.new_scratch(pages.cut_for(heads, shape, long=long), heads, shape, device),
            queries=empty(shape.prompts, heads.heads * heads.width),
            whole=whole,
        )

    def run(
        self,
        given: tuple[Tensor, Tensor],
        blocks: BlockPlaces,
        texts: BlockTable,
        shape: ForwardShape,
        buffers: Buffers,
        pieces: Pieces | None = None,
    ) -> None:
        """As `ForwardBackend.run` says; a dense forward does not look at `where`. Places nobody names are padding."""
        assert shape == buffers.attention.shape, (shape, buffers.attention.shape)
        ids, alpha = given
        if pieces is not None:
            ids, alpha = torch.cat([ids, pieces.ids.long()]), torch.cat([alpha, alpha.new_ones(shape.prompts)])
        self._embed(ids, alpha, buffers)
        pages.rotary(blocks, texts, self.model.inv_freq, buffers.attention)
        if buffers.whole is not None:
            rest = buffers.stream, buffers.attention.rotary, buffers.attended, buffers.inner
            layers.run(buffers.whole, self.stacked._asdict(), self.pages.storage, blocks, texts, rest)
        elif _few(shape):
            self._run_few(blocks, texts, buffers)
        else:
            self._run_many(blocks, texts, pieces, buffers)

    def fill(self, pieces: Pieces, shape: ForwardShape, buffers: Buffers) -> None:
        """All layers over pieces of prompts alone, for their keys and values."""
        self._embed(pieces.ids.long(), torch.ones_like(pieces.ids, dtype=torch.float32), buffers)
        self._run_many(None, None, pieces, buffers)

    def _embed(self, ids: Tensor, alpha: Tensor, buffers: Buffers) -> None:
        table, norm = self.model.embed_tokens.weight.detach(), self.layers[0].norms[0]
        skinny.embed(ids, alpha, table, self.model.blank_id, norm, buffers.stream)

    def _run_few(self, blocks: BlockPlaces, texts: BlockTable, buffers: Buffers) -> None:
        stream, eps = buffers.stream, self.model.config.norm_eps
        for layer, stored, norm in zip(self.few_layers, self.cache, self._following(), strict=True):
            skinny.project(stream, layer.qkv, eps, buffers.parts)
            pages.attend(buffers.parts, stored, blocks, texts, layer.heads, buffers.attention, buffers.attended)
            skinny.add(buffers.attended, layer.out, buffers.sums, layer.norms[1], stream)
            skinny.gate(stream, layer.gate_up, eps, buffers.inner)
            skinny.add(buffers.inner, layer.down, buffers.sums, norm, stream)

    def _run_many(
        self, blocks: BlockPlaces | None, texts: BlockTable | None, pieces: Pieces | None, buffers: Buffers
    ) -> None:
        """The library's matrix products; `stream.scaled` holds the normed stream here.

        A block sees what prompts store in the same forward: a request's first block rides with the end of its prompt.
        """
        (x, normed, _), eps, shape = buffers.stream, self.model.config.norm_eps, buffers.attention.shape
        qkv, prompt = buffers.parts[0], slice(shape.packed * shape.block, None)
        rowwise.add_norm(x, None, self.layers[0].norms[0], eps, normed)
        for number, (layer, stored, norm) in enumerate(zip(self.layers, self.cache, self._following(), strict=True)):
            torch.mm(normed, layer.qkv.values.T, out=qkv)
            if pieces is not None:
                prompts.spread(qkv[prompt], pieces, layer.heads, self.model.inv_freq, stored, buffers.queries)
            if blocks is not None and texts is not None:
                pages.attend(buffers.parts, stored, blocks, texts, layer.heads, buffers.attention, buffers.attended)
            elif number == len(self.layers) - 1:
                return  # nobody asks for what comes after the last keys and values
            if pieces is not None:
                prompts.attend(buffers.queries, pieces, layer.heads, shape.context, stored, buffers.attended[prompt])
            rowwise.add_norm(x, buffers.attended @ layer.out.values.T, layer.norms[1], eps, normed)
            rowwise.gate(normed @ layer.gate_up.values.T, buffers.inner)
            rowwise.add_norm(x, buffers.inner @ layer.down.values.T, norm, eps, normed)

    def _following(self) -> list[Tensor]:
        """The norm after each layer."""
        return [layer.norms[0] for layer in self.layers[1:]] + [self.model.norm.weight.detach()]

    def hidden(self, buffers: Buffers) -> Tensor:
        """What a forward left, after the final norm: (M, D)."""
        x, scaled, squares = buffers.stream
        if not _few(buffers.attention.shape):
            return scaled
        scale = torch.rsqrt(squares.sum(0) / x.shape[1] + self.model.config.norm_eps)
        return (scaled.float() * scale[:, None]).to(scaled.dtype)

    def soft(self, tokens: Tensor, buffers: Buffers) -> Tensor:
        """What a scorer sees of `tokens`, which number those of the forward: (..., D)."""
        return self.hidden(buffers)[tokens]

    def predict(
        self, tokens: Tensor, buffers: Buffers, sampling: Sampling | None = None, position: Tensor | None = None
    ) -> Prediction:
        """The ids of `tokens` (N, B), which number those of the forward, and the runners-up: the likeliest ones, or
        drawn as `sampling` says for `position` (N, B)."""
        blank, eps = self.model.blank_id, self.model.config.norm_eps
        if sampling is not None:
            assert position is not None
            found = pick.sample(self._raw_logits(tokens, buffers), blank, sampling, position)
        elif tokens.numel() > skinny.MOST_ROWS or not _few(buffers.attention.shape):
            found = pick.pick_of(self._raw_logits(tokens, buffers), blank)
        else:
            partial = pick.new_partial(tokens.numel(), blank, tokens.device)
            found = pick.pick(buffers.stream, tokens.flatten(), self.head, blank, eps, partial)
        return Prediction(*(part.view(tokens.shape) for part in found))

    def logits(self, tokens: Tensor, buffers: Buffers) -> Tensor:
        """The logits of `tokens` (N, B), as `Transformer.logits`: fp32, (N, B, blank_id)."""
        return self._raw_logits(tokens, buffers)[:, : self.model.blank_id].float().view(*tokens.shape, -1)

    def _raw_logits(self, tokens: Tensor, buffers: Buffers) -> Tensor:
        """The logits of all of `tokens`, one below the other, as the library makes them: with columns that mean no id
        at the end."""
        hidden, weight, _ = self.model.head(self.hidden(buffers)[tokens.flatten()])
        return hidden @ weight.detach().T
