"""Rows in one order over all groups: neighbours execute nearly the same."""

from wide.kernels.reorder_rows.operator import MAX_GROUPS, REORDER_ROWS, reorder_rows

__all__ = ["MAX_GROUPS", "REORDER_ROWS", "reorder_rows"]
