"""What races try of an operator: the candidates of every registered backend that runs its shape here."""

import torch

from wide.inference.choice.layer_sizes import LayerSizes, backends_and_shape
from wide.inference.operators.table import SUMS, OperatorName
from wide.kernels.gemv import MAX_ROWS
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import Choice


def candidates(name: OperatorName, sizes: LayerSizes, rows: int, device: torch.device, *, quick: bool) -> list[Choice]:
    """Return what may run an operator of a layer instead of the dense one, none of it twice.

    Args:
        quick: The defaults of each backend and a few tiles more alone.
    """
    has_one_sort = name in SUMS and rows > MAX_ROWS and sizes.grouped(name)[1] > PATTERN_GROUPS
    found = []
    for one_sort in (True, False) if has_one_sort else (False,):
        backends, shape = backends_and_shape(name, sizes, rows, one_sort=one_sort)
        for backend, candidate in backends.candidates(shape, device, quick=quick):
            found.append(Choice(backend=backend, **candidate._asdict()))
    return list(dict.fromkeys(found))
