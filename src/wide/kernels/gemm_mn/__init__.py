"""GEMM-MN: gathered rows times the weight rows of their groups (Q, up, gate)."""

from wide.kernels.gemm_mn.cases import GEMM_MN
from wide.kernels.gemm_mn.op import fits, gemm_mn
from wide.kernels.gemm_mn.tiles import ClusterMnTile, MnTile

__all__ = ["GEMM_MN", "ClusterMnTile", "MnTile", "fits", "gemm_mn"]
