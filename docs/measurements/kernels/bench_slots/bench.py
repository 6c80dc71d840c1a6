"""bench.py OUT NAME...: checks complete variants of build/ against the masked product, then times all beside cuBLAS."""

import itertools
import json
import sys
from pathlib import Path

import torch

from wide.kernels.native.launch import Kernel
from wide.profiling.timing import time_interleaved

BUILD = Path(__file__).with_name("build")
SHARED, TILE, RECORD_WORDS = 228192, 256, 16 * 12 // 2 + 4 * 7 + 4
WIDTH, FFN, MULTIPROCESSORS = 4096, 14336, 132
KINDS = (0.5, -1.0, 2.0, 0.05, 0.3, 0.7, 0.9)


def cluster(name):
    return 2 if name == "shared" else 1


def assign(kernel, name, mask):
    """Return records, entries and their numbers, and how many a tile has room for."""
    (rows, groups), device = mask.shape, mask.device
    tiles, room = -(-rows // (TILE * cluster(name))) * cluster(name), 5 * groups
    sizes = (tiles * room * RECORD_WORDS, tiles * room, tiles)
    records, entries, counts = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    kernel._threads = -(-4 * groups // 32) * 32
    kernel(device, tiles, mask, records, entries, counts, rows, groups, room)
    return records, entries, counts, room


def multiply(kernel, name, h, weight, order, size):
    records, entries, counts, room = order
    out = torch.empty(h.shape[0], weight.shape[0], device=h.device, dtype=h.dtype)
    box = kernel.tensor_map(weight, 128 // cluster(name), 64)
    steps = (h.shape[0], weight.shape[0], size, h.stride(0), out.stride(0), room)
    kernel(h.device, MULTIPROCESSORS, box, h, out, records, entries, counts, *steps)
    return out


def masked(rows, groups, size, rate, generator):
    """Return a mask, rows with NaN where they skip, and with zeros there."""
    mask = (torch.rand(rows, groups, generator=generator) < rate).cuda()
    h = torch.randn(rows, groups, size, device="cuda", dtype=torch.bfloat16)
    holes = [torch.where(mask.unsqueeze(2), h, value).view(rows, -1) for value in (float("nan"), 0.0)]
    return mask, *holes


def main():
    out, names = Path(sys.argv[1]), sys.argv[2:]
    torch.zeros(1, device="cuda")
    codes = {name: (BUILD / f"{name}.cubin").read_bytes() for name in names}
    products = {name: Kernel(code, "spread", threads=384, shared_bytes=SHARED, instead="dense") for name, code in codes.items()}
    matchers = {name: Kernel(code, "assign", threads=512, shared_bytes=0, instead="dense") for name, code in codes.items()}
    generator, worst = torch.Generator().manual_seed(3), 0.0
    whole = [name for name in names if "-" not in name]
    shapes = ((3, 64, 128), (40, 128, 256), (112, 64, 384), (128, 128, 256))
    for name, rows, shape, rate in itertools.product(whole, (1, 7, 64, 255, 256, 257, 700, 1111), shapes, KINDS):
        groups, size, width = shape
        mask, poisoned, zeroed = masked(rows, groups, size, rate, generator)
        weight = torch.randn(width, groups * size, device="cuda", dtype=torch.bfloat16) / (groups * size) ** 0.5
        got = multiply(products[name], name, poisoned, weight, assign(matchers[name], name, mask), size).float()
        wanted = zeroed.float() @ weight.float().t()
        error = (
            ((got - wanted).norm() / wanted.norm().clamp_min(1e-9)).item() if wanted.any() else got.abs().max().item()
        )
        worst = max(worst, error)
        if not error < 5e-3:
            raise SystemExit(f"{name} {rows} {shape} {rate}: {error}")
    print(f"{whole} agree, worst {worst:.2e}")
    found = []
    for rows, size in ((4096, 128), (16384, 128), (4096, 256), (16384, 256)):
        mask = (torch.rand(rows, FFN // size, generator=generator) < 0.5).cuda()
        weight = torch.randn(WIDTH, FFN, device="cuda", dtype=torch.bfloat16) / FFN**0.5
        h = torch.randn(rows, FFN, device="cuda", dtype=torch.bfloat16)
        orders = {name: assign(matchers[name], name, mask) for name in names}
        calls = {"dense": lambda h=h, weight=weight: h @ weight.t()}
        calls["assign"] = lambda mask=mask: assign(matchers[names[0]], names[0], mask)
        for name in names:
            calls[name] = lambda name=name, h=h, weight=weight, orders=orders, size=size: multiply(
                products[name], name, h, weight, orders[name], size
            )
        times = time_interleaved(calls, rounds=4)
        for name, time in times.items():
            ratio = times["dense"].median_us / time.median_us
            found.append({"rows": rows, "group_size": size, "candidate": name, "us": time.median_us, "of_dense": ratio})
            print(found[-1])
    (out / "down-slots.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
