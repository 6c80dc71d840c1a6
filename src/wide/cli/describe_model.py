"""What the structure of a model allows, read from its configuration alone."""

from collections.abc import Sequence
from typing import Any

from wide.config import WideConfig
from wide.grouping import divisors
from wide.models.attach import plan_for
from wide.models.block_spec import BlockSpec
from wide.models.cost import costs
from wide.models.discovery import discover
from wide.models.plan_check import attention_group_sizes
from wide.models.pretrained import load_skeleton


def describe_model(name: str) -> str:
    """Return sizes, group sizes that divide, and where the work lies, as text.

    Args:
        name: Hub name or folder.

    Raises:
        ConfigError: If there is no such model.
        UnsupportedModelError: If it cannot be routed, with the reason.
    """
    model = load_skeleton(name)
    specs = discover(model)
    first = specs[0]
    attention = first.attention
    same = all(_sizes(spec) == _sizes(first) for spec in specs)
    heads = f"{attention.num_query_heads} / {attention.num_kv_heads} of {attention.head_dim} channels"
    lines = [
        f"{name}: {model.config.model_type}, {type(model).__name__}, can be pruned",
        f"  layers              {len(specs)}{'' if same else ' (sizes below: first layer; they differ)'}",
        f"  hidden size         {first.hidden_size}",
        f"  query / KV heads    {heads}",
        "  attention groups    "
        f"default {attention.kv_group_size} channels; possible {_listed(attention_group_sizes(attention))}",
    ]
    if first.ffn is None:
        lines.append(f"  FFN                 not routed: {first.ffn_reason}")
    else:
        sizes = [size for size in divisors(first.ffn.width) if size >= 8]
        lines.append(f"  FFN width           {first.ffn.width}")
        lines.append(f"  FFN groups          default {WideConfig().ffn_group_size} channels; possible {_listed(sizes)}")
    return "\n".join([*lines, *_work(specs, int(model.config.get_text_config().vocab_size))])


def _sizes(spec: BlockSpec) -> tuple[Any, ...]:
    attention, ffn = spec.attention, spec.ffn
    return attention.num_query_heads, attention.num_kv_heads, attention.head_dim, None if ffn is None else ffn.width


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _work(specs: Sequence[BlockSpec], vocab_size: int) -> list[str]:
    # One group per half-layer always divides, and shares do not depend on the group size.
    whole = None if specs[0].ffn is None else specs[0].ffn.width
    plan = plan_for(WideConfig(ffn_group_size=whole or 1, attention_group_size=specs[0].attention.query_width), specs)
    found = costs(specs, plan, vocab_size)
    attention = sum(layer.attention_group * layer.attention_groups for layer in found.layers)
    ffn = sum(layer.ffn_group * layer.ffn_groups for layer in found.layers)
    fixed = sum(layer.fixed for layer in found.layers)
    total = attention + ffn + fixed + found.head
    parts = (
        ("attention Q and O", attention, "skipped by group"),
        ("FFN", ffn, "skipped by group"),
        ("K, V and the like", fixed, "always executed"),
        ("output head", found.head, "always executed"),
    )
    lines = [f"  matrix products     {total / 1e6:,.2f} MFLOP per token (attention scores not counted)"]
    return lines + [f"    {name:<18}{part / total:>6.1%}  {kind}" for name, part, kind in parts]
