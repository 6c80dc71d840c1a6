"""What a row leaves out, counted from its plan, its zeros and logged decisions alone, not by the package's counters."""

from dataclasses import dataclass

import torch

from wide.models.attach import attachment
from wide.models.observe import capture_routing
from wide.plan import Following, Kept, Routed, Skipped


@dataclass(frozen=True)
class Weights:
    """Weights of the matrices of one decoder layer, each two FLOP for a token."""

    query_output: int
    key_value: int
    ffn: int

    @property
    def total(self):
        return self.query_output + self.key_value + self.ffn


def layer_weights(spec):
    """Count them from the modules."""

    def count(*modules):
        return sum(module.weight.numel() for module in modules if module is not None)

    attention, ffn = spec.attention, spec.ffn
    return Weights(
        query_output=count(attention.query, attention.output),
        key_value=count(attention.key, attention.value),
        ffn=count(ffn.gate, ffn.up, ffn.down),
    )


def logged_rates(model, batches):
    """Return by (layer, half) the share of (valid token, group) pairs that a routed half skips."""
    pairs: dict[tuple[int, str], list[float]] = {}
    for batch in batches:
        with capture_routing(model) as routing, torch.no_grad():
            model(input_ids=batch.input_ids)
        for index, layer in enumerate(attachment(model).plan.layers):
            for name, half in layer.halves():
                if isinstance(half, Routed | Following):
                    mask = getattr(routing[index], name if isinstance(half, Routed) else "attention")[batch.valid]
                    entry = pairs.setdefault((index, name), [0.0, 0.0])
                    entry[0] += float((~mask.bool()).sum())
                    entry[1] += mask.numel()
    return {key: skipped / total for key, (skipped, total) in pairs.items()}


def recount(model, batches):
    """Return attention and FFN rates, saved share of the layers' matrix products, and kept share of the cache."""
    config, state = model.config, attachment(model)
    width, depth = config.hidden_size, config.num_hidden_layers
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    work = {"query_output": 2 * width * heads * size, "key_value": 2 * width * kv_heads * size}
    work["ffn"] = 3 * width * config.intermediate_size
    total = depth * sum(work.values())
    if state.plan.stream is not None:
        return _of_stream(total, width, state.plan.stream.kept, depth, config.intermediate_size)
    logged = logged_rates(model, batches)
    rates: dict[str, list[float]] = {"attention": [], "ffn": []}
    saved = cache = 0.0
    for index, layer in enumerate(state.plan.layers):
        for name, half in layer.halves():
            products = work["ffn"] if name == "ffn" else work["query_output"]
            share, of_cache = logged.get((index, name), 0.0), 0.0
            if isinstance(half, Skipped):
                share = of_cache = 1.0
            elif isinstance(half, Kept):
                scale = state.static_parameters()[f"layers.{index}.{name}.scale"]
                share = float((scale == 0).float().mean())
                if name == "attention":
                    # A KV head goes with the last query head that reads it.
                    by_kv_head = scale.repeat_interleave(heads // scale.numel()).view(kv_heads, -1)
                    of_cache = float((by_kv_head == 0).all(1).float().mean())
            elif isinstance(half, Routed) and half.evicts:
                of_cache = share
            saved += share * products
            if name == "attention":
                saved += of_cache * work["key_value"]
                cache += of_cache / depth
            if not logged or (index, name) in logged:
                rates[name].append(share)
    attention, ffn = (sum(of_kind) / len(of_kind) for of_kind in (rates["attention"], rates["ffn"]))
    return attention, ffn, saved / total, 1.0 - cache


def _of_stream(total, width, kept, depth, channels):
    """Every product reads or writes `kept` dimensions; two shortcuts a layer; the last FFN writes all dimensions."""
    left = total * kept / width + (2 * depth - 1) * kept * kept + kept * width + channels * (width - kept)
    return 1 - kept / width, 1 - kept / width, 1 - left / total, 1.0
