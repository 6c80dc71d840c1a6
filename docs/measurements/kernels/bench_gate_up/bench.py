"""Checks and times the variants of gate_up.cu, once build.sh has compiled them: python docs/measurements/kernels/bench_gate_up/bench.py OUT [SECONDS]   (PYTHONPATH=src)

A child does the work and says what it is about to do; it is killed when it is silent for too long, what it was doing is
given up, and another child goes on. OUT/gate_up.json is written after every step; reordering is in none of its times.
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
sys.path.append(os.path.join(os.path.dirname(HERE), "bench_sorted"))  # its driver.py
import lists  # noqa: E402
from variants import VARIANTS, file_name, shared_bytes  # noqa: E402

N, K, G = int(os.environ.get("GU_N", 14336)), int(os.environ.get("GU_K", 4096)), 128
DEV = os.environ.get("GU_DEVICE", "cuda")
CASES = [(4096, 0), (16384, 0), (4096, 1), (4096, 2), (4096, 3), (1024, 0), (2048, 0)]  # rows, number of the mask
if os.environ.get("GU_CASES"):
    CASES = [tuple(int(x) for x in c.split("/")) for c in os.environ["GU_CASES"].split(",")]
SMALL = 300
BACKEND, REORDER = "gluon", "triton"
ERROR, WORST = 1e-2, 2e-2  # relative: of everything, of the 128 channels of a row
SILENCE, LONG = 15, 60  # seconds; the second for whatever compiles
WHAT = "gate + up + SwiGLU on executing (row, group) pairs, microseconds; reordering and work lists are in no time; ratio: dense / this"


def say(what, patience=SILENCE):
    print(json.dumps([what, patience]), flush=True)


class Record:
    """What is known so far, in a file that outlives its writer."""

    def __init__(self, out):
        self.path = os.path.join(out, "gate_up.json")
        self.data = {"what": WHAT, "N": N, "K": K, "G": G, "variants": {v.name: v.macros for v in VARIANTS}, "checks": {}, "failed": {}, "cases": []}
        if os.path.exists(self.path):
            self.data = json.load(open(self.path))

    def save(self):
        with open(self.path + ".new", "w") as file:
            json.dump(self.data, file, indent=1)
        os.replace(self.path + ".new", self.path)

    def fail(self, name, reason):
        self.data["failed"].setdefault(name, reason)
        self.save()

    def alive(self):
        return [v for v in VARIANTS if v.name not in self.data["failed"]]


class Weights:
    def __init__(self):
        import torch

        torch.manual_seed(0)
        self.both = torch.randn(2 * N, K, dtype=torch.bfloat16, device=DEV) * K**-0.5
        self.gate, self.up = self.both[:N], self.both[N:]
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count


class Rows:
    """Rows and what all groups of all of them would be; masks come later."""

    def __init__(self, weights, m):
        import torch

        torch.manual_seed(m)
        self.m, self.weights = m, weights
        self.x = torch.randn(m, K, dtype=torch.bfloat16, device=DEV)
        self.out = torch.empty(m, N, dtype=torch.bfloat16, device=DEV)
        gate = self.x.float() @ weights.gate.float().t()
        self.wanted = torch.nn.functional.silu(gate, inplace=True).mul_(self.x.float() @ weights.up.float().t())


class Case:
    """A mask of some rows: the order, work lists of both cluster sizes."""

    def __init__(self, rows, mask):
        from wide.kernels.reorder import reorder

        self.rows, self.mask = rows, mask
        self.order = reorder(mask, block_m=128, backend=REORDER)
        self.counts = self.order.counts.tolist()
        self.works = {}

    def work(self, clusters, size):
        import torch

        if (clusters, size) not in self.works:
            work = lists.build(self.counts, clusters, size)
            items, starts = lists.flat(work)
            tensors = [torch.tensor(t, dtype=torch.int32, device=DEV) for t in (items or [0, 0, 0, 0], starts)]
            self.works[clusters, size] = (work, *tensors)
        return self.works[clusters, size]


_KERNELS = {}


def launcher(case, v):
    """Return a call that launches, and the work it does."""
    import torch
    from driver import Kernel, c_int, c_void_p, tensor_map

    rows, weights, size = case.rows, case.rows.weights, v.macros["CLUSTER"]
    if v.name not in _KERNELS:
        kernel = Kernel(os.path.join(HERE, "build", file_name(v)), shared_bytes(v), b"gate_up")
        _KERNELS[v.name] = (kernel, kernel.clusters(size, weights.sms))
    kernel, clusters = _KERNELS[v.name]
    work, items, starts = case.work(clusters, size)
    maps = [tensor_map(w, 64, G) for w in (weights.gate, weights.up)]
    pointers = [c_void_p(t.data_ptr()) for t in (rows.x, rows.out, case.order.index, case.order.counts, items, starts)]
    launch = kernel.prepare(clusters * size, [*maps, *pointers, c_int(rows.m), c_int(K), c_int(N)])

    def call():
        launch(torch.cuda.current_stream().cuda_stream)

    call.size, call.items, call.starts = size, items, starts
    return call, work


def disagreement(out, case):
    """Return the relative error of executing pairs, of the worst of them, and how many others were touched."""
    import torch

    wrong = total = torch.zeros((), dtype=torch.float64, device=DEV)
    worst, touched = torch.zeros((), device=DEV), torch.zeros((), dtype=torch.int64, device=DEV)
    for first in range(0, case.rows.m, 1024):
        part = slice(first, first + 1024)
        got, wanted, mask = out[part].view(-1, N // G, G), case.rows.wanted[part].view(-1, N // G, G), case.mask[part]
        square = torch.where(mask, (got.float() - wanted).square().sum(2), 0.0)
        norm = torch.where(mask, wanted.square().sum(2), 0.0)
        wrong, total = wrong + square.sum(dtype=torch.float64), total + norm.sum(dtype=torch.float64)
        # A maximum hides no NaN: that of an executing pair stays.
        worst = torch.maximum(worst, (square / norm.clamp_min(1e-12)).max())
        touched = touched + ((~got.isnan()).sum(2) * ~mask).sum()
    return (wrong / total.clamp_min(1e-12)).sqrt().item(), worst.sqrt().item(), int(touched.item())


def agrees(case, call):
    """Return whether a call computes executing pairs and leaves all others alone, and the numbers."""
    import torch

    case.rows.out.fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    error, worst, touched = disagreement(case.rows.out, case)
    return error < ERROR and worst < WORST and touched == 0, {"error": error, "worst": worst, "touched": touched}


def extreme_masks(m):
    """Return masks by name: counts around every limit of the work lists."""
    import torch

    groups, cpu = N // G, torch.Generator().manual_seed(7)
    none = torch.zeros(m, groups, dtype=torch.bool)

    def first_rows(*counts):
        order = torch.rand(m, groups, generator=cpu).argsort(0).argsort(0)  # each group's own random rows
        limits = torch.tensor([counts[g % len(counts)] for g in range(groups)])
        return order < limits

    random = torch.rand(m, groups, generator=cpu) < 0.5
    empty = random.clone()
    empty[:, groups // 3] = False
    single, row = none.clone(), none.clone()
    single[:, groups // 2] = True
    row[m // 2] = True
    ragged = first_rows(*torch.randint(0, m + 1, (groups,), generator=cpu).tolist())
    found = {"random": random, "all": ~none, "none": none, "one row": row, "one group empty": empty, "one group": single, "ragged": ragged}
    found |= {f"{n} rows": first_rows(n) for n in (1, 64, 65, 128, 129, 192, 193, 256, 257)}
    found |= {"0, 64, 129, 300 rows": first_rows(0, 64, 129, m), "65, 200 rows": first_rows(65, 200)}
    return {name: mask.to(DEV) for name, mask in found.items()}


def check_small(record, weights):
    """Run every variant over the extreme masks; those that are not whole only have to come back."""
    import torch

    rows = Rows(weights, SMALL)
    cases = {name: Case(rows, mask) for name, mask in extreme_masks(SMALL).items()}
    for v in record.alive():
        if v.name in record.data["checks"]:
            continue
        found = {}
        for name, case in cases.items():
            say(v.name)
            try:
                call, _ = launcher(case, v)
                good, found[name] = agrees(case, call)
            except Exception as error:
                record.fail(v.name, f"{name}: {str(error)[:200]}")
                lost(error)
                break
            if v.whole and not good:
                record.fail(v.name, f"{name}: {found[name]}")
                break
        record.data["checks"][v.name] = found if v.whole else {}
        record.save()
        verdict = record.data["failed"].get(v.name, "all masks" if v.whole else "came back")
        print(f"# {v.name}: {verdict}, worst error {max([f['error'] for f in found.values()], default=0) if v.whole else 0:.1e}", file=sys.stderr, flush=True)
    torch.cuda.synchronize()


def lost(error):
    """Leave if the context is lost: the parent starts another child."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        print("# context lost:", str(error)[:300], file=sys.stderr, flush=True)
        os._exit(3)


def captured(call):
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = call()
    # What the call closes over must outlive the graph, or a replay writes to memory that is someone else's by then.
    graph.call = call
    return graph


def peers(rows, case):
    import torch
    from wide.kernels.gemm_mn import gemm_mn
    from wide.kernels.gemm_mn._triton import gated_activation

    both = torch.empty(rows.m, 2 * N, dtype=torch.bfloat16, device=DEV)

    def dense():
        torch.mm(rows.x, rows.weights.both.t(), out=both)
        return gated_activation(both, "silu", None)

    def gluon():
        return gemm_mn(rows.x, rows.weights.gate, case.order, up_weight=rows.weights.up, activation="silu", backend=BACKEND)

    return {"dense": dense, "gluon": gluon}


def measure(record, rows, number):
    """Check and time everything on one mask."""
    import torch

    m = rows.m
    generator = torch.Generator(device=DEV).manual_seed(1000 * number + m)
    case = Case(rows, torch.rand(m, N // G, device=DEV, generator=generator) < 0.5)
    graphs, entries = {}, {}
    for name, call in peers(rows, case).items():
        if f"{name} at {m}" in record.data["failed"]:
            continue
        say(f"{name} at {m}", LONG)
        try:
            graphs[name] = captured(call)
            graphs[name].replay()
            everything = Case(rows, torch.ones_like(case.mask)) if name == "dense" else case
            error, worst, _ = disagreement(graphs[name].kept, everything)
            entries[name] = {"error": error, "worst": worst}
        except Exception as error:
            record.fail(f"{name} at {m}", str(error)[:200])
            graphs.pop(name, None)
            lost(error)
    for v in record.alive():
        say(v.name)
        try:
            call, work = launcher(case, v)
            entry = {"clusters": len(work.clusters), "items": work.whole, "short items": work.short, "turns": work.turns}
            if v.whole:
                good, numbers = agrees(case, call)
                entry |= numbers
                if not good:
                    record.fail(v.name, f"M {m} mask {number}: {numbers}")
                    continue
            graphs[v.name], entries[v.name] = captured(call), entry
        except Exception as error:
            record.fail(v.name, f"M {m} mask {number}: {str(error)[:200]}")
            graphs.pop(v.name, None)
            lost(error)
    say("timing", 30)
    rounds = int(os.environ.get("GU_ROUNDS", max(20, min(60, 60 * 8192 // m))))
    clocks = clocks_query()
    for graph in graphs.values():
        graph.replay()
    events = {name: [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)] for name in graphs}
    for i in range(rounds):
        # Who follows whom changes from round to round.
        names = list(graphs)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            events[name][i][0].record()
            graphs[name].replay()
            events[name][i][1].record()
    torch.cuda.synchronize()
    for name, pairs in events.items():
        us = sorted(a.elapsed_time(b) * 1e3 for a, b in pairs)
        entries[name] |= {"us": us[len(us) // 2], "min": us[0], "max": us[-1]}
    for name in entries:
        entries[name]["ratio"] = entries["dense"]["us"] / entries[name]["us"] if "dense" in entries else None
    for v in record.alive():
        if v.whole and v.name in graphs:
            say(v.name)
            good, numbers = agrees(case, graphs[v.name].replay)
            entries[v.name]["agrees after"] = good
    pairs = int(case.mask.sum().item())
    found = {"M": m, "mask": number, "pairs": pairs, "flop": 4 * pairs * G * K, "rounds": rounds, "clocks while timing": clocks(), "results": entries}
    record.data["cases"].append(found)
    record.save()
    tabulate(found)


def clocks_query():
    """Ask for the clocks in the background; the answer is taken later."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
        process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return lambda: process.communicate(timeout=10)[0].strip()
    except OSError:
        return lambda: None


def tabulate(found):
    print(f"# M {found['M']} mask {found['mask']}  ({found['clocks while timing']})", file=sys.stderr)
    for name, e in found["results"].items():
        tflops = (4 * found["M"] * N * K if name == "dense" else found["flop"]) / e["us"] / 1e6
        print(
            f"#   {name:22s} {e['us']:8.1f} us ({e['min']:.1f} .. {e['max']:.1f})  {e['ratio'] or 0:.3f}  {tflops:4.0f} TFLOP/s"
            f"  turns {e.get('turns', '-')}  error {e.get('error', 0):.1e} {e.get('worst', 0):.1e} {e.get('agrees after', '')}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def child(out, deadline):
    say("start", LONG)
    import torch

    if DEV == "cpu":
        import dry_run

        dry_run.install(sys.modules[__name__])
    torch.backends.cuda.matmul.allow_tf32 = False
    record, weights = Record(out), Weights()
    say("wanted results", LONG)
    check_small(record, weights)
    rows, done = None, {(c["M"], c["mask"]) for c in record.data["cases"]}
    for m, number in CASES:
        if (m, number) in done or f"M {m} mask {number}" in record.data["failed"]:
            continue
        if time.time() > deadline - 5:
            say("no time left")
            return
        say(f"M {m} mask {number}", LONG)
        if rows is None or rows.m != m:
            rows = None
            torch.cuda.empty_cache()
            rows = Rows(weights, m)
            torch.cuda.synchronize()
        try:
            measure(record, rows, number)
        except Exception as error:
            import traceback

            traceback.print_exc()
            record.fail(f"M {m} mask {number}", str(error)[:200])
            lost(error)
    say("finished")


def follow(process, deadline):
    """Return what the child said last, and whether it had to be killed."""
    lines = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    what, patience = "start", LONG
    while True:
        try:
            line = lines.get(timeout=max(0.1, min(patience, deadline - time.time())))
        except queue.Empty:
            process.kill()
            return what, True
        if line is None:
            return what, False
        if line.startswith("["):
            what, patience = json.loads(line)


def main():
    if sys.argv[1] == "--child":
        return child(sys.argv[2], float(sys.argv[3]))
    out, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 100.0
    os.makedirs(out, exist_ok=True)
    if os.path.exists(os.path.join(out, "gate_up.json")):
        os.remove(os.path.join(out, "gate_up.json"))
    deadline = time.time() + seconds
    while time.time() < deadline:
        process = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", out, str(deadline)], stdout=subprocess.PIPE, text=True)
        what, killed = follow(process, deadline)
        process.wait()
        record = Record(out)
        if what in ("finished", "no time left") or time.time() >= deadline:
            break
        if what in ("start", "wanted results"):
            record.fail(what, "hung" if killed else "ended")
            break
        if what == "timing" or what.startswith("M "):
            # Whichever it was: the next size may still do.
            done = {(c["M"], c["mask"]) for c in record.data["cases"]}
            what = next((f"M {m} mask {n}" for m, n in CASES if (m, n) not in done and f"M {m} mask {n}" not in record.data["failed"]), what)
        record.fail(what, "hung" if killed else "ended")
    for name, reason in Record(out).data["failed"].items():
        print("# failed:", name, reason, file=sys.stderr)


if __name__ == "__main__":
    main()
