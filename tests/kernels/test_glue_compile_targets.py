"""Norm, rope, router and clearing kernels compile for every target without a GPU, do not spill, fit shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Largest shared memory of one block in bytes.
SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@pytest.mark.parametrize("target", [pytest.param(t, marks=() if t == 90 else pytest.mark.slow) for t in SHARED])
def test_kernels_compile_without_spills(target: int) -> None:
    program = Path(__file__).with_name("compile_glue.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run(
        [sys.executable, program, str(target)], capture_output=True, text=True, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    results = [json.loads(line) for line in finished.stdout.splitlines()]
    names = {"_clear_skipped", "_rms_norm", "_rope_to_cache", "_route", "_route_split", "_route_few"}
    assert {r["kernel"] for r in results} == names
    for result in results:
        assert result["spills"] == 0, result
        assert result["stack"] == 0, result
        assert result["shared"] <= SHARED[target], result
