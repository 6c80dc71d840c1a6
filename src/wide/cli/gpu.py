"""What commands need that measure on a GPU."""

from wide.errors import UnsupportedBackendError


def require_gpu(command: str) -> None:
    """Refuse a machine without a CUDA device.

    Raises:
        UnsupportedBackendError: If there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedBackendError(
            f"wide {command} times kernels on a CUDA GPU and this machine has none that torch {torch.__version__} can "
            "use; run it on a machine with one (sm_80 or newer)"
        )
