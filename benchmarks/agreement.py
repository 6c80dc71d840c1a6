"""Does a backend agree with its reference on this device? A speed-up is never reported past a red gate."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.cases.attention_decode import ATTENTION_DECODE
from benchmarks.cases.attention_prefill import ATTENTION_PREFILL
from benchmarks.cases.contract import Operator
from benchmarks.cases.gemm_k import GEMM_K, GEMM_K_ROWS
from benchmarks.cases.gemm_mn import GEMM_MN
from benchmarks.cases.gemv import GEMV_K, GEMV_MN
from wide.kernels.gemm_mn.reference import activate
from wide.kernels.tuning import Case

ALLOWED = 1.2
"""Largest rounding error of a sparse path as a multiple of the dense path's."""
_HEADS = {"num_query_heads": 32, "num_kv_heads": 8, "num_groups": 8, "head_dim": 128}
_FFN = {"num_rows": 512, "num_groups": 112, "group_size": 128}
_OUTPUT = {"num_rows": 512, "num_groups": 8, "group_size": 512, "width": 4096}


def _case(sizes: Mapping[str, int], active: float = 0.5, **options: Any) -> Case:
    return Case(sizes=sizes, dtype=torch.bfloat16, active=active, options=options)


# Llama-3.1-8B's shapes with few rows, by the name that records have.
ROUNDED: dict[str, tuple[Operator, Case]] = {
    "gemm_mn": (GEMM_MN, _case({**_FFN, "depth": 4096, "block_m": 128}, gated=True, activation="silu")),
    "gemm_k": (GEMM_K, _case({**_FFN, "width": 4096, "block_m": 128, "groups_per_block": 8})),
    "gemm_k, one sort": (GEMM_K, _case({**_OUTPUT, "block_m": 128, "groups_per_block": 8}, keeps_empty=True)),
    "gemm_k_rows": (GEMM_K_ROWS, _case({**_FFN, "width": 4096})),
    "attention_prefill": (ATTENTION_PREFILL, _case({**_HEADS, "batch": 1, "query_len": 512, "key_len": 512})),
    # Every pair, so that the library has nothing to skip.
    "attention_decode": (ATTENTION_DECODE, _case({**_HEADS, "batch": 8, "key_len": 512}, active=1.0)),
    "gemv_mn": (GEMV_MN, _case({**_FFN, "num_rows": 1, "width_in": 4096}, is_gated=True, activation="silu")),
    "gemv_k": (GEMV_K, _case({**_FFN, "num_rows": 1, "width_out": 4096})),
}
"""Operators with the case on which their rounding is compared with that of the dense path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Outcome of one operator, backend and case.

    Args:
        operator: Name of the operator.
        backend: Name of the backend.
        case: What was run.
        error: Relative error on executed places; inf if any of them is not finite.
        tolerance: Largest error allowed.
        failure: What a backend raised that had said it runs the case; its error is inf.
    """

    operator: str
    backend: str
    case: Case
    error: float
    tolerance: float
    failure: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


class PoisonedMemory:
    """Fills uninitialised memory with NaN (floats) or extreme values (integers) while entered."""

    def __enter__(self) -> None:
        """Turn poisoning on."""
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        """Restore the former state."""
        torch.use_deterministic_algorithms(self._before[0], warn_only=self._before[1])


def verdicts(
    operators: Sequence[Operator], device: torch.device, *, backends: Sequence[str], dtypes: Sequence[torch.dtype]
) -> Iterator[Verdict]:
    """Run every case on every backend that supports it, with poisoned memory.

    Args:
        operators: What to check.
        device: Where.
        backends: Names of backends to check.
        dtypes: Types in which cases with floating-point inputs run, instead of their own.
    """
    for operator in operators:
        cases = (*operator.cases, *operator.large_cases)
        if cases[0].dtype.is_floating_point:
            cases = tuple(dataclasses.replace(case, dtype=dtype) for case in cases for dtype in dtypes)
        for case in cases:
            for backend in backends:
                if backend in operator.backends and operator.supports(backend, device, case) is None:
                    yield _verdict(operator, backend, case, device)


def _verdict(operator: Operator, backend: str, case: Case, device: torch.device) -> Verdict:
    failure = ""
    with PoisonedMemory():
        arguments = operator.build(case, device)
        wanted = operator.reference(**arguments)
        # One that fails is as red as one that is wrong, and the others are still to be checked.
        try:
            error = operator.compare(arguments, operator.run(backend, **arguments), wanted)
        except Exception as raised:
            error, failure = float("inf"), f"{type(raised).__name__}: {str(raised)[:300]}"
    return Verdict(
        operator=operator.name,
        backend=backend,
        case=case,
        error=error,
        tolerance=operator.tolerance[case.dtype],
        failure=failure,
    )


def rounding(
    operators: Sequence[Operator],
    device: torch.device,
    *,
    backends: Sequence[str],
    cases: Mapping[str, tuple[Operator, Case]] = ROUNDED,
) -> list[dict[str, Any]]:
    """Return how backends round beside the dense path in half precision, against float32 references.

    Args:
        operators: To measure; those without a case are left out.
        device: Where.
        backends: To measure, where they support the case.
        cases: By name, operator and case.

    Returns:
        One JSON-ready object for each operator and backend: both errors, their ratio, and whether it is within 1.2.
    """
    found = []
    for name, (operator, case) in cases.items():
        if operator.name not in {each.name for each in operators}:
            continue
        arguments = operator.build(case, device)
        exact = operator.reference(**_in_float32(arguments))
        dense = _dense(operator, arguments)
        dense_error = max(operator.compare(arguments, dense, exact), 1e-30)
        for backend in backends:
            if backend not in operator.backends or operator.supports(backend, device, case) is not None:
                continue
            error = operator.compare(arguments, operator.run(backend, **arguments), exact)
            ratio = error / dense_error
            facts = {"error": error, "dense_error": dense_error, "ratio": ratio, "within": ratio <= ALLOWED}
            found.append({"operator": name, "backend": backend, **facts})
    return found


def _in_float32(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def _dense(operator: Operator, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Return what the libraries make of a case, skipped places included."""
    if "dense" in operator.backends:
        return operator.run("dense", **arguments)
    weight: Any = arguments.get("weight")
    bias = arguments.get("bias")
    if "h" in arguments:
        # Skipped channels hold NaN.
        return linear(arguments["h"].nan_to_num(), weight, bias)
    if "x" in arguments:
        gate = activate(linear(arguments["x"], weight, bias), arguments["activation"])
        return gate * linear(arguments["x"], arguments["up_weight"], arguments.get("up_bias"))
    is_prompt = arguments["q"].dim() == 4
    q = arguments["q"] if is_prompt else arguments["q"][:, None]
    q, k, v = (part.transpose(1, 2) for part in (q, arguments["k"], arguments["v"]))
    out = scaled_dot_product_attention(q, k, v, is_causal=is_prompt, enable_gqa=True).transpose(1, 2)
    return out if is_prompt else out[:, 0]
