"""Zeros in the channels of skipped groups."""

from wide.kernels.clear_skipped.cases import CLEAR_SKIPPED
from wide.kernels.clear_skipped.op import clear_skipped, cleared

__all__ = ["CLEAR_SKIPPED", "clear_skipped", "cleared"]
