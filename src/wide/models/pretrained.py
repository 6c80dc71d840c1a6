"""Base models: loaded by name or folder, without remote code, and recognised by a sample of their weights."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wide.data.local_names import missing_folder
from wide.errors import ConfigError, UnsupportedModelError
from wide.models.block_spec import BlockSpec

PRUNED_PREFIX = "wide_"
"""The model types of full pruned checkpoints begin with it."""
_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_OPTIONS = ("revision", "token", "subfolder", "cache_dir", "local_files_only")
_NUM_TENSORS = 32
_VALUES_PER_TENSOR = 8
_NEEDED_AGREEMENT = 0.95
# What wide and LoRA put into a model.
_ADDED = re.compile(r"wide_(router|gate|stream)\b|\.lora_")


def load_pretrained(name: str, *, dtype: str | torch.dtype = "auto", device: str | None = None, **options: Any) -> Any:
    """Return a Hugging Face causal LM in evaluation mode.

    Args:
        name: Hub name or local folder; only safetensors are read and no remote code is run.
        dtype: 'auto' (as stored), 'float32', 'bfloat16', 'float16', or a torch dtype.
        device: 'cpu', 'cuda', 'cuda:1', ...; None means CUDA where there is a GPU, else the CPU.
        options: Whatever else transformers' `from_pretrained` takes, such as `device_map` (instead of `device`),
            `attn_implementation`, `revision`, `token` or `quantization_config`.

    Raises:
        ConfigError: If the dtype or device is unknown or absent, the name cannot be loaded, or an option does not fit.
        UnsupportedModelError: If it is not a causal LM.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if options.get("device_map") is not None and device is not None:
        raise ConfigError(f"device={device!r} and device_map= both say where the model goes; give one of them")
    if options.get("trust_remote_code") or options.get("use_safetensors") is False:
        raise ConfigError("remote code is not run and pickled weights are not read; leave these options out")
    where = choose_device(device)
    if options.get("quantization_config") is not None:
        # Quantised weights cannot be moved afterwards.
        options.setdefault("device_map", {"": str(where)})
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {sorted(_DTYPES)}")
    config = _configuration(name, {key: options[key] for key in _HUB_OPTIONS if key in options})
    options |= {"dtype": _DTYPES[dtype] if isinstance(dtype, str) else dtype, "use_safetensors": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    except ValueError as error:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(f"{name} cannot be loaded with these options: {error}") from error
        raise UnsupportedModelError(_not_causal(name, config)) from error
    except OSError as error:
        raise ConfigError(_not_loadable(name, error)) from error
    assert isinstance(model, nn.Module)
    return (model if options.get("device_map") is not None else model.to(where)).eval()


def is_pruned_checkpoint(name: str) -> bool:
    """Return whether a name or folder is a full pruned checkpoint; False too where nothing can be read."""
    from transformers import PreTrainedConfig

    if missing_folder(name) is not None:
        return False
    try:
        facts, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return False
    return str(facts.get("model_type", "")).startswith(PRUNED_PREFIX)


def load_skeleton(name: str) -> Any:
    """Return a causal LM of the right structure without weights (on the meta device), from its configuration alone.

    Args:
        name: Hub name or local folder.

    Raises:
        ConfigError: If the name cannot be loaded.
        UnsupportedModelError: If it is not a causal LM, or is pruned already.
    """
    from transformers import AutoModelForCausalLM

    config = _configuration(name)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UnsupportedModelError(_not_causal(name, config)) from error


def _configuration(name: str, hub_options: dict[str, Any] | None = None) -> Any:
    from transformers import AutoConfig

    wrong = missing_folder(name, cache=(hub_options or {}).get("cache_dir"))
    if wrong is not None:
        raise ConfigError(wrong)
    # Asked first: transformers itself does not know the type of a pruned checkpoint.
    if is_pruned_checkpoint(name):
        raise UnsupportedModelError(
            f"{name} is a pruned checkpoint already, and its base is wanted here; wide eval, wide generate and "
            "wide.load_checkpoint take it as it is"
        )
    try:
        return AutoConfig.from_pretrained(name, **(hub_options or {}))
    except (OSError, ValueError) as error:
        raise ConfigError(_not_loadable(name, error)) from error


def choose_device(device: str | None) -> torch.device:
    """Return a device by name; None and 'auto' mean CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: If it is unknown or absent.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown; use 'cpu', 'cuda' or 'cuda:0'") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but PyTorch sees no GPU here; use 'cpu'")
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


def _not_loadable(name: str, error: Exception) -> str:
    kind = "folder" if Path(name).exists() else "hub name or folder"
    return f"no model can be loaded from the {kind} {name!r}: {str(error).strip().splitlines()[0]}"


def fingerprint(model: nn.Module, specs: Sequence[BlockSpec]) -> dict[str, Any]:
    """Return JSON-ready facts by which an adapter recognises its base model.

    The weight sample is rounded to bfloat16, so that the same checkpoint loaded as float32 or bfloat16 agrees.
    """
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    attention = specs[0].attention
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
        "weight_sample": _weight_sample(model),
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what distinguishes two fingerprints, in words; empty means the same base model.

    Names and revisions are not compared: a moved or renamed checkpoint is the same model.
    """
    facts = [key for key in expected if key not in ("name_or_path", "revision", "weight_sample")]
    words = [
        f"{key} is {found.get(key)!r}, expected {expected[key]!r}" for key in facts if found.get(key) != expected[key]
    ]
    if not words and not _same_sample(expected.get("weight_sample"), found.get("weight_sample")):
        words.append("the weights differ (another checkpoint of the same architecture)")
    return words


def _same_sample(expected: Any, found: Any) -> bool:
    if not expected or not found:
        # Weights that cannot be sampled (quantised, on the meta device) cannot be compared either.
        return True
    if len(expected) != len(found):
        return False
    equal = sum(a == b for a, b in zip(expected, found, strict=True))
    return equal >= _NEEDED_AGREEMENT * len(expected)


def same_weights(seen: Tensor | None, now: Tensor | None) -> bool:
    """Return whether two of `sampled_values` agree, up to a change of dtype; what is not known agrees."""
    if seen is None or now is None:
        return True
    return any(torch.equal(seen.to(dtype).float(), now) for dtype in (torch.float32, torch.bfloat16, torch.float16))


def sampled_values(model: nn.Module) -> Tensor | None:
    """Return a few values of some of the base's matrices, float32; None where they cannot be read."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not _ADDED.search(name)]
    if not matrices or any(p.is_meta or not p.is_floating_point() for p in matrices):
        return None
    pieces = []
    for matrix in matrices[:: max(1, len(matrices) // _NUM_TENSORS)]:
        flat = matrix.detach().reshape(-1)
        stride = max(1, flat.numel() // _VALUES_PER_TENSOR)
        pieces.append(flat[::stride][:_VALUES_PER_TENSOR].float().cpu())
    return torch.cat(pieces)


def _weight_sample(model: nn.Module) -> list[float]:
    values = sampled_values(model)
    return [] if values is None else [float(value) for value in values.to(torch.bfloat16).float()]
