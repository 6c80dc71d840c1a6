"""One decoder layer under its routers' masks, as a function of its arguments alone."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wide.inference.engine.side_stream import SideStream
from wide.inference.engine.views import AttentionCall, CacheView
from wide.inference.operators.products import feed_forward
from wide.inference.operators.table import OperatorName, OperatorTable
from wide.inference.reading.weights import AttentionWeights, EngineRouter, LayerWeights, Sublayer, apply_norm
from wide.kernels.reordering import Reordering
from wide.kernels.rope.op import rope_to_cache
from wide.kernels.route.op import MAX_FEW_ROWS, norm_route, route

# A product of more rows is bound by its arithmetic, and slower when a router runs at the same time.
_MAX_OVERLAPPED_ROWS = 512


LayerMasks = Sequence[tuple[Tensor | None, Tensor | None]]
"""For each layer the attention mask and the FFN mask, bool [tokens, N_G]; None leaves the half to its router."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOptions:
    """Options of a forward.

    Args:
        routed: Whether routers decide and operators skip; otherwise everything is dense and no router runs.
        table: Which operator skips at which size, in place of the decoder's own tables; None = those.
        forced: Masks that replace the routers' decisions; the routers run all the same, so that their time counts.
            Made with `force`.
        record: Filled with each layer's (attention, FFN) masks in use; None = not wanted.
    """

    routed: bool = True
    table: OperatorTable | None = None
    forced: LayerMasks | None = None
    record: list[tuple[Tensor | None, Tensor | None]] | None = None


class Residual(NamedTuple):
    """The residual stream [M, D], and what the last sublayer adds to it: the next norm adds the two up."""

    total: Tensor
    addend: Tensor | None


class Masks(NamedTuple):
    """Which groups each row executes, bool [M, N_G]; None = everything, or what the router decides."""

    attention: Tensor | None = None
    ffn: Tensor | None = None


class _Options(NamedTuple):
    table: OperatorTable
    routed: bool
    side: SideStream | None

    def wait(self) -> None:
        """Wait for a router on the other stream, before its mask is read."""
        if self.side is not None:
            self.side.wait()


def run_layer(
    stream: Residual,
    layer: LayerWeights,
    view: CacheView,
    table: OperatorTable,
    *,
    routed: bool = True,
    forced: Masks = Masks(),  # noqa: B008
    side: SideStream | None = None,
) -> tuple[Residual, Masks]:
    """Run a layer; its keys and values are written through the view.

    Args:
        stream: What enters, of M = B * T rows.
        view: Keys and values, with B and T.
        routed: Whether routers decide; otherwise everything executes.
        forced: Masks in place of the routers' decisions, with the routers' extra groups.
        side: A second stream for routers whose masks are not needed at once; None = they run in line.

    Returns:
        What leaves, and the masks in use.
    """
    options = _Options(table, routed, side)
    attention, ffn = layer.attention, layer.ffn
    attention_mask: Tensor | None = None
    if attention is not None:
        total, normed, attention_mask = _enter(attention, stream, forced.attention, options)
        attended = _leave(attention, _attention(layer.index, attention, normed, attention_mask, view, options), table)
        stream = Residual(_on(attention, total), attended)
        attention_mask = own_groups(attention, attention_mask)
    if ffn is None:
        return stream, Masks(attention_mask)
    if layer.parallel and attention is not None:
        ffn_mask = _decide(ffn, total, normed, forced.ffn, options)
        total = total + attended
    else:
        total, normed, ffn_mask = _enter(ffn, stream, forced.ffn, options)
    ready = options.wait if options.side is not None and options.side.runs else None
    fed = feed_forward(ffn.gated, ffn.down, normed, ffn_mask, table, ready=ready)
    return Residual(_on(ffn, total), _leave(ffn, fed, table)), Masks(attention_mask, ffn_mask)


def _on(part: Sublayer, total: Tensor) -> Tensor:
    """Return the stream in the basis that a sublayer leaves."""
    return total if part.shortcut is None else functional.linear(total, part.shortcut)


def own_groups(part: Sublayer, mask: Tensor | None) -> Tensor | None:
    """Return a mask without the router's extra groups, bool [M, N_G]; None where there is no router."""
    return None if mask is None or part.router is None else mask[:, : part.router.num_groups]


def _enter(
    part: Sublayer, stream: Residual, forced: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add, norm and decide: return the sum, its norm, and the mask (None: everything executes)."""
    norm, router, rows = part.norm, _deciding(part, forced, options), stream.total.shape[0]
    in_line = rows <= MAX_FEW_ROWS and not _overlaps(part, rows, options)
    if in_line and router is not None and norm is not None and not norm.centered:
        how: dict[str, Any] = {"eps": norm.eps, "unit_offset": norm.unit_offset, "backend": options.table.backend}
        how |= {"addend": stream.addend, "reads_residual": router.reads_residual}
        total, normed, mask = norm_route(stream.total, norm.weight, router.weights, **how)
        return total, normed, mask if forced is None else forced
    total, normed = apply_norm(norm, stream.total, stream.addend, options.table.backend)
    return total, normed, _decide(part, total, normed, forced, options)


def _decide(part: Sublayer, total: Tensor, normed: Tensor, forced: Tensor | None, options: _Options) -> Tensor | None:
    """Return the mask of a sublayer that reads a sum and its norm, None where nothing is skipped."""
    router = _deciding(part, forced, options)
    if router is None:
        return None
    seen = total if router.reads_residual else normed
    overlaps = _overlaps(part, seen.shape[0], options)
    call = functools.partial(route, seen, router.weights, overlaps=overlaps, backend=options.table.backend)
    mask = options.side.begin(call) if overlaps and options.side is not None else call()
    return mask if forced is None else forced


def _deciding(part: Sublayer, forced: Tensor | None, options: _Options) -> EngineRouter | None:
    """Return the router that has to run, None where nothing may be skipped."""
    router = part.router if options.routed else None
    return None if router is not None and not router.decides and forced is None else router


def _overlaps(part: Sublayer, rows: int, options: _Options) -> bool:
    """Return whether the router may run while the sublayer's first product, a dense one, does."""
    name: OperatorName = "query" if isinstance(part, AttentionWeights) else "gate_up"
    return options.side is not None and rows <= _MAX_OVERLAPPED_ROWS and options.table.how(name, rows) == "dense"


def _leave(part: Sublayer, out: Tensor, table: OperatorTable) -> Tensor:
    """Return what a sublayer adds to the stream, given its output [M, D]."""
    if part.post_norm is not None:
        out = apply_norm(part.post_norm, out, None, table.backend)[1]
    return out if part.multiplier is None else out * part.multiplier


def _attention(
    index: int, weights: AttentionWeights, x: Tensor, mask: Tensor | None, view: CacheView, options: _Options
) -> Tensor:
    """Return the output of the attention of layer `index`, [M, D]; `mask` holds the router's extra groups."""
    table = options.table
    q, keys, values, order = _project(x, weights, mask, table)
    # While the router still runs, heads are rotated that nobody reads.
    is_late = options.side is not None and options.side.runs
    q_norm, k_norm = weights.q_norm, weights.k_norm
    if weights.norms_width:
        q, keys = (apply_norm(*pair, None, table.backend)[1] for pair in ((q_norm, q), (k_norm, keys)))
        q_norm = k_norm = None
    shape = (view.batch, view.length)
    q, keys, values = (part.unflatten(1, (-1, weights.head_dim)).unflatten(0, shape) for part in (q, keys, values))
    k_memory, v_memory, places = view.memory(index, keys)
    own = own_groups(weights, mask)
    how: dict[str, Any] = {"places": places, "interleaved": weights.form.interleaved, "backend": table.backend}
    # One token's skipped heads cost less than to look them up.
    how["mask"] = None if view.is_step or is_late else own
    if q_norm is not None and k_norm is not None:
        how |= {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": q_norm.eps, "unit_offset": q_norm.unit_offset}
    q = rope_to_cache(q, keys, values, weights.cos, weights.sin, view.starts, k_memory, v_memory, **how)
    call = AttentionCall(weights.form, table, order, options.wait)
    heads = view.attend(index, q, own, call).reshape(x.shape[0], -1)
    if own is None:
        return weights.output.dense(heads)
    return weights.output.input_groups(heads, own, table.choice("output", heads.shape[0]), sorts=table.backend)


def _project(
    x: Tensor, weights: AttentionWeights, mask: Tensor | None, table: OperatorTable
) -> tuple[Tensor, Tensor, Tensor, Reordering | None]:
    """Return queries [M, H_q d] of executing groups (others hold anything), keys, values, and the reordering if any.

    The mask holds the router's extra groups, bool [M, N_G + extra].
    """
    choice = table.choice("query", x.shape[0])
    if mask is None or weights.norms_width or choice.backend == "dense":
        whole = weights.qkv.dense(x)
    elif table.how("query", x.shape[0]) == "few" and weights.router is not None and weights.router.extra:
        whole = weights.qkv.output_groups(x, mask, choice, sorts=table.backend)[0]
    else:
        own = own_groups(weights, mask)
        assert own is not None
        keys, values = weights.kv.dense(x).chunk(2, 1)
        q, order = weights.query.output_groups(x, own, choice, sorts=table.backend)
        return q, keys, values, order
    width = weights.query.outputs
    keys, values = whole[:, width:].chunk(2, 1)
    return whole[:, :width], keys, values, None


def force(layers: Sequence[LayerWeights], masks: LayerMasks) -> LayerMasks:
    """Return masks with the always-executing groups that the engine's routers add."""
    return [
        (_extend(layer.attention, attention), _extend(layer.ffn, ffn))
        for layer, (attention, ffn) in zip(layers, masks, strict=True)
    ]


def _extend(part: Sublayer | None, mask: Tensor | None) -> Tensor | None:
    router = None if part is None else part.router
    if mask is None or router is None or router.extra == 0:
        return mask
    return torch.cat((mask, mask.new_ones(mask.shape[0], router.extra)), 1)
