"""Operator tables made from measurements: what carries over to which shape, and dense wherever nothing is known."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wide.errors import ConfigError
from wide.inference.choice import measured
from wide.inference.choice.layer_sizes import LayerSizes, operator_case
from wide.inference.choice.measured import is_measured, measured_table
from wide.inference.operators.table import DENSE, DENSE_TABLE, OPERATORS, OperatorTable
from wide.kernels.dispatch import Backends
from wide.kernels.tuning import Case, Choice, TuningTable, shape_key, shipped_path, tuning_key

CPU = torch.device("cpu")
LLAMA = LayerSizes(
    hidden_size=4096,
    query_width=4096,
    head_dim=128,
    num_kv_heads=8,
    attention_groups=8,
    ffn_width=14336,
    ffn_groups=112,
    is_gated=True,
)
SPARSE = Choice(backend="triton", tile=(128, 64, 4, 8, 1, 2), block_m=128)


def gemm_case(name: Any, sizes: LayerSizes, rows: int, active: float) -> Case:
    return operator_case(name, sizes, rows, active)[1]


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What backends lack, by name: nothing."""
    found: dict[str, str] = {}
    monkeypatch.setattr(Backends, "missing", lambda self, name, device, dtype: found.get(name))
    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "triton_obstacle", lambda device: None)


def _of(tuning: TuningTable, ask: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Return an answer by the measurements of a table instead of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "TuningTable", lambda: tuning)
        return ask(*given, **options)


def _table(tuning: TuningTable, executed: tuple[float, float] = (0.5, 0.5), **changes: object) -> OperatorTable:
    sizes = dataclasses.replace(LLAMA, **changes)
    return _of(tuning, measured_table, sizes, device=CPU, dtype=torch.bfloat16, executed=executed)


def _measured(tmp_path: Path) -> TuningTable:
    tuning = TuningTable(tmp_path / "tuning.json")
    gate_up, down = (gemm_case(name, LLAMA, 4096, 0.5) for name in ("gate_up", "down"))
    one = gemm_case("down", LLAMA, 1, 0.5)
    tuning.store({tuning_key("gemm_mn", CPU, gate_up): SPARSE})
    tuning.store({tuning_key("gemm_k", CPU, down): Choice(backend="dense")})
    tuning.store({tuning_key("gemv_k", CPU, one): Choice(backend="triton", tile=(4, 1024, 2))})
    return tuning


@pytest.mark.usefixtures("on_gpu")
def test_what_paid_for_some_rows_is_used_for_more_and_never_for_fewer(tmp_path: Path) -> None:
    table = _table(_measured(tmp_path))
    assert [table.how("gate_up", rows) for rows in (1, 5, 2048, 2049, 4096, 100000)] == ["dense"] * 3 + ["many"] * 3
    assert table.choice("gate_up", 8192) == SPARSE
    assert [table.how("down", rows) for rows in (1, 2, 4096)] == ["few", "dense", "dense"]
    assert table.how("query", 4096) == table.how("attention", 4096) == "dense"


@pytest.mark.usefixtures("on_gpu")
def test_rates_decide(tmp_path: Path) -> None:
    tuning = _measured(tmp_path)
    assert _table(tuning, (0.5, 0.3)).how("gate_up", 4096) == "many"
    for share in (0.7, 1.0):
        assert _table(tuning, (0.5, share)).how("gate_up", 4096) == "dense"
    known = dataclasses.replace(SPARSE, median_us=3.0, dense_us=5.0)
    tuning.store({tuning_key("gemm_mn", CPU, gemm_case("gate_up", LLAMA, 4096, 0.5)): known})
    assert [_table(tuning, (0.5, share)).how("gate_up", 4096) for share in (0.7, 0.8, 1.0)] == ["many", "many", "dense"]
    assert _table(tuning, (0.5, 0.5)).cache
    assert not _table(tuning, (1.0, 0.5)).cache
    with pytest.raises(ConfigError, match=r"\(0\.5, 0\.5\) skips half"):
        _table(tuning, (50.0, 0.5))


@pytest.mark.usefixtures("on_gpu")
def test_similar_models_share_measurements_and_other_groups_do_not(tmp_path: Path) -> None:
    tuning = _measured(tmp_path)
    assert _table(tuning, ffn_width=12288, ffn_groups=96).how("gate_up", 4096) == "many"
    assert _table(tuning, hidden_size=1024).how("gate_up", 4096) == "dense"
    assert _table(tuning, ffn_groups=224).how("gate_up", 4096) == "dense"


@pytest.mark.usefixtures("on_gpu")
def test_a_clear_win_carries_over_to_groups_twice_as_large_and_no_other(tmp_path: Path) -> None:
    tuning = _measured(tmp_path)
    key = tuning_key("gemm_mn", CPU, gemm_case("gate_up", LLAMA, 4096, 0.5))
    for median_us, how in ((7.0, "many"), (9.0, "dense")):
        tuning.store({key: dataclasses.replace(SPARSE, median_us=median_us, dense_us=10.0)})
        assert _table(tuning).how("gate_up", 4096) == "many"
        assert _table(tuning, ffn_groups=56).how("gate_up", 4096) == how
        assert _table(tuning, ffn_width=12288, ffn_groups=48).how("gate_up", 4096) == how
        for groups in (28, 32, 224):
            assert _table(tuning, ffn_groups=groups).how("gate_up", 4096) == "dense"


CLUSTER = Choice(backend="cuda", tile=(256, 256), block_m=256)


def _with_clusters(tmp_path: Path, **changes: Any) -> OperatorTable:
    """Return the table of a layer for which the kernel in CUDA C++ was measured as the fastest."""
    tuning, sizes = TuningTable(tmp_path / "tuning.json"), dataclasses.replace(LLAMA, **changes)
    for name in ("gate_up", "query"):
        tuning.store({tuning_key("gemm_mn", CPU, gemm_case(name, sizes, 4096, 0.5)): CLUSTER})
    return _table(tuning, **changes)


@pytest.mark.usefixtures("on_gpu")
def test_the_kernel_in_cuda_runs_where_it_was_measured_and_fits(tmp_path: Path) -> None:
    table = _with_clusters(tmp_path)
    assert table.choice("gate_up", 4096) == table.choice("query", 4096) == CLUSTER
    # Groups of 64 channels, of a gated product, and of 128 of one that is not.
    smaller = _with_clusters(tmp_path, ffn_groups=224, attention_groups=32)
    plain = _with_clusters(tmp_path, is_gated=False)
    triton = Choice(backend="triton")
    assert smaller.choice("gate_up", 4096) == smaller.choice("query", 4096) == plain.choice("gate_up", 4096) == triton
    assert plain.choice("query", 4096) == CLUSTER


@pytest.mark.usefixtures("on_gpu")
def test_the_storing_kernel_in_cuda_runs_where_one_sort_covers_all_groups(tmp_path: Path) -> None:
    stored = Choice(backend="cuda", tile=(128, 256), block_m=128, groups_per_block=8)
    for hidden, groups, wanted in (
        (4096, 8, stored),
        (4096, 16, DENSE),
        (4096, 64, DENSE),
        (4224, 8, Choice(backend="triton", groups_per_block=8)),
    ):
        sizes = {"hidden_size": hidden, "attention_groups": groups}
        tuning = TuningTable(tmp_path / f"{hidden}-{groups}.json")
        case = gemm_case("output", dataclasses.replace(LLAMA, **sizes), 4096, 0.5)
        tuning.store({tuning_key("gemm_k", CPU, case): stored})
        found = _table(tuning, **sizes).choice("output", 4096)
        assert dataclasses.replace(found, block_m=wanted.block_m) == wanted


@pytest.mark.usefixtures("on_gpu")
def test_rows_in_one_order_are_taken_where_their_kernel_runs_and_dense_products_elsewhere(
    tmp_path: Path, lacking: dict[str, str]
) -> None:
    rows = Choice(backend="cuda", tile=(128, 256), block_m=128, groups_per_block=112)

    def chosen(**sizes: int) -> Choice:
        tuning = TuningTable(tmp_path / f"{len(list(tmp_path.iterdir()))}.json")
        case = gemm_case("down", dataclasses.replace(LLAMA, **sizes), 4096, 0.5)
        tuning.store({tuning_key("gemm_k", CPU, case): rows})
        return _table(tuning, **sizes).choice("down", 4096)

    assert chosen() == rows
    # Measured over many groups, asked for few.
    assert chosen(ffn_groups=8).backend == "dense"
    # Groups of 96 channels, and a width that tiles of 256 columns do not divide.
    assert chosen(ffn_width=96 * 112).backend == chosen(hidden_size=4224).backend == "dense"
    lacking["cuda"] = "no compiler"
    measured._warn_of.cache_clear()
    with pytest.warns(UserWarning, match="no compiler; the dense product runs instead"):
        assert chosen().backend == "dense"


@pytest.mark.usefixtures("on_gpu")
def test_a_package_that_is_gone_since_is_named(tmp_path: Path, lacking: dict[str, str]) -> None:
    tuning = TuningTable(tmp_path / "table.json")
    few, many = Choice(backend="cute"), Choice(backend="tilelang", block_m=128)
    tuning.store({tuning_key("gemv_k", CPU, gemm_case("down", LLAMA, 1, 0.5)): few})
    tuning.store({tuning_key("gemm_mn", CPU, gemm_case("gate_up", LLAMA, 4096, 0.5)): many})
    found = _table(tuning)
    assert (found.choice("down", 1), found.choice("gate_up", 4096)) == (few, many)
    lacking |= {name: f"{name} is missing" for name in ("cute", "tilelang")}
    measured._warn_of.cache_clear()
    with pytest.warns(UserWarning, match="is missing; the Triton kernel runs instead"):
        found = _table(tuning)
    assert found.choice("down", 1).backend == found.choice("gate_up", 4096).backend == "triton"


@pytest.mark.usefixtures("on_gpu")
def test_steps_of_int8_weights_have_measurements_of_their_own_and_prompts_those_of_all(tmp_path: Path) -> None:
    tuning, eight = _measured(tmp_path), dataclasses.replace(LLAMA, weights="int8")
    assert _of(tuning, is_measured, CPU, [LLAMA])
    assert not _of(tuning, is_measured, CPU, [eight])
    for name in ("gate_up", "down", "query", "output"):
        operator, case = operator_case(name, eight, 1, 0.5)
        assert shape_key(operator, case).endswith(" | weights int8")
        assert operator_case(name, eight, 4096, 0.5) == operator_case(name, LLAMA, 4096, 0.5)
    found = Choice(backend="triton", tile=(2, 4096, 4))
    tuning.store({tuning_key("gemv_k", CPU, operator_case("down", eight, 1, 0.5)[1]): found})
    assert _of(tuning, is_measured, CPU, [eight])
    tables = [_of(tuning, measured_table, sizes, device=CPU, dtype=torch.bfloat16) for sizes in (LLAMA, eight)]
    assert [table.choice("down", 1) == found for table in tables] == [False, True]
    assert tables[0].choice("gate_up", 4096) == tables[1].choice("gate_up", 4096) != DENSE


@pytest.mark.usefixtures("on_gpu")
def test_prompts_of_int8_rows_take_what_halves_take_until_they_are_measured(tmp_path: Path) -> None:
    tuning, eight = _measured(tmp_path), dataclasses.replace(LLAMA, weights="w8a8")
    for name in ("query", "output", "gate_up", "down"):
        operator, case = operator_case(name, eight, 4096, 0.5)
        assert (" | rows int8" in shape_key(operator, case)) == (name != "query")
        assert operator_case(name, eight, 1, 0.5)[1].options["weights"] == "int8"
    assert not _of(tuning, is_measured, CPU, [eight])
    guessed = _of(tuning, measured_table, eight, device=CPU, dtype=torch.bfloat16)
    assert guessed.choice("gate_up", 4096) == _table(tuning).choice("gate_up", 4096) != DENSE
    tuning.store({tuning_key("gemm_mn", CPU, operator_case("gate_up", eight, 1024, 0.5)[1]): DENSE})
    found = _of(tuning, measured_table, eight, device=CPU, dtype=torch.bfloat16)
    assert found.choice("gate_up", 4096) == DENSE
    assert found.choice("query", 4096) == guessed.choice("query", 4096)
    table = found.for_int8_rows()
    assert [table.choice("output", rows) for rows in (5, 16)] == [DENSE] * 2
    assert [table.choice(name, rows) for name in OPERATORS for rows in (1, 4, 17, 4096)] == [
        found.choice(name, rows) for name in OPERATORS for rows in (1, 4, 17, 4096)
    ]


@pytest.mark.usefixtures("on_gpu")
def test_a_kernel_of_steps_is_chosen_only_for_sizes_that_it_takes(tmp_path: Path) -> None:
    tuning, eight = TuningTable(tmp_path / "tuning.json"), dataclasses.replace(LLAMA, weights="int8")
    found = Choice(backend="cuda", median_us=1.0, dense_us=9.0)
    tuning.store({tuning_key("gemv_k", CPU, gemm_case("down", eight, 1, 0.5)): found})
    for width, backend in ((4096, "cuda"), (4104, "triton")):
        sizes = dataclasses.replace(eight, hidden_size=width)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            table = _of(tuning, measured_table, sizes, device=CPU, dtype=torch.bfloat16)
        assert table.choice("down", 1).backend == backend
        assert ["multiple of 64 and outputs of 16" in str(each.message) for each in said] == [True] * (width == 4104)


@pytest.mark.usefixtures("on_gpu")
def test_masks_that_are_alike_enough_take_rows_in_one_order(tmp_path: Path, lacking: dict[str, str]) -> None:
    tuning = _measured(tmp_path)
    rows = Choice(
        backend="cuda", tile=(128, 256), block_m=128, groups_per_block=112, median_us=102.0, dense_us=100.0,
        left_to_tiles=0.97,
    )  # fmt: skip
    tuning.store({tuning_key("gemm_k_rows", CPU, gemm_case("down", LLAMA, 4096, 0.5)): rows})

    def at(left: float | None, num_rows: int = 4096, *, active: float = 0.5, **sizes: int) -> str:
        layer = dataclasses.replace(LLAMA, **sizes)
        shares: dict[str, Any] = {"executed": (0.5, active), "left": left}
        found = _of(tuning, measured_table, layer, device=CPU, dtype=torch.bfloat16, **shares)
        return found.choice("down", num_rows).backend

    # Of the down product alone; other products along K have their own measurements.
    o_rows = gemm_case("output", dataclasses.replace(LLAMA, attention_groups=32), 4096, 0.5)
    tuning.store({tuning_key("gemm_k_rows", CPU, o_rows): dataclasses.replace(rows, groups_per_block=32)})
    split = dataclasses.replace(LLAMA, attention_groups=32)
    both = _of(tuning, measured_table, split, device=CPU, dtype=torch.bfloat16, left=0.5)
    assert (both.choice("down", 4096).backend, both.choice("output", 4096).backend) == ("cuda", "dense")
    assert at(None) == at(1.0) == at(0.91) == "dense"
    assert at(0.89) == at(0.0) == at(0.89, 16384) == "cuda"
    # A choice that won under the measured masks must pay under these, too.
    tuning.store({tuning_key("gemm_k", CPU, gemm_case("down", LLAMA, 4096, 0.5)): rows})
    assert at(None) == at(0.89) == "cuda"
    assert at(0.91) == "dense"
    # However many pairs execute: what is left to tiles decides.
    assert at(0.6, active=0.59) == at(0.6, active=0.1) == at(0.6, active=1.0) == "cuda"
    # Fewer rows than measured, groups of another size, and few groups, which have a sort of their own.
    assert at(0.6, 2048) == at(0.6, ffn_groups=56) == at(0.6, ffn_groups=8) == "dense"
    lacking["cuda"] = "no compiler"
    measured._warn_of.cache_clear()
    with pytest.warns(UserWarning, match="no compiler; the dense product runs instead"):
        assert at(0.6) == "dense"


@pytest.mark.usefixtures("on_gpu")
def test_widths_of_no_specialised_kernel_take_the_general_one_with_its_own_tiles(tmp_path: Path) -> None:
    # No whole number of steps of 64; the general kernel's stages of 256 rows do not fit into shared memory.
    assert _with_clusters(tmp_path, hidden_size=992).choice("gate_up", 4096) == Choice(backend="triton")
    # Groups of 160 channels: no multiple of 64, which all of them want.
    sizes = {"ffn_width": 160 * 90, "ffn_groups": 90}
    assert _with_clusters(tmp_path, **sizes).choice("gate_up", 4096) == Choice(backend="triton")


@pytest.mark.usefixtures("on_gpu")
def test_without_its_compiler_the_kernel_in_cuda_is_replaced_with_a_warning_once(
    tmp_path: Path, lacking: dict[str, str]
) -> None:
    lacking["cuda"] = "the package cuda-bindings is missing"
    measured._warn_of.cache_clear()
    with pytest.warns(
        UserWarning, match="cuda-bindings is missing; the Triton kernel runs instead of what was measured"
    ) as said:
        table = _with_clusters(tmp_path)
    assert len(said) == 1
    assert table.choice("gate_up", 4096) == table.choice("query", 4096) == Choice(backend="triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _with_clusters(tmp_path)
        measured._warn_of.cache_clear()
        # It would not run anyway.
        _with_clusters(tmp_path, ffn_groups=224, attention_groups=32)


def test_devices_without_triton_run_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "triton_obstacle", lambda device: "no")
    table = _table(_measured(tmp_path))
    assert table == DENSE_TABLE
    assert all(table.how(name, rows) == "dense" for name in OPERATORS for rows in (1, 4, 5, 16384))


@pytest.mark.usefixtures("on_gpu")
def test_the_shipped_measurements_serve_llama(tmp_path: Path) -> None:
    tuning = TuningTable(shipped_path("NVIDIA H200"))
    keyed = TuningTable(tmp_path / "tuning.json")
    keyed.store({f"{tuning_key('x', CPU, _any_case()).split(' | x')[0]} | {k}": c for k, c in tuning._choices.items()})
    table = _table(keyed)
    assert [table.how(name, 16384) for name in ("query", "gate_up", "attention")] == ["many"] * 3
    assert [table.how(name, 1) for name in ("query", "gate_up", "output", "down")] == ["few"] * 4
    few = ("query", "gate_up", "output", "down")
    assert [table.how(name, 2) for name in few] == ["few", "few", "dense", "dense"]
    assert all(table.how(name, rows) == "dense" for name in few for rows in (3, 4))
    assert table.how("output", 4096) == "many"
    assert all(table.how("gate_up", rows) == "many" for rows in (1024, 2048, 4096, 16384))
    coarse = _table(keyed, ffn_groups=56)
    assert [coarse.how(name, 1) for name in few] == ["few"] * 4
    assert [coarse.how(name, 2) for name in few] == ["few", "few", "dense", "few"]
    assert coarse.how("gate_up", 4096) == "many"
    assert coarse.how("down", 4096) == "dense"
    everything = _table(keyed, (1.0, 1.0))
    assert all(everything.how(name, rows) == "dense" for name in OPERATORS for rows in (1, 4096, 16384))


@pytest.mark.usefixtures("on_gpu")
def test_attention_over_a_cache_skips_only_where_that_was_measured(tmp_path: Path) -> None:
    tuning = _measured(tmp_path)
    assert all(_table(tuning, attention_groups=groups).cache for groups in (1, 2, 4, 8))
    assert not any(_table(tuning, attention_groups=groups).cache for groups in (16, 32))
    assert not _table(tuning, (0.96, 0.5)).cache
    assert not _table(TuningTable(tmp_path / "none.json")).cache
    assert tuning.knows(CPU)
    assert not TuningTable(tmp_path / "none.json").knows(CPU)


def _any_case() -> Case:
    return gemm_case("down", LLAMA, 1, 0.5)


def test_tables_without_measurements_skip_from_fixed_numbers_of_rows_on() -> None:
    table = OperatorTable.fixed()
    assert [table.how("down", rows) for rows in (1, 4, 5, 9999)] == ["few", "few", "dense", "dense"]
    for name in ("query", "output", "gate_up"):
        assert [table.how(name, rows) for rows in (1, 4, 5, 511, 512)] == ["few", "few", "dense", "dense", "many"]
    assert [table.how("attention", rows) for rows in (1, 255, 256)] == ["dense", "dense", "many"]
    with pytest.raises(ConfigError, match="names"):
        OperatorTable(rules=(("gate", ()),))
