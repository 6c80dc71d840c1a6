"""The breakdown knows every kernel: each is list-making by name, or belongs to the operator that launches it."""

import ast
from pathlib import Path

import pytest

import wide.kernels
from wide.kernels.reorder_rows._cuda import LAUNCHES
from wide.profiling.breakdown import LIST_KERNELS, QUERY_KERNELS, sum_parts

SOURCE = Path(wide.kernels.__file__).parent
# Kernels that count with the part that launches them; a new one goes here or into LIST_KERNELS.
OWN_KERNELS = {
    "_attend_share",
    "_attention_prefill",
    "_clear_skipped",
    "_drain_kernel",
    "_gated_kernel",
    "_gemm_k_kernel",
    "_gemm_mn_kernel",
    "_gemv_k",
    "_gemv_mn",
    "_merge_parts",
    "_rms_norm",
    "_rope_to_cache",
    "_route",
    "_route_few",
    "_route_split",
}


def _launched(file: Path) -> set[str]:
    """Return the device functions that a file launches: `name[grid](...)`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    jitted = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    }
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return jitted & {f.value.id for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name)}


def test_every_kernel_belongs_to_exactly_one_part_and_every_name_is_a_kernel():
    launched = {name for file in SOURCE.rglob("_*.py") for name in _launched(file)} | set(LAUNCHES)
    assert not OWN_KERNELS & set(LIST_KERNELS)
    assert launched == OWN_KERNELS | set(LIST_KERNELS)
    assert set(QUERY_KERNELS) <= OWN_KERNELS


def _sum(part: str, kernel: str) -> dict[str, float]:
    return sum_parts(
        [
            {"cat": "user_annotation", "name": f"wide.{part}", "ts": 0, "dur": 9},
            {"cat": "cuda_driver", "name": "launch", "ts": 5, "dur": 1, "args": {"correlation": 1}},
            {"cat": "kernel", "name": kernel, "ts": 50, "dur": 4.0, "args": {"correlation": 1}},
        ]
    )


@pytest.mark.parametrize("kernel", LIST_KERNELS)
@pytest.mark.parametrize("part", ["query", "gate_up", "output", "attention"])
def test_lists_count_as_reordering_wherever_they_are_made(part, kernel):
    assert _sum(part, kernel) == {"reorder": 4.0}


def test_a_kernel_of_a_library_is_not_taken_for_one_of_ours():
    assert _sum("down", "void batch_transpose_kernel<float>(int)") == {"down": 4.0}


def test_only_what_the_query_projection_alone_runs_counts_as_query():
    assert _sum("query", "_clear_skipped") == _sum("query", "_gemm_mn_kernel") == {"query": 4.0}
    assert _sum("query", "sm90_xmma_gemm") == {"query or key and value": 4.0}
    assert _sum("output", "_clear_skipped") == {"output": 4.0}
