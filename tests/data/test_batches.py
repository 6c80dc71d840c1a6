import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wide.data.batches import IGNORED, TokenBlocks, block_indices, blocks_of_texts, load_blocks
from wide.data.documents import Document
from wide.data.token_stream import TokenStream, stream_in_memory, stream_on_disk
from wide.data.tokenizer import load_tokenizer
from wide.errors import ConfigError, DataError

NANO = Path(__file__).parents[2] / "models/nano"
DOCUMENTS = [Document(name=str(i), text=f"document {i} " + "word " * (7 * i % 23)) for i in range(30)]


def stream(lengths):
    pieces = [np.arange(n, dtype=np.uint32) + 100 * i for i, n in enumerate(lengths)]
    starts = np.cumsum([0, *lengths[:-1]])
    return TokenStream(tokens=np.concatenate(pieces), starts=starts, largest_id=int(np.concatenate(pieces).max()))


@given(st.lists(st.integers(1, 9), min_size=3, max_size=30), st.integers(2, 7))
def test_blocks_are_the_stream_cut_and_only_document_starts_are_no_targets(lengths, size):
    source = stream(lengths)
    if len(source.tokens) < size:
        return
    blocks = TokenBlocks(source, size)
    batch = blocks.batch(range(len(blocks)))
    used = len(blocks) * size
    assert len(source.tokens) - used < size
    assert batch.input_ids.flatten().tolist() == source.tokens[:used].tolist()
    ignored = (batch.labels.flatten() == IGNORED).nonzero().flatten().tolist()
    assert ignored == [start for start in source.starts.tolist() if start < used]
    kept = batch.labels != IGNORED
    assert torch.equal(batch.labels[kept], batch.input_ids[kept])
    assert batch.valid.all()


def test_a_first_token_begins_every_block_of_every_cut():
    source = stream([5, 9])
    for blocks in (TokenBlocks(source, 4, first=77), TokenBlocks(source, 7, first=77).cut(4, seed=1)):
        ids = blocks.batch(range(len(blocks))).input_ids
        assert ids[:, 0].tolist() == [77] * 3
        assert ids[:, 1:].flatten().tolist() == [t for i, t in enumerate(source.tokens[:12].tolist()) if i % 4]


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_shares_of_all_ranks_make_up_the_global_batch(num_blocks, step, share, world, seed):
    whole = block_indices(num_blocks, seed, step, batch_size=share * world)
    shares = [
        block_indices(num_blocks, seed, step, batch_size=share * world, rank=rank, world=world) for rank in range(world)
    ]
    assert [index for part in shares for index in part] == whole


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 3))
def test_every_epoch_visits_every_block_once(num_blocks, batch_size, seed):
    steps = range(2 * num_blocks)
    visited = [index for step in steps for index in block_indices(num_blocks, seed, step, batch_size=batch_size)]
    for epoch in range(2):
        assert sorted(visited[epoch * num_blocks : (epoch + 1) * num_blocks]) == list(range(num_blocks))


def test_the_order_depends_on_seed_and_epoch_only():
    first = block_indices(50, 1, 0, batch_size=50)
    assert first == block_indices(50, 1, 0, batch_size=50)
    assert first != block_indices(50, 2, 0, batch_size=50)
    assert first != block_indices(50, 1, 1, batch_size=50)


def test_unequal_shares_are_refused():
    with pytest.raises(ConfigError, match="multiple of the number of ranks"):
        block_indices(9, 0, 0, batch_size=16, world=3)


def test_too_little_text_says_how_much_is_needed():
    with pytest.raises(DataError, match="has 5 tokens, and one block needs 6"):
        TokenBlocks(stream([2, 3]), 6)


def test_a_block_out_of_range_is_refused():
    with pytest.raises(IndexError):
        TokenBlocks(stream([8]), 4).batch([2])


def test_in_order_covers_the_text_once():
    blocks = TokenBlocks(stream([23]), 4)
    batches = list(blocks.in_order(2))
    assert [len(b.input_ids) for b in batches] == [2, 2, 1]
    assert sum(len(b.input_ids) for b in blocks.in_order(2, max_blocks=3)) == 3


def test_the_stream_on_disk_is_the_stream_in_memory(tokenizer, tmp_path):
    memory = stream_in_memory(DOCUMENTS, tokenizer)
    disk = stream_on_disk(DOCUMENTS, tokenizer, tmp_path / "cache")
    again = stream_on_disk(iter(()), tokenizer, tmp_path / "cache")
    for other in (disk, again):
        assert np.array_equal(memory.tokens, other.tokens)
        assert np.array_equal(memory.starts, other.starts)
        assert memory.largest_id == other.largest_id
    assert all(memory.tokens[memory.starts] == tokenizer.bos_token_id)


def test_a_crash_while_writing_leaves_no_cache(tokenizer, tmp_path):
    def failing():
        yield from DOCUMENTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_on_disk(failing(), tokenizer, tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_text_is_not_one_of_the_cache(tokenizer, tmp_path):
    def streamed():
        yield from DOCUMENTS
        # As of a connection: it has a number, and no file.
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with pytest.raises(ConnectionResetError) as raised:
        stream_on_disk(streamed(), tokenizer, tmp_path / "cache")
    assert raised.value.filename is None


def test_a_damaged_cache_is_refused(tokenizer, tmp_path):
    stream_on_disk(DOCUMENTS, tokenizer, tmp_path / "cache")
    tokens = tmp_path / "cache" / "tokens.uint32"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(DataError, match="damaged"):
        stream_on_disk(DOCUMENTS, tokenizer, tmp_path / "cache")
    (tmp_path / "cache" / "facts.json").unlink()
    with pytest.raises(DataError, match="incomplete"):
        stream_on_disk(DOCUMENTS, tokenizer, tmp_path / "cache")


def test_text_for_gemma_begins_every_block_with_bos(tokenizer, tmp_path):
    gemma = load_tokenizer(NANO)
    gemma.add_special_tokens({"bos_token": "<bos>"})
    (tmp_path / "a.txt").write_text("some words " * 100)
    for named in (tokenizer, gemma):
        loaded = load_blocks(tmp_path / "a.txt", named, sequence_length=8)
        for blocks in (loaded, blocks_of_texts(["some words " * 100], named, sequence_length=8)):
            found = set(blocks.batch(range(len(blocks))).input_ids[:, 0].tolist())
            assert (found == {gemma.bos_token_id}) == (named is gemma)


def test_changed_text_gets_another_cache(tokenizer, tmp_path):
    source = tmp_path / "a.jsonl"

    def write(words):
        source.write_text(json.dumps({"text": "some words " * words}))
        return load_blocks(source, tokenizer, sequence_length=8, cache=tmp_path / "caches")

    assert len(write(100)) < len(write(200))
    assert len(list((tmp_path / "caches").iterdir())) == 2
