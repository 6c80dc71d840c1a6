"""Triton's interpreter without the work of which it makes no use."""

import dataclasses
from types import SimpleNamespace

from triton import language
from triton.runtime import interpreter


def install() -> None:
    """Make kernels in this process run in about half of the time, with the same results."""
    # The check of overflows computes each sum and product again and drops it: it has no effect without debugging.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # All of the language would be searched for what to replace, at every launch and every call within a kernel.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda _fn: interpreter._LangPatchScope()

    # A table of all types would be made for every value.
    dtypes, find = {}, interpreter._get_np_dtype

    def find_once(kind: language.dtype) -> object:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find(kind)
        return dtypes[name]

    interpreter._get_np_dtype = find_once
