"""Rotary position embedding with cache update as an operator of torch."""

from typing import Any

import torch

from wide.errors import ShapeError
from wide.kernels.dispatch import AnyShape, Backends
from wide.kernels.registration import check_tensor, operator
from wide.kernels.rope.reference import rope_to_cache_reference

_NAME = "rope_to_cache"
BACKENDS = Backends(_NAME, __package__, rope_to_cache_reference)


@operator(lambda q: q.new_empty(q.shape), mutates=["k_cache", "v_cache"])
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
    places: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    interleaved: bool = False,
    backend: str,
) -> torch.Tensor:
    """Turn queries and keys by their positions, and write keys and values into the cache.

    Token t of sequence b stands at position positions[b] + t, which is also its place in the cache.

    Args:
        q: Queries, [B, T, H_q, d]; last stride 1, other strides free; skipped heads may hold anything.
        k: Keys, [B, T, H_k, d], as `q`.
        v: Values, as `k`.
        cos: Cosines by position, [positions, r], contiguous, each pair's twice: in columns i and i + r / 2. Channels
            from r <= d on stay as they are, all of them where r = 0. Products are rounded to its dtype, the result to
            that of `q`.
        sin: Sines, as `cos`.
        positions: Position of each sequence's first token here, int32 [B], on the device.
        k_cache: Written at the tokens' places, [B, T_max, H_k, d]; a head-major cache goes in as a transposed view.
        v_cache: As `k_cache`, with the same strides.
        places: Where each token's key and value go in caches [1, places, H_k, d] that all sequences share, int64
            [B * T]; None = in its own sequence's, at its position.
        mask: Groups of query heads that each token executes, bool [B * T, N_G], rows contiguous, N_G a divisor of H_q;
            None = all.
        q_norm: Weight of an RMSNorm of each query head before the turn, [d].
        k_norm: The same for key heads; given if and only if `q_norm` is.
        unit_offset: Whether the norms' factor is 1 + weight (Gemma).
        interleaved: Whether pair i is channels 2 i and 2 i + 1 (GLM), not i and i + r / 2.

    Returns:
        The turned queries, [B, T, H_q, d], contiguous; heads that `mask` skips hold anything.
    """
    head_dim = q.shape[-1]
    fits = q.dim() == 4 and k.shape == v.shape == (*q.shape[:2], k.shape[2], head_dim) and head_dim % 2 == 0
    if not fits or any(tensor.stride(-1) != 1 for tensor in (q, k, v, k_cache, v_cache)):
        raise ShapeError(
            f"{_NAME} wants q [B, T, H_q, d] and k, v [B, T, H_k, d] with an even d and last stride 1, got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    same = k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
    room = (q.shape[0] if places is None else 1, k_cache.shape[1], k.shape[2], head_dim)
    if not same or tuple(k_cache.shape) != room or k_cache.shape[1] < q.shape[1]:
        raise ShapeError(
            f"{_NAME}: both caches must be [{room[0]}, T_max >= {q.shape[1]}, {k.shape[2]}, {head_dim}] with equal "
            f"strides, got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    tokens, num_heads = q.shape[0] * q.shape[1], q.shape[2]
    check_tensor(_NAME, "places", places, torch.int64, (tokens,))
    check_tensor(_NAME, "positions", positions, torch.int32, q.shape[:1])
    fits = cos.shape == sin.shape and cos.dim() == 2 and cos.shape[1] <= head_dim and cos.shape[1] % 2 == 0
    if not fits or not cos.is_contiguous() or not sin.is_contiguous():
        raise ShapeError(
            f"{_NAME} wants contiguous cos and sin [positions, an even number up to {head_dim}], got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ShapeError(f"{_NAME}: q_norm and k_norm go together")
    if mask is not None:
        check_tensor(_NAME, "mask", mask, torch.bool, (tokens, mask.shape[-1]), "last stride 1")
        if num_heads % max(mask.shape[-1], 1):
            raise ShapeError(f"{_NAME}: {mask.shape[-1]} groups do not divide {num_heads} query heads")
    options: dict[str, Any] = {"places": places, "mask": mask, "q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    options |= {"unit_offset": unit_offset, "interleaved": interleaved}
    tensors = q, k, v, cos, sin, positions, k_cache, v_cache
    return BACKENDS.run(backend, q.device, AnyShape(q.dtype), *tensors, **options)
