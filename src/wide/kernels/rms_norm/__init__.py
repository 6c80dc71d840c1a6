"""RMSNorm with the residual addition before it."""

from wide.kernels.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
