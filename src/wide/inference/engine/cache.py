"""A KV cache of fixed size whose lengths live on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """Keys and values of all layers, and how much of them is in use.

    Args:
        k: Keys, [L, B, H_k, T_max, d].
        lengths: Tokens cached of each sequence, int32 [B]; moved on by the device itself.
        zeros: int32 [B] of zeros, the positions of a prefill.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    zeros: Tensor

    @classmethod
    def allocate(cls, shape: tuple[int, int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> "KvCache":
        """Return an empty cache of shape [L, B, H_k, T_max, d]."""
        lengths = torch.zeros(shape[1], dtype=torch.int32, device=device)
        # Places beyond a sequence are masked by length, but 0 * NaN in a masked product would still be NaN.
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(k=k, v=v, lengths=lengths, zeros=torch.zeros_like(lengths))

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.k.shape[1]

    @property
    def room(self) -> int:
        """Places of each sequence, T_max."""
        return self.k.shape[3]

    def row(self, index: int) -> "KvCache":
        """Return the part of one sequence, as views."""
        only = slice(index, index + 1)
        return KvCache(k=self.k[:, only], v=self.v[:, only], lengths=self.lengths[only], zeros=self.zeros[only])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as views [B, T_max, H_k, d]; a cache of one layer lends it to all."""
        place = index if self.k.shape[0] > 1 else 0
        return self.k[place].transpose(1, 2), self.v[place].transpose(1, 2)
