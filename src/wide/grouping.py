"""Groups of channels: the units that a token executes or skips."""

from dataclasses import dataclass

from wide.errors import ShapeError

_WIDEST = 2**20


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True, slots=True)
class Grouping:
    """A width of query or FFN channels cut into contiguous groups of equal size.

    Raises ShapeError if `group_size` does not divide `width` (it names the sizes that do), or no layer is that wide.

    Source: paper, section 3.1 (pruning units).
    """

    width: int
    group_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.width <= _WIDEST:
            raise ShapeError(f"a width of {self.width} channels is not one of 1 to {_WIDEST}")
        if self.group_size < 1 or self.width % self.group_size:
            raise ShapeError(f"group size {self.group_size} does not divide {self.width}; use {divisors(self.width)}")

    @property
    def num_groups(self) -> int:
        """Number of groups, N_G in the paper."""
        return self.width // self.group_size

    @classmethod
    def whole(cls, width: int) -> "Grouping":
        """Return the grouping with one group, i.e. token-wise depth routing of a sublayer."""
        return cls(width, width)
