"""Attach a plan to a live model in place, and take it off again without a trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from os import PathLike
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wide.config import WideConfig
from wide.errors import ConfigError, NotAttachedError, ShapeError, UnsupportedModelError
from wide.grouping import Grouping, divisors
from wide.models.block_spec import BlockSpec, FeedForwardSpec, feed_forward
from wide.models.discovery import discover
from wide.models.eviction import EvictingGate, note_first_tokens
from wide.models.gates import (
    GATE_NAME,
    PENDING_NAME,
    ROUTER_NAME,
    FollowingGate,
    Gate,
    StaticGate,
    install_attention_gates,
    skip_output,
)
from wide.models.having import having
from wide.models.plan_check import attention_group_sizes, check_plan, first_tokens
from wide.models.pretrained import (
    PRUNED_PREFIX,
    BaseFacts,
    computing_device,
    fingerprint,
    forbid_packing,
    peft_adapters,
    sampled_values,
)
from wide.models.regroup import RegroupedChannels
from wide.models.replaced import ReplacedWeights
from wide.models.router import Router, RoutingControl, Sampling
from wide.models.stream import STREAM_NAME, attach_stream
from wide.plan import Dense, Following, Half, LayerPlan, Plan, Routed, Skipped, scale_name
from wide.schema import require

ModelT = TypeVar("ModelT", bound=nn.Module)
_ATTRIBUTE, _SAVE = "_wide_attachment", "save_pretrained"
TRAINED_ON = "wide_trained_on"
"""Where the configuration of a model that was cut has what `trained_on` returned before."""


@dataclass(slots=True)
class Attachment:
    """What wide knows about one attached model.

    Args:
        base: Fingerprint of the base model, taken before anything was changed.
        weights_seen: A sample of the base weights as `attach` left them, float32; None where they are not known.
        originals_lost: Whether the base weights were replaced before they were loaded, as in a full checkpoint, so that
            the dense model is not known.
        order_lost: Whether FFN channels lay in another order before they were loaded, so that their order in the base
            model is not known; the dense model is.
        parts: Modules and attributes that were added.
        provenance: JSON-ready facts that training adds and the adapter stores (targets, steps, sparsity reached).
        thresholds_by_sparsity: (sparsity, threshold) points, ascending; empty until they are calibrated.
        engine: What `wide.optimize` put in the place of the model's forward.
        loop: The `RouterCallback` that is on.
    """

    plan: Plan
    specs: tuple[BlockSpec, ...]
    control: RoutingControl
    base: BaseFacts
    weights_seen: Tensor | None = None
    replaced: ReplacedWeights | None = None
    originals_lost: bool = False
    regrouped: RegroupedChannels | None = None
    order_lost: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)
    parts: list[tuple[nn.Module, str]] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    thresholds_by_sparsity: list[tuple[float, float]] = field(default_factory=list)
    lora: Any = None
    engine: Any = None
    loop: Any = None

    def require_not_optimised(self) -> None:
        """Refuse to change what `wide.optimize` has copies of; raises NotAttachedError."""
        if self.engine is not None:
            raise NotAttachedError("this model is optimised; call wide.deoptimize(model) first")

    def note(self, name: str, facts: dict[str, Any]) -> None:
        """Note what a stage did; what an earlier run of it read is still what the model has seen."""
        if "stage" in (earlier := self.provenance.get(name, {})):
            self.note(f"before: {name}", earlier)
        self.provenance[name] = facts

    def routers(self) -> list[Router]:
        """Return all routers, by layer, attention before FFN."""
        return [getattr(module, name) for module, name in self.parts if name == ROUTER_NAME]

    def static_gates(self) -> list[StaticGate]:
        """Return the gates of all kept sublayers, by layer, attention before FFN."""
        return [getattr(module, name) for module, name in self.parts if name == GATE_NAME]

    def static_parameters(self) -> dict[str, nn.Parameter]:
        """Return the scales and bases of the plan under the names of `Plan.tensor_shapes`."""
        found = {scale_name(gate.layer_index, gate.half_layer): gate.scale for gate in self.static_gates()}
        bases = (getattr(module, name) for module, name in self.parts if name == STREAM_NAME)
        return found | {basis.name: basis.basis for basis in bases}


def is_attached(model: nn.Module) -> bool:
    """Return whether the model carries a plan: routers, or what a static method decided."""
    return getattr(model, _ATTRIBUTE, None) is not None


def attachment(model: nn.Module) -> Attachment:
    """Return what wide knows about an attached model; raises NotAttachedError if it carries no plan."""
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, Attachment):
        raise NotAttachedError(
            f"this {type(model).__name__} has no routers; call wide.attach(model, wide.WideConfig(...)) or wide.load"
        )
    return found


def trained_on(model: Any) -> dict[str, Any]:
    """Return the texts, and their splits, that routers, LoRA or a method read, by stage; those of a cut model, too."""
    # A model that was cut may be pruned again, by a stage of the same name.
    stages = {f"before: {name}": stage for name, stage in getattr(model.config, TRAINED_ON, {}).items()}
    if is_attached(model):
        stages |= attachment(model).provenance
    read = {name: stage for name, stage in stages.items() if isinstance(stage, Mapping) and stage.get("text")}
    return {name: {key: stage[key] for key in ("text", "split") if key in stage} for name, stage in read.items()}


def plan_for(config: WideConfig, specs: Sequence[BlockSpec]) -> Plan:
    """Return the plan that routes every layer as `config` says; raises ShapeError, with the sizes that fit."""
    router: dict[str, Any] = {"router_input": config.router_input, "bias": config.router_bias}

    def routed(spec: BlockSpec, name: str) -> Routed:
        attention = spec.attention
        if name == "ffn":
            width, size = feed_forward(spec).width, config.ffn_group_size
            legal, what = [d for d in divisors(width) if d >= 8 or d == size], f"divide the FFN width {width}"
        else:
            width, size = attention.query_width, config.attention_group_size or attention.kv_group_size
            legal = attention_group_sizes(attention)
            what = (
                f"fit {attention.num_query_heads} query heads of {attention.head_dim} over {attention.num_kv_heads} KV "
                "heads"
            )
        if size not in legal:
            raise ShapeError(f"{name}_group_size {size} does not {what}; choose one of {legal} channels")
        return Routed(grouping=Grouping(width, size), rank=config.router_rank, **router)

    return plan_of(specs, routed)


def plan_of(specs: Sequence[BlockSpec], half: Callable[[BlockSpec, str], Half]) -> Plan:
    """Return the plan of what `half` says of each layer's 'attention' and 'ffn'; FFNs of unknown kinds stay dense."""
    return Plan(tuple(LayerPlan(**{name: half(spec, name) for name, _ in spec.sublayers()}) for spec in specs))


def attach(
    model: ModelT,
    config_or_plan: WideConfig | Plan | None = None,
    *,
    specs: Sequence[BlockSpec] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    orders: Mapping[str, Tensor] | None = None,
) -> ModelT:
    """Let every sublayer run what a plan says, in place, and return the same object.

    The model keeps its class; `generate`, evaluation and training tools keep working. In evaluation mode each router
    decides by its own parameters; in training mode it samples. What a plan prunes for every token is masked, not cut
    out. `requires_grad` of the base is left as it is (training freezes it). `save_pretrained` writes a
    full checkpoint (`wide.save_checkpoint`), routers included.

    Args:
        config_or_plan: Group sizes and router options for all layers, or a plan that says it per sublayer. None
            means the default configuration.
        specs: Parts of the decoder layers, for structures that discovery does not know.
        tensors: Values of the plan, by the names and in the shapes of `Plan.tensor_shapes`; copied.
        weights: Base parameters to replace, by their name in the model's state dict; `detach` puts the originals back.
        orders: Permutations of the FFN channels, by the names of `wide.models.regroup.order_name`; `detach` puts every
            channel back. Needed for a configuration of clustered groups.

    Raises:
        UnsupportedModelError: If the structure cannot be routed or pruned as the plan says, or has an adapter of PEFT.
        ShapeError: If a size, a tensor, a weight or an order does not fit; the message names those that do.
        ConfigError: If an argument is of another type, the configuration asks for clustered groups and no orders are
            given, or for fitted routers, or orders come together with weights.
        NotAttachedError: If the model has routers or another plan already.

    Source: paper, section 3.1.
    """
    require(nn.Module, model, "model", "a model that is loaded (wide.load takes names)")
    require(WideConfig | Plan | None, config_or_plan, "config_or_plan", "a WideConfig or a Plan")
    if is_attached(model):
        raise NotAttachedError("this model already has routers or another plan; call wide.detach(model) first")
    if peft_adapters(model):
        raise UnsupportedModelError(
            f"PEFT has the adapter {peft_adapters(model)} on this model; merge it first (model.merge_and_unload()), or "
            "attach to the base and put the adapter on afterwards"
        )
    forbid_packing(model)
    specs = tuple(specs) if specs is not None else discover(model)
    config, plan = None, config_or_plan
    if not isinstance(plan, Plan):
        config = plan or WideConfig()
        plan = plan_for(config, specs)
    tensors = tensors or {}
    check_plan(plan, specs, tensors)
    _check_settings(config, orders, has_weights=bool(weights))
    state = Attachment(plan=plan, specs=specs, control=RoutingControl(Sampling()), base=fingerprint(model, specs))
    if weights:
        state.replaced = ReplacedWeights(model, weights, state.control)
        state.parts += [(module, "forward") for module in state.replaced.wrap(model)]
    state.regrouped = RegroupedChannels(specs, plan, orders) if orders else None
    # From here on nothing is refused.
    _protect_first_tokens(model, state)
    install_attention_gates()
    _install_batch_threads()
    for spec, layer in zip(specs, plan.layers, strict=True):
        _attach_layer(spec, layer, tensors, state)
    if plan.stream is not None:
        attach_stream(specs, tensors, state.control, state.handles, state.parts)
    setattr(model, _ATTRIBUTE, state)
    state.weights_seen = sampled_values(model)
    # A class of full checkpoints writes the plan, too.
    if not getattr(model, "wide_saves_plan", False):
        setattr(model, _SAVE, partial(_save_whole, model))
        state.parts.append((model, _SAVE))
    return model


def _install_batch_threads() -> None:
    """Let the thread that `generate_batch` starts bypass, replay or watch as its caller does (once a process)."""
    from transformers.generation.continuous_batching import ContinuousMixin

    begin: Any = ContinuousMixin.init_continuous_batching
    if hasattr(begin, "wide_carries"):
        return

    @wraps(begin)
    def carrying(model: Any, *args: Any, **kwargs: Any) -> Any:
        manager = begin(model, *args, **kwargs)
        if is_attached(model):
            control = attachment(model).control
            values, loop = dict(vars(control)), manager._run_generation_loop

            def run(*args: Any, **kwargs: Any) -> Any:
                with having(control, **values):
                    return loop(*args, **kwargs)

            manager._run_generation_loop = run
        return manager

    carrying.wide_carries = True  # type: ignore[attr-defined]
    ContinuousMixin.init_continuous_batching = carrying


def detach(model: ModelT) -> ModelT:
    """Take the plan off again and return the same object, bit for bit as it was before `attach`.

    LoRA, where stage 2 added it, is removed too (unmerged).

    Raises:
        NotAttachedError: If the model carries no plan, is optimised, or LoRA was merged into its weights.
    """
    state = attachment(model)
    state.require_not_optimised()
    if state.lora is not None:
        state.lora.unload()
    if state.loop is not None:
        state.loop.end()
    for handle in state.handles:
        handle.remove()
    for module, name in state.parts:
        delattr(module, name)
    if state.replaced is not None:
        state.replaced.restore()
    if state.regrouped is not None:
        state.regrouped.restore()
    # PEFT's wrapper passes on what it does not have itself.
    whole: Any = model if _ATTRIBUTE in model.__dict__ else cast(Any, model).get_base_model()
    delattr(whole, _ATTRIBUTE)
    # A class of full checkpoints would look for the plan.
    if hasattr(whole, "wide_detached"):
        whole.wide_detached()
    return model


def _save_whole(model: nn.Module, save_directory: str | PathLike[str], **options: Any) -> None:
    """Stand in for the class's own `save_pretrained`, which would write the base alone."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = model.config
    kind = PRUNED_PREFIX + config.model_type
    # A registry of transformers that `import wide` extends: it makes the class of full checkpoints of a family.
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers knows no model type {config.model_type!r}")
    config_class = CONFIG_MAPPING[kind]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    facts = config.to_dict()
    for key in ("model_type", "architectures", "transformers_version"):
        facts.pop(key, None)
    before = model.__class__, config
    model.__class__, model.config = model_class, config_class(**facts)
    try:
        # By the class: the model's own name leads here.
        model_class.save_pretrained(model, save_directory, **options)
    finally:
        model.__class__, model.config = before


def _check_settings(config: WideConfig | None, orders: Mapping[str, Tensor] | None, *, has_weights: bool) -> None:
    if orders and has_weights:
        raise ConfigError("orders= and weights= cannot be given together: replaced weights name channels by place")
    if config is None:
        return
    if config.ffn_grouping == "clustered" and orders is None:
        raise ConfigError("ffn_grouping='clustered' needs text: use wide.prune, which reads it, or give orders=")
    if config.router_start == "fitted":
        raise ConfigError("router_start='fitted' needs text: use wide.prune, which reads it, or router_start='random'")


def _protect_first_tokens(model: nn.Module, state: Attachment) -> None:
    for count in first_tokens(state.plan):
        decoder = getattr(model, "base_model", model)
        note = partial(note_first_tokens, state.control, count)
        state.handles.append(decoder.register_forward_pre_hook(note, with_kwargs=True))


def _attach_layer(spec: BlockSpec, layer: LayerPlan, tensors: Mapping[str, Tensor], state: Attachment) -> None:
    for name, part in spec.sublayers():
        half: Half = getattr(layer, name)
        if isinstance(half, Dense):
            continue
        if isinstance(half, Skipped):
            state.handles.append(part.module.register_forward_hook(partial(skip_output, state.control)))
            continue
        if isinstance(half, Following):
            gate: Gate = FollowingGate(getattr(spec.attention.module, PENDING_NAME))
        else:
            device = computing_device(spec.layer)
            place: Any = {"control": state.control, "layer_index": spec.index, "half": name, "device": device}
            source: Router | StaticGate
            if isinstance(half, Routed):
                added, source = ROUTER_NAME, Router(spec.hidden_size, half, **place)
            else:
                added, source = GATE_NAME, StaticGate(tensors[scale_name(spec.index, name)], **place)
            # New modules start in training mode, which would leave the Gumbel noise on after model.eval().
            part.module.add_module(added, source.train(part.module.training))
            state.parts.append((part.module, added))
            gate = (EvictingGate if isinstance(half, Routed) and half.evicts else Gate)(source)
        setattr(part.module, PENDING_NAME, gate)
        state.parts.append((part.module, PENDING_NAME))
        state.handles.append(part.module.register_forward_pre_hook(gate.prepare, with_kwargs=True))
        state.handles.append(part.module.register_forward_hook(gate.check))
        if part.post_norm is not None:
            state.handles.append(part.module.register_forward_pre_hook(gate.keep))
            state.handles.append(part.post_norm.register_forward_hook(gate.follow_jump))
        if isinstance(half, Routed) and half.router_input != "normed":
            # Without a norm before the sublayer, its own input is the residual stream already.
            reading = spec.layer if half.router_input == "layer_input" else part.pre_norm
            if reading is not None:
                state.handles.append(reading.register_forward_pre_hook(gate.remember, with_kwargs=True))
        if isinstance(gate, EvictingGate):
            state.handles.append(part.module.register_forward_pre_hook(gate.gate_cache, with_kwargs=True))
        if isinstance(part, FeedForwardSpec):
            state.handles.append(part.activation.register_forward_hook(gate.gate_activation))
