"""What is left of each sublayer after slicing: enough to build a checkpoint's modules before its tensors load."""

from dataclasses import dataclass
from typing import Literal

from wide.errors import ConfigError
from wide.schema import Count, Positive

HeadsLeft = tuple[Count, ...] | Literal["dense"] | None
ChannelsLeft = Count | Literal["dense"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What is left of one decoder layer.

    Args:
        query_heads: Numbers of the query heads that are left, ascending, as the dense layer counts them; 'dense' for
            all, an empty tuple for none but the output bias, None where the sublayer is left out.
        channels: Intermediate channels that are left; 'dense' for all, 0 for none but the output bias, None where the
            half is left out.
    """

    query_heads: HeadsLeft = "dense"
    channels: ChannelsLeft = "dense"

    def __post_init__(self) -> None:
        if isinstance(self.query_heads, tuple) and list(self.query_heads) != sorted(set(self.query_heads)):
            raise ConfigError(f"query_heads must ascend, got {self.query_heads}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What is left of a model: its decoder layers, and dimensions of the residual stream, D', None for all."""

    layers: tuple[LayerShape, ...]
    stream: Positive | None = None

    @property
    def is_ordinary(self) -> bool:
        """Whether a configuration of the family describes it: every layer that is left is whole."""
        return self.stream is None and all(layer == LayerShape() for layer in self.layers)
