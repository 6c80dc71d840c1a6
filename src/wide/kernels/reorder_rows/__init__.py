"""Rows in one order over all groups: neighbours execute nearly the same."""

from wide.kernels.reorder_rows.operator import MAX_GROUPS, REORDER_ROWS, reorder_rows
from wide.kernels.reorder_rows.reference import left_to_tiles

__all__ = ["MAX_GROUPS", "REORDER_ROWS", "left_to_tiles", "reorder_rows"]
