"""Does a fast forward compute what the masked Hugging Face model computes? No speed-up is reported past a red gate.

Gates run at the sizes that are claimed, where the tables choose the kernels that the figures stand for, and say which
operator and which kernels ran. Logits are compared at some places of the prompt, its last ones among them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wide.inference.decoder import Decoder
from wide.inference.operator_table import OPERATORS, OperatorTable
from wide.inference.run import Masks, Run, force
from wide.inference.tuning.race import launched, relative
from wide.models.attach import attachment
from wide.models.observe import bypass, capture_routing, force_routing
from wide.routing import LayerRouting

_STEPS = 4
_PLACES = 128
# Rounding of two routed paths may add up to this multiple of that of two dense paths.
_ALLOWED = 1.5
_SLACK = 5e-3
LIMIT = 6e-2
"""Two paths of one model in bfloat16 under the same masks stay within this on a deep model."""
Gate = dict[str, Any]


def half_masks(model: Any, num_tokens: int, device: torch.device) -> list[LayerRouting]:
    """Return independent masks of 50 % for the routers of an attached model, [1, T, N_G]."""
    generator = torch.Generator(device=device).manual_seed(5)
    masks: list[dict[str, Tensor | None]] = [{"attention": None, "ffn": None} for _ in attachment(model).specs]
    for router in attachment(model).routers():
        drawn = torch.rand(1, num_tokens, router.num_groups, generator=generator, device=device)
        masks[router.layer_index][router.half_layer] = drawn < 0.5
    return [LayerRouting(**pair) for pair in masks]


def places(length: int, device: torch.device) -> Tensor:
    """Return places of a prompt at which logits are compared, int64, ascending: spread out, and the last ones."""
    spread = torch.linspace(0, length - 1, min(length, _PLACES)).long()
    return torch.cat((spread, torch.arange(max(0, length - _STEPS - 1), length))).unique().to(device)


@torch.no_grad()
def check_decoder(model: Any, decoder: Decoder, ids: Tensor, table: OperatorTable | None = None) -> Gate:
    """Compare the decoder with the model on one prompt, under forced masks and with the routers deciding.

    Args:
        model: Attached.
        decoder: Made from it.
        ids: Prompt, [1, T], as long as what is timed; its last tokens also run as steps over the cache of the others.
        table: Which operator runs where; None = what the decoder's own tables say.

    Returns:
        Relative errors of the logits, the share of decisions that differ where routers decide, which operators and
        kernels ran, and `green`.
    """
    length, layers = ids.shape[1], decoder.layers
    at = places(length, ids.device)
    routing = half_masks(model, length, ids.device)
    masks = [tuple(None if m is None else m[0] for m in (each.attention, each.ffn)) for each in routing]
    cache = decoder.new_cache(1, length)

    def prompt(run: Run) -> Tensor:
        return decoder.logits(decoder.prompt(ids, cache, run), run, at)

    with bypass(model):
        dense = _logits(model, ids, at)
    with force_routing(model, routing):
        masked = _logits(model, ids, at)
    found: Gate = {"tokens": length, "dense_error": relative(prompt(Run(routed=False, table=table)), dense)}
    forced = Run(table=table, forced=force(layers, masks))  # type: ignore[arg-type]
    found["routed_error"] = relative(prompt(forced), masked)
    found["decode_error"], step_kernels = _check_steps(decoder, table, ids, masks, masked)  # type: ignore[arg-type]
    found["limit"] = _ALLOWED * found["dense_error"] + _SLACK
    first = table or decoder.tables[0]
    found["operators"] = {"prefill": _operators(first, length), "decode": _operators(first, 1)}
    found["kernels"] = {"prefill": launched(lambda: prompt(forced)), "decode": step_kernels}
    found |= _flips(model, decoder, table, ids, at)
    routed = max(found["routed_error"], found["decode_error"])
    found["green"] = found["dense_error"] <= LIMIT and routed <= found["limit"]
    return found


def _logits(model: Any, ids: Tensor, at: Tensor) -> Tensor:
    return model(ids, use_cache=False, logits_to_keep=at).logits[0]  # type: ignore[no-any-return]


def _operators(table: OperatorTable, rows: int) -> dict[str, str]:
    """Return in words what a table runs for so many tokens."""
    found: dict[str, str] = {}
    for name in OPERATORS:
        if name == "attention" and rows == 1:
            found[name] = f"{table.backend} over the cache, {'pairs skip' if table.cache else 'every pair is read'}"
            continue
        choice = table.choice(name, rows)
        backend = table.backend if choice.backend == "dense" else choice.backend
        sparse = " ".join([backend, "x".join(map(str, choice.tile)) or "default tile"])
        found[name] = "dense" if table.how(name, rows) == "dense" else sparse
    return found


def _check_steps(
    decoder: Decoder, table: OperatorTable | None, ids: Tensor, masks: Masks, wanted: Tensor
) -> tuple[float, dict[str, int]]:
    """Run the last tokens as steps after a prompt of the others; return the error and one step's kernels."""
    layers, steps = decoder.layers, min(_STEPS, ids.shape[1] - 1)
    start = ids.shape[1] - steps
    cache = decoder.new_cache(1, ids.shape[1] + 1)

    def piece(first: int, last: int) -> Run:
        cut = [tuple(None if m is None else m[first:last] for m in pair) for pair in masks]
        return Run(table=table, forced=force(layers, cut))  # type: ignore[arg-type]

    lengths = torch.full((1,), start, dtype=torch.int32, device=ids.device)
    logits = [decoder.prefill(ids[:, :start], lengths, cache, piece(0, start))]
    logits += [decoder.step(ids[:, p], cache, piece(p, p + 1)) for p in range(start, ids.shape[1])]
    last = piece(ids.shape[1] - 1, ids.shape[1])
    return relative(torch.cat(logits), wanted[-steps - 1 :]), launched(lambda: decoder.step(ids[:, -1], cache, last))


def _flips(model: Any, decoder: Decoder, table: OperatorTable | None, ids: Tensor, at: Tensor) -> Gate:
    """Let the routers decide on both sides and compare decisions, where one flip may cause later ones."""
    with capture_routing(model) as routing:
        wanted = _logits(model, ids, at)
    record: list[tuple[Tensor | None, Tensor | None]] = []
    run = Run(table=table, record=record)
    logits = decoder.logits(decoder.prompt(ids, decoder.new_cache(1, ids.shape[1]), run), run, at)
    differ, counts, skipped = 0, {"attention": 0, "ffn": 0}, {"attention": 0, "ffn": 0}
    for (attention, ffn), layer in zip(record, routing, strict=True):
        for part, mask, theirs in (("attention", attention, layer.attention), ("ffn", ffn, layer.ffn)):
            if mask is not None and theirs is not None:
                differ += int((mask != theirs[0]).sum())
                skipped[part] += int((~mask).sum())
                counts[part] += mask.numel()
    return {
        "flip_rate": differ / max(1, sum(counts.values())),
        "own_routing_error": relative(logits, wanted),
        "own_skipped": {part: skipped[part] / max(1, counts[part]) for part in skipped},
    }


@torch.no_grad()
def check_optimised(masked: Any, optimised: Any, ids: Tensor, tables: Sequence[OperatorTable]) -> Gate:
    """Compare an optimised model with the masked one: its layers' modules under forced masks, and its own forward.

    Under forced masks an optimised model runs its layers' own modules, with the operators of its straight-line forward.
    That forward and steps are the matter of `check_decoder`, which gives the verdict on them with these tables.

    Args:
        masked: Attached.
        optimised: The same weights and routers, after `wide.optimize`.
        ids: Prompt, [1, T], as long as what is timed.
        tables: Which operator the optimised model runs where, by layer.
    """
    at = places(ids.shape[1], ids.device)
    routing = half_masks(masked, ids.shape[1], ids.device)
    logits = []
    for model in (masked, optimised):
        with force_routing(model, routing):
            logits.append(_logits(model, ids, at))
    decoder = Decoder(masked, max_length=ids.shape[1] + 1, tables=tables)
    found = check_decoder(masked, decoder, ids)
    decoder.unstack()
    found |= {"optimised_error": relative(logits[1], logits[0])}
    found["own_door_error"] = relative(_logits(optimised, ids, at), _logits(masked, ids, at))
    found["kernels"]["model(...)"] = launched(lambda: optimised(ids, use_cache=False, logits_to_keep=1))
    found["green"] = found["green"] and found["optimised_error"] <= LIMIT
    return found
