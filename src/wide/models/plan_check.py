"""Whether a plan and its tensors fit a model; everything is refused before anything is changed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wide.errors import ShapeError, UnsupportedModelError
from wide.grouping import divisors
from wide.models.block_spec import AttentionSpec, BlockSpec, feed_forward, require_own_keys
from wide.models.gates import hidden_of
from wide.models.having import having
from wide.plan import Dense, Following, Half, Kept, LayerPlan, Plan, Routed, Skipped, scale_name

_ORTHONORMAL_TO = 1e-3
_PROBE_ROWS = 3


def check_plan(plan: Plan, specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a plan that cannot be executed on a model, or tensors that are not the plan's.

    On the meta device only names and shapes of tensors are looked at. Raises ShapeError if sizes, names or values do
    not fit, and says which do; UnsupportedModelError if the structure does not allow what the plan says.
    """
    if len(plan.layers) != len(specs):
        raise ShapeError(f"the plan has {len(plan.layers)} layers, the model {len(specs)}")
    for spec, layer in zip(specs, plan.layers, strict=True):
        _check_attention(layer.attention, spec.attention, f"layer {spec.index}: attention")
        _check_ffn(layer, spec, f"layer {spec.index}: FFN")
    if len(counts := first_tokens(plan)) > 1:
        raise ShapeError(f"all routers of a plan protect as many first tokens or none, this one says {sorted(counts)}")
    stream, width = plan.stream, specs[0].hidden_size
    if stream is not None and not (stream.width == width and 1 <= stream.kept <= stream.width):
        raise ShapeError(
            f"the plan keeps {stream.kept} of {stream.width} dimensions of the stream; the model has {width}, of which "
            "at least 1 stays"
        )
    check_tensors(plan, tensors)
    if any(isinstance(half, Routed) and half.evicts for *_, half in plan.halves()):
        require_own_keys(specs, "none can evict its own; leave evicts out")
    for spec, layer in zip(specs, plan.layers, strict=True):
        if stream is not None:
            _require_plain_stream(spec)
        if any(isinstance(half, Skipped) for _, half in layer.halves()):
            _require_nothing_added(spec)


def first_tokens(plan: Plan) -> set[int]:
    """Return the numbers of first tokens that routers of a plan protect, of those that protect any."""
    return {half.first_tokens for *_, half in plan.halves() if isinstance(half, Routed)} - {0}


def attention_group_sizes(spec: AttentionSpec) -> list[int]:
    """Return sizes in whole query heads that are divisors or multiples of the heads per KV head."""
    per_kv = spec.num_query_heads // spec.num_kv_heads
    heads = [n for n in divisors(spec.num_query_heads) if per_kv % n == 0 or n % per_kv == 0]
    return [n * spec.head_dim for n in heads]


def check_tensors(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not hold the values of a plan; on the meta device only names and shapes are looked at.

    Raises ShapeError if a name is missing or surplus, a shape differs, a value is not finite, the scales keep another
    number of units than the plan says, or a basis is not orthonormal.
    """
    wrong = misfit(plan.tensor_shapes(), tensors)
    if wrong is not None:
        raise ShapeError(f"tensors= does not fit the plan: {wrong}; Plan.tensor_shapes() lists what the plan needs")
    for name, found in tensors.items():
        if not found.is_meta and not name.endswith(".scale"):
            _require_orthonormal(name, found)
    for index, sublayer, half in plan.halves():
        name = scale_name(index, sublayer)
        if not isinstance(half, Kept) or tensors[name].is_meta:
            continue
        if (kept := int((tensors[name] != 0).sum())) != half.kept:
            raise ShapeError(f"the plan keeps {half.kept} units, but {name} has {kept} scales that are not 0")


def misfit(shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> str | None:
    """Return in words what of named tensors does not fit the shapes that are wanted; None if all do and are finite."""
    missing, surplus = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing or surplus:
        return f"{len(missing)} missing {missing[:3]}, {len(surplus)} surplus {surplus[:3]}"
    for name, shape in shapes.items():
        found = tensors[name]
        if tuple(found.shape) != tuple(shape):
            return f"{name} has shape {tuple(found.shape)}, and {tuple(shape)} is needed"
        if not found.is_meta and not torch.isfinite(found).all():
            return f"{name} holds values that are not finite"
    return None


def _require_orthonormal(name: str, basis: Tensor) -> None:
    columns = basis.detach().double()
    error = (columns.T @ columns - torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)).abs().max()
    if not float(error) <= _ORTHONORMAL_TO:
        raise ShapeError(
            f"the columns of {name} are not orthonormal: B^T B differs from 1 by {float(error):.2g}, at most "
            f"{_ORTHONORMAL_TO:g} is allowed; orthonormalise them (torch.linalg.qr)"
        )


def _check_attention(half: Half, spec: AttentionSpec, where: str) -> None:
    if isinstance(half, Following):
        raise ShapeError(f"{where} cannot follow anything; only an FFN can")
    if not isinstance(half, Kept | Routed):
        return
    _check_width(half.grouping.width, spec.query_width, where)
    size, legal = half.grouping.group_size, attention_group_sizes(spec)
    if isinstance(half, Routed) and size not in legal:
        raise ShapeError(f"{where} group size {size} is not one of {legal} channels")
    if isinstance(half, Kept) and size % spec.head_dim:
        raise ShapeError(f"{where}: units of {size} channels are not whole query heads of {spec.head_dim}")


def _check_ffn(layer: LayerPlan, spec: BlockSpec, where: str) -> None:
    half, attention = layer.ffn, layer.attention
    if isinstance(half, Dense):
        return
    ffn = feed_forward(spec)
    if isinstance(half, Kept | Routed):
        _check_width(half.grouping.width, ffn.width, where)
    if isinstance(half, Routed) and half.evicts:
        raise ShapeError(f"{where} has no keys and values to evict; only an attention evicts")
    if isinstance(half, Following) and not isinstance(attention, Routed):
        raise ShapeError(f"{where} follows the attention, which has no router; make it Routed")
    if isinstance(half, Following) and isinstance(attention, Routed) and attention.grouping.num_groups != 1:
        raise ShapeError(f"{where} follows {attention.grouping.num_groups} groups; it needs one (Grouping.whole)")


def _check_width(planned: int, width: int, where: str) -> None:
    if planned != width:
        raise ShapeError(f"{where} is {width} channels wide, the plan says {planned}")


def _require_plain_stream(spec: BlockSpec) -> None:
    """Refuse layers that do something else with the stream than add the outputs of two sublayers one by one."""
    where = f"layer {spec.index} ({type(spec.layer).__name__})"
    norms = [None if part is None else part.pre_norm for part in (spec.attention, spec.ffn)]
    if None in norms or norms[0] is norms[1]:
        raise UnsupportedModelError(
            f"{where} has no norm of its own before each sublayer; its stream cannot be projected"
        )
    added = [_probe(spec, seed) for seed in (0, 1)]
    found = _run_with(spec, added[0], added[1])
    if found is not None and not torch.allclose(found, _probe(spec, 2) + added[0] + added[1], rtol=1e-2, atol=1e-2):
        raise UnsupportedModelError(
            f"{where} does not simply add the outputs of its sublayers to the stream (norms after them, multipliers); "
            "its stream cannot be projected"
        )


def _require_nothing_added(spec: BlockSpec) -> None:
    """Refuse layers that turn an output of zeros into something else before they add it to the stream."""
    zeros = torch.zeros_like(_probe(spec, 0))
    found = _run_with(spec, zeros, zeros)
    if found is not None and not torch.equal(found, _probe(spec, 2)):
        raise UnsupportedModelError(
            f"layer {spec.index} ({type(spec.layer).__name__}) changes the stream even where both sublayers give zero, "
            "so none can be skipped"
        )


def _run_with(spec: BlockSpec, attention: Tensor, ffn: Tensor) -> Tensor | None:
    """Return the layer's output on a probe while its sublayers give these outputs; None on the meta device."""
    stream = _probe(spec, 2)
    if stream.is_meta or spec.ffn is None:
        return None
    layer: Any = spec.layer
    with (
        torch.no_grad(),
        having(spec.attention.module, forward=lambda *_, **__: (attention, None)),
        having(spec.ffn.module, forward=lambda *_, **__: ffn),
    ):
        try:
            return hidden_of(layer.forward(stream))
        except (TypeError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"layer {spec.index} ({type(layer).__name__}) reads more than one stream (or inputs of its own, "
                "as in Gemma 3n and 4), so what it adds is unknown; leave no sublayer out, and project no stream"
            ) from error


def _probe(spec: BlockSpec, seed: int) -> Tensor:
    like = next(p for p in spec.layer.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(seed)
    # On the CPU, whatever the default device is: generators of other devices draw other numbers.
    drawn = torch.randn(1, _PROBE_ROWS, spec.hidden_size, generator=generator, device="cpu")
    return drawn.to(device=like.device, dtype=like.dtype)


def placeholder_tensors(plan: Plan) -> dict[str, Tensor]:
    """Return tensors that fit a plan and stand for its values until a checkpoint's are loaded."""
    shapes = plan.tensor_shapes()
    tensors = {name: torch.zeros(shape) if len(shape) == 1 else torch.eye(*shape) for name, shape in shapes.items()}
    for index, name, half in plan.halves():
        if isinstance(half, Kept):
            tensors[scale_name(index, name)][: half.kept] = 1.0
    return tensors
