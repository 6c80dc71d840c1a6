"""What a model must be for its layers to run wide's operators: refused before anything is changed."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from wide.errors import UnsupportedBackendError, UnsupportedModelError
from wide.inference.choice.layer_sizes import layer_sizes, misfit
from wide.inference.operators.table import OperatorName, OperatorTable
from wide.kernels.device import half_obstacle
from wide.models.attach import Attachment
from wide.models.block_spec import BlockSpec
from wide.plan import Following, LayerPlan, Routed

_HALF_OPERATORS: dict[str, tuple[OperatorName, ...]] = {"attention": ("query", "output"), "FFN": ("gate_up", "down")}
_SOME_ROWS = tuple(1 << power for power in range(3, 21))


def require_plain(model: nn.Module, state: Attachment) -> None:
    """Refuse projections that are not plain linear layers in memory, of one dtype and device a sublayer.

    Raises:
        UnsupportedModelError: The message names layer, projection, what it is and the way out.
    """
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules()):
        raise UnsupportedModelError(
            "this model is sharded by FSDP, and wide's operators read whole weights; optimise the "
            "model before sharding, or load the checkpoint without FSDP"
        )
    for spec, layer in zip(state.specs, state.plan.layers, strict=True):
        present = set(spec.layer.modules())
        for half, parts in _halves(spec, layer):
            where = f"layer {spec.index}: {half}"
            for name, part in parts.items():
                if part not in present:
                    raise UnsupportedModelError(
                        f"{where}: the {name} projection was replaced after wide.attach, and the layer now holds "
                        f"{_linear_types(present)}; quantised layers cannot run fused: load the model unquantised"
                    )
                _require_plain_linear(where, name, part)
            _require_alike(where, parts)


def require_routing_alone(state: Attachment) -> None:
    """Refuse plans of which wide's operators know a part only.

    Raises:
        UnsupportedModelError: If a half is pruned for every token or follows another, the stream is projected, base
            weights are replaced, or a router is not a bottleneck, evicts keys and values, or protects first tokens.
    """
    if state.plan.is_static or state.replaced is not None:
        raise UnsupportedModelError(
            "this plan prunes the same for every token; wide.materialise(model) takes it out of the model, which then "
            "runs as any other. wide's operators are for routers"
        )
    halves = [half for layer in state.plan.layers for _, half in layer.halves()]
    if any(half.evicts or half.first_tokens for half in halves if isinstance(half, Routed)):
        raise UnsupportedModelError(
            "this plan evicts keys and values or protects first tokens, which wide's operators do not know; run it as "
            "it is, masked"
        )
    forms = {half.form for half in halves if isinstance(half, Routed)} - {"bottleneck"}
    if forms or any(isinstance(half, Following) for half in halves):
        what = f"routers of the form {sorted(forms)[0]!r}" if forms else "an FFN that follows the attention's router"
        raise UnsupportedModelError(
            f"this plan has {what}; wide's operators know a bottleneck router for each half (and wide.materialise "
            "takes out what is static), so run it as it is, masked"
        )


def require_kernels(state: Attachment, table: OperatorTable) -> None:
    """Refuse a table of Triton kernels where they cannot run, instead of failing in the middle of a forward.

    Raises:
        UnsupportedBackendError: The message names the device, dtype or group size.
    """
    if table.backend != "triton":
        return
    for spec, layer in zip(state.specs, state.plan.layers, strict=True):
        for half, parts in _halves(spec, layer):
            weight: Any = next(iter(parts.values())).weight
            reason = half_obstacle(weight.device, weight.dtype)
            if reason is not None:
                raise UnsupportedBackendError(
                    f"layer {spec.index}: {half}: backend 'triton' cannot run on {weight.device}: {reason}; convert "
                    "the model, or choose backend='torch' or 'auto'"
                )
            for name in _HALF_OPERATORS[half]:
                if name != "query" or spec.attention.q_norm != "width":
                    _require_fit(name, spec, layer, table)


def _halves(spec: BlockSpec, layer: LayerPlan) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    if isinstance(layer.attention, Routed):
        yield "attention", {"query": spec.attention.query, "output": spec.attention.output}
    if isinstance(layer.ffn, Routed) and spec.ffn is not None:
        named = {"gate": spec.ffn.gate, "up": spec.ffn.up, "down": spec.ffn.down}
        yield "FFN", {name: part for name, part in named.items() if part is not None}


def _linear_types(modules: set[nn.Module]) -> list[str]:
    """Return where the classes of what replaces linear layers come from."""
    types = {type(module) for module in modules} - {nn.Linear}
    return sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in types if "Linear" in cls.__qualname__)


def _require_plain_linear(where: str, name: str, linear: nn.Module) -> None:
    weight = getattr(linear, "weight", None)
    if type(linear) is not nn.Linear or type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{where}: the {name} projection, {type(linear).__name__} with a {type(weight).__name__} weight, is not a "
            "plain linear layer; quantised, sharded and LoRA-wrapped layers cannot run fused: merge LoRA, load the "
            "model unquantised and unsharded"
        )
    if weight.is_meta or weight.numel() != linear.in_features * linear.out_features:
        what = "lies on the meta device (offloaded, or not loaded yet)" if weight.is_meta else "is sharded"
        raise UnsupportedModelError(
            f"{where}: the weight of the {name} projection {what}, and wide's operators read whole weights; load the "
            "model so that all of it fits the device, without offloading"
        )


def _require_alike(where: str, parts: dict[str, nn.Module]) -> None:
    for fact in ("dtype", "device"):
        found = {name: str(getattr(part.weight, fact)) for name, part in parts.items()}
        if len(set(found.values())) > 1:
            raise UnsupportedModelError(
                f"{where}: the projections must have one {fact}, got {found}; move or convert them to one"
            )
    biased = {name: part.bias is not None for name, part in parts.items() if name in ("gate", "up")}
    if len(set(biased.values())) > 1:
        raise UnsupportedModelError(f"{where}: some of the projections have a bias and some have none, got {biased}")


def _require_fit(name: OperatorName, spec: BlockSpec, layer: LayerPlan, table: OperatorTable) -> None:
    """Refuse groups that a product of the table would not take."""
    sizes = layer_sizes(spec, layer)
    chosen = {table.choice(name, rows) for rows in _SOME_ROWS}
    reasons = [misfit(name, sizes, choice) for choice in chosen if choice.backend != "dense"]
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        raise UnsupportedBackendError(
            f"layer {spec.index}: {name}: {reason}; choose backend='torch' or 'auto', or other group sizes"
        )
