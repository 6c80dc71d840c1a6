"""GEMM-K over rows in one order: each row is stored once, whatever the number of groups."""

from wide.kernels.gemm_k_rows.cases import GEMM_K_ROWS
from wide.kernels.gemm_k_rows.op import fits, fits_rows, gemm_k_rows

__all__ = ["GEMM_K_ROWS", "fits", "fits_rows", "gemm_k_rows"]
