import types

import pytest
import transformers
from torch import nn

from wide.data import local_names
from wide.data.corpus import load_documents
from wide.data.tokenizer import adds_bos, check_vocabulary, document_tokens, load_tokenizer, tokenizer_fingerprint
from wide.errors import DataError


class Embedded(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 2)

    def get_input_embeddings(self):
        return self.embedding


def test_documents_begin_with_bos_and_end_with_eos(tokenizer):
    assert adds_bos(tokenizer)
    ids = document_tokens(tokenizer, ["a word", "another"])
    assert all(row[0] == tokenizer.bos_token_id and row[-1] == tokenizer.eos_token_id for row in ids)
    assert tokenizer.decode(ids[0][1:-1]) == "a word"


class NoBos:
    bos_token_id = eos_token_id = 9

    def __call__(self, text, **_settings):
        return {"input_ids": [1, 2] if isinstance(text, str) else [[1, 2] for _ in text]}


def test_a_tokenizer_that_adds_no_bos_gets_none():
    # As GPT-2: the tokenizer has a BOS token, equal to EOS, and does not use it.
    assert document_tokens(NoBos(), ["x"]) == [[1, 2, 9]]


def test_token_ids_outside_the_vocabulary_are_refused():
    check_vocabulary(9, Embedded(10))
    with pytest.raises(DataError, match=r"at least 11 tokens.*vocabulary has 10"):
        check_vocabulary(10, Embedded(10))


def test_a_live_model_names_its_tokenizer(tokenizer):
    model = Embedded(4)
    model.config = types.SimpleNamespace(_name_or_path=tokenizer.name_or_path)
    assert tokenizer_fingerprint(load_tokenizer(model)) == tokenizer_fingerprint(tokenizer)
    with pytest.raises(DataError, match="pass tokenizer="):
        load_tokenizer(Embedded(4))


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match="no tokenizer can be loaded from"):
        load_tokenizer(tmp_path)


def test_the_fingerprint_changes_with_the_tokens(tokenizer):
    import copy

    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<new>"])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)


def test_no_hub_is_asked_for_a_path(tmp_path, monkeypatch):
    import transformers

    def asked(name, **_settings):
        raise OSError(f"the hub was asked for {name}")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", asked)
    monkeypatch.setattr(local_names, "_ask_hub", lambda name, kind: True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(DataError, match=r"no folder './models/nope'.*check the path$"):
        load_tokenizer("./models/nope")
    with pytest.raises(DataError, match="the hub was asked for owner/model"):
        load_tokenizer("owner/model")
    # A live model has been loaded already, perhaps from elsewhere.
    model = Embedded(4)
    model.config = types.SimpleNamespace(_name_or_path="models/nope")
    with pytest.raises(DataError, match="the hub was asked for models/nope"):
        load_tokenizer(model)


def test_a_hub_that_does_not_answer_is_asked_once_and_briefly(tmp_path, monkeypatch):
    asked = []

    def ask(self, name, *, repo_type, timeout):
        asked.append((name, repo_type, timeout))
        raise RuntimeError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", ask)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"the hub's cache has no model of this name.*no network"):
        load_tokenizer("nobody/nothing")
    with pytest.raises(DataError, match=r"the hub's cache has no dataset of this name.*no network"):
        list(load_documents("nobody/nothing"))
    assert asked == [("nobody/nothing", kind, local_names._SECONDS) for kind in ("model", "dataset")]
    assert local_names._SECONDS < 5
    # What the cache has is loaded from there.
    (tmp_path / "models--nobody--nothing").mkdir()
    assert local_names.missing_folder("nobody/nothing", cache=tmp_path) is None
    assert len(asked) == 2


@pytest.mark.parametrize("right", [True, False])
def test_a_gguf_file_whose_words_are_not_found_in_text_is_refused(right, tmp_path, monkeypatch):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = ["<unk>", "▁a", *(f"▁harbour{letter}" for letter in "abcdefghijkl")]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    # As transformers 5.17 does with Gemma's: the words are there, and texts are split in other places.
    parts = [pre_tokenizers.Metaspace()] + [pre_tokenizers.Split(Regex(".."), "isolated")] * (not right)
    inner.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_args, **_options: made)
    monkeypatch.setattr(local_names, "find_spec", lambda name: True)
    write_gguf(tmp_path / "a.gguf")
    if right:
        assert load_tokenizer(tmp_path / "a.gguf") is made
        return
    with pytest.raises(DataError, match=r"'▁harboura' is a token.*5.18 or later"):
        load_tokenizer(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("version", "asked", "ids"), [("5.22.0", True, [1, 2, 3]), ("5.22.0", False, [2, 3]), ("5.24.0", True, [2, 1])]
)
def test_older_transformers_are_told_of_the_bos_and_eos_of_a_gguf_file(version, asked, ids, tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models

    words = {"<unk>": 0, "<s>": 1, "a": 2, "</s>": 3}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    # As 5.17 reads SmolLM2's: BOS in place of EOS.
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_args, **_options: made)
    # By name: transformers replaces its module while it is imported, and this file may have the one before.
    monkeypatch.setattr("transformers.__version__", version)
    write_gguf(tmp_path / "a.gguf", add_add_bos_token=asked, add_eos_token_id=3)
    # As newer ones make it, it stays.
    assert document_tokens(load_tokenizer(tmp_path / "a.gguf"), ["a"]) == [ids]


def write_gguf(file, **fields):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, "llama")
    for add, value in fields.items():
        getattr(writer, add)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
