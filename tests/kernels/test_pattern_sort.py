"""The pattern sort in Triton's interpreter, with one and with several steps a program."""

import pytest
import torch

from wide.kernels.device import interprets_triton
from wide.kernels.reorder import reorder_patterns

pytestmark = pytest.mark.skipif(not interprets_triton(), reason="the interpreter stands in for a GPU")


@pytest.mark.parametrize("bytes_read", [0, 2**25])
@pytest.mark.parametrize("keeps_empty", [False, True])
def test_sort_agrees_whatever_a_program_sorts(
    bytes_read: int, keeps_empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wide.kernels.reorder.patterns import _triton

    monkeypatch.setattr(_triton, "_MAX_BYTES_READ", bytes_read)
    mask = torch.rand(1100, 11, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[600:900] = False
    options = {"groups_per_block": 8, "block_m": 128, "keeps_empty": keeps_empty}
    got = reorder_patterns(mask, **options, backend="triton")
    wanted = reorder_patterns(mask, **options, backend="torch")
    assert torch.equal(got.counts, wanted.counts)
    for block, count in enumerate(wanted.counts.tolist()):
        assert torch.equal(got.index[block, :count], wanted.index[block, :count])
        assert torch.equal(got.patterns[block, :count], wanted.patterns[block, :count])
