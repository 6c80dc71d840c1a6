"""The speed-up that masks allow if everything beside the work they leave were free."""

from collections.abc import Sequence

from wide.inference.weights import LayerWeights


def prefill_ceiling(layers: Sequence[LayerWeights], length: int, skipped: tuple[float, float]) -> float:
    """Return dense over remaining FLOPs of the layers' products and of causal attention.

    Args:
        layers: Of the decoder.
        length: Tokens of a sequence.
        skipped: Shares skipped in attention (queries, scores, output) and FFN.
    """
    dense, left = 0.0, 0.0
    for layer in layers:
        query_output, key_value, ffn = _parameters(layer)
        scores = 2.0 * length * layer.attention.output.shape[1]
        dense += 2 * (query_output + key_value + ffn) + scores
        left += 2 * (query_output * (1 - skipped[0]) + key_value + ffn * (1 - skipped[1])) + scores * (1 - skipped[0])
    return dense / left


def decode_ceiling(
    layers: Sequence[LayerWeights], head_values: int, *, batch: int, length: int, skipped: tuple[float, float]
) -> float:
    """Return dense over remaining values read by one step: weights that some sequence needs, and the KV cache.

    Args:
        layers: Of the decoder.
        head_values: Weights of the output head.
        batch: Sequences, with independent masks.
        length: Tokens cached of each.
        skipped: Shares skipped in attention and FFN.
    """
    dense, left = float(head_values), float(head_values)
    # A weight is read if any sequence of the batch needs it.
    union = [1 - rate**batch for rate in skipped]
    for layer in layers:
        query_output, key_value, ffn = _parameters(layer)
        cache = 2.0 * batch * length * layer.attention.num_kv_heads * layer.attention.head_dim
        dense += query_output + key_value + ffn + cache
        left += query_output * union[0] + key_value + ffn * union[1] + cache * (1 - skipped[0])
    return dense / left


def _parameters(layer: LayerWeights) -> tuple[int, int, int]:
    """Return weights of query and output, of keys and values, and of the FFN."""
    query_output = 2 * layer.attention.output.numel()
    key_value = layer.attention.qkv.numel() - layer.attention.output.numel()
    up = 0 if layer.ffn.up is None else layer.ffn.up.numel()
    return query_output, key_value, layer.ffn.gate.numel() + up + layer.ffn.down.numel()
