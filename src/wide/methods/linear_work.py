"""Matrix weights of decoder layers, and the share of units to prune that reaches a share of their work."""

from collections.abc import Sequence
from dataclasses import dataclass

from wide.errors import ConfigError, UnsupportedModelError
from wide.methods.method import Target
from wide.models.block_spec import BlockSpec, FeedForwardSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """Weights of the matrices of one decoder layer; the work per token is two FLOP for each.

    Args:
        query_output: Of the query and output projections.
        key_value: Of the key and value projections.
        ffn: Of up, down and, if there is one, gate.
    """

    query_output: int
    key_value: int
    ffn: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.query_output + self.key_value + self.ffn


def feed_forward(spec: BlockSpec) -> FeedForwardSpec:
    """Return the FFN of a layer.

    Raises:
        UnsupportedModelError: If the layer has none that can be pruned.
    """
    if spec.ffn is None:
        raise UnsupportedModelError(f"this method prunes every FFN, and {spec.ffn_reason}")
    return spec.ffn


def layer_weights(spec: BlockSpec) -> LayerWeights:
    """Return the matrix weights of a layer.

    Raises:
        UnsupportedModelError: If its FFN is not of the known kind.
    """
    attention, ffn = spec.attention, feed_forward(spec)
    return LayerWeights(
        query_output=2 * attention.query_width * spec.hidden_size,
        key_value=2 * attention.num_kv_heads * attention.head_dim * spec.hidden_size,
        ffn=ffn.num_matrices * ffn.width * spec.hidden_size,
    )


def width_share(specs: Sequence[BlockSpec], target: Target) -> float:
    """Return the share of query heads and of FFN channels to prune.

    With match='linear_flops' keys and values stay dense and count in the total, so the share is above the target. Where
    queries are normed over their whole width, the query projection stays too.

    Raises:
        ConfigError: If the target cannot be reached by pruning heads and channels; the message gives the largest one.
    """
    if target.match == "nominal":
        return target.sparsity
    total = prunable = 0
    for spec in specs:
        weights = layer_weights(spec)
        total += weights.total
        prunable += weights.ffn + weights.query_output // (2 if spec.attention.q_norm == "width" else 1)
    share = target.sparsity * total / prunable
    if share >= 1.0:
        raise ConfigError(
            f"sparsity {target.sparsity} of all matrix products cannot be reached by pruning query heads and FFN "
            f"channels, because keys and values stay dense; stay below {prunable / total:.4f}"
        )
    return share
