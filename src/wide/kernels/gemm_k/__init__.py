"""GEMM-K: the sum over a row's executing groups (O, down)."""

from wide.kernels.gemm_k.operator import GEMM_K, KTile, gemm_k

__all__ = ["GEMM_K", "KTile", "gemm_k"]
