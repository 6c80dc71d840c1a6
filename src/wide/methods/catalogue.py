"""The methods of the benchmark: what each removes, its settings, its source, and where its code is.

A method is registered here and nowhere else; command line, comparisons and tests read it from here. This file imports
no torch, so that help and parsing are quick; a method's code is imported when it runs.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from wide.config import AboveZero, NotNegative, WideConfig
from wide.errors import ConfigError, UsageError, nearest
from wide.schema import Between, Checked, Count, Positive, Share

Kind = Literal["dense", "depth", "width", "stream", "dynamic"]
Match = Literal["nominal", "linear_flops"]
"""What a sparsity may count: what each method's paper does, or the matrix-product work of all decoder layers."""
_Settings = TypeVar("_Settings")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A row of the benchmark's table.

    Args:
        kind: What it removes; methods that train routers are 'dynamic'.
        summary: One line for `wide methods`.
        settings: The frozen dataclass of the method's options, defaults as the original's.
        code: What decides, as 'module:function' below `wide.methods` or the function itself. A dynamic method's is a
            `wide.methods.routed.Route`, the others' a `wide.methods.method.Decide`; the dense model has none.
        duration: How long it runs beside the other methods; processes that share a comparison begin with the longest.
        takes_sharded: Whether it runs whole forwards only, so that FSDP2 may shard the model. Training of routers does.
    """

    name: str
    kind: Kind
    summary: str
    source: str
    settings: type[Any]
    code: str | Callable[..., Any] = ""
    duration: Literal["short", "long", "longest"] = "short"
    takes_sharded: bool = False

    @property
    def trains(self) -> bool:
        """Whether it trains routers, instead of deciding once for every token."""
        return self.kind == "dynamic"

    def function(self) -> Callable[..., Any]:
        """Return what decides, importing it where needed."""
        if not isinstance(self.code, str):
            return self.code
        module, _, name = self.code.partition(":")
        return getattr(importlib.import_module(f"wide.methods.{module}"), name)


_ROWS: dict[str, Method] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True)
def method(name: str, **options: Any) -> Callable[[type[_Settings]], type[_Settings]]:
    """Register a row of the table whose settings the decorated class has; it becomes a frozen dataclass.

    `options` are those of `Method`; the code is by default `decide`, or `route` of a dynamic one, in the row's module.
    A class may be that of several rows.
    """
    is_dynamic = options["kind"] == "dynamic"
    options.setdefault("duration", "long" if is_dynamic else "short")
    if options["kind"] != "dense":
        options.setdefault("code", f"{name}:{'route' if is_dynamic else 'decide'}")

    def register(settings: type[_Settings]) -> type[_Settings]:
        if "__dataclass_fields__" not in vars(settings):
            settings = dataclass(frozen=True, kw_only=True, slots=True)(settings)
        _ROWS[name] = Method(name=name, settings=settings, **options)
        return settings

    return register


def names() -> tuple[str, ...]:
    """Return the names of all rows, in the order of the table."""
    return tuple(_ROWS)


def get(name: str) -> Method:
    """Return a row; raises UsageError, with the nearest name, if there is none of this name."""
    if name not in _ROWS:
        hint = nearest(name, _ROWS, otherwise=".")
        raise UsageError(f"there is no method {name!r}{hint} Methods (wide methods): {', '.join(_ROWS)}")
    return _ROWS[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated(Checked):
    """Settings of every method that reads windows of calibration text.

    Args:
        num_windows: Windows of calibration text.
        window_length: Tokens in a window.
        batch_size: Windows in a micro-batch.
        seed: Of the choice of windows.
    """

    num_windows: Positive = 128
    window_length: Positive = 2048
    batch_size: Positive = 16
    seed: int = 17

    def forwards(self, num_layers: int, sparsity: float) -> float:
        """Return about how often the windows run through the model; one that also runs back counts as three."""
        return 1.0

    def num_tokens(self, num_layers: int, sparsity: float) -> float:
        """Return about how many tokens run through the model; one that also runs back counts as three."""
        return self.forwards(num_layers, sparsity) * self.num_windows * self.window_length


@method("dense", kind="dense", summary="the model as it is, whatever the target", source="the model's authors")
class DenseConfig:
    """The dense model has no settings."""


@method(
    "shortened-taylor",
    kind="depth",
    summary="leave out the layers with the smallest weights times gradients",
    source="Kim et al., Shortened LLaMA: Depth Pruning for Large Language Models, 2024",
    code="shortened:decide_by_taylor",
)
@method(
    "shortened-ppl",
    kind="depth",
    summary="leave out the layers whose removal, each alone, raises perplexity least",
    source="Kim et al., Shortened LLaMA: Depth Pruning for Large Language Models, 2024",
    code="shortened:decide_by_perplexity",
)
class ShortenedConfig(Calibrated):
    """Settings of both rows of Shortened LLaMA.

    Args:
        protect_first: Layers at the start that are never removed; null keeps 4 of 32 in proportion, at least 1. The
            original keeps 4 whatever the depth.
        protect_last: The same at the end; null keeps 2 of 32 in proportion, at least 1. The original keeps 2.
        batch_size: Windows in a micro-batch. For the Taylor score, less than `num_windows` holds a float32 copy of
            the layers' parameters.
    """

    num_windows: Positive = 10
    window_length: Positive = 128
    seed: int = 1234
    protect_first: Count | None = None
    protect_last: Count | None = None

    def forwards(self, num_layers: int, sparsity: float) -> float:
        """Return those of one layer missing after the other; gradients cost less."""
        return 1.0 + num_layers


@method(
    "cooppruner",
    kind="depth",
    summary="leave out the layers that contribute least to the perplexity of sampled sets of layers",
    source="Pruning as a Cooperative Game: Surrogate-Assisted Layer Contribution Estimation for LLMs, 2026",
)
class CoopPrunerConfig(Calibrated):
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
        seed: Of the windows, the sets of layers and the surrogate.
    """

    num_windows: Positive = 10
    window_length: Positive = 128
    seed: int = 1234
    strata: Literal["paper", "spanning"] = "paper"
    num_masks: Positive = 8000
    num_contribution_masks: Positive = 80_000
    epochs: Positive = 300
    learning_rate: float = 0.008
    rate_step: Positive = 100
    rate_decay: float = 0.1
    momentum: float = 0.9
    surrogate_batch_size: Positive = 300

    def forwards(self, num_layers: int, sparsity: float) -> float:
        """Return those of all sampled sets of layers; equal ones, of few layers, are run once."""
        return float(min(self.num_masks, 2**num_layers) + 1)


@method(
    "blockpruner",
    kind="depth",
    summary="leave out attention and FFN sublayers one by one, each time the one that raises perplexity least",
    source="Zhong et al., BlockPruner: Fine-grained Pruning for Large Language Models, 2024",
)
class BlockPrunerConfig(Calibrated):
    """Settings of BlockPruner.

    Args:
        num_windows: Windows of calibration text. The original's 256 windows of 2048 tokens cost 0.8 billion tokens
            for half of 64 sublayers, so the default is shorter.
    """

    num_windows: Positive = 64
    window_length: Positive = 512

    def forwards(self, num_layers: int, sparsity: float) -> float:
        """Return those of all candidates of each removal."""
        return 1.0 + sum(2 * num_layers - removed for removed in range(round(sparsity * 2 * num_layers)))


@method(
    "slicegpt",
    kind="stream",
    summary="cut the residual stream to its principal directions",
    source="Ashkboos et al., SliceGPT: Compress Large Language Models by Deleting Rows and Columns, ICLR 2024",
)
class SliceGPTConfig(Calibrated):
    """Settings of SliceGPT.

    Args:
        round_to: The width of the sliced stream is a multiple of this.
    """

    seed: int = 42
    round_to: Positive = 8


@method(
    "tyr",
    kind="width",
    summary="prune heads and channels by second-order cost, and search the sparsity of each layer",
    source="Li et al., Týr-the-Pruner: Structural Pruning LLMs via Global Sparsity Distribution Optimization, 2025",
    duration="longest",
)
class TyrConfig(Calibrated):
    """Settings of Týr-the-Pruner.

    Args:
        attention_rounds: Rounds in which the heads of a layer are removed, ranked anew before each.
        ffn_rounds: The same for FFN channels.
        damping: Share of the mean diagonal of the Gram matrix that is added to its diagonal.
        propagation: Inputs of the next layer: 'mean' from all copies, weighted by what they keep (paper); 'expected'
            from the copy at the layer's expected sparsity, which the released code is written for; 'dense' from the
            unpruned layer, which the released code comes to, because it overwrites that sparsity with 0.
        iterations: Times the copies are made and searched, with the step between sparsities halved each time.
        levels_per_side: Copies on each side of the expected one.
        first_step: Distance between the sparsities of neighbouring copies in the first iteration.
        min_head_step: Least distance in query heads.
        min_channel_step: Least distance in FFN channels.
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

    num_windows: Positive = 1024
    window_length: Positive = 4096
    batch_size: Positive = 4
    seed: int = 0
    attention_rounds: Positive = 1
    ffn_rounds: Positive = 16
    damping: float = 0.01
    propagation: Literal["expected", "mean", "dense"] = "expected"
    iterations: Positive = 4
    levels_per_side: Positive = 4
    first_step: float = 0.125
    min_head_step: int = 1
    min_channel_step: int = 32
    generations: int = 50
    offspring: int = 128
    max_swaps: Positive = 4
    stage_tokens: tuple[int, ...] = (2048, 16384, 131072)
    survivors: tuple[int, ...] = (16, 4)
    search_window_length: int = 4096
    search_batch_size: int = 4
    top_k: Positive = 8192

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if len(self.survivors) != len(self.stage_tokens) - 1:
            raise ConfigError(f"survivors {self.survivors} must be one fewer than stage_tokens {self.stage_tokens}")

    def num_tokens(self, num_layers: int, sparsity: float) -> float:
        """Return those of making the copies and of the search; solving for the copies comes on top."""
        copies = 2 * self.levels_per_side + 1 if self.propagation == "mean" else 1
        mutants = zip((self.offspring, *self.survivors), self.stage_tokens, strict=True)
        search = self.generations * sum(count * tokens for count, tokens in mutants)
        return float(self.iterations * ((1 + copies) * self.num_windows * self.window_length + search))


@method(
    "ddp",
    kind="width",
    summary="train a real gate per query head and FFN channel, without sampling, on frozen weights",
    source="Huang et al., Deterministic Differentiable Pruning, 2026",
    takes_sharded=True,
    duration="long",
)
class DDPConfig(Checked):
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
        gradient_checkpointing: Trade a second forward for memory.
        compile: Whether `torch.compile` fuses each layer and the loss, as in the training of routers.
        seed: Of the initial gates and the order of the text.
    """

    steps: Positive = 1000
    batch_size: Positive = 16
    micro_batch_size: Positive = 2
    sequence_length: Annotated[int, Between(2)] | None = 2048
    learning_rate: AboveZero = 2e-2
    linear_rate: NotNegative = 2e-2
    quadratic_rate: NotNegative = 0.4
    binary_rate: NotNegative = 2e-2
    warmup: Share = 0.1
    distillation: NotNegative = 2.0
    midpoint_end: Annotated[float, Between(0, 0.5, without="low")] = 0.1
    initial_spread: NotNegative = 0.01
    lowest: Annotated[float, Between(high=0, hint="no gate could reach 0")] = -0.1
    gradient_checkpointing: bool = False
    compile: bool = False
    seed: int = 17

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.batch_size % self.micro_batch_size:
            raise ConfigError(f"micro_batch_size {self.micro_batch_size} does not divide batch_size {self.batch_size}")

    def num_tokens(self, num_layers: int, sparsity: float) -> float:
        """Return those of training, forward and back, and of the dense model that it distils."""
        length = self.sequence_length or DDPConfig().sequence_length
        assert length is not None
        return (4.0 if self.distillation else 3.0) * self.steps * self.batch_size * length


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRouters(Checked):
    """Settings of every row whose routers decide per token for whole sublayers or layers.

    Args:
        router_rank: Width of the router's inner layer.
        calibrate_threshold: Whether the threshold may be moved off 0, argmax, so that inference meets the target.
    """

    router_rank: Positive = 32
    calibrate_threshold: bool = True


@method(
    "skipgpt",
    kind="dynamic",
    summary="each token executes or skips whole sublayers, as the WIDE paper runs SkipGPT",
    source="Zhao et al., SkipGPT: Each Token is One of a Kind, ICML 2025; token routers of the WIDE authors' code",
)
class SkipGPTConfig(TokenRouters):
    """Settings of token-wise skipping of sublayers as the WIDE paper runs SkipGPT.

    The paper raises the routers' rank to what WIDE's routers hold in total.

    Args:
        uniform: Steer attention and FFN to the target each, instead of their mean.
    """

    uniform: bool = False


@method(
    "skipgpt-original",
    kind="dynamic",
    summary="each token executes or skips whole sublayers, with SkipGPT's own routers and schedule",
    source="Zhao et al., SkipGPT: Each Token is One of a Kind, ICML 2025; github.com/EIT-NLP/SkipGPT",
    code="skipgpt:route_original",
)
class SkipGPTOriginalConfig(Checked):
    """Settings of SkipGPT as its authors released it.

    Args:
        router_rank: Width of the routers' MLP; null means a quarter of the hidden size.
        router_init: Initial routers: 'kaiming' is the released code's, Kaiming-uniform with zero biases; 'uniform' that
            of torch's linear layers, with random biases and margins a quarter as wide.
        weight: Of the distance from the target sparsity in the loss.
        temperature_start: Gumbel-softmax temperature at the first step.
        temperature_end: Temperature at the last step, reached linearly.
        calibrate_threshold: Whether the threshold may be moved off 0, argmax, so that inference meets the target.
    """

    router_rank: Positive | None = None
    router_init: Literal["kaiming", "uniform"] = "kaiming"
    weight: NotNegative = 20.0
    temperature_start: AboveZero = 5.0
    temperature_end: AboveZero = 1.0
    calibrate_threshold: bool = True


@method(
    "dllm",
    kind="dynamic",
    summary="each token executes or skips whole layers, by one router for both sublayers",
    source="Jiang et al., D-LLM, NeurIPS 2024; layer_skip of the WIDE authors' code",
)
class DLLMConfig(TokenRouters):
    """Settings of layer skipping in D-LLM's manner: one router for both sublayers of a layer."""


@method(
    "dllm-original",
    kind="dynamic",
    summary="each token executes or skips whole layers, with D-LLM's own routers, eviction and protected tokens",
    source="Jiang et al., D-LLM, NeurIPS 2024; github.com/Jyk-122/D-LLM",
    code="dllm:route_original",
)
class DLLMOriginalConfig(TokenRouters):
    """Settings of D-LLM as its authors released it.

    Args:
        dense_layers: Layers at the start that every token executes.
        first_tokens: Tokens at the start of each sequence that execute every layer.
        temperature: Of the Gumbel-softmax, the same at every step.
    """

    router_rank: Positive = 512
    dense_layers: Count = 2
    first_tokens: Count = 2
    temperature: AboveZero = 1.0


@method(
    "wide",
    kind="dynamic",
    summary="each token chooses which groups of heads and of FFN channels it executes",
    source="WIDE, sections 3.1 and 3.2; the paper's equations where its authors' code differs",
    code="routed:route_wide",
)
class WideMethodConfig(WideConfig):
    """Settings of the row 'wide': those of `WideConfig`, and how the target is met.

    Args:
        uniform: Steer attention and FFN to the target each, instead of their mean.
        calibrate_threshold: Whether the threshold may be moved off 0, argmax, so that inference meets the target.
    """

    uniform: bool = False
    calibrate_threshold: bool = True
