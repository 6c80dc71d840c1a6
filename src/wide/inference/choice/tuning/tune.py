"""Fills a tuning table with the fastest measured way of each operator at a model's own shapes, dense included."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from wide.errors import ConfigError
from wide.inference.choice.layer_sizes import LayerSizes
from wide.inference.choice.measured import ONE_SORT
from wide.inference.choice.tuning.attention import prompt_race
from wide.inference.choice.tuning.products import product_race
from wide.inference.choice.tuning.race import Race, run
from wide.inference.operators.table import OperatorName
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice, TuningTable, tuning_key
from wide.models.block_spec import BlockSpec
from wide.plan import Plan, Routed

PROMPT_ROWS = (4096, 1024, 16384)
"""Numbers of tokens of a prompt that are measured; what pays at one counts for all larger ones."""
_FEW_ROWS = (1, 2, 4)
# A candidate must beat dense by more than the noise of a run.
_NOISE = 1.02
_ROUNDS, _QUICK_ROUNDS = 20, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedLayer:
    """A layer to measure: whether tokens skip in attention and FFN, and may skip queries (not if normed whole)."""

    sizes: LayerSizes
    attention: bool
    ffn: bool
    query: bool = True

    def products(self) -> list[OperatorName]:
        """Return the products that skip, the FFN's first."""
        names: list[OperatorName] = ["gate_up", "down"] if self.ffn else []
        if self.attention:
            names += ["query", "output"] if self.query else ["output"]
        return names


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One measured shape, such as 'gate_up, 4096 rows', as it is told while others are still to come."""

    done: int
    total: int
    name: str
    verdict: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The fastest way of each shape by its key, and the names of shapes that no time was left for, which stay dense."""

    choices: Mapping[str, Choice]
    left_out: tuple[str, ...]

    @property
    def num_sparse(self) -> int:
        """Choices that skip; what is kept for masks that are alike is none of its own."""
        return sum(choice.backend != "dense" for key, choice in self.choices.items() if f" {ONE_SORT} " not in key)


def tuned_layers(specs: Sequence[BlockSpec], plan: Plan, weights: str = "model") -> list[TunedLayer]:
    """Return the layers of a model under a plan; weights are not read.

    Raises ConfigError if the plan is of another number of layers.
    """
    if len(plan.layers) != len(specs):
        raise ConfigError(f"the model has {len(specs)} layers and the plan {len(plan.layers)}; name the adapter's base")
    found = []
    for spec, layer in zip(specs, plan.layers, strict=True):
        attention, ffn = spec.attention, spec.ffn
        routed = [half if isinstance(half, Routed) else None for _, half in layer.halves()]
        # A half without a router counts as one group.
        groups = [1 if half is None else half.grouping.num_groups for half in routed]
        sizes = LayerSizes(
            hidden_size=spec.hidden_size,
            query_width=attention.query_width,
            head_dim=attention.head_dim,
            num_kv_heads=attention.num_kv_heads,
            attention_groups=groups[0],
            ffn_width=groups[1] if ffn is None else ffn.width,
            ffn_groups=groups[1],
            is_gated=ffn is not None and (ffn.gate is not None or ffn.fused_gate),
            weights=weights,
        )
        skips = {"attention": routed[0] is not None, "ffn": routed[1] is not None and ffn is not None}
        found.append(TunedLayer(sizes=sizes, query=attention.q_norm != "width", **skips))
    return found


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
    """Measure the operators of layers on a GPU, for `wide.optimize`, and keep the fastest choices under its keys.

    Weights are not read: random ones of their shapes are raced. The GPU needs room for the largest of them a few times.
    Equal layers are measured once: steps first, since generation is made of them, then prompts in the order of `rows`.
    The table is written after every shape, so that a stopped run keeps what it measured. A shape that cannot be
    measured, for example for want of memory, is named and stays dense. Raises ConfigError if the table is damaged, or
    no tokens skip anything.

    Args:
        rows: Numbers of tokens of a prompt, the most important first.
        executed: Shares of (token, group) pairs that execute, in attention and FFN.
        quick: The defaults of each backend and a few more tiles alone; otherwise all that fit.
        seconds: After them no further tile is begun: what is not measured until then stays dense; None takes its time.
        table: Where choices are kept; None means the user's own, which `wide.optimize` reads.
    """
    if not any(layer.attention or layer.ffn for layer in layers):
        raise ConfigError("no tokens skip anything under this plan, so there is nothing to measure; name routers")
    kept = TuningTable() if table is None else table
    began = time.monotonic()
    until = math.inf if seconds is None else began + seconds
    shapes = [
        shape
        for counts in (_FEW_ROWS[:1] if quick else _FEW_ROWS, rows)
        for layer in dict.fromkeys(layers)
        for shape in _shapes(layer, counts, executed, attends=counts is rows, device=device, quick=quick)
    ]
    choices: dict[str, Choice] = {}
    left_out = []
    with _alone(device):
        for place, (name, make) in enumerate(shapes, 1):
            if time.monotonic() > until:
                left_out.append(name)
                continue
            found, verdict = _measured(make, device, rounds=_QUICK_ROUNDS if quick else _ROUNDS, until=until)
            kept.store(found)
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
        return _raced(make(), device, rounds=rounds, until=until)
    except Exception as error:
        return {}, f"not measured, stays dense ({type(error).__name__}: {str(error)[:160]})"
    finally:
        torch.cuda.empty_cache()


def _raced(race: Race, device: torch.device, *, rounds: int, until: float) -> tuple[dict[str, Choice], str]:
    outcomes = run(race, rounds=rounds, until=until)
    assert race.case is not None
    timed = [
        replace(race.choices[name], median_us=outcome.timing.median_us)
        for name, outcome in outcomes.items()
        if outcome.timing is not None and name in race.choices
    ]
    found = fastest(race.operator, timed)
    failures = [outcome.failure for outcome in outcomes.values() if outcome.failure]
    keyed = {tuning_key(name, device, race.case): choice for name, choice in found.items()}
    return keyed, _verdict(list(found.values()), failures)


def _shapes(
    layer: TunedLayer, counts: Sequence[int], executed: tuple[float, float], *, attends: bool, **options: Any
) -> Iterator[tuple[str, Callable[[], Race]]]:
    """Yield name and race of what `wide.optimize` looks up for a layer at some numbers of rows."""
    for count in counts:
        for name in layer.products():
            active = executed[1] if name in ("gate_up", "down") else executed[0]
            yield f"{name}, {count} rows", partial(product_race, name, layer.sizes, count, active, **options)
        if layer.attention and attends:
            yield f"attention, {count} tokens", partial(prompt_race, layer.sizes, count, executed[0], **options)


def fastest(operator: str, timed: Sequence[Choice]) -> dict[str, Choice]:
    """Return the fastest choice of one shape, by the operator under whose name tables keep it.

    Nothing is kept where only the dense product was timed. A product over one sort of many groups has an entry of its
    own beside, faster or not, as 'gemm_k_rows': what it takes depends on masks, and those at hand may be more alike
    than the measured ones.
    """
    # The strongest of several dense peers is the one to beat.
    dense_us = min((choice.median_us for choice in timed if choice.backend == "dense"), default=0.0)
    once = [choice for choice in timed if choice.groups_per_block > PATTERN_GROUPS]
    found = {}
    if any(choice.backend != "dense" for choice in timed):
        found[operator] = min(timed, key=_cost)
    if once and dense_us:
        found[ONE_SORT] = min(once, key=_cost)
    return {name: replace(choice, dense_us=dense_us) for name, choice in found.items()}


def _cost(choice: Choice) -> float:
    return choice.median_us if choice.backend == "dense" else choice.median_us * _NOISE


def _verdict(choices: Sequence[Choice], failures: Sequence[str]) -> str:
    if not choices:
        return f"no kernel fits, stays dense{f' ({failures[0][:160]})' if failures else ''}"
    best = min(choices, key=_cost)
    if best.backend == "dense":
        return f"dense, {best.median_us:.1f} us"
    gain = f", {best.dense_us / best.median_us:.2f}x of dense" if best.dense_us else ""
    return f"{best.backend} {'x'.join(map(str, best.tile))}, {best.median_us:.1f} us{gain}"
