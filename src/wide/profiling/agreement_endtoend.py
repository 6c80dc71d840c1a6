"""Does the runtime compute what the masked Hugging Face model computes? No speed-up is reported past a red gate."""

from typing import Any

import torch
from torch import Tensor

from wide.inference.decoder import Decoder
from wide.inference.operator_table import OperatorTable
from wide.inference.run import Run, force
from wide.inference.weights import LayerWeights
from wide.models.observe import bypass, capture_routing, force_routing
from wide.routing import LayerRouting

_STEPS = 4
# Rounding of two routed paths may add up to this multiple of that of two dense paths.
_ALLOWED = 1.5
_SLACK = 5e-3
# Two dense paths in bfloat16 stay within this on a deep model.
_DENSE_LIMIT = 6e-2


def _error(got: Tensor, wanted: Tensor) -> float:
    value = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return value if value == value else float("inf")


def _own_masks(layers: tuple[LayerWeights, ...], num_tokens: int) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return independent half-open masks, without the runtime's extra groups."""
    device = layers[0].attention.qkv.device
    generator = torch.Generator(device=device).manual_seed(5)
    counts = [
        [None if router is None else router.num_groups for router in (layer.attention.router, layer.ffn.router)]
        for layer in layers
    ]
    return [
        tuple(  # type: ignore[misc]
            None if n is None else torch.rand(num_tokens, n, generator=generator, device=device) < 0.5 for n in pair
        )
        for pair in counts
    ]


@torch.no_grad()
def check(model: Any, decoder: Decoder, table: OperatorTable, ids: Tensor) -> dict[str, Any]:
    """Compare the runtime with the model on one prompt, under forced masks and with the routers deciding.

    Args:
        model: Attached.
        decoder: Made from it.
        table: Of the routed run.
        ids: Prompt, [1, T]; its last tokens are also run as decode steps.

    Returns:
        Relative errors of the logits, the share of decisions that differ where routers decide, and `green`.
    """
    length, layers = ids.shape[1], decoder.layers
    masks = _own_masks(layers, length)
    routing = [
        LayerRouting(attention=None if a is None else a[None], ffn=None if f is None else f[None]) for a, f in masks
    ]
    cache = decoder.new_cache(1, length)
    with bypass(model):
        dense = model(ids, use_cache=False).logits[0]
    found: dict[str, Any] = {"tokens": length}
    run = Run(routed=False, table=table)
    found["dense_error"] = _error(decoder.prefill_logits(ids, cache, run)[0], dense)
    with force_routing(model, routing):
        masked = model(ids, use_cache=False).logits[0]
    run = Run(table=table, forced=force(layers, masks))
    found["routed_error"] = _error(decoder.prefill_logits(ids, cache, run)[0], masked)
    found["decode_error"] = _decode_error(decoder, table, ids, masks, masked)
    found |= _flips(model, decoder, table, ids)
    limit = _ALLOWED * found["dense_error"] + _SLACK
    found["limit"] = limit
    routed = max(found["routed_error"], found["decode_error"])
    found["green"] = found["dense_error"] <= _DENSE_LIMIT and routed <= limit
    return found


def _decode_error(decoder: Decoder, table: OperatorTable, ids: Tensor, masks: Any, wanted: Tensor) -> float:
    """Run the last tokens as steps after a prefill of the others."""
    start, layers = ids.shape[1] - _STEPS, decoder.layers
    cache = decoder.new_cache(1, ids.shape[1])

    def piece(first: int, last: int) -> Run:
        cut = [tuple(None if m is None else m[first:last] for m in pair) for pair in masks]
        return Run(table=table, forced=force(layers, cut))  # type: ignore[arg-type]

    lengths = torch.full((1,), start, dtype=torch.int32, device=ids.device)
    logits = [decoder.prefill(ids[:, :start], lengths, cache, piece(0, start))]
    logits += [decoder.step(ids[:, p], cache, piece(p, p + 1)) for p in range(start, ids.shape[1])]
    return _error(torch.cat(logits), wanted[start - 1 :])


def _flips(model: Any, decoder: Decoder, table: OperatorTable, ids: Tensor) -> dict[str, Any]:
    """Let the routers decide on both sides and compare decisions, where one flip may cause later ones."""
    with capture_routing(model) as routing:
        wanted = model(ids, use_cache=False).logits[0]
    record: list[tuple[Tensor | None, Tensor | None]] = []
    logits = decoder.prefill_logits(ids, decoder.new_cache(1, ids.shape[1]), Run(table=table, record=record))[0]
    differ, total, skipped = 0, 0, {"attention": 0, "ffn": 0}
    counts = dict.fromkeys(skipped, 0)
    for (attention, ffn), layer in zip(record, routing, strict=True):
        for half, mask, theirs in (("attention", attention, layer.attention), ("ffn", ffn, layer.ffn)):
            if mask is None or theirs is None:
                continue
            differ += int((mask != theirs[0]).sum())
            total += mask.numel()
            skipped[half] += int((~mask).sum())
            counts[half] += mask.numel()
    return {
        "flip_rate": differ / max(1, total),
        "own_routing_error": _error(logits, wanted),
        "own_skipped": {half: skipped[half] / max(1, counts[half]) for half in skipped},
    }
