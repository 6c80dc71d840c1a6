"""What both attention operators ask of their tensors."""

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.device import hopper_obstacle, interprets_triton, triton_obstacle

_LOG2_E = 1.4426950408889634
_HALF = (torch.float16, torch.bfloat16)


def check_backend(
    operator: str, backend: str, tensor: torch.Tensor, *, others: tuple[str, ...], hopper: tuple[str, ...] = ()
) -> None:
    """Refuse a backend that cannot run on the device or in the dtype of `tensor`.

    Args:
        operator: Name for messages.
        backend: What the caller asked for.
        tensor: The queries.
        others: Backends beside 'triton'; they run everywhere.
        hopper: Backends that run on sm_90 only.

    Raises:
        UnsupportedBackendError: The message names operator, backend and reason.
    """
    if backend in others:
        return
    if backend != "triton" and backend not in hopper:
        raise UnsupportedBackendError(f"{operator} has the backends {('triton', *hopper, *others)}, got {backend!r}")
    reason = hopper_obstacle(tensor.device) if backend in hopper else triton_obstacle(tensor.device, tensor.dtype)
    if reason is None and tensor.dtype not in _HALF and not (interprets_triton() and tensor.dtype == torch.float32):
        reason = f"the kernels take float16 and bfloat16, got {tensor.dtype}"
    if reason is not None:
        raise UnsupportedBackendError(f"{operator}: {reason}; choose backend='torch'")


def check_keys_and_values(operator: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse K and V that do not fit each other or the queries.

    Args:
        operator: Name for messages.
        q: Queries, [..., H_q, d].
        k: Keys, [B, T_k, H_k, d]; any strides of the first three dimensions.
        v: Values, as `k`.

    Raises:
        ShapeError: If shapes, dtypes, devices or strides do not fit.
    """
    if k.dim() != 4 or k.shape != v.shape or 0 in k.shape:
        raise ShapeError(f"{operator} wants k and v of one shape [B, T_k, H_k, d], got {_of(k)} and {_of(v)}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[2]:
        raise ShapeError(
            f"{operator}: q {_of(q)} and k {_of(k)} must agree in batch and head size, "
            "and the query heads must be a multiple of the KV heads"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ShapeError(
                f"{operator}: {name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; "
                "convert them to one dtype and device"
            )
        if tensor.stride(-1) != 1:
            raise ShapeError(f"{operator}: the last dimension of {name} must have stride 1, got {tensor.stride()}")


def check_per_sequence(operator: str, name: str, tensor: torch.Tensor | None, q: torch.Tensor) -> None:
    """Refuse a per-sequence number that is not int32 [B], contiguous, on the device of `q`.

    Args:
        operator: Name for messages.
        name: Of the number, for messages.
        tensor: int32 [B], or None, which is never refused.
        q: Queries, [B, ...].

    Raises:
        ShapeError: If shape, dtype, device or strides do not fit.
    """
    if tensor is None:
        return
    if tensor.shape != q.shape[:1] or tensor.dtype != torch.int32 or tensor.device != q.device:
        raise ShapeError(f"{operator}: {name} must be int32 [{q.shape[0]}] on {q.device}, got {_of(tensor)}")
    if not tensor.is_contiguous():
        raise ShapeError(f"{operator}: {name} must be contiguous")


def check_score_options(operator: str, window: int | None, soft_cap: float | None, scale: float | None) -> None:
    """Refuse a window below one key and a soft cap or scale that is not positive.

    Args:
        operator: Name for messages.
        window: Keys that a query sees, or None.
        soft_cap: Of the scores, or None.
        scale: Of the scores before the cap, or None.

    Raises:
        ShapeError: If one of them is not positive.
    """
    for name, value in (("window", window), ("soft_cap", soft_cap), ("scale", scale)):
        if value is not None and value <= 0:
            raise ShapeError(f"{operator}: {name} must be positive or None, got {value}")


def score_factors(scale: float | None, soft_cap: float | None, head_dim: int) -> tuple[float, float, float]:
    """Return how kernels with a softmax of base 2 turn products of q and k into exponents.

    Returns:
        Factor of the (capped) scores, then for a soft cap c the factor inside exp2(...) of tanh, and c itself.
    """
    factor = head_dim**-0.5 if scale is None else scale
    if soft_cap is None:
        return factor * _LOG2_E, 1.0, 1.0
    return _LOG2_E, 2.0 * _LOG2_E * factor / soft_cap, soft_cap


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
