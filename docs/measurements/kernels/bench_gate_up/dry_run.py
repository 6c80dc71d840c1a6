"""What can be checked without a GPU: python dry_run.py checks work lists; GU_DEVICE=cpu bench.py OUT lets launches walk them in torch."""

import contextlib
import random
import sys
import types

import lists


def install(bench):
    """Replace what needs a device: launches do what the list says, events count nothing."""
    import torch

    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    class Graph:
        replay = None

    cuda = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda *a: None
    cuda.Event = Event
    cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=0)
    cuda.get_device_properties = lambda i: types.SimpleNamespace(multi_processor_count=132)
    cuda.CUDAGraph, cuda.graph = Graph, lambda g: contextlib.nullcontext()

    def captured(call):
        graph = Graph()
        graph.kept, graph.replay = call(), call
        return graph

    bench.captured = captured
    import wide.kernels.gemm_mn._triton as t

    def gated_activation(both, activation, mask):
        gate, up = both.float().chunk(2, 1)
        return (torch.nn.functional.silu(gate) * up).to(both.dtype)

    t.gated_activation = gated_activation
    bench.BACKEND = bench.REORDER = "torch"
    m = types.ModuleType("driver")

    class Kernel:
        def __init__(self, path, shared, name):
            assert open(path, "rb").read(4) == b"\x7fELF" and name == b"gate_up" and 0 < shared <= 232448, (path, shared, name)

        def clusters(self, size, sms):
            return sms // size

        def prepare(self, grid, arguments):
            assert grid == 132 and len(arguments) == 11, (grid, arguments)
            return lambda stream: None

    from ctypes import c_int, c_void_p

    m.Kernel, m.tensor_map, m.c_int, m.c_void_p = Kernel, lambda w, columns, rows: (w.data_ptr(), columns, rows), c_int, c_void_p
    sys.modules["driver"] = m
    real = bench.launcher

    def launcher(case, v):
        call, work = real(case, v)
        size, items, starts = call.size, call.items.tolist(), call.starts.tolist()
        index, counts, rows, g = case.order.index, case.order.counts.tolist(), case.rows, bench.G

        def walk():
            for c in range(len(starts) - 1):
                for j in range(starts[c], starts[c + 1]):
                    for rank in range(size):
                        group, tile = items[2 * (size * j + rank) : 2 * (size * j + rank) + 2]
                        left = counts[group] - tile * 128 if group >= 0 else 0
                        if left > 0 and v.macros.get("EPILOGUE", 1):
                            listed = index[group, tile * 128 : tile * 128 + min(left, 128)].long()
                            rows.out[listed, group * g : (group + 1) * g] = rows.wanted[listed, group * g : (group + 1) * g].to(rows.out.dtype)

        def fine():
            call()
            walk()

        fine.size, fine.items, fine.starts = size, call.items, call.starts
        return fine, work

    bench.launcher = launcher


def check(counts, clusters, size):
    """Assert that every row of every group is in exactly one tile, and what lists promise."""
    work = lists.build(counts, clusters, size)
    items, starts = lists.flat(work)
    assert len(starts) == clusters + 1 and len(items) == 2 * size * starts[-1]
    seen = [0] * len(counts)
    tiles = set()
    for cluster in work.clusters:
        cost = 0.0
        for item in cluster:
            assert len(item) == size and any(g >= 0 for g, _ in item)
            rows = [0 if g < 0 else min(counts[g] - 128 * t, 128) for g, t in item]
            assert all(r > 0 or g < 0 for r, (g, _) in zip(rows, item))
            cost += 0.5 if max(rows) <= 64 else 1.0
            for (g, t), r in zip(item, rows):
                if g >= 0:
                    assert (g, t) not in tiles
                    tiles.add((g, t))
                    seen[g] += r
        assert cost <= work.turns
    assert seen == counts, "rows"
    bound = -(-work.whole // clusters)
    free = -work.whole % clusters
    beyond = max(0, work.short - 2 * free)
    assert work.turns <= max(bound, 0) + 0.5 * -(-beyond // clusters), (work.turns, bound, beyond)
    return work


def main():
    dice = random.Random(1)
    for trial in range(3000):
        groups, most = dice.choice((1, 2, 5, 112)), dice.choice((0, 1, 64, 129, 300, 2100, 9000))
        counts = [dice.randint(0, most) for _ in range(groups)]
        if dice.random() < 0.3:
            counts = [dice.choice((0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 320, 321)) for _ in range(groups)]
        for clusters, size in ((132, 1), (66, 2), (60, 2), (3, 2), (1, 1)):
            check(counts, clusters, size)
    for m in (1024, 2048, 4096, 16384):
        found = {1: [], 2: []}
        for trial in range(100):
            counts = [dice.getrandbits(m).bit_count() for _ in range(112)]
            for size in found:
                found[size].append(check(counts, 132 // size, size).turns)
        least = sum(counts) / 128 / 132
        print(f"M {m}: at least {least:.2f} turns;", "; ".join(f"clusters of {s}: {dict(sorted((t, found[s].count(t)) for t in set(found[s])))}" for s in found))


if __name__ == "__main__":
    main()
