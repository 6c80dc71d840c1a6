"""`wide bench`: time the operators against dense peers on a GPU; what disagrees with its reference is not timed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wide.cli.arguments import Arguments, build
from wide.cli.gpu import require_gpu
from wide.cli.provenance import noted
from wide.errors import ConfigError, EvaluationError, UsageError

_ROWS = "1024,4096,16384"
_BACKENDS = "triton,gluon,cuda"
# Which bench serves an operator.
_BENCHES = {
    "reorder": "operators",
    "gemm_mn": "operators",
    "gemm_k": "operators",
    "prefill": "attention",
    "decode": "attention",
    "decode_groups": "attention",
    "gemv": "attention",
    "glue": "glue",
    "naive": "naive",
    "naive_depth": "naive_depth",
    "coarse": "coarse",
    "traffic": "traffic",
}
# Only where they are named: the one has all operators itself, the other computes nothing.
_NOT_ALL = ("coarse", "traffic")
# What a flag changes something of.
_GROUPED = ("gemm_mn", "gemm_k", "gemv", "naive", "traffic")
_ATTENTION = ("prefill", "decode", "decode_groups")
_TAKERS = {
    "rows": ("reorder", "gemm_mn", "gemm_k", "coarse", "naive", "naive_depth", "traffic"),
    "backends": ("reorder", "gemm_mn", "gemm_k", *_ATTENTION, "gemv"),
    "group_size": _GROUPED,
    "sparsity": (*_GROUPED, *_ATTENTION, "naive_depth"),
    "quick": ("reorder", "gemm_mn", "gemm_k", *_ATTENTION, "gemv", "naive", "naive_depth"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What is timed.

    Args:
        out: Folder for operators.json, attention.json, glue.json, naive.json and depth.json; wide report draws them.
        operators: Names separated by commas: reorder, gemm_mn, gemm_k, prefill, decode, decode_groups (decode over the
            heads of a group), gemv, glue (norm, rope and router), naive (products by gathering and scattering beside
            fused ones), naive_depth (those over whole tokens taken apart: indices, sort, gather, product, scatter),
            coarse (all operators with their default tiles over numbers of tokens, group sizes and sparsities), traffic
            (what naive must move and store, computed from sizes alone, without a GPU); 'all' means all but coarse and
            traffic.
        rows: Numbers of tokens for reorder, gemm_mn, gemm_k, naive_depth and coarse, separated by commas; null means
            1024,4096,16384, for naive_depth 64, too. For naive and traffic, where they are named, M = N = K; null means
            512,1024,2048, for traffic larger ones, too. Sequences and caches of the others have lengths of their own,
            and gemv 1, 2 and 4 rows.
        backends: Timed beside the dense peers, separated by commas: triton, and where the GPU is a Hopper and the
            operator has them gluon (gemm_mn, gemm_k, prefill) and cuda (gemm_mn, gemm_k). Not for glue, naive,
            naive_depth, coarse and traffic.
        group_size: Channels in a group of the FFN, for gemm_mn, gemm_k, gemv, naive and traffic; null means the usual
            ones. With 'all' operators it is for those of them, and so are the next two.
        sparsity: Share that random masks skip, not for reorder, glue and coarse; null means the usual ones.
        quick: Fewer shapes, tiles and rounds; not for glue, coarse and traffic.
        description: What this bench is for, in a sentence.
    """

    out: str
    operators: str = "all"
    rows: str | None = None
    backends: str = _BACKENDS
    group_size: int | None = None
    sparsity: float | None = None
    quick: bool = False
    description: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be timed."""
        words = (self.rows or _ROWS).split(",")
        if not all(word.strip().isdigit() and int(word) > 0 for word in words):
            raise ConfigError(f"rows must be positive numbers separated by commas, got {self.rows!r}")
        if self.sparsity is not None and not 0.0 <= self.sparsity < 1.0:
            raise ConfigError(f"sparsity must lie in [0, 1), got {self.sparsity}; 0.5 skips half of the work")
        # The FFN of the measured shapes has 14336 channels.
        if self.group_size is not None and (self.group_size < 16 or 14336 % self.group_size):
            raise ConfigError(f"group_size must divide 14336 and be at least 16, got {self.group_size}")

    @property
    def names(self) -> list[str]:
        """The operators by name."""
        if self.operators == "all":
            return [name for name in _BENCHES if name not in _NOT_ALL]
        return [word.strip() for word in self.operators.split(",")]


def arguments() -> Arguments:
    """Return the flags of the command."""
    flags = Arguments("bench", "Time the operators at Llama-3.1-8B's shapes against dense peers, agreement first.")
    flags.add_fields(BenchOptions)
    return flags


def run(given: Sequence[str]) -> None:
    """Carry out the command.

    Raises:
        UsageError: If an operator is unknown, or does not take a flag that was given.
        ConfigError: If a backend is unknown, or an operator has none of those named.
        UnsupportedBackendError: If there is no GPU.
        EvaluationError: If an operator disagrees with its reference.
    """
    options = build(BenchOptions, arguments().parse(given))
    unknown = sorted(set(options.names) - set(_BENCHES))
    if unknown:
        raise UsageError(f"unknown operators {unknown}; choose from {', '.join(_BENCHES)} or 'all'")
    _check_flags(options)
    if options.names != ["traffic"]:
        require_gpu("bench")
    out = Path(options.out)
    # What runs over all sizes has a folder of its own.
    with noted(out, "bench", given), noted(out / "coarse", "bench", given):
        # One that is red costs no other.
        red = [bench for bench in dict.fromkeys(_BENCHES.values()) if _carry_out(bench, options)]
    if red:
        benches = "; ".join(f"{bench} of {', '.join(_asked(bench, options))}" for bench in red)
        raise EvaluationError(
            f"some operators disagree with their references (benches: {benches}; marked RED above and in "
            f"{options.out}); their times mean nothing"
        )


def _check_flags(options: BenchOptions) -> None:
    usual = BenchOptions(out=options.out)
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
        from wide.profiling.backends import parse_backends

        parse_backends(options.backends, options.names)


def _asked(bench: str, options: BenchOptions) -> list[str]:
    return [name for name in options.names if _BENCHES[name] == bench]


def _carry_out(bench: str, options: BenchOptions) -> int:
    names = _asked(bench, options)
    if not names:
        return 0
    given = ["--out", str(Path(options.out))]
    if bench == "glue":
        from wide.profiling.glue import main as glue

        return glue(given)
    if bench == "coarse":
        from wide.profiling.coarse import main as coarse

        # Beside the files of the other benches, whose names are the same.
        return coarse(["--out", str(Path(options.out) / "coarse"), "--rows", options.rows or _ROWS])
    if bench == "naive_depth":
        return _naive_depth(given, options)
    given += [] if bench in ("naive", "traffic") else ["--operators", ",".join(names)]
    given += ["--quick"] if options.quick else []
    if options.group_size is not None:
        given += ["--group-size", str(options.group_size)]
    if options.sparsity is not None:
        given += ["--sparsity", str(options.sparsity)]
    if options.backends != _BACKENDS:
        given += ["--backends", options.backends]
    if bench == "traffic":
        from wide.profiling.naive_traffic import main as traffic

        return traffic([*given, *([] if options.rows is None else ["--sizes", options.rows])])
    if bench == "naive":
        from wide.profiling.naive import main as naive

        # Among all operators it keeps its own sizes: the rows are those of the others.
        sizes = [] if options.rows is None or options.operators == "all" else ["--sizes", options.rows]
        return naive([*given, *sizes])
    if bench == "attention":
        from wide.profiling.attention import main as attention

        return attention(given)
    from wide.profiling.operators import main as operators

    return operators([*given, "--rows", options.rows or _ROWS])


def _naive_depth(given: list[str], options: BenchOptions) -> int:
    from wide.profiling.naive_depth import main

    # Whole tokens skip: there is no size of groups to pass on.
    quick = ["--quick"] if options.quick else []
    rows = [] if options.rows is None else ["--rows", options.rows]
    sparsity = [] if options.sparsity is None else ["--sparsity", str(options.sparsity)]
    return main([*given, *quick, *rows, *sparsity])
