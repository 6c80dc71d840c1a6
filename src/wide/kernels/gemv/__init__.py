"""Decode GEMMs: one to four rows, reading only the weights of groups that some row executes."""

from wide.kernels.gemv.op import MAX_ROWS, gemv_k, gemv_mn

__all__ = ["MAX_ROWS", "gemv_k", "gemv_mn"]
