"""Decode GEMMs: one to four rows, reading only the weights of groups that some row executes."""

from wide.kernels.gemv.cases import GEMV_K, GEMV_MN
from wide.kernels.gemv.op import MAX_ROWS, gemv_k, gemv_mn

__all__ = ["GEMV_K", "GEMV_MN", "MAX_ROWS", "gemv_k", "gemv_mn"]
