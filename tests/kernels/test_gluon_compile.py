"""The Hopper kernels compile without a GPU to the instructions they are written for, without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED = 232448


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    program = Path(__file__).with_name("compile_gluon.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    results = [json.loads(line) for line in finished.stdout.splitlines()]
    return {result["name"]: result for result in results}


def test_no_kernel_spills_and_all_fit_into_shared_memory(compiled: dict[str, dict[str, Any]]) -> None:
    assert len(compiled) == 7
    for result in compiled.values():
        assert result["spills"] == 0, result
        assert result["stack"] == 0, result
        assert result["shared"] <= SHARED, result


def test_rows_come_by_copies_weights_by_tensor_memory_products_by_warp_groups(
    compiled: dict[str, dict[str, Any]],
) -> None:
    for result in compiled.values():
        assert all(result["code"][word] for word in ("HGMMA", "LDGSTS", "UTMALDG")), result


def test_the_producer_writes_zeros_16_bytes_at_a_time(compiled: dict[str, dict[str, Any]]) -> None:
    # One slot between two stages, eight at a time at the end.
    assert compiled["gate_up with zeros"]["code"][r"STG\.E\.128 .*RZ "] == 9
    assert compiled["gate_up with zeros"]["code"][r"LDG\.E\.U8"] >= 9
    assert compiled["gate_up 128 rows"]["code"][r"STG\.E\.128 .*RZ "] == 0


def test_reductions_leave_in_vectors(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["down pairs"]["code"]["F32x2"] > 0
    assert compiled["down quads"]["code"]["F32x4"] > 0
    assert compiled["output"]["code"]["F32x2"] == compiled["output"]["code"]["F32x4"] == 0


def test_consumers_release_another_stage_in_every_step(compiled: dict[str, dict[str, Any]]) -> None:
    for result in compiled.values():
        assert result["frozen_arrivals"] == 0, result
