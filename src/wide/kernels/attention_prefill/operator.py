"""Prefill attention as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.attention_inputs import (
    check_backend,
    check_keys_and_values,
    check_per_sequence,
    check_score_options,
)
from wide.kernels.attention_prefill.reference import attention_prefill_reference, executed
from wide.kernels.attention_prefill.tiles import HopperTile, PrefillTile, can_use_tma, default_tile
from wide.kernels.clear_skipped import cleared
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask, random_values, relative_error
from wide.kernels.device import device_facts, hopper_obstacle, triton_obstacle
from wide.kernels.head_units import HeadUnits
from wide.kernels.registration import implement
from wide.kernels.reordering import SequenceReordering

_NAME = "attention_prefill"
_DENSE_LIMITS = "scaled_dot_product_attention takes no left padding, window, soft cap or query offset here"
_GLUON_HEAD_DIMS = (64, 128)
_GLUON_ROWS = 128
_GLUON_LIMITS = (
    "the Hopper kernel takes half precision, head sizes 64 and 128 and 16-byte strides, and no left padding, window or "
    "soft cap"
)
_OPTIONS = {
    "starts": None,
    "is_causal": True,
    "window": None,
    "soft_cap": None,
    "scale": None,
    "zero_skipped": False,
}
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "attention_prefill(Tensor q, Tensor k, Tensor v, Tensor index, Tensor counts, Tensor? starts, bool is_causal,"
    " int? window, float? soft_cap, float? scale, bool zero_skipped, str backend, int[] tile) -> Tensor"
)


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reordering: SequenceReordering,
    *,
    starts: torch.Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    zero_skipped: bool = False,
    backend: str,
    tile: PrefillTile | HopperTile | None = None,
) -> torch.Tensor:
    """Attend with the executing (token, group) pairs only; K and V are dense.

    The last query stands at the last key, so with T_k > T_q the queries continue a prefix (chunked prefill).

    Args:
        q: Queries, [B, T_q, H_q, d]; fp16 or bf16, last stride 1, other strides free.
        k: Keys, [B, T_k, H_k, d]; a head-major cache goes in as a transposed view.
        v: Values, as `k`.
        reordering: Executing tokens of each (sequence, group); N_G groups of H_q / N_G neighbouring heads.
        starts: First real key of each sequence (left padding), int32 [B]; None = 0.
        is_causal: Whether a query sees no later key.
        window: Keys that a query sees at most, itself included (sliding window); None = all. Needs `is_causal`.
        soft_cap: Bound c of the scores, c * tanh(score / c); None = unbounded.
        scale: Factor of the scores; None = 1 / sqrt(d).
        zero_skipped: Whether skipped pairs hold zeros; otherwise they are unspecified memory.
        backend: 'torch', 'triton', 'gluon' (sm_90; head sizes 64 and 128, without padding, window and soft cap) or
            'dense' (scaled_dot_product_attention, computes everything).
        tile: Tile of the Triton or Gluon kernel; None takes a default for the device.

    Returns:
        [B, T_q, H_q, d] in the dtype of `q`, accumulated in float32.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.

    Source: WIDE, attention with gathered queries; running softmax as in FlashAttention-2.
    """
    return torch.ops.wide.attention_prefill(  # type: ignore[no-any-return]
        q,
        k,
        v,
        reordering.index,
        reordering.counts,
        starts,
        is_causal,
        window,
        soft_cap,
        scale,
        zero_skipped,
        backend,
        tile or (),
    )


def _run_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    tile: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    from wide.kernels.attention_prefill import _triton

    facts = device_facts(q.device)
    if tile:
        chosen = PrefillTile(*tile)
    else:
        uses_tma = can_use_tma(facts, k) and can_use_tma(facts, v)
        chosen = default_tile(facts, q.shape[-1], uses_tma=uses_tma)
    return _triton.attention_prefill(q, k, v, index, counts, tile=chosen, **{**_OPTIONS, **options})


def _run_gluon(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    zero_skipped: bool = False,
    tile: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    unused = sorted(name for name, value in options.items() if value is not None)
    fits = can_use_tma(device_facts(q.device), k) and can_use_tma(device_facts(q.device), v)
    if unused or not fits or q.shape[-1] not in _GLUON_HEAD_DIMS or q.shape[2] > _GLUON_ROWS * k.shape[2]:
        raise UnsupportedBackendError(
            f"{_NAME}: {_GLUON_LIMITS}, got {unused or 'no such option'}, head size {q.shape[-1]}, strides "
            f"{k.stride()} and {v.stride()}; choose backend='triton'"
        )
    from wide.kernels.attention_prefill import _gluon

    chosen = HopperTile(*tile) if tile else HopperTile()
    return _gluon.attention_prefill(
        q, k, v, index, counts, tile=chosen, is_causal=is_causal, scale=scale, zero_skipped=zero_skipped
    )


def _run_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    zero_skipped: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend with everything; skipped queries may hold anything, so a query's row is all that they can spoil."""
    unused = {name: value for name, value in options.items() if value is not None}
    if unused or (is_causal and q.shape[1] != k.shape[1]):
        raise UnsupportedBackendError(
            f"{_NAME}: {_DENSE_LIMITS}, got {sorted(unused) or 'an offset'}; choose backend='triton' or 'torch'"
        )
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    out = out.transpose(1, 2).contiguous()
    if zero_skipped:
        cleared(out.view(q.shape[0] * q.shape[1], -1), executed(index, counts, q.shape[1]).flatten(0, 1))
    return out


def _check_lists(q: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> None:
    if index.dim() != 3 or index.shape[::2] != q.shape[:2] or counts.shape != index.shape[:2]:
        raise ShapeError(
            f"{_NAME} wants index [B, N_G, T_q] and counts [B, N_G] for q {tuple(q.shape)}, "
            f"got {tuple(index.shape)} and {tuple(counts.shape)}; make them with reorder_sequences"
        )
    for name, tensor in (("index", index), ("counts", counts)):
        if tensor.dtype != torch.int32 or tensor.device != q.device or not tensor.is_contiguous():
            raise ShapeError(f"{_NAME}: {name} must be contiguous int32 on {q.device}, got {tensor.dtype}")


@implement(_LIBRARY, _NAME)
def _impl(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor | None,
    is_causal: bool,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    zero_skipped: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    if q.dim() != 4 or 0 in q.shape:
        raise ShapeError(f"{_NAME} wants q [B, T_q, H_q, d], got {tuple(q.shape)}")
    check_keys_and_values(_NAME, q, k, v)
    check_per_sequence(_NAME, "starts", starts, q)
    check_score_options(_NAME, window, soft_cap, scale)
    _check_lists(q, index, counts)
    HeadUnits(num_query_heads=q.shape[2], num_kv_heads=k.shape[2], num_groups=counts.shape[1])
    if window is not None and not is_causal:
        raise ShapeError(f"{_NAME}: a sliding window needs is_causal=True")
    if is_causal and k.shape[1] < q.shape[1]:
        raise ShapeError(f"{_NAME}: {q.shape[1]} causal queries need at least as many keys, got {k.shape[1]}")
    check_backend(_NAME, backend, q, others=("torch", "dense"), hopper=("gluon",))
    options: dict[str, Any] = {
        "starts": starts,
        "is_causal": is_causal,
        "window": window,
        "soft_cap": soft_cap,
        "scale": scale,
        "zero_skipped": zero_skipped,
    }
    if backend in ("triton", "gluon"):
        options["tile"] = tuple(tile) or None
    return ATTENTION_PREFILL.backends[backend].run(q, k, v, index, counts, **options)  # type: ignore[no-any-return]


@torch.library.register_fake("wide::attention_prefill", lib=_LIBRARY)
def _fake(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    del rest
    return q.new_empty(q.shape)


def _triton_supports(device: torch.device, case: Case) -> str | None:
    return triton_obstacle(device, case.dtype)


def _gluon_supports(device: torch.device, case: Case) -> str | None:
    limited = {"window", "soft_cap"} & set(case.options) or case.sizes.get("padding", 0)
    limited = limited or case.dtype == torch.float32 or case.sizes["head_dim"] not in _GLUON_HEAD_DIMS
    return hopper_obstacle(device) or (_GLUON_LIMITS if limited else None)


def _dense_supports(device: torch.device, case: Case) -> str | None:
    del device
    is_causal = case.options.get("is_causal", True)
    limited = {"window", "soft_cap"} & set(case.options) or case.sizes.get("padding", 0)
    offset = is_causal and case.sizes["query_len"] != case.sizes["key_len"]
    return _DENSE_LIMITS if limited or offset else None


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    batch, num_queries, num_heads, head_dim = (sizes[n] for n in ("batch", "query_len", "num_query_heads", "head_dim"))
    keys_shape = (batch, sizes["key_len"], sizes["num_kv_heads"], head_dim)
    mask = random_mask(case, (batch, num_queries, sizes["num_groups"]), device)
    places = torch.arange(num_queries, device=device)
    # Executing tokens first, in order; what follows them must not matter, so it is out of range.
    order = torch.argsort(torch.where(mask, 0, num_queries) + places[:, None], dim=1).transpose(1, 2)
    counts = mask.sum(1).int()
    arguments: dict[str, Any] = {
        "q": random_values(case, (batch, num_queries, num_heads, head_dim), device, salt=1),
        "k": random_values(case, keys_shape, device, salt=2),
        "v": random_values(case, keys_shape, device, salt=3),
        "index": torch.where(places < counts[..., None], order, 1 << 30).int().contiguous(),
        "counts": counts,
        **case.options,
    }
    skipped = ~mask.repeat_interleave(num_heads // sizes["num_groups"], 2)
    arguments["q"][skipped] = float("nan")
    if sizes.get("padding", 0):
        starts = (torch.arange(batch, device=device) * sizes["padding"]).clamp_max(sizes["key_len"]).int()
        padding = torch.arange(sizes["key_len"], device=device) < starts[:, None]
        arguments["k"][padding] = arguments["v"][padding] = float("nan")
        arguments["starts"] = starts
    return arguments


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    mask = executed(arguments["index"], arguments["counts"], got.shape[1])
    heads = mask.repeat_interleave(got.shape[2] // mask.shape[2], 2)
    if arguments.get("zero_skipped") and got[~heads].any():
        return float("inf")
    return relative_error(got[heads], wanted[heads])


def _work(case: Case) -> Work:
    sizes = case.sizes
    queries, keys = sizes["query_len"], sizes["key_len"]
    seen = queries * keys - (queries * (queries - 1) // 2 if case.options.get("is_causal", True) else 0)
    rows = case.active * sizes["batch"] * sizes["num_query_heads"]
    width = case.dtype.itemsize * sizes["head_dim"]
    return Work(
        flop=int(4 * sizes["head_dim"] * rows * seen),
        bytes_read=int(width * (rows * queries + 2 * sizes["batch"] * keys * sizes["num_kv_heads"])),
        bytes_written=int(width * rows * queries),
    )


def _case(lengths: tuple[int, int], heads: tuple[int, int, int], head_dim: int, **more: Any) -> Case:
    sizes = {
        "batch": 2,
        "query_len": lengths[0],
        "key_len": lengths[1],
        "num_query_heads": heads[0],
        "num_kv_heads": heads[1],
        "num_groups": heads[2],
        "head_dim": head_dim,
        "padding": more.pop("padding", 0),
    }
    active = more.pop("active", 0.5)
    return Case(sizes=sizes, dtype=more.pop("dtype", torch.float16), active=active, options=more)


ATTENTION_PREFILL = Operator(
    name=_NAME,
    reference=attention_prefill_reference,
    backends={
        "torch": Backend(run=attention_prefill_reference, supports=anywhere),
        "triton": Backend(run=_run_triton, supports=_triton_supports),
        "gluon": Backend(run=_run_gluon, supports=_gluon_supports),
        "dense": Backend(run=_run_dense, supports=_dense_supports),
    },
    cases=(
        _case((1, 1), (4, 2, 2), 64),
        _case((3, 3), (4, 1, 1), 128, active=1.0),
        _case((17, 17), (4, 4, 2), 64, active=0.0, zero_skipped=True),
        _case((64, 64), (4, 2, 4), 96, zero_skipped=True),
        _case((127, 127), (8, 2, 2), 64),
        _case((17, 80), (6, 2, 2), 64),
        _case((40, 40), (4, 2, 2), 64, padding=19),
        _case((40, 73), (4, 2, 2), 64, padding=33, window=21),
        _case((127, 127), (2, 1, 1), 64, window=8, active=0.9),
        _case((33, 50), (2, 1, 2), 64, soft_cap=2.0, scale=0.3),
        _case((33, 20), (3, 1, 1), 64, is_causal=False, padding=5),
        _case((20, 20), (2, 1, 1), 256, active=0.7),
        _case((50, 50), (12, 4, 6), 64, dtype=torch.float32),
        _case((30, 45), (14, 2, 1), 64, active=0.3),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5},
    work=_work,
)
