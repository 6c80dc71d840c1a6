"""The sizes of a layer's operators: by them measurements are kept and found, and kernels say what they take."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from wide.inference.operators.table import SUMS, OperatorName
from wide.kernels.attention_prefill.op import BACKENDS as PREFILL_BACKENDS
from wide.kernels.attention_prefill.op import PrefillShape
from wide.kernels.dispatch import Backends, Shape
from wide.kernels.gemm_k.op import BACKENDS as K_BACKENDS
from wide.kernels.gemm_k.op import ROWS_BACKENDS, KShape
from wide.kernels.gemm_mn.op import BACKENDS as MN_BACKENDS
from wide.kernels.gemm_mn.op import MnShape
from wide.kernels.gemv.op import K_BACKENDS as GEMV_K_BACKENDS
from wide.kernels.gemv.op import MAX_ROWS, GemvShape
from wide.kernels.gemv.op import MN_BACKENDS as GEMV_MN_BACKENDS
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Case, Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """What measurements of a layer's operators depend on; of one half alone the other's sizes are left out.

    Args:
        hidden_size: D.
        query_width: H_q d.
        head_dim: d.
        num_kv_heads: H_k.
        attention_groups: N_G of the attention half.
        ffn_width: F.
        ffn_groups: N_G of the FFN half.
        is_gated: Whether the FFN has a gate; the up weight then lies right behind the gate weight in memory.
        weights: Their format: 'model', 'int8', which only products of few rows read, or 'w8a8', whose other products
            read int8 rows.
    """

    hidden_size: int
    query_width: int = 1
    head_dim: int = 1
    num_kv_heads: int = 1
    attention_groups: int = 1
    ffn_width: int = 1
    ffn_groups: int = 1
    is_gated: bool = False
    weights: str = "model"

    def grouped(self, name: OperatorName) -> tuple[int, int, int]:
        """Return the channels of an operator that are grouped, the number of groups, and the channels of one."""
        width, groups = self.query_width, self.attention_groups
        if name in ("gate_up", "down"):
            width, groups = self.ffn_width, self.ffn_groups
        return width, groups, width // groups

    def apart(self, name: OperatorName, rows: int) -> int:
        """Return the rows of keys and values that queries of few rows need another product for, to skip at all."""
        beside = 2 * self.num_kv_heads * self.head_dim if name == "query" and rows <= MAX_ROWS else 0
        return beside if beside % self.grouped(name)[2] else 0

    def int8_rows(self, name: OperatorName) -> bool:
        """Return whether an operator reads many rows in int8."""
        return self.weights == "w8a8" and name not in ("query", "attention")

    def gates(self, name: OperatorName) -> bool:
        """Return whether an operator multiplies gate and up together."""
        return name == "gate_up" and self.is_gated


def operator_case(name: OperatorName, sizes: LayerSizes, rows: int, active: float) -> tuple[str, Case]:
    """Return the kernels' operator that runs some rows, and the case under whose key tables keep what was measured.

    Rows are tokens, for attention over a prompt of one sequence; `active` is the share of (token, group) pairs that
    execute.
    """
    _, groups, size = sizes.grouped(name)
    if name == "attention":
        heads = {"num_query_heads": sizes.query_width // sizes.head_dim, "num_kv_heads": sizes.num_kv_heads}
        extents = {"num_rows": rows, **heads, "num_groups": groups, "head_dim": sizes.head_dim}
        return "attention_prefill", Case(sizes=extents, dtype=torch.bfloat16, active=active)
    few = rows <= MAX_ROWS
    operator, other = ("gemv", "width_in") if few else ("gemm", "depth")
    options: dict[str, Any] = {}
    if name in SUMS:
        other = "width_out" if few else "width"
    elif sizes.gates(name):
        options = {"is_gated": True} if few else {"gated": True, "stacked": True}
    if sizes.weights != "model" and few:
        options |= {"weights": "int8"}
    elif sizes.int8_rows(name):
        options |= {"rows": "int8"}
    extents = {"num_rows": rows, "num_groups": groups, "group_size": size, other: sizes.hidden_size}
    extents |= {"apart": apart} if (apart := sizes.apart(name, rows)) else {}
    case = Case(sizes=extents, dtype=torch.bfloat16, active=active, options=options)
    return f"{operator}_{'k' if name in SUMS else 'mn'}", case


def backends_and_shape(
    name: OperatorName, sizes: LayerSizes, rows: int, dtype: torch.dtype = torch.bfloat16, *, one_sort: bool = False
) -> tuple[Backends, Shape]:
    """Return what may run an operator of a layer, and the shape that decides which of it does.

    Rows are tokens, for attention of one sequence; `one_sort` is of a sum over more than 8 input groups, sorted at
    once.
    """
    _, groups, size = sizes.grouped(name)
    if name == "attention":
        heads = sizes.query_width // sizes.head_dim // math.lcm(sizes.num_kv_heads, groups)
        return PREFILL_BACKENDS, PrefillShape(dtype, sizes.head_dim, heads)
    if rows <= MAX_ROWS:
        is_sum = name in SUMS
        inner, outer = (size, sizes.hidden_size) if is_sum else (sizes.hidden_size, size)
        shape = GemvShape(dtype, inner, outer, sizes.weights != "model")
        return GEMV_K_BACKENDS if is_sum else GEMV_MN_BACKENDS, shape
    dtype = torch.int8 if sizes.int8_rows(name) else dtype
    if name not in SUMS:
        return MN_BACKENDS, MnShape(dtype, size, sizes.hidden_size, sizes.gates(name))
    is_stored = groups <= PATTERN_GROUPS
    return ROWS_BACKENDS if one_sort else K_BACKENDS, KShape(dtype, rows, groups, size, sizes.hidden_size, is_stored)


def candidates(name: OperatorName, sizes: LayerSizes, rows: int, device: torch.device, *, quick: bool) -> list[Choice]:
    """Return what may run an operator instead of the dense one, nothing twice; if `quick`, only a few tiles."""
    has_one_sort = name in SUMS and rows > MAX_ROWS and sizes.grouped(name)[1] > PATTERN_GROUPS
    found = []
    for one_sort in (True, False) if has_one_sort else (False,):
        backends, shape = backends_and_shape(name, sizes, rows, one_sort=one_sort)
        for backend, candidate in backends.candidates(shape, device, quick=quick):
            found.append(Choice(backend=backend, **candidate._asdict()))
    return list(dict.fromkeys(found))


def misfit(name: OperatorName, sizes: LayerSizes, choice: Choice, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return why the kernel of a choice does not take many rows of a layer, on whatever device, or None."""
    groups = sizes.grouped(name)[1]
    one_sort = choice.groups_per_block > PATTERN_GROUPS or (choice.backend == "cuda" and groups > PATTERN_GROUPS)
    if one_sort and name in SUMS and min(groups, choice.groups_per_block) <= PATTERN_GROUPS:
        return f"one sort of {choice.groups_per_block} groups says nothing of {groups}"
    backends, shape = backends_and_shape(name, sizes, MAX_ROWS + 1, dtype, one_sort=one_sort)
    return backends.misfit(choice.backend, shape)
