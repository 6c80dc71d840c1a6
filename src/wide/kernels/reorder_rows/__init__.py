"""Rows in one order over all groups: neighbours execute nearly the same."""

from wide.kernels.reorder_rows.cases import REORDER_ROWS
from wide.kernels.reorder_rows.op import MAX_GROUPS, reorder_rows
from wide.kernels.reorder_rows.reference import left_to_tiles

__all__ = ["MAX_GROUPS", "REORDER_ROWS", "left_to_tiles", "reorder_rows"]
