"""The Transformer as decoding kernels see it: weights side by side, and a forward over a few tokens of many requests.

It is `Transformer.forward` over pages, for new tokens of the form that decoding has (`cache.Rows`), written into memory
that is there beforehand, so that a CUDA graph can replay it. The parameters of the model become views of the packed
weights: nothing is held twice. Up to 64 tokens go through the products of `kernels.skinny`, more through the library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from freda.methods.draft import Prediction, likeliest
from freda.model.cache import Rows, Texts
from freda.model.kernels import pages, pick, rowwise, skinny
from freda.model.kernels.rowwise import Heads
from freda.model.kernels.skinny import Stream
from freda.model.staircase import attend_rows
from freda.model.transformer import KeysValues, Layer, RMSNorm, Transformer


class PackedLayer(NamedTuple):
    """The weights of one layer."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]
    heads: Heads


class Buffers(NamedTuple):
    """What a forward over M tokens writes to."""

    stream: Stream
    parts: Tensor  # (P, M, ·): queries, keys and values
    attended: Tensor  # (M, heads · width)
    inner: Tensor  # (M, ffn)
    sums: skinny.Scratch
    attention: pages.Scratch


def fits(model: Transformer) -> bool:
    """Are the kernels made for this shape?"""
    config = model.config
    sizes = (config.dim, config.ffn_dim, config.heads * config.head_dim)
    return config.head_dim in (64, 128) and all(size % 128 == 0 for size in sizes)


def pack(model: Transformer) -> list[PackedLayer]:
    """The layers' weights side by side; the model's parameters are views of them from now on."""
    return [_pack_layer(layer, model) for layer in model.layers if isinstance(layer, Layer)]


def _pack_layer(layer: Layer, model: Transformer) -> PackedLayer:
    config, attention, mlp = model.config, layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [part.bias for part in projections if part.bias is not None]
    q_norm, k_norm = (
        norm.weight.detach() if isinstance(norm, RMSNorm) else None for norm in (attention.q_norm, attention.k_norm)
    )
    heads = Heads(
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.norm_eps,
        q_norm,
        k_norm,
        torch.cat([bias.detach() for bias in biases]) if biases else None,
    )
    norms = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
    return PackedLayer(
        _joined(projections),
        attention.o_proj.weight.detach(),
        _joined((mlp.gate_proj, mlp.up_proj)),
        mlp.down_proj.weight.detach(),
        norms,
        heads,
    )


def _joined(parts: Sequence[nn.Linear]) -> Tensor:
    whole = torch.cat([part.weight.detach() for part in parts])
    begin = 0
    for part in parts:
        part.weight = nn.Parameter(whole[begin : begin + part.out_features], requires_grad=part.weight.requires_grad)
        begin += part.out_features
    return whole


class PackedModel:
    """A Transformer over the pages of an engine, for the forwards of decoding."""

    def __init__(self, model: Transformer, cache: Sequence[KeysValues]) -> None:
        self.model, self.cache, self.layers = model, cache, pack(model)

    def buffers(self, requests: int, rows: Rows) -> Buffers:
        """Memory for a forward over the new tokens of so many requests."""
        layer = self.layers[0]
        tokens, width, heads = requests * rows.tokens, layer.out.shape[0], layer.heads
        few, kind, exact = tokens <= skinny.MOST_ROWS, layer.out.dtype, torch.float32

        def empty(*shape: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.empty(shape, device=layer.out.device, dtype=dtype)

        return Buffers(
            stream=skinny.new_stream(tokens, width, layer.out.device, layer.out.dtype),
            parts=empty(skinny.PROJECT.splits if few else 1, tokens, len(layer.qkv), dtype=exact if few else kind),
            attended=empty(tokens, heads.heads * heads.width),
            inner=empty(tokens, len(layer.gate_up) // 2),
            sums=skinny.new_scratch(tokens if few else 0, width, layer.out.device),
            attention=pages.new_scratch(requests, heads, rows, layer.out.device),
        )

    def run(self, given: tuple[Tensor, Tensor], texts: Texts, rows: Rows, buffers: Buffers) -> None:
        """All layers over tokens `given` as (ids, α), each (M,); what is committed goes into the pages."""
        model, stream = self.model, buffers.stream
        skinny.embed(*given, model.embed_tokens.weight.detach(), model.blank_id, self.layers[0].norms[0], stream)
        pages.rotary(texts, rows, model.inv_freq, buffers.attention.rotary)
        run = self._run_few if len(given[0]) <= skinny.MOST_ROWS else self._run_many
        run(texts, rows, buffers)

    def _run_few(self, texts: Texts, rows: Rows, buffers: Buffers) -> None:
        stream, eps = buffers.stream, self.model.config.norm_eps
        for layer, stored, norm in zip(self.layers, self.cache, self._following(), strict=True):
            skinny.project(stream, layer.qkv, eps, buffers.parts)
            pages.attend(buffers.parts, stored, texts, layer.heads, rows, buffers.attention, buffers.attended)
            skinny.add(buffers.attended, layer.out, buffers.sums, layer.norms[1], stream)
            skinny.gate(stream, layer.gate_up, eps, buffers.inner)
            skinny.add(buffers.inner, layer.down, buffers.sums, norm, stream)

    def _run_many(self, texts: Texts, rows: Rows, buffers: Buffers) -> None:
        """The library's matrix products; `stream.scaled` holds the normed stream here."""
        (x, normed, _), eps = buffers.stream, self.model.config.norm_eps
        rowwise.add_norm(x, None, self.layers[0].norms[0], eps, normed)
        for layer, stored, norm in zip(self.layers, self.cache, self._following(), strict=True):
            torch.mm(normed, layer.qkv.T, out=buffers.parts[0])
            pages.attend(buffers.parts, stored, texts, layer.heads, rows, buffers.attention, buffers.attended)
            rowwise.add_norm(x, buffers.attended @ layer.out.T, layer.norms[1], eps, normed)
            rowwise.gate(normed @ layer.gate_up.T, buffers.inner)
            rowwise.add_norm(x, buffers.inner @ layer.down.T, norm, eps, normed)

    def prefill(self, ids: Tensor, table: Tensor, block_size: int) -> None:
        """Keys and values of whole prompts `ids` (R, L), from their first token on, into the pages that `table` names
        (R, pages). L is whole blocks; padding is written too, to where nobody reads before it is written again."""
        model, (rows, length) = self.model, ids.shape
        heads, eps = self.layers[0].heads, model.config.norm_eps
        x = model.embed_tokens(ids.flatten()).detach()
        normed, inner = torch.empty_like(x), x.new_empty(len(x), len(self.layers[0].gate_up) // 2)
        q, k, v = (x.new_empty(rows, length, count, heads.width) for count in (heads.heads, *(heads.kv_heads,) * 2))
        rowwise.add_norm(x, None, self.layers[0].norms[0], eps, normed)
        for number, (layer, stored, norm) in enumerate(zip(self.layers, self.cache, self._following(), strict=True)):
            rowwise.spread(normed @ layer.qkv.T, layer.heads, model.inv_freq, (q, k, v), stored, table)
            if number == len(self.layers) - 1:
                return  # nobody asks for what comes after the last keys and values
            seen = attend_rows(q.transpose(1, 2), (k.transpose(1, 2), v.transpose(1, 2)), None, block_size)
            attended = seen.transpose(1, 2).reshape(rows * length, -1)
            rowwise.add_norm(x, attended @ layer.out.T, layer.norms[1], eps, normed)
            rowwise.gate(normed @ layer.gate_up.T, inner)
            rowwise.add_norm(x, inner @ layer.down.T, norm, eps, normed)

    def _following(self) -> list[Tensor]:
        """The norm after each layer."""
        return [layer.norms[0] for layer in self.layers[1:]] + [self.model.norm.weight.detach()]

    def hidden(self, buffers: Buffers) -> Tensor:
        """What a forward left, after the final norm: (M, D)."""
        x, scaled, squares = buffers.stream
        if len(x) > skinny.MOST_ROWS:
            return scaled
        scale = torch.rsqrt(squares.sum(0) / x.shape[1] + self.model.config.norm_eps)
        return (scaled.float() * scale[:, None]).to(scaled.dtype)

    def predict(self, tokens: Tensor, buffers: Buffers) -> Prediction:
        """The likeliest ids of `tokens` (N, B), which number those of the forward, and the runners-up."""
        if tokens.numel() > skinny.MOST_ROWS or len(buffers.stream.x) > skinny.MOST_ROWS:
            hidden = self.hidden(buffers)[tokens.flatten()]
            return likeliest(self.model.head(hidden), tokens.shape, runner_up=True)
        head, eps = self.model.head(buffers.stream.x), self.model.config.norm_eps
        partial = pick.new_partial(tokens.numel(), len(head.weight), tokens.device)
        found = pick.pick(buffers.stream, tokens.flatten(), head.weight.detach(), head.vocabulary, eps, partial)
        return Prediction(*(part.view(tokens.shape) for part in found))
