"""Where the time of a layer goes: kernels of a trace, by their place in a layer."""

import json

import pytest
import torch

from benchmarks.breakdown import IDLE, NORMS, PARTS, SORTS, forwards, run
from wide.errors import ConfigError, EvaluationError

NVJET = "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT"
DENSE_LAYER = [
    ("_rms_norm", 1.0),
    ("Memset (Device)", 0.5),
    (NVJET, 2.0),
    ("_rope_to_cache", 3.0),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 4.0),
    (NVJET, 5.0),
    ("_rms_norm", 6.0),
    (NVJET, 7.0),
    ("_gated_kernel", 8.0),
    ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT", 9.0),
    ("void cublasLt::splitKreduce_kernel<32, 16, int>", 10.0),
]
ROUTED_LAYER = [
    ("_rms_norm", 1.0),
    ("_route", 1.0),
    (NVJET, 2.0),
    ("_place_kernel", 3.0),
    ("gemm_mn", 4.0),
    ("_rope_to_cache", 5.0),
    ("attention_prefill_kernel", 6.0),
    ("_sort_kernel", 7.0),
    ("gemm_k", 8.0),
    ("_rms_norm", 9.0),
    ("_route", 10.0),
    ("gemm_mn", 11.0),
    ("_clear_skipped", 11.75),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>", 0.25),
    ("_gemm_k_kernel", 6.0),
    ("_drain_kernel", 7.0),
    ("_gemm_k_kernel", 6.0),
    ("_drain_kernel", 8.0),
]
STEP_LAYER = [
    ("_route_few", 1.0),
    ("_gemv_mn", 2.0),
    ("_rope_to_cache", 3.0),
    ("_attend_share", 4.0),
    ("_merge_parts", 5.0),
    ("_gemv_k", 6.0),
    ("_route_few", 7.0),
    ("_gemv_mn", 8.0),
    ("_gemv_k", 9.0),
]
HEAD = [("_rms_norm", 1.0), (NVJET, 20.0)]
CHOICE = [("void at::native::reduce_kernel<512, 1>", 30.0)]


def timed(kernels, gap=0.125):
    """Return kernels with their starts, and a gap before each."""
    start, found = 100.0, []
    for name, spent in kernels:
        found.append((name, start + gap, spent))
        start += gap + spent
    return found


def told(found):
    return [round(found[part], 6) for part in PARTS if part != IDLE]


def test_a_product_is_of_the_place_that_it_has_in_its_layer():
    (dense,) = forwards(timed([("embedding", 0.25), *DENSE_LAYER * 3, *HEAD]))
    assert told(dense) == [6.0, 12.0, 15.0, 21.0, 57.0, 22.0, 0.0, 34.5, 20.25]
    (routed,) = forwards(timed([*ROUTED_LAYER * 2, *HEAD]))
    assert told(routed) == [12.0, 12.0, 16.0, 22.0, 54.0, 43.0, 20.0, 34.0, 20.0]


def test_a_token_begins_behind_the_head_and_the_last_has_what_follows_it():
    step = [*STEP_LAYER * 2, *HEAD]
    prompt, first, second = forwards(timed([*DENSE_LAYER, *HEAD, *CHOICE, *step, *CHOICE, *step, *CHOICE]))
    assert told(prompt) == [2.0, 4.0, 5.0, 7.0, 19.0, 8.0, 0.0, 11.5, 20.0]
    assert told(first) == [4.0, 18.0, 12.0, 16.0, 18.0, 17.0, 0.0, 6.0, 50.0]
    assert told(second)[-1] == 80.0
    # Before each kernel of the later forwards there is a gap, and none before the first of all.
    assert [round(8 * each[IDLE]) for each in (prompt, first, second)] == [12, 21, 22]


def test_kernels_that_overlap_leave_no_gap():
    step = timed([*STEP_LAYER, *HEAD])
    router = ("_route", step[2][1] - 1.0, 3.5)
    (found,) = forwards(sorted([*step, router], key=lambda kernel: kernel[1]))
    assert found[IDLE] == pytest.approx(10 * 0.125 - 0.125)


@pytest.mark.parametrize(
    "kernels",
    [
        [],
        DENSE_LAYER,
        [*DENSE_LAYER, *HEAD, (NVJET, 1.0), *CHOICE, ("_rms_norm", 1.0)],
        [*DENSE_LAYER[:5], *DENSE_LAYER, *HEAD],
    ],
)
def test_an_order_that_no_layer_has_is_refused(kernels):
    with pytest.raises(EvaluationError, match="order that no layer has"):
        forwards(timed(kernels))


def test_prompts_that_leave_no_room_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"got 131072; at most 131039"):
        run(tmp_path, rows=(64, 131072))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are traced on a GPU")
def test_a_model_is_checked_then_traced(tmp_path):
    assert run(tmp_path, rows=(600, 64), quick=True, shape="tiny")
    found = json.loads((tmp_path / "breakdown.json").read_text())
    assert [(gate["tokens"], gate["green"]) for gate in found["gates"]] == [(600, True), (64, True)]
    kinds = {(row["tokens"], row["what"], row["candidate"]) for row in found["records"]}
    assert kinds == {(t, w, c) for t in (600, 64) for w in ("prompt", "token") for c in ("dense", "routed")}
    assert len(found["records"]) == len(kinds) * len(PARTS)
    us = {(r["tokens"], r["what"], r["candidate"], r["part"]): r["us"] for r in found["records"]}
    for tokens in (600, 64):
        assert us[tokens, "prompt", "dense", SORTS] == 0.0
        assert us[tokens, "prompt", "routed", NORMS] > us[tokens, "prompt", "dense", NORMS]
    whole = {(row["tokens"], row["what"], row["candidate"]): row["median_us"] for row in found["calls"]}
    assert whole.keys() == kinds
    for kind, us in whole.items():
        parts = sum(row["us"] for row in found["records"] if (row["tokens"], row["what"], row["candidate"]) == kind)
        # The trace slows small models down.
        assert 0.5 * us < 2 * parts < 5 * us
