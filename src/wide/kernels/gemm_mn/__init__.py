"""GEMM-MN: gathered rows times the weight rows of their groups (Q, up, gate)."""

from wide.kernels.gemm_mn.operator import GEMM_MN, MnTile, gemm_mn

__all__ = ["GEMM_MN", "MnTile", "gemm_mn"]
