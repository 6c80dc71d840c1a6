"""How functions become operators of torch, with what all of them owe the device."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.tuning import SPECIAL_BACKENDS

Implementation = Callable[..., Any]

_LIBRARY = torch.library.Library("wide", "FRAGMENT")


def operator(outputs: Implementation, *, mutates: Collection[str] = ()) -> Callable[[Implementation], Implementation]:
    """Declare a function as the operator of torch that bears its name, less leading underscores: `torch.ops.wide.name`.

    Its annotations are the schema. Triton launches on the current device, whatever the tensors' is: the function runs
    with theirs made current. This costs a comparison, in eager calls only; graphs replay launches, not Python.
    `torch.library.custom_op` costs microseconds more in every call, which decoding feels.

    Args:
        outputs: Makes empty tensors like those that the function returns, which tracing needs; it takes those of the
            function's arguments that it names. Outputs never alias inputs.
        mutates: Names of the arguments that the function writes to.

    Returns:
        A decorator; what it returns is called with positional arguments only, and raises `ShapeError` for tensors of
        several devices.
    """

    def declare(function: Implementation) -> Implementation:
        name = function.__name__.lstrip("_")
        # Sizes are plain integers: nothing here is worth tracing for symbolic ones.
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates)).replace("SymInt", "int")
        _LIBRARY.define(name + schema)
        torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(on_device_of_tensors(name, function))
        names = list(inspect.signature(function).parameters)
        places = [names.index(wanted) for wanted in inspect.signature(outputs).parameters]

        def fake(*arguments: Any) -> Any:
            return outputs(*(arguments[place] for place in places))

        torch.library.register_fake(f"wide::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.wide, name).default  # type: ignore[no-any-return]

    return declare


def check_backend(operator: str, backend: str, names: Collection[str], reason: str | None) -> None:
    """Refuse a backend that an operator does not have, or that does not fit.

    Args:
        operator: Its name.
        backend: What the caller asked for.
        names: Backends of the operator.
        reason: Why this one does not fit, or None.

    Raises:
        UnsupportedBackendError: The message names operator, backend or reason, and what to choose.
    """
    if backend not in names:
        raise UnsupportedBackendError(f"{operator} has the backends {sorted(names)}, got {backend!r}")
    if reason is not None:
        others = [repr(name) for name in names if name != backend and name not in SPECIAL_BACKENDS]
        instead = " or ".join(([", ".join(others[:-1])] if others[1:] else []) + others[-1:])
        raise UnsupportedBackendError(f"{operator}: {reason}; choose backend={instead}")


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
