"""The two places where a mask enters, each once: the attention output and the FFN activation.

Both lie outside every linear module, so that LoRA, merged or not, and quantised linears see the masked activations,
and the gradient of the mask is the paper's on executed and on skipped groups alike.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wide.errors import UnsupportedModelError
from wide.models.router import Router

ROUTER_NAME = "wide_router"


def gate_groups(values: Tensor, mask: Tensor) -> Tensor:
    """Multiply `values` `[..., C]` by `mask` `[..., N_G]`, a factor per contiguous group of C / N_G channels."""
    grouped = values.unflatten(-1, (mask.shape[-1], -1))
    return (grouped * mask.unsqueeze(-1).to(values.dtype)).flatten(-2)


def gate_heads(heads: Tensor, mask: Tensor) -> Tensor:
    """Multiply attention output `heads` `[..., H, d]` by `mask` `[..., N_G]`, a factor per H / N_G heads."""
    mask = mask.reshape(*heads.shape[:-2], -1)
    per_head = mask.repeat_interleave(heads.shape[-2] // mask.shape[-1], dim=-1)
    return heads * per_head.unsqueeze(-1).to(heads.dtype)


def router_of(module: nn.Module) -> Router:
    """Return the router that `attach` put on a sub-layer."""
    router = getattr(module, ROUTER_NAME)
    assert isinstance(router, Router)
    return router


def route_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the sub-layer's router on its hidden states (a forward pre-hook with keyword arguments)."""
    router_of(module).route(args[0] if args else kwargs["hidden_states"])


def check_after(module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
    """Raise if the sub-layer finished without any gate having taken the mask (a forward hook).

    Raises:
        UnsupportedModelError: If the attention implementation in use bypasses the gate.
    """
    router = router_of(module)
    if router.mask is None:
        return
    router.mask = None
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "unknown")
    raise UnsupportedModelError(
        f"layer {router.layer_index}: the {router.half_layer} mask was not applied; attention implementation "
        f"{implementation!r} was registered after the routers were attached or does not go through transformers' "
        "attention interface. Choose 'sdpa' or 'eager', or detach and attach again"
    )


class RememberResidual:
    """A pre-hook on a norm that shows its input, the residual stream, to the routers that read it."""

    def __init__(self, routers: list[Router]) -> None:
        """Serve these routers."""
        self.routers = routers

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the norm's input until the sub-layer runs."""
        for router in self.routers:
            router.residual = args[0]


class ActivationGate:
    """A forward hook on an FFN's activation: phi(g) * m * u equals (phi(g) * u) * m."""

    def __init__(self, router: Router) -> None:
        """Gate with the masks of this router."""
        self.router = router

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the activation with skipped groups set to zero."""
        mask = self.router.take()
        return output if mask is None else gate_groups(output, mask)


def install_attention_gates() -> None:
    """Wrap every attention function of transformers, once per process; unrouted modules are untouched.

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
        router = getattr(module, ROUTER_NAME, None)
        if router is not None and router.fused is not None:
            return router.fused.attend(function, module, *args, **kwargs)
        output, weights = function(module, *args, **kwargs)
        mask = None if router is None else router.take()
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
