"""Measured beside accounted traffic of pruned products: what is joined, what is drawn, what is said to lack."""

import csv
import io
import json

import pytest
import torch
from test_legible import covered
from test_partial_records import GONE, WRONG, draw, with_wrong

from benchmarks.naive_products import make_problem
from wide.cli.main import main
from wide.errors import DataError
from wide.report.bench_files import bench_file
from wide.report.drawing import draw_svg
from wide.report.evidence_page import write_folder
from wide.report.naive_figures import NAIVE_FIGURES, traffic_table
from wide.report.profiles import Profile, read_profile

(FIGURE,) = NAIVE_FIGURES
WAYS = ("dense", "gather-scatter", "grouped product", "fused")
MIB = 2**20


def product(axis, size, candidate, **changes):
    """Return a record of the bench whose accounted traffic is 10 MiB at 512."""
    facts = {"axis": axis, "size": size, "group_size": size if axis == "M" else 128, "active": 0.5}
    facts |= {"candidate": candidate, "median_us": 5.0, "active_tflops": 10.0, "peak_memory_bytes": MIB}
    facts |= {"accounted_traffic_bytes": 10.0 * MIB * (size / 512) ** 2, "accounted_storage_bytes": 0.0}
    return facts | changes


def count(axis, size, candidate, **changes):
    """Return what the profiler counted of it: 15 + 5 MiB, and 60 MiB of the second-level cache."""
    facts = {"axis": axis, "size": size, "candidate": candidate, "kernels": 2, "time_us": 9.5}
    facts |= {"l2_bytes": 60 * MIB, "dram_read_bytes": 15 * MIB, "dram_written_bytes": 5 * MIB}
    return facts | changes


PRODUCTS = [product(axis, size, way) for axis in "MNK" for size in (512, 1024) for way in WAYS]
COUNTS = [count(axis, 512, way) for axis in "MNK" for way in WAYS]


def profile(products=PRODUCTS, counts=COUNTS, **facts):
    """Return what a folder with both files, or with counts=None the bench's alone, holds."""
    facts = {"device": "GPU", **facts}
    files = [bench_file("naive.json", {"device": "GPU", "records": products}, "folder/naive.json")]
    if counts is not None:
        files.append(bench_file("naive-bytes.json", {"records": counts, **facts}, "folder/naive-bytes.json"))
    return Profile(files)


def lines(source):
    return list(csv.DictReader(io.StringIO(FIGURE.sheet(source).to_csv())))


def drawn(source):
    """Return the axes of the figure, the words of its legend, and its sentence."""
    pytest.importorskip("matplotlib")
    from wide.report.drawing import _new_figure, _style

    with _style():
        figure = _new_figure(FIGURE.size_of(source))
        words = FIGURE.draw(figure, source)
    return figure.axes, [text.get_text() for text in figure.legends[0].get_texts()], words


def test_measured_traffic_is_drawn_over_the_accounted_one():
    axes, legend, words = drawn(profile())
    assert [axes[place].get_ylabel() for place in (6, 9)] == ["accounted traffic, MiB", "measured / accounted\ntraffic"]
    assert len(axes) == 12
    for panel in axes[9:]:
        # The line of equality, and each way in the colour and with the marker of its line of accounted traffic.
        equal, *ways = (line for line in panel.get_lines()[::-1] if len(line.get_xdata()))
        assert list(equal.get_ydata()) == [1, 1]
        for line in ways:
            assert (list(line.get_xdata()), list(line.get_ydata())) == ([0], [2.0])
            assert (line.get_color(), line.get_marker()) in [
                (e.get_color(), e.get_marker()) for e in axes[6].get_lines()
            ]
    assert legend == [*WAYS, "accounted, with the result"]
    assert FIGURE.size_of(profile()) == (9.0, pytest.approx(9.6))
    assert "over the accounted ones at 512: M, dense: 2.00x; " in words
    assert words.endswith("Not measured: any at 1024.")


def test_without_counters_the_figure_is_as_it_was():
    axes, legend, words = drawn(profile(counts=None))
    assert len(axes) == 9
    assert legend == [*WAYS, "accounted, with the result"]
    assert FIGURE.size_of(profile(counts=None)) == (9.0, pytest.approx(7.2))
    assert words.startswith("Dotted: the memory")
    assert "measured" not in words.lower()
    assert {line["measured_traffic_bytes"] for line in lines(profile(counts=None))} == {""}
    assert {row[6:] for row in traffic_table(profile(counts=None)).rows} == {tuple("-----")}


def test_measured_traffic_is_in_the_values_and_in_the_table():
    line, other = (next(each for each in lines(profile()) if each["size"] == size) for size in ("512", "1024"))
    names = ("read_bytes", "written_bytes", "traffic_bytes", "over_accounted", "l2_bytes")
    values = [line[f"measured_{name}"] for name in names]
    assert values == [str(15 * MIB), str(5 * MIB), str(20 * MIB), "2.0", str(60 * MIB)]
    assert {other[f"measured_{name}"] for name in names} == {""}
    rows = {row[:3]: row[3:] for row in traffic_table(profile()).rows}
    assert rows["dense", "N", "512"] == ("10.0", "1.00", "0.0", "15.0", "5.0", "20.0", "2.00", "60.0")
    assert rows["dense", "N", "1024"] == ("40.0", "1.00", "0.0", *"-----")


@pytest.mark.parametrize(
    "changes",
    [{"group_size": 64}, {"active": 0.3}, {"backend": "gluon"}, {"group_size": None}, {"active": None}],
    ids=str,
)
def test_counters_of_another_problem_or_backend_are_not_joined(changes):
    found = lines(profile([product("N", 512, "fused", **changes), product("N", 512, "dense")]))
    assert [bool(line["measured_traffic_bytes"]) for line in found] == [False, True]


def joins(counted, made, axis="N", size=512, **changes):
    """Return whether counters of a file with these facts are joined with the bench's record of a problem made so."""
    problem = make_problem(axis, size, **made, dtype=torch.float32, device=torch.device("cpu"))
    facts = {"group_size": problem.group_size, "active": problem.active, **changes}
    (found,) = lines(profile([product(axis, size, "fused", **facts)], [count(axis, size, "fused")], **counted))
    return bool(found["measured_traffic_bytes"])


@pytest.mark.parametrize("axis", "MNK")
@pytest.mark.parametrize("size", [128, 384, 512, 896])
@pytest.mark.parametrize("active", [0.5, 1 / 3, 0.4, 0.45, 0.6, 2 / 3])
def test_counters_are_those_of_the_problem_that_keeps_as_many_groups(active, size, axis):
    ran, asked = (
        make_problem(axis, size, group_size=128, active=share, dtype=torch.float32, device=torch.device("cpu"))
        for share in (0.5, active)
    )
    alike = bool((ran.mask == asked.mask).all())
    assert joins({}, {"group_size": 128, "active": active}, axis, size) == alike


def test_half_of_an_odd_number_of_groups_is_the_even_number_beside_it():
    found = [
        joins({}, {"group_size": 128, "active": active}, size=size)
        for size, active in ((384, 1 / 3), (384, 0.4), (384, 0.5), (640, 0.5), (896, 0.4), (896, 0.5))
    ]
    assert found == [False, False, True, True, False, True]


def test_the_problem_and_the_backend_are_those_that_the_file_of_counters_says():
    said = {"group_size": 64, "active": 0.25, "backend": "gluon"}
    made = {"group_size": 64, "active": 0.25}
    assert joins(said, made, backend="gluon")
    assert not joins(said, made)
    assert not joins(said, {"group_size": 128, "active": 0.25}, backend="gluon")
    assert not joins(said, {"group_size": 64, "active": 0.5}, backend="gluon")
    # Other ways than the fused one have no backend.
    dense = product("N", 512, "dense", group_size=64, active=0.25)
    (found,) = lines(profile([dense], [count("N", 512, "dense")], **said))
    assert found["measured_traffic_bytes"] == str(20 * MIB)


@pytest.mark.parametrize(("fact", "value"), [("group_size", "many"), ("active", 2.0), ("backend", 3)])
def test_an_unusable_fact_of_the_counters_is_said_and_is_as_if_it_was_missing(fact, value):
    source = profile(**{fact: value})
    assert source.notes == [f"folder/naive-bytes.json: 12 of 12 records drawn without {fact!r}, which is unusable"]
    assert lines(source) == lines(profile())


@pytest.mark.parametrize(("device", "is_joined"), [("GPU", True), ("", True), (None, True), ("another", False)])
def test_counters_of_another_device_are_left_out_and_said_to_be(device, is_joined):
    source = profile(device=device)
    _, _, words = drawn(source)
    left_out = "Left out: folder/naive-bytes.json, counted on another, while these products ran on GPU."
    assert (left_out in words) == ("No traffic of these products was measured." in words) == (not is_joined)
    assert any(line["measured_traffic_bytes"] for line in lines(source)) == is_joined


def test_counters_belong_to_the_bench_in_their_folder(tmp_path):
    for place in (tmp_path, tmp_path / "bench"):
        place.mkdir(exist_ok=True)
        (place / "naive.json").write_text(json.dumps({"device": "GPU", "records": [product("N", 512, "dense")]}))
    (tmp_path / "bench/naive-bytes.json").write_text(json.dumps({"records": [count("N", 512, "dense")]}))
    found = read_profile(tmp_path)
    assert [line["measured_over_accounted"] for line in lines(found)] == ["", "2.0"]
    assert [origin.path for origin in FIGURE.origins(found)] == [
        str(tmp_path / name) for name in ("naive.json", "bench/naive.json", "bench/naive-bytes.json")
    ]


def test_what_was_not_counted_is_said(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "naive.json").write_text(json.dumps({"device": "GPU", "records": PRODUCTS}))
    kept = [each for each in COUNTS if (each["axis"], each["candidate"]) != ("N", "fused")]
    counters = {"complete": False, "left_out": ["N 512 fused"]}
    counters |= {"records": with_wrong(kept, 0, "dram_read_bytes", "many")}
    (tmp_path / "naive-bytes.json").write_text(json.dumps(counters))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text().replace("&#x27;", "'")
    said = capsys.readouterr().out
    for words in (
        "naive-bytes.json: 1 of 11 records left out, without a usable 'dram_read_bytes'",
        "naive-bytes.json: no record of N 512 fused",
        "naive-bytes.json: the profiler did not finish cleanly, so that kernels may be missing",
    ):
        assert words in said
        # Under the figure and among the notes.
        assert page.count(words) == 2
    assert "Not measured: M, dense at 512; N, fused at 512; any at 1024." in page


def test_only_counters_say_that_they_are_incomplete():
    assert profile(complete=True).notes == []
    facts = {"complete": False, "left_out": ["N 512 fused"], "records": PRODUCTS}
    assert bench_file("naive.json", facts).notes == ()


def test_counters_that_fit_nothing_are_said_to():
    _, legend, words = drawn(profile(counts=[count("N", 4096, "fused")]))
    assert len(legend) == 5
    assert words.endswith("No traffic of these products was measured.")


def test_counters_alone_say_what_is_missing(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "naive-bytes.json").write_text(json.dumps({"records": COUNTS}))
    ((page,), _) = write_folder(tmp_path)
    assert "Not drawn: no records of naive products (naive.json)" in page.read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"records": [{"axis"', "is not JSON, perhaps cut"),
        ("[]", "wanted what python -m benchmarks.counters --naive writes"),
    ],
)
def test_a_broken_file_of_counters_is_refused(text, words, tmp_path):
    (tmp_path / "naive.json").write_text(json.dumps({"device": "GPU", "records": PRODUCTS}))
    (tmp_path / "naive-bytes.json").write_text(text)
    with pytest.raises(DataError, match=words):
        read_profile(tmp_path)


def test_no_field_of_the_counters_is_taken_for_granted():
    pictures = set()
    for field in COUNTS[0]:
        for value in WRONG:
            source = profile(counts=with_wrong(COUNTS, 0, field, value))
            draw(NAIVE_FIGURES, source, pictures)
            assert traffic_table(source).rows
            is_needed = field not in ("kernels", "time_us", "l2_bytes") and (field, value) != ("candidate", "words")
            assert is_needed == any("left out" in note for note in source.notes)
            told = value is not GONE and value is not None
            assert (field == "l2_bytes" and told) == any("drawn without" in note for note in source.notes)
    for value in ({}, None, 3, "words", []):
        source = profile(counts=[value, *COUNTS], left_out=[value], complete=value)
        draw(NAIVE_FIGURES, source, pictures)
        assert any("left out" in note for note in source.notes)
        assert profile(left_out=value).notes == []


def test_no_words_cover_others_beside_counters():
    assert not covered(FIGURE, profile())
    assert draw_svg(FIGURE, profile())[0].startswith("<?xml")
