"""Fold a plan's scales into the weights, in place: the dense shapes compute the pruned function."""

from torch import Tensor

from wide.models.block_spec import BlockSpec
from wide.models.materialise.linear import plain_linear, scale_columns, scale_rows, silence
from wide.models.materialise.narrow import feed_forward
from wide.plan import Kept, LayerPlan, Skipped


def fold_attention(spec: BlockSpec, scale: Tensor) -> None:
    """Scale the columns of the output projection that belong to each unit.

    Args:
        spec: The layer.
        scale: float32 `[units]`; the query width is cut into as many units.
    """
    output = plain_linear(spec.attention.output, f"layer {spec.index}: the output projection")
    scale_columns(output, per_channel(scale, spec.attention.query_width))


def fold_ffn(spec: BlockSpec, scale: Tensor) -> None:
    """Scale the up rows of each unit; without a gate, where up feeds the activation, the columns of down.

    Args:
        spec: The layer.
        scale: float32 `[units]`; the FFN width is cut into as many units.
    """
    half = feed_forward(spec)
    channels = per_channel(scale, half.width)
    if half.gate is None and not half.fused_gate:
        scale_columns(plain_linear(half.down, f"layer {spec.index}: the down projection"), channels)
        return
    up = plain_linear(half.up, f"layer {spec.index}: the up projection")
    if half.fused_gate:
        # The gate rows come first; they feed the activation.
        channels = channels.repeat(2)
        channels[: half.width] = 1.0
    scale_rows(up, channels)


def silence_attention(spec: BlockSpec) -> None:
    """Make the attention's output zero, its bias included."""
    silence(plain_linear(spec.attention.output, f"layer {spec.index}: the output projection"))


def silence_ffn(spec: BlockSpec) -> None:
    """Make the FFN's output zero, its bias included."""
    silence(plain_linear(feed_forward(spec).down, f"layer {spec.index}: the down projection"))


def check_foldable(spec: BlockSpec, layer: LayerPlan) -> None:
    """Check that the projections of what a plan prunes can be written to.

    Raises:
        UnsupportedModelError: If one is quantised or wrapped, or an FFN is a mixture of experts.
    """
    if isinstance(layer.attention, Kept | Skipped):
        plain_linear(spec.attention.output, f"layer {spec.index}: the output projection")
    if isinstance(layer.ffn, Kept | Skipped):
        plain_linear(feed_forward(spec).up, f"layer {spec.index}: the up projection")
        plain_linear(feed_forward(spec).down, f"layer {spec.index}: the down projection")


def per_channel(scale: Tensor, width: int) -> Tensor:
    """Return `scale` `[units]` repeated for the contiguous channels of each unit, `[width]`."""
    return scale.repeat_interleave(width // scale.numel())
