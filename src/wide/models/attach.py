"""Attach routers to a live model in place, and take them off again without a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from wide.config import WideConfig
from wide.errors import NotAttachedError, ShapeError, UnsupportedModelError
from wide.grouping import Grouping, divisors
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec
from wide.models.discovery import discover
from wide.models.fingerprint import fingerprint
from wide.models.gates import (
    ROUTER_NAME,
    ActivationGate,
    RememberResidual,
    check_after,
    install_attention_gates,
    route_before,
    router_of,
)
from wide.models.router import Router, RoutingControl
from wide.plan import Dense, Half, LayerPlan, Plan, Routed

ModelT = TypeVar("ModelT", bound=nn.Module)
_ATTRIBUTE = "_wide_attachment"


class Removable(Protocol):
    """What can be taken off again."""

    def remove(self) -> None:
        """Take it off."""


@dataclass(slots=True)
class Attachment:
    """What wide knows about one attached model.

    Args:
        plan: What each half-layer runs.
        specs: The parts of each decoder layer.
        control: Shared by all routers.
        base: Fingerprint of the base model, taken before anything was changed.
        handles: Hooks, removed by `detach`.
        provenance: JSON-ready facts that training adds and the adapter stores (targets, steps, sparsity reached).
        dial: Sparsity -> threshold points, ascending; empty until calibrated.
        lora: The LoRA handle of `wide.models.lora`, if any.
        fused: Whether the layers run fused operators (`wide.models.optimize`).
        handles_fused: Hooks and stand-ins of the fused execution, removed by `deoptimize`.
    """

    plan: Plan
    specs: tuple[BlockSpec, ...]
    control: RoutingControl
    base: dict[str, Any]
    handles: list[RemovableHandle] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    dial: list[tuple[float, float]] = field(default_factory=list)
    lora: Any = None
    fused: bool = False
    handles_fused: list[Removable] = field(default_factory=list)

    def routers(self) -> list[Router]:
        """Return all routers, by layer, attention before FFN."""
        return [router_of(module) for _, module, _ in self.routed_halves()]

    def routed_halves(self) -> list[tuple[int, nn.Module, Routed]]:
        """Return (layer index, sub-layer module, its plan) of every routed half, in execution order."""
        halves: list[tuple[int, nn.Module, Routed]] = []
        for spec, layer in zip(self.specs, self.plan.layers, strict=True):
            if isinstance(layer.attention, Routed):
                halves.append((spec.index, spec.attention.module, layer.attention))
            if isinstance(layer.ffn, Routed) and spec.ffn is not None:
                halves.append((spec.index, spec.ffn.module, layer.ffn))
        return halves


def is_attached(model: nn.Module) -> bool:
    """Return whether the model carries routers."""
    return getattr(model, _ATTRIBUTE, None) is not None


def attachment(model: nn.Module) -> Attachment:
    """Return what wide knows about an attached model.

    Raises:
        NotAttachedError: If the model carries no routers.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, Attachment):
        raise NotAttachedError(
            f"this {type(model).__name__} has no routers; call wide.attach(model, wide.WideConfig(...)) or wide.load"
        )
    return found


def plan_for(config: WideConfig, specs: Sequence[BlockSpec]) -> Plan:
    """Return the plan that routes every layer as `config` says.

    Raises:
        ShapeError: If a group size does not fit the model; the message names those that do.
    """
    return Plan(
        tuple(
            LayerPlan(
                attention=_routed(config, _attention_grouping(config, spec.attention)),
                ffn=Dense() if spec.ffn is None else _routed(config, _ffn_grouping(config, spec.ffn)),
            )
            for spec in specs
        )
    )


def attach(
    model: ModelT,
    config_or_plan: WideConfig | Plan | None = None,
    *,
    specs: Sequence[BlockSpec] | None = None,
) -> ModelT:
    """Give every layer its routers, in place, and return the same object.

    The model keeps its class; `generate`, evaluation and training tools keep working. In evaluation mode each router
    decides by its own parameters; in training mode it samples. The base weights are not touched, and `requires_grad`
    of the base is left as it is (training freezes it).

    Args:
        model: A Hugging Face causal LM.
        config_or_plan: Group sizes and router options for all layers, or a plan that says it per half-layer. None
            means the default configuration.
        specs: Parts of the decoder layers, for structures that discovery does not know.

    Raises:
        UnsupportedModelError: If the structure cannot be routed.
        ShapeError: If a group size does not divide; the message names those that do.
        NotAttachedError: If the model has routers already.

    Source: paper, section 3.1.
    """
    if is_attached(model):
        raise NotAttachedError("this model already has routers; call wide.detach(model) first")
    specs = tuple(specs) if specs is not None else discover(model)
    config = config_or_plan if isinstance(config_or_plan, WideConfig) else None
    if config_or_plan is None:
        config = WideConfig()
    plan = plan_for(config, specs) if config is not None else config_or_plan
    assert isinstance(plan, Plan)
    _check_plan(plan, specs)
    control = RoutingControl(len(specs))
    state = Attachment(plan=plan, specs=specs, control=control, base=fingerprint(model, specs))
    install_attention_gates()
    for spec, layer in zip(specs, plan.layers, strict=True):
        _attach_layer(spec, layer, state)
    if config is not None and config.execute_bias:
        for router in state.routers():
            router.reset_parameters(config.execute_bias)
    setattr(model, _ATTRIBUTE, state)
    return model


def detach(model: ModelT) -> ModelT:
    """Take the routers off again and return the same object, bit for bit as it was before `attach`.

    LoRA, where stage 2 added it, is removed too (unmerged).

    Raises:
        NotAttachedError: If the model carries no routers, is optimised, or LoRA was merged into its weights.
    """
    state = attachment(model)
    if state.fused:
        raise NotAttachedError("this model is optimised; call wide.deoptimize(model) first")
    if state.lora is not None:
        state.lora.unload()
    for handle in state.handles:
        handle.remove()
    for _, module, _ in state.routed_halves():
        delattr(module, ROUTER_NAME)
    delattr(model, _ATTRIBUTE)
    return model


def _routed(config: WideConfig, grouping: Grouping) -> Routed:
    return Routed(grouping=grouping, rank=config.router_rank, router_input=config.router_input, bias=config.router_bias)


def _attention_grouping(config: WideConfig, spec: AttentionSpec) -> Grouping:
    size = config.attention_group_size or spec.kv_group_size
    legal = attention_group_sizes(spec)
    if size not in legal:
        raise ShapeError(
            f"attention_group_size {size} does not fit {spec.num_query_heads} query heads of {spec.head_dim} over "
            f"{spec.num_kv_heads} KV heads; choose one of {legal} channels"
        )
    return Grouping(spec.query_width, size)


def attention_group_sizes(spec: AttentionSpec) -> list[int]:
    """Return sizes in whole query heads that are divisors or multiples of the heads per KV head."""
    per_kv = spec.num_query_heads // spec.num_kv_heads
    heads = [n for n in divisors(spec.num_query_heads) if per_kv % n == 0 or n % per_kv == 0]
    return [n * spec.head_dim for n in heads]


def _ffn_grouping(config: WideConfig, spec: FeedForwardSpec) -> Grouping:
    if spec.width % config.ffn_group_size:
        raise ShapeError(
            f"ffn_group_size {config.ffn_group_size} does not divide the FFN width {spec.width}; choose one of "
            f"{[d for d in divisors(spec.width) if d >= 8]}"
        )
    return Grouping(spec.width, config.ffn_group_size)


def _check_plan(plan: Plan, specs: Sequence[BlockSpec]) -> None:
    if len(plan.layers) != len(specs):
        raise ShapeError(f"the plan has {len(plan.layers)} layers, the model {len(specs)}")
    for spec, layer in zip(specs, plan.layers, strict=True):
        _check_half(layer.attention, spec.attention.query_width, f"layer {spec.index}: attention")
        if isinstance(layer.ffn, Routed) and spec.ffn is None:
            raise UnsupportedModelError(f"the plan routes an FFN that cannot be routed: {spec.ffn_reason}")
        if spec.ffn is not None:
            _check_half(layer.ffn, spec.ffn.width, f"layer {spec.index}: FFN")
        if isinstance(layer.attention, Routed):
            legal = attention_group_sizes(spec.attention)
            if layer.attention.grouping.group_size not in legal:
                raise ShapeError(
                    f"layer {spec.index}: attention group size {layer.attention.grouping.group_size} is not one of "
                    f"{legal} channels"
                )


def _check_half(half: Half, width: int, where: str) -> None:
    if isinstance(half, Routed) and half.grouping.width != width:
        raise ShapeError(f"{where} is {width} channels wide, the plan says {half.grouping.width}")


def _attach_layer(spec: BlockSpec, layer: LayerPlan, state: Attachment) -> None:
    remember: dict[nn.Module, list[Router]] = {}
    if isinstance(layer.attention, Routed):
        router = _add_router(spec.attention.module, spec, layer.attention, "attention", state)
        _note_residual(remember, router, spec.attention.pre_norm)
    if isinstance(layer.ffn, Routed) and spec.ffn is not None:
        router = _add_router(spec.ffn.module, spec, layer.ffn, "ffn", state)
        _note_residual(remember, router, spec.ffn.pre_norm)
        state.handles.append(spec.ffn.activation.register_forward_hook(ActivationGate(router)))
    for norm, routers in remember.items():
        state.handles.append(norm.register_forward_pre_hook(RememberResidual(routers)))


def _add_router(module: nn.Module, spec: BlockSpec, half: Routed, name: str, state: Attachment) -> Router:
    device = next(spec.layer.parameters()).device
    router = Router(spec.hidden_size, half, control=state.control, layer_index=spec.index, half=name, device=device)
    # New modules start in training mode, which would leave the Gumbel noise on after model.eval().
    router.train(module.training)
    module.add_module(ROUTER_NAME, router)
    state.handles.append(module.register_forward_pre_hook(route_before, with_kwargs=True))
    state.handles.append(module.register_forward_hook(check_after))
    return router


def _note_residual(remember: dict[nn.Module, list[Router]], router: Router, norm: nn.Module | None) -> None:
    # Without a norm before the sub-layer, its own input is the residual stream already.
    if router.reads_residual and norm is not None:
        remember.setdefault(norm, []).append(router)
