"""Runs the small cases of every operator, for compute-sanitizer: a few minutes where a bench would take days.

Usage: compute-sanitizer --tool memcheck python -m benchmarks.sanitize [--operators gemm_mn,gemm_k] [--backends cuda]
       compute-sanitizer --tool racecheck --print-limit 10 python -m benchmarks.sanitize --limit 90

Every case is compared with its reference as well, in memory poisoned with NaN. Persistent kernels get few programs, so
that each of them carries out several tiles and the hand-over between tiles is checked, too.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.agreement import verdicts
from benchmarks.cases import OPERATORS
from wide.kernels.device import DeviceFacts, device_facts, hopper_obstacle

# Two clusters of two programs.
_LEAST_OF_PAIRS = 4


def few_programs(programs: int) -> Callable[[torch.device], DeviceFacts]:
    """Return facts of devices with so few multiprocessors."""
    return lambda device: dataclasses.replace(device_facts(device), num_sms=programs)


def limit_programs(programs: int) -> None:
    """Give the persistent Hopper products so few programs."""
    from wide.kernels.gemm_k import _cuda as gemm_k_cuda
    from wide.kernels.gemm_mn import _cuda as gemm_mn_cuda

    vars(gemm_k_cuda)["device_facts"] = few_programs(programs)
    # Its programs come in pairs, and one pair alone would share no work with another.
    vars(gemm_mn_cuda)["device_facts"] = few_programs(max(programs, _LEAST_OF_PAIRS))


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; return 1 if any result is wrong (what the sanitizer finds is its own matter)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", default=",".join(OPERATORS), help="comma-separated names")
    parser.add_argument("--backends", default="triton,cuda", help="comma-separated; those of Hopper where it is one")
    parser.add_argument("--device", default="cuda", help="'cpu' takes Triton's interpreter, for a try without a GPU")
    parser.add_argument("--programs", type=int, default=3, help="of persistent kernels")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no case is begun")
    options = parser.parse_args(arguments)
    names = options.operators.split(",")
    unknown = sorted(set(names) - set(OPERATORS))
    if unknown:
        parser.error(f"unknown operators {unknown}; choose from {', '.join(OPERATORS)}")
    device = torch.device(options.device)
    if hopper_obstacle(device) is None:
        limit_programs(options.programs)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    began, count, red = time.perf_counter(), 0, 0
    checked = verdicts(
        [OPERATORS[name] for name in names], device, backends=options.backends.split(","), dtypes=(dtype,)
    )
    for verdict in checked:
        count, red = count + 1, red + (not verdict.agrees)
        word = "ok " if verdict.agrees else "RED"
        print(
            word, verdict.operator, verdict.backend, f"{verdict.error:.1e}", verdict.case, verdict.failure, flush=True
        )
        if time.perf_counter() - began > options.limit:
            print(f"the rest is left out: {options.limit:g} s have passed")
            break
    print(f"{count} cases, {red} red")
    return int(red > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
