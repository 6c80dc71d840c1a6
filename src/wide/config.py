"""All settings as frozen dataclasses: the one schema of Python, YAML and the command line.

This file imports no torch, so that `wide --help` is quick. Each field says its unit and, where it has one, its source.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from wide.errors import ConfigError
from wide.plan import RouterInput

SparsityTarget = Literal["mean", "uniform", "linear_flops"]
FfnGrouping = Literal["adjacent", "clustered"]
RouterStart = Literal["random", "fitted"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class WideConfig:
    """How a model is cut into groups and routed (paper, section 3.1).

    Args:
        ffn_group_size: Intermediate channels per FFN group; must divide the FFN width.
        attention_group_size: Query channels per attention group, in whole query heads; None means one group per KV
            head, i.e. (query heads / KV heads) * head size.
        router_rank: Width of the router's bottleneck; 16 or 32 in the paper.
        router_input: 'normed' is X of the paper's equations (what the sub-layer itself receives); 'residual' is the
            stream before the norm; 'layer_input' is the stream before the layer, for both sublayers.
        router_bias: Whether the router's second matrix has a bias (the paper's equations have none).
        execute_bias: Initial margin toward execution, in logits; needs `router_bias`.
        ffn_grouping: 'adjacent' groups channels as they lie in the model (paper); 'clustered' first puts channels that
            matter for the same tokens side by side, which leaves each FFN's function as it is (`wide.prune` reads
            `start_tokens` for it).
        router_start: What stage 1 begins with: 'random' matrices (paper), or 'fitted' ones, which predict the groups
            that add most to the output at the target sparsity; needs `router_bias`.
            With a target of 'uniform', one threshold serves attention and FFN, and training separates them.
        start_tokens: Tokens of training text from which groups are clustered and routers fitted; the last sequence is
            read whole.
    """

    ffn_group_size: int = 128
    attention_group_size: int | None = None
    router_rank: int = 32
    router_input: RouterInput = "normed"
    router_bias: bool = False
    execute_bias: float = 0.0
    ffn_grouping: FfnGrouping = "adjacent"
    router_start: RouterStart = "random"
    start_tokens: int = 16_384

    def __post_init__(self) -> None:
        """Refuse values that can never work; divisibility is checked against the model at attach."""
        _require(self.ffn_group_size >= 1, f"ffn_group_size must be at least 1, got {self.ffn_group_size}")
        _require(
            self.attention_group_size is None or self.attention_group_size >= 1,
            f"attention_group_size must be at least 1 or null, got {self.attention_group_size}",
        )
        _require(self.router_rank >= 1, f"router_rank must be at least 1, got {self.router_rank}")
        _require(
            self.router_input in get_args(RouterInput),
            f"router_input must be one of {list(get_args(RouterInput))}, got {self.router_input!r}",
        )
        _require(
            self.execute_bias == 0.0 or self.router_bias,
            f"execute_bias={self.execute_bias} needs router_bias=true",
        )
        for name, kinds in (("ffn_grouping", FfnGrouping), ("router_start", RouterStart)):
            value = getattr(self, name)
            _require(value in get_args(kinds), f"{name} must be one of {list(get_args(kinds))}, got {value!r}")
        _require(
            self.router_start == "random" or (self.router_bias and self.execute_bias == 0.0),
            f"router_start='fitted' needs router_bias=true and finds the bias itself (execute_bias=0); got router_bias="
            f"{self.router_bias}, execute_bias={self.execute_bias}",
        )
        _require(self.start_tokens >= 1, f"start_tokens must be at least 1, got {self.start_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """What training minimises: LM loss + weight * |target - measured skip rate| (paper, section 3.2).

    Args:
        sparsity: Wanted share of skipped work, in [0, 1), in the measure named by `target`.
        target: 'mean': unweighted mean of attention and FFN skip rates (paper); 'uniform': a term each (paper,
            appendix); 'linear_flops': each group weighs the matrix-product work that skipping it saves.
        weight: alpha of the paper.
        include_fixed: For 'linear_flops': count K, V and the output head, which are never skipped, into the total.
        distillation: Weight of KL(dense || pruned) on the logits; 0 turns it off, 1 replaces the LM loss.
        ramp: Share of the steps over which the target rises linearly from 0; 0 turns it off (paper).
        smoothing: Distance from the target within which the sparsity term is quadratic, so that its slope vanishes at
            the target instead of changing sign with every step; 0 is the paper's absolute distance.
        per_token: Whether the distance is that of every token's own skip rate over the layers, averaged over tokens
            (D-LLM), instead of that of the mean over tokens (paper).
        weight_ramp: Whether the weight rises from 0 at the first step to `weight` at the last, as a quarter of a sine
            (D-LLM); otherwise it is constant (paper).
    """

    sparsity: float = 0.5
    target: SparsityTarget = "mean"
    weight: float = 20.0
    include_fixed: bool = False
    distillation: float = 0.0
    ramp: float = 0.0
    smoothing: float = 0.0
    per_token: bool = False
    weight_ramp: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        _require(
            0.0 <= self.sparsity < 1.0,
            f"sparsity must lie in [0, 1), got {self.sparsity}; 0.5 skips half of the work",
        )
        _require(
            self.target in ("mean", "uniform", "linear_flops"),
            f"target must be 'mean', 'uniform' or 'linear_flops', got {self.target!r}",
        )
        _require(self.weight >= 0, f"weight must not be negative, got {self.weight}")
        _require(0.0 <= self.distillation <= 1.0, f"distillation must lie in [0, 1], got {self.distillation}")
        _require(0.0 <= self.ramp <= 1.0, f"ramp must lie in [0, 1], got {self.ramp}")
        _require(0.0 <= self.smoothing <= 1.0, f"smoothing must lie in [0, 1], got {self.smoothing}")


def objective_after_stage_1(objective: ObjectiveConfig) -> ObjectiveConfig:
    """Return what stage 2 minimises after a stage 1 that minimised `objective`: the same, in full from its first step.

    Ramps are for routers that know nothing yet.
    """
    return replace(objective, ramp=0.0, weight_ramp=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """One training stage; the defaults are stage 1 of the paper.

    Args:
        steps: Optimiser steps.
        batch_size: Sequences per optimiser step, over all ranks.
        micro_batch_size: Sequences per forward and rank; None means the rank's whole share.
        sequence_length: Tokens per sequence.
        learning_rate: Peak of the cosine schedule.
        weight_decay: Of AdamW.
        max_grad_norm: Gradient clipping.
        warmup: Share of the steps with linearly rising learning rate.
        temperature_start: Gumbel-softmax temperature at the first step.
        temperature_end: Temperature at the last step, reached linearly.
        noise: Share of the steps, from the first on, that sample masks; in those after them masks are what inference
            executes, with the same straight-through gradient. 1 is the paper's.
        gradient_checkpointing: Trade a second forward for memory (always non-reentrant).
        compile: Whether `torch.compile` fuses the forward and its backward: worth its minutes in long runs. Noise is
            then another sample of the same distribution; a resumed run no longer repeats an interrupted one exactly.
            Not together with gradient checkpointing.
        checkpoint_every: Steps between resumable checkpoints; 0 writes none but the last.
        seed: Of initialisation, data order and Gumbel noise.
    """

    steps: int = 10_000
    batch_size: int = 16
    micro_batch_size: int | None = None
    sequence_length: int = 4096
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    warmup: float = 0.1
    temperature_start: float = 5.0
    temperature_end: float = 0.5
    noise: float = 1.0
    gradient_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: int = 500
    seed: int = 17

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with."""
        for name in ("steps", "batch_size"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(
            self.micro_batch_size is None or self.micro_batch_size >= 1,
            f"micro_batch_size must be at least 1 or null, got {self.micro_batch_size}",
        )
        _require(self.sequence_length >= 2, f"sequence_length must be at least 2, got {self.sequence_length}")
        _require(self.learning_rate > 0, f"learning_rate must be positive, got {self.learning_rate}")
        _require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        _require(self.max_grad_norm > 0, f"max_grad_norm must be positive, got {self.max_grad_norm}")
        _require(0.0 <= self.warmup <= 1.0, f"warmup must lie in [0, 1], got {self.warmup}")
        _require(
            self.temperature_start > 0 and self.temperature_end > 0,
            f"temperatures must be positive, got {self.temperature_start} and {self.temperature_end}",
        )
        _require(
            not (self.compile and self.gradient_checkpointing),
            "compile and gradient_checkpointing cannot both be on: masks that are observed inside a recomputed layer "
            "cannot be compiled; set one of them to false",
        )
        _require(0.0 <= self.noise <= 1.0, f"noise must lie in [0, 1], got {self.noise}")
        _require(0 <= self.seed < 2**63, f"seed must lie in [0, 2**63), got {self.seed}")
        _require(self.checkpoint_every >= 0, f"checkpoint_every must not be negative, got {self.checkpoint_every}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverConfig(StageConfig):
    """Stage 2: LoRA on all linear layers of the decoder (paper, section 3.2).

    Args:
        learning_rate: Peak for LoRA and routers alike.
        lora_rank: r of LoRA.
        lora_alpha: alpha of LoRA; the update is scaled by alpha / r.
        lora_dropout: On the input of LoRA.
        train_routers: Keep training the routers, with the sparsity term on.
        restart_temperature: Anneal the temperature anew; otherwise it stays at `temperature_end`.
    """

    learning_rate: float = 2e-4
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.1
    train_routers: bool = True
    restart_temperature: bool = True

    def __post_init__(self) -> None:
        """Refuse values that LoRA cannot take."""
        StageConfig.__post_init__(self)
        _require(self.lora_rank >= 1, f"lora_rank must be at least 1, got {self.lora_rank}")
        _require(self.lora_alpha > 0, f"lora_alpha must be positive, got {self.lora_alpha}")
        _require(0.0 <= self.lora_dropout < 1.0, f"lora_dropout must lie in [0, 1), got {self.lora_dropout}")
