"""What a forward over a few tokens tells about each layer's masks, for choosing operators."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wide.errors import ShapeError
from wide.kernels.reorder_rows import left_to_tiles
from wide.models.observe import forward_without_head, judging, observe


class LayerSample(NamedTuple):
    """Of one layer.

    Args:
        executed: Shares of (token, group) pairs that execute, in attention and FFN; 1 in a half without a router.
        left: Share of the FFN's groups that tiles of rows in one order execute; None without a router.
    """

    executed: tuple[float, float]
    left: float | None


def sample_layers(model: nn.Module, ids: Tensor) -> list[LayerSample]:
    """Return what the masked model's routers decide for tokens, layer by layer.

    Args:
        model: An attached model, not optimised.
        ids: Token ids without padding, integer [B, T]; each sequence is a prompt of its own.

    Raises:
        ShapeError: If `ids` is no tensor of integers [B, T], is empty, or holds ids that the model has no embedding of.
    """
    is_tensor = isinstance(ids, Tensor)
    if not is_tensor or ids.dim() != 2 or not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
        given = f"{ids.dtype} {tuple(ids.shape)}" if is_tensor else type(ids).__name__
        raise ShapeError(
            f"a sample must be token ids, integer [batch, tokens], got {given}; give "
            "tokenizer(text, return_tensors='pt').input_ids of text like that to come"
        )
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    least, most = ids.min().item(), ids.max().item()
    if least < 0 or most >= embedding.num_embeddings:
        raise ShapeError(
            f"a sample's token ids must lie in 0 to {embedding.num_embeddings - 1}, got {least} to {most}; use the "
            "tokenizer of this model"
        )
    with judging(model), observe(model) as routing:
        forward_without_head(model, ids.to(next(model.parameters()).device))
    found = []
    for layer in routing:
        shares = [1.0 if mask is None else mask.float().mean().item() for mask in (layer.attention, layer.ffn)]
        left = None if layer.ffn is None else left_to_tiles(layer.ffn.flatten(0, 1).bool())
        found.append(LayerSample((shares[0], shares[1]), left))
    return found
