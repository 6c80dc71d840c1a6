"""The two places where a mask enters, each once: the attention output and the FFN activation.

Both lie outside every linear module, so that LoRA, merged or not, and quantised linears see the masked activations,
and the gradient of the mask is the paper's on executed and on skipped groups alike. What decides, a router, the router
of the attention half or constants, is a gate; all gates enter here.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.models.router import Router

ROUTER_NAME, GATE_NAME = "wide_router", "wide_gate"


class Gate(Protocol):
    """What decides by which factors the channels of a half-layer are multiplied.

    Args:
        layer_index: Decoder layer, from 0.
        half_layer: 'attention' or 'ffn'.
        mask: The factors of the running sub-layer until they are taken: `[B, T, N_G]` per token, or float32 `[N_G]`
            for every token.
    """

    layer_index: int
    half_layer: str
    mask: Tensor | None

    def prepare(self, hidden: Tensor) -> None:
        """Decide for the coming sub-layer, whose input is `[B, T, D]`; nothing to apply leaves `mask` None."""

    def take(self) -> Tensor | None:
        """Hand the pending factors over, once."""


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
    # Masks per token are zeros and ones in any dtype; constants of a half-layer are not, and stay float32.
    return mask if mask.dim() == 1 else mask.to(like.dtype)


def gate_of(module: nn.Module) -> Gate | None:
    """Return the gate that `attach` put on a sub-layer, None if there is none."""
    return cast("Gate | None", getattr(module, ROUTER_NAME, None) or getattr(module, GATE_NAME, None))


def router_of(module: nn.Module) -> Router:
    """Return the router that `attach` put on a sub-layer."""
    router = getattr(module, ROUTER_NAME)
    assert isinstance(router, Router)
    return router


def prepare_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the sub-layer's gate decide on its hidden states (a forward pre-hook with keyword arguments)."""
    gate = gate_of(module)
    assert gate is not None
    gate.prepare(args[0] if args else kwargs["hidden_states"])


def check_after(module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
    """Raise if the sub-layer finished without anything having taken the mask (a forward hook).

    Raises:
        UnsupportedModelError: If the attention implementation in use bypasses the gate.
    """
    gate = gate_of(module)
    if gate is None or gate.mask is None:
        return
    gate.mask = None
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "unknown")
    raise UnsupportedModelError(
        f"layer {gate.layer_index}: the {gate.half_layer} mask was not applied; attention implementation "
        f"{implementation!r} was registered after the routers were attached or does not go through transformers' "
        "attention interface. Choose 'sdpa' or 'eager', or detach and attach again"
    )


class RememberResidual:
    """A pre-hook on a norm or a layer that shows its input, the residual stream, to the routers that read it."""

    def __init__(self, routers: list[Router]) -> None:
        """Serve these routers."""
        self.routers = routers

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the input until the sub-layer runs."""
        for router in self.routers:
            router.residual = args[0] if args else kwargs["hidden_states"]


class ActivationGate:
    """A forward hook on an FFN's activation: phi(g) * m * u equals (phi(g) * u) * m."""

    def __init__(self, gate: Gate) -> None:
        """Apply the masks of this gate."""
        self.gate = gate

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the activation with skipped groups set to zero."""
        mask = self.gate.take()
        return output if mask is None else gate_groups(output, mask)


class FollowingGate:
    """Executes an FFN for the tokens that the attention of its layer executes for.

    Args:
        router: Of the attention half, with one group.
    """

    def __init__(self, router: Router) -> None:
        """Ask the router to keep its masks for a second use."""
        router.is_followed = True
        self.router = router
        self.layer_index, self.half_layer = router.layer_index, "ffn"
        self.mask: Tensor | None = None

    def prepare(self, _hidden: Tensor) -> None:
        """Take over what the attention's router has decided in this forward.

        Raises:
            UnsupportedModelError: If the FFN runs before the attention.
        """
        self.mask = self.router.take_followed()
        if self.mask is None and self.router.control.enabled:
            raise UnsupportedModelError(
                f"layer {self.layer_index}: the FFN runs before the attention whose router it follows; give it a "
                "router of its own (Routed)"
            )

    def take(self) -> Tensor | None:
        """Hand the pending mask over, once."""
        mask, self.mask = self.mask, None
        return mask


def install_attention_gates() -> None:
    """Wrap every attention function of transformers, once per process; modules without a gate are untouched.

    The existing names are wrapped, not new ones registered: a new name without a mask function loses the causal mask
    without a warning, and a switch of the implementation would bypass it.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        function = ALL_ATTENTION_FUNCTIONS[name]
        if not hasattr(function, "wide_gated"):
            AttentionInterface.register(name, _gated(function))
    if "eager" not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register("eager", _gated(_module_eager))


def _gated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate = gate_of(module)
        if isinstance(gate, Router) and gate.fused is not None:
            return gate.fused.attend(function, module, *args, **kwargs)
        if isinstance(gate, Router) and gate.eviction is not None and gate.mask is not None:
            output, weights = gate.eviction.attend(function, module, *args, **kwargs)
        else:
            output, weights = function(module, *args, **kwargs)
        mask = None if gate is None else gate.take()
        return (output if mask is None else gate_heads(output, mask)), weights

    wrapper.wide_gated = True  # type: ignore[attr-defined]
    return wrapper


def _module_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the eager attention of the file that defines the module's class."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)
    raise UnsupportedModelError(f"{type(module).__name__}: its source file has no eager_attention_forward; use 'sdpa'")
