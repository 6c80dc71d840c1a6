"""The kernels compile for every target without a GPU, do not spill and fit into shared memory."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from wide.kernels.device import DeviceFacts
from wide.kernels.linear_int8._triton import default_tile

# Largest shared memory of one block in bytes.
SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
TARGETS = [pytest.param(target, marks=() if target == 90 else pytest.mark.slow) for target in SHARED]
# Heads of 96 have the tiles of 128, and those of 64 need less than either.
FEW, MORE = (128, 256), (64, 96)
HEADS = [(90, FEW), *(pytest.param(t, FEW + MORE if t != 90 else MORE, marks=pytest.mark.slow) for t in SHARED)]


@cache
def _all_compiled(target: int, head_dims: tuple[int, ...]) -> list[dict[str, Any]]:
    finished = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_targets.py"), *map(str, (target, *head_dims))],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    return [json.loads(line) for line in finished.stdout.splitlines()]


def _compiled(program: str, target: int, head_dims: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    """Return what a program says of its kernels, none of which spills."""
    asked = head_dims or (FEW if target == 90 else FEW + MORE)
    results = [result for result in _all_compiled(target, asked) if result["program"] == program]
    for result in results:
        # What spills has a stack to spill to.
        assert result["stack"] == 0, result
        assert result["shared"] <= SHARED[target], result
    return results


@pytest.mark.parametrize("target", TARGETS)
def test_products_and_sorts_compile(target: int) -> None:
    results = _compiled("compile_kernels", target)
    assert len(results) == 24
    drain = next(result["order"] for result in results if result["kernel"] == "_drain_kernel")
    # A race that no interpreter shows: everything is read, then comes the barrier, then cells are cleared.
    assert re.fullmatch("(LDG)+BAR(STG)+", drain), drain
    if target == 90:
        gemms = {result["kernel"]: result["code"] for result in results if "gemm" in result["kernel"]}
        codes = [result["code"] for result in results if "gemm" in result["kernel"]]
        assert all((code["HGMMA"] or code["IGMMA"]) and code["UTMALDG"] and code["LDGSTS"] for code in codes)
        assert sum(result["code"]["IGMMA"] > 0 for result in results) == 4
        # Reductions go out four values at a time.
        assert gemms["_gemm_k_kernel"]["F32x4"] > 0


@pytest.mark.parametrize("target", SHARED)
def test_int8_products_of_any_number_of_rows_fit_into_shared_memory(target: int) -> None:
    facts = DeviceFacts(name="", capability=target, num_sms=132, shared_memory_bytes=SHARED[target], l2_bytes=0)
    for rows, width, int8 in product((1, 17, 33, 65, 4096), (4096, 28672), (False, True)):
        tile = default_tile(rows, width, facts, int8_rows=int8)
        stage = tile.block_k * (tile.block_n + tile.rows * (1 if int8 else 2))
        assert 2 <= tile.num_stages <= 1 + SHARED[target] // stage


@pytest.mark.parametrize(("target", "head_dims"), HEADS)
def test_attention_and_decode_kernels_compile(target: int, head_dims: tuple[int, ...]) -> None:
    results = _compiled("compile_decode", target, head_dims)
    assert {result["kernel"] for result in results} >= {"_attention_prefill", "_attend_share", "_gemv_mn", "_gemv_k"}
    if target == 90 and 128 in head_dims:
        codes = {(r["kernel"], r.get("head_dim")): r["code"] for r in results}
        prefill, decode = codes["_attention_prefill", 128], codes["_attend_share", 128]
        assert prefill["HGMMA"]
        assert prefill["UTMALDG"]
        # Keys and values of the cache are loaded ahead, past the registers.
        assert decode["LDGSTS"]


@pytest.mark.parametrize("target", TARGETS)
def test_norm_rope_router_and_clearing_kernels_compile(target: int) -> None:
    names = {"_clear_skipped", "_rms_norm", "_rope_to_cache", "_route", "_route_split", "_route_few"}
    assert {result["kernel"] for result in _compiled("compile_glue", target)} == names
