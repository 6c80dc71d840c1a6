"""Evolutionary search for how a budget is spread over modules: swaps keep the budget, a fitness in stages chooses.

Source: the search of EvoPress as Týr-the-Pruner uses it.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wide.data.progress import progress

Allocation = tuple[int, ...]
"""The level of every module; the search starts at 0, and a level up in one module pays for one down in another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The levels that a module may take.

    Args:
        kind: Levels are swapped within a kind only, so that the sum over each kind stays.
        lowest: At most 0.
        highest: At least 0.
    """

    kind: str
    lowest: int
    highest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evolution:
    """What a search found.

    Args:
        best: The best allocation.
        history: Its fitness after every generation, never increasing.
    """

    best: Allocation
    history: tuple[float, ...]


Fitness = Callable[[Allocation, int, int], float]
"""(allocation, stage, generation) -> what is minimised; in the last stage it must not depend on the generation."""


def evolve(
    modules: Sequence[Range],
    fitness: Fitness,
    *,
    generations: int,
    offspring: int,
    max_swaps: int,
    survivors: Sequence[int],
    seed: int,
    title: str,
) -> Evolution:
    """Search from the allocation of all zeros.

    In each generation mutants of the one parent are judged stage by stage, fewer in each; in the last stage the parent
    joins, and the best becomes the parent. A fitness that is no number (a broken model) counts as infinite.

    Args:
        modules: What each module may take.
        fitness: See `Fitness`.
        generations: How often.
        offspring: Mutants in a generation; equal ones are judged once.
        max_swaps: Largest number of swaps in a mutant.
        survivors: How many go on to each stage after the first; the number of stages is one more.
        seed: Of the mutations.
        title: For the progress bar.
    """
    generator = random.Random(seed)
    parent: Allocation = (0,) * len(modules)
    final = len(survivors)
    known: dict[Allocation, float] = {}
    history: list[float] = []

    def judged(candidates: Sequence[Allocation], stage: int, generation: int) -> list[Allocation]:
        values = known if stage == final else {}
        for candidate in candidates:
            if candidate not in values:
                value = fitness(candidate, stage, generation)
                values[candidate] = math.inf if math.isnan(value) else value
        return sorted(candidates, key=lambda candidate: values[candidate])

    for generation in progress(range(generations), title=title, total=generations, unit="generation"):
        pool: list[Allocation] = list(
            dict.fromkeys(mutant(parent, modules, max_swaps, generator) for _ in range(offspring))
        )
        for stage, count in enumerate(survivors):
            pool = judged(pool, stage, generation)[:count]
        parent = judged([parent, *pool], final, generation)[0]
        history.append(known[parent])
    return Evolution(best=parent, history=tuple(history))


def mutant(parent: Allocation, modules: Sequence[Range], max_swaps: int, generator: random.Random) -> Allocation:
    """Return the parent after a few swaps, few ones more often; each raises one module and lowers another of its kind.

    Where nothing can be swapped, the parent itself is returned.
    """
    child = list(parent)
    for _ in range(min(generator.randint(1, max_swaps), generator.randint(1, max_swaps))):
        pairs = [(up, _partners(child, modules, up)) for up in range(len(child)) if child[up] < modules[up].highest]
        possible = [(up, partners) for up, partners in pairs if partners]
        if not possible:
            break
        up, partners = generator.choice(possible)
        child[up] += 1
        child[generator.choice(partners)] -= 1
    return tuple(child)


def _partners(child: Sequence[int], modules: Sequence[Range], up: int) -> list[int]:
    return [
        index
        for index, module in enumerate(modules)
        if index != up and module.kind == modules[up].kind and child[index] > module.lowest
    ]
