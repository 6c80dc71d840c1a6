"""What the products of down and O would take for masks of a given structure, by what was measured of random ones.

All times are of one H200, 16384 rows, bfloat16, a cool GPU (docs/results/operators.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.mask_tiles import Execution

_SWEEP_US = 1278 / 14
"""One float32 sum of [16384, 4096] added: the reductions of 14 super-blocks, measured alone."""

_O_US, _O_DENSE_US = 482, 722
"""O with half of the pairs, order known, and dense: the only product over one super-block that was measured."""

_DOWN_DENSE_US = 2390


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeModel:
    """The measured parts of one product at one shape.

    Args:
        groups: Groups of the measured product; sweeps of a model with fewer or more groups are scaled to it.
        products_us: Loads, products and one store of every row, nothing added.
        products_share: By rows in a tile, the share that is executed in that time.
        order_us: Sorting rows and listing tiles.
        sum_us: Zeroing the float32 sum and writing it out; only where something is added.
        dense_us: The dense product.
    """

    groups: int
    products_us: float
    products_share: Mapping[int, float]
    order_us: float
    sum_us: float
    dense_us: float

    def estimate(self, found: Execution, *, groups: int, tile: int) -> float:
        """Return microseconds: products, reductions and fixed costs, one after the other.

        Products go in proportion to the executed share up to `products_share`, and straight from there to the dense
        product at 1: the best product of everything is the dense one. Reductions are added in full, because loads and
        reductions never overlapped in any measured kernel. Products do hide behind both, so more than one super-block
        comes out too slow: 0.77 of the dense speed for masks at which whole kernels reach 0.83 to 0.99.

        Args:
            found: What is executed and written.
            groups: Groups of the masks that it was found with.
            tile: Rows in a tile; one of `products_share`.
        """
        anchor = self.products_share[tile]
        if found.executed <= anchor:
            products = self.products_us * found.executed / anchor
        else:
            saved = self.dense_us - self.products_us
            products = self.dense_us - saved * (1 - found.executed) / (1 - anchor)
        if found.super_blocks == 1:
            return products + self.order_us
        return products + self.order_us + self.sum_us + _SWEEP_US * found.sweeps * self.groups / groups


# Shares of independent masks at 50 % over eight groups, as O was measured, with tiles of 128 rows; tiles of 64 get the
# same time for the smaller share of theirs. No product of down without reductions was measured, so it gets O's
# efficiency.
TIME_MODELS = {
    "ffn": TimeModel(
        groups=112,
        products_us=_DOWN_DENSE_US * _O_US / _O_DENSE_US,
        products_share={64: 0.560, 128: 0.620},
        order_us=74,
        sum_us=158,
        dense_us=_DOWN_DENSE_US,
    ),
    "attention": TimeModel(
        groups=8,
        products_us=_O_US,
        products_share={64: 0.560, 128: 0.620},
        order_us=9,
        sum_us=158,
        dense_us=_O_DENSE_US,
    ),
}
"""Down (FFN of 14336 channels, groups of 128) and O (4096 channels, groups of 512), by half-layer."""
