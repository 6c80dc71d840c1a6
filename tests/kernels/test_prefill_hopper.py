"""The Hopper kernel of prefill attention: its refusals, and when the general kernel steps in."""

import pytest
import torch

from wide.errors import UnsupportedBackendError
from wide.inference.operator_table import OperatorTable
from wide.inference.prompt_attention import attend_prompt
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.reorder import reorder_sequences
from wide.kernels.tuning import Choice


def _arguments(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    q = torch.randn(2, length, 4, 64, generator=generator)
    k, v = torch.randn(2, 2, length, 2, 64, generator=generator).unbind(0)
    return q, k, v, torch.rand(2, length, 2, generator=generator) < 0.5


def test_other_devices_are_refused() -> None:
    q, k, v, mask = _arguments(20)
    with pytest.raises(UnsupportedBackendError, match=r"Hopper GPU \(sm_90\), not cpu"):
        attention_prefill(q, k, v, reorder_sequences(mask, backend="torch"), backend="gluon")


@pytest.mark.parametrize("options", [{"window": 7}, {"soft_cap": 3.0}, {"starts": torch.tensor([0, 5]).int()}])
def test_general_kernel_runs_what_the_hopper_kernel_does_not_take(options: dict[str, object]) -> None:
    q, k, v, mask = _arguments(33)
    order = reorder_sequences(mask, backend="torch")
    measured = Choice(backend="gluon", tile=(128, 2, 0))
    table = OperatorTable(backend="torch", rules=(("attention", ((1, measured),)),))
    got = attend_prompt(q, k, v, order, table, length=33, zero_skipped=True, **options)
    wanted = attention_prefill(q, k, v, order, zero_skipped=True, backend="torch", **options)
    torch.testing.assert_close(got, wanted)
    with pytest.raises(UnsupportedBackendError):
        attend_prompt(q, k, v, order, table, length=33)
