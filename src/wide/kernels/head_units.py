"""How query heads, KV heads and channel groups of an attention layer line up."""

import math
from dataclasses import dataclass

from wide.errors import ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadUnits:
    """Query heads cut into units: runs of heads that share one KV head and belong to one group.

    A group may be one KV head, several KV heads, or a fraction of the query heads of one KV head. A unit is the
    largest run of query heads for which both are the same, so a kernel reads K and V once for all its heads.

    Args:
        num_query_heads: H_q.
        num_kv_heads: H_k; divides H_q.
        num_groups: N_G; divides H_q (groups of whole heads).

    Raises:
        ShapeError: If the heads cannot be shared out.
    """

    num_query_heads: int
    num_kv_heads: int
    num_groups: int

    def __post_init__(self) -> None:
        """Refuse counts that do not divide the query heads."""
        for name, count in (("KV heads", self.num_kv_heads), ("groups", self.num_groups)):
            if count < 1 or self.num_query_heads % count:
                raise ShapeError(
                    f"{self.num_query_heads} query heads cannot be shared out over {count} {name}; "
                    f"the number of {name} must divide the number of query heads"
                )

    @property
    def num_units(self) -> int:
        """Number of units, the least common multiple of KV heads and groups."""
        return math.lcm(self.num_kv_heads, self.num_groups)

    @property
    def heads_per_unit(self) -> int:
        """Query heads in a unit."""
        return self.num_query_heads // self.num_units
