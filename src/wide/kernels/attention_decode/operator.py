"""Decode attention as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.attention_decode.reference import attention_decode_reference
from wide.kernels.attention_decode.tiles import DecodeTile, default_tile
from wide.kernels.attention_inputs import (
    check_backend,
    check_keys_and_values,
    check_per_sequence,
    check_score_options,
)
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask, random_values, relative_error
from wide.kernels.device import device_facts, triton_obstacle
from wide.kernels.head_units import HeadUnits
from wide.kernels.registration import implement

_NAME = "attention_decode"
# Every program counts all (sequence, unit) pairs in its registers.
_MAX_PAIRS = 16384
_OPTIONS = {"starts": None, "window": None, "soft_cap": None, "scale": None}
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "attention_decode(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? mask, Tensor? starts, int? window,"
    " float? soft_cap, float? scale, str backend, int[] tile) -> Tensor"
)


def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    backend: str,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """Attend with one new token a sequence; skipped (sequence, group) pairs read no keys and no values.

    Args:
        q: Queries, [B, H_q, d]; fp16 or bf16, last stride 1, other strides free.
        k: Key cache with room for T places, [B, T, H_k, d]; a head-major cache goes in as a transposed view.
        v: Value cache, as `k`.
        lengths: Places in use of each sequence, the new token's included, int32 [B], on the device; at most T.
        mask: True = execute, bool [B, N_G]; None = every pair executes.
        starts: First real place of each sequence (left padding), int32 [B]; None = 0.
        window: Keys that the query sees at most, itself included (sliding window); None = all.
        soft_cap: Bound c of the scores, c * tanh(score / c); None = unbounded.
        scale: Factor of the scores; None = 1 / sqrt(d).
        backend: 'torch' or 'triton'.
        tile: How the Triton kernels share out the work; None takes a default for the device.

    Returns:
        [B, H_q, d] in the dtype of `q`, accumulated in float32; zeros for skipped pairs and empty caches.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return torch.ops.wide.attention_decode(  # type: ignore[no-any-return]
        q, k, v, lengths, mask, starts, window, soft_cap, scale, backend, tile or ()
    )


def _run_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    tile: Sequence[int] | None = None,
    **options: Any,
) -> torch.Tensor:
    from wide.kernels.attention_decode import _triton

    chosen = DecodeTile(*tile) if tile else default_tile(device_facts(q.device), q.shape[-1], q.shape[0] * k.shape[2])
    return _triton.attention_decode(q, k, v, lengths, mask, tile=chosen, **{**_OPTIONS, **options})


def _check_mask(q: torch.Tensor, mask: torch.Tensor | None, num_kv_heads: int) -> None:
    num_groups = 1
    if mask is not None:
        if mask.dim() != 2 or mask.dtype != torch.bool or mask.shape[0] != q.shape[0] or mask.device != q.device:
            raise ShapeError(
                f"{_NAME} wants a bool mask [{q.shape[0]}, N_G] on {q.device}, "
                f"got {mask.dtype} {tuple(mask.shape)} on {mask.device}"
            )
        if mask.stride(1) != 1:
            raise ShapeError(f"{_NAME}: the groups of the mask must have stride 1, got {mask.stride()}")
        num_groups = mask.shape[1]
    units = HeadUnits(num_query_heads=q.shape[1], num_kv_heads=num_kv_heads, num_groups=num_groups)
    if q.shape[0] * units.num_units > _MAX_PAIRS:
        raise ShapeError(
            f"{_NAME}: {q.shape[0]} sequences of {units.num_units} head units are more than {_MAX_PAIRS} pairs; "
            "split the batch"
        )


@implement(_LIBRARY, _NAME)
def _impl(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    starts: torch.Tensor | None,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    if q.dim() != 3 or 0 in q.shape:
        raise ShapeError(f"{_NAME} wants q [B, H_q, d], got {tuple(q.shape)}")
    check_keys_and_values(_NAME, q, k, v)
    check_per_sequence(_NAME, "lengths", lengths, q)
    check_per_sequence(_NAME, "starts", starts, q)
    check_score_options(_NAME, window, soft_cap, scale)
    _check_mask(q, mask, k.shape[2])
    check_backend(_NAME, backend, q, others=("torch",))
    options: dict[str, Any] = {"starts": starts, "window": window, "soft_cap": soft_cap, "scale": scale}
    if backend == "triton":
        options["tile"] = tuple(tile) or None
    return ATTENTION_DECODE.backends[backend].run(q, k, v, lengths, mask, **options)  # type: ignore[no-any-return]


@torch.library.register_fake("wide::attention_decode", lib=_LIBRARY)
def _fake(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    del rest
    return q.new_empty(q.shape)


def _triton_supports(device: torch.device, case: Case) -> str | None:
    return triton_obstacle(device, case.dtype)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    batch, room = sizes["batch"], sizes["key_len"]
    cache_shape = (batch, room, sizes["num_kv_heads"], sizes["head_dim"])
    q = random_values(case, (batch, sizes["num_query_heads"], sizes["head_dim"]), device, salt=1)
    k = random_values(case, cache_shape, device, salt=2)
    v = random_values(case, cache_shape, device, salt=3)
    mask = random_mask(case, (batch, sizes["num_groups"]), device)
    # Ragged: full, then ever shorter, down to an empty cache.
    lengths = (room - torch.arange(batch, device=device) * sizes.get("ragged", 0)).clamp_min(0).int()
    starts = (torch.arange(batch, device=device) * sizes.get("padding", 0)).int()
    places = torch.arange(room, device=device)
    unused = (places >= lengths[:, None]) | (places < starts[:, None])
    k[unused] = v[unused] = float("nan")
    if sizes["num_groups"] == sizes["num_kv_heads"]:
        skipped = ~mask[:, None, :].expand(-1, room, -1)
        k[skipped] = v[skipped] = float("nan")
    return {"q": q, "k": k, "v": v, "lengths": lengths, "mask": mask, "starts": starts, **case.options}


def _compare(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    heads = arguments["mask"].repeat_interleave(got.shape[1] // arguments["mask"].shape[1], 1)
    if not torch.equal(got[~heads], torch.zeros_like(got[~heads])):
        return float("inf")
    return relative_error(got[heads], wanted[heads])


def _work(case: Case) -> Work:
    sizes = case.sizes
    pairs = case.active * sizes["batch"] * sizes["key_len"]
    width = sizes["head_dim"] * case.dtype.itemsize
    ends = sizes["batch"] * sizes["num_query_heads"] * width
    return Work(
        flop=int(4 * pairs * sizes["num_query_heads"] * sizes["head_dim"]),
        bytes_read=int(2 * pairs * sizes["num_kv_heads"] * width + ends),
        bytes_written=ends,
    )


def _case(batch: int, room: int, heads: tuple[int, int, int], head_dim: int, **more: Any) -> Case:
    sizes = {
        "batch": batch,
        "key_len": room,
        "num_query_heads": heads[0],
        "num_kv_heads": heads[1],
        "num_groups": heads[2],
        "head_dim": head_dim,
        "ragged": more.pop("ragged", 0),
        "padding": more.pop("padding", 0),
    }
    active = more.pop("active", 0.5)
    return Case(sizes=sizes, dtype=more.pop("dtype", torch.float16), active=active, options=more)


ATTENTION_DECODE = Operator(
    name=_NAME,
    reference=attention_decode_reference,
    backends={
        "torch": Backend(run=attention_decode_reference, supports=anywhere),
        "triton": Backend(run=_run_triton, supports=_triton_supports),
    },
    cases=(
        _case(1, 1, (4, 2, 2), 64, active=1.0),
        _case(2, 3, (4, 1, 1), 128, active=1.0),
        _case(3, 17, (4, 4, 4), 64, active=0.0),
        _case(5, 64, (8, 2, 2), 96, ragged=21),
        _case(3, 127, (8, 4, 4), 64, ragged=50, padding=11),
        _case(3, 127, (6, 2, 1), 64, window=20, padding=60),
        _case(2, 100, (12, 4, 6), 64, soft_cap=2.0, scale=0.3),
        _case(2, 40, (4, 1, 2), 256),
        _case(2, 90, (14, 2, 2), 64, dtype=torch.float32, active=0.8),
        _case(1, 300, (32, 8, 8), 64, active=0.5),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5},
    work=_work,
)
