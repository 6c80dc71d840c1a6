"""RMSNorm with the residual addition before it."""

from wide.kernels.rms_norm.cases import RMS_NORM
from wide.kernels.rms_norm.op import rms_norm

__all__ = ["RMS_NORM", "rms_norm"]
