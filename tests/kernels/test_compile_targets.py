"""The kernels compile for every target without a GPU, do not spill and fit into shared memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Largest shared memory of one block in bytes.
SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@pytest.mark.parametrize("target", [pytest.param(t, marks=() if t == 90 else pytest.mark.slow) for t in SHARED])
def test_kernels_compile_without_spills(target: int) -> None:
    program = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run(
        [sys.executable, program, str(target)], capture_output=True, text=True, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    results = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(results) == 8
    drain = next(result["order"] for result in results if result["kernel"] == "_drain_kernel")
    # A race that no interpreter shows: everything is read, then comes the barrier, then cells are cleared.
    assert re.fullmatch("(LDG)+BAR(STG)+", drain), drain
    for result in results:
        assert result["spills"] == 0, result
        assert result["stack"] == 0, result
        assert result["shared"] <= SHARED[target], result
    if target == 90:
        gemms = {result["kernel"]: result["code"] for result in results if "gemm" in result["kernel"]}
        assert all(code["HGMMA"] and code["UTMALDG"] and code["LDGSTS"] for code in gemms.values())
        # Reductions go out four values at a time.
        assert gemms["_gemm_k_kernel"]["F32x4"] > 0
