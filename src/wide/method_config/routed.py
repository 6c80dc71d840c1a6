"""Settings of methods that train routers, which decide for every token."""

from dataclasses import dataclass
from typing import Literal

from wide.config import WideConfig
from wide.errors import ConfigError
from wide.method_config.checks import require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class _TokenRouterConfig:
    """Settings of routers that decide for whole half-layers or layers.

    Args:
        router_rank: Width of the router's inner layer.
        calibrate_threshold: Whether the threshold may be moved off 0, argmax, so that inference meets the target.
    """

    router_rank: int = 32
    calibrate_threshold: bool = True

    def __post_init__(self) -> None:
        """Refuse a router without width."""
        require_positive(self, "router_rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class DLLMConfig(_TokenRouterConfig):
    """Settings of layer skipping in D-LLM's manner: one router for both halves of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DLLMOriginalConfig(_TokenRouterConfig):
    """Settings of D-LLM as its authors released it.

    Args:
        dense_layers: Layers at the start that every token executes.
        first_tokens: Tokens at the start of each sequence that execute every layer.
        evict: Whether later tokens do not see the keys and values of tokens that skip a layer.
        temperature: Of the Gumbel-softmax, the same at every step.
        penalty: 'token' is the original's: the distance of every token's own skip rate from the target, with a weight
            that rises from 0; 'mean' that of the mean over tokens, with the constant weight of the objective.
        weight: Of the penalty 'token' at the last step. Rates are over all layers: of layers where the target is
            nominal, as the original's, and of matrix-product work under match=linear_flops.
    """

    router_rank: int = 512
    dense_layers: int = 2
    first_tokens: int = 2
    evict: bool = True
    temperature: float = 1.0
    penalty: Literal["mean", "token"] = "mean"
    weight: float = 5.0

    def __post_init__(self) -> None:
        """Refuse settings that no router has."""
        _TokenRouterConfig.__post_init__(self)
        require_not_negative(self, "dense_layers", "first_tokens")
        if not self.temperature > 0.0:
            raise ConfigError(f"temperature must be positive, got {self.temperature}")
        if self.penalty not in ("mean", "token"):
            raise ConfigError(f"penalty must be 'mean' or 'token', got {self.penalty!r}")
        if self.weight < 0.0:
            raise ConfigError(f"weight must not be negative, got {self.weight}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipGPTConfig(_TokenRouterConfig):
    """Settings of token-wise skipping of half-layers as the WIDE paper runs SkipGPT.

    The paper raises the routers' rank to what WIDE's routers hold in total.

    Args:
        uniform: Steer attention and FFN to the target each, instead of their mean.
    """

    uniform: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipGPTOriginalConfig:
    """Settings of SkipGPT as its authors released it.

    Args:
        router_form: 'mlp' is the released code's, 'linear' the paper's single matrix.
        router_rank: Width of the MLP; None means a quarter of the hidden size.
        weight: Of the distance from the target sparsity in the loss.
        temperature_start: Gumbel-softmax temperature at the first step.
        temperature_end: Temperature at the last step, reached linearly.
        calibrate_threshold: Whether the threshold may be moved off 0, argmax, so that inference meets the target.
    """

    router_form: Literal["mlp", "linear"] = "mlp"
    router_rank: int | None = None
    weight: float = 20.0
    temperature_start: float = 5.0
    temperature_end: float = 1.0
    calibrate_threshold: bool = True

    def __post_init__(self) -> None:
        """Refuse settings that no router has."""
        if self.router_form not in ("mlp", "linear"):
            raise ConfigError(f"router_form must be 'mlp' or 'linear', got {self.router_form!r}")
        if self.router_rank is not None and self.router_rank < 1:
            raise ConfigError(f"router_rank must be at least 1 or null, got {self.router_rank}")
        if self.weight < 0.0:
            raise ConfigError(f"weight must not be negative, got {self.weight}")
        if not (self.temperature_start > 0.0 and self.temperature_end > 0.0):
            raise ConfigError(f"temperatures must be positive, got {self.temperature_start} and {self.temperature_end}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WideMethodConfig(WideConfig):
    """Settings of the row 'wide': those of `WideConfig`, and how the target is met.

    Args:
        uniform: Steer attention and FFN to the target each, instead of their mean.
        calibrate_threshold: Whether the threshold may be moved off 0, argmax, so that inference meets the target.
    """

    uniform: bool = False
    calibrate_threshold: bool = True
