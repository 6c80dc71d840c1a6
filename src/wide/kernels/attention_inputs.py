"""What both attention operators want of their tensors, and how heads and groups line up."""

import math
from dataclasses import dataclass

import torch

from wide.errors import ShapeError
from wide.kernels.registration import check_tensor

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadUnits:
    """Query heads cut into units: runs of heads that share one KV head and belong to one group.

    A group may be one KV head, several KV heads, or a fraction of the query heads of one KV head. A unit is the largest
    run of query heads for which both are the same, so a kernel reads K and V once for all its heads. Raises ShapeError
    if the heads cannot be shared out: the other two numbers must divide theirs.
    """

    num_query_heads: int
    num_kv_heads: int
    num_groups: int

    def __post_init__(self) -> None:
        for name, count in (("KV heads", self.num_kv_heads), ("groups", self.num_groups)):
            if count < 1 or self.num_query_heads % count:
                raise ShapeError(
                    f"{self.num_query_heads} query heads cannot be shared out over {count} {name}; "
                    f"the number of {name} must divide the number of query heads"
                )

    @property
    def num_units(self) -> int:
        """The least common multiple of KV heads and groups."""
        return math.lcm(self.num_kv_heads, self.num_groups)

    @property
    def heads_per_unit(self) -> int:
        """Query heads in a unit."""
        return self.num_query_heads // self.num_units


def check_keys_and_values(
    operator: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_paged: bool = False
) -> None:
    """Refuse K and V [B, T_k, H_k, d] that do not fit each other or queries [..., H_q, d] (ShapeError).

    Any strides of the first three dimensions do; where K and V are paged, no sequence owns them.
    """
    if k.dim() != 4 or 0 in k.shape:
        raise ShapeError(f"{operator} wants k and v [B, T_k, H_k, d], got {tuple(k.shape)} and {tuple(v.shape)}")
    wanted = (k.shape[0] if is_paged else q.shape[0], *k.shape[1:3], q.shape[-1])
    for name, tensor, shape in (("q", q, q.shape), ("k", k, wanted), ("v", v, wanted)):
        check_tensor(operator, name, tensor, q.dtype, shape, "last stride 1")


def check_score_options(operator: str, window: int | None, soft_cap: float | None, scale: float | None) -> None:
    """Refuse a window, a soft cap or a scale that is not positive; raises ShapeError if one of them is not positive."""
    for name, value in (("window", window), ("soft_cap", soft_cap), ("scale", scale)):
        if value is not None and value <= 0:
            raise ShapeError(f"{operator}: {name} must be positive or None, got {value}")


def score_factors(scale: float | None, soft_cap: float | None, head_dim: int) -> tuple[float, float, float]:
    """Return how kernels with a softmax of base 2 turn products of q and k into exponents.

    That is the factor of the (capped) scores, then for a soft cap c the factor inside exp2(...) of tanh, and c.
    """
    factor = head_dim**-0.5 if scale is None else scale
    if soft_cap is None:
        return factor * _LOG2_E, 1.0, 1.0
    return _LOG2_E, 2.0 * _LOG2_E * factor / soft_cap, soft_cap
