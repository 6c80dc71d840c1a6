"""Text that a model writes itself."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
TOOL = str(ROOT / "tools/own_text.py")


def test_pieces_are_written_until_there_is_enough(tmp_path, monkeypatch):
    words = ["--model", str(ROOT / "models/nano"), "--output", str(tmp_path / "own.jsonl")]
    monkeypatch.setattr(sys, "argv", [TOOL, *words, "--tokens", "33", "--length", "8", "--batch_size", "2"])
    runpy.run_path(TOOL, run_name="__main__")
    texts = [json.loads(line)["text"] for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    # Three rounds of two pieces of 8 tokens.
    assert len(texts) == 6
    assert len(set(texts)) > 1


@pytest.mark.parametrize("has_template", [False, True])
def test_chats_begin_with_the_turn_of_a_user(has_template):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/nano")
    if has_template:
        tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [end]{% endfor %}"
    plain, *chats = runpy.run_path(TOOL)["beginnings"](tokenizer)
    assert len(plain) == 1
    assert [tokenizer.decode(ids) for ids in chats] == ["[user] "] * has_template
