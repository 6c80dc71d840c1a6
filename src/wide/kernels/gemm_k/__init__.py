"""GEMM-K: the sum over a row's executing groups (O, down)."""

from wide.kernels.gemm_k.cases import GEMM_K
from wide.kernels.gemm_k.op import fits, gemm_k
from wide.kernels.gemm_k.tiles import KTile, StoredKTile

__all__ = ["GEMM_K", "KTile", "StoredKTile", "fits", "gemm_k"]
