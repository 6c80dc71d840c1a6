"""How long the order and each of its kernels take."""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from calls import SHIPPED, Kernels, Recorded, called
from masks import buckets, correlated, independent, mask_of, with_rows
from record import DEVICE, Record, say

from wide.kernels.reorder_rows import _cuda, reorder_rows
from wide.profiling.timing import time_interleaved

PROFILED = 40


def timed_masks(masks: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for groups in (112, 96):
        found[f"independent 0.5, {groups}"] = independent(rows, groups, 0.5, 17).to(DEVICE)
        found[f"independent 0.2, {groups}"] = independent(rows, groups, 0.2, 17).to(DEVICE)
        found[f"correlated, {groups}"] = correlated(rows, groups, 0.4, 0.03, 17).to(DEVICE)
        found[f"all, {groups}"] = torch.ones(rows, groups, dtype=torch.bool, device=DEVICE)
    found["rates, 96"] = mask_of("rates", rows, 96, 17).to(DEVICE)
    return found | {name: with_rows(mask, rows) for name, mask in masks.items()}


def keep(record: Record, times: dict[str, Any], facts: Callable[[str], dict[str, Any]]) -> None:
    for name, timing in times.items():
        record.entries.append({"candidate": name, **facts(name), **dataclasses.asdict(timing)})
        say(facts(name), f"{name}: {timing.median_us:.2f} us [{timing.low_us:.2f}-{timing.high_us:.2f}]")
    record.write()


def timing(record: Record, masks: dict[str, torch.Tensor]) -> None:
    for rows in (16384, 4096, 1024, 65536):

        def race(rows=rows) -> None:
            found = timed_masks(masks, rows)
            about = {
                name: {"rows": rows, "groups": mask.shape[1], "active": mask.double().mean().item(), **buckets(mask)}
                for name, mask in found.items()
            }
            calls = {name: lambda mask=mask: reorder_rows(mask, backend="cuda") for name, mask in found.items()}
            keep(record, time_interleaved(calls, rounds=20), about.__getitem__)

        record.attempt(f"{rows} rows", race)
        torch.cuda.empty_cache()


def alone(record: Record, kernels: Kernels, mask: torch.Tensor, facts: dict[str, Any]) -> None:
    """Time each kernel over and over in a graph, and all of them on memory that is there."""
    recorded = Recorded(kernels, mask)
    calls: dict[str, Any] = {name: lambda name=name: recorded.again(name) for name, _, _ in recorded.launches}
    calls["all"] = recorded.again
    keep(record, time_interleaved(calls, rounds=12), lambda name: {"what": "alone, in a graph", **facts})


def traced(call: Callable[[], object]) -> list[dict[str, Any]]:
    """Return kernels of PROFILED replays of a graph of one call, in the order of their begin."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel" and event.get("name") in _cuda.LAUNCHES]
    return sorted(found, key=lambda event: event["ts"])


def by_kernel(record: Record, way: Callable[[torch.Tensor], Any], mask: torch.Tensor, facts: dict[str, Any]) -> None:
    """Add what the profiler says of each kernel and of the gaps between them."""
    events = traced(lambda: way(mask))
    say(facts, "kernels in the trace:", len(events))
    if not events:
        raise AssertionError("the profiler saw no kernel")
    durations = {name: [e["dur"] for e in events if e["name"] == name] for name in _cuda.LAUNCHES}
    first, last = next(iter(_cuda.LAUNCHES)), list(_cuda.LAUNCHES)[-1]
    spans, gaps, begin, before = [], [], None, None
    for event in events:
        if event["name"] == first:
            begin, before = event["ts"], None
        if before is not None:
            gaps.append(event["ts"] - before)
        before = event["ts"] + event["dur"]
        if event["name"] == last and begin is not None:
            spans.append(before - begin)
            begin = before = None
    medians = {name: statistics.median(values) for name, values in durations.items() if values}
    least = {name: min(values) for name, values in durations.items() if values}
    entry = {"what": "profiler", **facts, "kernel_us": medians, "least_us": least, "sum_us": sum(medians.values())}
    entry["span_us"] = statistics.median(spans) if spans else None
    entry["gap_us"] = statistics.median(gaps) if gaps else None
    resources = {}
    for event in events[: len(_cuda.LAUNCHES)]:
        about = event.get("args", {})
        resources[event["name"]] = {
            key: about[key] for key in ("grid", "block", "registers per thread", "shared memory") if key in about
        }
    entry["launches"] = resources
    record.add(**entry)
    say(
        facts,
        " ".join(f"{name[5:]} {value:.2f}" for name, value in medians.items()),
        f"sum {entry['sum_us']:.2f} span {entry['span_us']} gap {entry['gap_us']}",
    )


def profiled_masks(masks: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    found = {
        "independent 0.5, 112": independent(rows, 112, 0.5, 17).to(DEVICE),
        "independent 0.2, 112": independent(rows, 112, 0.2, 17).to(DEVICE),
    }
    return found | {name: with_rows(mask, rows) for name, mask in masks.items()}


def kernels(record: Record, masks: dict[str, torch.Tensor]) -> None:
    for rows in (16384, 4096):
        for name, mask in profiled_masks(masks, rows).items():
            facts = {"mask": name, "rows": rows, **buckets(mask)}
            record.attempt(f"alone, {name}, {rows}", lambda mask=mask, facts=facts: alone(record, SHIPPED, mask, facts))
    # Last: what the profiler leaves behind may slow launches down.
    for rows in (16384, 4096):
        for name, mask in profiled_masks(masks, rows).items():
            facts = {"mask": name, "rows": rows, **buckets(mask)}
            record.attempt(
                f"profiler, {name}, {rows}",
                lambda mask=mask, facts=facts: by_kernel(record, lambda mask: called(SHIPPED, mask), mask, facts),
            )
