"""RMSNorm with the residual addition before it."""

from wide.kernels.rms_norm.operator import RMS_NORM, rms_norm

__all__ = ["RMS_NORM", "rms_norm"]
