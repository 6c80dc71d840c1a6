"""The settings of each method of the benchmark as frozen dataclasses; the defaults are the originals'.

Like `wide.config`, these files import no torch, so that the command line is quick.
"""

from typing import Literal

from wide.method_config.routed import (
    DLLMConfig,
    DLLMOriginalConfig,
    SkipGPTConfig,
    SkipGPTOriginalConfig,
    WideMethodConfig,
)
from wide.method_config.static import (
    BlockPrunerConfig,
    CoopPrunerConfig,
    DDPConfig,
    DenseConfig,
    ShortenedConfig,
    SliceGPTConfig,
    SparseGPTConfig,
    TyrConfig,
    WandaConfig,
)

Match = Literal["nominal", "linear_flops"]
"""What a sparsity may count: what each method's paper does, or the matrix-product work of all decoder layers."""

__all__ = [
    "BlockPrunerConfig",
    "CoopPrunerConfig",
    "DDPConfig",
    "DLLMConfig",
    "DLLMOriginalConfig",
    "DenseConfig",
    "Match",
    "ShortenedConfig",
    "SkipGPTConfig",
    "SkipGPTOriginalConfig",
    "SliceGPTConfig",
    "SparseGPTConfig",
    "TyrConfig",
    "WandaConfig",
    "WideMethodConfig",
]
