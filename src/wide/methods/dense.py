"""The dense row: the model as it is."""

from torch import nn

from wide.data.batches import TokenBlocks
from wide.method_config import DenseConfig
from wide.methods.method import Decision, Method, Target
from wide.models.discovery import discover
from wide.plan import Dense, LayerPlan, Plan


def decide(model: nn.Module, _blocks: TokenBlocks, _target: Target, _settings: DenseConfig) -> Decision:
    """Decide to prune nothing, whatever the target."""
    layers = tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in discover(model))
    return Decision(plan=Plan(layers))


METHOD = Method(
    name="dense",
    kind="dense",
    summary="the model as it is, whatever the target",
    source="the model's authors",
    settings=DenseConfig,
    decide=decide,
)
