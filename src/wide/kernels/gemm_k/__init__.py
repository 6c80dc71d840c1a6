"""GEMM-K: the sum over a row's executing groups (O, down)."""

from wide.kernels.gemm_k.cases import GEMM_K, GEMM_K_ROWS
from wide.kernels.gemm_k.op import gemm_k, gemm_k_rows, misfit, rows_misfit
from wide.kernels.gemm_k.tiles import KTile

__all__ = ["GEMM_K", "GEMM_K_ROWS", "KTile", "gemm_k", "gemm_k_rows", "misfit", "rows_misfit"]
