"""A model cut by a static plan beside its dense base, both as Hugging Face runs them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PRUNED = "pruned"
"""Name of the candidate that a static plan made smaller."""
# Two dense paths in bfloat16 stay within this on a deep model.
_LIMIT = 6e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A base model and what a method left of it; `error` is of its logits, relative to the plan's gates on the base."""

    dense: Any
    pruned: Any
    error: float

    def gate(self) -> dict[str, Any]:
        """Return the verdict as records hold it."""
        return {"materialised_error": self.error, "limit": _LIMIT, "green": self.error <= _LIMIT}


def is_static(adapter: Path) -> bool:
    """Return whether an adapter's plan prunes the same for every token; raises AdapterError if it is not an adapter."""
    from wide.models.adapter import read_config

    config = read_config(adapter)
    return config["plan"].is_static or config["has_weights"]


def method_of(adapter: Path) -> str:
    """Return the name of the method that an adapter says it was made by; 'wide' where it names none."""
    from wide.models.adapter import read_config

    return str(read_config(adapter)["provenance"].get("method", {}).get("method", "wide"))


def materialise_pair(name: str, adapter: Path, ids: Tensor, *, dtype: str, device: torch.device) -> Pair:
    """Return a base model and the same cut by an adapter's static plan, compared on some tokens first."""
    from wide.materialisation.materialise import materialise
    from wide.models.adapter import load
    from wide.models.pretrained import load_pretrained

    dense, pruned = (load_pretrained(name, dtype=dtype, device=str(device)) for _ in range(2))
    load(pruned, adapter)
    pruned.eval()
    with torch.no_grad():
        wanted = pruned(ids, use_cache=False).logits.float()
        materialise(pruned)
        got = pruned(ids, use_cache=False).logits.float()
    error = ((got - wanted).norm() / wanted.norm()).item()
    return Pair(dense=dense, pruned=pruned, error=error if error == error else float("inf"))
