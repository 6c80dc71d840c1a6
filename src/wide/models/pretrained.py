"""Base models: loaded by name or folder, without remote code, and recognised by a sample of their weights."""

import inspect
import math
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from wide.data.local_names import as_transformers_takes, is_gguf, missing_folder
from wide.errors import ConfigError, UnsupportedModelError, is_out_of_memory
from wide.models.block_spec import BlockSpec
from wide.models.files import check_sums
from wide.models.having import having
from wide.models.sharding import reshard, whole
from wide.schema import Between, typed

PRUNED_PREFIX = "wide_"
"""The model types of full pruned checkpoints begin with it."""
LOADING = threading.RLock()
"""Held while transformers builds a model, which changes defaults of the whole process for the time."""
_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPORTING = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Options of `from_pretrained`: what does not fit is said, where transformers would fill it with random numbers."""
_HUB_OPTIONS = ("revision", "token", "subfolder", "cache_dir", "local_files_only")
_NUM_TENSORS = 32
# Some have -1 for none.
_Token = Annotated[int, Between(-1, 2**31)]
# Over which `generate` stumbles where they are something else.
_GENERATION: dict[str, Any] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _Token | list[_Token] | None),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), list[_Token] | None),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "use_cache"), bool | None),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias"), list[Any] | None),
}
_VALUES_PER_TENSOR = 8
_NEEDED_AGREEMENT = 0.95
# What wide and LoRA put into a model.
_ADDED = re.compile(r"\b(wide_(router|gate|stream)\b|lora_)")


def load_pretrained(
    name: str, *, dtype: str | torch.dtype = "auto", device: str | None = None, sharded: bool = False, **options: Any
) -> Any:
    """Return a Hugging Face causal LM in evaluation mode.

    Weights of GGUF files, and of FP8 and compressed-tensors where transformers can, are dequantised.

    Args:
        name: Hub name, local folder or GGUF file; of a folder only safetensors are read, and no remote code is run.
        dtype: 'auto' (as stored), 'float32', 'bfloat16', 'float16', or a torch dtype.
        device: 'cpu', 'cuda', 'cuda:1', ...; None means CUDA where there is a GPU, else the CPU.
        sharded: Whether the processes of the group that torch.distributed has joined share the weights (FSDP2), each
            reading no more than its part.
        options: Whatever else transformers' `from_pretrained` takes, such as `device_map` (instead of `device`),
            `attn_implementation`, `revision`, `token` or `quantization_config`.

    Raises:
        ConfigError: If the dtype or device is unknown or absent, the name cannot be loaded, an option does not fit, or
            a weight is missing, unexpected or of another shape than the configuration says.
        UnsupportedModelError: If it is not a causal LM.
        AdapterError: If it is an export whose weights are not those that were written, or an index is damaged.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, modeling_utils
    from transformers.utils import cached_file

    if options.get("device_map") is not None and device is not None:
        raise ConfigError(f"device={device!r} and device_map= both say where the model goes; give one of them")
    if options.get("trust_remote_code") or options.get("use_safetensors") is False:
        raise ConfigError("remote code is not run and pickled weights are not read; leave these options out")
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {sorted(_DTYPES)}")
    if is_gguf(name) and (sharded or options.get("quantization_config") is not None):
        raise ConfigError(
            f"{name} is a GGUF file, which is read whole and dequantised on every process; leave the sharing "
            "(--parallel replicate) or quantization_config out, or save it as a folder first"
        )
    where = choose_device(device)
    hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
    config = _configuration(name, hub)
    stored: Any = getattr(config, "quantization_config", None)
    is_own = stored is not None and not sharded and options.get("quantization_config") is None
    dequantises = is_own and dequantising(name, stored)
    if dequantises:
        config.quantization_config, options["config"] = {**stored, **dequantises}, config
    if options.get("quantization_config") is not None or (stored is not None and not sharded):
        # Not all quantised weights can be moved afterwards, and some kinds stay on the host unless told where.
        options.setdefault("device_map", {"": str(where)})
    if sharded:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(fsdp_size=dist.get_world_size())
    check_sums(Path(name))
    place, more = as_transformers_takes(name)
    if more and hasattr(transformers, "GgufConfig"):
        # Otherwise later versions keep the blocks where they find kernels for them.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    options |= more | {"dtype": _DTYPES[dtype] if isinstance(dtype, str) else dtype, "use_safetensors": True}
    try:
        # What is mapped counts as memory of the process until the file is closed; what is read, until it is converted.
        read: Any = lambda *given, **how: safe_open(*given, **how | {"backend": "pread"})  # noqa: E731
        with LOADING, having(modeling_utils, safe_open=read) if sharded else nullcontext():
            model, info = AutoModelForCausalLM.from_pretrained(place, **options | REPORTING)
    except ValueError as error:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(f"{name} cannot be loaded with these options: {error}") from error
        raise UnsupportedModelError(_not_causal(name, config)) from error
    # What is damaged raises whatever transformers stumbles over.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(_not_loadable(name, error, stored)) from error
    wrong = misloaded(info)
    if wrong is not None:
        raise ConfigError(
            f"the weights of {name} do not fit its configuration: {wrong}. Copy it again, or correct its config.json; "
            "if you mean it so, load the model with transformers and give wide the model"
        )
    if more:
        # The folder says nothing about which of its files this was.
        model.config._name_or_path = model.name_or_path = name
        model.hf_quantizer, model.is_quantized = None, False
    if dequantises:
        model.wide_dequantised = True
        _note_scales(model, Path(cached_file(name, "config.json", **hub)).parent)
    for key, kind in _GENERATION.items():
        typed(kind, getattr(model.generation_config, key, None), f"{name}: {key} of the configuration")
    forbid_packing(model)
    return (model if sharded or options.get("device_map") is not None else model.to(where)).eval()


def dequantising(name: str, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what has transformers dequantise a checkpoint as it says it is quantised; None if weights stay so.

    Raises ConfigError if transformers does not know the method.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    method = str(stored.get("quant_method"))
    if method not in KNOWN and f"{method}_8bit" not in KNOWN:
        raise ConfigError(
            f"{name} is quantised by {method!r}, which transformers does not know; take the checkpoint before its "
            "quantisation, or one in FP8 or int8 of compressed-tensors"
        )
    names = inspect.signature(KNOWN[method]).parameters if method in KNOWN else ()
    if "dequantize" in names:
        return {"dequantize": True}
    return {"run_compressed": False} if "run_compressed" in names else None


def _note_scales(model: nn.Module, folder: Path) -> None:
    """Note the scales of the weights in the checkpoint: of int8 by channel `wide.optimize` then takes the bytes."""
    modules = dict(model.named_modules())
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118
                linear = modules.get(key.removesuffix(".weight_scale"))
                if isinstance(linear, nn.Linear):
                    vars(linear)["weight_scale"] = stored.get_tensor(key).flatten()


def misloaded(info: Mapping[str, Any]) -> str | None:
    """Return in words which weights a model did not get from its files, or they have in surplus; None if all fit.

    `info` is what transformers' `from_pretrained` says of a load with the options `REPORTING`.
    """
    shapes = {f"{key} of shape {tuple(seen)}, wanted {tuple(wanted)}" for key, seen, wanted in info["mismatched_keys"]}
    kinds = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "mismatched": shapes}
    words = [
        f"{kind} {', '.join(sorted(keys)[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        for kind, keys in kinds.items()
        if keys
    ]
    return "; ".join(words) or None


def peft_adapters(model: nn.Module) -> list[str]:
    """Return the names of all adapters that PEFT has on a model, LoRA of stage 2 among them."""
    if "peft" not in sys.modules:
        return []
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = set(model.peft_config) if isinstance(model, PeftModel) else set()
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            found.update(*(getattr(layer, key, ()) for key in layer.adapter_layer_names))
    return sorted(found)


def forbid_packing(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for a CPU in evaluation: without a gradient, and with no way back.

    Raises UnsupportedModelError if a forward in evaluation mode has packed them already.
    """
    for name, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                raise UnsupportedModelError(
                    f"bitsandbytes has packed {name} for evaluation on this CPU, which has no gradient and cannot be "
                    "saved; load the model again, and attach before its first forward"
                )


def is_pruned_checkpoint(name: str) -> bool:
    """Return whether a name or folder is a full pruned checkpoint; False too where nothing can be read."""
    return str(stored_facts(name).get("model_type", "")).startswith(PRUNED_PREFIX)


def is_quantised_checkpoint(name: str) -> bool:
    """Return whether a name or folder holds quantised weights; False too where nothing can be read."""
    return stored_facts(name).get("quantization_config") is not None


def stored_facts(name: str) -> dict[str, Any]:
    """Return the stored configuration of a name or folder; empty where none can be read."""
    from transformers import PreTrainedConfig

    if is_gguf(name) or missing_folder(name) is not None:
        return {}
    try:
        return dict(PreTrainedConfig.get_config_dict(name)[0])
    except (OSError, ValueError):
        return {}


def load_skeleton(name: str) -> Any:
    """Return a causal LM of the right structure without weights (on the meta device), from its configuration alone.

    Raises ConfigError if the name cannot be loaded, and UnsupportedModelError if it is no causal LM or pruned already.
    """
    from transformers import AutoModelForCausalLM

    config = _configuration(name)
    try:
        with LOADING, torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UnsupportedModelError(_not_causal(name, config)) from error
    # What is damaged raises whatever transformers stumbles over.
    except Exception as error:
        raise ConfigError(_not_loadable(name, error)) from error


def _configuration(name: str, hub_options: dict[str, Any] | None = None) -> Any:
    from transformers import AutoConfig

    options = hub_options or {}
    wrong = missing_folder(name, cache=options.get("cache_dir"), subfolder=options.get("subfolder") or "")
    if wrong is not None:
        raise ConfigError(wrong)
    # Asked first: transformers would load it, routers included, as if it were a base.
    if is_pruned_checkpoint(name):
        raise UnsupportedModelError(
            f"{name} is a pruned checkpoint already, and its base is wanted here; wide eval, wide generate and "
            "wide.load_checkpoint take it as it is"
        )
    place, more = as_transformers_takes(name)
    try:
        return AutoConfig.from_pretrained(place, **options | more)
    except Exception as error:
        raise ConfigError(_not_loadable(name, error)) from error


def choose_device(device: str | None) -> torch.device:
    """Return a device by name; None and 'auto' mean CUDA where there is a GPU, else the CPU.

    Raises ConfigError if it is unknown, absent, or neither a CPU nor a GPU of CUDA.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = "use 'cpu', 'cuda' or 'cuda:0'"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown; {known}") from error
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f"models do not run on {device!r} here; {known}")
    if where.type == "cuda" and (where.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device {device!r} is absent: PyTorch sees {count} GPUs; use {'cuda:0' if count else 'cpu'}")
    return where


def device_name(model: nn.Module) -> str:
    """Return what a model runs on, for records: the GPU by its name, or 'cpu' and the number of its threads."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type}, {torch.get_num_threads()} threads"


def _not_causal(name: str, config: Any) -> str:
    # The error of transformers lists hundreds of classes.
    return f"{name} ({config.model_type}) is not a causal language model that transformers can build; choose one"


def _not_loadable(name: str, error: Exception, quantised: Mapping[str, Any] | None = None) -> str:
    kind = "GGUF file" if is_gguf(name) else "folder" if Path(name).exists() else "hub name or folder"
    reason = " ".join(str(error).strip().splitlines()[:2])
    text = f"no model can be loaded from the {kind} {name!r}: {reason or type(error).__name__}"
    if quantised is None:
        return text
    method = quantised.get("quant_method")
    return f"{text}. It is quantised by {method}: install what that needs, or take the checkpoint before quantisation"


class BaseFacts(TypedDict):
    """By what an adapter recognises its base model; the sample holds null where nothing is known."""

    model_type: str
    name_or_path: str
    revision: str | None
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int | None
    vocab_size: int | None
    weight_sample: list[float | None]


def fingerprint(model: nn.Module, specs: Sequence[BlockSpec]) -> BaseFacts:
    """Return JSON-ready facts by which an adapter recognises its base model.

    The weight sample is rounded to bfloat16, so that the same checkpoint loaded in another dtype agrees. What lies in
    the middle between two bfloat16, as one value in eight of float16 does, may be of either: it is left out (null).
    """
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    attention, values = specs[0].attention, sampled_values(model)
    if values is not None:
        values = values.masked_fill(values.view(torch.int32) & 0xFFFF == 0x8000, math.nan)
    rounded = [] if values is None else values.to(torch.bfloat16).float().tolist()
    return {
        "model_type": str(getattr(text_config, "model_type", type(model).__name__)).removeprefix(PRUNED_PREFIX),
        "name_or_path": str(getattr(config, "_name_or_path", "") or ""),
        "revision": getattr(config, "_commit_hash", None),
        "num_layers": len(specs),
        "hidden_size": specs[0].hidden_size,
        "num_query_heads": attention.num_query_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "ffn_width": None if specs[0].ffn is None else specs[0].ffn.width,
        "vocab_size": getattr(text_config, "vocab_size", None),
        "weight_sample": [None if math.isnan(value) else value for value in rounded],
    }


def differences(expected: BaseFacts, found: BaseFacts, *, agreement: float = _NEEDED_AGREEMENT) -> list[str]:
    """Return what distinguishes two fingerprints, in words; empty means the same base model.

    Names and revisions are not compared: a moved checkpoint is the same model. `agreement` is the share of sampled
    values that must be the same.
    """
    known = expected.keys() - {"name_or_path", "revision", "weight_sample"}
    wrong = [key for key in expected if key in known and found.get(key) != expected.get(key)]
    words = [f"{key} is {found.get(key)!r}, expected {expected.get(key)!r}" for key in wrong]
    if not words and not _same_sample(expected["weight_sample"], found["weight_sample"], agreement):
        words.append("the weights differ (another checkpoint of the same architecture)")
    return words


def _same_sample(expected: Any, found: Any, agreement: float) -> bool:
    if not expected or not found:
        # Weights that cannot be sampled (on the meta device) cannot be compared either.
        return True
    # Of earlier versions half of them may be there.
    if len(expected) not in (len(found), len(found) // 2):
        return False
    # What one of the two has quantised cannot be compared.
    known = [(a, b) for a, b in zip(expected, found, strict=False) if a is not None and b is not None]
    # As near as float16 has small ones.
    return sum(abs(a - b) <= 1e-7 for a, b in known) >= agreement * len(known)


def same_weights(seen: Tensor | None, now: Tensor | None) -> bool:
    """Return whether two of `sampled_values` agree, up to a change of dtype; what is not known agrees."""
    if seen is None or now is None:
        return True
    if seen.shape != now.shape:
        return False
    known = ~(seen.isnan() | now.isnan())
    seen, now = seen[known], now[known]
    return any(torch.equal(seen.to(dtype).float(), now) for dtype in (torch.float32, torch.bfloat16, torch.float16))


def is_added(name: str) -> bool:
    """Return whether a parameter of this name, in a model or a part of it, is what wide or LoRA put there."""
    return _ADDED.search(name) is not None


def sampled_values(model: nn.Module) -> Tensor | None:
    """Return a few values of some of the base's matrices, float32, NaN for those of one that is or was quantised.

    None means that weights lie on the meta device. Those that accelerate has offloaded are read from where they lie.
    """
    reshard(model)
    # Offloading makes two of one that is tied.
    twice = getattr(model, "all_tied_weights_keys", {})
    matrices = {
        name: p
        for name, p in model.named_parameters()
        if p.dim() == 2 and not is_added(name) and not (p.is_meta and name in twice)
    }
    linear = model.named_modules() if getattr(model, "wide_dequantised", False) else ()
    dequantised = {f"{name}.weight" for name, module in linear if isinstance(module, nn.Linear)}
    pieces = []
    step = max(1, len(matrices) // _NUM_TENSORS)
    # LoRA lies on some layers only where others are left out whole.
    kinds = {name: re.sub(r"\d+|\.base_layer", "", name) for name in matrices}
    chosen = list(matrices)[::step]
    # In step with the matrices of a layer, as at 32 layers, these are of few kinds; then as many are taken by kind.
    if {kind for name, kind in kinds.items() if re.search(r"\d", name)} - {kinds[name] for name in chosen}:
        chosen += sorted(matrices, key=kinds.__getitem__)[::step]
    for name in chosen:
        matrix = _stored(model, name) if matrices[name].is_meta else matrices[name]
        if matrix is None:
            return None
        try:
            flat = whole(matrix.detach()).reshape(-1)
        # Quantised tensors of torchao say that they are of floating point, and cannot be cut.
        except NotImplementedError:
            flat = None
        if flat is None or not flat.is_floating_point() or name in dequantised:
            pieces.append(torch.full((_VALUES_PER_TENSOR,), math.nan))
            continue
        pieces.append(flat[:: max(1, flat.numel() // _VALUES_PER_TENSOR)][:_VALUES_PER_TENSOR].float().cpu())
    return torch.cat(pieces) if pieces else None


def require_in_memory(model: nn.Module, doing: str, *, added_only: bool = False) -> None:
    """Raise UnsupportedModelError if weights (or routers, scales, bases alone) are offloaded that `doing` needs."""
    absent = not added_only or any(p.is_meta and is_added(name) for name, p in model.named_parameters())
    if absent and any(getattr(getattr(module, "_hf_hook", None), "offload", False) for module in model.modules()):
        raise UnsupportedModelError(
            f"{doing} needs the weights in memory, and accelerate offloads some of this model's; load it with a "
            "device_map that has neither 'disk' nor a GPU's overflow on the CPU"
        )


def computing_device(layer: nn.Module) -> torch.device:
    """Return the device on which a layer computes, also one that accelerate offloads."""
    device = next(layer.parameters()).device
    hooks = [getattr(module, "_hf_hook", None) for module in layer.modules()] if device.type == "meta" else []
    places = [place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None]
    return torch.device(places[0]) if places else device


def _stored(model: nn.Module, name: str) -> Tensor | None:
    place, _, key = name.rpartition(".")
    values = getattr(getattr(model.get_submodule(place), "_hf_hook", None), "weights_map", None)
    return None if values is None else values[key]
