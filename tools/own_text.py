"""Text that a model writes itself, to calibrate and recover it where no text of its training's kind is at hand.

Usage: python tools/own_text.py --model M --output FILE.jsonl [--tokens 2000000] [--length 512] [--batch_size 512]

Half of the pieces begin with nothing, the others, where the tokenizer has a template of chats, with a user's turn, so
that the model writes question and answer. Sampled at temperature 1; tokens of less than --min_p of the likeliest one's
probability are left out. What is written is plain text with the template's marks, one piece a line, field `text`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_MARK = "WHAT-THE-USER-SAYS"


def beginnings(tokenizer: Any) -> list[list[int]]:
    """Return the token ids with which pieces begin."""
    # What ends a plain text; instruction models take the mark of a turn for their BOS.
    ends = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    known = [
        i for i in (ends, tokenizer.bos_token_id, tokenizer.eos_token_id) if i not in (None, tokenizer.unk_token_id)
    ]
    nothing = [ends if tokenizer.convert_ids_to_tokens(ends or 0) == "<|endoftext|>" else known[0]]
    if tokenizer.chat_template is None:
        return [nothing]
    turn = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False).partition(_MARK)[0]
    return [nothing, tokenizer(turn, add_special_tokens=False).input_ids]


@torch.inference_mode()
def main() -> None:
    """Write until there is enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--min_p", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device).eval()
    begins = beginnings(tokenizer)
    torch.manual_seed(options.seed)
    written, began = 0, time.monotonic()
    with options.output.open("w", encoding="utf-8") as out:
        for turn in range(-(-options.tokens // (options.batch_size * options.length))):
            begin = begins[turn % len(begins)]
            ids = torch.tensor([begin] * options.batch_size, device=device)
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=options.min_p,
                max_new_tokens=options.length - len(begin),
                # Pieces go on after the end of a text, as packed text does.
                eos_token_id=[],
                pad_token_id=0,
            )
            for piece in tokenizer.batch_decode(found[:, 1 if len(begin) == 1 else 0 :]):
                out.write(json.dumps({"text": piece}) + "\n")
            out.flush()
            written += found.numel()
            print(f"{written} tokens, {written / (time.monotonic() - began):.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
