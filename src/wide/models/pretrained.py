"""Load base models by name or folder, with clear errors and without remote code."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from wide.data.local_names import missing_folder
from wide.errors import ConfigError, UnsupportedModelError

_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_pretrained(name: str, *, dtype: str | torch.dtype = "auto", device: str | None = None) -> Any:
    """Return a Hugging Face causal LM in evaluation mode.

    Args:
        name: Hub name or local folder; only safetensors are read and no remote code is run.
        dtype: 'auto' (as stored), 'float32', 'bfloat16', 'float16', or a torch dtype.
        device: 'cpu', 'cuda', 'cuda:1', ...; None means CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: If the dtype or device is unknown or absent, or the name cannot be loaded.
        UnsupportedModelError: If it is not a causal LM.
    """
    from transformers import AutoModelForCausalLM

    where = choose_device(device)
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {sorted(_DTYPES)}")
    config = _configuration(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=_DTYPES[dtype] if isinstance(dtype, str) else dtype,
            use_safetensors=True,
        )
    except ValueError as error:
        raise UnsupportedModelError(_not_causal(name, config)) from error
    except OSError as error:
        raise ConfigError(_not_loadable(name, error)) from error
    assert isinstance(model, nn.Module)
    return model.to(where).eval()


def is_pruned_checkpoint(name: str) -> bool:
    """Return whether a name or folder is a full pruned checkpoint; False too where nothing can be read."""
    from transformers import PreTrainedConfig

    if missing_folder(name) is not None:
        return False
    try:
        facts, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):
        return False
    return str(facts.get("model_type", "")).startswith("wide_")


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


def _configuration(name: str) -> Any:
    from transformers import AutoConfig

    wrong = missing_folder(name)
    if wrong is not None:
        raise ConfigError(wrong)
    # Asked first: transformers itself does not know the type of a pruned checkpoint.
    if is_pruned_checkpoint(name):
        raise UnsupportedModelError(
            f"{name} is a pruned checkpoint already, and its base is wanted here; wide eval, wide generate and "
            "wide.load_checkpoint take it as it is"
        )
    try:
        return AutoConfig.from_pretrained(name)
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
