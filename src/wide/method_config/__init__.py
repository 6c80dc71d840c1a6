"""The settings of each method of the benchmark as frozen dataclasses; the defaults are the originals'.

Like `wide.config`, these files import no torch, so that the command line is quick.
"""

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

__all__ = [
    "BlockPrunerConfig",
    "CoopPrunerConfig",
    "DDPConfig",
    "DLLMConfig",
    "DLLMOriginalConfig",
    "DenseConfig",
    "ShortenedConfig",
    "SkipGPTConfig",
    "SkipGPTOriginalConfig",
    "SliceGPTConfig",
    "SparseGPTConfig",
    "TyrConfig",
    "WandaConfig",
    "WideMethodConfig",
]
