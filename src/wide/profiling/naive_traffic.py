"""What pruned products must move and store by the paper's accounting, without computing them: no GPU is needed.

Usage: python -m wide.profiling.naive_traffic --out DIR [--sizes 512,1024,2048,4096,8192] [--group-size 128]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from wide.profiling.naive_products import AXES, NAMES, work

# Of bfloat16.
_BYTES = 2


def records(sizes: list[int], *, group_size: int, active: float) -> list[dict[str, Any]]:
    """Return one record for each product: bytes moved and bytes of intermediates.

    Args:
        sizes: M = N = K.
        group_size: Channels of a group; whole tokens have none.
        active: Share that executes, in (0, 1].
    """
    found = []
    for size in sizes:
        for axis in AXES:
            for name in NAMES:
                counted = work(axis, name, size, group_size, active)
                record = {"axis": axis, "size": size, "group_size": group_size, "active": active, "candidate": name}
                record["accounted_traffic_bytes"] = counted.traffic * _BYTES
                record["accounted_storage_bytes"] = counted.storage * _BYTES
                found.append(record)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write naive.json with the accounting alone, print it, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for naive.json")
    parser.add_argument("--sizes", default="512,1024,2048,4096,8192", help="M = N = K, comma-separated")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--sparsity", type=float, default=0.5, help="share that is skipped")
    options = parser.parse_args(arguments)
    sizes = [int(word) for word in options.sizes.split(",")]
    found = records(sizes, group_size=options.group_size, active=1.0 - options.sparsity)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "naive.json").write_text(json.dumps({"device": "", "records": found}, indent=1) + "\n")
    for record in found:
        moved, stored = (record[f"accounted_{kind}_bytes"] / 2**20 for kind in ("traffic", "storage"))
        words = f"{record['axis']}  {record['size']:6d}  {record['candidate']:16s} {moved:14,.1f} {stored:14,.1f} MiB"
        sys.stdout.write(words + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
