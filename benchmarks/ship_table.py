"""Turns records of `wide bench` into a table of measured choices that ships with the package.

Usage: python -m benchmarks.ship_table --records operators.json attention.json --out src/wide/kernels/tuned/GPU.json
"""

import argparse
import json
import sys
from pathlib import Path

from wide.inference.tuning.tune import fastest
from wide.kernels.tuning import TuningTable


def main(arguments: list[str] | None = None) -> int:
    """Add the fastest choices to a table and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table to add to")
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="files of earlier runs")
    options = parser.parse_args(arguments)
    found = fastest(record for path in options.records for record in json.loads(path.read_text())["records"])
    # Shipped entries name no versions: they are the layer below what a user measures.
    choices = {key: choice for key, (_, _, choice) in found.items()}
    TuningTable(options.out).store_all(choices)
    for key, choice in sorted(choices.items()):
        print(f"{choice.median_us:9.1f} us {choice.backend} {choice.block_m} {choice.tile}: {key}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
