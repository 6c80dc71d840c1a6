"""The least work of sums over a row's executing groups, however their rows are sorted."""

from wide.kernels.contract import Case, Work


def least_work(case: Case) -> Work:
    """Return the least work of GEMM-K, over super-blocks of groups or over rows in one order.

    Args:
        case: With the sizes `num_rows` (M), `num_groups` (N_G), `group_size` (G) and `width` (N).

    Returns:
        Products of the executing pairs; their channels and the weights [N, N_G * G] are read, [M, N] is written.
    """
    rows, groups, size, width = (case.sizes[k] for k in ("num_rows", "num_groups", "group_size", "width"))
    bytes_each = case.dtype.itemsize
    pairs = case.active * rows * groups
    return Work(
        flop=int(2 * pairs * size * width),
        bytes_read=int((pairs + width * groups) * size * bytes_each),
        bytes_written=rows * width * bytes_each,
    )
