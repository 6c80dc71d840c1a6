"""The races of the end-to-end bench: one shape, all candidates, one list of records."""

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
from wide.kernels.tuning import Choice
from wide.profiling.breakdown import breakdown
from wide.profiling.ceilings import decode_ceiling, prefill_ceiling
from wide.profiling.energy import EnergyCounter, joules
from wide.profiling.hugging_face import prefill_call, step_call
from wide.profiling.synthetic import random_masks
from wide.profiling.table_choice import all_sparse, choose_table, one_sort_choice

Rates = tuple[float, float]
Make = Callable[[Decoder, Run], Callable[[], Tensor]]
_SPARE_PLACES = 64
_TUNED_LAYERS = 2
_LONG = 8192
_ALL, _SPARSE = "all execute", ", all sparse"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all races share.

    Args:
        decoder: Of the model.
        ids: Tokens of a prompt, [1, max_length].
        rates: Shares skipped in attention and FFN, of random masks.
        quick: Fewer samples, and tables of operator measurements that no layer has been timed with.
        trained: Whether routers are trained, so that a race of their own decisions makes sense.
        backend: Of the operators.
        energy: The counter that joules are measured with; None leaves them out.
        parts: Whether the time is broken down by part of the forward.
    """

    decoder: Decoder
    ids: Tensor
    rates: tuple[Rates, ...]
    quick: bool
    trained: bool
    backend: str = "triton"
    energy: EnergyCounter | None = None
    parts: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    name: str
    run: Run
    skipped: Rates | None

    @property
    def is_variant(self) -> bool:
        """Whether it only explains another candidate."""
        return self.name == _ALL or self.name.endswith(_SPARSE)


def prefill_race(bench: Bench, length: int, batch: int) -> list[dict[str, Any]]:
    """Return one record per candidate for prefills of `batch` prompts of `length` tokens."""
    decoder = bench.decoder
    cache = decoder.new_cache(batch, length)
    ids = bench.ids[:, :length].expand(batch, -1).contiguous()
    lengths = torch.full((batch,), length, dtype=torch.int32, device=ids.device)

    def make(which: Decoder, run: Run) -> Callable[[], Tensor]:
        return lambda: which.prefill(ids, lengths, cache, run)

    candidates = _candidates(bench, make, batch * length, is_step=False)
    facts = {"what": "prefill", "metric": "TTFT", "tokens": length, "batch": batch}

    def ceiling(skipped: Rates) -> float:
        return prefill_ceiling(decoder.layers, length, skipped)

    return _race(bench, make, candidates, facts, ceiling, rounds=6 if length * batch > _LONG else 12)


def decode_race(bench: Bench, length: int, batch: int) -> list[dict[str, Any]]:
    """Return one record per candidate for one step of `batch` sequences with `length` tokens cached."""
    decoder = bench.decoder
    cache = _filled(bench, decoder.new_cache(batch, length + _SPARE_PLACES), length)
    ids = bench.ids[0, :batch].clone()

    def make(which: Decoder, run: Run) -> Callable[[], Tensor]:
        def call() -> Tensor:
            # Part of the graph, so that every replay takes the same step.
            cache.lengths.fill_(length)
            return which.step(ids, cache, run)

        return call

    candidates = _candidates(bench, make, batch, is_step=True)
    facts = {"what": "decode", "metric": "TPOT", "tokens": length, "batch": batch}
    head = decoder.head.numel()

    def ceiling(skipped: Rates) -> float:
        return decode_ceiling(decoder.layers, head, batch=batch, length=length, skipped=skipped)

    return _race(bench, make, candidates, facts, ceiling, rounds=30)


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
            call = step_call(model, ids[:, :1], length=length, room=length + _SPARE_PLACES, mode=mode)
        timing = time_interleaved({"compiled": call}, rounds=6 if what == "prefill" else 30)["compiled"]
    # A peer that does not compile here is a result.
    except Exception as error:
        return [facts | {"failure": f"{type(error).__name__}: {str(error)[:300]}"}]
    shape = what, length, batch, "dense"
    keys = ("what", "tokens", "batch", "candidate")
    dense = next(record["median_us"] for record in earlier if tuple(record[key] for key in keys) == shape)
    return [facts | times_record(timing) | {"speedup": dense / timing.median_us}]


def _filled(bench: Bench, cache: KvCache, length: int) -> KvCache:
    cache.k.normal_()
    cache.v.normal_()
    if bench.trained:
        # Routers decide by what attention found, which noise would not tell.
        ids = bench.ids[:, :length].expand(cache.batch, -1).contiguous()
        lengths = torch.full((cache.batch,), length, dtype=torch.int32, device=ids.device)
        bench.decoder.prefill(ids, lengths, cache, Run(table=all_sparse(bench.backend)))
    return cache


def _candidates(bench: Bench, make: Make, num_rows: int, *, is_step: bool) -> list[_Candidate]:
    """Return dense, each rate with its own table, everything executing, and trained routers deciding."""
    layers, sparse = bench.decoder.layers, all_sparse(bench.backend)
    found = [_Candidate(name="dense", run=Run(routed=False, table=sparse), skipped=None)]
    for skipped in dict.fromkeys([*bench.rates, (0.0, 0.0)]):
        masks = random_masks(layers, num_rows, skipped)
        table = _tuned(bench, make, masks, skipped, is_step=is_step)
        name = _ALL if skipped == (0.0, 0.0) else f"routed {skipped[0]:g}/{skipped[1]:g}"
        found.append(_Candidate(name=name, run=Run(table=table, forced=masks), skipped=skipped))
        if skipped == bench.rates[0] and table != sparse:
            found.append(_Candidate(name=f"{name}{_SPARSE}", run=Run(table=sparse, forced=masks), skipped=skipped))
    if bench.trained:
        skipped = _measured(make(bench.decoder, run := Run(table=sparse, record=[])), run)
        table = _tuned(bench, make, None, skipped, is_step=is_step)
        found.append(_Candidate(name="own routing", run=Run(table=table), skipped=skipped))
    return found


def _tuned(bench: Bench, make: Make, masks: Masks | None, skipped: Rates, *, is_step: bool) -> OperatorTable:
    """Return the table of operator measurements at these rates, or, if it is faster, one chosen by timing layers."""
    measured = operator_table(bench.decoder, skipped)
    if bench.quick:
        return measured
    short = bench.decoder.truncated(_TUNED_LAYERS)
    forced = None if masks is None else masks[:_TUNED_LAYERS]
    return choose_table(
        lambda table: make(short, Run(table=table, forced=forced)),
        backend=bench.backend,
        is_step=is_step,
        rounds=20 if is_step else 6,
        measured=measured,
        down=one_sort(bench.decoder),
    )


def one_sort(decoder: Decoder) -> Choice | None:
    """Return the choice of a decoder's down products over rows in one order, None where their kernel does not run."""
    ffn = decoder.layers[0].ffn
    if ffn.router is None:
        return None
    groups, (width, channels) = ffn.router.num_groups, ffn.down.shape
    size = channels // groups
    return one_sort_choice(decoder.device, ffn.down.dtype, group_size=size, num_groups=groups, width=width)


def operator_table(decoder: Decoder, skipped: Rates) -> OperatorTable:
    """Return what measurements of the operators say of a decoder's shapes at given rates."""
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
    executed = 1.0 - skipped[0], 1.0 - skipped[1]
    return measured_table(sizes, device=decoder.device, dtype=ffn.gate.dtype, executed=executed)


def _measured(call: Callable[[], Tensor], run: Run) -> Rates:
    """Return the shares that the routers skip in one call."""
    call()
    assert run.record is not None
    shares = []
    for half in (0, 1):
        masks = [pair[half] for pair in run.record]
        known = [mask.float().mean() for mask in masks if mask is not None]
        shares.append(1.0 - torch.stack(known).mean().item() if known else 0.0)
    return shares[0], shares[1]


def _race(
    bench: Bench,
    make: Make,
    candidates: list[_Candidate],
    facts: dict[str, Any],
    ceiling: Callable[[Rates], float],
    *,
    rounds: int,
) -> list[dict[str, Any]]:
    calls = {candidate.name: make(bench.decoder, candidate.run) for candidate in candidates}
    times = time_interleaved(calls, rounds=max(4, rounds // 3) if bench.quick else rounds)
    torch.cuda.empty_cache()
    records = []
    for candidate in candidates:
        timing = times[candidate.name]
        record = facts | {"candidate": candidate.name} | times_record(timing)
        record["speedup"] = times["dense"].median_us / timing.median_us
        if candidate.skipped is not None:
            record["skipped"] = {"attention": candidate.skipped[0], "ffn": candidate.skipped[1]}
            record["ceiling"] = ceiling(candidate.skipped)
            record["table"] = dataclasses.asdict(candidate.run.table or OperatorTable())
        record |= peak_memory(calls[candidate.name])
        if bench.energy is not None and not candidate.is_variant:
            record["energy_j"] = joules(calls[candidate.name], bench.energy)
        if bench.parts:
            record["breakdown_us"] = _parts(make, bench.decoder, candidate.run, timing)
        records.append(record)
    return records


def times_record(timing: Timing) -> dict[str, Any]:
    """Return a time as records hold it."""
    return {
        "median_us": timing.median_us,
        "low_us": timing.low_us,
        "high_us": timing.high_us,
        "num_samples": timing.num_samples,
    }


def peak_memory(call: Callable[[], Tensor]) -> dict[str, int]:
    """Return the record of the most memory that is held during a call, weights and caches included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated()}


def _parts(make: Make, decoder: Decoder, run: Run, timing: Timing) -> dict[str, float]:
    """Return microseconds by part; what a replay takes beyond the sum of its kernels is 'gaps'."""
    found = breakdown(make(decoder, dataclasses.replace(run, traced=True)))
    found["gaps"] = round(timing.median_us - sum(found.values()), 2)
    return found
