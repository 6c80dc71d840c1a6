"""Zeros in the channels of skipped groups."""

from wide.kernels.clear_skipped.op import clear_skipped, cleared

__all__ = ["clear_skipped", "cleared"]
