"""Checks and times the Hopper kernels of GEMM-MN and GEMM-K on a GPU within a minute or so.

Usage: python tools/bench_gluon.py --out DIR [--rows 4096,16384] [--rounds 8] [--budget 75] [--all]

The program starts itself: up to five processes check one variant each, first compiling without a launch, then one
process, which imports meanwhile, times what agrees against cuBLAS and the Triton backend with CUDA graphs, interleaved.
Progress is one JSON object per line, before and after every launch, so that the last line tells where a kernel hangs;
a process that is silent for 15 s after compiling is killed, and everything ends when the budget is spent.
"""

import argparse
import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HIDDEN, FFN = 4096, 14336
SILENCE_S, STARTING_S = 15.0, 60.0
PROCESSES = 5
SIZE = {"gate_up": 128, "q": 512, "down128": 128, "down256": 256, "o": 512}
# The first of each is checked and timed; --all takes the others too. (units, block_n, stages, wide_stores)
MN_TILES = {"gate_up": [(2, 256, 4, 1), (2, 256, 4, 0)], "q": [(2, 256, 4, 1)]}
# groups_per_block and (units, block_n, stages, slab, writes); slab 0 stands for 32 MB of float32.
K_TILES: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "down128": [
        (8, (2, 256, 4, 0, 2)),
        (7, (2, 256, 4, 0, 2)),
        (8, (2, 256, 4, 0, 1)),
    ],
    "down256": [(4, (2, 256, 4, 0, 2)), (8, (2, 256, 4, 0, 2))],
    "o": [(8, (2, 256, 4, 0, 0)), (4, (2, 256, 4, 0, 1))],
}


def say(**fields: Any) -> None:
    """Write one line of JSON at once."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


Variant = tuple[str, tuple[int, ...], int]


def variants(names: list[str], *, every: bool) -> list[Variant]:
    """Return (bench, tile, groups_per_block) of the variants of some benches, or of the first of each."""
    found = {name: [(name, tile, 0) for tile in tiles] for name, tiles in MN_TILES.items()}
    found |= {name: [(name, tile, groups) for groups, tile in tiles] for name, tiles in K_TILES.items()}
    return [variant for name in names for variant in found[name][: None if every else 1]]


def label(tile: tuple[int, ...], groups: int) -> str:
    """Return the name of a variant in tables."""
    return (f"s={groups} " if groups else "") + "gluon " + "-".join(map(str, tile))


def slab_of(rows: int) -> int:
    """Return how many float32 columns of `rows` rows take 32 MB."""
    return max(256, min(HIDDEN, 2**23 // rows))


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Compile kernels instead of launching them."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, warmup, **options: run(self, *args, warmup=True, **options)
    try:
        yield
    finally:
        JITFunction.run = run


# ---- agreement -------------------------------------------------------------------------------------------------------


def masks(num_groups: int) -> Iterator[tuple[str, Any]]:
    """Yield a ragged mask, one of the size that is timed, and the extremes."""
    import torch

    generator = torch.Generator().manual_seed(3)

    def random(rows: int, share: float) -> torch.Tensor:
        return (torch.rand(rows, num_groups, generator=generator) < share).cuda()

    ragged = random(333, 0.5)
    ragged[:, 0] = False
    ragged[:, 1] = True
    ragged[1:, 2] = False
    ragged[:200, 3:] &= random(200, 0.3)[:, 3:]
    yield "ragged 333", ragged
    yield "none 200", random(200, -1.0)
    yield "full 300", random(300, 2.0)
    yield "half 4096", random(4096, 0.5)


def error_of(got: Any, wanted: Any) -> float:
    """Return the relative error; 0 if both are empty or zero, infinity for NaN."""
    if wanted.numel() == 0:
        return 0.0
    difference = (got.float() - wanted.float()).norm().item()
    found = difference / max(wanted.float().norm().item(), 1e-6)
    return found if found == found else float("inf")


def check(variant: Variant) -> None:
    """Compile one variant and its peer, then compare it with the float32 reference on every mask, twice."""
    import torch

    name, tile, groups = variant
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    say(at="imported")
    prepare = prepare_mn if name in MN_TILES else prepare_k
    started = time.monotonic()
    for mask_name, mask in masks(24 if SIZE[name] == 128 else 8):
        say(at="preparing", of=mask_name)
        run, wanted, peer = prepare(name, tile, groups, mask)
        if mask_name == "ragged 333":
            with compiling_only():
                run()
            say(at="compiled own", seconds=time.monotonic() - started)
            try:
                with compiling_only():
                    peer()
            except Exception as error:
                say(at="peer not compiled", why=f"{type(error).__name__}: {str(error)[:300]}")
        if mask_name in ("ragged 333", "half 4096"):
            # Other sizes may be specialised otherwise.
            with compiling_only():
                run()
        torch.cuda.synchronize()
        say(at="compiled", of=mask_name, seconds=time.monotonic() - started)
        worst, moved, first = 0.0, 0.0, None
        for turn in range(2):
            say(at="launch", of=mask_name, turn=turn)
            torch.full((wanted.numel() + mask.numel() * SIZE[name],), float("nan"), device="cuda", dtype=torch.bfloat16)
            launched = time.monotonic()
            got = run()
            torch.cuda.synchronize()
            say(at="ran", of=mask_name, turn=turn, milliseconds=(time.monotonic() - launched) * 1e3)
            worst = max(worst, error_of(got, wanted))
            moved = max(moved, 0.0 if first is None else error_of(got, first))
            first = got
        say(mask=mask_name, error=worst, moved=moved)
    say(done=True)


Calls = tuple[Callable[[], Any], Any, Callable[[], Any]]


def prepare_mn(name: str, tile: tuple[int, ...], groups: int, mask: Any) -> Calls:
    """Return a call of GEMM-MN, what it has to give, and the Triton call; only executing pairs count."""
    import torch

    from wide.kernels.gemm_mn import MnTile, _gluon, gemm_mn
    from wide.kernels.gemm_mn.operator import executed
    from wide.kernels.reorder import reorder

    del groups
    size, gated = SIZE[name], name == "gate_up"
    rows, num_groups = mask.shape
    depth = HIDDEN if rows == 4096 else 320
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(2, num_groups * size, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
    order = reorder(mask, backend="triton")
    # What the dense down projection needs: zeros in skipped channels.
    form = {"packed": False, "mask": mask if gated else None}
    options: dict[str, Any] = {
        "up_weight": weights[1] if gated else None,
        "activation": "silu" if gated else "none",
        "bias": None,
        "up_bias": None,
        **form,
    }
    wanted = executed({"order": order, **form}, gemm_mn(x, weights[0], order, **options, backend="torch"))
    peer_tile = MnTile(128, 64, 4, 8, 1, 2) if gated else MnTile(256, 64, 4, 8, 1, 1)
    return (
        lambda: executed({"order": order, **form}, _gluon.gemm_mn(x, weights[0], order, **options, tile=tile)),
        wanted,
        lambda: gemm_mn(x, weights[0], order, **options, backend="triton", tile=peer_tile),
    )


def k_peer(name: str, rows: int) -> Any:
    """Return the tile of the Triton GEMM-K."""
    from wide.kernels.gemm_k import KTile

    return KTile(256, 64, 4, 8, 1, 1) if name == "o" else KTile(128, 64, 3, 4, 2, 1, min(HIDDEN, 2**23 // rows), 4)


def prepare_k(name: str, tile: tuple[int, ...], groups: int, mask: Any) -> Calls:
    """Return a call of GEMM-K, what it has to give, and the Triton call; skipped channels hold NaN."""
    import torch

    from wide.kernels.gemm_k import _gluon, gemm_k
    from wide.kernels.reorder import reorder_patterns

    size = SIZE[name]
    rows, num_groups = mask.shape
    width = HIDDEN if rows == 4096 else 512
    # Two slabs at least, as in the timing.
    tile = (*tile[:3], tile[3] or (slab_of(rows) if rows == 4096 else 256), *tile[4:])
    h = torch.randn(rows, num_groups, size, device="cuda", dtype=torch.bfloat16)
    h = torch.where(mask.unsqueeze(2), h, float("nan")).view(rows, -1)
    weight = torch.randn(width, num_groups * size, device="cuda", dtype=torch.bfloat16) / (num_groups * size) ** 0.5

    def sort(per_block: int) -> Any:
        return reorder_patterns(
            mask, groups_per_block=per_block, block_m=128, keeps_empty=per_block >= num_groups, backend="triton"
        )

    order, peer_order = sort(groups), sort(8)
    options: dict[str, Any] = {"group_size": size, "bias": None, "out_dtype": torch.bfloat16}
    wanted = gemm_k(h, weight, order, **options, backend="torch")
    return (
        lambda: _gluon.gemm_k(h, weight, order, **options, tile=tile),
        wanted,
        lambda: gemm_k(h, weight, peer_order, **options, backend="triton", tile=k_peer(name, 4096)),
    )


# ---- timing ----------------------------------------------------------------------------------------------------------


def bench(all_rows: list[int], names: list[str], rounds: int) -> None:
    """Time everything; a line on standard input tells the variants to take, by bench."""
    import torch

    from wide.kernels import gemm_k, gemm_mn, reorder
    from wide.profiling.timing import time_interleaved

    del gemm_k, gemm_mn, reorder
    torch.zeros(1, device="cuda")
    say(at="ready")
    chosen: dict[str, list[list[Any]]] = json.loads(sys.stdin.readline())
    say(at="told")
    for rows in all_rows:
        for name in (name for name in names if name in chosen and f"{name}@{rows}" not in chosen["done"]):
            torch.manual_seed(rows)
            taken = [(tuple(tile), groups) for tile, groups in chosen[name]]
            candidates = (mn_candidates if name in MN_TILES else k_candidates)(name, rows, taken)
            flop = candidates.pop("flop")
            timed: dict[str, Callable[[], Any]] = {}
            for key, call in candidates.items():
                say(at="trying", of=f"{name}/{key}", rows=rows)
                try:
                    call()
                    torch.cuda.synchronize()
                    timed[key] = call
                except Exception as error:
                    say(bench=name, rows=rows, candidate=key, failure=f"{type(error).__name__}: {str(error)[:400]}")
            say(at="timing", of=name, rows=rows)
            times = time_interleaved(timed, rounds=rounds)
            dense = times["dense"].median_us
            for key, timing in times.items():
                say(
                    bench=name,
                    rows=rows,
                    candidate=key,
                    median_us=timing.median_us,
                    low_us=timing.low_us,
                    high_us=timing.high_us,
                    speedup=dense / timing.median_us,
                    active_tflops=flop / timing.median_us / 1e6,
                )
            del candidates, timed, call
            torch.cuda.empty_cache()
    say(done=True)


def random_mask(rows: int, num_groups: int) -> Any:
    """Return a random mask with half of the pairs executing."""
    import torch

    return torch.rand(rows, num_groups, device="cuda") < 0.5


Taken = list[tuple[tuple[int, ...], int]]


def mn_candidates(name: str, rows: int, taken: Taken) -> dict[str, Any]:
    """Return calls that charge their reordering, and the operations of executing pairs."""
    import torch

    from wide.kernels.gemm_mn import MnTile, _gluon, gemm_mn
    from wide.kernels.reorder import reorder

    size, gated = SIZE[name], name == "gate_up"
    width = FFN if gated else HIDDEN
    mask = random_mask(rows, width // size)
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(2, width, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    options: dict[str, Any] = {
        "up_weight": weights[1] if gated else None,
        "activation": "silu" if gated else "none",
        "packed": False,
        "mask": None,
        "bias": None,
        "up_bias": None,
    }
    known = reorder(mask, backend="triton")
    triton_tile = MnTile(128, 64, 4, 8, 1, 2) if gated else MnTile(256, 64, 4, 8, 1, 1)
    found: dict[str, Any] = {
        "flop": 2.0 * mask.sum().item() * size * HIDDEN * (2 if gated else 1),
        "dense": lambda: gemm_mn(x, weights[0], known, **options, backend="dense"),
        "triton": lambda: gemm_mn(
            x, weights[0], reorder(mask, backend="triton"), **options, backend="triton", tile=triton_tile
        ),
    }
    zeroed = options | {"mask": mask}
    if gated:
        found["triton, zeros"] = lambda: gemm_mn(
            x, weights[0], reorder(mask, backend="triton"), **zeroed, backend="triton", tile=triton_tile
        )
    for tile, _ in taken:
        found[label(tile, 0)] = lambda tile=tile: _gluon.gemm_mn(
            x, weights[0], reorder(mask, backend="triton"), **options, tile=tile
        )
        found["order known, " + label(tile, 0)] = lambda tile=tile: _gluon.gemm_mn(
            x, weights[0], known, **options, tile=tile
        )
        if gated:
            found[label(tile, 0) + ", zeros"] = lambda tile=tile: _gluon.gemm_mn(
                x, weights[0], reorder(mask, backend="triton"), **zeroed, tile=tile
            )
    return found


def k_candidates(name: str, rows: int, taken: Taken) -> dict[str, Any]:
    """Return calls that charge sort, tile list, zeros and drain, and the operations of executing pairs."""
    import torch

    from wide.kernels.gemm_k import _gluon, gemm_k
    from wide.kernels.reorder import reorder_patterns

    size, depth = SIZE[name], HIDDEN if name == "o" else FFN
    num_groups = depth // size
    mask = random_mask(rows, num_groups)
    full = torch.randn(rows, num_groups, size, device="cuda", dtype=torch.bfloat16)
    zeros = torch.where(mask.unsqueeze(2), full, 0).view(rows, depth)
    full = full.view(rows, depth)
    weight = torch.randn(HIDDEN, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5

    def sort(groups: int) -> Any:
        return reorder_patterns(
            mask, groups_per_block=groups, block_m=128, keeps_empty=groups >= num_groups, backend="triton"
        )

    known = sort(8)
    peer = k_peer(name, rows)
    found: dict[str, Any] = {
        "flop": 2.0 * mask.sum().item() * size * HIDDEN,
        "dense": lambda: gemm_k(full, weight, known, group_size=size, backend="dense"),
        "dense on zeros": lambda: gemm_k(zeros, weight, known, group_size=size, backend="dense"),
        "triton s=8": lambda: gemm_k(full, weight, sort(8), group_size=size, backend="triton", tile=peer),
        "sort s=8": lambda: sort(8),
        "tile list s=8": lambda: _gluon.describe(known, 2),
    }

    def call(tile: tuple[int, ...], groups: int, order: Any = None) -> Any:
        tile = (*tile[:3], tile[3] or slab_of(rows), *tile[4:])
        options: dict[str, Any] = {"group_size": size, "bias": None, "out_dtype": torch.bfloat16}
        return _gluon.gemm_k(full, weight, order or sort(groups), **options, tile=tile)

    for tile, groups in taken:
        found[label(tile, groups)] = lambda tile=tile, groups=groups: call(tile, groups)
        order = sort(groups)
        found["order known, " + label(tile, groups)] = lambda tile=tile, groups=groups, order=order: call(
            tile, groups, order
        )
    return found


# ---- processes -------------------------------------------------------------------------------------------------------


class Watched:
    """A process of this program; its lines are read as they come.

    Args:
        name: For progress.
        arguments: Of the program.
        errors: Where its standard error goes.
    """

    def __init__(self, name: str, arguments: list[str], errors: Path) -> None:
        """Start it."""
        self.name = name
        self.errors = errors
        self.heard = time.monotonic()
        self.lines: list[dict[str, Any]] = []
        self.rest = b""
        self.why = ""
        with errors.open("w") as sink:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment(),
            )

    def read(self) -> bool:
        """Take what was written since; return False at the end of the stream."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data:
            return False
        self.heard = time.monotonic()
        *whole, self.rest = (self.rest + data).split(b"\n")
        for line in whole:
            if line.startswith(b"{"):
                self.lines.append(json.loads(line))
                show(self.name, self.lines[-1])
        return True

    def patience(self) -> float:
        """Return how long it may be silent: long until something is compiled."""
        at = self.lines[-1].get("at", "launch") if self.lines else "starting"
        return (
            STARTING_S
            if at in ("starting", "imported", "preparing", "compiled own", "peer not compiled", "ready")
            else SILENCE_S
        )

    def end(self, why: str) -> None:
        """Kill it."""
        self.why = why
        self.process.kill()

    def outcome(self) -> str:
        """Return 'done', or why it ended before and after which line."""
        last = self.lines[-1] if self.lines else {}
        if last.get("done"):
            return "done"
        reason = self.why or f"exit {self.process.poll()}: {self.errors.read_text()[-600:].strip()}"
        return f"{reason}; last line {json.dumps(last)}"


START = time.monotonic()


def show(name: str, line: dict[str, Any]) -> None:
    """Print a line of progress."""
    if "median_us" in line:
        text = (
            f"{line['candidate']:38s} M={line['rows']:<6d} {line['median_us']:8.1f} us "
            f"[{line['low_us']:.0f}-{line['high_us']:.0f}] x{line['speedup']:.3f} {line['active_tflops']:5.0f} TF"
        )
        name = line["bench"]
    else:
        text = json.dumps(line)
    print(f"{time.monotonic() - START:5.1f} {name:24s} {text}", flush=True)


def environment() -> dict[str, str]:
    """Return the environment of the processes, with this checkout's package first."""
    source = str(Path(__file__).resolve().parent.parent / "src")
    return {**os.environ, "PYTHONPATH": source + os.pathsep + os.environ.get("PYTHONPATH", "")}


def wait(processes: list[Watched], deadline: float) -> None:
    """Wait until all have ended; kill what is silent for too long, and all at the deadline."""
    selector = selectors.DefaultSelector()
    for one in processes:
        assert one.process.stdout is not None
        one.heard = time.monotonic()
        selector.register(one.process.stdout, selectors.EVENT_READ, one)
    while selector.get_map():
        for key, _ in selector.select(timeout=0.5):
            if not key.data.read():
                selector.unregister(key.fileobj)
        now = time.monotonic()
        for key in list(selector.get_map().values()):
            silent = now - key.data.heard > key.data.patience()
            if silent or now > deadline:
                key.data.end(f"silent for {key.data.patience():.0f} s" if silent else "out of time")
                selector.unregister(key.fileobj)
    for one in processes:
        try:
            one.process.wait(5)
        except subprocess.TimeoutExpired:
            one.end("did not end")


def check_all(out: Path, chosen: list[Variant], deadline: float) -> tuple[dict[str, Any], list[Variant]]:
    """Check variants, a few at once; return what was found and which agree."""
    running: list[tuple[Variant, Watched]] = []
    for start in range(0, len(chosen), PROCESSES):
        wave = []
        for i, variant in enumerate(chosen[start : start + PROCESSES], start):
            name, tile, groups = variant
            watched = Watched(f"{name} {label(tile, groups)}"[:24], ["--check", json.dumps(variant)], out / f"c{i}.log")
            wave.append((variant, watched))
        wait([one for _, one in wave], deadline)
        running += wave
    found, agreeing = {}, []
    for (name, tile, groups), one in running:
        key = f"{name}/{label(tile, groups)}"
        errors = {line["mask"]: line["error"] for line in one.lines if "mask" in line}
        moved = {line["mask"]: line["moved"] for line in one.lines if "mask" in line}
        # Reductions may differ between runs by the rounding of float32 sums to bfloat16.
        limit = 4e-3 if groups else 0.0
        agrees = one.outcome() == "done" and max(errors.values()) < 1e-2 and max(moved.values()) <= limit
        found[key] = {"outcome": one.outcome(), "errors": errors, "moved": moved, "agrees": agrees}
        if agrees:
            agreeing.append((name, tile, groups))
        print(f"{'ok ' if agrees else 'RED'} {key:40s} {errors} moved {moved} {one.outcome()[-700:]}", flush=True)
    return found, agreeing


def main() -> int:
    """Check, then time; write gluon.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for gluon.json and logs")
    parser.add_argument("--rows", default="4096,16384", help="comma-separated numbers of tokens")
    parser.add_argument("--benches", default=",".join(SIZE), help="comma-separated names")
    parser.add_argument("--rounds", type=int, default=8, help="timed replays of each candidate")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds after which everything ends")
    parser.add_argument("--all", action="store_true", help="take all variants, not the first of each bench")
    parser.add_argument("--check", help="(inner) the variant to check")
    parser.add_argument("--bench", action="store_true", help="(inner) time")
    options = parser.parse_args()
    names = options.benches.split(",")
    if options.check is not None:
        name, tile, groups = json.loads(options.check)
        check((name, tuple(tile), groups))
        return 0
    if options.bench:
        bench([int(count) for count in options.rows.split(",")], names, options.rounds)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = START + options.budget - 2
    arguments = ["--bench", "--rows", options.rows, "--benches", options.benches, "--rounds", str(options.rounds)]
    # Imports while the others check.
    timing = Watched("timing", arguments, options.out / "bench0.log")
    chosen = variants(names, every=options.all)
    found, agreeing = check_all(options.out, chosen, deadline - 20)
    records: list[dict[str, Any]] = []
    for attempt in range(2):
        told: dict[str, Any] = {"done": sorted({f"{record['bench']}@{record['rows']}" for record in records})}
        for name, tile, groups in agreeing:
            told.setdefault(name, []).append((tile, groups))
        assert timing.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            timing.process.stdin.write(json.dumps(told).encode() + b"\n")
            timing.process.stdin.flush()
        wait([timing], deadline)
        records += [line for line in timing.lines if "bench" in line]
        found[f"timing {attempt}"] = timing.outcome()
        if timing.outcome() == "done" or time.monotonic() > deadline - 15:
            break
        print(f"RED timing stopped: {timing.outcome()}", flush=True)
        stuck = [line["of"].split("/")[0] for line in timing.lines if line.get("at") in ("trying", "timing")][-1:]
        agreeing = [variant for variant in agreeing if variant[0] not in stuck]
        timing = Watched("timing", arguments, options.out / f"bench{attempt + 1}.log")
    (options.out / "gluon.json").write_text(json.dumps({"checks": found, "records": records}, indent=1))
    print(f"finished in {time.monotonic() - START:.0f} s")
    return 0 if len(agreeing) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
