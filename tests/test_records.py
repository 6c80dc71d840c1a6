"""Records: what is appended comes back, whatever happened while writing."""

import json
import multiprocessing
import os
import resource
import shutil
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wide.data.documents import Document
from wide.data.token_stream import stream_on_disk
from wide.errors import DataError
from wide.records import Record, RecordFile, fingerprint, read_records
from wide.writing import unfinished_folder, whole_folder, write_whole


def test_records_come_back_with_where_and_when_they_were_measured(tmp_path):
    file = RecordFile(tmp_path / "run" / "records.jsonl", config_fingerprint="abc", device="cpu")
    file.append([Record(subject="dense", metric="token_perplexity", value=3.5, unit="")])
    file.append([Record(subject="stage 1", metric="sparsity.ffn", value=0.5, unit="share", layer=2)])
    records, notes = read_records(file.path)
    assert [(r.subject, r.value, r.layer) for r in records] == [("dense", 3.5, None), ("stage 1", 0.5, 2)]
    assert records[0].config_fingerprint == "abc"
    assert records[0].device == "cpu"
    assert records[0].versions["wide"]
    assert records[0].time.endswith("+00:00")
    assert notes == []


def test_versions_stand_once_per_append_and_empty_texts_survive(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(Record(subject="run", metric=name, value="", unit="text") for name in "ab")
    first, second = read_records(file.path)[0]
    assert first.versions is not None
    assert second.versions is None
    assert second.value == ""


def test_a_cut_line_is_left_out_and_reported_and_does_not_spoil_the_next(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append([Record(subject="a", metric="m", value=1.0, unit="")] * 2)
    text = file.path.read_text()
    file.path.write_text(text[:-20])
    file.append([Record(subject="b", metric="m", value=2.0, unit="")])
    records, notes = read_records(file.path)
    assert [r.subject for r in records] == ["a", "b"]
    assert len(notes) == 1
    assert "line 2" in notes[0]


def test_missing_file_and_foreign_lines_are_refused(tmp_path):
    with pytest.raises(DataError, match="no records at"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_text('{"text": "hello"}\n')
    with pytest.raises(DataError, match="record 1: a record needs"):
        read_records(tmp_path / "x.jsonl")


# Letters of their own: collecting all of Unicode takes seconds.
TEXT = st.text('aZ é"\\\n\0\u2028😀', max_size=4)


@given(st.dictionaries(TEXT, st.integers() | TEXT, max_size=5))
def test_fingerprint_ignores_the_order_of_keys_and_survives_json(config):
    shuffled = dict(reversed(config.items()))
    assert fingerprint(config) == fingerprint(shuffled) == fingerprint(json.loads(json.dumps(config)))


def test_fingerprint_tells_configurations_apart():
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def words(texts, **_):
    return {"input_ids": [list(range(100)) for _ in texts]}


words.bos_token_id = words.eos_token_id = None


def fill_folder(folder):
    with whole_folder(folder) as unfinished:
        (unfinished / "content").write_text("more than fits")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: RecordFile(path).append([Record(subject="a", metric="m", value=1.0)]),
        lambda path: write_whole(path, "more than fits"),
        lambda path: stream_on_disk([Document(name="a", text="a")], words, path),
        fill_folder,
    ],
)
def test_what_does_not_fit_on_the_disk_is_named(write, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/file'$"):
            write(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _write_and_stop(target, at, ready):
    """Write a folder as far as a moment, say so, and wait to be killed."""

    def stop(*_, **__):
        ready.set()
        signal.pause()

    if at == "between the renames":
        rename = type(target).rename
        type(target).rename = lambda path, to: stop() if path.name.endswith(".writing") else rename(path, to)
    if at == "behind the renames":
        remove = shutil.rmtree
        shutil.rmtree = lambda path, **how: stop() if path.name.endswith(".earlier") else remove(path, **how)
    with whole_folder(target) as folder:
        (folder / "content").write_text("new")
        if at == "while writing":
            stop()


@pytest.mark.parametrize("at", ["while writing", "between the renames", "behind the renames"])
def test_what_a_killed_process_left_goes_with_the_next_write_and_a_live_ones_stays(at, tmp_path):
    target, context = tmp_path / "adapter", multiprocessing.get_context("fork")
    for path in (target, tmp_path / ".adapter.mine", tmp_path / ".adapter.v2.abcdefgh.writing.earlier"):
        path.mkdir()
        (path / "content").write_text("earlier")
    others, ready = set(tmp_path.iterdir()), context.Event()
    process = context.Process(target=_write_and_stop, args=(target, at, ready))
    process.start()
    assert ready.wait(60)
    left = set(tmp_path.iterdir()) - others
    assert left
    with unfinished_folder(target):
        # It lives.
        assert left <= set(tmp_path.iterdir())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    if at == "between the renames":
        with pytest.raises(RuntimeError), whole_folder(target) as folder:
            raise RuntimeError("no adapter after all")
        # The only whole one.
        (kept,) = set(tmp_path.iterdir()) - others
        assert (kept / "content").read_text() == "earlier"
    with whole_folder(target) as folder:
        (folder / "content").write_text("newest")
    assert set(tmp_path.iterdir()) == others
    assert (target / "content").read_text() == "newest"


def test_a_token_cache_whose_process_was_killed_goes_with_the_next_one(tmp_path):
    folder = tmp_path / "tokens-1"

    def texts():
        yield Document(name="a", text="a")
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=stream_on_disk, args=(texts(), words, folder))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    stream_on_disk([Document(name="a", text="a")], words, folder)
    assert list(tmp_path.iterdir()) == [folder]
