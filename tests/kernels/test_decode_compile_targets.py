"""Attention and decode kernels compile for every target without a GPU, do not spill and fit into shared memory."""

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
    program = Path(__file__).with_name("compile_decode.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run(
        [sys.executable, program, str(target)], capture_output=True, text=True, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    results = [json.loads(line) for line in finished.stdout.splitlines()]
    assert {result["kernel"] for result in results} >= {"_attention_prefill", "_attend_share", "_gemv_mn", "_gemv_k"}
    for result in results:
        assert result["spills"] == 0, result
        assert result["stack"] == 0, result
        assert result["shared"] <= SHARED[target], result
    if target == 90:
        codes = {(r["kernel"], r["head_dim"]): r["code"] for r in results}
        prefill, decode = codes["_attention_prefill", 128], codes["_attend_share", 128]
        assert prefill["HGMMA"]
        assert prefill["UTMALDG"]
        # Keys and values of the cache are loaded ahead, past the registers.
        assert decode["LDGSTS"]
