"""Races of a layer's linear operators: many rows against cuBLAS, and one to four rows over rotating copies of weights.

Inputs are random, in bfloat16. Products over input groups read NaN where nothing executes, so that any reader shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, silu

from wide.inference.choice.layer_sizes import LayerSizes, candidates, operator_case
from wide.inference.choice.tuning.race import TOLERANCE, Call, Race, relative
from wide.inference.operators.products import GatedWeights, LinearWeights
from wide.inference.operators.table import DENSE, SUMS, OperatorName
from wide.kernels.gemv.op import MAX_ROWS
from wide.kernels.int8 import quantise_int8
from wide.kernels.reorder.rows_reference import left_to_tiles
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice

# Copies of weights and caches rotate through more bytes of executing data than any second-level cache holds.
COLD_BYTES = 192 * 1024**2
_LEAST_COPIES = 4
# Gated products are compared with a float32 reference and round once more than it.
_GEMV_TOLERANCE = 1.5e-2


def normal(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Return bfloat16 noise."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale


def exact_mask(*shape: int, active: float, device: torch.device) -> torch.Tensor:
    """Return a random bool mask with the wanted share of True over all entries, rounded; the same for equal sizes."""
    generator = torch.Generator(device=device).manual_seed(17)
    count = math.prod(shape)
    order = torch.randperm(count, generator=generator, device=device)
    return (order < round(active * count)).view(shape)


def choice_name(choice: Choice) -> str:
    """Return the name of a candidate in records, which says backend and tile, and how rows are sorted."""
    fields = [str(int(value)) for value in choice.tile]
    backend = "" if choice.backend == "triton" else f"{choice.backend} "
    if not choice.block_m:
        return f"tile {backend}{'-'.join(fields)}" if fields else f"{backend}operator"
    sort = f"s={choice.groups_per_block} " if choice.groups_per_block else ""
    return f"{sort}{choice.block_m}x{backend}{'x'.join(fields)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """What a race multiplies.

    Args:
        name: 'query', 'output', 'gate_up' or 'down'.
        active: Share of (row, group) pairs that execute.
        mask: bool [M, N_G].
        weights: Copies; gate and up are one buffer, as `wide.optimize` lays them, queries and what is `apart` another.
        x: Rows, [M, K].
        zeros: Rows with zeros where nothing executes, if inputs are grouped.
        holes: The same with NaN.
    """

    name: OperatorName
    sizes: LayerSizes
    active: float
    mask: torch.Tensor
    weights: Sequence[LinearWeights]
    x: torch.Tensor
    zeros: torch.Tensor
    holes: torch.Tensor

    @classmethod
    def draw(
        cls,
        name: OperatorName,
        sizes: LayerSizes,
        rows: int,
        active: float,
        *,
        device: torch.device,
        mask: torch.Tensor | None = None,
    ) -> "Product":
        """Return random rows and weights; those of few rows in so many copies that no cache holds them.

        A mask is given for many rows only; None draws one.
        """
        width, groups, size = sizes.grouped(name)
        outputs, inputs = (sizes.hidden_size, width) if name in SUMS else (width, sizes.hidden_size)
        parts, apart = 2 if sizes.gates(name) else 1, sizes.apart(name, rows)
        int8_rows = rows > MAX_ROWS and sizes.int8_rows(name)
        is_int8 = int8_rows or (rows <= MAX_ROWS and sizes.weights != "model")
        if rows <= MAX_ROWS:
            mask = exact_mask(rows, groups, active=active, device=device)
            executing_bytes = (
                (1 if is_int8 else 2) * mask.any(0).float().mean().item() * parts * width * sizes.hidden_size
            )
            copies = max(_LEAST_COPIES, math.ceil(COLD_BYTES / executing_bytes))
        else:
            generator, copies = torch.Generator(device=device).manual_seed(17), 1
            drawn = torch.rand(rows, groups, device=device, generator=generator) < active
            mask = drawn if mask is None else mask
        weights = []
        for _ in range(copies):
            weight = normal(parts * outputs + apart, inputs, device=device, scale=inputs**-0.5)
            values, scale = quantise_int8(weight) if is_int8 else (weight, None)
            weights.append(LinearWeights(values, None, scale, int8_rows))
        x = zeros = holes = normal(rows, inputs, device=device)
        if name in SUMS:
            executing = mask.repeat_interleave(size, 1)
            zeros, holes = (torch.where(executing, x, value) for value in (0.0, float("nan")))
        given: dict[str, Any] = {"name": name, "sizes": sizes, "active": active, "mask": mask, "weights": weights}
        return cls(**given, x=x, zeros=zeros, holes=holes)

    def run(self, weights: LinearWeights, choice: Choice, zeroed: bool = False) -> torch.Tensor:
        """Run a choice as an optimised model does, its sort included."""
        if self.name in SUMS:
            return weights.input_groups(self.holes, self.mask, choice, sorts="triton")
        width, last = self.sizes.grouped(self.name)[0], weights.outputs - self.sizes.apart(self.name, len(self.x))
        activation = "silu" if self.sizes.gates(self.name) else "none"
        both = GatedWeights.of_rows(weights.rows(None, last), width, activation)
        if last < weights.outputs:
            weights.rows(last, None).dense(self.x)
        return both.output_groups(self.x, self.mask, choice, sorts="triton", zeroed=zeroed)[0]

    def race(self, choices: Sequence[Choice], *, zeroed: bool = True) -> Race:
        """Return the race of choices; each call of many rows charges its sort.

        The peer of a sum over input groups multiplies what a dense model has; zeros in skipped places, our fallback,
        draw less power and are faster. With `zeroed`, skipped places of 'gate_up' get zeros, as the down projection
        needs wherever it is dense, which it mostly is.
        """
        raced, rows = self._peers(), len(self.x)
        peers, few = tuple(raced), rows <= MAX_ROWS
        sums = self.name in SUMS and not few
        stands_for = {peer: DENSE for peer in peers if not sums or peer == "dense on zeros"}
        for choice in dict.fromkeys([Choice(backend="triton"), *choices] if few else choices):
            label = choice_name(choice)
            raced[label] = [partial(self.run, weight, choice, zeroed and self.may_clear) for weight in self.weights]
            if choice.groups_per_block > PATTERN_GROUPS:
                choice = replace(choice, left_to_tiles=left_to_tiles(self.mask))
            stands_for[label] = choice
        if few:
            # A gated peer gives both products, as wide as two of ours: how long it takes is what counts.
            trusted = peers if self.sizes.gates(self.name) else ()
            wanted, tolerance = self._exact, _GEMV_TOLERANCE
        else:
            # The dense peer of sums multiplies what the others skip.
            trusted = ("dense",) if sums else ()
            wanted, tolerance = raced["dense on zeros" if sums else "dense"][0], TOLERANCE
        operator, case = operator_case(self.name, self.sizes, rows, self.active)
        return Race(
            candidates=raced,
            wanted=wanted,
            error=self._error,
            trusted=trusted,
            tolerance=tolerance,
            operator=operator,
            case=case,
            choices=stands_for,
        )

    @property
    def may_clear(self) -> bool:
        """Whether skipped places may be asked to be zeros; the down projection reads int8 rows where they execute."""
        return self.name == "gate_up" and len(self.x) > MAX_ROWS and not self.sizes.int8_rows(self.name)

    def _peers(self) -> dict[str, Sequence[Call]]:
        if len(self.x) <= MAX_ROWS and self.weights[0].scale is not None:
            return {"dense int8": [partial(each.dense, self.zeros) for each in self.weights]}
        stacked = [each.weight for each in self.weights]
        if len(self.x) <= MAX_ROWS:
            found: dict[str, Sequence[Call]] = {"dense cublas": [partial(linear, self.zeros, each) for each in stacked]}
            if len(self.x) == 1:
                vector = [partial(lambda weight: torch.mv(weight, self.zeros[0])[None], each) for each in stacked]
                found["dense cublas, matrix-vector"] = vector
            return found
        if self.name not in SUMS:
            return {"dense": [partial(self.run, self.weights[0], DENSE)]}
        if self.weights[0].int8_rows:
            whole = self.weights[0].dense
            return {"dense": [partial(whole, self.x)], "dense on zeros": [partial(whole, self.holes, self.mask)]}
        mask, h, shape = self.mask.unsqueeze(2), self.holes, (self.mask.shape[1], -1)
        return {
            "dense": [partial(linear, self.x, stacked[0])],
            "dense on zeros": [partial(linear, self.zeros, stacked[0])],
            "dense with select": [lambda: linear(torch.where(mask, h.unflatten(1, shape), 0).flatten(1), stacked[0])],
        }

    def _exact(self) -> torch.Tensor:
        found = linear(self.zeros.float(), self.weights[0].expanded(torch.float32).weight.float())
        gate, up = found.chunk(2, 1)
        return silu(gate) * up if self.sizes.gates(self.name) else found

    def _error(self, got: torch.Tensor, wanted: torch.Tensor) -> float:
        if self.name in SUMS:
            return relative(got, wanted)
        width, _, size = self.sizes.grouped(self.name)
        executing = self.mask.repeat_interleave(size, 1)
        return relative(got[:, :width][executing], wanted[:, :width][executing])


def product_race(
    name: OperatorName, sizes: LayerSizes, rows: int, active: float, *, device: torch.device, quick: bool
) -> Race:
    """Return the race of a linear operator of a layer, of the choices that fit; arguments as of `Product.draw`."""
    choices = candidates(name, sizes, rows, device, quick=quick)
    return Product.draw(name, sizes, rows, active, device=device).race(choices)
