"""What the engine understands of a call: one run of causal keys a sequence, with left padding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KNOWN = frozenset(
    (
        *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache", "use_cache"),
        *("logits_to_keep", "cache_position", "return_dict"),
        # generate(stop_strings=..., tokenizer=...) hands it on; no layer reads it.
        "tokenizer",
    )
)
"""Arguments of a model's forward that the engine reads, or that change nothing."""


def read_padding(
    given: Mapping[str, Any], x: Tensor, past: int, *, reads_positions: bool, has_cache: bool
) -> Tensor | str | None:
    """Return each sequence's left padding, int64 [B], None without, or what of masks and positions is not understood.

    Waits for the device where there is a mask or positions to compare.

    Args:
        x: New tokens [B, T], or their embeddings.
        past: Earlier tokens of each sequence, padding included.
        reads_positions: Whether positions may differ from those that follow from the mask.
        has_cache: Whether keys are kept: padding must then not count in positions.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    length = past + x.shape[1]
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return "a prepared attention mask"
    padding = None
    if mask is not None:
        if mask.shape[1] != length:
            return "an attention mask of another length than the tokens"
        real = mask.bool()
        is_left = real[:, -1].all() & (real[:, 1:] >= real[:, :-1]).all()
        is_full, is_left_padded = torch.stack([real.all(), is_left]).tolist()
        if not is_left_padded:
            return "an attention mask with holes or right padding"
        if not is_full:
            padding = mask.to(torch.int32).argmax(-1).to(x.device)
    if reads_positions and positions is not None:
        wanted = torch.arange(past, length, device=x.device)
        wanted = wanted if padding is None else wanted - padding[:, None]
        if not bool(((positions == wanted) | (wanted < 0)).all()):
            return "position_ids that do not count the tokens (packed sequences)"
    if has_cache and reads_positions and padding is not None and positions is None:
        # Where the caller counts padding as positions, keys that leave the engine would stand elsewhere.
        return "left padding without position_ids"
    return padding


def unexpected_rows(given: Mapping[str, Any], lengths: Tensor, padding: list[int] | None) -> Tensor | str | None:
    """Return which rows, bool [B], have another mask or position than token `lengths` [B]; a reason if unknown."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return "a prepared attention mask"
    if padding is not None and positions is None:
        return "left padding without position_ids"
    checks = [] if mask is None else [mask.to(lengths.device).sum(-1) != lengths]
    if positions is not None:
        checks.append(positions[:, -1].to(lengths.device) + 1 != lengths)
    return torch.stack(checks).any(0) if checks else None


def kept_rows(
    batch: int, length: int, kept: int | Tensor, padding: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return of which rows of [B * T] logits are wanted, int64 [B * kept]; None = all, in order.

    `kept` is `logits_to_keep`: so many last places, 0 for all, or the places, which count the left padding, int64 [B].
    """
    places = torch.arange(length, device=device)
    places = places[kept.to(device)] if isinstance(kept, Tensor) else places[-kept:] if kept else places
    if padding is None and len(places) == length:
        return None
    # Padded places have no row; what they give is never used.
    columns = places[None] if padding is None else (places - padding[:, None]).clamp(min=0)
    return (torch.arange(batch, device=device)[:, None] * length + columns).flatten()
