"""The sizes of a layer's operators, by which measurements are kept and found."""

from typing import Any

from wide.inference.measured import LayerSizes
from wide.models.block_spec import BlockSpec
from wide.plan import LayerPlan, Routed


def layer_sizes(spec: BlockSpec, plan: LayerPlan) -> LayerSizes:
    """Return what measurements of a layer's operators depend on; a half without a router counts as one group.

    Args:
        spec: Parts of the layer; weights are not read.
        plan: What the layer runs.
    """
    attention, ffn = spec.attention, spec.ffn
    groups = [half.grouping.num_groups if isinstance(half, Routed) else 1 for half in (plan.attention, plan.ffn)]
    is_gated = ffn is not None and (ffn.gate is not None or ffn.fused_gate)
    return LayerSizes(
        hidden_size=spec.hidden_size,
        query_width=attention.query_width,
        head_dim=attention.head_dim,
        num_kv_heads=attention.num_kv_heads,
        attention_groups=groups[0],
        ffn_width=groups[1] if ffn is None else ffn.width,
        ffn_groups=groups[1],
        is_gated=is_gated,
        # Either the model fuses them or `optimize` lays them together.
        is_stacked=is_gated,
    )


def tune_command(model: Any, layers: list[tuple[BlockSpec, LayerPlan]], executed: tuple[float, float]) -> str:
    """Return the command line that measures a model's own shapes on this machine.

    Args:
        model: The Hugging Face model, for its name.
        layers: Parts and plan of each layer.
        executed: Expected shares of (token, group) pairs that execute, in attention and FFN.
    """
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or "MODEL"
    shares = ",".join(f"{max(share, 0.01):.2g}" for share in executed)
    flags: list[str] = []
    for half in ("attention", "ffn"):
        found = {getattr(plan, half) for _, plan in layers}
        sizes = {each.grouping.group_size for each in found if isinstance(each, Routed)}
        if len(sizes) != 1 or not all(isinstance(each, Routed) for each in found):
            # Flags cannot say it, the plan in an adapter can.
            return f"wide tune --model {name} --adapter ADAPTER --executed {shares}"
        flags.append(f"--{half}_group_size {sizes.pop()}")
    return f"wide tune --model {name} {' '.join(flags)} --executed {shares}"
