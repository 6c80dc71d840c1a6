"""bench.py OUT [--masks MASKS.npz] [--seconds 300]: is reorder_rows in CUDA C++ right, how long does it take, what do other ways take.

PYTHONPATH=src, one H200. Each section (equality, timing, kernels, variants) is a process of its own: a crash or a hang ends that one only.
MASKS.npz: arrays bool [M, N_G], packed by numpy.packbits along the last axis, named after the masks.
"""

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
from equality import equality
from masks import trained_masks
from record import Record, began, say
from times import kernels, timing
from ways import variants

SECTIONS = ("equality", "timing", "kernels", "variants")
# Of the whole time, at most so much for one.
SHARES = {"equality": 0.4, "timing": 0.4, "kernels": 0.5, "variants": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--masks", type=Path, default=None)
    parser.add_argument("--seconds", "--limit", type=float, default=300.0, help="after which no entry is begun")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--here", action="store_true", help="one section, in this process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.sections.split(",")
    if options.here:
        (name,) = names
        record = Record(options.out / f"order-{name}.json", options.seconds)
        try:
            masks = trained_masks(options.masks)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            masks = {}
        section = {"equality": equality, "timing": timing, "kernels": kernels, "variants": variants}[name]
        try:
            section(record, masks)
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            record.failed.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
        record.write()
        say(f"SECTION {name}: {len(record.entries)} entries, {len(record.failed)} failed")
        for line in record.failed:
            say("  failed:", line)
        return int(bool(record.failed))
    red = 0
    for name in names:
        left = options.seconds - (time.time() - began)
        if left < 10:
            say("LEFT OUT, the time is over: section", name)
            red = 1
            continue
        share = max(10.0, left * SHARES[name])
        say(f"SECTION {name}, {share:.0f} s")
        command = [
            sys.executable,
            __file__,
            str(options.out),
            "--here",
            "--sections",
            name,
            "--seconds",
            f"{share:.0f}",
        ]
        if options.masks is not None:
            command += ["--masks", str(options.masks)]
        try:
            # A last entry may begin at the end of its time; one that hangs is ended.
            red |= subprocess.run(command, timeout=share + 45, check=False).returncode
        except subprocess.TimeoutExpired:
            say(f"SECTION {name} did not end and was killed")
            red = 1
    return int(bool(red))


if __name__ == "__main__":
    with torch.no_grad():
        raise SystemExit(main())
