"""RMSNorm with the residual addition before it."""
