"""Races as benches show them: with names, rates and what ships, beside what `wide tune` compares and times."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from wide.inference.choice.layer_sizes import LayerSizes, candidates
from wide.inference.choice.tuning.attention import Prompt
from wide.inference.choice.tuning.products import Product, choice_name
from wide.inference.choice.tuning.race import Call, Race, launched, run
from wide.inference.operators.table import OperatorName
from wide.kernels.attention_prefill.op import attention_prefill
from wide.kernels.gemv.op import MAX_ROWS
from wide.kernels.reorder.op import reorder_sequences
from wide.kernels.tuning import Choice

Record = dict[str, Any]
_LABELS = {"query": "q", "output": "o"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRace(Race):
    """A race with what its records say.

    Args:
        name: For example 'prefill T=16384 p=0.5'; its first words name the operator to those who read records.
        peer: Candidate that speed-ups refer to; empty takes the fastest whose name begins with 'dense'.
        flop: Operations of executing pairs; 0 if a rate means nothing.
        bytes_moved: Bytes of executing data; 0 if a rate means nothing.
        facts: Shape and mask.
        shipped: The candidate that `wide.optimize` takes at this shape today; empty if that is not known.
        kind: Field of the records that holds the name: 'race', or 'sweep' for products over many rows.
    """

    name: str
    peer: str = ""
    flop: float = 0.0
    bytes_moved: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict)
    shipped: str = ""
    kind: str = "race"


def measure(race: BenchRace, *, rounds: int, with_kernels: bool = False) -> list[Record]:
    """Compare every candidate, time those that agree, and return one JSON-ready record each.

    Records may name the kernels of a call.
    """
    outcomes = run(race, rounds=rounds)
    times = {name: outcome.timing for name, outcome in outcomes.items() if outcome.timing is not None}
    peers = {name: timing.median_us for name, timing in times.items() if name.startswith("dense")}
    peer = race.peer or min(peers, key=lambda name: peers[name])
    records = []
    for name, outcome in outcomes.items():
        record: Record = {race.kind: race.name, "candidate": name, "peer": peer, **race.facts}
        if race.shipped:
            record["shipped"] = name == race.shipped
        if race.case is not None and name in race.choices:
            record["choice"] = dataclasses.asdict(race.choices[name])
            about: Record = {"sizes": dict(race.case.sizes), "dtype": str(race.case.dtype).removeprefix("torch.")}
            about |= {"active": race.case.active, "options": dict(race.case.options)}
            record["case"] = {"operator": race.operator, **about}
        record |= {"failure": outcome.failure} if outcome.failure else {"error": outcome.error}
        if name in times:
            median_us = times[name].median_us
            record |= {"median_us": median_us, "low_us": times[name].low_us, "high_us": times[name].high_us}
            record["speedup"] = times[peer].median_us / median_us
            record["active_tflops"] = race.flop / median_us / 1e6
            if race.bytes_moved:
                record["active_gbytes_per_s"] = race.bytes_moved / median_us / 1e3
            if with_kernels:
                record["kernels"] = launched(race.candidates[name][0])
        records.append(record)
    return records


def shipped_name(choices: Mapping[str, Choice], shipped: Choice | None) -> str:
    """Return the candidate that a choice of a table stands for; a choice without a tile takes its backend's first."""
    if shipped is None:
        return ""
    alike = [name for name, choice in choices.items() if choice.backend == shipped.backend]
    same = [name for name in alike if shipped.tile and choices[name].kernel == shipped.kernel]
    return next(iter([*same, *alike]), "")


def product_race(
    name: OperatorName,
    sizes: LayerSizes,
    rows: int,
    active: float,
    *,
    device: torch.device,
    choices: Sequence[Choice] | None = None,
    quick: bool = True,
    zeroed: bool | None = True,
    shipped: Choice | None = None,
    mask: torch.Tensor | None = None,
) -> BenchRace:
    """Return the race of a linear operator of a layer; each call of many rows charges its sort.

    Args:
        name: 'query', 'output', 'gate_up' or 'down'.
        sizes: Of the layer.
        rows: M.
        active: Share of (row, group) pairs that execute.
        device: Where.
        choices: That are tried; None = those that fit.
        quick: Whether those are few.
        zeroed: As of `Product.race`; None leaves skipped places unwritten, and has the first choice write zeros, too.
        shipped: What `wide.optimize` takes today, which is tried first.
        mask: Of many rows, bool [M, N_G]; None draws a random one.
    """
    product = Product.draw(name, sizes, rows, active, device=device, mask=mask)
    tried = list(candidates(name, sizes, rows, device, quick=quick) if choices is None else choices)
    tried = [shipped.kernel, *tried] if shipped is not None and shipped.tile else tried
    race = product.race(tried, zeroed=bool(zeroed))
    raced, few = dict(race.candidates), rows <= MAX_ROWS
    if product.may_clear and zeroed is None and tried:
        raced[f"{choice_name(tried[0])} zeroed"] = [partial(product.run, product.weights[0], tried[0], True)]
    width, _, size = sizes.grouped(name)
    facts = {"num_rows": rows, "group_size": size, "active": active}
    weight_bytes = float(product.weights[0].weight.nbytes)
    if few:
        union = product.mask.any(0).float().mean().item()
        about: dict[str, Any] = {
            "name": f"gemv {name} M={rows} G={size} p={active}",
            "bytes_moved": union * weight_bytes,
            "facts": facts | {"union": union},
        }
    else:
        about = {
            "kind": "sweep",
            "name": f"{_LABELS.get(name, name)} G={size} p={active} M={rows}",
            "peer": "dense",
            "flop": 2.0 * product.mask.sum().item() * size * sizes.hidden_size * (2 if sizes.gates(name) else 1),
            # Weights, rows on the side without groups, and executing pairs on the other.
            "bytes_moved": weight_bytes + 2.0 * rows * (sizes.hidden_size + active * width),
            "facts": facts,
        }
    return _shown(race, raced, shipped=shipped_name(race.choices, shipped), **about)


def prompt_race(
    sizes: LayerSizes,
    length: int,
    active: float,
    choices: Sequence[Choice],
    *,
    device: torch.device,
    shipped: Choice | None = None,
) -> BenchRace:
    """Return the race of one sequence under a share of (token, group) pairs that execute.

    Choices are compared with the reordering known; empty compares what charges it alone. What ships is tried first.
    """
    prompt = Prompt.draw(sizes, length, active, device=device)
    race, (q, k, v) = prompt.race(choices), (prompt.q, prompt.k, prompt.v)

    def charged(backend: str, tile: Sequence[int]) -> torch.Tensor:
        order = reorder_sequences(prompt.mask, backend="triton")
        return attention_prefill(q, k, v, order, backend=backend, tile=tile)

    raced: dict[str, Sequence[Call]] = {name: race.candidates[name] for name in race.trusted}
    names = {"triton": "operator, reorder charged"}
    # Backends whose default is tried.
    defaults = choices or candidates("attention", sizes, length, device, quick=True)
    names |= {choice.backend: f"{choice.backend} operator, reorder charged" for choice in defaults if not choice.tile}
    for backend, name in names.items():
        tile = shipped.tile if shipped is not None and shipped.backend == backend else ()
        raced[name] = [partial(charged, backend, tile)]
    if choices:
        everything = reorder_sequences(torch.ones_like(prompt.mask), backend="triton")
        raced["operator, nothing skipped"] = [partial(attention_prefill, q, k, v, everything, backend="triton")]
    ships = "" if shipped is None else names.get(shipped.backend) or shipped_name(race.choices, shipped)
    return _shown(
        race,
        # The libraries first, then what charges the reordering.
        raced | dict(race.candidates),
        name=f"prefill T={length} p={active}",
        flop=active * 2.0 * length * (length + 1) * sizes.query_width,
        facts={"length": length, "active": active},
        shipped=ships,
    )


def _shown(race: Race, raced: Mapping[str, Sequence[Call]], **about: Any) -> BenchRace:
    """Return a race with other candidates and what its records say."""
    known = {each.name: getattr(race, each.name) for each in dataclasses.fields(race)}
    return BenchRace(**{**known, "candidates": raced}, **about)
