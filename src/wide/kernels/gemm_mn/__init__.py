"""GEMM-MN: gathered rows times the weight rows of their groups (Q, up, gate)."""

from wide.kernels.gemm_mn.operator import GEMM_MN, gemm_mn
from wide.kernels.gemm_mn.tiles import MnTile

__all__ = ["GEMM_MN", "MnTile", "gemm_mn"]
