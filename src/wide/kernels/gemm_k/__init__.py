"""GEMM-K: the sum over a row's executing groups (O, down)."""

from wide.kernels.gemm_k.operator import GEMM_K, gemm_k
from wide.kernels.gemm_k.tiles import KTile

__all__ = ["GEMM_K", "KTile", "gemm_k"]
