"""How implementations of operators are registered with torch, with what all of them owe the device."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from wide.errors import ShapeError

Implementation = Callable[..., Any]


def implement(library: torch.library.Library, name: str) -> Callable[[Implementation], Implementation]:
    """Register a function as an operator's implementation on every device.

    Triton launches on the current device, whatever the tensors' is: the function runs with theirs made current. This
    costs a comparison, in eager calls only; graphs replay launches, not Python.

    Args:
        library: That defines the operator.
        name: Of the operator, without the namespace.

    Returns:
        A decorator; the function raises `ShapeError` for tensors of several devices.
    """

    def register(function: Implementation) -> Implementation:
        run = on_device_of_tensors(name, function)
        torch.library.impl(library, name, "CompositeExplicitAutograd")(run)
        return run

    return register


def on_device_of_tensors(name: str, function: Implementation) -> Implementation:
    """Return `function` with the device of its tensor arguments made current while it runs.

    Args:
        name: For messages.
        function: Takes tensors of one device.

    Returns:
        A function that takes what `function` takes.

    Raises:
        ShapeError: When the returned function is called, if its tensors lie on several devices.
    """

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        devices = {a.device for a in (*arguments, *options.values()) if isinstance(a, torch.Tensor)}
        if len(devices) > 1:
            raise ShapeError(
                f"{name} wants all tensors on one device, got {sorted(map(str, devices))}; move them with .to(device)"
            )
        device = next(iter(devices))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*arguments, **options)
        with torch.cuda.device(device):
            return function(*arguments, **options)

    return guarded
