"""The Plan: what each sublayer of a model runs. Whoever decides writes one, the executor reads it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from wide.errors import AdapterError, ConfigError, ShapeError
from wide.grouping import Grouping

RouterInput = Literal["normed", "residual", "layer_input"]
RouterForm = Literal["bottleneck", "linear", "mlp", "dllm"]

EMBEDDING_BASIS = "stream.embedding"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """The sublayer runs as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """The sublayer is left out for every token: its output is zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The same units of the sublayer are kept for every token, each scaled by a constant; the others are pruned.

    The scales are float32 `[units]` in the tensor `layers.<i>.<half>.scale`; 0 prunes the unit, 1 leaves it as it is.

    Args:
        grouping: Query channels (attention, a unit is one query head) or intermediate channels (FFN, a unit is one
            channel or a group of them) cut into units.
        kept: Units whose scale is not 0. None at all is allowed; unlike `Skipped`, a bias of the output projection
            then remains.
    """

    grouping: Grouping
    kept: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """The sublayer executes for the tokens that the attention of its layer executes for.

    Only for an FFN beside a routed attention of one group: one router decides for the whole layer.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The residual stream is projected onto a subspace at the embedding and after every sublayer but the last.

    The bases have orthonormal columns, `[width, kept]` float32, in the tensors `stream.embedding` and
    `layers.<i>.<half>.basis`.

    Args:
        width: Hidden size, D.
        kept: Dimensions of the subspaces.
    """

    width: int
    kept: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """A router decides per token which channel groups of the sublayer execute.

    Args:
        grouping: Query channels (attention) or intermediate channels (FFN) cut into groups.
        rank: Width of the router's bottleneck, r in the paper.
        router_input: What the router reads: 'normed' is the normed input of the sub-layer, 'residual' the raw
            residual stream before that norm, 'layer_input' the stream before the layer, for both halves.
        bias: Whether the router's second matrix has a bias; the other forms have theirs always.
        form: 'bottleneck' is two matrices without anything in between (the paper's); 'linear' one matrix, rank
            unused; 'mlp' two with a ReLU in between (SkipGPT); 'dllm' two with RMSNorm and SiLU in between (D-LLM).
        evicts: For an attention of one group: later tokens do not see the keys and values of tokens that skip it.
        first_tokens: So many tokens at the start of each sequence always execute.

    Raises:
        ConfigError: If the input or the form is none of these, several groups are to evict, or the number of first
            tokens is negative.
    """

    grouping: Grouping
    rank: int
    router_input: RouterInput = "normed"
    bias: bool = False
    form: RouterForm = "bottleneck"
    evicts: bool = False
    first_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse words that no router knows, and numbers that mean nothing."""
        for name, allowed in (("router_input", get_args(RouterInput)), ("form", get_args(RouterForm))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {list(allowed)}, got {getattr(self, name)!r}")
        if self.evicts and self.grouping.num_groups != 1:
            raise ConfigError(
                f"only an attention of one group evicts, this one has {self.grouping.num_groups}; its groups share keys"
            )
        if self.first_tokens < 0:
            raise ConfigError(f"first_tokens must not be negative, got {self.first_tokens}; 0 protects none")


Half = Dense | Skipped | Kept | Routed | Following
_KINDS: dict[str, type[Half]] = {
    "dense": Dense,
    "skipped": Skipped,
    "kept": Kept,
    "routed": Routed,
    "following": Following,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What the two halves of one decoder layer run."""

    attention: Half
    ffn: Half

    def halves(self) -> tuple[tuple[str, Half], tuple[str, Half]]:
        """Return the halves by name, in the order in which they run."""
        return ("attention", self.attention), ("ffn", self.ffn)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every decoder layer of a model runs, first layer first, and what becomes of the residual stream."""

    layers: tuple[LayerPlan, ...]
    stream: Stream | None = None

    @property
    def is_routed(self) -> bool:
        """Whether any sublayer has a router."""
        return any(isinstance(half, Routed) for layer in self.layers for _, half in layer.halves())

    @property
    def is_static(self) -> bool:
        """Whether anything is pruned for every token alike."""
        halves = (half for layer in self.layers for _, half in layer.halves())
        return self.stream is not None or any(isinstance(half, Skipped | Kept) for half in halves)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors that hold the plan's values, all float32."""
        shapes: dict[str, tuple[int, ...]] = {}
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            for name, half in layer.halves():
                if isinstance(half, Kept):
                    shapes[scale_name(index, name)] = (half.grouping.num_groups,)
                # The stream that the output head reads stays as wide as it is.
                if self.stream is not None and (index, name) != (last, "ffn"):
                    shapes[basis_name(index, name)] = (self.stream.width, self.stream.kept)
        if self.stream is not None:
            shapes[EMBEDDING_BASIS] = (self.stream.width, self.stream.kept)
        return shapes

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready object with one entry a layer."""
        return {
            "layers": [{"attention": _half_to_json(p.attention), "ffn": _half_to_json(p.ffn)} for p in self.layers],
            "stream": None if self.stream is None else dataclasses.asdict(self.stream),
        }

    @classmethod
    def from_json(cls, data: object) -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            AdapterError: If a key is missing, unknown or of a wrong type.
        """
        if not isinstance(data, Mapping) or set(data) != {"layers", "stream"}:
            raise AdapterError(f"a plan has exactly the keys 'layers' and 'stream', got {data!r}")
        layers = data["layers"]
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
        return cls(tuple(plans), _stream_from_json(data["stream"]))


def scale_name(layer: int, half: str) -> str:
    """Return the name of the tensor with the scales of a `Kept` half, 'attention' or 'ffn', of a layer."""
    return f"layers.{layer}.{half}.scale"


def basis_name(layer: int, half: str) -> str:
    """Return the name of the tensor with the basis onto which the stream is projected after a half of a layer."""
    return f"layers.{layer}.{half}.basis"


def _half_to_json(half: Half) -> dict[str, Any]:
    kind = next(name for name, cls in _KINDS.items() if type(half) is cls)
    return {"kind": kind, **dataclasses.asdict(half)}


def _half_from_json(data: object, where: str) -> Half:
    if not isinstance(data, Mapping) or data.get("kind") not in _KINDS:
        raise AdapterError(f"{where}: expected an object with 'kind' in {sorted(_KINDS)}, got {data!r}")
    fields = {key: value for key, value in data.items() if key != "kind"}
    try:
        if data["kind"] in ("routed", "kept"):
            fields["grouping"] = Grouping(**fields["grouping"])
        return _KINDS[data["kind"]](**fields)
    except (TypeError, KeyError, ConfigError, ShapeError) as error:
        raise AdapterError(f"{where}: malformed plan entry {dict(data)!r} ({error})") from error


def _stream_from_json(data: object) -> Stream | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise AdapterError(f"the stream of a plan is an object or null, got {data!r}")
    try:
        return Stream(**data)
    except TypeError as error:
        raise AdapterError(f"malformed stream {dict(data)!r} ({error})") from error
