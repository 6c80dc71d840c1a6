"""What a forward over a few tokens tells about each layer's masks, for choosing operators."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wide.errors import NotAttachedError, ShapeError
from wide.kernels.reorder.rows_reference import TILE_ROWS, left_to_tiles
from wide.models.attach import attachment
from wide.models.observe import forward_without_head, judging, observe

LEAST_TOKENS = 2048
"""Of a sample that tells how alike rows are."""


class LayerSample(NamedTuple):
    """Shares of one layer, of (token, group) pairs that execute in attention and FFN; 1 in a half without a router.

    `left` is the share of the FFN's groups that tiles of rows in one order execute; None without a router, and where
    the sample is too short to tell.
    """

    executed: tuple[float, float]
    left: float | None


def sample_layers(model: nn.Module, ids: Tensor) -> list[LayerSample]:
    """Return what the masked model's routers decide for tokens, layer by layer.

    Ids are without padding, int32 or int64 [B, T]; each sequence is a prompt of its own. Raises NotAttachedError if
    routing is forced or switched off, and ShapeError if `ids` is no such tensor, is empty, or holds ids that the model
    has no embedding of.
    """
    is_tensor = isinstance(ids, Tensor)
    if not is_tensor or ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
        given = f"{ids.dtype} {tuple(ids.shape)}" if is_tensor else type(ids).__name__
        raise ShapeError(
            f"a sample must be token ids, int32 or int64 [batch, tokens], got {given}; give "
            "tokenizer(text, return_tensors='pt').input_ids of text like that to come"
        )
    control = attachment(model).control
    if control.forced is not None or not control.enabled:
        raise NotAttachedError(
            "a sample must be routed by the model itself; call wide.optimize outside of force_routing and bypass"
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
        found.append(LayerSample((shares[0], shares[1]), _left(layer.ffn)))
    return found


def _left(mask: Tensor | None) -> float | None:
    # Few rows leave little to their tiles however unlike they are, and so does a tile that is not full.
    if mask is None or mask[..., 0].numel() < LEAST_TOKENS:
        return None
    rows = mask.flatten(0, 1).bool()
    return left_to_tiles(rows[: len(rows) // TILE_ROWS * TILE_ROWS])
