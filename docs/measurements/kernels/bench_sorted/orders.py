"""In which order tiles of down_sorted.cu are best worked off: PYTHONPATH=src python docs/measurements/kernels/bench_sorted/orders.py OUT [SECONDS]

Counters say that the second-level cache and the way between its halves are busy with rows that every slab of columns reads
again. Three orders: costly tiles first, whatever their super-block ("cost"); super-block after super-block, costly ones first
in each ("block"); the same for one chunk of rows after the other ("chunk R": rows are sorted within chunks, one launch each).
Variants and their macros are those of variants.py, compiled by build.sh.
"""

import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import bench  # noqa: E402
from bench import BY_NAME, DEV, SMS, K, N, median, shared_bytes, timed  # noqa: E402
from variants import file_name  # noqa: E402

ZIG = ("coop256-r2", "coop256-c2", "ping128-c2", "ping192-c2")
STRAIGHT = tuple(name for name in BY_NAME if "straight" in name)
# (rows, group size, s), chunks of rows (0: none)
CASES = [
    (16384, 128, 8, (0, 8192, 4096)),
    (16384, 128, 7, (8192, 4096)),
    (4096, 128, 8, (0,)),
    (4096, 128, 7, (0,)),
    (16384, 256, 8, (0, 8192)),
    (16384, 256, 4, (0, 8192)),
]
# Tiles of a slab by variant: what is swept at a time, up to 2048 columns.
PARTS = {"coop256-r2": (1, 2, 4, 8), "coop256-c2": (1, 2, 4), "ping128-c2": (1, 2, 4), "ping192-c2": (1, 2, 4)}


class Chunk:
    """Rows [first, first + rows) of a problem as one of their own; sums go to the rows of the whole."""

    def __init__(self, mask, h, first, rows, g, s):
        import torch
        from wide.kernels.gemm_k.tile_list._triton import describe
        from wide.kernels.reorder import reorder_patterns

        self.rows = rows
        own = mask[first : first + rows].contiguous()
        order = reorder_patterns(own, groups_per_block=s, backend="triton")
        self.counts = order.counts
        blocks = order.index.shape[0]
        places = torch.arange(rows, device=DEV)
        self.hs = torch.empty(blocks * rows, s * g, dtype=torch.bfloat16, device=DEV)
        for b in range(blocks):
            there = places < order.counts[b]
            at = torch.where(there, order.index[b].long().clamp(0, rows - 1), 0)
            block = h[first : first + rows, b * s * g : (b + 1) * s * g][at]
            self.hs[b * rows : (b + 1) * rows] = block.mul_(there.unsqueeze(1))
        self.index = order.index.clamp(0, rows - 1) + first
        self.lists = {}
        for units in (2, 4):
            work = describe(order, units)
            self.lists[units, "cost"] = (work.items, work.num_items)
            number = int(work.num_items.item())
            row_tiles = -(-rows // (64 * units))
            items = work.items.clone()
            by_block = torch.sort(items[:number, 0] // row_tiles, stable=True).indices
            items[:number] = items[:number][by_block]
            self.lists[units, "block"] = (items, work.num_items)


class Problem:
    def __init__(self, m, g, s, chunk):
        import torch

        torch.manual_seed(m + g + s)
        groups = K // g
        self.m, self.g, self.s = m, g, s
        mask = torch.rand(m, groups, device=DEV) < 0.5
        self.w = torch.randn(N, K, dtype=torch.bfloat16, device=DEV) * K**-0.5
        self.h = torch.randn(m, K, dtype=torch.bfloat16, device=DEV)
        self.h.view(m, groups, g).mul_(mask.unsqueeze(2))
        rows = chunk or m
        self.chunks = [Chunk(mask, self.h, first, rows, g, s) for first in range(0, m, rows)]
        self.sum = torch.zeros(m, N, dtype=torch.float32, device=DEV)
        self.out = torch.empty(m, N, dtype=torch.bfloat16, device=DEV)
        self.rows = torch.randperm(m, device=DEV)[:128]
        self.wanted = self.h[self.rows].float() @ self.w.float().t()
        from wide.kernels.gemm_k._drain import drain
        from wide.kernels.gemm_k.tile_list._triton import describe
        from wide.kernels.reorder import reorder_patterns

        self.costs = {
            "sort": timed(lambda: [describe(reorder_patterns(mask[f : f + rows], groups_per_block=s, backend="triton"), 2) for f in range(0, m, rows)]),
            "zero": timed(lambda: self.sum.zero_()),
            "drain": timed(lambda: drain(self.sum, self.out, 0, None, clears=False)),
        }

    def launcher(self, v, parts, how):
        import torch
        from driver import Kernel, c_int, c_void_p, tensor_map

        get = v.macros.get
        bn, cl_rows, cl_cols = get("BN", 128), get("CL_ROWS", 1), get("CL_COLS", 1)
        kernel = Kernel(os.path.join(HERE, "build", file_name(v)), shared_bytes(v))
        size = cl_rows * cl_cols
        grid = kernel.clusters(size, SMS) * size
        slabs = -(-N // (bn * parts * cl_cols))
        calls = []
        for c in self.chunks:
            items, number = c.lists[2 * cl_rows, how]
            arguments = [
                tensor_map(c.hs, 64, 64), tensor_map(self.w, 64, bn // cl_rows), c_void_p(self.sum.data_ptr()), c_void_p(c.index.data_ptr()),
                c_void_p(c.counts.data_ptr()), c_void_p(items.data_ptr()), c_void_p(number.data_ptr()),
                *[c_int(x) for x in (c.rows, N, -(-c.rows // (128 * cl_rows)), N, self.s, self.g, slabs, parts)],
            ]  # fmt: skip
            calls.append(kernel.prepare(grid, arguments))

        def call():
            stream = torch.cuda.current_stream().cuda_stream
            for launch in calls:
                launch(stream)

        return call

    def error(self):
        got = self.sum[self.rows]
        return ((got - self.wanted).norm() / self.wanted.norm()).item()


def measure(p, v, parts, how, rounds=8):
    import torch

    call = p.launcher(v, parts, how)
    found = {}
    if v.whole:
        p.sum.zero_()
        call()
        torch.cuda.synchronize()
        found["error"] = p.error()
        if not found["error"] < 5e-4:
            return found | {"agrees": False}
    call()
    torch.mm(p.h, p.w.t(), out=p.out)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(rounds)]
    for a, b, c in events:
        a.record()
        call()
        b.record()
        torch.mm(p.h, p.w.t(), out=p.out)
        c.record()
    torch.cuda.synchronize()
    us = median([a.elapsed_time(b) * 1e3 for a, b, _ in events])
    dense = median([b.elapsed_time(c) * 1e3 for _, b, c in events])
    charged = us + sum(p.costs.values())
    return found | {"agrees": True, "us": us, "dense": dense, "charged": charged, "ratio": dense / us, "ratio_charged": dense / charged}


def main():
    import torch

    if DEV == "cpu":
        import dry_run
        dry_run.install(bench)
        global timed
        timed = bench.timed
    out, deadline = sys.argv[1], time.time() + float(sys.argv[2] if len(sys.argv) > 2 else 100)
    cases = CASES
    if len(sys.argv) > 3:
        cases = [tuple(int(x) for x in c.split("/")[:3]) + (tuple(int(x) for x in c.split("/")[3].split("+")),) for c in sys.argv[3].split(",")]
    records = []
    for m, g, s, chunks in cases:
        for chunk in chunks:
            if time.time() > deadline:
                break
            torch.cuda.empty_cache()
            p = Problem(m, g, s, chunk)
            print(f"--- M {m} G {g} s {s} chunk {chunk or m} {({k: round(x) for k, x in p.costs.items()})}", flush=True)
            tasks = [("cost", name) for name in ZIG if not chunk] + [("block", name) for name in STRAIGHT]
            for how, name in tasks:
                for parts in PARTS[name.split()[0]]:
                    if time.time() > deadline:
                        break
                    try:
                        r = measure(p, BY_NAME[name], parts, how)
                    except Exception as error:
                        r = {"failed": str(error)[:200]}
                    records.append({"rows": m, "group_size": g, "s": s, "chunk": chunk or m, "order": how, "variant": name, "parts": parts, "costs": p.costs, **r})
                    line = " ".join(f"{k} {x:.4g}" if isinstance(x, float) else f"{k} {x}" for k, x in r.items())
                    print(f"{how:6s}{name:30s} x{parts} {line}", flush=True)
            with open(os.path.join(out, "orders.json"), "w") as file:
                json.dump(records, file)
            del p


if __name__ == "__main__":
    main()
