"""The Plan: what each half-layer of a model runs. Whoever decides writes one, the executor reads it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wide.errors import AdapterError, ConfigError
from wide.grouping import Grouping

RouterInput = Literal["normed", "residual"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """The half-layer runs as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """A router decides per token which channel groups of the half-layer execute.

    Args:
        grouping: Query channels (attention) or intermediate channels (FFN) cut into groups.
        rank: Width of the router's bottleneck, r in the paper.
        router_input: What the router reads: the normed input of the sub-layer, or the raw residual stream before
            that norm.
        bias: Whether the router's second matrix has a bias.
    """

    grouping: Grouping
    rank: int
    router_input: RouterInput = "normed"
    bias: bool = False


Half = Dense | Routed
_KINDS: dict[str, type[Half]] = {"dense": Dense, "routed": Routed}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What the two halves of one decoder layer run."""

    attention: Half
    ffn: Half


@dataclass(frozen=True, slots=True)
class Plan:
    """What every decoder layer of a model runs, first layer first."""

    layers: tuple[LayerPlan, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Return a JSON-ready list with one entry a layer."""
        return [{"attention": _half_to_json(p.attention), "ffn": _half_to_json(p.ffn)} for p in self.layers]

    @classmethod
    def from_json(cls, layers: object) -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            AdapterError: If a key is missing, unknown or of a wrong type.
        """
        if not isinstance(layers, list) or not layers:
            raise AdapterError(f"a plan is a non-empty list of layers, not {type(layers).__name__}")
        plans = []
        for index, layer in enumerate(layers):
            if not isinstance(layer, Mapping) or set(layer) != {"attention", "ffn"}:
                raise AdapterError(f"layer {index} of the plan must have exactly the keys 'attention' and 'ffn'")
            plans.append(
                LayerPlan(
                    attention=_half_from_json(layer["attention"], f"layer {index}, attention"),
                    ffn=_half_from_json(layer["ffn"], f"layer {index}, ffn"),
                )
            )
        return cls(tuple(plans))


def _half_to_json(half: Half) -> dict[str, Any]:
    kind = next(name for name, cls in _KINDS.items() if type(half) is cls)
    return {"kind": kind, **dataclasses.asdict(half)}


def _half_from_json(data: object, where: str) -> Half:
    if not isinstance(data, Mapping) or data.get("kind") not in _KINDS:
        raise AdapterError(f"{where}: expected an object with 'kind' in {sorted(_KINDS)}, got {data!r}")
    fields = {key: value for key, value in data.items() if key != "kind"}
    try:
        if data["kind"] == "routed":
            fields["grouping"] = Grouping(**fields["grouping"])
        return _KINDS[data["kind"]](**fields)
    except (TypeError, KeyError, ConfigError) as error:
        raise AdapterError(f"{where}: malformed plan entry {dict(data)!r} ({error})") from error
