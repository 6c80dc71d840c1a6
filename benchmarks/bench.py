"""`wide bench`: time the operators against dense peers on a GPU; what disagrees with its reference is not timed."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wide.cli.arguments import Arguments
from wide.cli.measuring import noted, require_gpu
from wide.errors import ConfigError, EvaluationError, UsageError
from wide.runs.process import say
from wide.runs.settings import build
from wide.schema import positive_numbers

_BACKENDS = "triton,cuda"
_OPERATORS = ("reorder", "gemm_mn", "gemm_k", "prefill", "decode", "decode_groups", "gemv")
# Benches with a module of their own.
_MODULES = {
    "glue": "glue",
    "naive": "naive",
    "naive_depth": "naive_depth",
    "breakdown": "breakdown",
    "traffic": "naive",
}
# Only where they are named: one has all operators itself, one runs whole models, one computes nothing.
_NOT_ALL = ("coarse", "breakdown", "traffic")
_NAMES = (*_OPERATORS, "glue", "naive", "naive_depth", *_NOT_ALL)
# What a flag changes something of.
_GROUPED = ("gemm_mn", "gemm_k", "gemv", "naive", "breakdown", "traffic")
_ATTENTION = ("prefill", "decode", "decode_groups")
_TAKERS = {
    "rows": ("reorder", "gemm_mn", "gemm_k", "coarse", "naive", "naive_depth", "breakdown", "traffic"),
    "backends": ("reorder", "gemm_mn", "gemm_k", *_ATTENTION, "gemv"),
    "group_size": _GROUPED,
    "sparsity": (*_GROUPED, *_ATTENTION, "naive_depth"),
    "quick": ("reorder", "gemm_mn", "gemm_k", *_ATTENTION, "gemv", "naive", "naive_depth", "breakdown"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What is timed.

    Args:
        output: Folder for operators.json, attention.json, glue.json, naive.json, depth.json and breakdown.json; wide
            report draws them.
        operators: Names separated by commas: reorder, gemm_mn, gemm_k, prefill, decode, decode_groups (decode over the
            heads of a group), gemv, glue (norm, rope and router), naive (products by gathering and scattering beside
            fused ones), naive_depth (those over whole tokens taken apart: indices, sort, gather, product, scatter),
            coarse (all operators with their default tiles over numbers of tokens, group sizes and sparsities),
            breakdown (where the time of a whole model's layers goes), traffic (what naive must move and store, computed
            from sizes alone, without a GPU); 'all' means all but the last three.
        rows: Numbers of tokens for reorder, gemm_mn, gemm_k, naive_depth and coarse, separated by commas; null means
            1024,4096,16384, for naive_depth 64, too. For naive and traffic, where they are named, M = N = K; null means
            512,1024,2048, for traffic larger ones, too. For breakdown the prompt's; null means 16384. Sequences and
            caches of the others have lengths of their own, and gemv 1, 2 and 4 rows.
        backends: Timed next to the dense peers, separated by commas: triton, on a Hopper cuda (gemm_mn, gemm_k), and
            where it is named tilelang (prefill), and those of benchmarks/languages.
            Not for glue, naive, naive_depth, coarse, breakdown and traffic.
        group_size: Channels in a group of the FFN, for gemm_mn, gemm_k, gemv, naive, breakdown and traffic; null means
            the usual ones. With 'all' operators it is for those of them, and so are the next two.
        sparsity: Share that random masks skip (routers for breakdown), not for reorder, glue and coarse; null means the
            usual ones.
        quick: Fewer shapes, tiles and rounds; not for glue, coarse and traffic.
        timed_only: Compare candidates at the timed shapes alone, not in all cases of the operators.
        description: What this bench is for, in a sentence.
    """

    output: str
    operators: str = "all"
    rows: str | None = None
    backends: str = _BACKENDS
    group_size: int | None = None
    sparsity: float | None = None
    quick: bool = False
    timed_only: bool = False
    description: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be timed."""
        positive_numbers(self.rows, "rows")
        if self.sparsity is not None and not 0.0 <= self.sparsity < 1.0:
            raise ConfigError(f"sparsity must lie in [0, 1), got {self.sparsity}; 0.5 skips half of the work")
        # The FFN of the measured shapes has 14336 channels.
        if self.group_size is not None and (self.group_size < 16 or 14336 % self.group_size):
            raise ConfigError(f"group_size must divide 14336 and be at least 16, got {self.group_size}")

    @property
    def names(self) -> list[str]:
        """The operators by name."""
        if self.operators == "all":
            return [name for name in _NAMES if name not in _NOT_ALL]
        return [word.strip() for word in self.operators.split(",")]

    def given(self, *names: str) -> dict[str, Any]:
        """Return the fields that are not null, rows as numbers."""
        found = {name: getattr(self, name) for name in names}
        if found.get("rows") is not None:
            found["rows"] = positive_numbers(self.rows, "rows")
        return {name: value for name, value in found.items() if value is not None}


def arguments() -> Arguments:
    """Return the flags of the command."""
    flags = Arguments(
        "bench",
        "Time the operators at Llama-3.1-8B's shapes against dense peers, agreement first.",
        usage="--output BENCH [FLAGS]",
        first=("output", "operators", "sparsity", "quick"),
    )
    flags.add_fields(BenchOptions)
    return flags


def run(given: Sequence[str]) -> None:
    """Carry out the command."""
    options = build(BenchOptions, arguments().parse(given))
    unknown = sorted(set(options.names) - set(_NAMES))
    if unknown:
        raise UsageError(f"unknown operators {unknown}; choose from {', '.join(_NAMES)} or 'all'")
    _check_flags(options)
    names = options.names
    if names != ["traffic"]:
        require_gpu("bench")
    out = Path(options.output)
    # What runs over all sizes has a folder of its own.
    with noted(out, "bench", given), noted(out / "coarse", "bench", given):
        red = _race_operators([name for name in names if name not in _MODULES], options)
        # One that is red costs no other.
        red += [name for name in names if name in _MODULES and not _run_module(name, options)]
    if red:
        raise EvaluationError(
            f"some operators disagree with their references (benches: {', '.join(red)}; marked RED above and in "
            f"{options.output}); their times mean nothing"
        )


def _check_flags(options: BenchOptions) -> None:
    if options.backends != _BACKENDS:
        from benchmarks.operators import parse_backends

        importlib.import_module("benchmarks.languages")
        parse_backends(options.backends, ())
    usual = BenchOptions(output=options.output)
    for flag, takers in _TAKERS.items():
        value = getattr(options, flag)
        others = [name for name in options.names if name not in takers]
        if value == getattr(usual, flag) or not others:
            continue
        # Sequences have lengths of their own, so that rows are for what stands beside them. 'all' means all that take a
        # flag; only backends are named to leave others out.
        mixes = flag == "rows" or (flag != "backends" and options.operators == "all")
        if not mixes or len(others) == len(options.names):
            raise UsageError(
                f"--{flag} does not go with {', '.join(others)} (got {value}): it is for {', '.join(takers)}; leave it "
                "out, or name only those in --operators"
            )
    if options.backends != _BACKENDS:
        parse_backends(options.backends, options.names)


def _race_operators(names: Sequence[str], options: BenchOptions) -> list[str]:
    if not names:
        return []
    import torch

    from benchmarks.operators import BenchRequest, parse_backends, run_bench

    torch.manual_seed(17)
    request = BenchRequest(
        names=names,
        backends=parse_backends(options.backends, ()),
        quick=options.quick,
        gated=not options.timed_only,
        **options.given("rows", "group_size", "sparsity"),
    )
    return run_bench(request, Path(options.output), device=torch.device("cuda", torch.cuda.current_device()), say=say)


def _run_module(name: str, options: BenchOptions) -> bool:
    """Run a bench of its own; return whether everything agreed with its reference."""
    module = importlib.import_module(f"benchmarks.{_MODULES[name]}")
    out = Path(options.output)
    if name == "glue":
        return bool(module.run(out))
    if name == "naive_depth":
        # Whole tokens skip: there is no size of groups to pass on.
        return bool(module.run(out, quick=options.quick, **options.given("rows", "sparsity")))
    shape = options.given("group_size", "sparsity")
    if name == "breakdown":
        return bool(module.run(out, quick=options.quick, **shape, **options.given("rows")))
    # Among all operators naive keeps its own sizes: the rows are those of the others.
    if options.operators != "all" and options.rows is not None:
        shape["sizes"] = options.given("rows")["rows"]
    if name == "traffic":
        module.traffic(out, **shape)
        return True
    return bool(module.run(out, quick=options.quick, **shape))
