"""The Hopper kernel of prefill attention: its machine code, its refusals, and when the general kernel steps in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wide.errors import UnsupportedBackendError
from wide.inference.operator_table import OperatorTable
from wide.inference.prompt_attention import attend_prompt
from wide.kernels.attention_prefill import attention_prefill
from wide.kernels.reorder import reorder_sequences
from wide.kernels.tuning import Choice

SHARED = 232448


def test_kernel_compiles_without_spills() -> None:
    program = Path(__file__).with_name("compile_prefill_hopper.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    results = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(results) == 6
    for result in results:
        assert result["spills"] == 0, result
        assert result["stack"] == 0, result
        assert result["shared"] <= SHARED, result
        assert result["code"]["HGMMA"], result
        assert result["code"]["UTMALDG"], result
        # Memory of barriers that nobody waits for may be given to others while it is written.
        assert result["barriers"], result
        assert result["handed"], result
        assert not set(result["barriers"]) & set(result["handed"]), result


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
    table = OperatorTable(backend="torch").with_rules("attention", ((1, measured),))
    got = attend_prompt(q, k, v, order, table, length=33, zero_skipped=True, **options)
    wanted = attention_prefill(q, k, v, order, zero_skipped=True, backend="torch", **options)
    torch.testing.assert_close(got, wanted)
    with pytest.raises(UnsupportedBackendError):
        attend_prompt(q, k, v, order, table, length=33)
