"""Fills a tuning table with the fastest measured way of each operator at a model's own shapes, dense included."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from wide.errors import ConfigError, UnsupportedBackendError
from wide.inference.layer_sizes import layer_sizes
from wide.inference.measured import ONE_SORT, LayerSizes
from wide.inference.operator_table import OperatorName
from wide.inference.tuning.attention import prompt_race
from wide.inference.tuning.products import few_rows_race, grouped, input_groups_race, output_groups_race
from wide.inference.tuning.race import Race, Record, measure
from wide.inference.tuning.tiles import gemv_tiles, k_tiles, mn_tiles, prefill_tiles
from wide.kernels.contract import Case
from wide.kernels.device import triton_obstacle
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice, TuningTable, shape_key, tuning_key
from wide.models.attach import attachment
from wide.models.block_spec import BlockSpec
from wide.plan import Plan, Routed

PROMPT_ROWS = (4096, 1024, 16384)
"""Numbers of tokens of a prompt that are measured; what pays at one counts for all larger ones."""
_FEW_ROWS = (1, 2, 4)
# Of a gate and up weight that lie behind each other in memory: the last field of a tile that needs it.
_STACKED = 2
# A candidate must beat dense by more than the noise of a run.
_NOISE = 1.02
_ROUNDS, _QUICK_ROUNDS = 20, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedLayer:
    """A layer whose operators are measured.

    Args:
        sizes: Of its operators.
        attention: Whether tokens skip in its attention.
        ffn: Whether tokens skip in its FFN.
    """

    sizes: LayerSizes
    attention: bool
    ffn: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One measured shape, as it is told while others are still to come.

    Args:
        done: Shapes that are behind, this one included.
        total: All shapes.
        name: Of this one, for example 'gate_up, 4096 rows'.
        verdict: What was found, in words.
        seconds: Since the beginning.
    """

    done: int
    total: int
    name: str
    verdict: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What was measured.

    Args:
        choices: The fastest way of each shape, by its key in the table.
        left_out: Shapes that no time was left for, by name; they stay dense.
    """

    choices: Mapping[str, Choice]
    left_out: tuple[str, ...]

    @property
    def num_sparse(self) -> int:
        """Choices that skip; what is kept for masks that are alike is none of its own."""
        return sum(choice.backend != "dense" for key, choice in self.choices.items() if f" {ONE_SORT} " not in key)


def tune_model(
    model: nn.Module,
    *,
    rows: Sequence[int] = PROMPT_ROWS,
    executed: tuple[float, float] = (0.5, 0.5),
    quick: bool = True,
    seconds: float | None = None,
    table: TuningTable | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Measure the operators of an attached model at its own shapes on its own GPU, for `wide.optimize`.

    Weights are not read: random ones of their shapes are raced. The GPU needs room for the largest of them a few times.

    Args:
        model: Attached, with routers; stays as it is.
        rows: Numbers of tokens of a prompt, the most important first.
        executed: Shares of (token, group) pairs that execute, in attention and FFN.
        quick: The defaults of each backend and a few more tiles alone; otherwise all that fit.
        seconds: After them no further tile is begun: what is not measured until then stays dense; None takes its time.
        table: Where choices are kept; None means the user's own, which `wide.optimize` reads.
        progress: Told of each shape as soon as it is measured.

    Raises:
        NotAttachedError: If the model has no routers.
        UnsupportedBackendError: If the kernels cannot run where it lies, with the reason.
        ConfigError: If no tokens skip anything under its plan, or the table is damaged.
    """
    state = attachment(model)
    device = next(model.parameters()).device
    obstacle = triton_obstacle(device)
    if obstacle is not None:
        raise UnsupportedBackendError(f"kernels are timed on a CUDA GPU, and this model lies on {device}: {obstacle}")
    return tune_layers(
        tuned_layers(state.specs, state.plan),
        device=device,
        rows=rows,
        executed=executed,
        quick=quick,
        seconds=seconds,
        table=table,
        progress=progress,
    )


def tuned_layers(specs: Sequence[BlockSpec], plan: Plan) -> list[TunedLayer]:
    """Return the layers in which tokens skip, for `tune_layers`; weights are not read.

    Raises:
        ConfigError: If there are none, or the plan is of another number of layers.
    """
    if len(plan.layers) != len(specs):
        raise ConfigError(f"the model has {len(specs)} layers and the plan {len(plan.layers)}; name the adapter's base")
    found = [
        TunedLayer(
            sizes=layer_sizes(spec, layer),
            attention=isinstance(layer.attention, Routed),
            ffn=isinstance(layer.ffn, Routed) and spec.ffn is not None,
        )
        for spec, layer in zip(specs, plan.layers, strict=True)
    ]
    routed = [layer for layer in found if layer.attention or layer.ffn]
    if not routed:
        raise ConfigError("no tokens skip anything under this plan, so there is nothing to measure; name routers")
    return routed


def tune_layers(
    layers: Sequence[TunedLayer],
    *,
    device: torch.device,
    rows: Sequence[int] = PROMPT_ROWS,
    executed: tuple[float, float] = (0.5, 0.5),
    quick: bool = False,
    seconds: float | None = None,
    table: TuningTable | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Measure the operators of layers and keep the fastest choices, under the keys that `wide.optimize` looks up.

    Equal layers are measured once: steps first, since generation is made of them, then prompts in the order of `rows`.
    The table is written after every shape, so that a stopped run keeps what it measured. A shape that cannot be
    measured, for example for want of memory, is named and stays dense.

    Args:
        layers: From `tuned_layers`.
        device: The GPU.
        rows: As in `tune_model`, and so are the others.
        executed: See there.
        quick: See there.
        seconds: See there.
        table: See there.
        progress: See there.
    """
    kept = TuningTable() if table is None else table
    began = time.monotonic()
    until = math.inf if seconds is None else began + seconds
    shapes = [
        shape
        for few in (True, False)
        for layer in dict.fromkeys(layers)
        for shape in _shapes(layer, rows, executed, few=few, quick=quick, device=device)
    ]
    choices: dict[str, Choice] = {}
    left_out = []
    with _alone(device):
        for place, (name, make) in enumerate(shapes, 1):
            if time.monotonic() > until:
                left_out.append(name)
                continue
            found, verdict = _measured(make, device, rounds=_QUICK_ROUNDS if quick else _ROUNDS, until=until)
            kept.store_all(found)
            choices |= found
            if progress is not None:
                spent = time.monotonic() - began
                progress(Progress(done=place, total=len(shapes), name=name, verdict=verdict, seconds=spent))
    return Tuned(choices=choices, left_out=tuple(left_out))


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one, and give random numbers back to the caller as they were."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.random.fork_rng([device]):
        torch.manual_seed(17)
        yield


def _measured(
    make: Callable[[], Race], device: torch.device, *, rounds: int, until: float
) -> tuple[dict[str, Choice], str]:
    """Return the fastest choices of a race by their keys, and what was found in words."""
    # Kernels and libraries that do not take a shape have errors of their own kinds.
    try:
        records = measure(make(), rounds=rounds, until=until)
    except Exception as error:
        return {}, f"not measured, stays dense ({type(error).__name__}: {str(error)[:160]})"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found = {tuning_key(name, device, case): choice for name, case, choice in fastest(records).values()}
    return found, _verdict(list(found.values()), records)


def _shapes(
    layer: TunedLayer,
    rows: Sequence[int],
    executed: tuple[float, float],
    *,
    few: bool,
    quick: bool,
    device: torch.device,
) -> Iterator[tuple[str, Callable[[], Race]]]:
    """Yield name and race of what `wide.optimize` looks up for a layer at few rows, or at many."""
    names: list[tuple[OperatorName, float]] = []
    names += [("gate_up", executed[1]), ("down", executed[1])] if layer.ffn else []
    names += [("query", executed[0]), ("output", executed[0])] if layer.attention else []
    sizes = layer.sizes
    if few:
        for count in _FEW_ROWS[:1] if quick else _FEW_ROWS:
            for name, active in names:
                tiles = gemv_tiles(quick=quick)
                yield f"{name}, {count} rows", partial(few_rows_race, name, sizes, count, active, tiles, device=device)
        return
    for count in rows:
        for name, active in names:
            yield f"{name}, {count} rows", partial(many_rows_race, name, sizes, count, active, device, quick=quick)
        if layer.attention:
            prompt = prefill_tiles(device, quick=quick)
            make = partial(prompt_race, sizes, count, executed[0], prompt, device=device)
            yield f"attention, {count} tokens", make


def many_rows_race(
    name: OperatorName,
    sizes: LayerSizes,
    rows: int,
    active: float,
    device: torch.device,
    *,
    quick: bool,
    zeroed: bool | None = True,
    shipped: Choice | None = None,
) -> Race:
    """Return the race of a linear operator over many rows with the tiles that fit a layer.

    Args:
        name: 'query', 'output', 'gate_up' or 'down'.
        sizes: Of the layer.
        rows: Tokens.
        active: Share of (token, group) pairs that execute.
        device: Where.
        quick: The defaults of each backend alone.
        zeroed: Of 'gate_up', whose zeros the down projection reads wherever it is dense, as it mostly is; see
            `output_groups_race`.
        shipped: See there.
    """
    _, groups, size = grouped(name, sizes)
    if name in ("output", "down"):
        tiles = k_tiles(device, size, groups, width=sizes.hidden_size, rows=rows, quick=quick)
        return input_groups_race(name, sizes, rows, active, tiles, device=device, shipped=shipped)
    gated = name == "gate_up" and sizes.is_gated
    return output_groups_race(
        name,
        sizes,
        rows,
        active,
        mn_tiles(device, size, gated=gated, quick=quick),
        device=device,
        zeroed=zeroed if name == "gate_up" else False,
        shipped=shipped,
    )


def fastest(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, Case, Choice]]:
    """Return operator, case and fastest choice by `shape_key` from the records of races.

    Gated products have two entries: with the option `stacked` the up weight lies right behind the gate weight in
    memory, which some tiles need. A product over one sort of many groups has one of its own beside, faster or not, as
    'gemm_k_rows': what it takes depends on masks, and those at hand may be more alike than the measured ones.

    Args:
        records: From `measure`, or from files of `wide bench`; those without a choice or a time are ignored, and so are
            shapes of which only the dense product was timed with a choice.
    """
    best: dict[str, tuple[str, Case, Choice]] = {}
    dense: dict[str, float] = {}
    contested: set[str] = set()
    sorted_once: dict[str, tuple[str, Case, Choice]] = {}
    for record in records:
        if "choice" not in record or "median_us" not in record:
            continue
        described = record["case"]
        fields = {**record["choice"], "tile": tuple(record["choice"]["tile"]), "median_us": record["median_us"]}
        choice = Choice(**fields)
        for options in _variants(described, choice):
            case = Case(
                sizes=described["sizes"],
                dtype=getattr(torch, described["dtype"]),
                active=described["active"],
                options=options,
            )
            key = shape_key(described["operator"], case)
            entry = (described["operator"], case, choice)
            if choice.backend == "dense":
                # The strongest of several dense peers is the one to beat.
                dense[key] = min(choice.median_us, dense.get(key, choice.median_us))
            else:
                contested.add(key)
            once = choice.backend == "cuda" and choice.groups_per_block > PATTERN_GROUPS
            if once and (key not in sorted_once or choice.median_us < sorted_once[key][2].median_us):
                sorted_once[key] = (ONE_SORT, case, choice)
            if key not in best or _cost(choice) < _cost(best[key][2]):
                best[key] = entry
    found = {
        key: (name, case, replace(choice, dense_us=dense.get(key, 0.0)))
        for key, (name, case, choice) in best.items()
        if key in contested
    }
    return found | {
        shape_key(ONE_SORT, case): (name, case, replace(choice, dense_us=dense[key]))
        for key, (name, case, choice) in sorted_once.items()
        if key in dense
    }


def _cost(choice: Choice) -> float:
    return choice.median_us if choice.backend == "dense" else choice.median_us * _NOISE


def _variants(described: Mapping[str, Any], choice: Choice) -> list[dict[str, Any]]:
    options = dict(described["options"])
    if not options.get("gated"):
        return [options]
    stacked = {**options, "stacked": True}
    return [stacked] if choice.tile and choice.tile[-1] == _STACKED else [options, stacked]


def _verdict(choices: Sequence[Choice], records: Sequence[Record]) -> str:
    if not choices:
        failures = [record["failure"] for record in records if "failure" in record]
        return f"no kernel fits, stays dense{f' ({failures[0][:160]})' if failures else ''}"
    best = min(choices, key=_cost)
    if best.backend == "dense":
        return f"dense, {best.median_us:.1f} us"
    gain = f", {best.dense_us / best.median_us:.2f}x of dense" if best.dense_us else ""
    return f"{best.backend} {'x'.join(map(str, best.tile))}, {best.median_us:.1f} us{gain}"
