"""Decode GEMMs (one to four rows) as operators of torch: validation, registration, contract."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.contract import Backend, Case, Operator, Work, anywhere, random_mask, random_values, relative_error
from wide.kernels.device import device_facts, interprets_triton, triton_obstacle
from wide.kernels.gemm_mn.reference import ACTIVATIONS, activate
from wide.kernels.gemv.reference import gemv_k_reference, gemv_mn_reference
from wide.kernels.gemv.tiles import GemvTile, default_k_tile, default_mn_tile
from wide.kernels.registration import implement

MAX_ROWS = 4
_LONG_SUM = 8192

_MN_OPTIONS: dict[str, Any] = {
    "up_weight": None,
    "bias": None,
    "up_bias": None,
    "activation": "none",
    "zero_skipped": False,
}
_LIBRARY = torch.library.Library("wide", "FRAGMENT")
_LIBRARY.define(
    "gemv_mn(Tensor x, Tensor weight, Tensor mask, Tensor? up_weight, Tensor? bias, Tensor? up_bias,"
    " str activation, bool zero_skipped, str backend, int[] tile) -> Tensor"
)
_LIBRARY.define("gemv_k(Tensor h, Tensor weight, Tensor mask, Tensor? bias, str backend, int[] tile) -> Tensor")


def gemv_mn(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    zero_skipped: bool = False,
    backend: str,
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """Return act(x W^T) or act(x W^T) * (x W_up^T) for few rows; weights of groups that no row executes are not read.

    Args:
        x: [M, K] with M in 1..4; last stride 1.
        weight: [N, K]; its rows g * G .. (g + 1) * G belong to group g; last stride 1.
        mask: True = execute, bool [M, N_G] with N_G * G = N.
        up_weight: As `weight`, of gated FFNs.
        bias: [N], contiguous.
        up_bias: [N] of gated FFNs; given if and only if `bias` and `up_weight` are.
        activation: 'none', 'silu', 'gelu_tanh' or 'relu2'.
        zero_skipped: Whether skipped channels hold zeros; otherwise they are unspecified memory.
        backend: 'torch', 'triton' or 'dense' (cuBLAS, computes everything).
        tile: Tile of the Triton kernel; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `x`, accumulated in float32.

    Raises:
        ShapeError: If tensors or options do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return torch.ops.wide.gemv_mn(  # type: ignore[no-any-return]
        x, weight, mask, up_weight, bias, up_bias, activation, zero_skipped, backend, tile or ()
    )


def gemv_k(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    backend: str,
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """Return h W^T for few rows, summed over executing groups; channels that no row executes are not read.

    Args:
        h: [M, K] with M in 1..4; skipped channels may hold anything; last stride 1.
        weight: [N, K], or its groups one after another, [N_G, N, G]; last stride 1.
        mask: True = execute, bool [M, N_G] with N_G * G = K.
        bias: [N], contiguous; added to every row.
        backend: 'torch', 'triton' or 'dense' (cuBLAS, computes everything).
        tile: Tile of the Triton kernel; None takes a default for the device.

    Returns:
        [M, N] in the dtype of `h`, accumulated in float32; the same bits in every run.

    Raises:
        ShapeError: If tensors do not fit.
        UnsupportedBackendError: If the backend cannot run here.
    """
    return torch.ops.wide.gemv_k(h, weight, mask, bias, backend, tile or ())  # type: ignore[no-any-return]


def _mn_triton(
    x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, *, tile: Sequence[int] | None = None, **options: Any
) -> torch.Tensor:
    from wide.kernels.gemv import _triton

    is_gated = options.get("up_weight") is not None
    chosen = GemvTile(*tile) if tile else default_mn_tile(device_facts(x.device), is_gated=is_gated)
    return _triton.gemv_mn(x, weight, mask, tile=chosen, **{**_MN_OPTIONS, **options})


def _k_triton(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tile: Sequence[int] | None = None,
) -> torch.Tensor:
    from wide.kernels.gemv import _triton

    is_long = h.shape[1] > _LONG_SUM
    chosen = GemvTile(*tile) if tile else default_k_tile(device_facts(h.device), is_long=is_long)
    return _triton.gemv_k(h, weight, mask, tile=chosen, bias=bias)


def _mn_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    *,
    up_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "none",
    zero_skipped: bool = False,
) -> torch.Tensor:
    values = activate(linear(x, weight, bias), activation)
    if up_weight is not None:
        values = values * linear(x, up_weight, up_bias)
    if zero_skipped:
        values = torch.where(mask.repeat_interleave(weight.shape[0] // mask.shape[1], 1), values, 0.0)
    return values


def _k_dense(
    h: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    executes = mask.repeat_interleave(h.shape[1] // mask.shape[1], 1)
    h = torch.where(executes, h, 0.0)
    if weight.dim() == 3:
        weight = weight.transpose(0, 1).flatten(1)
    return linear(h, weight, bias)


def _check(name: str, x: torch.Tensor, mask: torch.Tensor, grouped_width: int, backend: str) -> None:
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.stride(1) != 1:
        raise ShapeError(
            f"{name} takes 1 to {MAX_ROWS} rows with last stride 1, got {tuple(x.shape)} with strides {x.stride()}; "
            "more rows are faster through a dense product or the gather GEMMs"
        )
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] != x.shape[0] or mask.stride(1) != 1:
        raise ShapeError(f"{name} wants a bool mask [{x.shape[0]}, N_G], got {mask.dtype} {tuple(mask.shape)}")
    if mask.shape[1] < 1 or grouped_width % mask.shape[1]:
        raise ShapeError(f"{name}: {mask.shape[1]} groups do not divide a width of {grouped_width}")
    if backend in ("torch", "dense"):
        return
    if backend != "triton":
        raise UnsupportedBackendError(f"{name} has the backends 'torch', 'triton' and 'dense', got {backend!r}")
    reason = triton_obstacle(x.device)
    if reason is None and x.dtype == torch.float32 and not interprets_triton():
        reason = "the kernels take float16 and bfloat16, got torch.float32"
    if reason is not None:
        raise UnsupportedBackendError(f"{name}: {reason}; choose backend='torch'")


def _check_parts(name: str, x: torch.Tensor, parts: Mapping[str, tuple[torch.Tensor | None, tuple[int, ...]]]) -> None:
    for part, (tensor, shape) in parts.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device or tensor.stride(-1) != 1:
            raise ShapeError(
                f"{name}: {part} must be {x.dtype} {list(shape)} on {x.device} with last stride 1, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )


@implement(_LIBRARY, "gemv_mn")
def _mn_impl(
    x: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    up_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
    zero_skipped: bool,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    _check("gemv_mn", x, mask, weight.shape[0], backend)
    whole, column = (weight.shape[0], x.shape[1]), (weight.shape[0],)
    parts = {"weight": (weight, whole), "up_weight": (up_weight, whole), "bias": (bias, column)}
    _check_parts("gemv_mn", x, {**parts, "up_bias": (up_bias, column)})
    if (up_bias is not None) != (bias is not None and up_weight is not None):
        raise ShapeError("gemv_mn: up_bias goes with bias and up_weight; give zeros where the model has none")
    if activation not in ACTIVATIONS:
        raise ShapeError(f"gemv_mn: unknown activation {activation!r}; choose one of {list(ACTIVATIONS)}")
    options: dict[str, Any] = {
        "up_weight": up_weight,
        "bias": bias,
        "up_bias": up_bias,
        "activation": activation,
        "zero_skipped": zero_skipped,
    }
    if backend == "triton":
        options["tile"] = tuple(tile) or None
    return GEMV_MN.backends[backend].run(x, weight, mask, **options)  # type: ignore[no-any-return]


@implement(_LIBRARY, "gemv_k")
def _k_impl(
    h: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str,
    tile: Sequence[int],
) -> torch.Tensor:
    _check("gemv_k", h, mask, h.shape[-1], backend)
    num_groups, width = mask.shape[1], weight.shape[-2]
    grouped = (num_groups, width, h.shape[1] // num_groups)
    wanted = grouped if weight.dim() == 3 else (width, h.shape[1])
    _check_parts("gemv_k", h, {"weight": (weight, wanted), "bias": (bias, (width,))})
    options: dict[str, Any] = {"tile": tuple(tile) or None} if backend == "triton" else {}
    return GEMV_K.backends[backend].run(h, weight, mask, bias=bias, **options)  # type: ignore[no-any-return]


@torch.library.register_fake("wide::gemv_mn", lib=_LIBRARY)
def _mn_fake(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    del rest
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.register_fake("wide::gemv_k", lib=_LIBRARY)
def _k_fake(h: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    del rest
    return h.new_empty((h.shape[0], weight.shape[-2]))


def _triton_supports(device: torch.device, case: Case) -> str | None:
    del case
    return triton_obstacle(device)


def _build_mn(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    width, width_in = sizes["num_groups"] * sizes["group_size"], sizes["width_in"]
    options = dict(case.options)
    mask = random_mask(case, (sizes["num_rows"], sizes["num_groups"]), device)
    arguments = {
        "x": random_values(case, (sizes["num_rows"], width_in), device, salt=1),
        "weight": random_values(case, (width, width_in), device, salt=2) * width_in**-0.5,
        "mask": mask,
    }
    is_gated = options.pop("is_gated", False)
    if is_gated:
        arguments["up_weight"] = random_values(case, (width, width_in), device, salt=3) * width_in**-0.5
    if options.pop("has_bias", False):
        arguments["bias"] = random_values(case, (width,), device, salt=4)
        if is_gated:
            arguments["up_bias"] = random_values(case, (width,), device, salt=5)
    unused = ~mask.any(0).repeat_interleave(sizes["group_size"])
    arguments["weight"][unused] = float("nan")
    return {**arguments, **options}


def _build_k(case: Case, device: torch.device) -> dict[str, Any]:
    sizes = case.sizes
    group_size, num_groups, width = sizes["group_size"], sizes["num_groups"], sizes["width_out"]
    options = dict(case.options)
    mask = random_mask(case, (sizes["num_rows"], num_groups), device)
    h = random_values(case, (sizes["num_rows"], num_groups * group_size), device, salt=1)
    weight = random_values(case, (width, num_groups * group_size), device, salt=2) * (num_groups * group_size) ** -0.5
    h[~mask.repeat_interleave(group_size, 1)] = float("nan")
    if options.pop("is_grouped", False):
        weight = weight.view(width, num_groups, group_size).transpose(0, 1).contiguous()
    bias = random_values(case, (width,), device, salt=3) if options.pop("has_bias", False) else None
    return {"h": h, "weight": weight, "mask": mask, "bias": bias}


def _compare_mn(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    executes = arguments["mask"].repeat_interleave(got.shape[1] // arguments["mask"].shape[1], 1)
    if arguments.get("zero_skipped") and not torch.equal(got[~executes], torch.zeros_like(got[~executes])):
        return float("inf")
    return relative_error(got[executes], wanted[executes])


def _compare_k(arguments: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> float:
    del arguments
    return relative_error(got, wanted)


def _work(case: Case) -> Work:
    sizes = case.sizes
    channels = sizes["num_groups"] * sizes["group_size"]
    other = sizes.get("width_in", 0) or sizes["width_out"]
    union = 1.0 - (1.0 - case.active) ** sizes["num_rows"]
    weights = (2 if case.options.get("is_gated") else 1) * channels * other
    return Work(
        flop=int(2 * case.active * sizes["num_rows"] * weights),
        bytes_read=int(case.dtype.itemsize * union * weights),
        bytes_written=case.dtype.itemsize * sizes["num_rows"] * (channels if "width_in" in sizes else other),
    )


def _case(num_rows: int, groups: tuple[int, int], active: float, **more: Any) -> Case:
    sizes = {"num_rows": num_rows, "num_groups": groups[0], "group_size": groups[1]}
    sizes |= {name: more.pop(name) for name in ("width_in", "width_out") if name in more}
    return Case(sizes=sizes, dtype=more.pop("dtype", torch.float16), active=active, options=more)


_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}

GEMV_MN = Operator(
    name="gemv_mn",
    reference=gemv_mn_reference,
    backends={
        "torch": Backend(run=gemv_mn_reference, supports=anywhere),
        "triton": Backend(run=_mn_triton, supports=_triton_supports),
        "dense": Backend(run=_mn_dense, supports=anywhere),
    },
    cases=(
        _case(1, (1, 16), 1.0, width_in=64),
        _case(1, (5, 32), 0.5, width_in=100, has_bias=True),
        _case(2, (4, 24), 0.5, width_in=128, is_gated=True, activation="silu", zero_skipped=True),
        _case(3, (3, 16), 0.5, width_in=200, is_gated=True, activation="gelu_tanh", has_bias=True),
        _case(4, (6, 12), 0.3, width_in=64, activation="relu2", zero_skipped=True),
        _case(4, (3, 16), 0.0, width_in=64, zero_skipped=True),
        _case(1, (4, 7), 0.5, width_in=65, dtype=torch.float32),
    ),
    build=_build_mn,
    compare=_compare_mn,
    tolerance=_TOLERANCE,
    work=_work,
)
GEMV_K = Operator(
    name="gemv_k",
    reference=gemv_k_reference,
    backends={
        "torch": Backend(run=gemv_k_reference, supports=anywhere),
        "triton": Backend(run=_k_triton, supports=_triton_supports),
        "dense": Backend(run=_k_dense, supports=anywhere),
    },
    cases=(
        _case(1, (1, 64), 1.0, width_out=16),
        _case(1, (7, 32), 0.5, width_out=33, has_bias=True),
        _case(2, (5, 128), 0.5, width_out=20),
        _case(3, (6, 16), 0.5, width_out=24, is_grouped=True),
        _case(4, (3, 24), 0.3, width_out=9, is_grouped=True, has_bias=True),
        _case(4, (3, 16), 0.0, width_out=8),
        _case(1, (4, 6), 0.5, width_out=5, dtype=torch.float32),
    ),
    build=_build_k,
    compare=_compare_k,
    tolerance=_TOLERANCE,
    work=_work,
)
