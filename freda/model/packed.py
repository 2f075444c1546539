"""The Transformer as decoding kernels see it: weights side by side, and one forward over a few tokens of many requests.

It is `Transformer.forward` over pages, for new tokens of the form that decoding has (`kernels.pages.Rows`), written into
memory that is there beforehand, so that a CUDA graph can replay it. The parameters of the model become views of the
packed weights: nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from freda.model.kernels import pages, skinny
from freda.model.kernels.pages import Heads, Rows, Texts
from freda.model.kernels.skinny import Stream
from freda.model.transformer import KeysValues, Layer, RMSNorm, Transformer

FETCHED = 4 << 20  # elements of gate and up that are brought into the cache during attention


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
    sizes = (config.dim, config.ffn_dim, config.heads * config.head_dim, config.kv_heads * config.head_dim)
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


def new_buffers(layers: Sequence[PackedLayer], requests: int, rows: Rows) -> Buffers:
    """Memory for a forward over the new tokens of so many requests."""
    layer = layers[0]
    tokens, width, heads = requests * rows.count, layer.out.shape[0], layer.heads
    device, dtype = layer.out.device, layer.out.dtype
    parts = torch.empty(skinny.PROJECT.splits, tokens, len(layer.qkv), device=device)
    attended = torch.empty(tokens, heads.heads * heads.width, device=device, dtype=dtype)
    inner = torch.empty(tokens, len(layer.gate_up) // 2, device=device, dtype=dtype)
    stream = skinny.new_stream(tokens, width, device, dtype)
    sums = skinny.new_scratch(tokens, width, device)
    return Buffers(stream, parts, attended, inner, sums, pages.new_scratch(requests, heads, rows, device))


def forward(
    model: Transformer,
    layers: Sequence[PackedLayer],
    cache: Sequence[KeysValues],
    given: tuple[Tensor, Tensor],
    texts: Texts,
    rows: Rows,
    buffers: Buffers,
) -> Stream:
    """All layers over tokens `given` as (ids, α), each (M,); what is committed goes into the cache. The stream that it
    returns is scaled for the final norm."""
    stream, eps = buffers.stream, model.config.norm_eps
    following = [layer.norms[0] for layer in layers[1:]] + [model.norm.weight.detach()]
    skinny.embed(*given, model.embed_tokens.weight.detach(), model.blank_id, layers[0].norms[0], stream)
    pages.rotary(texts, rows, model.inv_freq, buffers.attention.rotary)
    for layer, stored, norm in zip(layers, cache, following, strict=True):
        skinny.project(stream, layer.qkv, eps, buffers.parts)
        fetch = [(layer.out, layer.out.numel()), (layer.gate_up, FETCHED)] if layer.out.is_cuda else []
        pages.attend(buffers.parts, stored, texts, layer.heads, rows, buffers.attention, buffers.attended, fetch=fetch)
        skinny.add(buffers.attended, layer.out, buffers.sums, layer.norms[1], stream)
        skinny.gate(stream, layer.gate_up, eps, buffers.inner)
        skinny.add(buffers.inner, layer.down, buffers.sums, norm, stream)
    return stream
