"""Checks and times the variants of down_sorted.cu, once build.sh has compiled them: python docs/measurements/kernels/bench_sorted/bench.py OUT [ONLY [CASES]]   (PYTHONPATH=src)

ONLY: text that a variant's name must contain ("" for all); CASES: such as 16384/128/8,4096/128/7.
A child does the work; it is killed when it says nothing for a while, and another goes on behind the lost variant.
`bench.py --one NAMES PARTS M G S` launches variants for a profiler: ncu --profile-from-start off ... bench.py --one 'coop256-r2|ping128-c2' 1 16384 128 8
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from variants import VARIANTS, file_name  # noqa: E402

CASES = [(16384, 128, 8), (4096, 128, 7), (16384, 256, 8), (4096, 128, 8), (16384, 256, 4), (4096, 256, 8), (4096, 256, 4)]
SMALL = (333, 128, 8)
SILENCE, FIRST_SILENCE, WHOLE = 12, 45, float(os.environ.get("DK_SECONDS", "60"))
N, K, SMS = int(os.environ.get("DK_N", 4096)), int(os.environ.get("DK_K", 14336)), 132
DEV = os.environ.get("DK_DEVICE", "cuda")
BY_NAME = {v.name: v for v in VARIANTS}


def shared_bytes(v):
    get = v.macros.get
    bn, stages, flush = get("BN", 128), get("STAGES", 6), get("FLUSH", 3)
    buffer = 0 if flush in (0, 5) else 16 * 64 * 2 if get("SUM16", 0) else 16 * get("PIECE", 64) * 4
    staged = get("MODE", 1) == 3
    buffers = bn // (64 if get("SUM16", 0) else get("PIECE", 64)) if staged else 1
    return stages * (bn * 128 + 2 * 8192) + 8 * buffers * buffer + 16 * stages + 560 * staged


class Data:
    """The operands of one case; everything but the product is timed here."""

    def __init__(self, case):
        import torch
        from wide.kernels.gemm_k._drain import drain
        from wide.kernels.gemm_k.tile_list._triton import describe
        from wide.kernels.reorder import reorder_patterns

        self.case = case
        m, g, s = case
        torch.manual_seed(m + g + s)
        groups, blocks = K // g, K // g // s
        assert groups % s == 0, "whole super-blocks only"
        dev = {"device": DEV}
        mask = torch.rand(m, groups, **dev) < 0.5
        self.w = torch.randn(N, K, dtype=torch.bfloat16, **dev) * K**-0.5
        self.h = torch.randn(m, K, dtype=torch.bfloat16, **dev)
        self.h.view(m, groups, g).mul_(mask.unsqueeze(2))
        self.order = reorder_patterns(mask, groups_per_block=s, backend="triton")
        self.work = {units: describe(self.order, units) for units in (2, 4)}
        counts = self.order.counts
        self.hs = torch.empty(blocks * m, s * g, dtype=torch.bfloat16, **dev)
        places = torch.arange(m, **dev)
        for b in range(blocks):
            rows = self.order.index[b].long().clamp(0, m - 1)
            rows = torch.where(places < counts[b], rows, 0)
            block = self.h[:, b * s * g : (b + 1) * s * g][rows]
            self.hs[b * m : (b + 1) * m] = block.mul_((places < counts[b]).unsqueeze(1))
        self.sums = {0: torch.zeros(m, N, dtype=torch.float32, **dev)}
        self.dense_out = torch.empty(m, N, dtype=torch.bfloat16, **dev)
        self.rows = torch.arange(m, **dev) if m <= 512 else torch.randperm(m, **dev)[:128]
        self.wanted = self.h[self.rows].float() @ self.w.float().t()
        self.costs, self.rooms = {}, {}
        from partials import invert

        self.rank = invert(self.order.index, self.order.counts)
        if m > 512:
            self.costs["rank"] = timed(lambda: invert(self.order.index, self.order.counts))
            self.costs["sort"] = timed(lambda: describe(reorder_patterns(mask, groups_per_block=s, backend="triton"), 2))
            self.costs["zero"] = timed(lambda: self.sums[0].zero_())
            self.costs["zero16"] = timed(lambda: self.dense_out.zero_())
            self.costs["drain"] = timed(lambda: drain(self.sums[0], self.dense_out, 0, None, clears=False))
        self.sums[0].zero_()

    def room(self, name, shape, dtype):
        """Return memory that variants share."""
        import torch

        if name not in self.rooms:
            self.rooms[name] = torch.empty(shape, dtype=dtype, device=DEV)
        return self.rooms[name]

    def total(self, kind):
        import torch

        if kind not in self.sums:
            self.sums[kind] = torch.zeros(self.case[0], N, dtype={1: torch.bfloat16, 2: torch.float16}[kind], device=DEV)
        return self.sums[kind]


def timed(call, rounds=10):
    """Return microseconds of a call without the launches' gaps."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for a, b in events:
        a.record()
        graph.replay()
        b.record()
    torch.cuda.synchronize()
    return median([a.elapsed_time(b) * 1e3 for a, b in events])


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def launcher(data, v, parts):
    """Return (call, sum, programs)."""
    import torch
    from driver import Kernel, c_int, c_void_p, tensor_map

    m, g, s = data.case
    get = v.macros.get
    bn, cl_rows, cl_cols = get("BN", 128), get("CL_ROWS", 1), get("CL_COLS", 1)
    kernel = Kernel(os.path.join(HERE, "build", file_name(v)), shared_bytes(v))
    size = cl_rows * cl_cols
    grid = kernel.clusters(size, SMS) * size
    work, total = data.work[2 * cl_rows], data.total(get("SUM16", 0))
    slabs = -(-N // (bn * parts * cl_cols))
    order = data.order
    row_tiles = -(-m // (128 * cl_rows))
    partial = get("PARTIAL", 0)
    if partial:
        blocks, tiles = order.index.shape[0], -(-N // bn)
        parts_ = data.room("parts", (blocks * m, N), torch.float16)
        scales = data.room(f"scales{tiles}", (blocks * m, tiles), torch.float32)
        total = data.room("total32", (m, N), torch.float32)
    arguments = [
        tensor_map(data.hs, 64, 64), tensor_map(data.w, 64, bn // cl_rows),
        *([c_void_p(parts_.data_ptr()), c_void_p(scales.data_ptr())] if partial else [c_void_p(total.data_ptr())]), c_void_p(order.index.data_ptr()),
        c_void_p(order.counts.data_ptr()), c_void_p(work.items.data_ptr()), c_void_p(work.num_items.data_ptr()),
        *[c_int(x) for x in (m, N, row_tiles, N, s, g, slabs, parts)],
    ]  # fmt: skip
    launch = kernel.prepare(grid, arguments)
    if partial:
        from partials import add

        state = {"out": total}
        out16 = data.room("out16", (m, N), torch.bfloat16)

        def product():
            launch(torch.cuda.current_stream().cuda_stream)

        def call():
            product()
            add(parts_, scales, data.rank, state["out"], bn)

        call.state, call.product, call.out16, call.total = state, product, out16, total
        parts_.fill_(float("nan"))
        scales.fill_(float("nan"))
        return call, total, grid
    return (lambda: launch(torch.cuda.current_stream().cuda_stream)), total, grid


def disagreement(data, total):
    """Return the largest relative error of 64 columns of a row, and of everything."""
    got = total[data.rows].float()
    difference, wanted = (got - data.wanted).view(-1, N // 64, 64), data.wanted.view(-1, N // 64, 64)
    worst = (difference.norm(dim=2) / wanted.norm(dim=2).clamp_min(1e-6)).max().item()
    whole = (difference.norm() / wanted.norm()).item()
    return worst, whole


def agrees(data, v, call, total):
    import torch

    total.zero_()
    state = getattr(call, "state", None)
    if state:
        state["out"] = total
    call()
    torch.cuda.synchronize()
    worst, whole = disagreement(data, total)
    limits = {0: (2e-3, 5e-4), 1: (3e-2, 1e-2), 2: (5e-3, 2e-3)}[v.macros.get("SUM16", 0)]
    return worst <= limits[0] and whole <= limits[1], worst, whole


def measure(data, v, parts, rounds):
    import torch

    call, total, grid = launcher(data, v, parts)
    found = {"grid": grid}
    if v.whole:
        good, worst, whole = agrees(data, v, call, total)
        found |= {"agrees": good, "worst": worst, "error": whole}
        if not good:
            return found
    if data.case == SMALL:
        if not v.whole:
            call()
            torch.cuda.synchronize()
        return found
    if hasattr(call, "state"):
        call.state["out"] = call.out16
        found["product_us"] = timed(call.product)
    dense = torch.mm
    w = data.w.t()
    for _ in range(2):
        call()
        dense(data.h, w, out=data.dense_out)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(rounds)]
    for a, b, c in events:
        a.record()
        call()
        b.record()
        dense(data.h, w, out=data.dense_out)
        c.record()
    torch.cuda.synchronize()
    us = median([a.elapsed_time(b) * 1e3 for a, b, _ in events])
    dense_us = median([b.elapsed_time(c) * 1e3 for _, b, c in events])
    kind = v.macros.get("SUM16", 0)
    costs = data.costs
    if hasattr(call, "state"):
        charged = us + costs["sort"] + costs["rank"]
    else:
        charged = us + costs["sort"] + {0: costs["zero"] + costs["drain"], 1: costs["zero16"], 2: costs["zero16"] + costs["drain"] / 2}[kind]
    found |= {"us": us, "dense": dense_us, "charged": charged, "ratio": dense_us / us, "ratio_charged": dense_us / charged, "costs": costs}
    if v.whole:
        again, worst, _ = agrees(data, v, call, total)
        found |= {"agrees": again, "worst_after": worst}
    return found


def child():
    import torch

    if DEV == "cpu":
        import dry_run
        dry_run.install(sys.modules[__name__])
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    data = None
    for case, name, parts in json.loads(sys.stdin.read()):
        case = tuple(case)
        print("T", json.dumps([case, name, parts]), flush=True)
        if data is None or data.case != case:
            data = None
            torch.cuda.empty_cache()
            data = Data(case)
            torch.cuda.synchronize()
            print("S", json.dumps([case, data.costs]), flush=True)
        try:
            found = measure(data, BY_NAME[name], parts, 20)
        except Exception as error:
            import traceback
            traceback.print_exc()
            print("E", json.dumps(str(error)[:200]), flush=True)
            try:
                torch.cuda.synchronize()
            except Exception:
                os._exit(3)  # a lost context: the parent starts another child
            continue
        print("R", json.dumps(found), flush=True)


def one(names, parts, m, g, s):
    """Launch variants (names divided by |) and the dense product, each again between the profiler's marks."""
    import torch

    data = Data((int(m), int(g), int(s)))
    for name in names.split("|"):
        call, total, grid = launcher(data, BY_NAME[name], int(parts))
        total.zero_()
        mark(call)
        print("launched", name, grid, flush=True)
    mark(lambda: torch.mm(data.h, data.w.t(), out=data.dense_out))


def mark(call):
    import torch

    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def lines_of(process):
    """Return a queue of the child's lines, None at its end."""
    lines = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def run_all(tasks, records, deadline, errors):
    """Work through the tasks in as many children as it takes."""
    at = 0
    while at < len(tasks) and time.time() < deadline:
        process = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            process.stdin.write(json.dumps(tasks[at:]))
            process.stdin.close()
        except BrokenPipeError:
            pass
        lines, patience, started = lines_of(process), FIRST_SILENCE, False
        while True:
            try:
                line = lines.get(timeout=max(0.1, min(patience, deadline - time.time())))
            except queue.Empty:
                process.kill()
                outcome = "hung" if time.time() < deadline else "no time left"
                records.append((tasks[at], {"failed": outcome}))
                at += 1
                break
            if line is None:
                if at < len(tasks):
                    records.append((tasks[at], {"failed": "child ended" if started else "child did not start"}))
                    at += 1
                break
            kind, _, rest = line.partition(" ")
            started = True
            # A new case and its first compilations take longer than a variant.
            patience = FIRST_SILENCE if kind == "T" and (at == 0 or tasks[at][0] != tasks[at - 1][0]) else SILENCE
            if kind == "R":
                records.append((tasks[at], json.loads(rest)))
                at += 1
            elif kind == "E":
                records.append((tasks[at], {"failed": json.loads(rest)}))
                at += 1
        process.kill()
        process.wait()
        if not started:
            return


def passed(records):
    return {tuple(t[1:]) for t, r in records if "failed" not in r and r.get("agrees", True)}


def tabulate(records):
    case = None
    for (now, name, parts), r in records:
        if now != case:
            case = now
            print(f"--- M {now[0]} G {now[1]} s {now[2]}  costs us {({k: round(x) for k, x in r.get('costs', {}).items()})}")
        text = f"{name:24s} x{parts} "
        if "failed" in r:
            print(text, "FAILED", r["failed"])
            continue
        verdict = {None: "part", True: "PASS", False: "FAIL"}[r.get("agrees")]
        text += f"{verdict} {r.get('error', 0):.1e} {r.get('worst', 0):.1e} grid {r['grid']}"
        if "us" in r:
            text += f" {r['us']:7.0f} us, dense {r['dense']:6.0f} = {r['ratio']:.2f}; charged {r['charged']:6.0f} = {r['ratio_charged']:.2f}"
        if "product_us" in r:
            text += f"  (product alone {r['product_us']:.0f})"
        print(text)


def main():
    if sys.argv[1] == "--child":
        return child()
    if sys.argv[1] == "--one":
        return one(*sys.argv[2:])
    out, only = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    cases = [tuple(int(x) for x in c.split("/")) for c in sys.argv[3].split(",")] if len(sys.argv) > 3 else CASES
    os.makedirs(out, exist_ok=True)
    deadline, records = time.time() + WHOLE, []
    chosen = [v for v in VARIANTS if any(word in v.name for word in only.split("|"))]
    sweep = os.environ.get("DK_PARTS")
    if sweep:
        chosen = [v._replace(parts=tuple(int(x) for x in sweep.split(","))) for v in chosen if v.whole]
    with open(os.path.join(out, "errors.txt"), "w") as errors:
        run_all([(SMALL, v.name, p) for v in chosen for p in v.parts[:1 if sweep else None]], records, deadline, errors)
        good = passed(records)
        tasks = [
            (case, v.name, p)
            for case in cases
            for v in chosen
            for p in v.parts
            if ((v.name, p) in good or (sweep and (v.name, v.parts[0]) in good)) and (sweep or case == CASES[0] or only or (v.core and p == v.parts[0]))
        ]
        run_all(tasks, records, deadline, errors)
    with open(os.path.join(out, "down.json"), "w") as file:
        json.dump([{"case": c, "variant": n, "parts": p, "macros": BY_NAME[n].macros, **r} for (c, n, p), r in records], file)
    tabulate(records)
    errors = open(os.path.join(out, "errors.txt")).read()
    if errors:
        print("stderr:", errors[-1500:])


if __name__ == "__main__":
    main()
