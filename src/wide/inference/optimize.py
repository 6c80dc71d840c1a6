"""Turn a routed model into one that runs wide's operators, and back."""

import warnings
from collections.abc import Sequence
from numbers import Real
from statistics import mean
from typing import Any, TypeVar

from torch import Tensor, nn

from wide.data.progress import steps
from wide.errors import ConfigError, NotAttachedError
from wide.inference.choice.layer_sizes import layer_sizes, require_kernels, tune_command
from wide.inference.choice.measured import is_measured, measured_table, obstacle
from wide.inference.choice.sample import LayerSample, sample_layers
from wide.inference.choice.tuning.tune import tune_layers, tuned_layers
from wide.inference.engine.batching import PagedBatching
from wide.inference.engine.engine import Engine
from wide.inference.operators.table import OPERATORS, OperatorTable
from wide.inference.reading.model import require_routing_alone
from wide.inference.reading.quantising import WEIGHTS
from wide.inference.reading.weights import require_plain
from wide.kernels.device import device_facts
from wide.models.attach import Attachment, attachment
from wide.models.block_spec import BlockSpec
from wide.models.pretrained import peft_adapters

ModelT = TypeVar("ModelT", bound=nn.Module)
_TUNING_SECONDS = 90.0
_BACKENDS = ("auto", "triton", "torch")


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

    Prompts and steps then skip what routers skip, and the outputs are those of the masked model: `generate`, caches,
    `generate_batch` and evaluation keep working. Separate projections that read one input move into one buffer that
    they view; `deoptimize` gives each its own memory again. Training needs the masked form: call `deoptimize` first.

    The engine takes causal masks with left padding and sliding windows, greedy search and sampling. Whatever else is
    wanted of the model (beam search, assisted decoding, attention weights, hooks on modules, a cache of the caller's
    own, masks with holes, packed sequences, replayed routing) runs masked, with one warning that names the reason; it
    skips nothing. So do, without a warning, a model compiled by torch.compile and calls of inner modules such as
    `model.model(...)`. `capture_routing` gives masks without margins. A mask that is given to a step of decoding and
    hides keys which it showed before gives NaN. Router weights that are written through `.data` while the model is
    optimised are not seen.

    Threads may call one optimised model; they take turns.

    Args:
        model: An attached model in evaluation mode, LoRA merged, with plain linear layers.
        backend: 'auto' follows measurements of this kind of device, by shape and expected rates, with dense products
            as candidates (`wide tune` measures a model's own shapes); 'triton' skips from fixed numbers of tokens on;
            'torch' is the reference, for any device.
        weights: 'model' takes the linear layers of attention and FFN as they are. 'int8' makes copies with a scale for
            each output channel, from bfloat16 or float16 (on a CPU also float32), and the masked model computes with
            them, too; the layers' own weights move to host memory, and `deoptimize` moves them back, bit for bit. Of
            these, too, what is written through `.data` is not seen. Whatever saves the model saves its own weights.
            With 'w8a8' products of more than 256 rows, as in prompts, but for queries, keys and values, read these in
            int8, too, with a scale for each row: faster than bfloat16, at a loss of about 2 % of perplexity.
        table: Which operator runs at which sizes, instead of what `backend` stands for.
        executed: Expected shares of (token, group) pairs that execute, in attention and FFN, for 'auto'.
        sample: Token ids without padding, int32 or int64 [B, T], of text like that to come and as long as its prompts,
            at the threshold to come. One masked forward then tells 'auto' what each layer executes, instead of
            `executed`; from 2048 tokens on also whether down should skip in prompts (sm_90, half precision, up to 128
            groups of a multiple of 64 channels).
        tune: Whether a GPU or shape without measurements is measured now, for at most 90 seconds, with 'auto': once a
            machine, kept in the cache folder. Otherwise dense products run there, with a warning.

    Raises:
        ConfigError: If the backend or the format of weights is unknown, `executed` is not two shares, or a sample is
            given that nothing would follow.
        ShapeError: If the sample is not of token ids.
        NotAttachedError: If the model has no routers, is optimised already, is in training mode, or has unmerged LoRA.
        UnsupportedModelError: If the engine does not know a part of the model or of its plan: a mixture of experts, an
            activation without a kernel, a quantised, sharded or offloaded layer, another router than a bottleneck.
        UnsupportedBackendError: If the kernels cannot run on the layers' device, in their dtype, or with their groups.
    """
    state = attachment(model)
    require_routing_alone(state.plan, is_replaced=state.replaced is not None)
    if backend not in _BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; choose one of {list(_BACKENDS)}")
    if weights not in WEIGHTS:
        raise ConfigError(f"unknown weights {weights!r}; choose one of {list(WEIGHTS)}")
    shares = executed if isinstance(executed, Sequence) else ()
    if len(shares) != 2 or not all(isinstance(share, Real) and 0 < share <= 1 for share in shares):
        raise ConfigError(f"executed must be two shares in (0, 1] like (0.34, 0.7), got {executed!r}")
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
    for spec in state.specs:
        require_plain(spec)
    known = [LayerSample(executed, None)] * len(state.specs)
    layers = list(zip(state.specs, state.plan.layers, strict=True))
    if table is not None:
        for layer in layers:
            require_kernels(*layer, table, weights)
    else:
        if sample is not None:
            known = sample_layers(model, sample)
            executed = tuple(mean(shares) for shares in zip(*(layer.executed for layer in known), strict=True))  # type: ignore[assignment]
        _require_measurements(model, state, executed, weights, tune=tune)
    tables = [table or _measured(spec, state, index, known[index], weights) for index, spec in enumerate(state.specs)]
    if weights == "w8a8":
        tables = [each.for_int8_rows() for each in tables]
    if table is None and _weight(state).is_cuda and obstacle(_weight(state).device, _weight(state).dtype) is None:
        _warn_if_nothing_pays(tables)
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


def _weight(state: Attachment) -> Tensor:
    weight: Any = state.specs[0].attention.query.weight
    return weight  # type: ignore[no-any-return]


def _require_measurements(
    model: nn.Module, state: Attachment, executed: tuple[float, float], weights: str, *, tune: bool
) -> None:
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
    if is_measured(device, [layer_sizes(*layer, weights) for layer in layers], executed=executed):
        return
    if not tune:
        command = tune_command(model, layers, executed, weights)
        warnings.warn(
            f"{start} than without pruning: its shapes have not been measured there. Leave out tune=False, run "
            f"`{command}`, or choose backend='triton'",
            stacklevel=3,
        )
        return
    with steps(f"measuring which operators pay on {device_facts(device).name}, once") as told:
        tune_layers(
            tuned_layers(state.specs, state.plan, weights),
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


def _measured(spec: BlockSpec, state: Attachment, index: int, known: LayerSample, weights: str) -> OperatorTable:
    """Return what measurements say of a layer's shapes and masks."""
    weight: Any = spec.attention.query.weight
    sizes = layer_sizes(spec, state.plan.layers[index], weights)
    return measured_table(sizes, device=weight.device, dtype=weight.dtype, executed=known.executed, left=known.left)
