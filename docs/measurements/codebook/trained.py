"""What one sort is worth to the down product under masks of trained routers.

Usage, on one H200: PYTHONPATH=src python docs/measurements/codebook/trained.py OUT MASKS.npz

MASKS.npz holds masks bool [16384, N_G] by name, packed by numpy.packbits along axis 1; groups get 128 channels each and
random weights. Beside them independent masks of Llama-3.1-8B's 112 groups. The order is compared with its reference,
the product with one in float32. Writes OUT/down-one-sort-trained.json, after each mask and number of rows.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wide.kernels.gemm_k_rows import gemm_k_rows
from wide.kernels.reorder_rows import reorder_rows
from wide.kernels.reorder_rows.reference import reorder_rows_reference
from wide.profiling.timing import time_interleaved

HIDDEN, SIZE, WORD = 4096, 128, 32
ROWS = (16384, 4096)
INDEPENDENT_GROUPS, SEED = 112, 17
ROUNDS, CHECKED_ROWS, TOLERANCE = 8, 256, 5e-3
WHAT = (
    "down over one sort of all groups (reorder_rows, gemm_k_rows), random weights [4096, K], groups of 128 channels, "
    "under masks of trained routers (nano, 96 groups of 8 channels each, drawn on as many rows of held-out text; here "
    "groups of 128, K = 12288) and independent ones (112 groups, K = 14336); 4096 rows are the first of 16384"
)
ADAPTERS = {
    "g8": "wide prune --config quickstart --ffn_group_size 8: stage 1 of 150 steps, stage 2 of 60 "
    "(operators/trained-masks.md)",
    "g8-long": "the same with stage 1 of 600 steps, stage 2 of 200 (as in records/nano-masks.json)",
}
CANDIDATES = {
    "rows": "reorder_rows and gemm_k_rows",
    "rows, order known": "gemm_k_rows alone",
    "order": "reorder_rows alone",
}
began = time.time()


def say(*words: object) -> None:
    """Print at once, with the seconds so far."""
    print(f"{time.time() - began:6.1f}", *words, flush=True)  # noqa: T201


def commit() -> str:
    """Return which commit is checked out."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


class Record:
    """What was measured, on disk after each entry.

    Args:
        path: Of the file.
        head: What holds for all entries.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Begin without entries; nothing is written yet."""
        self.path, self.head = path, head
        self.entries: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.error = 0.0

    def write(self) -> None:
        """Write what there is."""
        checked = (
            f"; worst error {self.error:.1e} ({CHECKED_ROWS} rows each, skipped channels NaN, against float32); "
            "all orders equal to the reference's"
        )
        content = {**self.head, "command": self.head["command"] + checked, "entries": self.entries}
        if self.failed:
            content["failed"] = self.failed
        self.path.write_text(json.dumps(content, indent=1) + "\n")


def named_masks(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Return masks of the largest number of rows on the CPU."""
    independent = torch.rand(max(ROWS), INDEPENDENT_GROUPS, generator=torch.Generator().manual_seed(SEED)) < 0.5
    yield "independent", independent
    with np.load(path) as packed:
        for name in packed.files:
            yield name, torch.from_numpy(np.unpackbits(packed[name], axis=1).astype(bool))


def executed(unions: torch.Tensor, groups: int) -> tuple[float, float]:
    """Return the shares that consumers multiply and that tiles load."""
    bits = unions[:, :, None] >> torch.arange(WORD, device=unions.device) & 1
    tiles = bits[0::2] | bits[1::2]
    return bits.sum().item() / (len(bits) * groups), tiles.sum().item() / (len(tiles) * groups)


def race(name: str, mask: torch.Tensor, record: Record) -> None:
    """Check and time the product under a mask, and add it to the record."""
    rows, groups = mask.shape
    channels = groups * SIZE
    torch.manual_seed(SEED)
    weight = torch.randn(HIDDEN, channels, device="cuda", dtype=torch.bfloat16) * channels**-0.5
    h = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16)
    order = reorder_rows(mask, backend="cuda")
    for part, got, wanted in zip(order._fields, order, reorder_rows_reference(mask), strict=True):
        if not torch.equal(got, wanted):
            raise AssertionError(f"{name}, {rows} rows: {part} is not the reference's")
    wide_mask = mask.repeat_interleave(SIZE, 1)
    zeros = torch.where(wide_mask, h, 0)
    holes = torch.where(wide_mask, h, float("nan"))
    some = torch.randperm(rows, device="cuda")[:CHECKED_ROWS]
    whole = gemm_k_rows(holes, weight, reorder_rows(mask, backend="cuda"), group_size=SIZE, backend="cuda")
    # cuBLAS may add in the same order; zeros add nothing to it.
    same_bits = (whole == zeros @ weight.t()).double().mean().item()
    got = whole[some].float()
    wanted = zeros[some].float() @ weight.float().t()
    error = ((got - wanted).norm() / wanted.norm()).item()
    # Not `error >= TOLERANCE`: it may be NaN.
    if not error < TOLERANCE:
        raise AssertionError(f"{name}, {rows} rows: relative error {error:.1e}")
    del holes, wide_mask, whole, got, wanted
    units, tiles = executed(order.unions, groups)
    active = mask.double().mean().item()
    say(name, rows, f"error {error:.1e}, equal to cuBLAS on zeros {same_bits:.4f}, active {active:.3f}, executed by units {units:.3f}, by tiles {tiles:.3f}")
    times = time_interleaved(
        {
            "dense": lambda: h @ weight.t(),
            "dense on zeros": lambda: zeros @ weight.t(),
            "rows": lambda: gemm_k_rows(h, weight, reorder_rows(mask, backend="cuda"), group_size=SIZE, backend="cuda"),
            "rows, order known": lambda: gemm_k_rows(h, weight, order, group_size=SIZE, backend="cuda"),
            "order": lambda: reorder_rows(mask, backend="cuda"),
        },
        rounds=ROUNDS,
    )
    record.error = max(record.error, error)
    for candidate, timing in times.items():
        facts = dataclasses.asdict(timing)
        del facts["num_samples"]
        speedup = times["dense"].median_us / timing.median_us
        head = {"name": name, "rows": rows, "groups": groups, "candidate": candidate}
        shares = {"units": units, "tiles": tiles, "active": active, "same_bits": same_bits}
        record.entries.append({**head, **facts, "speedup": speedup, **shares})
        say(f"  {candidate}: {timing.median_us:.1f} us [{timing.low_us:.1f}-{timing.high_us:.1f}] x{speedup:.3f}")


def main() -> int:
    """Time all masks; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("masks", type=Path)
    parser.add_argument("--seconds", "--limit", type=float, default=float("inf"), help="after which none is begun")
    parser.add_argument("--commit", default=None, help="for the record, where git does not tell")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    head = {
        "what": WHAT,
        "adapters": ADAPTERS,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": options.commit or commit(),
        "command": "PYTHONPATH=src python docs/measurements/codebook/trained.py OUT MASKS.npz",
        "candidates": CANDIDATES,
        "executed": "share of pairs that units of 64 and tiles of 128 sorted rows execute",
    }
    record = Record(options.out / "down-one-sort-trained.json", head)
    for name, whole in named_masks(options.masks):
        for rows in ROWS:
            if time.time() - began > options.seconds:
                say(name, rows, "left out: the time is over")
                record.failed.append(f"{name}, {rows} rows: left out, the time was over")
                continue
            try:
                race(name, whole[:rows].cuda(), record)
            except Exception as error:  # the others are still to be timed
                traceback.print_exc(file=sys.stdout)
                record.failed.append(f"{name}, {rows} rows: {type(error).__name__}: {str(error)[:300]}")
            record.write()
            torch.cuda.empty_cache()
    record.write()
    say(f"{len(record.entries)} entries, {len(record.failed)} failed")
    return int(bool(record.failed))


if __name__ == "__main__":
    with torch.no_grad():
        raise SystemExit(main())
