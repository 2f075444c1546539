"""A linear layer with a low-rank change: what an adapter puts in the place of a Transformer's own (M23).

It computes W x + s · B (A x), with W frozen, s = alpha / rank, and A and B under the names that PEFT gives them. Where
it acts on draft rows only, those of committed text are W x, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from freda.model.attention import Drafts
from freda.model.config import AdapterConfig


class LowRank(nn.Linear):
    """A linear layer in the place of `layer`, whose weight and bias it has."""

    def __init__(self, layer: nn.Linear, config: AdapterConfig) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        place, kind = layer.weight.device, layer.weight.dtype
        self.lora_A = nn.Linear(self.in_features, config.rank, bias=False, device=place, dtype=kind)
        self.lora_B = nn.Linear(config.rank, self.out_features, bias=False, device=place, dtype=kind)
        self.scale, self.all_rows = config.scale, config.rows == "all"

    def forward(self, x: Tensor, drafts: Drafts = False) -> Tensor:
        """x (R, T, in) to (R, T, out); `drafts` says which of the tokens are draft slots."""
        return self.changed(F.linear(x, self.weight, self.bias), x, drafts)

    def changed(self, out: Tensor, x: Tensor, drafts: Drafts) -> Tensor:
        """What becomes of W x, `out`."""
        if drafts is False and not self.all_rows:
            return out
        changed: Tensor = out + self.scale * self.lora_B(self.lora_A(x))
        if self.all_rows or drafts is True:
            return changed
        assert isinstance(drafts, Tensor)
        return torch.where(drafts[..., None], changed, out)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer that computes what this one does on rows with the change."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        change = self.scale * self.lora_B.weight.float() @ self.lora_A.weight.float()
        plain.weight, plain.bias = nn.Parameter((self.weight.float() + change).to(self.weight.dtype)), self.bias
        return plain


def project(layer: nn.Linear, x: Tensor, drafts: Drafts) -> Tensor:
    """A linear layer of the Transformer on x (R, T, in), told which of the tokens are draft slots."""
    out: Tensor = layer(x, drafts) if isinstance(layer, LowRank) else layer(x)
    return out
