"""All settings as frozen dataclasses: the one schema of Python, YAML and the command line.

This file imports no torch, so that `wide --help` is quick. Each field says its unit and, where it has one, its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from wide.errors import ConfigError
from wide.plan import RouterInput
from wide.schema import Between, Checked, Count, Positive, Share

SparsityTarget = Literal["mean", "uniform", "linear_flops"]
FfnGrouping = Literal["adjacent", "clustered"]
RouterStart = Literal["random", "fitted"]
NotNegative = Annotated[float, Between(0)]
AboveZero = Annotated[float, Between(0, without="low")]
Sparsity = Annotated[float, Between(0, 1, "high", "0.5 skips half of the work")]
Seed = Annotated[int, Between(0, 2**63, without="high")]


@dataclass(frozen=True, kw_only=True, slots=True)
class WideConfig(Checked):
    """How a model is cut into groups and routed (paper, section 3.1).

    Args:
        ffn_group_size: Intermediate channels per FFN group; must divide the FFN width.
        attention_group_size: Query channels per attention group, in whole query heads; None means one group per KV
            head, i.e. (query heads / KV heads) * head size.
        router_rank: Width of the router's bottleneck; 16 or 32 in the paper.
        router_input: 'normed' is X of the paper's equations (what the sub-layer itself receives); 'residual' is the
            stream before the norm; 'layer_input' is the stream before the layer, for both sublayers.
        router_bias: Whether the router's second matrix has a bias (the paper's equations have none).
        ffn_grouping: 'adjacent' groups channels as they lie in the model (paper); 'clustered' first puts channels that
            matter for the same tokens side by side, which leaves each FFN's function as it is (`wide.prune` reads
            `start_tokens` for it).
        router_start: What stage 1 begins with: 'random' matrices (paper), or 'fitted' ones, which predict the groups
            that add most to the output at the target sparsity, and let groups that matter by far most always execute;
            needs `router_bias`. With a target of 'uniform', one threshold serves attention and FFN, and training
            separates them.
        start_tokens: Tokens of training text from which groups are clustered and routers fitted; the last sequence is
            read whole.
    """

    ffn_group_size: Positive = 128
    attention_group_size: Positive | None = None
    router_rank: Positive = 32
    router_input: RouterInput = "normed"
    router_bias: bool = False
    ffn_grouping: FfnGrouping = "adjacent"
    router_start: RouterStart = "random"
    start_tokens: Positive = 16_384

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.router_start == "fitted" and not self.router_bias:
            raise ConfigError("router_start='fitted' needs router_bias=true")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig(Checked):
    """What training minimises: LM loss + weight * |target - measured skip rate| (paper, section 3.2).

    Args:
        sparsity: Wanted share of skipped work, in [0, 1), in the measure named by `target`.
        target: 'mean': unweighted mean of attention and FFN skip rates (paper); 'uniform': a term each (paper,
            appendix); 'linear_flops': each group weighs the matrix-product work that skipping it saves.
        weight: alpha of the paper.
        distillation: Weight of KL(dense || pruned) on the logits; 0 turns it off, 1 replaces the LM loss.
        smoothing: Distance from the target within which the sparsity term is quadratic, so that its slope vanishes at
            the target instead of changing sign with every step; 0 is the paper's absolute distance.
    """

    sparsity: Sparsity = 0.5
    target: SparsityTarget = "mean"
    weight: NotNegative = 20.0
    distillation: Share = 0.0
    smoothing: Share = 0.0


BEFORE = {"adam_beta2": 0.999, "ddp.compile": False}
"""What a run had that was begun before there was the option, or this option of a group."""


def recorded_objective(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objective that an adapter records, without options of earlier versions that were off."""
    return {name: value for name, value in found.items() if value or name in ObjectiveConfig.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig(Checked):
    """One training stage; the defaults are stage 1 of the paper.

    Args:
        steps: Optimiser steps.
        batch_size: Sequences per optimiser step, over all ranks.
        micro_batch_size: Sequences per forward and rank; None means the rank's whole share.
        sequence_length: Tokens per sequence.
        learning_rate: Peak of the cosine schedule.
        weight_decay: Of AdamW.
        adam_beta2: Of AdamW. At 0.95 a rare large gradient moves a router by a fifth of what it does at 0.999.
        max_grad_norm: Gradient clipping.
        warmup: Share of the steps with linearly rising learning rate.
        temperature_start: Gumbel-softmax temperature at the first step.
        temperature_end: Temperature at the last step, reached linearly.
        gradient_checkpointing: Trade a second forward for memory (always non-reentrant).
        compile: Whether `torch.compile` fuses each layer's forward and backward: faster and leaner after a first step
            of seconds. Noise is then another sample of the same distribution.
        checkpoint_every: Steps between resumable checkpoints; 0 writes none but the last.
        seed: Of initialisation, data order and Gumbel noise.
    """

    steps: Positive = 10_000
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    sequence_length: Annotated[int, Between(2)] = 4096
    learning_rate: AboveZero = 2e-3
    weight_decay: NotNegative = 0.01
    adam_beta2: Annotated[float, Between(0, 1, "high")] = 0.999
    max_grad_norm: AboveZero = 1.0
    warmup: Share = 0.1
    temperature_start: AboveZero = 5.0
    temperature_end: AboveZero = 0.5
    gradient_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: Count = 500
    seed: Seed = 17

    @property
    def num_tokens(self) -> int:
        """Tokens that all steps read."""
        return self.steps * self.batch_size * self.sequence_length


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
        distillation: As for `ObjectiveConfig`, in this stage, whatever is pruned; None means that of the objective.
    """

    learning_rate: AboveZero = 2e-4
    lora_rank: Positive = 16
    lora_alpha: AboveZero = 32.0
    lora_dropout: Annotated[float, Between(0, 1, without="high")] = 0.1
    train_routers: bool = True
    restart_temperature: bool = True
    distillation: Share | None = None
