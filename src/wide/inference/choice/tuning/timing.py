"""The timing protocol: CUDA-graph replay, candidates interleaved, medians with spread."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

_WARM_UP_CALLS, _MIN_GRAPH_US, _MAX_CALLS_IN_GRAPH = 3, 400.0, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Time of one call: median, tenth and ninetieth percentile of `num_samples` replays of a graph."""

    median_us: float
    low_us: float
    high_us: float
    num_samples: int


def time_interleaved(candidates: Mapping[str, Call | Sequence[Call]], *, rounds: int = 20) -> dict[str, Timing]:
    """Time candidates against each other in one run, and return the time of one call by name.

    Each is a call without arguments, or several (for example on copies of the weights, so that none is found in the
    cache) that are averaged, captured into a CUDA graph; then each round replays every graph once, in an order that
    rotates, so that changing clocks hit all alike. A graph holds as many calls as fill 0.4 ms.
    """
    graphs = {name: _capture(calls) for name, calls in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    events = []
    for turn in range(rounds + 2):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            graph, num_calls = graphs[name]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            # The first two rounds only warm clocks and caches.
            if turn >= 2:
                events.append((name, num_calls, begin, end))
    torch.cuda.synchronize()
    for name, num_calls, begin, end in events:
        samples[name].append(begin.elapsed_time(end) * 1000.0 / num_calls)
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> Timing:
    """Return median and spread of samples in microseconds."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return Timing(
        median_us=statistics.median(ordered),
        low_us=ordered[tenth],
        high_us=ordered[-1 - tenth],
        num_samples=len(ordered),
    )


def _capture(calls: Call | Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Warm up, then capture as many calls as fill the wanted time; return the graph and its number of calls."""
    sequence = [calls] if callable(calls) else list(calls)
    graph = graph_of(sequence)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    once_us = max(1.0, begin.elapsed_time(end) * 1000.0)
    times = min(_MAX_CALLS_IN_GRAPH, max(1, round(_MIN_GRAPH_US / once_us)))
    if times == 1:
        return graph, len(sequence)
    return graph_of(sequence * times, warm_up=0), times * len(sequence)


def graph_of(calls: Sequence[Call], *, warm_up: int = _WARM_UP_CALLS) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of calls one after the other, captured after some rounds of them on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
