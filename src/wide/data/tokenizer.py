"""Tokenizers: loading, document boundaries, and whether a vocabulary fits a model."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from wide.data.local_names import as_transformers_takes, missing_folder
from wide.errors import ConfigError, DataError
from wide.schema import require

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: "str | Path | nn.Module", given: Any = None) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a hub name, folder, GGUF file or live model, without remote code, or the one `given`.

    A live model's configuration says where it came from. Raises DataError if there is no tokenizer, the name is a path
    to nothing, of which no hub is asked, or transformers reads a GGUF file's tokenizer wrongly.
    """
    require(Callable | None, given, "tokenizer", "a tokenizer that is loaded")
    if given is not None:
        return given
    from transformers import AutoTokenizer, __version__

    is_live = not isinstance(model, str | Path)
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") if is_live else model)
    if is_live and not name:
        raise DataError("the model does not say which name or folder it was loaded from; pass tokenizer=")
    # A live model has been loaded already, from wherever its name stood for then, and a folder needs no model in it.
    if not is_live and not Path(name).exists() and (wrong := missing_folder(name)) is not None:
        raise DataError(wrong)
    place, options = as_transformers_takes(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **options)
        tokenizer("a")
    # Besides OSError, the readers of the many tokenizer formats raise whatever their parsers do.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        nowhere = "" if Path(name).exists() else f" (and there is no local folder {name})"
        cure = "copy the file again" if options else "check the name, or add its files to the model's folder"
        raise DataError(
            f"no tokenizer can be loaded from {name!r}: {reason}{nowhere}; {cure} (in Python, pass tokenizer=)"
        ) from error
    if options and (word := _not_found(tokenizer)):
        raise DataError(
            f"transformers {__version__} reads the tokenizer of {name!r} wrongly: {word!r} is a token, and texts with "
            "that word do not get it; take another version, 5.18 or later for Gemma (in Python, or pass tokenizer=)"
        )
    if options and Version(__version__) < Version("5.24"):
        # They leave out the BOS that a GGUF file asks for, without which Gemma reads prompts badly, and its EOS.
        from gguf import GGUFReader

        told = GGUFReader(options["gguf_file"]).fields
        for name in ("bos_token_id", "eos_token_id", "add_bos_token"):
            if field := told.get(f"tokenizer.ggml.{name}"):
                setattr(tokenizer, name, field.contents())
    return tokenizer


def _not_found(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return a word that is a token, and is not found in text; None if most of a sample are, or words are few."""
    tokens = (token for token in tokenizer.get_vocab() if token[:1] in "\u2581\u0120" and len(token) > 5)
    words = sorted(token for token in tokens if token[1:].isascii() and token[1:].isalpha())
    sample = words[:: len(words) // 50 + 1]
    lost = [w for w in sample if w not in tokenizer.convert_ids_to_tokens(tokenizer(f"a {w[1:]}")["input_ids"])]
    return lost[0] if 2 * len(lost) > len(sample) >= 10 else None


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer itself begins a text with its BOS token."""
    return tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]


def block_start(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the token that begins every block of text, in the place of its first one; None where any token may.

    Gemma's models, whose BOS is '<bos>', read text badly without it: Gemma 3 270M has 4.78 nats a token, not 3.51.
    """
    return tokenizer.bos_token_id if getattr(tokenizer, "bos_token", None) == "<bos>" else None


def document_tokens(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of whole documents.

    A document begins with BOS if the tokenizer adds one by itself, and ends with EOS if the tokenizer has one.
    """
    start = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # verbose=False: documents longer than the context are cut into blocks later, no warning is due.
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [[*start, *ids, *end] for ids in encoded]


def chat_text(messages: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase | None", where: str) -> str:
    """Return a chat as the text that the tokenizer's template makes of it, without the BOS and EOS of a document.

    Raises DataError if the tokenizer has no template, or the template refuses the chat or leaves a message out.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise DataError(
            f"{where} is a chat, and the model's tokenizer has no chat template; take a model made for chat, or choose "
            "a field of text with --text_field (in Python, text_field=)"
        )
    try:
        text = str(tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False))
    # Templates raise errors of their own language.
    except Exception as error:
        raise DataError(f"{where}: the tokenizer's chat template refuses the messages: {error}") from error
    # Many templates write nothing where a field is missing, and null or a list as Python does.
    for message in messages:
        is_whole = "role" in message and any(message.get(key) is not None for key in ("content", "tool_calls"))
        is_known = not message.get("tool_calls") or "tool_calls" in str(tokenizer.chat_template)
        is_plain = not isinstance(message.get("content"), list) or str(message["content"]) not in text
        if not (is_whole and is_known and is_plain):
            found = str(message)[:100]
            raise DataError(f"{where}: the chat template does not write {found}; wanted 'role' and a text as 'content'")
    start = str(tokenizer.bos_token) if adds_bos(tokenizer) else ""
    return text.removeprefix(start).rstrip().removesuffix(str(tokenizer.eos_token or ""))


def require_characters(text: str, where: str) -> None:
    r"""Raise DataError for halves of characters, such as JSON's `\ud800` alone, which cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a character (U+{ord(text[error.start]):04X} at offset {error.start}), which no "
            "tokenizer takes; replace it, or leave the text out"
        ) from error


def check_vocabulary(largest_id: int, model: Any) -> None:
    """Raise DataError for token ids that a model has no embedding for."""
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    if largest_id >= vocab_size:
        raise DataError(
            f"the text holds token id {largest_id}, so its tokenizer has at least {largest_id + 1} tokens, but the "
            f"model's vocabulary has {vocab_size}; use the tokenizer that belongs to the model"
        )


def longest_input(model: "nn.Module") -> int | None:
    """Return the most tokens that a model takes at once, None where its configuration does not say."""
    config = getattr(model, "config", None)
    # Multimodal configurations keep the language model's in a part of their own.
    return getattr(getattr(config, "text_config", config), "max_position_embeddings", None)


def check_positions(name: str, length: int, model: "nn.Module") -> None:
    """Raise ConfigError for more tokens at once than a model has positions for, if its configuration names them."""
    if (longest := longest_input(model)) is not None and length > longest:
        raise ConfigError(
            f"{name} {length} exceeds the {longest} positions of the model, so its scores would mean nothing; set it "
            f"to {longest} or less"
        )


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash that two tokenizers share only if they encode alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = backend.to_str()
    else:
        content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    special = json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id, adds_bos(tokenizer)])
    return hashlib.sha256(f"{content}\n{special}".encode()).hexdigest()
