"""What is left of each sublayer after slicing: enough to build a checkpoint's modules before its tensors load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wide.errors import AdapterError

HeadsLeft = tuple[int, ...] | Literal["dense"] | None
ChannelsLeft = int | Literal["dense"] | None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What is left of a model.

    Args:
        layers: The decoder layers that are left, first layer first.
        stream: Dimensions of the residual stream that are left, D'; None for all.
    """

    layers: tuple[LayerShape, ...]
    stream: int | None = None

    @property
    def is_ordinary(self) -> bool:
        """Whether a configuration of the family describes it: every layer that is left is whole."""
        return self.stream is None and all(layer == LayerShape() for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready object with one entry a layer."""
        layers = [{"query_heads": _listed(layer.query_heads), "channels": layer.channels} for layer in self.layers]
        return {"layers": layers, "stream": self.stream}

    @classmethod
    def from_json(cls, data: object) -> "ModelShape":
        """Read what `to_json` wrote.

        Raises:
            AdapterError: If a key is missing, unknown or of a wrong type.
        """
        if not isinstance(data, Mapping) or set(data) != {"layers", "stream"} or not isinstance(data["layers"], list):
            raise AdapterError(f"a shape has exactly the keys 'layers' (a list) and 'stream', got {data!r}")
        stream = data["stream"]
        if stream is not None and not _is_count(stream):
            raise AdapterError(f"'stream' of a shape is a number of dimensions or null, got {stream!r}")
        return cls(layers=tuple(_layer(index, layer) for index, layer in enumerate(data["layers"])), stream=stream)


def _layer(index: int, data: object) -> LayerShape:
    if not isinstance(data, Mapping) or set(data) != {"query_heads", "channels"}:
        raise AdapterError(f"layer {index} of a shape must have exactly the keys 'query_heads' and 'channels'")
    heads, channels = data["query_heads"], data["channels"]
    if isinstance(heads, list) and all(_is_count(head) for head in heads) and heads == sorted(set(heads)):
        heads = tuple(heads)
    elif heads is not None and heads != "dense":
        raise AdapterError(f"layer {index}: 'query_heads' must be ascending numbers, 'dense' or null, got {heads!r}")
    if channels is not None and channels != "dense" and not _is_count(channels):
        raise AdapterError(f"layer {index}: 'channels' must be a number, 'dense' or null, got {channels!r}")
    return LayerShape(query_heads=heads, channels=channels)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _listed(heads: HeadsLeft) -> object:
    return list(heads) if isinstance(heads, tuple) else heads
