"""The figures of a generation in ELANA's words, put together from prefill and decode records."""

from collections.abc import Mapping, Sequence
from typing import Any

_MILLI = 1e-3
_GIB = 2.0**30


def summarise(records: Sequence[Mapping[str, Any]], *, prompt: int, generate: int, batch: int) -> list[dict[str, Any]]:
    """Return one entry per candidate that has both a prefill and a decode record.

    Args:
        records: Of the end-to-end bench.
        prompt: Tokens of the prompt.
        generate: Tokens that are generated; the step is measured with half of them cached.
        batch: Sequences.

    Returns:
        TTFT (time to first token), TPOT (per further token) and TTLT (to the last token, TTFT + (n - 1) TPOT) in
        milliseconds; energy per generated token in joules (the prompt's share included) or None; peak memory in bytes.
    """
    prefills = _named(records, "prefill", prompt, batch)
    steps = _named(records, "decode", prompt + generate // 2, batch)
    found = []
    for name, first in prefills.items():
        if name not in steps:
            continue
        step = steps[name]
        energies = first.get("energy_j"), step.get("energy_j")
        energy = None
        if energies[0] is not None and energies[1] is not None:
            energy = (energies[0] + (generate - 1) * energies[1]) / (generate * batch)
        ttft, tpot = first["median_us"] * _MILLI, step["median_us"] * _MILLI
        found.append(
            {
                "candidate": name,
                "batch": batch,
                "prompt": prompt,
                "generate": generate,
                "ttft_ms": ttft,
                "tpot_ms": tpot,
                "ttlt_ms": ttft + (generate - 1) * tpot,
                "energy_per_token_j": energy,
                "peak_memory_bytes": max(first["peak_memory_bytes"], step["peak_memory_bytes"]),
            }
        )
    return found


def summary_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the entries of `summarise` as text; speed-ups are relative to the dense candidate of the same shape."""
    lines = ["candidate                  B  prompt  new    TTFT ms    TPOT ms    TTLT ms  speed-up  J/token  peak GiB"]
    dense = {(e["batch"], e["prompt"]): e["ttlt_ms"] for e in entries if e["candidate"] == "dense"}
    for e in entries:
        energy = "not measured" if e["energy_per_token_j"] is None else f"{e['energy_per_token_j']:.3f}"
        peer = dense.get((e["batch"], e["prompt"]))
        gain = "" if peer is None else f"x{peer / e['ttlt_ms']:.3f}"
        lines.append(
            f"{e['candidate']:24s} {e['batch']:3d} {e['prompt']:7d} {e['generate']:4d} {e['ttft_ms']:10.3f} "
            f"{e['tpot_ms']:10.3f} {e['ttlt_ms']:10.2f}  {gain:>8s} {energy:>8s} {e['peak_memory_bytes'] / _GIB:9.2f}"
        )
    return "\n".join(lines)


def _named(records: Sequence[Mapping[str, Any]], what: str, tokens: int, batch: int) -> dict[str, Mapping[str, Any]]:
    return {
        record["candidate"]: record
        for record in records
        if (record["what"], record["tokens"], record["batch"]) == (what, tokens, batch)
        and {"median_us", "peak_memory_bytes"} <= record.keys()
    }
