import copy
import functools
import gzip
import hashlib
import itertools
import json
import sys
import types
import warnings
from contextlib import nullcontext

import pytest
import zstandard

from wide.data import corpus, local_names
from wide.data.batches import load_blocks
from wide.data.corpus import is_data_set, load_documents, reads, source_fingerprint
from wide.errors import DataError
from wide.evaluation.evaluate import scored_split
from wide.runs.settings import EvalOptions
from wide.runs.sources import held_out_documents

ROWS = [{"text": "first text"}, {"text": " \n"}, {"text": None}, {"text": "zweiter Täxt"}]


def texts(source, **settings):
    return [document.text for document in load_documents(source, **settings)]


def json_lines(rows=ROWS):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@functools.cache
def python_docs(split="train"):
    return list(load_documents("python-docs", split=split))


def test_python_docs_are_split_by_the_hash_of_their_name():
    train, heldout = python_docs(), python_docs("heldout")
    for document in train + heldout:
        is_held_out = int(hashlib.sha256(document.name.encode()).hexdigest(), 16) % 10 == 0
        assert (document in heldout) == is_held_out
    names = {document.name for document in train + heldout}
    assert {"topic:if", "module:json", "module:json.decoder"} <= names
    assert not any(name.startswith(("module:test.", "module:idlelib")) for name in names)
    assert sum(len(document.text) for document in train + heldout) > 1_500_000


def test_python_docs_are_read_without_running_the_modules():
    documents = {document.name: document.text for document in python_docs()}
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


@pytest.mark.parametrize("row", [r'{"text": "a \ud800 b"}', r'"a \udfff"'])
def test_half_of_a_character_is_refused_with_file_and_row(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "whole"}}\n{row}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2 holds half of a character \(U\+D...? at offset 2\)"):
        texts(tmp_path / "a.jsonl")


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


def test_hidden_files_of_a_folder_are_not_read_as_those_of_a_pattern_are_not(tmp_path):
    here = tmp_path / ".here"
    for name in ("a.md", ".b.md", ".ipynb_checkpoints/a-checkpoint.md", "deeper/.c/c.md", "deeper/d..md"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    assert texts(here) == texts(f"{here}/**/*.md") == ["a.md", "deeper/d..md"]


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
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"row 1 has no field 'text'; fields seen: \['body', 'id'\]"),
        ("a.jsonl", b'{"text": 3}\n', "holds int, text was wanted"),
        ("a.jsonl", b'{"text": \n', "line 1 is not valid JSON"),
        ("a.jsonl", b'\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.txt", b" \n", "holds no text"),
        ("a.jsonl", b"", "holds no text"),
        ("a.png", b"x", "types that can be read"),
        ("a.parquet", b"x", "cannot be read as Parquet"),
        ("a.jsonl.zst", b"no zstd", "truncated or damaged"),
        ("a.jsonl.gz", b"no gzip", "truncated or damaged"),
        ("a.csv", b'text\n"a', "cannot be read as CSV"),
        ("a.csv", b"text\nquoted not,\nhello, world\n", r"row 2 has more cells than the header; put texts in quotes"),
        ("a.csv", b"body,n\nx,1\n", r"row 1 has no field 'text'; fields seen: \['body', 'n'\]"),
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


@pytest.mark.parametrize("line", ["a line\n", "word "])
def test_few_documents_hold_out_their_tails(tmp_path, line):
    path = tmp_path / "good.txt"
    path.write_text(line * 4000)
    (train,), (tail,) = texts(path, split="train"), texts(path, split="heldout")
    assert train + tail == line * 4000
    assert 0.09 < len(tail) / len(train + tail) < 0.11
    assert tail.startswith("a line") or line == "word "
    (tmp_path / "more.md").write_text("0123456789")
    assert texts(tmp_path, split="heldout") == [tail, "9"]
    assert texts(tmp_path, split="train") == [train, "012345678"]


def test_tables_are_read_as_text(tmp_path):
    (tmp_path / "a.csv").write_text('id,text\n1,"two\nlines, quoted"\n2,42\n3,NA\n', encoding="utf-8-sig")
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"text\tn\nplain\t1\n"))
    assert texts(tmp_path) == ["two\nlines, quoted", "42", "NA", "plain"]
    assert texts(tmp_path / "a.csv", text_field="id") == ["1", "2", "3"]


CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]


@pytest.fixture
def chatty(tokenizer):
    """A tokenizer with a template that writes BOS and EOS itself, as those of chat models do."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ eos_token }}"
    )
    return own


@pytest.mark.parametrize("field", ["text", "messages", "talk"])
def test_chats_go_through_the_template(tmp_path, tokenizer, chatty, field):
    name = "messages" if field == "text" else field
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json_lines([{name: CHAT}, {name: []}]))
    read = texts(path, text_field=field, tokenizer=chatty)
    assert read == ["<user>hello\n<assistant>good day\n"]
    blocks = load_blocks(path, chatty, sequence_length=4, text_field=field)
    ids = blocks.batch([0]).input_ids[0].tolist()
    # One BOS: the document's, and not the template's, too.
    assert ids.count(chatty.bos_token_id) == 1
    with pytest.raises(DataError, match=r"row 1 is a chat, and the model's tokenizer has no chat template"):
        texts(path, text_field=field, tokenizer=tokenizer)
    # The template would write nothing in the place of what it does not find, None, and a list with its brackets.
    null, parts = {"role": "user", "content": None}, {"role": "user", "content": [{"type": "text", "text": "x"}]}
    calls = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    others = {"from": "human", "value": "x"}, {"role": "user", "text": "x"}, {"content": "x"}
    for message in (*others, null, parts, calls):
        path.write_bytes(json_lines([{name: [*CHAT, message]}]))
        with pytest.raises(DataError, match=r"row 1: the chat template does not write {.*wanted 'role' and a text"):
            texts(path, text_field=field, tokenizer=chatty)
    path.write_bytes(json_lines([{name: [{"role": "assistant", "tool_calls": []}]}]))
    assert texts(path, text_field=field, tokenizer=chatty) == ["<assistant>\n"]
    path.write_bytes(json_lines([{name: [{"role": "tool", "content": "x"}]}]))
    with pytest.raises(DataError, match=r"row 1: .* template refuses the messages: no tools"):
        texts(path, text_field=field, tokenizer=chatty)


def test_what_save_to_disk_wrote_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(30)], "n": list(range(30))})
    rows.save_to_disk(tmp_path / "one")
    assert texts(tmp_path / "one") == rows["text"]
    train, heldout = (texts(tmp_path / "one", split=split) for split in ("train", "heldout"))
    assert sorted(train + heldout) == sorted(rows["text"])
    assert 0 < len(heldout) < 10
    datasets.DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk(tmp_path / "two")
    assert texts(str(tmp_path / "two"), split="train") == rows["text"]
    assert texts(tmp_path / "two", split="heldout") == texts(tmp_path / "two", split="test") == ["row 0", "row 1"]
    with pytest.raises(DataError, match=r"has no split 'dev'; splits seen: train, test"):
        texts(tmp_path / "two", split="dev")
    with pytest.raises(DataError, match=r"row 1 has no field 'body'; fields seen: \['n', 'text'\]"):
        texts(tmp_path / "two", text_field="body")
    assert is_data_set(tmp_path / "two")
    assert not is_data_set(tmp_path / "one")
    before = source_fingerprint(tmp_path / "one")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"damaged")
    assert source_fingerprint(tmp_path / "one") != before
    with pytest.raises(DataError, match="one cannot be read as what save_to_disk wrote"):
        texts(tmp_path / "one")


def test_a_mixture_gives_each_source_its_share_of_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": f"a{i:03d}" * 10} for i in range(300)]))
    (tmp_path / "b.jsonl").write_bytes(json_lines([{"text": f"b{i:03d}"} for i in range(300)]))
    name = f"{tmp_path}/a.jsonl=3,{tmp_path}/b.jsonl=1"
    mixed = texts(name)
    letters = "".join(mixed)
    assert mixed == texts(name)
    assert letters.count("a") / (letters.count("a") + letters.count("b")) == pytest.approx(0.75, abs=0.01)
    # It ends with the first source that does, so that the shares hold to the end.
    assert letters.count("b") == 300
    assert sum(text.startswith("a") for text in mixed) == 91
    assert not set(texts(name, split="heldout")) & set(texts(name, split="train"))
    before = source_fingerprint(name)
    (tmp_path / "b.jsonl").write_bytes(json_lines([{"text": "other"}]))
    assert source_fingerprint(name) != before


@pytest.mark.parametrize(
    ("recorded", "split", "scored"),
    [
        ("{0}/a.txt", "train", "heldout"),
        ("a.txt", "train", "heldout"),
        ("{0}/../{1}/a.txt", "train", "heldout"),
        ("b.txt", "train", None),
        ("{0}/a.txt", None, "all"),
    ],
)
def test_what_a_model_was_not_trained_on_is_scored(recorded, split, scored, tmp_path):
    (tmp_path / "a.txt").write_text("0123456789")
    text = recorded.format(tmp_path, tmp_path.name)
    for key in ("prune", "method"):
        provenance = {key: {"text": text, "split": split}, "wide": "1.0"}
        with pytest.warns(UserWarning, match=r"trained on all of .*a\.txt") if scored == "all" else nullcontext():
            found = scored_split(tmp_path / "a.txt", provenance)
        assert found == (None if scored == "all" else scored)


def held_out_of(source, recorded, split="train"):
    """Return the texts that are scored of a source by a model that was trained on another, and whether it was told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        provenance = {"prune": {"text": recorded, "split": split}}
        found, _ = held_out_documents(
            source, EvalOptions(data=source), text_field="text", tokenizer=None, provenance=provenance
        )
    return {document.text for document in found}, [str(each.message) for each in told]


@pytest.mark.parametrize("recorded", ["", "/", "/a.jsonl", "/*.jsonl", "/a.jsonl=1,python-docs=1", "relative"])
@pytest.mark.parametrize("source", ["", "/a.jsonl", "/*.jsonl", "/a.jsonl=2,{}/b.jsonl=1"])
def test_what_was_trained_on_under_another_name_is_held_out(recorded, source, tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([{"text": f"{name}{i}"} for i in range(60)]))
    monkeypatch.chdir(tmp_path.parent)
    recorded = f"{tmp_path.name}/a.jsonl" if recorded == "relative" else f"{tmp_path}{recorded}"
    heldout, told = held_out_of(f"{tmp_path}{source}".format(tmp_path), recorded)
    assert heldout
    assert not heldout & set(texts(recorded, split="train"))
    assert not told
    # Where nothing was held out, that is told.
    _, told = held_out_of(f"{tmp_path}{source}".format(tmp_path), recorded, split=None)
    assert ["trained on all of" in each for each in told] == [True]


@pytest.mark.parametrize(
    ("recorded", "source", "told"),
    [
        ("{0}/many", "{0}/many/3.txt", True),
        ("{0}/many/3.txt", "{0}/many", True),
        ("{0}/rows.jsonl", "{0}/link.jsonl", True),
        # As it was called where it was trained on, which is not here.
        ("./many/*.txt", "{0}/many/3.txt", True),
        ("{0}/many/3.txt", "{0}/many/4.txt", False),
        ("{0}/many", "{0}/rows.jsonl", False),
        ("gone/*.txt", "{0}/many", False),
        ("owner/many", "{0}/many", False),
    ],
)
def test_what_cannot_be_held_out_alike_is_told(recorded, source, told, tmp_path, monkeypatch):
    (tmp_path / "many").mkdir()
    for number in range(40):
        (tmp_path / "many" / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "rows.jsonl").write_bytes(json_lines([{"text": str(i)} for i in range(60)]))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "rows.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, found = held_out_of(source.format(tmp_path), recorded.format(tmp_path))
    assert ["does not hold out the same" in each for each in found] == [True] * told


def test_a_split_on_disk_is_known_as_part_of_its_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(60)]})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "set")
    heldout, told = held_out_of(str(tmp_path / "set"), str(tmp_path / "set"))
    assert heldout
    assert not heldout & set(texts(tmp_path / "set"))
    assert not told
    assert held_out_of(str(tmp_path / "set/train"), str(tmp_path / "set"))[1]


def test_what_is_scored_of_a_source_was_not_made_for_training(tmp_path, monkeypatch):
    hub(monkeypatch, lambda *_args, **_settings: {"train": ROWS[:1], "test": ROWS[3:]})
    (tmp_path / "a.txt").write_text("0123456789")
    names = [f"{tmp_path}/a.txt", "owner/name", f"{tmp_path}/a.txt=1,owner/name=1"]
    scored = [held_out_documents(name, EvalOptions(data=name), text_field="text", tokenizer=None) for name in names]
    assert [[document.text for document in documents] for documents, _ in scored] == [
        ["0123456789"],
        ["zweiter Täxt"],
        ["9", "zweiter Täxt"],
    ]


def test_parts_of_a_mixture_that_hold_out_otherwise_of_the_same_text_are_refused(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("".join(f"line {line} of {number}\n" for line in range(40)))
    one, rows = tmp_path / "3.txt", tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(40)))
    # As a part of its own the file holds out its tail, which the folder trains on.
    name = f"{tmp_path}=0.5,{one}=0.5"
    for split in ("train", "heldout"):
        with pytest.raises(DataError, match=r"3\.txt share text, and hold out other parts of it; name"):
            next(load_documents(name, split=split))
    assert next(load_documents(name)).text
    # Rows are held out by their names, wherever they are named.
    trained, held = (set(load_documents(f"{tmp_path}=1,{rows}=1", split=each)) for each in ("train", "heldout"))
    assert trained
    assert held
    assert not trained & held


@pytest.mark.parametrize("shares", ["a.jsonl=x", "a.jsonl=0.5,b.jsonl", "a.jsonl=-1,b.jsonl=1", "a.txt=1,a.txt=2"])
def test_what_is_no_mixture_is_named(shares):
    with pytest.raises(DataError, match=rf"'{shares}' cannot be read as a mixture; wanted sources and positive shares"):
        texts(shares)


def test_a_stream_is_read_only_as_far_as_it_is_needed(tmp_path, monkeypatch, tokenizer):
    def endless():
        for number in itertools.count():
            given.append(number)
            yield {"text": f"row {number}"}

    given = []
    hub(monkeypatch, lambda *_args, **_settings: {"train": endless(), "test": ROWS})
    for cache in (None, tmp_path):
        blocks = load_blocks("owner/name", tokenizer, sequence_length=8, split="train", max_tokens=2000, cache=cache)
        assert 2000 - 8 <= blocks.num_tokens < 3000
        assert len(given) < 1000
        given.clear()


def test_rows_that_hold_null_are_left_out_and_counted(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines([*ROWS, {"text": None}]))
    with pytest.warns(UserWarning, match=r"a.jsonl: 2 rows that hold null in the field 'text', left out"):
        assert texts(path) == ["first text", "zweiter Täxt"]
    hub(monkeypatch, lambda *_args, **_settings: {"train": ROWS, "test": ROWS})
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
    monkeypatch.setenv("HF_DATASETS_CACHE", "nowhere")
    monkeypatch.setattr(local_names, "_ask_hub", lambda name, kind: True)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, config=config))
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)


@pytest.mark.filterwarnings("ignore:.*null in the field")
def test_a_data_set_is_streamed_with_its_configuration(monkeypatch):
    asked = []

    def load_dataset(*args, **settings):
        asked.append((args, settings))
        return {"train": ROWS[:1], "validation": ROWS}

    hub(monkeypatch, load_dataset)
    assert texts("owner/name:part", split="validation") == ["first text", "zweiter Täxt"]
    assert asked == [(("owner/name", "part"), {"streaming": True})]
    assert texts("owner/name", split="heldout") == ["first text", "zweiter Täxt"]
    assert texts("owner/name") == texts("owner/name", split="train") == ["first text"]


def test_a_data_set_without_a_test_split_holds_out_by_the_usual_rule(monkeypatch, tmp_path, tokenizer):
    rows = [{"text": str(i)} for i in range(60)]
    hub(monkeypatch, lambda *_args, **_settings: {"train": rows})
    train, heldout = texts("owner/name", split="train"), texts("owner/name", split="heldout")
    assert sorted(train + heldout, key=int) == [row["text"] for row in rows]
    assert 0 < len(heldout) < 20
    # What names no split, as a call from Python or a run with a text of its own to score, trains on none of it either.
    assert texts("owner/name") == train
    blocks = [load_blocks("owner/name", tokenizer, sequence_length=8, cache=cache) for cache in (None, tmp_path)]
    assert {each.split for each in blocks} == {"train"}
    assert {len(each) for each in blocks} == {
        len(load_blocks("owner/name", tokenizer, sequence_length=8, split="train"))
    }
    # Tokens that were kept when all of it was trained on are not taken for these.
    assert source_fingerprint("owner/name") == source_fingerprint("owner/name", split="train")
    assert scored_split("owner/name", {"prune": {"text": "owner/name", "split": "train"}}) == "heldout"


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


@pytest.mark.parametrize(
    "ask", [is_data_set, source_fingerprint, lambda name: next(load_documents(name)), lambda name: reads(name, "RUN")]
)
def test_an_empty_name_is_not_the_working_folder(ask, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("words")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the name of a text is empty"):
        ask("")
