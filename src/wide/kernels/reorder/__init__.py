"""Reorder: from a binary mask to lists of executing rows."""

from wide.kernels.reorder.cases import REORDER, REORDER_PATTERNS, REORDER_SEQUENCES
from wide.kernels.reorder.op import reorder, reorder_patterns, reorder_sequences

__all__ = [
    "REORDER",
    "REORDER_PATTERNS",
    "REORDER_SEQUENCES",
    "reorder",
    "reorder_patterns",
    "reorder_sequences",
]
