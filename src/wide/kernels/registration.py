"""Makes functions operators of torch, and checks their tensors."""

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeVar, get_type_hints

import torch

from wide.errors import ShapeError

Implementation = Callable[..., Any]
FunctionT = TypeVar("FunctionT", bound=Implementation)

_LIBRARY = torch.library.Library("wide", "FRAGMENT")
# Of a thread: whether it runs an operator, whose tensors have been checked.
_running = threading.local()


def operator(outputs: Implementation, *, mutates: Collection[str] = ()) -> Callable[[FunctionT], FunctionT]:
    """Make a function the operator of torch that bears its name, less leading underscores: `torch.ops.wide.name`.

    Its annotations and defaults are the schema; one argument may be a NamedTuple, of which the schema has the fields.
    Triton launches on the current device, whatever the tensors' is: the function runs with theirs made current. This
    costs a comparison, in eager calls only; graphs replay launches, not Python. `torch.library.custom_op` costs
    microseconds more in every call, which decoding feels.

    Args:
        outputs: Makes empty tensors like those that the function returns, which tracing needs; it takes those of the
            schema's arguments that it names. Outputs never alias inputs.
        mutates: Names of the arguments that the function writes to.

    Returns:
        A decorator; what it returns takes what the function takes, and raises `ShapeError` for tensors of several
        devices.
    """

    def declare(function: FunctionT) -> FunctionT:
        name, given = function.__name__.lstrip("_"), inspect.signature(function)
        kinds = [parameter.annotation for parameter in given.parameters.values()]
        place, kind = next(((i, each) for i, each in enumerate(kinds) if hasattr(each, "_fields")), (0, None))
        run: Any = function if kind is None else _gathering(function, place, kind)
        flat = inspect.signature(run)
        # Sizes are plain integers: nothing here is worth tracing for symbolic ones.
        schema = torch.library.infer_schema(run, mutates_args=tuple(mutates)).replace("SymInt", "int")
        _LIBRARY.define(name + schema)
        torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(
            on_device_of_tensors(name, run, is_operator=True)
        )

        def fake(*arguments: Any, **options: Any) -> Any:
            known = flat.bind(*arguments, **options)
            known.apply_defaults()
            return outputs(*(known.arguments[wanted] for wanted in inspect.signature(outputs).parameters))

        torch.library.register_fake(f"wide::{name}", fake, lib=_LIBRARY)
        overload: Any = getattr(torch.ops.wide, name).default
        whole = list(given.parameters)[place]

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if getattr(_running, "operator", False):
                # Inside another operator nothing is traced, and the way through torch takes longer than a launch.
                return function(*arguments, **options)
            if kind is None:
                return overload(*arguments, **options)
            if len(arguments) > place:
                return overload(*arguments[:place], *arguments[place], *arguments[place + 1 :], **options)
            return overload(*arguments, **options.pop(whole)._asdict(), **options)

        return call  # type: ignore[return-value]

    return declare


def _gathering(function: Implementation, place: int, kind: Any) -> Implementation:
    """Return a function that takes the fields of a NamedTuple in its place, as torch hands them over."""
    end = place + len(kind._fields)

    def run(*arguments: Any, **options: Any) -> Any:
        return function(*arguments[:place], kind(*arguments[place:end]), *arguments[end:], **options)

    parameters = list(inspect.signature(function).parameters.values())
    form = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fields = [inspect.Parameter(field, form, annotation=of) for field, of in get_type_hints(kind).items()]
    parameters[place : place + 1] = fields
    vars(run)["__signature__"] = inspect.signature(function).replace(parameters=parameters)
    return run


def check_tensor(
    operator: str,
    name: str,
    tensor: torch.Tensor | None,
    dtype: torch.dtype,
    shape: Sequence[int],
    layout: Literal["contiguous", "last stride 1", "any strides"] = "contiguous",
) -> None:
    """Raise ShapeError for a tensor that is not what an operator wants; None is never refused.

    That all tensors lie on one device has been checked before.
    """
    if tensor is None:
        return
    lies = tensor.is_contiguous() if layout == "contiguous" else layout == "any strides" or tensor.stride(-1) == 1
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape) or not lies:
        raise ShapeError(
            f"{operator}: {name} must be {_words(dtype, shape)}, {layout}; got {_words(tensor.dtype, tensor.shape)}, "
            f"strides {tensor.stride()}"
        )


def _words(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def on_device_of_tensors(name: str, function: Implementation, *, is_operator: bool = False) -> Implementation:
    """Return `function` with the device of its tensor arguments made current while it runs.

    That raises ShapeError if its tensors lie on several devices; the message begins with `name`.
    """

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        devices = {a.device for a in (*arguments, *options.values()) if isinstance(a, torch.Tensor)}
        if len(devices) > 1:
            raise ShapeError(
                f"{name} wants all tensors on one device, got {sorted(map(str, devices))}; move them with .to(device)"
            )
        device, outer = next(iter(devices)), getattr(_running, "operator", False)
        # What is no operator may be traced, and the operators in it with it.
        _running.operator = outer or is_operator
        try:
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*arguments, **options)
            with torch.cuda.device(device):
                return function(*arguments, **options)
        finally:
            _running.operator = outer

    return guarded
