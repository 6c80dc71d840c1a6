"""Races of the straight-line decoder, dense beside routed: one shape, all candidates, one list of records.

Routers run although random masks replace their decisions, so that their time counts.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wide.inference.cache import KvCache
from wide.inference.decoder import Decoder
from wide.inference.measured import LayerSizes, measured_table
from wide.inference.operator_table import OperatorTable
from wide.inference.run import Masks, Run
from wide.inference.tuning.timing import Timing, time_interleaved
from wide.kernels.reorder_rows import left_to_tiles
from wide.profiling.breakdown import breakdown
from wide.profiling.ceilings import decode_ceiling, prefill_ceiling
from wide.profiling.doors import SPARE_PLACES, forward_record, peak_memory, prefill_call, step_call
from wide.profiling.energy import EnergyCounter, joules
from wide.profiling.synthetic import random_masks

Rates = tuple[float, float]
Make = Callable[[Run], Callable[[], Tensor]]
_LONG = 8192
_ALL = "all execute"
# Of a sample that tells how alike rows are.
_LEAST_ROWS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all races share.

    Args:
        decoder: Of the model.
        ids: Tokens of a prompt, [1, max_length].
        rates: Shares skipped in attention and FFN, of random masks.
        quick: Fewer samples.
        trained: Whether routers are trained, so that a race of their own decisions makes sense.
        backend: Of the operators where nothing else is said: 'auto' follows measurements, as `wide.optimize` does.
        energy: The counter that joules are measured with; None leaves them out.
        parts: Whether the time is broken down by part of the forward.
    """

    decoder: Decoder
    ids: Tensor
    rates: tuple[Rates, ...]
    quick: bool
    trained: bool
    backend: str = "auto"
    energy: EnergyCounter | None = None
    parts: bool = True

    def table(self, skipped: Rates, masks: Masks | None = None) -> OperatorTable:
        """Return which operator runs where, at given rates.

        Args:
            skipped: Shares.
            masks: Of many rows, which tell how alike rows are; None = unknown.
        """
        if self.backend != "auto":
            return OperatorTable(backend=self.backend)
        return operator_table(self.decoder, skipped, masks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    name: str
    run: Run
    skipped: Rates | None


def prefill_race(bench: Bench, length: int, batch: int) -> list[dict[str, Any]]:
    """Return one record per candidate for prefills of `batch` prompts of `length` tokens."""
    decoder = bench.decoder
    cache = decoder.new_cache(batch, length)
    ids = bench.ids[:, :length].expand(batch, -1).contiguous()
    lengths = torch.full((batch,), length, dtype=torch.int32, device=ids.device)

    def make(run: Run) -> Callable[[], Tensor]:
        return lambda: decoder.prefill(ids, lengths, cache, run)

    def ceiling(skipped: Rates) -> float:
        return prefill_ceiling(decoder.layers, length, skipped)

    candidates = _candidates(bench, make, batch * length)
    return _race(bench, make, candidates, ("prefill", length, batch), ceiling, 6 if length * batch > _LONG else 12)


def decode_race(bench: Bench, length: int, batch: int) -> list[dict[str, Any]]:
    """Return one record per candidate for one step of `batch` sequences with `length` tokens cached."""
    decoder = bench.decoder
    cache = _filled(bench, decoder.new_cache(batch, length + SPARE_PLACES), length)
    ids = bench.ids[0, :batch].clone()

    def make(run: Run) -> Callable[[], Tensor]:
        def call() -> Tensor:
            # Part of the graph, so that every replay takes the same step.
            cache.lengths.fill_(length)
            return decoder.step(ids, cache, run)

        return call

    def ceiling(skipped: Rates) -> float:
        return decode_ceiling(decoder.layers, decoder.head.numel(), batch=batch, length=length, skipped=skipped)

    return _race(bench, make, _candidates(bench, make, batch), ("decode", length, batch), ceiling, 30)


def compiled_race(
    bench: Bench, model: Any, what: str, length: int, batch: int, mode: str, earlier: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the record of the compiled Hugging Face model; its speed-up is relative to the dense runtime.

    Args:
        bench: Its tokens.
        model: Without routers: hooks of its layers would each be compiled anew.
        what: 'prefill' or 'decode'.
        length: Tokens of a prompt, or cached before the step.
        batch: Sequences.
        mode: Of torch.compile.
        earlier: Records of the same shape, with the dense runtime's.
    """
    facts = {"what": what, "tokens": length, "batch": batch, "candidate": f"compiled {mode}"}
    ids = bench.ids[:, :length].expand(batch, -1).contiguous()
    try:
        if what == "prefill":
            call = prefill_call(model, ids, mode)
        else:
            call = step_call(model, ids[:, :1], length=length, room=length + SPARE_PLACES, mode=mode)
        timing = time_interleaved({"compiled": call}, rounds=6 if what == "prefill" else 30)["compiled"]
    # A peer that does not compile here is a result.
    except Exception as error:
        return [facts | {"failure": f"{type(error).__name__}: {str(error)[:300]}"}]
    keys = ("what", "tokens", "batch", "candidate")
    shape = what, length, batch, "dense"
    dense = next(record["median_us"] for record in earlier if tuple(record[key] for key in keys) == shape)
    peer = Timing(median_us=dense, low_us=dense, high_us=dense, num_samples=1)
    return [forward_record(what, length, batch, f"compiled {mode}", timing, peer)]


def _filled(bench: Bench, cache: KvCache, length: int) -> KvCache:
    cache.k.normal_()
    cache.v.normal_()
    if bench.trained:
        # Routers decide by what attention found, which noise would not tell.
        ids = bench.ids[:, :length].expand(cache.batch, -1).contiguous()
        lengths = torch.full((cache.batch,), length, dtype=torch.int32, device=ids.device)
        bench.decoder.prefill(ids, lengths, cache, Run(table=bench.table(bench.rates[0])))
    return cache


def _candidates(bench: Bench, make: Make, num_rows: int) -> list[_Candidate]:
    """Return dense, each rate with the table of its shares, everything executing, and trained routers deciding."""
    layers = bench.decoder.layers
    found = [_Candidate(name="dense", run=Run(routed=False, table=bench.table((0.0, 0.0))), skipped=None)]
    for skipped in dict.fromkeys([*bench.rates, (0.0, 0.0)]):
        masks = random_masks(layers, num_rows, skipped)
        name = _ALL if skipped == (0.0, 0.0) else f"routed {skipped[0]:g}/{skipped[1]:g}"
        found.append(_Candidate(name=name, run=Run(table=bench.table(skipped), forced=masks), skipped=skipped))
    if bench.trained:
        record: Masks = []
        make(Run(table=bench.table(bench.rates[0]), record=record))()  # type: ignore[arg-type]
        shares = _shares(record)
        found.append(_Candidate(name="own routing", run=Run(table=bench.table(shares, record)), skipped=shares))
    return found


def operator_table(decoder: Decoder, skipped: Rates, masks: Masks | None = None) -> OperatorTable:
    """Return what `wide.optimize` takes for a decoder's shapes: by measurements of the operators.

    Args:
        decoder: Whose first layer stands for all.
        skipped: Shares in attention and FFN.
        masks: As in `Bench.table`.
    """
    layer = decoder.layers[0]
    attention, ffn = layer.attention, layer.ffn
    sizes = LayerSizes(
        hidden_size=attention.qkv.shape[1],
        query_width=attention.num_query_heads * attention.head_dim,
        head_dim=attention.head_dim,
        num_kv_heads=attention.num_kv_heads,
        attention_groups=1 if attention.router is None else attention.router.num_groups,
        ffn_width=ffn.gate.shape[0],
        ffn_groups=1 if ffn.router is None else ffn.router.num_groups,
        is_gated=ffn.up is not None,
        is_stacked=ffn.up is not None,
    )
    known = [mask for _, mask in masks or () if mask is not None and len(mask) >= _LEAST_ROWS]
    left = sum(left_to_tiles(mask) for mask in known) / len(known) if known else None
    executed = 1.0 - skipped[0], 1.0 - skipped[1]
    return measured_table(sizes, device=decoder.device, dtype=ffn.gate.dtype, executed=executed, left=left)


def _shares(masks: Masks) -> Rates:
    """Return the shares that masks skip."""
    shares = []
    for part in (0, 1):
        known = [pair[part].float().mean() for pair in masks if pair[part] is not None]  # type: ignore[union-attr]
        shares.append(1.0 - torch.stack(known).mean().item() if known else 0.0)
    return shares[0], shares[1]


def _race(
    bench: Bench,
    make: Make,
    candidates: list[_Candidate],
    shape: tuple[str, int, int],
    ceiling: Callable[[Rates], float],
    rounds: int,
) -> list[dict[str, Any]]:
    calls = {candidate.name: make(candidate.run) for candidate in candidates}
    times = time_interleaved(calls, rounds=max(4, rounds // 3) if bench.quick else rounds)
    if bench.ids.is_cuda:
        torch.cuda.empty_cache()
    records = []
    for candidate in candidates:
        name, timing = candidate.name, times[candidate.name]
        record = forward_record(*shape, name, timing, times["dense"])
        if candidate.skipped is not None:
            record["skipped"] = {"attention": candidate.skipped[0], "ffn": candidate.skipped[1]}
            record["ceiling"] = ceiling(candidate.skipped)
            record["table"] = dataclasses.asdict(candidate.run.table or OperatorTable())
        record |= peak_memory(calls[name])
        if bench.energy is not None and name != _ALL:
            record["energy_j"] = joules(calls[name], bench.energy)
        if bench.parts:
            found = breakdown(make(dataclasses.replace(candidate.run, traced=True)))
            # What a replay takes beyond the sum of its kernels.
            record["breakdown_us"] = found | {"gaps": round(timing.median_us - sum(found.values()), 2)}
        records.append(record)
    return records
