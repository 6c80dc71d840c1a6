"""Does the engine compute what the masked Hugging Face model computes? No speed-up is reported past a red gate.

Gates run at the sizes that are claimed, where the tables choose the kernels that the figures stand for, and say which
operator and which kernels ran. Logits are compared at some places of the prompt, its last ones among them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from wide.inference.choice.tuning.race import launched, relative
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.graphs import GraphPool, capture_prompt, capture_step
from wide.inference.engine.layer import ForwardOptions, LayerMasks, Masks, Residual, force, run_layer
from wide.inference.engine.views import PromptView
from wide.inference.operators.table import OPERATORS, OperatorTable
from wide.models.attach import attachment
from wide.models.observe import bypass, capture_routing, force_routing
from wide.routing import LayerRouting

_STEPS, _PLACES, _CAPTURED_PROMPT = 4, 128, 1024
# Of a batch: tokens of each sequence, and how many of its sequences also run alone.
_BATCH_TOKENS, _ALONE = 256, 4
# Rounding of two routed paths may add up to this multiple of that of two dense paths.
_ALLOWED, _SLACK = 1.5, 5e-3
LIMIT = 6e-2
"""Two paths of one model in bfloat16 under the same masks stay within this on a deep model."""
Gate = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What the masked model computes of one prompt.

    Args:
        ids: The prompt, [1, T].
        at: Places where logits are compared, int64.
        dense: Logits at these places with nothing skipped, [places, V].
        masks: Masks of each layer's attention and FFN, bool [1, T, N_G]: independent ones of 50 %, or the decisions.
        masked: Logits under these masks.
        own: Logits with the routers deciding.
        decisions: Their masks, bool [T, N_G].
        states: What enters each layer, [1, T, D], with nothing skipped and under the masks; empty if layers are not
            compared one by one.
    """

    ids: Tensor
    at: Tensor
    dense: Tensor
    masks: LayerMasks
    masked: Tensor
    own: Tensor
    decisions: LayerMasks
    states: tuple[tuple[Tensor, ...], ...] = ()


@torch.no_grad()
def reference(model: Any, ids: Tensor, *, trained: bool = False, by_layer: bool = False) -> Reference:
    """Return what an attached model computes masked of a prompt [1, T]; not through the engine.

    Without routers there is nothing but a static plan's logits.

    Args:
        trained: Whether the routers' decisions are the masks. Random ones break a trained model, which then makes much
            of rounding: 6 to 42 times what the dense model does, and under its own decisions less than that.
        by_layer: Whether layers are to be compared one by one, as where rows are rounded to int8: values near the
            middle of two fall either way, and many layers make much of that.
    """
    at = places(ids.shape[1], ids.device)
    with capture_routing(model) as decisions:
        own = _logits(model, ids, at)
    routing = list(decisions) if trained else _half_masks(model, ids)
    with bypass(model) if attachment(model).plan.is_routed else nullcontext():
        dense = _logits(model, ids, at)
        states = [_states(model, ids)] if by_layer else []
    with force_routing(model, routing):
        masked = _logits(model, ids, at)
    if by_layer:
        # Masks that are forced are used up by a forward.
        with force_routing(model, routing):
            states.append(_states(model, ids))
    return Reference(
        ids=ids,
        at=at,
        dense=dense,
        masks=[(layer.attention, layer.ffn) for layer in routing],
        masked=masked,
        own=own,
        decisions=_each(lambda mask: mask[0], decisions),
        states=tuple(states),
    )


def _states(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    # Behind the last layer there is a norm.
    return model(ids, use_cache=False, logits_to_keep=1, output_hidden_states=True).hidden_states[:-1]  # type: ignore[no-any-return]


def _each(change: Callable[[Tensor], Tensor], masks: Iterable[LayerRouting | tuple[Any, Any]]) -> LayerMasks:
    """Return the masks of layers, each changed where a sublayer has one."""
    pairs = [(each.attention, each.ffn) if isinstance(each, LayerRouting) else each for each in masks]
    return [(None if a is None else change(a), None if f is None else change(f)) for a, f in pairs]


def _half_masks(model: Any, ids: Tensor) -> list[LayerRouting]:
    generator = torch.Generator(device=ids.device).manual_seed(5)
    masks: list[dict[str, Tensor | None]] = [{"attention": None, "ffn": None} for _ in attachment(model).specs]
    for router in attachment(model).routers():
        drawn = torch.rand(*ids.shape, router.num_groups, generator=generator, device=ids.device)
        masks[router.layer_index][router.half_layer] = drawn < 0.5
    return [LayerRouting(**pair) for pair in masks]


def places(length: int, device: torch.device) -> Tensor:
    """Return places of a prompt at which logits are compared, int64, ascending: spread out, and the last ones."""
    spread = torch.linspace(0, length - 1, min(length, _PLACES)).long()
    return torch.cat((spread, torch.arange(max(0, length - _STEPS - 1), length))).unique().to(device)


@torch.no_grad()
def check_decoder(decoder: Decoder, wanted: Reference) -> Gate:
    """Compare a decoder, by its own tables, with the masked model, under forced masks and with the routers deciding.

    The prompt's last tokens also run as steps over the cache of the others, and on a GPU a captured prompt and step are
    compared with direct calls. Return relative errors of the logits, the share of decisions that differ where routers
    decide, which operators and kernels ran, and `green`.
    """
    ids, at, length = wanted.ids, wanted.at, wanted.ids.shape[1]
    cache = decoder.new_cache(1, length)

    def prompt(run: ForwardOptions) -> Tensor:
        return decoder.logits(decoder.prompt(ids, cache, run), run, at)

    found: Gate = {"tokens": length, "dense_error": relative(prompt(ForwardOptions(routed=False)), wanted.dense)}
    forced = _forced(decoder, wanted.masks, 0, length)
    found["routed_error"] = relative(prompt(forced), wanted.masked)
    stepped, step_kernels = _stepped(decoder, ids, wanted.masks)
    found["decode_error"] = relative(stepped[0], wanted.masked[-stepped.shape[1] :])
    found["limit"] = _ALLOWED * found["dense_error"] + _SLACK
    first = decoder.tables[0]
    found["operators"] = {"prefill": _operators(first, length), "decode": _operators(first, 1)}
    found["kernels"] = {"prefill": launched(lambda: prompt(forced)), "decode": step_kernels}
    record: list[tuple[Tensor | None, Tensor | None]] = []
    found["own_routing_error"] = relative(prompt(ForwardOptions(record=record)), wanted.own)
    found["flip_rate"] = _flips(record, wanted.decisions)
    errors = [found["routed_error"], found["decode_error"]]
    if ids.is_cuda:
        found["captured_prompt_error"], found["captured_step_error"] = _check_captured(decoder, wanted)
        errors += [found["captured_prompt_error"], found["captured_step_error"]]
    most = LIMIT
    if wanted.states:
        # Errors of layers that are independent add up to this.
        most = LIMIT * len(decoder.layers) ** 0.5
        runs = zip(wanted.states, (ForwardOptions(routed=False), forced), strict=True)
        found["layer_error"] = max(_layer_error(decoder, *run) for run in runs)
    right = found.get("layer_error", 0.0) <= LIMIT and found["dense_error"] <= most
    found["green"] = right and max(errors) <= found["limit"]
    return found


def _layer_error(decoder: Decoder, states: tuple[Tensor, ...], run: ForwardOptions) -> float:
    """Return the largest relative error of what a layer adds to what enters it in the masked model."""
    batch, length, _ = states[0].shape
    view, errors = PromptView(decoder.new_cache(batch, length), batch, length, 0), []
    forced = [Masks(*pair) for pair in run.forced or [(None, None)] * len(decoder.layers)]
    for index, (before, after) in enumerate(pairwise(states)):
        layer, table = decoder.layers[index], decoder.tables[index]
        entering = Residual(before.flatten(0, 1), None)
        stream, _ = run_layer(entering, layer, view, table, routed=run.routed, forced=forced[index])
        added = stream.total.float() + (0 if stream.addend is None else stream.addend.float()) - before.flatten(0, 1)
        errors.append(relative(added, (after.float() - before.float()).flatten(0, 1)))
    return max(errors)


def _logits(model: Any, ids: Tensor, at: Tensor) -> Tensor:
    return model(ids, use_cache=False, logits_to_keep=at).logits[0]  # type: ignore[no-any-return]


def _forced(decoder: Decoder, masks: LayerMasks, first: int, last: int) -> ForwardOptions:
    """Return options for the tokens from `first` to before `last` of each sequence under masks [B, T, N_G]."""
    cut = _each(lambda mask: mask[:, first:last].flatten(0, 1), masks)
    return ForwardOptions(forced=force(decoder.layers, cut))


def _operators(table: OperatorTable, rows: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in OPERATORS:
        choice = table.choice(name, rows)
        backend = table.backend if choice.backend == "dense" else choice.backend
        found[name] = f"{backend} {'x'.join(map(str, choice.tile)) or 'default tile'}"
        if name == "attention" and rows == 1:
            found[name] = f"{table.backend} over the cache, {'pairs skip' if table.cache else 'every pair is read'}"
        elif table.how(name, rows) == "dense":
            found[name] = "dense"
    return found


def _stepped(decoder: Decoder, ids: Tensor, masks: LayerMasks) -> tuple[Tensor, dict[str, int]]:
    """Return logits [B, steps + 1, V] of prompts and of steps for their last tokens, and the kernels of a step."""
    batch, length = ids.shape
    start = length - min(_STEPS, length - 1)
    cache = decoder.new_cache(batch, length + 1)
    lengths = torch.full((batch,), start, dtype=torch.int32, device=ids.device)
    logits = [decoder.prefill(ids[:, :start], lengths, cache, _forced(decoder, masks, 0, start))]
    logits += [decoder.step(ids[:, p], cache, _forced(decoder, masks, p, p + 1)) for p in range(start, length)]
    last = _forced(decoder, masks, length - 1, length)
    return torch.stack(logits, 1), launched(lambda: decoder.step(ids[:, -1], cache, last))


@torch.no_grad()
def check_batch(model: Any, decoder: Decoder, ids: Tensor, *, trained: bool = False) -> Gate:
    """Compare sequences that run at once with some of them alone, which `check_decoder` compares with the masked model.

    Prompts [B, T] differ; of each some tokens run, the last of them as steps, by the decoder's tables for so many rows.
    Return the greatest relative error of a sequence's logits under the same masks, operators and kernels of a step, and
    `green`.
    """
    ids = ids[:, :_BATCH_TOKENS]
    routing: Sequence[LayerRouting] = _half_masks(model, ids)
    if trained:
        with capture_routing(model) as decisions:
            model(ids, use_cache=False, logits_to_keep=1)
        routing = list(decisions)
    masks: LayerMasks = [(layer.attention, layer.ffn) for layer in routing]
    together, kernels = _stepped(decoder, ids, masks)
    errors = []
    for row in torch.linspace(0, len(ids) - 1, min(_ALONE, len(ids))).long().tolist():
        own = _each(partial(Tensor.narrow, dim=0, start=row, length=1), masks)
        errors.append(relative(together[row], _stepped(decoder, ids[row : row + 1], own)[0][0]))
    found: Gate = {"sequences": len(ids), "batch_error": max(errors), "limit": LIMIT, "kernels": kernels}
    return found | {"operators": _operators(decoder.tables[0], len(ids)), "green": max(errors) <= LIMIT}


def _check_captured(decoder: Decoder, wanted: Reference) -> tuple[float, float]:
    """Return how far a captured prompt and a captured step are from direct calls under the same masks."""
    length = min(_CAPTURED_PROMPT, wanted.ids.shape[1])
    ids = wanted.ids[:, :length]
    cache = decoder.new_cache(1, length + _STEPS)
    lengths = torch.full((1,), length, dtype=torch.int32, device=ids.device)
    run = _forced(decoder, wanted.masks, 0, length)
    direct, pool = decoder.prefill(ids, lengths, cache, run), GraphPool(decoder.device)
    prompt_error = relative(capture_prompt(decoder, cache, length, run, pool)(ids, lengths), direct)
    run = _forced(decoder, wanted.masks, length - 1, length)
    direct = decoder.step(ids[:, -1], cache, run).clone()
    step = capture_step(decoder, cache, run, pool)
    cache.lengths.copy_(lengths)
    return prompt_error, relative(step(ids[:, -1]), direct)


def _flips(found: LayerMasks, wanted: LayerMasks) -> float:
    """Return the share of decisions that differ, where one may cause later ones."""
    pairs = [(a, b) for ours, theirs in zip(found, wanted, strict=True) for a, b in zip(ours, theirs, strict=True)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    differ = sum(int((a != b).sum()) for a, b in known)
    return differ / max(1, sum(a.numel() for a, _ in known))
