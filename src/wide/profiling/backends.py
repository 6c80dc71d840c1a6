"""Which implementations a bench times beside the dense peers."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from wide.errors import ConfigError

TIMED = ("triton", "gluon", "cuda")
"""Backends that are timed; the dense peers always are, and 'torch' is the reference, which nobody waits for."""
HOPPER_OPERATORS: dict[str, tuple[str, ...]] = {
    "gluon": ("gemm_mn", "gemm_k", "prefill"),
    "cuda": ("gemm_mn", "gemm_k"),
}
"""Operators, as benches name them, of each backend that only Hopper GPUs have."""
Calls = TypeVar("Calls")


def backend_of(candidate: str) -> str:
    """Return 'dense', 'cuda', 'gluon' or 'triton' from the name of a candidate of a bench."""
    if candidate.startswith("dense"):
        return "dense"
    if "cuda" in candidate:
        return "cuda"
    return "gluon" if "gluon" in candidate or "hopper" in candidate else "triton"


def only_backends(candidates: Mapping[str, Calls], backends: Iterable[str]) -> dict[str, Calls]:
    """Return the dense peers and the candidates of the named backends."""
    wanted = {"dense", *backends}
    return {name: calls for name, calls in candidates.items() if backend_of(name) in wanted}


def parse_backends(text: str, operators: Sequence[str]) -> tuple[str, ...]:
    """Return the named backends.

    Args:
        text: Names separated by commas.
        operators: That are to be timed, as benches name them.

    Raises:
        ConfigError: If a backend is unknown, or an operator has none of those named.
    """
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = sorted(set(names) - set(TIMED))
    if unknown:
        known = f"{', '.join(TIMED[:-1])} and {TIMED[-1]}"
        raise ConfigError(f"backends are {known}, beside the dense peers that always run; got {unknown}")
    if "triton" not in names:
        having = dict.fromkeys(operator for name in names for operator in HOPPER_OPERATORS[name])
        without = sorted(set(operators) - set(having))
        if without:
            lacking = f"{', '.join(without)} have no {' or '.join(names)} backend"
            raise ConfigError(f"{lacking}; add triton, or time {', '.join(having)}")
    return names


def add_backend_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `parse_backends` reads."""
    parser.add_argument("--backends", default=",".join(TIMED), help="timed beside the dense peers, comma-separated")
