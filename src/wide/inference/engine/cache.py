"""Keys and values in the engine's memory: of fixed size, with lengths on the device; and the cache that callers see."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """Keys and values of all layers, [L, B, H_k, T_max, d], and the tokens in use of each sequence, int32 [B].

    The device moves `lengths` on by itself; `zeros`, int32 [B], are the positions of a prefill.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    zeros: Tensor

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


class EngineCache(DynamicCache):
    """Keys and values in the engine's memory; an ordinary `DynamicCache` once anyone reads its layers.

    `room` is how many tokens a sequence will hold, if known; `is_greedy` says that the likeliest come next.
    """

    def __init__(self, config: Any, room: int | None = None, *, is_greedy: bool = False) -> None:
        # A `Slot` of the engine's memory; None once it holds ordinary layers.
        self.slot: Any = None
        self._config, self.tokens = config, 0
        self.room, self.is_greedy, self.has_begun = room, is_greedy, False
        # Of the prompt's sequences, places of which no keys are known; also after it has left the engine.
        self.padding: list[int] | None = None
        # Why it holds ordinary layers.
        self.left_for = ""
        self._layers: list[Any] = []
        super().__init__(config=config)

    @property
    def layers(self) -> list[Any]:
        """Transformers' layers; when they are read, they are made, and the engine's memory is free again."""
        self.leave_engine()
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    def __len__(self) -> int:
        """Return the number of layers, without leaving the engine: truth values call this."""
        return len(self._layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of a sequence, padding included."""
        return self.tokens if self.slot is not None else super().get_seq_length(layer_idx)

    @property
    def is_compileable(self) -> bool:
        """Never: the engine replays graphs of its own."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything."""
        return self.slot is not None or super().is_initialized

    @property
    def is_sliding(self) -> list[bool]:
        """Of each layer, whether it keeps a window of keys only once it has left the engine."""
        return [bool(getattr(layer, "is_sliding", False)) for layer in self._layers]

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer, whether its attention is linear: never."""
        return [False] * len(self._layers)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return all(getattr(layer, "is_croppable", True) for layer in self._layers)

    def __repr__(self) -> str:
        """Say how much it holds."""
        return f"EngineCache(tokens={self.get_seq_length()}, layers={len(self._layers)})"

    def leave_engine(self, reason: str | None = None) -> None:
        """Copy keys and values into ordinary layers, behind the prompt's padding; None says that layers were read."""
        slot = self.slot
        if reason is None and slot is not None:
            reason = "a cache whose layers were read"
        self.left_for = self.left_for or reason or ""
        if slot is not None:
            with slot.claimed():
                # Another thread may have been here first.
                if self.slot is slot:
                    self._fill(self._layers, slot)
                    self.slot, self.tokens = None, 0

    def _fill(self, layers: list[Any], slot: Any) -> None:
        for layer, pair in zip(layers, zip(slot.cache.k, slot.cache.v, strict=True), strict=False):
            layer.update(*(_padded(part[:, :, : self.tokens], self.padding) for part in pair))

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineCache":
        """Return an ordinary cache with keys and values of its own."""
        twin = EngineCache(self._config, self.room)
        twin.left_for, twin.padding = "a copy of a cache", self.padding
        if self.slot is None:
            twin._layers = copy.deepcopy(self._layers, memo)
        else:
            with self.slot.claimed():
                self._fill(twin._layers, self.slot)
        return twin

    def __copy__(self) -> "EngineCache":
        """Return a deep copy: two caches cannot share the engine's memory."""
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a file can hold: ordinary layers."""
        return dict(vars(self)) if self.slot is None else dict(vars(copy.deepcopy(self)))


def _padded(part: Tensor, padding: list[int] | None) -> Tensor:
    """Return keys or values [B, H, T, d] with each sequence moved behind its padding, in memory of their own."""
    part = part.clone()
    for row, places in enumerate(padding or ()):
        part[row] = part[row].roll(places, dims=1)
    return part
