"""Settings of methods that decide once what is pruned for every token."""

from dataclasses import dataclass
from typing import Literal

from wide.errors import ConfigError
from wide.method_config.checks import require_not_negative, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPrunerConfig:
    """Settings of BlockPruner.

    Args:
        num_windows: Windows of calibration text. The original's 256 windows of 2048 tokens cost 0.8 billion tokens
            for half of 64 half-layers, so the default is shorter.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch.
        seed: Of the choice of windows.
    """

    num_windows: int = 64
    window_length: int = 512
    batch_size: int = 16
    seed: int = 17

    def __post_init__(self) -> None:
        """Refuse sizes that no work can be done with."""
        require_positive(self, "num_windows", "window_length", "batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoopPrunerConfig:
    """Settings of CoopPruner.

    Args:
        strata: Numbers of removed layers that are sampled: 'paper' has 2, 5, 8, 11, 14 of 32 layers (other depths in
            proportion) and extrapolates beyond; 'spanning' goes on to 17 and 20, and further if the target does.
        num_masks: Sets of layers whose perplexity is measured, all strata together.
        num_contribution_masks: Sets of layers over which the surrogate's contributions are averaged.
        epochs: Of the surrogate's training.
        learning_rate: Of the surrogate's SGD at the start.
        rate_step: Epochs after which the learning rate is multiplied by `rate_decay`.
        rate_decay: See `rate_step`.
        momentum: Of SGD.
        surrogate_batch_size: Sets of layers in a step of the surrogate.
        num_windows: Windows of calibration text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch.
        seed: Of the windows, the sets of layers and the surrogate.
    """

    strata: Literal["paper", "spanning"] = "paper"
    num_masks: int = 8000
    num_contribution_masks: int = 80_000
    epochs: int = 300
    learning_rate: float = 0.008
    rate_step: int = 100
    rate_decay: float = 0.1
    momentum: float = 0.9
    surrogate_batch_size: int = 300
    num_windows: int = 10
    window_length: int = 128
    batch_size: int = 16
    seed: int = 1234

    def __post_init__(self) -> None:
        """Refuse unknown strata and sizes that no work can be done with."""
        if self.strata not in ("paper", "spanning"):
            raise ConfigError(f"strata must be 'paper' or 'spanning', got {self.strata!r}")
        require_positive(self, "num_masks", "num_contribution_masks", "epochs", "rate_step", "surrogate_batch_size")
        require_positive(self, "num_windows", "window_length", "batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class DDPConfig:
    """Settings of DDP.

    Args:
        steps: Optimiser steps.
        batch_size: Sequences in a step.
        micro_batch_size: Sequences in a forward; must divide `batch_size`.
        sequence_length: Tokens in a sequence; None means that of the calibration text's blocks.
        learning_rate: Peak of the cosine schedule, for the gates.
        linear_rate: The same for the multiplier of the distance from the target.
        quadratic_rate: The same for the multiplier of its square.
        binary_rate: The same for the multiplier of indecision.
        warmup: Share of the steps with linearly rising rates.
        distillation: Weight of KL(dense || pruned) beside the cross-entropy.
        midpoint_end: Magnitude at which a gate counts as half pruned at the end (released code 0.1, paper 0.05).
        initial_spread: Standard deviation of the gates around 1 at the start.
        lowest: Gates are held at or above this after each step, so that they find the way back.
        export: 'relu' prunes the gates whose magnitude is 0, 'topk_exact' more of the smallest where the target is not
            met yet.
        gradient_checkpointing: Trade a second forward for memory.
        seed: Of the initial gates and the order of the text.
    """

    steps: int = 1000
    batch_size: int = 16
    micro_batch_size: int = 2
    sequence_length: int | None = 2048
    learning_rate: float = 2e-2
    linear_rate: float = 2e-2
    quadratic_rate: float = 0.4
    binary_rate: float = 2e-2
    warmup: float = 0.1
    distillation: float = 2.0
    midpoint_end: float = 0.1
    initial_spread: float = 0.01
    lowest: float = -0.1
    export: Literal["topk_exact", "relu"] = "topk_exact"
    gradient_checkpointing: bool = False
    seed: int = 17

    def __post_init__(self) -> None:
        """Refuse settings that cannot be trained with."""
        if self.export not in ("topk_exact", "relu"):
            raise ConfigError(f"export must be 'topk_exact' or 'relu', got {self.export!r}")
        require_positive(self, "steps", "batch_size", "micro_batch_size")
        if self.batch_size % self.micro_batch_size:
            raise ConfigError(f"micro_batch_size {self.micro_batch_size} does not divide batch_size {self.batch_size}")
        if self.sequence_length is not None and self.sequence_length < 2:
            raise ConfigError(f"sequence_length must be at least 2 or null, got {self.sequence_length}")
        require_not_negative(self, "linear_rate", "quadratic_rate", "binary_rate", "distillation", "initial_spread")
        if not self.learning_rate > 0.0:
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0.0 <= self.warmup <= 1.0:
            raise ConfigError(f"warmup must lie in [0, 1], got {self.warmup}")
        if not 0.0 < self.midpoint_end <= 0.5:
            raise ConfigError(f"midpoint_end must lie in (0, 0.5], got {self.midpoint_end}")
        if self.lowest > 0.0:
            raise ConfigError(f"lowest must not be positive, or no gate could reach 0, got {self.lowest}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """The dense model has no settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortenedConfig:
    """Settings of both rows of Shortened LLaMA.

    Args:
        protect_first: Layers at the start that are never removed; None keeps 4 of 32 in proportion, at least 1.
        protect_last: The same at the end; None keeps 2 of 32 in proportion, at least 1.
        num_windows: Windows of calibration text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch. For the Taylor score, less than `num_windows` holds a float32 copy of
            the layers' parameters.
        seed: Of the choice of windows.
    """

    protect_first: int | None = None
    protect_last: int | None = None
    num_windows: int = 10
    window_length: int = 128
    batch_size: int = 16
    seed: int = 1234

    def __post_init__(self) -> None:
        """Refuse negative protection and sizes that no work can be done with."""
        for name in ("protect_first", "protect_last"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must be at least 0, or null for the original's share, got {value}")
        require_positive(self, "num_windows", "window_length", "batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceGPTConfig:
    """Settings of SliceGPT.

    Args:
        num_windows: Windows of calibration text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch.
        seed: Of the choice of windows.
        round_to: The width of the sliced stream is a multiple of this.
    """

    num_windows: int = 128
    window_length: int = 2048
    batch_size: int = 16
    seed: int = 42
    round_to: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseGPTConfig:
    """Settings of SparseGPT.

    Args:
        pattern: 'unstructured', or 'N:M' to keep N of every M consecutive inputs; the target must then be 1 - N/M.
        num_windows: Windows of calibration text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch.
        seed: Of the choice of windows.
        damping: Share of the mean diagonal of the Gram matrix that is added to its diagonal.
        block_size: Columns whose zeros are chosen together.
    """

    pattern: str = "unstructured"
    num_windows: int = 128
    window_length: int = 2048
    batch_size: int = 8
    seed: int = 0
    damping: float = 0.01
    block_size: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class TyrConfig:
    """Settings of Týr-the-Pruner.

    Args:
        score: How units are ranked: 'reference_signed' is the released code's first-order plus second-order term,
            'paper_abs' the paper's per-channel score with an absolute first-order term, 'exact_obs' the exact loss of
            removing the unit.
        attention_rounds: Rounds in which the heads of a layer are removed, ranked anew before each.
        ffn_rounds: The same for FFN channels.
        damping: Share of the mean diagonal of the Gram matrix that is added to its diagonal.
        propagation: Inputs of the next layer: 'expected' from the copy at the layer's expected sparsity (released
            code), 'mean' from all copies, weighted by what they keep (paper).
        copies_folder: Where the copies of pruned weights lie during the search; None keeps them in CPU memory.
        iterations: Times the copies are made and searched, with the step between sparsities halved each time.
        levels_per_side: Copies on each side of the expected one.
        first_step: Distance between the sparsities of neighbouring copies in the first iteration.
        min_head_step: Least distance in query heads.
        min_channel_step: Least distance in FFN channels.
        num_windows: Windows of calibration text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch of calibration.
        generations: Generations of a search.
        offspring: Mutants of the parent in a generation.
        max_swaps: Largest number of swaps in a mutant.
        stage_tokens: Tokens that judge the mutants, stage after stage.
        survivors: How many mutants go on to each further stage; the parent joins at the last one.
        search_window_length: Tokens in a window of the search.
        search_batch_size: Windows in a forward of the search.
        top_k: Largest logits of the dense model that the divergence looks at.
        seed: Of the choice of windows and of the search.
    """

    score: Literal["reference_signed", "paper_abs", "exact_obs"] = "reference_signed"
    attention_rounds: int = 1
    ffn_rounds: int = 16
    damping: float = 0.01
    propagation: Literal["expected", "mean"] = "expected"
    copies_folder: str | None = None
    iterations: int = 4
    levels_per_side: int = 4
    first_step: float = 0.125
    min_head_step: int = 1
    min_channel_step: int = 32
    num_windows: int = 1024
    window_length: int = 4096
    batch_size: int = 4
    generations: int = 50
    offspring: int = 128
    max_swaps: int = 4
    stage_tokens: tuple[int, ...] = (2048, 16384, 131072)
    survivors: tuple[int, ...] = (16, 4)
    search_window_length: int = 4096
    search_batch_size: int = 4
    top_k: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that contradict."""
        for name, allowed in (
            ("score", ("reference_signed", "paper_abs", "exact_obs")),
            ("propagation", ("expected", "mean")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if len(self.survivors) != len(self.stage_tokens) - 1:
            raise ConfigError(
                f"survivors {self.survivors} must have one entry fewer than stage_tokens {self.stage_tokens}: how many "
                "mutants go on to each stage after the first"
            )
        require_positive(self, "attention_rounds", "ffn_rounds", "iterations", "levels_per_side", "max_swaps", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class WandaConfig:
    """Settings of Wanda.

    Args:
        pattern: 'unstructured', or 'N:M' to keep N of every M consecutive inputs; the target must then be 1 - N/M.
        num_windows: Windows of calibration text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch.
        seed: Of the choice of windows.
    """

    pattern: str = "unstructured"
    num_windows: int = 128
    window_length: int = 2048
    batch_size: int = 8
    seed: int = 0
