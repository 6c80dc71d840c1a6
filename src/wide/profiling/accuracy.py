"""Rounding: errors of the sparse and the dense half-precision path against float64, on the same inputs."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from wide.kernels.attention_decode import attention_decode
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.contract import relative_error
from wide.kernels.device import hopper_obstacle
from wide.kernels.gemm_k import gemm_k
from wide.kernels.gemm_k_rows import gemm_k_rows
from wide.kernels.gemm_mn import gemm_mn
from wide.kernels.gemv import gemv_k, gemv_mn
from wide.kernels.native.build import obstacle as native_obstacle
from wide.kernels.reorder import reorder, reorder_patterns, reorder_sequences
from wide.kernels.reorder_rows import reorder_rows
from wide.profiling.backends import HOPPER_OPERATORS, TIMED

ALLOWED = 1.2
"""Largest error of the sparse path as a multiple of the dense path's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Shapes on which errors are measured; by default Llama-3.1-8B's, with few rows.

    Args:
        rows: Of products.
        hidden: Channels of the residual stream.
        ffn: Channels of the FFN.
        group_size: Of the FFN.
        tokens: Of a sequence, in both attentions.
        batch: Sequences of a decode step.
        heads: Query heads.
        kv_heads: KV heads, and groups of query heads.
        head_dim: Channels of a head.
    """

    rows: int = 512
    hidden: int = 4096
    ffn: int = 14336
    group_size: int = 128
    tokens: int = 512
    batch: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """One operator on one input: the exact result, the dense path's, and how to compute it with a backend."""

    exact: Tensor
    dense: Tensor
    run: Callable[[str], Tensor]
    executes: Tensor | None = None
    without: tuple[str, ...] = ()
    """Backends that do not take it."""


def measure_accuracy(
    names: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    backends: Sequence[str] = TIMED,
    sizes: Sizes | None = None,
) -> list[dict[str, Any]]:
    """Return one JSON-ready object per operator and backend: both errors, their ratio, and whether it is within 1.2.

    Args:
        names: Operators as benches name them; those without such a measurement are left out.
        device: Where.
        dtype: Of the inputs.
        backends: To measure; 'gluon' and 'cuda' only where the device, the installation and the operator have them.
        sizes: Shapes; None takes the usual ones.
    """
    torch.manual_seed(5)
    results = []
    for name in names:
        if name not in _PROBLEMS:
            continue
        for operator, make in _PROBLEMS[name].items():
            problem = make(sizes or Sizes(), device, dtype)
            dense = _error(problem.dense, problem)
            for backend in backends:
                if backend in problem.without or not _has(name, backend, device):
                    continue
                error = _error(problem.run(backend), problem)
                ratio = error / max(dense, 1e-30)
                facts = {"error": error, "dense_error": dense, "ratio": ratio, "within": ratio <= ALLOWED}
                results.append({"operator": operator, "backend": backend, **facts})
    return results


def _has(name: str, backend: str, device: torch.device) -> bool:
    """Return whether an operator has a backend there, so far as the backend is one for Hopper alone."""
    if backend not in HOPPER_OPERATORS:
        return True
    missing = hopper_obstacle(device) or (native_obstacle() if backend == "cuda" else None)
    return name in HOPPER_OPERATORS[backend] and missing is None


def describe_accuracy(entry: dict[str, Any]) -> str:
    """Return one result in a line."""
    verdict = "" if entry["within"] else f"  RED: more than {ALLOWED}"
    return (
        f"accuracy: {entry['operator']} ({entry['backend']}) error {entry['error']:.3e}, dense "
        f"{entry['dense_error']:.3e}, ratio {entry['ratio']:.3f}{verdict}"
    )


def _error(got: Tensor, problem: _Problem) -> float:
    if problem.executes is None:
        return relative_error(got, problem.exact)
    return relative_error(got[problem.executes], problem.exact[problem.executes])


def _helper(device: torch.device) -> str:
    """Return the backend that sorts: lists are exact, whoever makes them."""
    return "triton" if device.type == "cuda" else "torch"


def _mask(*shape: int, device: torch.device) -> Tensor:
    mask = torch.rand(shape, device=device) < 0.5
    mask[..., 0] = True
    return mask


def _gated(sizes: Sizes, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, gate, up, mask and the exact product of a gated FFN."""
    x = torch.randn(rows, sizes.hidden, device=device, dtype=dtype)
    gate, up = torch.randn(2, sizes.ffn, sizes.hidden, device=device, dtype=dtype) / sizes.hidden**0.5
    exact = silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    return x, gate, up, _mask(rows, sizes.ffn // sizes.group_size, device=device), exact


def _down(sizes: Sizes, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return activations with zeros where skipped, weight, mask and the exact product."""
    mask = _mask(rows, sizes.ffn // sizes.group_size, device=device)
    h = torch.randn(rows, sizes.ffn, device=device, dtype=dtype)
    h = torch.where(mask.repeat_interleave(sizes.group_size, 1), h, 0.0)
    weight = torch.randn(sizes.hidden, sizes.ffn, device=device, dtype=dtype) / sizes.ffn**0.5
    return h, weight, mask, h.double() @ weight.double().t()


def _gemm_mn(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    x, gate, up, mask, exact = _gated(sizes, sizes.rows, device, dtype)
    order = reorder(mask, backend=_helper(device))

    def run(backend: str) -> Tensor:
        return gemm_mn(x, gate, order, up_weight=up, activation="silu", mask=mask, backend=backend)

    executes = mask.repeat_interleave(sizes.group_size, 1)
    return _Problem(exact=exact, dense=run("dense"), run=run, executes=executes)


def _gemm_k(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    h, weight, mask, exact = _down(sizes, sizes.rows, device, dtype)
    order = reorder_patterns(mask, groups_per_block=8, backend=_helper(device))

    def run(backend: str) -> Tensor:
        return gemm_k(h, weight, order, group_size=sizes.group_size, backend=backend)

    return _Problem(exact=exact, dense=run("dense"), run=run, without=("cuda",))


def _gemm_k_stored(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    """Return the output projection: one sort covers its few groups."""
    size = sizes.hidden // sizes.kv_heads
    heads = dataclasses.replace(sizes, ffn=sizes.hidden, group_size=size)
    h, weight, mask, exact = _down(heads, sizes.rows, device, dtype)
    order = reorder_patterns(mask, groups_per_block=sizes.kv_heads, keeps_empty=True, backend=_helper(device))

    def run(backend: str) -> Tensor:
        return gemm_k(h, weight, order, group_size=size, backend=backend)

    return _Problem(exact=exact, dense=run("dense"), run=run)


def _gemm_k_rows(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    h, weight, mask, exact = _down(sizes, sizes.rows, device, dtype)
    # The only backend that runs everywhere; lists are exact.
    order = reorder_rows(mask, backend="torch")

    def run(backend: str) -> Tensor:
        return gemm_k_rows(h, weight, order, group_size=sizes.group_size, backend=backend)

    return _Problem(exact=exact, dense=run("dense"), run=run, without=("triton", "gluon"))


def _gemv_mn(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    x, gate, up, mask, exact = _gated(sizes, 1, device, dtype)

    def run(backend: str) -> Tensor:
        return gemv_mn(x, gate, mask, up_weight=up, activation="silu", backend=backend)

    executes = mask.repeat_interleave(sizes.group_size, 1)
    return _Problem(exact=exact, dense=run("dense"), run=run, executes=executes)


def _gemv_k(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    h, weight, mask, exact = _down(sizes, 1, device, dtype)

    def run(backend: str) -> Tensor:
        return gemv_k(h, weight, mask, backend=backend)

    return _Problem(exact=exact, dense=run("dense"), run=run)


def _prefill(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    make: dict[str, Any] = {"device": device, "dtype": dtype}
    q = torch.randn(1, sizes.tokens, sizes.heads, sizes.head_dim, **make)
    k, v = torch.randn(2, 1, sizes.tokens, sizes.kv_heads, sizes.head_dim, **make)
    mask = _mask(1, sizes.tokens, sizes.kv_heads, device=device)
    order = reorder_sequences(mask, backend=_helper(device))

    def run(backend: str) -> Tensor:
        return attention_prefill(q, k, v, order, backend=backend)

    executes = mask.repeat_interleave(sizes.heads // sizes.kv_heads, 2)
    return _Problem(exact=_attend(q, k, v, is_causal=True), dense=run("dense"), run=run, executes=executes)


def _decode(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> _Problem:
    make: dict[str, Any] = {"device": device, "dtype": dtype}
    q = torch.randn(sizes.batch, sizes.heads, sizes.head_dim, **make)
    k, v = torch.randn(2, sizes.batch, sizes.tokens, sizes.kv_heads, sizes.head_dim, **make)
    mask = _mask(sizes.batch, sizes.kv_heads, device=device)
    lengths = torch.full((sizes.batch,), sizes.tokens, dtype=torch.int32, device=device)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    dense = scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    def run(backend: str) -> Tensor:
        return attention_decode(q, k, v, lengths, mask, backend=backend)

    executes = mask.repeat_interleave(sizes.heads // sizes.kv_heads, 1)
    exact = _attend(q[:, None], k, v, is_causal=False)[:, 0]
    return _Problem(exact=exact, dense=dense, run=run, executes=executes)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Return attention in float64, [B, T_q, H_q, d]."""
    shared = q.shape[2] // k.shape[2]
    queries, keys, values = (t.double().transpose(1, 2) for t in (q, k, v))
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = queries @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


_Make = Callable[[Sizes, torch.device, torch.dtype], _Problem]
_PROBLEMS: dict[str, dict[str, _Make]] = {
    "gemm_mn": {"gemm_mn": _gemm_mn},
    "gemm_k": {"gemm_k": _gemm_k, "gemm_k, one sort": _gemm_k_stored, "gemm_k_rows": _gemm_k_rows},
    "prefill": {"attention_prefill": _prefill},
    "decode": {"attention_decode": _decode},
    "gemv": {"gemv_mn": _gemv_mn, "gemv_k": _gemv_k},
}
