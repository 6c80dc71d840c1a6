"""Second-order pruning of a linear map: the curvature of its squared output error, and what follows from it.

For `y = x B` with inputs x, removing rows of B changes the outputs by `tr(dB^T H dB)` with the Gram matrix
`H = sum x^T x`. All functions compute in the dtype of what they are given, float32 or float64.
"""

import torch
from torch import Tensor

from wide.errors import ConfigError


class GramAccumulator:
    """Sums `x^T x` over all tokens.

    Args:
        width: Channels of x, C.
        device: Where the sum lies.
        dtype: Of the sum, float32 or float64; inputs are brought to it before they are multiplied.

    Attributes:
        matrix: The sum so far, `[C, C]`.
        rows: Tokens so far.
    """

    def __init__(self, width: int, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Start at zero."""
        self.matrix = torch.zeros(width, width, device=device, dtype=dtype)
        self.rows = 0

    def add(self, inputs: Tensor) -> None:
        """Add tokens `[..., C]` of any floating dtype."""
        flat = inputs.detach().flatten(0, -2).to(self.matrix.dtype)
        self.matrix.addmm_(flat.T, flat)
        self.rows += len(flat)


def damped(gram: Tensor, share: float) -> Tensor:
    """Return `gram` `[C, C]` with `share` of its mean diagonal added to the diagonal."""
    result = gram.clone()
    result.diagonal().add_(share * gram.diagonal().mean())
    return result


def cholesky_factor(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factor of `matrix` `[..., C, C]`.

    Raises:
        ConfigError: If the matrix is not positive definite, which more damping or more calibration text cures.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()):
        raise ConfigError(
            f"a matrix of input products of size {matrix.shape[-1]} is not positive definite in {matrix.dtype}; raise "
            "the method's damping (0.01 is usual) or give more calibration text"
        )
    return factor


def inverse(gram: Tensor) -> Tensor:
    """Return the inverse of a positive definite `[C, C]`.

    Raises:
        ConfigError: See `cholesky_factor`.
    """
    return torch.cholesky_inverse(cholesky_factor(gram))


def curvature_of_units(inverse_gram: Tensor, weights: Tensor, unit_size: int) -> Tensor:
    """Return `tr(B_g^T (H^-1_gg)^-1 B_g)` of every unit g: twice the least error that its removal costs.

    Args:
        inverse_gram: `H^-1`, `[C, C]`.
        weights: B, `[C, M]`.
        unit_size: Consecutive rows in a unit; divides C.

    Returns:
        `[C / unit_size]`.
    """
    if unit_size == 1:
        return weights.square().sum(1) / inverse_gram.diagonal()
    units = len(weights) // unit_size
    grid = inverse_gram.reshape(units, unit_size, units, unit_size)
    own = grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    rows = weights.reshape(units, unit_size, -1)
    return (rows * torch.cholesky_solve(rows, cholesky_factor(own))).sum((1, 2))


def remove_rows(inverse_gram: Tensor, weights: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
    """Remove rows at the least output error: the others take over what they can.

    Args:
        inverse_gram: Inverse Gram matrix of all rows, `[C, C]`.
        weights: `[C, M]`.
        removed: True for rows that go, bool `[C]`.

    Returns:
        The inverse Gram matrix of the kept rows, `[C', C']`, and their updated weights, `[C', M]`.
    """
    kept = ~removed
    own = cholesky_factor(inverse_gram[removed][:, removed])
    cross = inverse_gram[kept][:, removed]
    both = torch.cholesky_solve(torch.cat([weights[removed], cross.T], dim=1), own)
    takeover, overlap = both.split([weights.shape[1], len(cross)], dim=1)
    return inverse_gram[kept][:, kept] - cross @ overlap, weights[kept] - cross @ takeover


def restricted_least_squares(gram: Tensor, moments: Tensor, kept: Tensor) -> Tensor:
    """Return the weights of the kept rows that come closest to the outputs of all rows, `H_kk^-1 G_k`.

    Args:
        gram: H, `[C, C]`.
        moments: `G = H B` with the weights B of all rows, `[C, M]`.
        kept: Bool `[C]`.

    Returns:
        `[C', M]`.
    """
    return torch.cholesky_solve(moments[kept], cholesky_factor(gram[kept][:, kept]))
