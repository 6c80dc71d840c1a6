"""The tool that reads the profiler's counters: its table, and what it says without a profiler."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "counters.py"
TIME, SM, RED = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors_op_red.sum",
)
TABLE = f"""==PROF== Connected to process 7
"ID","Kernel Name","Grid Size","NVTX Push/Pop Range","{TIME}","{SM}","launch__waves","{RED}"
"","","","","us","%","",""
"0","_gemm_mn_kernel","(132, 1, 1)","prefill 4096 routed","1,234.5","81.2","1","0"
"1","nvjet_tst","(132, 1, 1)","prefill 4096 dense","900","","1","n/a"
"""


def _tool():
    spec = importlib.util.spec_from_file_location("counters", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_for_each_kernel_with_the_counters_that_are_kept():
    rows = list(_tool().read_rows(TABLE))
    assert [row["kernel"] for row in rows] == ["_gemm_mn_kernel", "nvjet_tst"]
    assert rows[0]["range"] == "prefill 4096 routed"
    assert rows[0]["counters"] == {TIME: 1234.5, SM: 81.2, RED: 0.0}
    assert rows[1]["counters"] == {TIME: 900.0, RED: "n/a"}


def test_nothing_profiled_is_an_empty_table():
    assert list(_tool().read_rows("==ERROR== no permission\n")) == []


def test_without_a_profiler_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = _tool()
    monkeypatch.setattr(tool.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="install Nsight Compute"):
        tool.ncu_command(tmp_path, ["true"])
