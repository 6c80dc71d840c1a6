"""Kernels of a trace, by the part of a layer that they belong to."""

import pytest

from benchmarks.breakdown import by_part


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_gemm_mn_kernel", "products that skip"),
        ("_gemv_k", "products that skip"),
        ("attention_prefill_kernel", "attention"),
        ("_attend_share", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd>", "attention"),
        ("_route_few", "router"),
        ("_place_kernel", "lists of what executes"),
        ("rows_rank", "lists of what executes"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "dense products"),
        ("void gemv2T_kernel_val<int, int, bfloat16>", "dense products"),
        ("_rms_norm", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "elementwise"),
    ],
)
def test_kernels_count_in_their_part(kernel, part):
    assert {name for name, spent in by_part([(kernel, 2.0), (kernel, 1.0)]).items() if spent == 3.0} == {part}
