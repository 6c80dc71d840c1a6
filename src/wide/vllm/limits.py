"""What a checkpoint asks of vLLM, read from its configuration; what vLLM's modules cannot do is refused at start."""

import logging
import math
from dataclasses import dataclass
from typing import Any

from wide.errors import ConfigError, UnsupportedModelError
from wide.grouping import divisors
from wide.inference.reading.quantising import WEIGHTS
from wide.kernels.device import HALF
from wide.materialisation.shape import LayerShape, ModelShape
from wide.models.adapter import check_config
from wide.models.pretrained import PRUNED_PREFIX
from wide.models.thresholds import threshold_of
from wide.plan import Dense, Plan, Routed
from wide.schema import typed

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Model types whose dense class in vLLM takes wide's modules, with the first word of that class; others are masked."""
SPARSITY, FORM = "wide_sparsity", "wide_weights"
"""Entries of the configuration that --hf-overrides sets: the sparsity at start, and one of `WEIGHTS`."""
PROMPT_SIZES = tuple(step << shift for shift in range(1, 11) for step in (5, 6, 7, 8))[:-2]
"""Tokens of steps with prompts that vLLM records as CUDA graphs, four for each power of two. In longer steps kernels
take longer than their launches."""

_LOGGER = logging.getLogger("vllm.wide")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """What a checkpoint's configuration says of its routers: thresholds in force by (layer, half), of routed ones.

    `executed` is the expected share of pairs, by which tables of measurements are read.
    """

    plan: Plan
    thresholds: dict[tuple[int, str], float]
    executed: float
    weights: str


def read_pruning(config: Any) -> Pruning:
    """Return what the configuration of a checkpoint says of its routers.

    Args:
        config: Of Hugging Face, with the field `wide` and, where it was set at start, `wide_sparsity`.

    Raises:
        AdapterError: If the field is missing or malformed.
        ConfigError: If the checkpoint has no calibrated threshold for the sparsity.
        UnsupportedModelError: If the plan holds more than routers of the paper's form.
    """
    facts = check_config(config.wide, "config.json: wide")
    routed = []
    for index, name, half in facts["plan"].halves():
        if isinstance(half, Routed):
            routed.append((index, name))
        wrong = _obstacle(half)
        if wrong is not None:
            raise UnsupportedModelError(
                f"layer {index}: the {name} {wrong}, which wide's modules for vLLM do not compute; use `wide serve`, "
                "or `wide export` for a static plan"
            )
    if facts["plan"].stream is not None:
        raise UnsupportedModelError("the residual stream is projected, which vLLM cannot; use `wide export`")
    values = [float(threshold) for threshold in facts["thresholds"]]
    sparsity = getattr(config, SPARSITY, None)
    if sparsity is not None:
        values = [threshold_of([(share, float(at)) for share, at in facts["dial"]], sparsity)] * len(routed)
    thresholds = dict(zip(routed, values, strict=True))
    executed = 1.0 - sparsity if sparsity else 0.5
    return Pruning(plan=facts["plan"], thresholds=thresholds, executed=executed, weights=read_weights(config))


def read_weights(config: Any) -> str:
    """Return the format in which weights are kept; raises ConfigError if it is none of `WEIGHTS`."""
    form = getattr(config, FORM, "model")
    if form not in WEIGHTS:
        raise ConfigError(f"unknown {FORM} {form!r}; choose one of {list(WEIGHTS)}")
    return str(form)


def _obstacle(half: object) -> str | None:
    """Return what of a half of a layer is neither dense nor a router that the modules compute, or None."""
    if isinstance(half, Dense):
        return None
    if not isinstance(half, Routed):
        return f"is {type(half).__name__.lower()}"
    if half.form != "bottleneck" or half.router_input != "normed":
        return f"has a router of form {half.form!r} that reads the input {half.router_input!r}"
    if half.evicts or half.first_tokens:
        return "evicts keys or protects first tokens"
    return None


class Limits:
    """What vLLM calls with its configuration before a checkpoint of wide is loaded."""

    doubt = ""
    """What speaks against this version of vLLM, if anything."""

    @staticmethod
    def verify_and_update_model_config(_model_config: Any) -> None:
        """Leave the configuration of the model alone."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what wide's modules do not do.

        Raises ConfigError if an option of vLLM does not go with them, or groups do not divide among the ranks;
        UnsupportedModelError if the checkpoint is of another kind, or as `read_pruning`.
        """
        config = vllm_config.model_config.hf_config
        if not config.model_type.startswith(PRUNED_PREFIX):
            return
        if Limits.doubt:
            _LOGGER.warning("this checkpoint may be served wrongly: %s", Limits.doubt)
        family = config.model_type.removeprefix(PRUNED_PREFIX)
        is_static = hasattr(config, "wide_shape")
        if vllm_config.model_config.is_moe:
            raise UnsupportedModelError(
                f"vLLM serves wide's checkpoints of dense families, and this one, of the type {config.model_type!r}, "
                "is a mixture of experts; use `wide serve`"
            )
        if family not in FAMILIES and not is_static:
            # What masks the backend's modules lies outside of what vLLM compiles.
            vllm_config.model_config.enforce_eager = True
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        unsupported = {
            "--quantization": vllm_config.model_config.quantization is not None,
            "--kv-cache-dtype": cache.cache_dtype not in ("auto", "bfloat16", "float16"),
            "--speculative-config": vllm_config.speculative_config is not None,
            "--enable-lora": vllm_config.lora_config is not None,
            "--enable-dbo": parallel.enable_dbo,
            "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
            "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
            "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        }
        wrong = [name for name, is_set in unsupported.items() if is_set]
        if wrong:
            raise ConfigError(
                f"a checkpoint of wide is served without {' and '.join(wrong)}; leave that out (weights in eight bits: "
                f"""--hf-overrides '{{"{FORM}": "int8"}}')"""
            )
        on_cpu = vllm_config.device_config.device_type == "cpu"
        if read_weights(config) != "model" and not on_cpu and vllm_config.model_config.dtype not in HALF:
            raise ConfigError(
                f"{FORM} {read_weights(config)!r} needs bfloat16 or float16 on a GPU, got "
                f"{vllm_config.model_config.dtype}; name --dtype bfloat16"
            )
        if is_static:
            check_shape(config, parallel.tensor_parallel_size)
            return
        pruning = read_pruning(config)
        check_ranks(pruning.plan, parallel.tensor_parallel_size)
        if family in FAMILIES and not on_cpu and max(pruning.thresholds.values(), default=-math.inf) > -math.inf:
            record_prompts(vllm_config)


def record_prompts(vllm_config: Any) -> None:
    """Have vLLM record graphs of steps with prompts, too, unless the user named sizes or turned graphs off.

    A layer with routers has many kernels, which the host launches more slowly than they run in short prompts. Rows of
    padding execute nothing under routers.
    """
    known, most = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_batched_tokens
    if known.cudagraph_capture_sizes is not None or known.max_cudagraph_capture_size is not None:
        return
    vllm_config._set_cudagraph_sizes()
    last = known.max_cudagraph_capture_size
    if last:
        sizes = {size for size in (*PROMPT_SIZES, most) if last < size <= min(most, PROMPT_SIZES[-1])}
        known.cudagraph_capture_sizes = [*known.cudagraph_capture_sizes, *sorted(sizes)]
        known.max_cudagraph_capture_size = known.cudagraph_capture_sizes[-1]


def check_ranks(plan: Plan, ranks: int) -> None:
    """Refuse a number of ranks that does not divide the groups of every half (ConfigError)."""
    for index, name, half in plan.halves():
        if isinstance(half, Routed):
            _require_divides(ranks, half.grouping.num_groups, f"groups of the {name} of layer {index}")


def _require_divides(ranks: int, size: int, what: str) -> None:
    if size % ranks:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} does not divide the {size} {what}; sizes that do: {divisors(size)[:12]}"
        )


def read_shape(config: Any) -> ModelShape:
    """Return what is left of a static checkpoint's layers.

    Raises UnsupportedModelError if the stream was cut, no attention is left, or heads have different sizes.
    """
    shape = typed(ModelShape, config.wide_shape, "config.json: wide_shape")
    if shape.stream is not None:
        raise UnsupportedModelError(
            "the residual stream of this checkpoint was cut, which vLLM cannot; use `wide generate`"
        )
    if not any(layer.query_heads for layer in shape.layers):
        raise UnsupportedModelError("no attention is left in any layer, and vLLM needs one; use `wide generate`")
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModelError(
            f"layers of {config.model_type} have heads of different sizes, which vLLM would take for equal; use "
            "`wide generate`"
        )
    return shape


def check_shape(config: Any, ranks: int) -> None:
    """Refuse what `read_shape` refuses, or ranks that do not divide KV heads or a layer's channels (ConfigError)."""
    # vLLM 0.32 repeats KV heads where there are fewer than ranks, 0.26 stops at their shape.
    _require_divides(ranks, config.num_key_value_heads, "KV heads")
    for index, layer in enumerate(read_shape(config).layers):
        if isinstance(layer.channels, int) and padded_channels(layer, ranks) > config.intermediate_size:
            _require_divides(ranks, layer.channels, f"channels of layer {index}")


def padded_channels(layer: LayerShape, ranks: int) -> Any:
    """Return the channels of a layer, where they are numbered with those of zeros that make ranks equal."""
    return layer.channels if not isinstance(layer.channels, int) else -(-layer.channels // ranks) * ranks
