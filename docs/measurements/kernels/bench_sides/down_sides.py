"""Down with sums by halves of the cache: PYTHONPATH=src python docs/measurements/kernels/bench_sides/down_sides.py OUT [SECONDS [CASES [ONLY]]]   (build.sh first)

As bench_sorted/orders.py, super-block after super-block ("block") or by cost; zeroing, draining and sorting are charged.
CASES: such as 16384/128/8,4096/128/7.
"""

import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(os.path.dirname(HERE), "bench_sorted"), HERE]
import bench  # noqa: E402
import orders  # noqa: E402
import side_variants as own  # noqa: E402
import sides as sides_module  # noqa: E402

CASES = [(16384, 128, 8), (16384, 256, 8), (4096, 128, 8), (16384, 128, 7), (4096, 128, 7), (4096, 256, 8)]
SMS, N = bench.SMS, bench.N
PARTS = {256: (1, 2, 4), 512: (1, 2), 128: (2, 4)}


class Places:
    """Where each sum of [rows, N] lies, and the buffer."""

    def __init__(self, sides, rows):
        import torch

        assert rows % 4 == 0
        self.sides, self.rows = sides, rows
        self.sums = sides_module.aligned(rows * N * 4).view(torch.float32)
        owner, _ = sides.owners(self.sums)
        self.mask, share = sides.rule(owner)
        assert share == 1.0, share
        self.owner = owner
        first = owner.view(-1, sides_module.PAGE_PAIRS)[:, 0].tolist()
        words = [0] * (-(-len(first) // 32))
        for page, bit in enumerate(first):
            words[page // 32] |= bit << page % 32
        self.pages = torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32, device="cuda")
        self.tickets = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.seats = torch.zeros(SMS, dtype=torch.int32, device="cuda")

    def take(self, rows, width):
        """Return the sums of `rows` [n, N]."""
        import torch

        column = torch.arange(N, device="cuda")
        slab = column // width
        group = slab // 2 * (width // 256) + column % width // 256
        pair = group[None] * (self.rows // 4) + rows[:, None] // 4
        at = pair * 2048 + ((slab[None] & 1) ^ self.owner[pair].long()) * 1024 + rows[:, None] % 4 * 256 + column[None] % 256
        return self.sums[at]

    def drain(self, out, width):
        self.sides.module.launch("drain", self.rows * N // 2048, 256, self.sums, out, self.rows, N, width, self.mask, self.pages)


def launcher(p, places, v, parts, how):
    import torch
    from driver import Kernel, c_int, c_uint, c_void_p, tensor_map

    get = v.macros.get
    bn, cl_rows, cl_cols = get("BN", 128), get("CL_ROWS", 1), get("CL_COLS", 1)
    kernel = Kernel(os.path.join(HERE, "build", own.file_name(v)), bench.shared_bytes(v))
    size = cl_rows * cl_cols
    grid = kernel.clusters(size, SMS) * size
    grid = grid // (2 * size) * 2 * size
    width = bn * parts * cl_cols
    slabs = N // width
    c = p.chunks[0]
    items, number = c.lists[2 * cl_rows, how]
    with_sides = get("SIDES", 0)
    total = places.sums if with_sides else p.sum
    pointers = [total, c.index, c.counts, items, number]
    arguments = [tensor_map(c.hs, 64, 64), tensor_map(p.w, 64, bn // cl_rows), *[c_void_p(x.data_ptr()) for x in pointers]]
    arguments += [c_int(x) for x in (c.rows, N, -(-c.rows // (128 * cl_rows)), N, p.s, p.g, slabs // 2 if with_sides else slabs, parts)]
    if with_sides:
        assert slabs % 2 == 0
        arguments += [c_void_p(places.sides.of.data_ptr()), c_void_p(places.pages.data_ptr()), c_uint(places.mask)]
        arguments += [c_void_p(places.tickets.data_ptr()), c_void_p(places.seats.data_ptr())]
    launch = kernel.prepare(grid, arguments)

    def call():
        if with_sides:
            places.tickets.zero_()
        launch(torch.cuda.current_stream().cuda_stream)

    return call, total, width, grid


def measure(p, places, v, parts, how, rounds=8):
    import torch

    call, total, width, grid = launcher(p, places, v, parts, how)
    with_sides = v.macros.get("SIDES", 0)
    total.zero_()
    call()
    torch.cuda.synchronize()
    got = places.take(p.rows, width) if with_sides else p.sum[p.rows]
    error = ((got - p.wanted).norm() / p.wanted.norm()).item()
    found = {"grid": grid, "error": error, "agrees": error < 5e-4}
    costs = dict(p.costs)
    if with_sides and found["agrees"]:
        p.out.fill_(float("nan"))
        places.drain(p.out, width)
        torch.cuda.synchronize()
        drained = ((p.out[p.rows].float() - p.wanted).norm() / p.wanted.norm()).item()
        found |= {"drained": drained, "agrees": drained < 3e-3}
        costs["drain"] = bench.timed(lambda: places.drain(p.out, width))
        found["seats"] = sorted((places.seats[: grid // max(1, v.macros.get("CL_ROWS", 1) * v.macros.get("CL_COLS", 1))] & 1).tolist()).count(1)
    if not found["agrees"]:
        return found
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
    us = bench.median([a.elapsed_time(b) * 1e3 for a, b, _ in events])
    dense = bench.median([b.elapsed_time(c) * 1e3 for _, b, c in events])
    charged = us + sum(costs.values())
    return found | {"us": us, "dense": dense, "charged": charged, "ratio": dense / us, "ratio_charged": dense / charged, "costs": costs}


def main():
    import torch

    out, deadline = sys.argv[1], time.time() + float(sys.argv[2] if len(sys.argv) > 2 else 100)
    cases = [tuple(int(x) for x in c.split("/")) for c in sys.argv[3].split(",")] if len(sys.argv) > 3 else CASES
    only = sys.argv[4] if len(sys.argv) > 4 else ""
    sides = sides_module.Sides(os.path.join(HERE, "build", "sides.cubin"))
    records = []
    for m, g, s in cases:
        if time.time() > deadline:
            break
        torch.cuda.empty_cache()
        p = orders.Problem(m, g, s, 0)
        places = Places(sides, m)
        print(f"--- M {m} G {g} s {s} {({k: round(x) for k, x in p.costs.items()})}", flush=True)
        for v in own.VARIANTS:
            if not any(word in v.name for word in only.split("|")):
                continue
            get = v.macros.get
            base = get("BN", 128) * get("CL_COLS", 1)
            for parts in PARTS[base]:
                if time.time() > deadline:
                    break
                try:
                    r = measure(p, places, v, parts, "block" if "straight" in v.name else "cost")
                except Exception as error:
                    r = {"failed": str(error)[:200]}
                records.append({"rows": m, "group_size": g, "s": s, "variant": v.name, "macros": v.macros, "parts": parts, **r})
                told = f"{r['us']:5.0f} of {r['dense']:5.0f}: {r['ratio']:.3f}, charged {r['ratio_charged']:.3f}" if "us" in r else str(r)
                print(f"{v.name:34s} x{parts} {told}", flush=True)
        with open(os.path.join(out, "down-sides.json"), "w") as file:
            json.dump(records, file)


if __name__ == "__main__":
    main()
