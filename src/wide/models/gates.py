"""The two places where a mask enters, each once: the attention output and the FFN activation.

Both lie outside every linear module, so that LoRA, merged or not, and quantised linears see the masked activations,
and the gradient of the mask is the paper's on executed and on skipped groups alike. What decides, a router, the router
of the attention or constants, is the source of a gate; all gates enter here.
"""

import functools
import sys
import threading
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from wide.errors import UnsupportedModelError
from wide.models.router import Router, RoutingControl

ROUTER_NAME, GATE_NAME = "wide_router", "wide_gate"
"""Modules on a sublayer, and so in names of tensors: its `Router`, or its `StaticGate`."""
GATHER_NAME = "wide_gather"
"""A module on an attention that picks the heads which the attention function sees."""
PENDING_NAME = "wide_pending"
"""The `Gate` on a sublayer, which is no module."""


class StaticGate(nn.Module):
    """Multiplies the units of one sublayer by constants, at the places where routers' masks enter.

    `scale`, float32 `[units]`, is a parameter without gradient. A method that learns scales switches its gradient on
    (or puts another parameter in its place) and may set `transform`, which then maps them to the factors that are
    applied.
    """

    def __init__(
        self, scale: Tensor, *, control: RoutingControl, layer_index: int, half: str, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale.detach().to(device=device, dtype=torch.float32, copy=True), requires_grad=False)
        self.transform: Callable[[Tensor], Tensor] | None = None
        self.control = control
        self.layer_index = layer_index
        self.half_layer = half

    def factors(self) -> Tensor:
        """Return what the units are multiplied by, float32 `[units]`, with gradient where `scale` has one."""
        scale = self.scale.float()
        return scale if self.transform is None else self.transform(scale)

    def forward(self, _hidden: Tensor) -> Tensor:
        """Return the factors, whatever the hidden states are."""
        return self.factors()


class Pending(threading.local):
    """A value that a hook leaves for a later hook of the same forward, which means: in the same thread."""

    def __init__(self) -> None:
        """Begin empty; Python calls this in every thread that comes."""
        self.value: Any = None

    def take(self) -> Any:
        """Hand the value over, once; None if there is none."""
        value, self.value = self.value, None
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies and pickles begin empty."""
        return type(self), ()


class Gate:
    """Lets a source decide before a sublayer runs, and holds the factors until they are applied.

    The source gives the factors for the sublayer's input `[B, T, D]`: a mask `[B, T, N_G]`, or float32 `[units]`.

    Attributes:
        mask: The factors to apply; none where there is nothing to apply.
        residual: What the source reads in place of the sublayer's input, where it reads the residual stream.
        followed: The same mask once more, for the FFN that follows this attention.
        normed: The same mask once more, for a norm of the sublayer's output.
    """

    def __init__(self, source: Router | StaticGate) -> None:
        self.source = source
        self.layer_index, self.half_layer = source.layer_index, source.half_layer
        self.mask, self.residual, self.followed, self.normed = Pending(), Pending(), Pending(), Pending()

    def prepare(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide for the coming sublayer by its input `[B, T, D]` (a forward pre-hook with keyword arguments).

        Raises UnsupportedModelError if the source reads the layer's input and none was shown.
        """
        residual, mask = self.residual.take(), None
        if self.source.control.enabled:
            if residual is None and isinstance(self.source, Router) and self.source.reads_layer_input:
                raise UnsupportedModelError(
                    f"layer {self.layer_index}: its router reads the layer's input, and the layer runs again without "
                    "its hooks; switch transformers' gradient checkpointing off (wide.prune has its own)"
                )
            mask = self.source(input_of(args, kwargs) if residual is None else residual)
        self.mask.value = mask
        if isinstance(self.source, Router) and self.source.is_followed:
            self.followed.value = mask

    def remember(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the input of a norm or a layer, the residual stream, until the sublayer runs (a forward pre-hook)."""
        self.residual.value = input_of(args, kwargs)

    def attend(
        self, function: Callable[..., Any], module: nn.Module, heads: tuple[Tensor, ...], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return what an attention function gives, `[B, T, H, d]` and weights, with zeros for skipped head groups.

        `heads` are queries, keys and values, `[B, H, T, d]`.
        """
        output, weights = function(module, *heads, *args, **kwargs)
        mask = self.mask.take()
        return (output if mask is None else gate_heads(output, mask)), weights

    def gate_activation(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Set skipped groups of an FFN's activation to zero (a forward hook): phi(g) * m * u is (phi(g) * u) * m."""
        mask = self.mask.take()
        return output if mask is None else gate_groups(output, mask)

    def keep(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Keep the mask for the norm of the sublayer's output (a forward pre-hook, after the router's)."""
        self.normed.value = self.mask.value

    def follow_jump(self, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Give the mask the jump's gradient through a norm of the sublayer's output (a forward hook); values stay.

        Such a norm gives the same for every m * x with m > 0, without a gradient, and at 0 its own is 1 / sqrt(eps), a
        thousand times the jump. So rows that skip all get that of a usual row, a lone group that of the whole output.
        """
        mask = self.normed.take()
        # A forward that was broken off may have left one.
        if mask is None or not mask.requires_grad or mask.shape[:-1] != output.shape[:-1]:
            return output
        runs, now = (output != 0).any(-1, keepdim=True), mask.detach()
        size = args[0].detach().float().square().mean(-1, keepdim=True).sqrt().sum() / runs.sum()
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) or 1e-6
        # Where no row executes, no size is known, and 1 stands for it.
        at_zero = (1 + size.nan_to_num(1.0) ** 2 / eps).rsqrt()
        only = (now != 0) & (now.count_nonzero(-1).unsqueeze(-1) == 1)
        factor = torch.where(runs, 1 + (only * (mask - now)).sum(-1, keepdim=True), at_zero)
        return output * factor.to(output.dtype)

    def check(self, module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        """Raise UnsupportedModelError if the sublayer ended and nothing has taken the mask (a forward hook)."""
        if self.mask.take() is not None:
            raise bypassed(module, f"layer {self.layer_index}: the {self.half_layer} mask was not applied")


class FollowingGate(Gate):
    """Executes an FFN for the tokens that the attention of its layer, whose router has one group, executes for."""

    def __init__(self, attention: Gate) -> None:
        super().__init__(attention.source)
        assert isinstance(attention.source, Router)
        attention.source.is_followed = True
        self.attention, self.half_layer = attention, "ffn"

    def prepare(self, _module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Take over what the attention's router decided; raises UnsupportedModelError if the FFN runs before it."""
        self.mask.value = self.attention.followed.take()
        if self.mask.value is None and self.source.control.enabled:
            raise UnsupportedModelError(
                f"layer {self.layer_index}: the FFN runs before the attention whose router it follows; give it a "
                "router of its own (Routed)"
            )


def gate_groups(values: Tensor, mask: Tensor) -> Tensor:
    """Multiply `values` `[..., C]` by `mask` `[..., N_G]` or `[N_G]`, a factor per contiguous group of channels."""
    grouped = values.unflatten(-1, (mask.shape[-1], -1))
    return (grouped * _factors(mask, values).unsqueeze(-1)).flatten(-2).to(values.dtype)


def gate_heads(heads: Tensor, mask: Tensor) -> Tensor:
    """Multiply attention output `heads` `[..., H, d]` by `mask` `[..., N_G]` or `[N_G]`, a factor per H / N_G heads."""
    mask = mask if mask.dim() == 1 else mask.reshape(*heads.shape[:-2], -1)
    per_head = mask.repeat_interleave(heads.shape[-2] // mask.shape[-1], dim=-1)
    return (heads * _factors(per_head, heads).unsqueeze(-1)).to(heads.dtype)


def _factors(mask: Tensor, like: Tensor) -> Tensor:
    # Masks per token are zeros and ones in any dtype; constants of a sublayer are not, and stay float32.
    return mask if mask.dim() == 1 else mask.to(like.dtype)


def bypassed(module: nn.Module, what: str) -> UnsupportedModelError:
    """Return the error for an attention implementation that does not run through the wrapped functions."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "unknown")
    return UnsupportedModelError(
        f"{what}: attention implementation {implementation!r} was registered after the model was attached or sliced, "
        "or does not go through transformers' attention interface. Choose 'sdpa' or 'eager', or register it first: "
        "then detach and attach again, or load the model again"
    )


def skip_output(control: RoutingControl, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    """Put zeros in the place of a sublayer's hidden states (a forward hook but for the control).

    The sublayer runs all the same, so that caches keep the length of the sequence.
    """
    return output if not control.enabled else with_hidden(output, torch.zeros_like(hidden_of(output)))


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a layer, a sublayer or a norm is given."""
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, Tensor)
    return hidden


def cache_name(arguments: Container[str]) -> str:
    """Return how arguments, or parameters, of a model or a module call the cache.

    transformers 5.24 has made `past_key_values` `cache`, and takes the old name from callers, too, of which `cache`
    wins; before, `cache` was that of continuous batching alone, which is no `Cache`.
    """
    if isinstance(arguments, Mapping) and isinstance(arguments.get("cache"), Cache):
        return "cache"
    return "past_key_values" if "past_key_values" in arguments else "cache"


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the keyword arguments of a model or a module; None without."""
    return arguments.get(cache_name(arguments))


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states of a sublayer's output, which may carry attention weights as well."""
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """Return a sublayer's output with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def install_attention_gates() -> None:
    """Wrap every attention function of transformers, once per process; other modules than ours are untouched.

    The existing names are wrapped, not new ones registered: a new name without a mask function loses the causal mask
    without a warning, and a switch of the implementation would bypass it.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}:
        function = ALL_ATTENTION_FUNCTIONS.get(name, _module_eager)
        if not hasattr(function, "wide_gated"):
            AttentionInterface.register(name, _gated(function))


def _gated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads, gather = (query, key, value), getattr(module, GATHER_NAME, None)
        gate: Gate | None = getattr(module, PENDING_NAME, None)
        if gather is not None:
            heads = gather(*heads)
        if gate is None:
            return function(module, *heads, *args, **kwargs)
        return gate.attend(function, module, heads, *args, **kwargs)

    wrapper.wide_gated = True  # type: ignore[attr-defined]
    return wrapper


def _module_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the eager attention of the file that defines the module's class."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)
    raise UnsupportedModelError(f"{type(module).__name__}: its source file has no eager_attention_forward; use 'sdpa'")
