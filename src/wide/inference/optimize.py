"""Turn a routed model into one that runs wide's operators, and back."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from numbers import Real
from statistics import mean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wide.data.progress import steps
from wide.errors import ConfigError, NotAttachedError, UnsupportedModelError
from wide.inference.choice.layer_sizes import layer_sizes, tune_command
from wide.inference.choice.measured import is_measured, measured_table, obstacle
from wide.inference.choice.sample import LayerSample, sample_layers
from wide.inference.choice.tuning.tune import tune_layers, tuned_layers
from wide.inference.engine.engine import Engine
from wide.inference.engine.paged import PagedBatching
from wide.inference.engine.visible_keys import VisibleKeys
from wide.inference.fused import FusedAttention, FusedFeedForward
from wide.inference.fused_router import FusedRouter
from wide.inference.operators.table import DENSE_TABLE, OPERATORS, OperatorTable
from wide.inference.reading.checks import require_kernels, require_plain, require_routing_alone
from wide.inference.reading.stacking import stack_linears, unstack_linears
from wide.inference.reading.weights import ACTIVATIONS
from wide.kernels.device import device_facts
from wide.models.attach import Attachment, attachment
from wide.models.block_spec import BlockSpec, FeedForwardSpec, standing_in
from wide.models.gates import routed_gate
from wide.models.router import Router
from wide.plan import Routed

ModelT = TypeVar("ModelT", bound=nn.Module)
_PROBE_ROWS = 3
_TUNING_SECONDS = 90.0
_BACKENDS = ("auto", "triton", "torch")


def optimize(
    model: ModelT,
    *,
    backend: str = "auto",
    table: OperatorTable | None = None,
    executed: tuple[float, float] = (0.5, 0.5),
    sample: Tensor | None = None,
    tune: bool = True,
) -> ModelT:
    """Let every routed sublayer of an attached model run its fused operators, in place, and return the same object.

    The outputs are those of the masked model; `generate`, caches and evaluation keep working. Training needs the
    masked form: call `deoptimize` first. Separate gate and up projections move into one buffer that both view;
    `deoptimize` gives each its own memory again.

    Attention skips under causal masks with left padding and sliding windows. For packed sequences, holes, right padding
    and masks of the caller's own the family's attention function runs, which a warning says once. On a GPU the mask of
    a step of decoding is not read (but for the first step of a cache): one that hides keys which it showed before
    gives NaN. Router weights that are written through `.data` while the model is optimised are not seen.

    Args:
        model: An attached model in evaluation mode, LoRA merged, with plain linear layers.
        backend: 'auto' follows measurements of this kind of device, by shape and expected rates, with dense products
            as candidates (`wide tune` measures a model's own shapes); 'triton' skips from fixed numbers of tokens on;
            'torch' is the reference, for any device.
        table: Which operator runs at which sizes, instead of what `backend` stands for.
        executed: Expected shares of (token, group) pairs that execute, in attention and FFN, for 'auto'.
        sample: Token ids without padding, int32 or int64 [B, T], of which one masked forward tells 'auto' what each
            layer executes, instead of `executed`, and its tile density: where that is low, and the kernel fits
            (sm_90, half precision, up to 128 groups of a multiple of 64 channels), down skips in prompts, too. Best are
            as many tokens as prompts have, of text like that to come, at the threshold to come; below 2048 they tell
            shares only.
        tune: Whether a GPU or shape without measurements is measured now, for at most 90 seconds, with 'auto': once a
            machine, kept in the cache folder. Otherwise dense products run there, with a warning.

    Raises:
        ConfigError: If the backend is unknown, `executed` is not two shares, or a sample is given that nothing would
            follow.
        ShapeError: If the sample is not of token ids.
        NotAttachedError: If the model has no routers, is optimised already, is in training mode, or has unmerged LoRA.
        UnsupportedModelError: If a layer is quantised, sharded, offloaded or of several dtypes, its FFN is not the
            standard one, or the plan has something else than dense sublayers and bottleneck routers.
        UnsupportedBackendError: If the kernels cannot run on the layers' device, in their dtype, or with their groups.
    """
    state = attachment(model)
    require_routing_alone(state)
    if backend not in _BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; choose one of {list(_BACKENDS)}")
    shares = executed if isinstance(executed, Sequence) else ()
    if len(shares) != 2 or not all(isinstance(share, Real) and 0 < share <= 1 for share in shares):
        raise ConfigError(f"executed must be two shares in (0, 1] like (0.34, 0.7), got {executed!r}")
    if state.fused:
        raise NotAttachedError("this model is optimised already; call wide.deoptimize(model) first")
    if model.training:
        raise NotAttachedError("fused execution is for inference; call model.eval() first")
    if state.lora is not None and not state.lora.merged:
        raise NotAttachedError("merge LoRA first: wide.merge_lora(model)")
    if table is None and backend != "auto":
        table = OperatorTable.fixed(backend)
    if sample is not None and (table is not None or backend != "auto"):
        raise ConfigError(
            f"a sample tells backend='auto' which operators to take, got backend={backend!r} and table={table}; "
            "leave it out, or the backend and the table"
        )
    require_plain(model, state)
    known = [LayerSample(executed, None)] * len(state.specs)
    if table is not None:
        require_kernels(state, table)
    else:
        if sample is not None:
            known = sample_layers(model, sample)
            executed = tuple(mean(shares) for shares in zip(*(layer.executed for layer in known), strict=True))  # type: ignore[assignment]
        _require_measurements(model, state, executed, tune=tune)
    keys = VisibleKeys(model)
    is_chosen = table is None and _weight(state).is_cuda
    tables = [table or _measured(spec, state, index, known[index]) for index, spec in enumerate(state.specs)]
    if is_chosen and obstacle(_weight(state).device, _weight(state).dtype) is None:
        _warn_if_nothing_pays(tables)
    fused = [_fuse(spec, state, index, tables[index], keys) for index, spec in enumerate(state.specs)]
    with ExitStack() as stack:
        for part in (part for pair in fused for part in pair if part is not None):
            router = part.gate.source
            if part.table.backend == "triton" and isinstance(router, Router):
                stack.enter_context(standing_in(router, FusedRouter(router, "triton")))
        for index, (attention, ffn) in enumerate(fused):
            if attention is not None:
                attention.gate.executor = attention
                stack.callback(setattr, attention.gate, "executor", None)
                stack.enter_context(standing_in(attention.spec.query, attention.query))
                stack.enter_context(standing_in(attention.spec.output, attention.output))
            if ffn is not None:
                stack.enter_context(standing_in(ffn.spec.module, ffn.__call__))
                if isinstance(ffn.spec.gate, nn.Linear) and isinstance(ffn.spec.up, nn.Linear):
                    both = ffn.spec.gate, ffn.spec.up
                    stack_linears(both, f"layer {index}: FFN")
                    stack.callback(unstack_linears, both)
        engine = Engine(model, state, tables, keys)
        stack.callback(engine.remove)
        has_sinks = any(hasattr(spec.attention.module, "sinks") for spec in state.specs)
        if keys.unusual is None and not has_sinks and hasattr(model, "init_continuous_batching"):
            stack.callback(PagedBatching(model, engine.made_of).remove)
        state.engine, state.fused = engine, stack.pop_all()
    return model


def deoptimize(model: ModelT) -> ModelT:
    """Go back to dense layers followed by masks, in place, and return the same object.

    Raises:
        NotAttachedError: If the model has no routers or is not optimised.
    """
    state = attachment(model)
    if not state.fused:
        raise NotAttachedError("this model is not optimised")
    fused, state.fused, state.engine = state.fused, None, None
    fused.close()
    return model


def _weight(state: Attachment) -> Tensor:
    weight: Any = state.specs[0].attention.query.weight
    return weight  # type: ignore[no-any-return]


def _require_measurements(model: nn.Module, state: Attachment, executed: tuple[float, float], *, tune: bool) -> None:
    """Measure a GPU or shapes that nothing is known of, or say what runs without."""
    device, dtype = _weight(state).device, _weight(state).dtype
    if device.type != "cuda":
        warnings.warn(
            f"wide: operators that skip need a GPU, not {device.type}: reference operators run, which are right, and "
            "slower than masks. Leave the model as it is, or choose backend='torch' for tests",
            stacklevel=3,
        )
        return
    start = f"wide: on {device_facts(device).name} dense products run, and routers come on top, so the model is slower"
    reason = obstacle(device, dtype)
    if reason is not None:
        warnings.warn(f"{start} than without pruning: {reason}. Convert the model, or take another", stacklevel=3)
        return
    layers = list(zip(state.specs, state.plan.layers, strict=True))
    if is_measured(device, [layer_sizes(*layer) for layer in layers], executed=executed):
        return
    if not tune:
        command = tune_command(model, layers, executed)
        warnings.warn(
            f"{start} than without pruning: its shapes have not been measured there. Leave out tune=False, run "
            f"`{command}`, or choose backend='triton'",
            stacklevel=3,
        )
        return
    with steps(f"measuring which operators pay on {device_facts(device).name}, once") as told:
        tune_layers(
            tuned_layers(state.specs, state.plan),
            device=device,
            executed=executed,
            quick=True,
            seconds=_TUNING_SECONDS,
            progress=lambda at: told(at.done, at.total),
        )


def _warn_if_nothing_pays(tables: Sequence[OperatorTable]) -> None:
    sizes = (1, 2, 8, 64, 512, 2048, 4096, 16384)
    if all(table.how(name, rows) == "dense" for table in tables for name in OPERATORS for rows in sizes):
        warnings.warn(
            "wide: at this model's shapes no operator that skips is faster than the dense one here, so all run dense "
            "and the routers come on top: detach them, or take a larger model or sparsity",
            stacklevel=3,
        )


def _measured(spec: BlockSpec, state: Attachment, index: int, known: LayerSample) -> OperatorTable:
    """Return what measurements say of a layer's shapes and masks."""
    weight: Any = spec.attention.query.weight
    sizes = layer_sizes(spec, state.plan.layers[index])
    return measured_table(sizes, device=weight.device, dtype=weight.dtype, executed=known.executed, left=known.left)


def _fuse(
    spec: BlockSpec, state: Attachment, index: int, table: OperatorTable, keys: VisibleKeys
) -> tuple[FusedAttention | None, FusedFeedForward | None]:
    layer = state.plan.layers[index]
    attention, ffn = None, None
    if isinstance(layer.attention, Routed):
        attention = FusedAttention(spec.attention, routed_gate(spec.attention.module)[0], table, keys)
    if isinstance(layer.ffn, Routed) and spec.ffn is not None:
        ffn = FusedFeedForward(spec.ffn, routed_gate(spec.ffn.module)[0], _activation(index, spec.ffn), table)
        _require_standard(index, ffn, spec.hidden_size)
    return attention, ffn


def _activation(index: int, spec: FeedForwardSpec) -> str:
    name = type(spec.activation).__name__
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"layer {index}: the activation {name} has no fused kernel; those that have: {sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _require_standard(index: int, ffn: FusedFeedForward, hidden_size: int) -> None:
    """Compare the module's own forward with the standard formula on a few random rows, everything executing."""
    down: Any = ffn.spec.down
    probe = torch.randn(1, _PROBE_ROWS, hidden_size, generator=torch.Generator().manual_seed(0))
    probe = probe.to(device=down.weight.device, dtype=down.weight.dtype)
    groups = routed_gate(ffn.spec.module)[1].num_groups
    with torch.no_grad():
        wanted = ffn.original(probe)
        ffn.gate.mask.value = torch.ones(1, _PROBE_ROWS, groups, dtype=torch.bool, device=probe.device)
        always_dense = FusedFeedForward(ffn.spec, ffn.gate, ffn.activation, DENSE_TABLE)
        found = always_dense(probe)
    error = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-12)
    if not error < 2e-2:
        raise UnsupportedModelError(
            f"layer {index}: {type(ffn.spec.module).__name__} does not compute down(act(gate(x)) * up(x)); its output "
            f"differs by {float(error):.1%}, so it cannot run fused"
        )
