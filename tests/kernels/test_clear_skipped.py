"""Zeros for skipped groups: agreement in all dtypes, what stays untouched, registration, graphs, refusals."""

import dataclasses

import pytest
import torch

from benchmarks.cases.clear_skipped import CLEAR_SKIPPED
from wide.errors import ShapeError, UnsupportedBackendError
from wide.kernels.clear_skipped.op import clear_skipped, cleared
from wide.kernels.tuning import Case

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = ("torch", "triton")
# Groups x channels of a group, none of them what a tile holds, and more than one.
SIZES = ((1, 7), (3, 1), (8, 96), (5, 520), (113, 24))


def _mask(rows: int, groups: int, active: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + groups)
    return (torch.rand(rows, groups, generator=generator) < active).to(DEVICE)


def _name(case: Case) -> str:
    return "-".join(map(str, (*case.sizes.values(), case.active)))


@pytest.mark.parametrize("case", CLEAR_SKIPPED.cases, ids=_name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_triton_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    case = dataclasses.replace(case, dtype=dtype)
    arguments = CLEAR_SKIPPED.build(case, DEVICE)
    got = CLEAR_SKIPPED.run("triton", **arguments)
    assert CLEAR_SKIPPED.compare(arguments, got, CLEAR_SKIPPED.reference(**arguments)) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 3, 17, 64, 127])
@pytest.mark.parametrize(("groups", "size"), SIZES)
@pytest.mark.parametrize("active", [0.0, 0.5, 1.0])
def test_only_skipped_channels_change(backend: str, rows: int, groups: int, size: int, active: float) -> None:
    # Views of larger tensors: what lies between their rows belongs to somebody else.
    room = torch.full((rows + 1, groups * size + 16), 7.0, device=DEVICE, dtype=torch.bfloat16)
    values = room[:rows, 8:-8]
    mask = _mask(rows, groups + 2, active)[:, 1:-1]
    values.unflatten(1, (groups, size))[~mask] = float("nan")
    clear_skipped(values, mask, backend=backend)
    wanted = torch.full_like(room, 7.0)
    wanted[:rows, 8:-8] = mask.repeat_interleave(size, 1) * 7.0
    assert torch.equal(room, wanted)


def test_executing_channels_keep_nan_and_infinity() -> None:
    values = torch.tensor([[float("nan"), float("inf"), -0.0, 5.0]], device=DEVICE)
    for backend in BACKENDS:
        got = values.clone()
        clear_skipped(got, torch.tensor([[True, False]], device=DEVICE), backend=backend)
        assert got[0, 0].isnan()
        assert got[0, 1].isinf()
        assert (got[0, 2:] == 0.0).all()


def test_the_reference_leaves_its_argument_and_what_runs_anywhere_changes_it() -> None:
    values, mask = torch.ones(5, 12, device=DEVICE), _mask(5, 3, 0.5)
    wanted = CLEAR_SKIPPED.reference(values=values, mask=mask)
    assert values.all()
    assert cleared(values, mask) is values
    assert torch.equal(values, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_and_one_compiled_graph(backend: str) -> None:
    values, mask = torch.randn(9, 24, device=DEVICE), _mask(9, 3, 0.5)
    torch.library.opcheck(torch.ops.wide.clear_skipped.default, (values.clone(), mask), {"backend": backend})

    def doubled(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        fresh = values * 2
        clear_skipped(fresh, mask, backend=backend)
        return fresh + 1

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(values, mask), doubled(values, mask))


@pytest.mark.skipif(not HAS_GPU, reason="CUDA graphs need a GPU")
def test_it_can_be_captured() -> None:
    values, mask = torch.ones(64, 512, device=DEVICE), _mask(64, 4, 0.5)
    clear_skipped(values.clone(), mask, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clear_skipped(values, mask, backend="triton")
    assert values.all()
    graph.replay()
    assert torch.equal(values.view(64, 4, 128)[..., 0] != 0, mask)


def test_wrong_inputs_are_named() -> None:
    values, mask = torch.zeros(4, 12, device=DEVICE), _mask(4, 3, 0.5)
    with pytest.raises(ShapeError, match="last stride 1"):
        clear_skipped(values.t(), mask, backend="torch")
    with pytest.raises(ShapeError, match="5 groups of one size do not make up 12 channels"):
        clear_skipped(values, _mask(4, 5, 0.5), backend="torch")
    with pytest.raises(ShapeError, match=r"mask must be bool \[4, 3\]"):
        clear_skipped(values, mask[:3], backend="torch")
    with pytest.raises(ShapeError, match="must be bool"):
        clear_skipped(values, mask.float(), backend="torch")
    with pytest.raises(UnsupportedBackendError, match="'torch', 'triton'"):
        clear_skipped(values, mask, backend="dense")
