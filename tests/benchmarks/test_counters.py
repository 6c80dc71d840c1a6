"""The tool that reads the profiler's counters: its table, a profiler that is stopped, and none at all."""

import datetime
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[2] / "benchmarks" / "counters.py"
TIME, TENSOR, WRITTEN = (
    "gpu__time_duration.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_write.sum",
)
RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def _pushed(name):
    return f'1799  ""<default domain>:{name}:none:none:none:none:none:none"" '


TABLE = f"""==PROF== Connected to process 7
==ERROR== An error occurred while trying to profile.
"ID","Kernel Name","Grid Size","{RANGE}","{TIME}","{TENSOR}","launch__waves","{WRITTEN}"
"","","","","ns","%","","byte"
"0","_gemm_mn_kernel","(132, 1, 1)","{_pushed("prefill 4096 routed")}","735,520","79.63","1","117,632,512"
"1","nvjet_tst","(132, 1, 1)","{_pushed("prefill 4096 dense")}","900","","1","n/a"
"2","void at::vectorized_gather_kernel<16, long>(char *)","(4096, 2, 1)","{_pushed("")}","900","0","1","0"
"3","_attention_prefill","(1024, 1, 1)","{_pushed("prefill 4096 routed")}","134,"""


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("counters", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _install(folder, code, table=TABLE):
    """Put a profiler into a folder that writes the table where it is told to, and then does what `code` says."""
    program = folder / "ncu"
    program.write_text(
        # Without site-packages it is there at once, before any limit.
        f"#!{sys.executable} -IS\nimport sys, time\nfrom pathlib import Path\n"
        f"Path(sys.argv[sys.argv.index('--log-file') + 1]).write_text({table!r})\n{code}\n"
    )
    program.chmod(0o755)


def test_a_row_for_each_kernel_of_interest_with_the_counters_that_are_kept(tool):
    product, dense = tool.read_rows(TABLE)
    assert product == {
        "range": "prefill 4096 routed",
        "kernel": "_gemm_mn_kernel",
        "grid": "(132, 1, 1)",
        "time_us": 735.52,
        "tensor_pct": 79.63,
        "dram_written_mb": 117.63,
    }
    assert (dense["range"], dense["time_us"]) == ("prefill 4096 dense", 0.9)
    assert not {"tensor_pct", "dram_written_mb"} & dense.keys()


def test_nothing_profiled_is_an_empty_table(tool):
    assert list(tool.read_rows("==ERROR== no permission\n")) == []


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        ("_route", True),
        ("gemm_mn", True),
        ("gemm_k_rows", True),
        ("rows_order", True),
        ("nvjet_sm90_tst_256x8_64x6_2x1_v_bz_TNT", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", True),
        ("void gemv2T_kernel_val<int, int>(float)", True),
        ("void at::index_elementwise_kernel<128, 4>(long)", False),
    ],
)
def test_a_search_and_a_whole_match_choose_the_same_kernels(tool, kernel, wanted):
    assert bool(re.search(tool.KERNELS, kernel)) == bool(re.fullmatch(tool.KERNELS, kernel)) == wanted


def test_whole_sections_are_read_only_where_asked_for(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool.shutil, "which", lambda *_, **__: "ncu")
    cheap, costly = (tool.ncu_command(tmp_path, ["true"], tables=tables) for tables in (False, True))
    assert cheap[cheap.index("--metrics") + 1].split(",") == list(tool.KEPT)
    assert "--section" not in cheap
    assert "MemoryWorkloadAnalysis_Tables" in costly


@pytest.mark.parametrize(("code", "options"), [("sys.exit(3)", []), ("time.sleep(60)", ["--limit", "2"])])
def test_kernels_until_a_bad_end_are_written(tool, monkeypatch, tmp_path, capsys, code, options):
    _install(tmp_path, code)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    assert tool.main(["--out", str(tmp_path / "out"), *options]) != 0
    report = json.loads((tmp_path / "out" / "counters.json").read_text())
    assert not report["complete"]
    assert [row["kernel"] for row in report["records"]] == ["_gemm_mn_kernel", "nvjet_tst"]
    said = capsys.readouterr()
    assert "2 kernels until then" in said.err
    assert "prefill 4096 routed" in said.out


NAIVE = f"""==PROF== Connected to process 7
"ID","Kernel Name","Grid Size","{RANGE}","{TIME}","lts__t_sectors.sum","dram__bytes_read.sum","{WRITTEN}"
"","","","","ns","sector","byte","byte"
"0","void at::index_kernel<long>(char *)","(4, 2, 1)","{_pushed("N 512 gather-scatter")}","1,000","1,000","64","32"
"1","nvjet_tst","(4, 1, 1)","{_pushed("N 512 gather-scatter")}","500","10","6","2"
"2","_gemm_mn_kernel","(4, 1, 1)","{_pushed("N 512 fused")}","500","10","n/a","2"
"3","nvjet_tst","(4, 1, 1)","{_pushed("K 512 dense")}","500","10","6","2"
"""


def test_what_a_pruned_product_moves_is_the_sum_of_its_kernels(tool):
    gathered, dense = tool.sum_ranges(tool.read_rows(NAIVE, tool.MOVED, tool.ANY_KERNEL))
    assert gathered == {
        **{"axis": "N", "size": 512, "candidate": "gather-scatter", "kernels": 2, "time_us": 1.5},
        **{"l2_bytes": 32 * 1010, "dram_read_bytes": 70, "dram_written_bytes": 34},
    }
    # The fused one has a gap in its counters.
    assert (dense["axis"], dense["candidate"]) == ("K", "dense")


@pytest.mark.parametrize(("code", "products"), [("sys.exit(0)", 2), ("sys.exit(3)", 1)])
def test_moved_bytes_are_written_but_for_the_product_that_was_cut_off(tool, monkeypatch, tmp_path, code, products):
    _install(tmp_path, code, NAIVE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    tool.main(["--out", str(tmp_path / "out"), "--naive", "512"])
    report = json.loads((tmp_path / "out" / "naive-bytes.json").read_text())
    assert (len(report["records"]), report["complete"]) == (products, products == 2)
    assert report["command"] == f"python -m benchmarks.counters --out {tmp_path / 'out'} --naive 512"


def test_a_report_says_what_ran_where_and_when(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, table, options in (("counters", TABLE, []), ("naive-bytes", NAIVE, ["--naive", "512"])):
        _install(tmp_path, "sys.exit(0)", table)
        tool.main(["--out", str(tmp_path), *options])
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert (report["device"], report["torch"]) == ("NVIDIA H200", torch.__version__)
        assert datetime.date.fromisoformat(report["date"])
    assert (report["group_size"], report["active"], report["backend"]) == (128, 0.5, "triton")


def test_the_launched_products_are_those_that_the_report_says(tool, monkeypatch):
    def made(axis, size, **facts):
        asked.append((axis, size, facts["group_size"], facts["active"]))
        raise InterruptedError

    asked = []
    monkeypatch.setattr("benchmarks.naive_products.make_problem", made)
    with pytest.raises(InterruptedError):
        tool.launch_naive([256])
    assert asked == [("M", 256, 128, 0.5)]


@pytest.mark.parametrize(("code", "cut_off"), [("sys.exit(0)", []), ("sys.exit(3)", ["K 512 dense"])])
def test_ways_that_were_asked_for_and_have_no_record_are_named(tool, monkeypatch, tmp_path, capsys, code, cut_off):
    _install(tmp_path, code, NAIVE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    tool.main(["--out", str(tmp_path / "out"), "--naive", "512,1024"])
    lacking = json.loads((tmp_path / "out" / "naive-bytes.json").read_text())["left_out"]
    whole_tokens = [f"M 512 {way}" for way in ("dense", "gather-scatter", "fused")]
    small = [*whole_tokens, "N 512 dense", "N 512 grouped product", "N 512 fused", *cut_off]
    small += [f"K 512 {way}" for way in ("gather-scatter", "grouped product", "fused")]
    # Of a size that no kernel is known of, all eleven.
    assert (lacking[: len(small)], len(lacking)) == (small, len(small) + 11)
    assert all(way.split()[1] == "1024" for way in lacking[len(small) :])
    assert f"without a record: {lacking[0]}, {lacking[1]}, " in capsys.readouterr().out


def test_nothing_is_left_out_where_each_way_has_a_record(tool):
    names = ("dense", "gather-scatter", "grouped product", "fused")
    ways = [(axis, name) for axis in "MNK" for name in names if (axis, name) != ("M", "grouped product")]
    records = [{"axis": axis, "size": 512, "candidate": name} for axis, name in ways]
    assert tool.left_out([512, 512], records) == []


def test_a_table_that_is_there_is_read_without_a_profiler(tool, tmp_path):
    (tmp_path / "old.csv").write_text(TABLE)
    assert tool.main(["--out", str(tmp_path), "--csv", str(tmp_path / "old.csv")]) == 0
    report = json.loads((tmp_path / "counters.json").read_text())
    assert (len(report["records"]), report["complete"]) == (2, False)
    # Nothing says where it was measured, and when.
    assert not {"device", "torch", "date"} & report.keys()


def test_a_table_of_pruned_products_is_read_without_a_profiler(tool, tmp_path):
    (tmp_path / "old.csv").write_text(NAIVE)
    assert tool.main(["--out", str(tmp_path), "--csv", str(tmp_path / "old.csv"), "--naive", "512"]) == 0
    report = json.loads((tmp_path / "naive-bytes.json").read_text())
    assert (len(report["records"]), len(report["left_out"]), report["complete"]) == (2, 9, True)
    assert "device" not in report


def test_without_a_profiler_the_way_out_is_named(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="install Nsight Compute"):
        tool.ncu_command(tmp_path, ["true"])
