"""A router's weights, made ready once for the operators."""

from typing import NamedTuple

import torch

# Rows, or tiles of rows, that can be counted at a time.
NUM_COUNTERS = 32


class RouteWeights(NamedTuple):
    """Weights in the form that the kernels read.

    The first matrix is a sum of two parts in the dtype of the hidden states, one below the other, so that one tensor-
    core product with float32 accumulation keeps 16 (bfloat16) or 22 (float16) bits of each weight.

    Args:
        down: Bottleneck matrix, [2 * r, D] for float16 and bfloat16 inputs, [r, D] for float32 ones.
        difference: Execute row minus skip row of the second matrix, float32 [N_G, r].
        offset: Execute bias minus skip bias, less the threshold, float32 [N_G]; None where both are 0.
        counter: int32 [NUM_COUNTERS], zero between calls: programs that share out channels count themselves here, so
            calls with the same weights must follow each other on one stream.
    """

    down: torch.Tensor
    difference: torch.Tensor
    offset: torch.Tensor | None
    counter: torch.Tensor


def split_weights(
    down: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, *, dtype: torch.dtype
) -> RouteWeights:
    """Return a router's float32 matrices [r, D] and [2 N_G, r], and bias [2 N_G], in the form that operators take.

    Rows of the second matrix alternate execute and skip.
    """
    down, up = down.detach().float(), up.detach().float()
    if dtype != torch.float32:
        high = down.to(dtype)
        down = torch.cat((high, (down - high.float()).to(dtype)))
    pairs = None if bias is None else bias.detach().float().view(-1, 2)
    return RouteWeights(
        down=down.contiguous(),
        difference=(up[0::2] - up[1::2]).contiguous(),
        offset=None if pairs is None else (pairs[:, 0] - pairs[:, 1]).contiguous(),
        counter=torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=down.device),
    )
