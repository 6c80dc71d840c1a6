"""Masks to put in order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import DEVICE, say

from wide.kernels.reorder_rows.reference import CHUNK_ROWS, row_keys

ROWS = (1, 2, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 4096, 10000, 16383, 16384, 16385, 32768, 33000, 40000)
GROUPS = (1, 2, 8, 31, 32, 33, 63, 64, 65, 96, 112, 127, 128)
KINDS = (0.0, 0.02, 0.1, 0.5, 0.9, 1.0, "correlated", "rates")
NUM_MASKS = 76


def correlated(rows: int, groups: int, density: float, noise: float, seed: int) -> torch.Tensor:
    """Return noisy copies of 32 prototypes."""
    random = torch.Generator().manual_seed(seed)
    prototypes = torch.rand(32, groups, generator=random) < density
    which = torch.randint(32, (rows,), generator=random)
    return prototypes[which] ^ (torch.rand(rows, groups, generator=random) < noise)


def independent(rows: int, groups: int, density: float | torch.Tensor, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(rows, groups, generator=random) < density


def mask_of(kind: float | str, rows: int, groups: int, seed: int) -> torch.Tensor:
    if kind == "correlated":
        return correlated(rows, groups, 0.4, 0.05, seed)
    if kind == "rates":
        # Like trained ones: some groups hardly ever, some nearly always.
        rates = torch.rand(groups, generator=torch.Generator().manual_seed(seed + 1)) ** 3
        return independent(rows, groups, torch.where(torch.arange(groups) % 3 == 0, 1 - rates / 4, rates), seed)
    if kind == 1.0:
        return torch.ones(rows, groups, dtype=torch.bool)
    return independent(rows, groups, float(kind), seed)


def trained_masks(path: Path | None) -> dict[str, torch.Tensor]:
    if path is None or not path.exists():
        say("no trained masks:", path)
        return {}
    with np.load(path) as packed:
        return {name: torch.from_numpy(np.unpackbits(packed[name], axis=1).astype(bool)) for name in packed.files}


def with_rows(mask: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows, or all of them several times."""
    return mask.repeat(-(-rows // len(mask)), 1)[:rows].to(DEVICE)


def laid_out(mask: torch.Tensor, way: str) -> torch.Tensor:
    """Return the same mask in another layout, other bytes around it."""
    rows, groups = mask.shape
    if way == "transposed":
        return mask.t().contiguous().t()
    if way == "columns":
        wide = torch.ones(rows, groups + 7, dtype=torch.bool, device=mask.device)
        wide[:, 3 : 3 + groups] = mask
        return wide[:, 3 : 3 + groups]
    if way == "every second":
        wide = torch.ones(2 * rows + 1, 2 * groups + 1, dtype=torch.bool, device=mask.device)
        wide[1::2, 1::2] = mask
        return wide[1::2, 1::2]
    return mask


def buckets(mask: torch.Tensor) -> dict[str, int]:
    """Return how large the largest bucket of a first chunk is, and how many there are."""
    found = torch.bincount(row_keys(mask[:CHUNK_ROWS]) >> 32)
    return {"largest_bucket": int(found.max()), "buckets": int((found > 0).sum())}


def cases(count: int) -> Iterator[tuple[int, int, Any, str, int]]:
    for i in range(count):
        rows, groups = ROWS[i % len(ROWS)], GROUPS[(5 * i + i // len(ROWS)) % len(GROUPS)]
        yield (
            rows,
            groups,
            KINDS[(i + 3 * (i // len(ROWS))) % len(KINDS)],
            ("transposed", "columns", "every second")[i % 3],
            i,
        )
