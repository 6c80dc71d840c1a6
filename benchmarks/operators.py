"""Operators against cuBLAS and cuDNN at Llama-3.1-8B's shapes: agreement first, then races, one file of records each.

What is timed comes with the kernels that it launched, and says whether `wide.optimize` takes it at that shape today.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import ahead
from benchmarks.agreement import rounding, verdicts
from benchmarks.cases.attention_decode import ATTENTION_DECODE
from benchmarks.cases.attention_prefill import ATTENTION_PREFILL
from benchmarks.cases.contract import Operator
from benchmarks.cases.gemm_k import GEMM_K, GEMM_K_ROWS
from benchmarks.cases.gemm_mn import GEMM_MN
from benchmarks.cases.gemv import GEMV_K, GEMV_MN
from benchmarks.cases.reorder import REORDER, REORDER_PATTERNS, REORDER_ROWS, REORDER_SEQUENCES
from benchmarks.decode import decode_race, decode_races, group_races
from benchmarks.races import BenchRace, Record, measure, product_race, prompt_race
from wide.data.progress import progress
from wide.errors import ConfigError
from wide.inference.choice.layer_sizes import LayerSizes, backends_and_shape, candidates
from wide.inference.choice.measured import measured_table
from wide.inference.choice.tuning.race import TOLERANCE
from wide.inference.operators.table import OperatorName
from wide.kernels.dispatch import backend_names
from wide.kernels.reorder.op import reorder, reorder_patterns
from wide.kernels.reorder.op import reorder_sequences as sort_sequences
from wide.kernels.tuning import Choice

TIMED = ("triton", "cuda")
"""Backends that are timed unless others are named; the dense peers always are."""
OPERATORS: dict[str, tuple[Operator, ...]] = {
    "reorder": (REORDER, REORDER_SEQUENCES, REORDER_PATTERNS, REORDER_ROWS),
    "gemm_mn": (GEMM_MN,),
    "gemm_k": (GEMM_K, GEMM_K_ROWS),
    "prefill": (ATTENTION_PREFILL,),
    "decode": (ATTENTION_DECODE,),
    "decode_groups": (ATTENTION_DECODE,),
    "gemv": (GEMV_MN, GEMV_K),
}
"""What `wide bench` times, by the names that it goes by."""
_MANY_ROWS = ("reorder", "gemm_mn", "gemm_k")
COARSE = "coarse"
"""All operators with the tiles they take by default, one of tokens, group size and sparsity varied at a time."""
SIZES = LayerSizes(
    hidden_size=4096,
    query_width=4096,
    head_dim=128,
    num_kv_heads=8,
    attention_groups=8,
    ffn_width=14336,
    ffn_groups=112,
    is_gated=True,
)
"""Of a layer of Llama-3.1-8B with FFN groups of 128 channels."""
_GROUP, _ACTIVE, _MIDDLE = 128, 0.5, 4096
_ROWS = (1024, 4096, 16384)
# Below, unless it is asked for, the K-axis product is left to the dense candidate, and reordering is launch time.
_LEAST_ROWS = 4096
_ROUNDS, _QUICK_ROUNDS, _COARSE_ROUNDS = 20, 10, 8
_HALVES = (torch.bfloat16, torch.float16)
_RED_SHOWN = 20
_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """What is raced.

    Args:
        names: Keys of `OPERATORS`, or `COARSE`.
        rows: Tokens of products over many rows, reorder and coarse.
        backends: Timed beside the dense peers.
        group_size: Channels of an FFN group; None takes 128 and, for products without `quick`, 256.
        sparsity: Share that random masks skip; None takes 0.5 and, for some without `quick`, further ones.
        quick: Fewer shapes, tiles and rounds.
        gated: Whether all cases of the operators must agree with their references first, and how results round is
            measured; otherwise candidates are compared at the timed shapes alone.
    """

    names: Sequence[str]
    rows: Sequence[int] = _ROWS
    backends: Sequence[str] = TIMED
    group_size: int | None = None
    sparsity: float | None = None
    quick: bool = False
    gated: bool = True

    @property
    def active(self) -> float:
        """Share that executes."""
        return _ACTIVE if self.sparsity is None else 1.0 - self.sparsity

    @property
    def is_usual(self) -> bool:
        """Whether neither group size nor sparsity was asked for."""
        return self.group_size is None and self.sparsity is None


def parse_backends(text: str, operators: Sequence[str]) -> tuple[str, ...]:
    """Return the named backends.

    Args:
        text: Names separated by commas.
        operators: That are to be timed, as benches name them.

    Raises:
        ConfigError: If a backend is unknown, or an operator has none of those named.
    """
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    having = {bench: set(of[0].backends) for bench, of in OPERATORS.items()}
    every = sorted(backend_names())
    unknown = sorted(set(names) - set(every))
    if unknown:
        known = f"{', '.join(every[:-1])} and {every[-1]}"
        raise ConfigError(f"backends are {known}, beside the dense peers that always run; got {unknown}")
    without = sorted(name for name in operators if name in having and not having[name].intersection(names))
    if without:
        others = [name for name in having if having[name].intersection(names)]
        lacking = f"{', '.join(without)} have no {' or '.join(names)} backend"
        raise ConfigError(f"{lacking}; add triton, or time {', '.join(others)}")
    return names


def run_bench(request: BenchRequest, out: Path, *, device: torch.device, say: Callable[[str], None]) -> list[str]:
    """Check and race operators; write operators.json and attention.json, after every race.

    Args:
        request: What is raced.
        out: Folder for the files; those of `COARSE` go to the folder of that name in it, which wide report knows.
        device: The GPU.
        say: Takes tables and verdicts as they come.

    Returns:
        The names of what disagreed with its reference, or rounded worse than the dense path.
    """
    red: list[str] = []
    gates: dict[str, dict[str, Any]] = {}
    kernels = _compile_ahead(request, device)
    for name in request.names:
        # Decode over groups runs the operator of decode: its gate is run once.
        is_repeated = any(OPERATORS.get(other) == OPERATORS.get(name) for other in gates)
        gates[name] = {}
        if request.gated and name in OPERATORS and not is_repeated:
            gates[name] = _gate(name, request.backends, device, say)
            if gates[name]["red"] or not all(record["within"] for record in gates[name]["accuracy"]):
                red.append(name)
    files: dict[Path, dict[str, Any]] = {}
    for name in request.names:
        folder = out / COARSE if name == COARSE else out
        for race in races(name, request, device):
            found = measure(_of_backends(race, request.backends), rounds=_rounds(name, request), with_kernels=True)
            say(table(found, tolerance=race.tolerance))
            if any(record.get("error", 0.0) > race.tolerance for record in found):
                red.append(name)
            path = folder / ("operators.json" if race.kind == "sweep" else "attention.json")
            alike = [gate for each, gate in gates.items() if (each in _MANY_ROWS) == (race.kind == "sweep")]
            content = files.setdefault(path, _head([] if name == COARSE else alike) | {"compiled": kernels})
            content["records"] += found
            # Written after every race, so that a stopped run keeps what it measured.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()
    return list(dict.fromkeys(red))


def _compile_ahead(request: BenchRequest, device: torch.device) -> list[dict[str, Any]]:
    """Compile what gates and races will ask nvcc for, on all cores; return each kernel's seconds, or its failure."""
    backends = [backend for backend in request.backends if backend not in TIMED]
    if not backends:
        return []
    with ahead.noting() as notes:
        for name in request.names:
            if request.gated and name in OPERATORS:
                list(verdicts(OPERATORS[name], device, backends=backends, dtypes=_HALVES))
                rounding(OPERATORS[name], device, backends=backends)
            for race in races(name, request, device):
                for candidate, calls in _of_backends(race, backends).candidates.items():
                    if not candidate.startswith("dense"):
                        calls[0]()
    return list(progress(ahead.compiled(notes), title="compiling", total=len(notes), unit="kernel")) if notes else []


def _head(gates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "agreement": "all cases" if any(gates) else "timed shapes",
        "red": [entry for gate in gates for entry in gate.get("red", ())],
        "accuracy": [entry for gate in gates for entry in gate.get("accuracy", ())],
        "records": [],
    }


def _rounds(name: str, request: BenchRequest) -> int:
    if name == COARSE:
        return _COARSE_ROUNDS
    return _QUICK_ROUNDS if request.quick else _ROUNDS


def _gate(name: str, backends: Sequence[str], device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Return red cases and the rounding of one bench's operators."""
    operators = OPERATORS[name]
    found = list(verdicts(operators, device, backends=(*backends, "dense"), dtypes=_HALVES))
    red = [
        {
            "operator": verdict.operator,
            "backend": verdict.backend,
            "case": str(verdict.case),
            "error": verdict.error,
            "tolerance": verdict.tolerance,
            **({"failure": verdict.failure} if verdict.failure else {}),
        }
        for verdict in found
        if not verdict.agrees
    ]
    say(f"agreement of {name}: {len(found) - len(red)} of {len(found)} cases agree")
    for entry in red[:_RED_SHOWN]:
        say(f"  RED {entry}")
    accuracy = rounding(operators, device, backends=backends)
    for record in accuracy:
        say(_rounding_line(record))
    return {"red": red, "accuracy": accuracy}


def _rounding_line(record: Mapping[str, Any]) -> str:
    verdict = "" if record["within"] else "  RED: it rounds worse than the dense path"
    return (
        f"rounding: {record['operator']} ({record['backend']}) error {record['error']:.3e}, dense "
        f"{record['dense_error']:.3e}, ratio {record['ratio']:.3f}{verdict}"
    )


def _of_backends(race: BenchRace, backends: Sequence[str]) -> BenchRace:
    """Return a race of the dense peers, the candidates of some backends and what ships."""
    wanted = ("dense", *backends)
    kept = {n: calls for n, calls in race.candidates.items() if candidate_backend(n) in wanted or n == race.shipped}
    return dataclasses.replace(race, candidates=kept)


def candidate_backend(candidate: str) -> str:
    """Return the backend from the name of a candidate, 'dense' of those of libraries."""
    if candidate.startswith("dense"):
        return "dense"
    for backend in backend_names() - {"triton"}:
        if backend in candidate:
            return backend
    # Records of earlier versions have kernels in Gluon.
    return "gluon" if "gluon" in candidate or "hopper" in candidate else "triton"


def races(name: str, request: BenchRequest, device: torch.device) -> Iterator[BenchRace]:
    """Yield the races of one of `OPERATORS`, or of `COARSE`."""
    if name == COARSE:
        yield from _coarse_races(request.rows, device)
    elif name == "reorder":
        for rows in request.rows:
            if not request.quick or rows >= _LEAST_ROWS:
                yield _reorder_race(rows, device)
    elif name in ("gemm_mn", "gemm_k"):
        yield from _product_races(name, request, device)
    elif name == "prefill":
        yield from _prompt_races(request, device)
    elif name == "gemv":
        sizes = _with_groups(request.group_size or _GROUP)
        for rows in (1,) if request.quick else (1, 2, 4):
            for product in ("gate_up", "query", "down", "output"):
                yield _product(product, sizes, rows, request.active, device, quick=request.quick)  # type: ignore[arg-type]
    else:
        make = decode_races if name == "decode" else group_races
        yield from make(request.active, quick=request.quick, device=device)


def _with_groups(size: int) -> LayerSizes:
    return dataclasses.replace(SIZES, ffn_groups=SIZES.ffn_width // size)


def _shipped(name: OperatorName, sizes: LayerSizes, rows: int, active: float, device: torch.device) -> Choice:
    """Return what `wide.optimize` takes at a shape: by the user's measurements, else by those that ship."""
    known = measured_table(sizes, device=device, dtype=torch.bfloat16, executed=(active, active))
    return known.choice(name, rows)


def _product(
    name: OperatorName, sizes: LayerSizes, rows: int, active: float, device: torch.device, **options: Any
) -> BenchRace:
    """Return the race of a product; options as of `product_race`."""
    shipped = _shipped(name, sizes, rows, active, device)
    return product_race(name, sizes, rows, active, device=device, zeroed=None, shipped=shipped, **options)


def _product_races(name: str, request: BenchRequest, device: torch.device) -> Iterator[BenchRace]:
    in_ffn, in_attention = ("gate_up", "query") if name == "gemm_mn" else ("down", "output")
    if not request.is_usual:
        shapes = [(request.group_size or _GROUP, request.active)]
    elif name == "gemm_mn":
        shapes = [(_GROUP, _ACTIVE)] if request.quick else [(_GROUP, _ACTIVE), (_GROUP, 0.72), (256, _ACTIVE)]
    else:
        shapes = [(_GROUP, _ACTIVE), (256, _ACTIVE)]
    for rows in request.rows:
        if name == "gemm_k" and request.quick and request.rows is _ROWS and rows < _LEAST_ROWS:
            continue
        for size, active in shapes:
            yield _product(in_ffn, _with_groups(size), rows, active, device, quick=request.quick)  # type: ignore[arg-type]
        yield _product(in_attention, SIZES, rows, request.active, device, quick=request.quick)  # type: ignore[arg-type]


def _prompt_races(request: BenchRequest, device: torch.device) -> Iterator[BenchRace]:
    shapes = [(4096, request.active), (16384, request.active)]
    if request.sparsity is None and not request.quick:
        shapes = [(1024, _ACTIVE), *shapes, (4096, 0.34), (16384, 0.34)]
    for length, active in shapes:
        shipped = _shipped("attention", SIZES, length, active, device)
        tried = candidates("attention", SIZES, length, device, quick=request.quick)
        # A quick race leaves out what is not known to be fast on the device, unless it is named.
        backends, shape = backends_and_shape("attention", SIZES, length)
        others = set(request.backends) - {choice.backend for choice in tried}
        tried += [Choice(backend=name) for name in sorted(others) if backends.obstacle(name, device, shape) is None]
        yield prompt_race(SIZES, length, active, tried, device=device, shipped=shipped)


def _reorder_race(rows: int, device: torch.device) -> BenchRace:
    """Return the race of reordering alone: FFN and attention layouts, and pattern sorts."""
    generator = torch.Generator(device=device).manual_seed(17)
    ffn = torch.rand(rows, SIZES.ffn_groups, device=device, generator=generator) < _ACTIVE
    attention = torch.rand(rows, SIZES.attention_groups, device=device, generator=generator) < _ACTIVE

    def patterns(mask: torch.Tensor, groups: int, *, empty: bool = False) -> torch.Tensor:
        return reorder_patterns(mask, groups_per_block=groups, keeps_empty=empty, backend="triton").index

    return BenchRace(
        kind="sweep",
        name=f"reorder M={rows}",
        peer="112 groups",
        candidates={
            "112 groups": [lambda: reorder(ffn, backend="triton").index],
            "8 groups": [lambda: reorder(attention, backend="triton").index],
            "8 groups, per sequence": [lambda: sort_sequences(attention.unsqueeze(0), backend="triton").index],
            "patterns of 4, 112 groups": [lambda: patterns(ffn, 4)],
            "patterns of 8, 112 groups": [lambda: patterns(ffn, 8)],
            "patterns of 8, 8 groups": [lambda: patterns(attention, 8, empty=True)],
        },
        wanted=None,
        facts={"num_rows": float(rows)},
    )


def coarse_shapes(rows: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield (tokens, FFN group size, executing share), one varied at a time, the middle first, each once."""
    middle = [(count, _GROUP, _ACTIVE) for count in (_MIDDLE, *rows)]
    shares = [(_MIDDLE, _GROUP, active) for active in (0.7, 0.3)]
    yield from dict.fromkeys([*middle, *shares, *((_MIDDLE, size, _ACTIVE) for size in (64, 256, 512, 32))])


def _coarse_races(rows: Sequence[int], device: torch.device) -> Iterator[BenchRace]:
    for count, size, active in coarse_shapes(rows):
        sizes = _with_groups(size)
        products: tuple[OperatorName, ...] = ("gate_up", "down", "query", "output")
        for name in products if size == _GROUP else products[:2]:
            yield _product(name, sizes, count, active, device)
        if size == _GROUP:
            shipped = _shipped("attention", sizes, count, active, device)
            yield prompt_race(sizes, count, active, (), device=device, shipped=shipped)
        if count == _MIDDLE:
            for name in products[:2]:
                yield _product(name, sizes, 1, active, device, choices=())
        if (count, size) == (_MIDDLE, _GROUP):
            for batch in (1, 8, 32) if active == _ACTIVE else (32,):
                yield decode_race(batch, _MIDDLE, active, (), device=device)


def table(records: Sequence[Record], *, tolerance: float = TOLERANCE) -> str:
    """Return the records of one race as text: peers, what ships, the fastest, and everything that failed."""
    first = records[0]
    timed = sorted((record for record in records if "median_us" in record), key=lambda record: record["median_us"])
    peers = [record for record in timed if record["candidate"].startswith("dense")][:_SHOWN]
    others = [record for record in timed if not record["candidate"].startswith("dense")]
    shown = peers + [r for place, r in enumerate(others) if place < _SHOWN or r.get("shipped")]
    lines = [f"== {first.get('race') or first['sweep']} (speed-up over {first['peer']})"]
    lines += [
        f"  {r['candidate']:36s} {r['median_us']:9.1f} us [{r['low_us']:.1f}-{r['high_us']:.1f}] x{r['speedup']:.3f} "
        f"{r['active_tflops']:6.0f} TF {r.get('active_gbytes_per_s', 0):6.0f} GB/s err {r['error']:.1e}"
        f"{'  ships' if r.get('shipped') else ''}"
        for r in shown
    ]
    lines += [f"  RED {r['candidate']} error {r['error']:.1e}" for r in records if r.get("error", 0.0) > tolerance]
    lines += [f"  FAIL {r['candidate']}: {r['failure'][:160]}" for r in records if "failure" in r]
    return "\n".join(lines)
