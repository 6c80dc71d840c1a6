"""The Plan: what each sublayer of a model runs. Whoever decides writes one, the executor reads it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from wide.errors import ConfigError
from wide.grouping import Grouping
from wide.schema import Between, Checked, typed

RouterInput = Literal["normed", "residual", "layer_input"]
RouterForm = Literal["bottleneck", "mlp", "dllm"]

# Beyond any that makes sense, so that a damaged plan asks for no memory.
Rank = Annotated[int, Between(1, 2**16)]
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
        kept: Units whose scale is not 0. None at all is allowed; unlike `Skipped`, a bias of the output projection then
            remains.
    """

    grouping: Grouping
    kept: int

    def __post_init__(self) -> None:
        if not 0 <= self.kept <= self.grouping.num_groups:
            raise ConfigError(f"kept must lie in 0 to {self.grouping.num_groups}, the number of units, got {self.kept}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """The sublayer executes for the tokens that the attention of its layer executes for.

    Only for an FFN beside a routed attention of one group: one router decides for the whole layer.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The residual stream is projected onto a subspace at the embedding and after every sublayer but the last.

    The bases have orthonormal columns, `[width, kept]` float32, in the tensors `stream.embedding` and
    `layers.<i>.<half>.basis`; `width` is the hidden size, D.
    """

    width: int
    kept: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed(Checked):
    """A router decides per token which channel groups of the sublayer execute.

    Args:
        grouping: Query channels (attention) or intermediate channels (FFN) cut into groups.
        rank: Width of the router's bottleneck, r in the paper.
        router_input: What the router reads: 'normed' is the normed input of the sub-layer, 'residual' the raw residual
            stream before that norm, 'layer_input' the stream before the layer, for both halves.
        bias: Whether the router's second matrix has a bias; the other forms have theirs always.
        form: Of two matrices: 'bottleneck' has nothing in between (the paper's), 'mlp' a ReLU (SkipGPT), 'dllm' RMSNorm
            and SiLU (D-LLM).
        evicts: For an attention of one group: later tokens do not see the keys and values of tokens that skip it.
        first_tokens: So many tokens at the start of each sequence always execute.
    """

    grouping: Grouping
    rank: Rank
    router_input: RouterInput = "normed"
    bias: bool = False
    form: RouterForm = "bottleneck"
    evicts: bool = False
    first_tokens: Annotated[int, Between(0, 2**31)] = 0

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.evicts and self.grouping.num_groups != 1:
            raise ConfigError(
                f"only an attention of one group evicts, this one has {self.grouping.num_groups}; its groups share keys"
            )


Half = Dense | Skipped | Kept | Routed | Following


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What the two halves of one decoder layer run."""

    attention: Half = Dense()
    ffn: Half = Dense()

    def halves(self) -> tuple[tuple[str, Half], tuple[str, Half]]:
        """Return the halves by name, in the order in which they run."""
        return ("attention", self.attention), ("ffn", self.ffn)


GONE = LayerPlan(attention=Skipped(), ffn=Skipped())
"""A layer that is left out whole."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every decoder layer of a model runs, first layer first, and what becomes of the residual stream."""

    layers: tuple[LayerPlan, ...]
    stream: Stream | None = None

    def __repr__(self) -> str:
        return "\n  ".join(["Plan", *self.in_words()])

    def halves(self) -> Iterator[tuple[int, str, Half]]:
        """Yield the number of each layer with the name of each half and what that runs, in the order of execution."""
        return ((index, *half) for index, layer in enumerate(self.layers) for half in layer.halves())

    @property
    def is_routed(self) -> bool:
        """Whether any sublayer has a router."""
        return any(isinstance(half, Routed) for *_, half in self.halves())

    @property
    def is_static(self) -> bool:
        """Whether anything is pruned for every token alike."""
        return self.stream is not None or any(isinstance(half, Skipped | Kept) for *_, half in self.halves())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors that hold the plan's values, all float32."""
        shapes: dict[str, tuple[int, ...]] = {}
        last = len(self.layers) - 1
        for index, name, half in self.halves():
            if isinstance(half, Kept):
                shapes[scale_name(index, name)] = (half.grouping.num_groups,)
            # The stream that the output head reads stays as wide as it is.
            if self.stream is not None and (index, name) != (last, "ffn"):
                shapes[basis_name(index, name)] = (self.stream.width, self.stream.kept)
        if self.stream is not None:
            shapes[EMBEDDING_BASIS] = (self.stream.width, self.stream.kept)
        return shapes

    def in_words(self) -> list[str]:
        """Return what the layers run, a line for each kind of layer, and what becomes of the residual stream."""
        kinds: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            words = f"attention {_in_words(layer.attention)}; FFN {_in_words(layer.ffn)}"
            kinds.setdefault(words, []).append(index)
        lines = [f"layers {_ranges(layers)}: {words}" for words, layers in kinds.items()]
        if self.stream is not None:
            lines.append(f"residual stream: {self.stream.kept} of {self.stream.width} dimensions kept")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready object with one entry a layer."""
        return {
            "layers": [
                {
                    name: {"kind": type(half).__name__.lower(), **dataclasses.asdict(half)}
                    for name, half in layer.halves()
                }
                for layer in self.layers
            ],
            "stream": None if self.stream is None else dataclasses.asdict(self.stream),
        }

    @classmethod
    def from_json(cls, data: object) -> "Plan":
        """Read what `to_json` wrote; raises AdapterError if a key is missing or unknown, or a value impossible."""
        return typed(cls, data, "plan")


def scale_name(layer: int, half: str) -> str:
    """Return the name of the tensor with the scales of a `Kept` half, 'attention' or 'ffn', of a layer."""
    return f"layers.{layer}.{half}.scale"


def basis_name(layer: int, half: str) -> str:
    """Return the name of the tensor with the basis onto which the stream is projected after a half of a layer."""
    return f"layers.{layer}.{half}.basis"


def _in_words(half: Half) -> str:
    if isinstance(half, Kept):
        return f"keeps {half.kept} of {half.grouping.num_groups} units of {half.grouping.group_size} channels"
    if isinstance(half, Routed):
        groups, size = half.grouping.num_groups, half.grouping.group_size
        router = "" if half.form == "bottleneck" else f"{half.form} router, "
        return f"{groups} groups of {size} channels, {router}rank {half.rank}, {half.router_input} input"
    if isinstance(half, Following):
        return "for the tokens that the attention executes for"
    return "left out for every token" if isinstance(half, Skipped) else "dense"


def _ranges(layers: list[int]) -> str:
    whole = layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if whole and len(layers) > 1 else ", ".join(map(str, layers))
