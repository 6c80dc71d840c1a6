"""TTFT, TPOT, TTLT and energy from records."""

import pytest

from wide.profiling.metrics import summarise, summary_table


def _record(what, tokens, candidate, median_us, **more):
    return {
        "what": what,
        "tokens": tokens,
        "batch": 2,
        "candidate": candidate,
        "median_us": median_us,
        "peak_memory_bytes": 2**30,
        **more,
    }


def test_a_generation_is_one_prefill_and_its_steps():
    records = [
        _record("prefill", 100, "dense", 9000.0, energy_j=4.0),
        _record("decode", 105, "dense", 1000.0, energy_j=0.5),
        _record("prefill", 100, "routed", 6000.0),
        _record("decode", 105, "routed", 500.0),
        _record("decode", 105, "other", 1.0),
    ]
    dense, routed = summarise(records, prompt=100, generate=10, batch=2)
    assert (dense["ttft_ms"], dense["tpot_ms"], dense["ttlt_ms"]) == (9.0, 1.0, 18.0)
    assert dense["energy_per_token_j"] == pytest.approx((4.0 + 9 * 0.5) / 20)
    assert routed["ttlt_ms"] == 10.5
    assert routed["energy_per_token_j"] is None
    text = summary_table([dense, routed])
    assert "x1.714" in text
    assert "not measured" in text
