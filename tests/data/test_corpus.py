import gzip
import hashlib
import json
import sys
import types

import pytest
import zstandard

from wide.data import corpus, local_names
from wide.data.corpus import load_documents, source_fingerprint
from wide.errors import DataError, EmptySplitError

ROWS = [{"text": "first text"}, {"text": " \n"}, {"text": None}, {"text": "zweiter Täxt"}]


def texts(source, **settings):
    return [document.text for document in load_documents(source, **settings)]


def json_lines(rows=ROWS):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_python_docs_are_split_by_the_hash_of_their_name():
    train, heldout = list(load_documents("python-docs")), list(load_documents("python-docs", split="heldout"))
    for document in train + heldout:
        is_held_out = int(hashlib.sha256(document.name.encode()).hexdigest(), 16) % 10 == 0
        assert (document in heldout) == is_held_out
    names = {document.name for document in train + heldout}
    assert {"topic:if", "module:json", "module:json.decoder"} <= names
    assert not any(name.startswith(("module:test.", "module:idlelib")) for name in names)
    assert sum(len(document.text) for document in train + heldout) > 1_500_000


def test_python_docs_are_read_without_running_the_modules():
    documents = {document.name: document.text for document in load_documents("python-docs")}
    assert documents["module:json"].startswith("JSON (JavaScript Object Notation)")
    # Importing either of these two is noticed: one prints, the other opens a browser.
    assert not {"this", "antigravity"} & set(sys.modules)


@pytest.mark.filterwarnings("ignore:.*null in the field")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json"])
def test_rows_of_any_compression_give_their_texts_without_blank_ones(tmp_path, name):
    packers = {".gz": gzip.compress, ".zst": zstandard.compress}
    path = tmp_path / name
    path.write_bytes(packers.get(path.suffix, bytes)(json_lines()))
    assert texts(path) == ["first text", "zweiter Täxt"]


def test_a_json_list_and_a_parquet_table_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.json").write_text(json.dumps(["plain", {"text": "in a field"}]))
    pq.write_table(pa.table({"body": ["x", "y"], "n": [1, 2]}), tmp_path / "b.parquet")
    assert texts(tmp_path / "a.json") == ["plain", "in a field"]
    assert texts(tmp_path / "b.parquet", text_field="body") == ["x", "y"]
    with pytest.raises(DataError, match=r"no field 'text'; fields seen: \['body', 'n'\]"):
        texts(tmp_path / "b.parquet")


def test_a_folder_and_a_glob_stand_for_their_files_in_order(tmp_path):
    for name in ("b.txt", "a.md", "c.png"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.md", "b.txt"]
    assert texts(f"{tmp_path}/*.txt") == ["b.txt"]
    assert texts(str(tmp_path), max_documents=1) == ["a.md"]


def test_zstd_files_of_several_frames_are_read_whole(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(json_lines(ROWS[:1])) + zstandard.compress(json_lines(ROWS[3:])))
    assert texts(path) == ["first text", "zweiter Täxt"]


@pytest.mark.parametrize("packer", [gzip.compress, zstandard.compress])
def test_a_truncated_file_is_refused_not_cut_short(tmp_path, packer):
    suffix = "gz" if packer is gzip.compress else "zst"
    path = tmp_path / f"a.jsonl.{suffix}"
    whole = packer(json_lines([{"text": hashlib.sha256(bytes([i])).hexdigest()} for i in range(200)]))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="truncated"):
        texts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"line 1 has no field 'text'; fields seen: \['body', 'id'\]"),
        ("a.jsonl", b'{"text": 3}\n', "holds int, text was wanted"),
        ("a.jsonl", b'{"text": \n', "line 1 is not valid JSON"),
        ("a.jsonl", b'\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.txt", b" \n", "holds no text"),
        ("a.jsonl", b"", "holds no text"),
        ("a.png", b"x", "types that can be read"),
        ("a.parquet", b"x", "cannot be read as Parquet"),
        ("a.jsonl.zst", b"no zstd", "not valid zstd"),
        ("a.jsonl.gz", b"no gzip", "truncated or damaged"),
    ],
)
def test_bad_files_are_refused_with_the_cause(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name)


def test_a_missing_path_is_not_taken_for_a_data_set(tmp_path):
    for source in (str(tmp_path / "no.txt"), tmp_path / "no", "./no", "no.jsonl", f"{tmp_path}/*.md"):
        with pytest.raises(DataError, match="no file, folder or match"):
            texts(source)


def test_a_path_into_a_folder_that_is_here_is_not_taken_for_a_data_set(tmp_path, monkeypatch):
    asked = []
    hub(monkeypatch, lambda name, *_args, **_settings: asked.append(name) or iter(ROWS[:1]))
    monkeypatch.setattr(local_names, "_is_on_hub", lambda name, kind: (name, kind) == ("texts/there", "dataset"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    with pytest.raises(DataError, match=r"no file, folder or match for 'texts/nope'; .* the hub has no 'texts/nope'"):
        texts("texts/nope")
    assert not asked
    assert texts("texts/there") == ["first text"]
    asked.clear()
    assert texts("owner/nope") == ["first text"]
    assert asked == ["owner/nope"]


def test_a_source_of_few_documents_says_why_a_split_is_empty(tmp_path):
    path = tmp_path / "good.txt"
    path.write_text("a line\n" * 4000)
    with pytest.raises(EmptySplitError, match=r"there is 1 document, .*'heldout'.*a .txt or .md file is one document"):
        texts(path, split="heldout")
    assert len(texts(path, split="train")) == 1
    (tmp_path / "more.md").write_text("one more")
    with pytest.raises(EmptySplitError, match=r"there are 2 documents, and none falls"):
        texts(tmp_path, split="heldout")


def test_rows_that_hold_null_are_left_out_and_counted(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines([*ROWS, {"text": None}]))
    with pytest.warns(UserWarning, match=r"a.jsonl: 2 rows that hold null in the field 'text', left out"):
        assert texts(path) == ["first text", "zweiter Täxt"]
    hub(monkeypatch, lambda *_args, **_settings: iter(ROWS))
    with pytest.warns(UserWarning, match=r"owner/name: 1 row that holds null"):
        assert texts("owner/name") == ["first text", "zweiter Täxt"]


def test_files_are_held_out_by_the_same_rule(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": str(i)} for i in range(60)]))
    train, heldout = texts(tmp_path, split="train"), texts(tmp_path, split="heldout")
    assert sorted(train + heldout, key=int) == texts(tmp_path)
    assert 0 < len(heldout) < 20
    with pytest.raises(DataError, match="choose 'train' or 'heldout'"):
        texts(tmp_path, split="test")


def hub(monkeypatch, load_dataset):
    config = types.SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, config=config))
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)


@pytest.mark.filterwarnings("ignore:.*null in the field")
def test_a_data_set_is_streamed_with_its_configuration(monkeypatch):
    asked = []

    def load_dataset(*args, **settings):
        asked.append((args, settings))
        return iter(ROWS)

    hub(monkeypatch, load_dataset)
    assert texts("owner/name:part", split="test") == ["first text", "zweiter Täxt"]
    assert asked == [(("owner/name", "part"), {"split": "test", "streaming": True})]


def test_an_unreachable_data_set_says_so(monkeypatch):
    def load_dataset(*_args, **_settings):
        raise ConnectionError("no route")

    hub(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=r"no local path.*no route.*or name a local file"):
        texts("owner/name")


def test_the_fingerprint_of_files_changes_with_them(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = source_fingerprint(path)
    assert source_fingerprint(path) == before
    assert source_fingerprint(path, split="train") != before
    path.write_text("longer")
    assert source_fingerprint(path) != before


def test_the_public_name_of_the_built_in_source():
    assert corpus.PYTHON_DOCS == "python-docs"
