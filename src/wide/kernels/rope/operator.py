"""Rotary position embedding with cache update as an operator of torch: validation, registration, contract."""

from collections.abc import Mapping
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.attention_inputs import check_per_sequence
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask, random_values, relative_error
from wide.kernels.device import triton_obstacle
from wide.kernels.registration import implement
from wide.kernels.rope.reference import rope_to_cache_reference

_NAME = "rope_to_cache"
_OPTIONAL = ("mask", "q_norm", "k_norm")
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "rope_to_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_cache,"
    " Tensor(b!) v_cache, Tensor? mask, Tensor? q_norm, Tensor? k_norm, float eps, str backend) -> Tensor"
)


def rope_to_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    backend: str,
) -> torch.Tensor:
    """Turn queries and keys by their positions, and write keys and values into the cache.

    Token t of sequence b stands at position positions[b] + t, which is also its place in the cache.

    Args:
        q: Queries, [B, T, H_q, d]; last stride 1, other strides free; skipped heads may hold anything.
        k: Keys, [B, T, H_k, d], as `q`.
        v: Values, as `k`.
        cos: Cosines by position, [positions, d], contiguous.
        sin: Sines, as `cos`.
        positions: Position of each sequence's first token here, int32 [B], on the device.
        k_cache: Written at the tokens' places, [B, T_max, H_k, d]; a head-major cache goes in as a transposed view.
        v_cache: As `k_cache`, with the same strides.
        mask: Groups of query heads that each token executes, bool [B * T, N_G], rows contiguous, N_G a divisor of H_q;
            None = all.
        q_norm: Weight of an RMSNorm of each query head before the turn, [d].
        k_norm: The same for key heads; given if and only if `q_norm` is.
        eps: Of both norms.
        backend: 'torch' or 'triton'.

    Returns:
        The turned queries, [B, T, H_q, d], contiguous; heads that `mask` skips hold anything.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return torch.ops.wide.rope_to_cache(  # type: ignore[no-any-return]
        q, k, v, cos, sin, positions, k_cache, v_cache, mask, q_norm, k_norm, eps, backend
    )


def _check_backend(tensor: torch.Tensor, backend: str) -> None:
    if backend == "triton":
        obstacle = triton_obstacle(tensor.device)
        if obstacle is not None:
            raise UnsupportedBackendError(f"{_NAME}: {obstacle}; choose backend='torch'")
    elif backend != "torch":
        raise UnsupportedBackendError(f"{_NAME} has the backends 'torch' and 'triton', got {backend!r}")


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    head_dim = q.shape[-1]
    fits = q.dim() == 4 and k.shape == v.shape == (*q.shape[:2], k.shape[2], head_dim) and head_dim % 2 == 0
    if not fits or any(tensor.stride(-1) != 1 for tensor in (q, k, v, k_cache, v_cache)):
        raise ShapeError(
            f"{_NAME} wants q [B, T, H_q, d] and k, v [B, T, H_k, d] with an even d and last stride 1, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    same = k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
    room = (q.shape[0], k_cache.shape[1], k.shape[2], head_dim)
    if not same or tuple(k_cache.shape) != room or k_cache.shape[1] < q.shape[1]:
        raise ShapeError(
            f"{_NAME}: both caches must be [{q.shape[0]}, T_max >= {q.shape[1]}, {k.shape[2]}, {head_dim}] with equal "
            f"strides, got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )


def _check_mask(mask: torch.Tensor, q: torch.Tensor) -> None:
    tokens, num_heads = q.shape[0] * q.shape[1], q.shape[2]
    fits = mask.dtype == torch.bool and mask.dim() == 2 and mask.shape[0] == tokens and mask.shape[1] > 0
    if not fits or num_heads % mask.shape[1] or mask.stride(1) != 1 or mask.device != q.device:
        raise ShapeError(
            f"{_NAME} wants a bool mask [{tokens}, a divisor of {num_heads}] with contiguous rows on {q.device}, got "
            f"{mask.dtype} {tuple(mask.shape)} with strides {mask.stride()} on {mask.device}"
        )


@implement(_LIBRARY, _NAME)
def _impl(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    mask: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    backend: str,
) -> torch.Tensor:
    _check_shapes(q, k, v, k_cache, v_cache)
    check_per_sequence(_NAME, "positions", positions, q)
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] != q.shape[3] or not cos.is_contiguous():
        raise ShapeError(f"{_NAME} wants contiguous cos and sin [positions, {q.shape[3]}], got {tuple(cos.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ShapeError(f"{_NAME}: q_norm and k_norm go together")
    if mask is not None:
        _check_mask(mask, q)
    _check_backend(q, backend)
    run: Any = {"torch": rope_to_cache_reference, "triton": _run_triton}[backend]
    return run(  # type: ignore[no-any-return]
        q, k, v, cos, sin, positions, k_cache, v_cache, mask=mask, q_norm=q_norm, k_norm=k_norm, eps=eps
    )


@torch.library.register_fake(f"wide::{_NAME}", lib=_LIBRARY)
def _fake(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    del rest
    return q.new_empty(q.shape)


def _run_triton(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    from wide.kernels.rope import _triton

    return _triton.rope_to_cache(*tensors, **{"mask": None, "q_norm": None, "k_norm": None, "eps": 1e-6, **options})


def _triton_supports(device: torch.device, case: Case) -> str | None:
    del case
    return triton_obstacle(device)


def _build(case: Case, device: torch.device) -> dict[str, Any]:
    batch, length, room, heads, kv_heads, dim = (
        case.sizes[name] for name in ("batch", "length", "room", "num_query_heads", "num_kv_heads", "head_dim")
    )
    fused = random_values(case, (batch, length, heads + 2 * kv_heads, dim), device, salt=1)
    q, k, v = fused.split((heads, kv_heads, kv_heads), 2)
    angles = torch.arange(room)[:, None] * 0.5 ** torch.arange(dim // 2)[None, :]
    angles = torch.cat((angles, angles), 1).to(device)
    caches = [torch.zeros(batch, kv_heads, room, dim, dtype=case.dtype, device=device) for _ in range(2)]
    norms = [
        random_values(case, (dim,), device, salt=salt) if case.options.get("has_norm") else None for salt in (2, 3)
    ]
    groups = case.options.get("num_groups", 0)
    mask = random_mask(case, (batch * length, groups), device) if groups else None
    if mask is not None:
        q.masked_fill_(~_heads_of(mask, q), float("nan"))
    return {
        "q": q,
        "k": k,
        "v": v,
        "cos": angles.cos().to(case.dtype),
        "sin": angles.sin().to(case.dtype),
        "positions": (torch.arange(batch, device=device) * 3 % (room - length + 1)).int(),
        "k_cache": caches[0].transpose(1, 2),
        "v_cache": caches[1].transpose(1, 2),
        "mask": mask,
        "q_norm": norms[0],
        "k_norm": norms[1],
    }


def _in_copies(run: Any) -> Any:
    """Return `run` on copies of the caches, returning them too, so that a contract can compare what was written."""

    def runs(**arguments: Any) -> tuple[torch.Tensor, ...]:
        caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
        order = ("q", "k", "v", "cos", "sin", "positions")
        options = {name: arguments[name] for name in _OPTIONAL}
        out = run(*(arguments[name] for name in order), *caches.values(), **options)
        return out, *caches.values()

    return runs


def _heads_of(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return which heads execute, bool [B, T, H_q, 1]."""
    return mask.repeat_interleave(q.shape[2] // mask.shape[1], 1).view(*q.shape[:3], 1)


def _compare(arguments: Mapping[str, Any], got: Any, wanted: Any) -> float:
    mask = arguments["mask"]
    if mask is not None:
        # Skipped heads hold anything.
        heads = _heads_of(mask, wanted[0])
        got, wanted = ((torch.where(heads, turned, 0), *caches) for turned, *caches in (got, wanted))
    return max(relative_error(g, w) for g, w in zip(got, wanted, strict=True))


def _work(case: Case) -> Work:
    tokens = case.sizes["batch"] * case.sizes["length"]
    heads = case.sizes["num_query_heads"] * (case.active if case.options.get("num_groups") else 1.0)
    values = int(tokens * (heads + 2 * case.sizes["num_kv_heads"]) * case.sizes["head_dim"])
    return Work(flop=3 * values, bytes_read=values * case.dtype.itemsize, bytes_written=values * case.dtype.itemsize)


def _case(
    batch: int, length: int, room: int, heads: tuple[int, int, int], dtype: torch.dtype = torch.float16, **options: Any
) -> Case:
    names = ("batch", "length", "room", "num_query_heads", "num_kv_heads", "head_dim")
    sizes = dict(zip(names, (batch, length, room, *heads), strict=True))
    return Case(sizes=sizes, dtype=dtype, options=options)


ROPE = Operator(
    name=_NAME,
    reference=_in_copies(rope_to_cache_reference),
    backends={
        "torch": Backend(run=_in_copies(rope_to_cache_reference), supports=anywhere),
        "triton": Backend(run=_in_copies(_run_triton), supports=_triton_supports),
    },
    cases=(
        _case(1, 1, 1, (4, 2, 16)),
        _case(3, 1, 9, (14, 2, 64)),
        _case(2, 5, 7, (4, 1, 96)),
        _case(2, 3, 4, (6, 6, 16), has_norm=True),
        _case(1, 4, 8, (32, 8, 128), torch.float32, has_norm=True),
        _case(2, 5, 7, (14, 2, 64), num_groups=2),
        _case(1, 7, 8, (12, 4, 16), torch.float32, num_groups=12, has_norm=True),
        _case(3, 2, 4, (32, 8, 128), num_groups=8),
    ),
    build=_build,
    compare=_compare,
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    work=_work,
)
