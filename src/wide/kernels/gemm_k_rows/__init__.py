"""GEMM-K over rows in one order: each row is stored once, whatever the number of groups."""

from wide.kernels.gemm_k_rows.operator import GEMM_K_ROWS, fits_rows, gemm_k_rows

__all__ = ["GEMM_K_ROWS", "fits_rows", "gemm_k_rows"]
