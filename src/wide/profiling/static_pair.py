"""A model cut by a static plan beside its dense base, both as Hugging Face runs them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wide.materialisation.materialise import materialise
from wide.models.adapter import load, read_config
from wide.models.pretrained import load_pretrained

PRUNED = "pruned"
"""Name of the candidate that a static plan made smaller."""
# Two dense paths in bfloat16 stay within this on a deep model.
_LIMIT = 6e-2


def is_static(adapter: Path) -> bool:
    """Return whether an adapter's plan prunes the same for every token; raises AdapterError if it is not an adapter."""
    config = read_config(adapter)
    return config["plan"].is_static or config["has_weights"]


def method_of(adapter: Path) -> str:
    """Return the name of the method that an adapter says it was made by; 'wide' where it names none."""
    return str(read_config(adapter)["provenance"].get("method", {}).get("method", "wide"))


@torch.no_grad()
def materialise_pair(
    name: str, adapter: Path, ids: Tensor, *, dtype: str, device: torch.device
) -> tuple[Any, Any, dict[str, Any]]:
    """Return a base model, the same cut by an adapter's static plan, and the gate, as records hold it.

    The gate is on the relative error of logits of the tokens [1, T], against the plan's gates on the base.
    """
    dense, pruned = (load_pretrained(name, dtype=dtype, device=str(device)) for _ in range(2))
    load(pruned, adapter).eval()
    wanted = pruned(ids, use_cache=False).logits.float()
    materialise(pruned)
    error = ((pruned(ids, use_cache=False).logits.float() - wanted).norm() / wanted.norm()).item()
    error = error if error == error else float("inf")
    return dense, pruned, {"materialised_error": error, "limit": _LIMIT, "green": error <= _LIMIT}
