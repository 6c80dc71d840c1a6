"""Zeros in the channels of skipped groups, in place."""

from wide.kernels.clear_skipped.operator import CLEAR_SKIPPED, clear_skipped, cleared

__all__ = ["CLEAR_SKIPPED", "clear_skipped", "cleared"]
