"""Which half of the second-level cache owns what, and what that is worth: python docs/measurements/kernels/bench_sides/sides.py OUT

A multiprocessor is next to one half of the cache, and every 4 KB of memory belongs to one. Both are found by the clocks of
atomic additions, which are made where a line is owned. Then reductions and loads are timed within a half and across.
"""

import ctypes
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "bench_sorted"))
from driver import CUDA, byref, c_char_p, c_int, c_uint, c_void_p, check  # noqa: E402

PAGE_PAIRS = 256  # pairs of 4 KB in the 2 MB that are whole in physical memory


class Module:
    def __init__(self, path):
        self.module = c_void_p()
        check(CUDA.cuModuleLoadData(byref(self.module), c_char_p(open(path, "rb").read())), "cuModuleLoadData")

    def launch(self, name, grid, block, *arguments, shared=0):
        import torch

        function = c_void_p()
        check(CUDA.cuModuleGetFunction(byref(function), self.module, c_char_p(name.encode())), "cuModuleGetFunction")
        if shared:
            check(CUDA.cuFuncSetAttribute(function, c_int(8), c_int(shared)), "cuFuncSetAttribute")
        values = [c_void_p(a.data_ptr()) if hasattr(a, "data_ptr") else c_uint(a) for a in arguments]
        pointers = (c_void_p * len(values))(*[ctypes.cast(ctypes.pointer(v), c_void_p) for v in values])
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        check(
            CUDA.cuLaunchKernel(
                function, c_uint(grid), c_uint(1), c_uint(1), c_uint(block), c_uint(1), c_uint(1), c_uint(shared), stream, pointers, c_void_p(0)
            ),
            name,
        )


class Sides:
    """`of`: int32 [multiprocessors], the side of each; sides are numbered so that the first 4 KB of `anchor` are on side 0."""

    def __init__(self, cubin):
        import torch

        self.anchor = aligned(2 << 20)  # first of all: torch makes the context
        self.module = Module(cubin)
        number = torch.cuda.get_device_properties(0).multi_processor_count
        clocks = []
        for chunk in (0, 1):
            turn = torch.zeros(1, dtype=torch.int32, device="cuda")
            out = torch.zeros(number, dtype=torch.int32, device="cuda")
            self.module.launch("multiprocessors", number, 32, self.anchor[chunk * 4096 :], turn, out, shared=200 << 10)
            torch.cuda.synchronize()
            clocks.append(out.float() / 64)
        self.clocks = clocks
        self.of = (clocks[0] > clocks[1]).int()

    def owners(self, buffer):
        """Return int32 [bytes / 8192]: the side of the first half of each 8 KB of a 2 MB-aligned buffer, and clocks [pairs, 2]."""
        import torch

        number = buffer.numel() * buffer.element_size() // 4096
        following = torch.zeros(1, dtype=torch.int32, device="cuda")
        out = torch.zeros(number, dtype=torch.int32, device="cuda")
        self.module.launch("chunks", len(self.of), 128, buffer, number, self.of, following, out, shared=200 << 10)
        torch.cuda.synchronize()
        clocks = out.view(-1, 2)
        return (clocks[:, 0] > clocks[:, 1]).int(), clocks

    @staticmethod
    def rule(owner):
        """Return the mask of pair numbers within a page whose parity is the owner, and the share of pairs for which it is."""
        import torch

        pages = owner.view(-1, PAGE_PAIRS)
        flipped = pages ^ pages[:, :1]
        mask = sum((1 << bit) for bit in range(8) if flipped[:, 1 << bit].float().mean() > 0.5)
        numbers = torch.tensor([bin(q & mask).count("1") & 1 for q in range(PAGE_PAIRS)], dtype=torch.int32, device=owner.device)
        return mask, (flipped == numbers).float().mean().item()


def aligned(size):
    """Return uint8 [size] that begins at 2 MB."""
    import torch

    room = torch.zeros(size + (2 << 20), dtype=torch.uint8, device="cuda")
    return room[-room.data_ptr() % (2 << 20) :][:size]


def main():
    import torch

    out = sys.argv[1]
    sides = Sides(os.environ.get("SIDES_CUBIN", os.path.join(HERE, "build", "sides.cubin")))
    record = {"multiprocessors": sides.of.tolist(), "clocks": [c.tolist() for c in sides.clocks]}
    print("sides", sides.of.sum().item(), "of", len(sides.of), "clocks near / far", [torch.minimum(*sides.clocks).mean().item(), torch.maximum(*sides.clocks).mean().item()])
    print("smallest difference", (sides.clocks[0] - sides.clocks[1]).abs().min().item(), "".join(map(str, sides.of.tolist())))
    big = aligned(512 << 20)
    owner, clocks = sides.owners(big)
    again, _ = sides.owners(big)
    gap = (clocks[:, 0] - clocks[:, 1]).abs().float()
    mask, share = sides.rule(owner)
    record |= {"owner_repeats": (owner == again).float().mean().item(), "mask": mask, "mask_share": share, "gap": [gap.min().item(), gap.median().item()]}
    record["pages"] = owner.view(-1, PAGE_PAIRS)[:, 0].tolist()
    print("owners: again alike", record["owner_repeats"], "mask of pairs", hex(mask), "holds for", share, "gap least, median", record["gap"])
    print("pages", "".join(map(str, record["pages"])))
    data = aligned(1024 << 20)
    data_owner, _ = sides.owners(data)
    sink = torch.zeros(1, device="cuda")
    rows = []
    NAMES = ("near", "far", "both")

    def run(sum_mib, where_sums, data_mib, where_data, adders):
        rounds = 400
        arguments = (big, sum_mib * 128, owner, where_sums, data, data_mib * 128, data_owner, where_data, sides.of, adders, rounds, sink)
        times = []
        for _ in range(5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            sides.module.launch("bandwidth", len(sides.of), 1024, *arguments)
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 1e-3)
        seconds = sorted(times)[2]
        whole = len(sides.of) * 32 * rounds * 4096
        row = {
            "sums_mib": sum_mib, "sums": NAMES[where_sums] if adders else None, "data_mib": data_mib, "data": NAMES[where_data] if adders < 32 else None,
            "adders": adders, "sums_tbs": whole * adders / 32 / seconds / 1e12, "data_tbs": whole * (32 - adders) / 32 / seconds / 1e12,
        }  # fmt: skip
        rows.append(row)
        print(" ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    for mib in (16, 32, 64, 256):
        for where in range(3):
            run(mib, where, 64, 0, 32)
    for mib in (8, 16, 32, 64, 1024):
        for where in range(3):
            run(16, 0, mib, where, 0)
    for adders in (8, 16):
        for sum_mib in (16, 32):
            for data_mib in (8, 16, 1024):
                for where_sums, where_data in ((0, 0), (2, 2), (0, 2), (2, 0), (1, 1)):
                    run(sum_mib, where_sums, data_mib, where_data, adders)
    record["bandwidth"] = rows
    with open(os.path.join(out, "sides.json"), "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main()
