"""Reorder: from a binary mask to lists of executing rows, or to rows in one order over all groups."""

from wide.kernels.reorder.op import MAX_GROUPS, reorder, reorder_patterns, reorder_rows, reorder_sequences
from wide.kernels.reorder.rows_reference import left_to_tiles

__all__ = ["MAX_GROUPS", "left_to_tiles", "reorder", "reorder_patterns", "reorder_rows", "reorder_sequences"]
