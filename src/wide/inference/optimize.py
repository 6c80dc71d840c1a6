"""Turn an attached model into one that runs wide's operators, and back."""

import warnings
from collections.abc import Sequence
from numbers import Real
from statistics import mean
from typing import Any, TypeVar

from torch import Tensor, nn

from wide.data.progress import steps
from wide.errors import ConfigError, NotAttachedError, UnsupportedBackendError, UnsupportedModelError
from wide.inference.choice.layer_sizes import misfit
from wide.inference.choice.measured import is_measured, measured_table, obstacle
from wide.inference.choice.sample import LayerSample, sample_layers
from wide.inference.choice.tuning.tune import TunedLayer, tune_layers, tuned_layers
from wide.inference.engine.batching import PagedBatching
from wide.inference.engine.engine import Engine
from wide.inference.operators.table import OPERATORS, OperatorTable
from wide.inference.reading.model import require_readable
from wide.inference.reading.quantising import WEIGHTS
from wide.inference.reading.weights import require_plain
from wide.kernels.device import device_facts, half_obstacle
from wide.materialisation.checkpoint import SlicedMixin
from wide.models.attach import attachment
from wide.models.block_spec import BlockSpec
from wide.models.pretrained import peft_adapters
from wide.plan import Plan, Routed

ModelT = TypeVar("ModelT", bound=nn.Module)
_TUNING_SECONDS = 90.0
_BACKENDS = ("auto", "triton", "torch")
# Numbers of tokens whose kernels are compared with a layer's sizes.
_SOME_ROWS = tuple(1 << power for power in range(3, 21))


def optimize(
    model: ModelT,
    *,
    backend: str = "auto",
    weights: str = "model",
    table: OperatorTable | None = None,
    executed: tuple[float, float] = (0.5, 0.5),
    sample: Tensor | None = None,
    tune: bool = True,
) -> ModelT:
    """Let an attached model run through wide's engine, in place, and return the same object.

    Prompts and steps then skip what routers skip, or run on what a static plan leaves of the matrices: copies, in which
    channels of zeros make sizes that kernels take. The outputs are those of the masked model: `generate`, caches,
    `generate_batch` and evaluation keep working. Separate projections that read one input move into one buffer that
    they view; `deoptimize` gives each its own memory again. Training needs the masked form: call `deoptimize` first.

    The engine takes causal masks with left padding and sliding windows, greedy search and sampling. Everything else
    (beam search, assisted decoding, attention weights, hooks on modules, a cache of the caller's own, masks with
    holes, packed sequences, replayed routing, a static plan that is bypassed) runs masked and skips nothing, with one
    warning that names the reason. A model compiled by torch.compile and calls of inner modules such as
    `model.model(...)` run masked without a warning. `capture_routing` gives masks without margins. If the mask of a
    decoding step hides keys that an earlier step showed, the result is NaN. Do not write weights of routers, int8
    layers or static plans through `.data` while the model is optimised: the engine does not notice.

    Threads may call one optimised model; they take turns.

    Args:
        model: An attached model in evaluation mode, LoRA merged, with plain linear layers.
        backend: 'auto' follows measurements of this kind of device, by shape and expected rates, with dense products
            as candidates (`wide tune` measures a model's own shapes); 'triton' skips from fixed numbers of tokens on;
            'torch' is the reference, for any device.
        weights: 'model' takes the linear layers of attention and FFN as they are. 'int8' makes copies of these and of
            the head with a scale for each output channel, from bfloat16 or float16 (on a CPU also float32), and the
            masked model computes with them, too; the layers' own weights move to host memory, and `deoptimize` moves
            them back, bit for bit. A model that is saved has its own weights. With 'w8a8' products of more than 16
            rows, as in prompts, also have int8 rows with a scale for each, except those of queries, keys and values.
            Rotations of blocks of channels in the FFN keep the loss small.
        table: Which operator runs at which sizes, instead of what `backend` stands for.
        executed: Expected shares of (token, group) pairs that execute, in attention and FFN, for 'auto'.
        sample: Token ids without padding, int32 or int64 [B, T], of typical prompts, as long as they are. Set the
            threshold first. One masked forward then tells 'auto' what each layer executes, instead of `executed`;
            from 2048 tokens on also whether down should skip in prompts (sm_90, half precision, up to 128 groups of a
            multiple of 64 channels).
        tune: Whether 'auto' measures a GPU or shape without measurements now, for at most 90 seconds; the result is
            kept in the cache folder. Otherwise dense products run there, with a warning.

    Raises:
        ConfigError: If the backend or the format of weights is unknown, `executed` is not two shares, or a sample is
            given that nothing would follow.
        ShapeError: If the sample is not of token ids.
        NotAttachedError: If the model has no plan, is optimised already, is in training mode, or has unmerged LoRA.
        UnsupportedModelError: If the engine does not know a part of the model or of its plan: a mixture of experts, an
            activation without a kernel, a quantised, sharded or offloaded layer, another router than a bottleneck,
            routers beside a static plan, a static plan in int8.
        UnsupportedBackendError: If the kernels cannot run on the layers' device, in their dtype, or with their groups.
    """
    if isinstance(model, SlicedMixin):
        raise UnsupportedModelError(
            "this checkpoint is cut already, and the engine cuts whole layers itself; load the base with its adapter, "
            "wide.load(base, adapter), and optimise that"
        )
    state = attachment(model)
    if backend not in _BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; choose one of {list(_BACKENDS)}")
    if weights not in WEIGHTS:
        why = ": int8 loses less than FP8, at the same speed" if weights == "fp8" else ""
        raise ConfigError(f"unknown weights {weights!r}; choose one of {list(WEIGHTS)}{why}")
    shares = executed if isinstance(executed, Sequence) else ()
    if len(shares) != 2 or not all(isinstance(share, Real) and 0 < share <= 1 for share in shares):
        raise ConfigError(f"executed must be two shares in (0, 1] like (0.34, 0.7), got {executed!r}")
    require_readable(state.plan, is_replaced=state.replaced is not None, weights=weights)
    if state.engine is not None:
        raise NotAttachedError("this model is optimised already; call wide.deoptimize(model) first")
    if model.training:
        raise NotAttachedError("the engine is for inference; call model.eval() first")
    if peft_adapters(model):
        raise NotAttachedError("merge LoRA first: wide.merge_lora(model), or of PEFT's own model.merge_and_unload()")
    if table is None and backend != "auto":
        table = OperatorTable.fixed(backend)
    if sample is not None and (table is not None or backend != "auto"):
        raise ConfigError(
            f"a sample tells backend='auto' which operators to take, got backend={backend!r} and table={table}; "
            "leave it out, or the backend and the table"
        )
    if sample is not None and not state.plan.is_routed:
        raise ConfigError("a sample tells what routers execute, and this plan has none; leave it out")
    for spec in state.specs:
        require_plain(spec)
    layers = tuned_layers(state.specs, state.plan, weights)
    like = _weight(state.specs)
    device, dtype = like.device, like.dtype
    if table is not None:
        _require_kernels(layers, table, like)
        tables = [table] * len(layers)
    else:
        known = [LayerSample(executed, None)] * len(layers)
        if sample is not None:
            known = sample_layers(model, sample)
            executed = tuple(mean(shares) for shares in zip(*(layer.executed for layer in known), strict=True))  # type: ignore[assignment]
        name = getattr(model.config, "_name_or_path", "")
        command = None if tune else _tune_command(name, state.plan, executed, weights)
        _require_measurements(layers, executed, like, command)
        tables = [
            measured_table(each.sizes, device=device, dtype=dtype, executed=one.executed, left=one.left)
            for each, one in zip(layers, known, strict=True)
        ]
    if weights == "w8a8":
        tables = [each.for_int8_rows() for each in tables]
    if table is None and state.plan.is_routed and device.type == "cuda" and obstacle(device, dtype) is None:
        some = (1, 2, 8, 64, 512, 2048, 4096, 16384)
        if all(each.how(name, rows) == "dense" for each in tables for name in OPERATORS for rows in some):
            warnings.warn(
                "wide: at this model's shapes no operator that skips is faster than the dense one here, so all run "
                "dense and the routers come on top: detach them, or take a larger model or sparsity",
                stacklevel=2,
            )
    state.engine = engine = Engine(model, state, tables, weights)
    if hasattr(model, "init_continuous_batching"):
        engine.batching = PagedBatching(model, engine.made_of)
    return model


def deoptimize(model: ModelT) -> ModelT:
    """Go back to dense layers followed by masks, in place, and return the same object.

    Raises:
        NotAttachedError: If the model has no routers or is not optimised, or `generate_batch` runs.
        torch.OutOfMemoryError: If weights that lie in host memory do not fit; the model then stays optimised.
    """
    state = attachment(model)
    if state.engine is None:
        raise NotAttachedError("this model is not optimised")
    state.engine.remove()
    state.engine = None
    return model


def _weight(specs: Sequence[BlockSpec]) -> Any:
    return specs[0].attention.query.weight


def _require_kernels(layers: Sequence[TunedLayer], table: OperatorTable, like: Tensor) -> None:
    """Raise UnsupportedBackendError for a table of Triton kernels that cannot run here; a forward would fail midway."""
    if table.backend != "triton":
        return
    reason = half_obstacle(like.device, like.dtype)
    if reason is not None:
        raise UnsupportedBackendError(
            f"backend 'triton' cannot run on {like.device}: {reason}; convert the model, or choose backend='torch' or "
            "'auto'"
        )
    for index, layer in enumerate(layers):
        for name in layer.products():
            chosen = {table.choice(name, rows) for rows in _SOME_ROWS}
            reasons = [misfit(name, layer.sizes, choice) for choice in chosen if choice.backend != "dense"]
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is not None:
                raise UnsupportedBackendError(
                    f"layer {index}: {name}: {reason}; choose backend='torch' or 'auto', or other group sizes"
                )


def _require_measurements(
    layers: Sequence[TunedLayer], executed: tuple[float, float], like: Tensor, command: str | None
) -> None:
    """Measure shapes that nothing is known of; where a `command` is given that does it, say what runs without."""
    device = like.device
    if not any(layer.attention or layer.ffn for layer in layers):
        return
    if device.type != "cuda":
        warnings.warn(
            f"wide: operators that skip need a GPU, not {device.type}: reference operators run, which are right, and "
            "slower than masks. Leave the model as it is, or choose backend='torch' for tests",
            stacklevel=3,
        )
        return
    start = f"wide: on {device_facts(device).name} dense products run, and routers come on top, so the model is slower"
    reason = obstacle(device, like.dtype)
    if reason is not None:
        warnings.warn(f"{start} than without pruning: {reason}. Convert the model, or take another", stacklevel=3)
        return
    if is_measured(device, [layer.sizes for layer in layers], executed=executed):
        return
    if command is not None:
        warnings.warn(
            f"{start} than without pruning: its shapes have not been measured there. Leave out tune=False, run "
            f"`{command}`, or choose backend='triton'",
            stacklevel=3,
        )
        return
    with steps(f"measuring which operators pay on {device_facts(device).name}, once") as told:
        tune_layers(
            layers,
            device=device,
            executed=executed,
            quick=True,
            seconds=_TUNING_SECONDS,
            progress=lambda at: told(at.done, at.total),
        )


def _tune_command(name: str, plan: Plan, executed: tuple[float, float], weights: str) -> str:
    """Return the command line that measures a model's own shapes on this machine."""
    shares = ",".join(f"{max(share, 0.01):.2g}" for share in executed)
    executing = f"--executed {shares}" + ("" if weights == "model" else f" --weights {weights}")
    command = f"wide tune --model {name or 'MODEL'}"
    flags: list[str] = []
    for half in ("attention", "ffn"):
        found = {getattr(layer, half) for layer in plan.layers}
        sizes = {each.grouping.group_size for each in found if isinstance(each, Routed)}
        if len(sizes) != 1 or not all(isinstance(each, Routed) for each in found):
            # Flags cannot say it, the plan in an adapter can.
            return f"{command} --adapter ADAPTER {executing}"
        flags.append(f"--{half}_group_size {sizes.pop()}")
    return f"{command} {' '.join(flags)} {executing}"
