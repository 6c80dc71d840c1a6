"""JSON and settings by type hints: what is given is what a class says, or an error that names key, value and wish."""

import functools
import json
import math
import numbers
import reprlib
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from wide.errors import AdapterError, ConfigError, WideError

_WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", NoneType: "null"}
# NumPy's too.
_NUMBERS = {int: numbers.Integral, float: numbers.Real}


@dataclass(frozen=True, slots=True)
class Between:
    """Both ends of what a number may be, for `Annotated[int, Between(1)]`.

    `without` says which of the two it may not be itself, and `hint` what else a message says.
    """

    low: float = -math.inf
    high: float = math.inf
    without: Literal["neither", "low", "high"] = "neither"
    hint: str = ""

    def holds(self, value: float) -> bool:
        """Return whether a number lies there."""
        inside = self.low <= value <= self.high
        return inside and not (self.without != "neither" and value == getattr(self, self.without))

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"be {'above' if self.without == 'low' else 'at least'} {self.low:.10g}"
        if self.low == -math.inf:
            return f"be {'below' if self.without == 'high' else 'at most'} {self.high:.10g}"
        ends = "(" if self.without == "low" else "[", ")" if self.without == "high" else "]"
        return f"lie in {ends[0]}{self.low:.10g}, {self.high:.10g}{ends[1]}"


Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]
Share = Annotated[float, Between(0, 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Settings whose values are checked against the types of their fields."""

    def __post_init__(self) -> None:
        """Raise ConfigError for what is no number or out of its bounds, and words that a field's type does not list."""
        kind: Any = type(self)
        for field, hint in _hints(kind).items():
            value = getattr(self, field)
            if value is None and (hint is Any or NoneType in get_args(hint)):
                continue
            choices = next((get_args(part) for part in (hint, *get_args(hint)) if get_origin(part) is Literal), None)
            if choices and value not in choices:
                raise ConfigError(f"{field} must be {' or '.join(map(repr, choices))}, got {value!r}")
            for part in (hint, *get_args(hint)):
                for bound in getattr(part, "__metadata__", ()):
                    number, null = get_args(part)[0], " or null" if NoneType in get_args(hint) else ""
                    if isinstance(value, bool) or not isinstance(value, _NUMBERS[number]) or abs(value) == math.inf:
                        raise ConfigError(f"{field} must be {_WORDS[number]}{null}, got {value!r}")
                    if not bound.holds(value):
                        more = f"; {bound.hint}" if bound.hint else ""
                        raise ConfigError(f"{field} must {bound}{null}, got {value}{more}")
            if value is None:
                raise ConfigError(f"{field} must be {_words(hint)}, got None")


def require(kinds: Any, value: object, name: str, wanted: str) -> None:
    """Raise ConfigError for an argument that is none of these kinds, before it is half used."""
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} must be {wanted}, got {type(value).__name__} {reprlib.repr(value)}")


def positive_numbers(text: str | None, name: str) -> list[int]:
    """Return the numbers of a text that commas separate, none of None; raises ConfigError for what is no such text."""
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{name} must be positive numbers separated by commas, got {text!r}")
    return [int(word) for word in words]


def read_json(file: Path) -> Any:
    """Return what a JSON file holds; raises AdapterError if it cannot be read, or is not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    # Of text that is not UTF-8, numbers of thousands of digits, and lists in lists in lists.
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is not valid JSON ({error})") from error


def typed(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as the type that is wanted, and refuse it where it is another.

    Raises AdapterError if a value has another type or lies outside its range, or a key is missing or unknown.

    Args:
        kind: int, float (finite), str, bool, None, Any, Literal, list, tuple, dict, a union, a TypedDict or a
            dataclass, inside one another; a number with its range is `Annotated`. Of several dataclasses 'kind' names
            one, and all their fields are wanted.
        value: As `json` reads it.
        where: The file and the key, for messages; only the file ends with a colon.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        found, limits = typed(parts[0], value, where), parts[1]
        if not limits.holds(found):
            raise _unwanted(where, value, kind)
        return found
    if origin in (Union, UnionType):
        return typed(_chosen(parts, value, where, kind), value, where)
    if origin is Literal:
        if not any(value == each and type(value) is type(each) for each in parts):
            raise _unwanted(where, value, kind)
        return value
    if origin in (list, tuple) and isinstance(value, list):
        kinds = parts if origin is tuple and parts[-1] is not ... else parts[:1] * len(value)
        if len(kinds) == len(value):
            return origin(typed(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    elif origin is dict and isinstance(value, Mapping):
        return {key: typed(parts[1], each, _inside(where, key)) for key, each in value.items()}
    elif _has_keys(kind) and isinstance(value, Mapping):
        return _keyed(kind, value, where)
    elif kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    elif kind in (int, str, bool, NoneType) and type(value) is kind:
        return value
    raise _unwanted(where, value, kind)


def _chosen(kinds: Sequence[Any], value: Any, where: str, union: Any) -> Any:
    """Return the type of a union that a value is to be read as, by its outermost layer."""
    name = value.get("kind") if isinstance(value, Mapping) else None
    for kind in kinds:
        if _has_keys(kind):
            if isinstance(value, Mapping) and name in (None, kind.__name__.lower()):
                return kind
            continue
        if get_origin(kind) in (list, tuple) and isinstance(value, list):
            return kind
        try:
            typed(kind, value, where)
        except AdapterError:
            continue
        return kind
    raise _unwanted(where, value, union)


def _keyed(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    hints = _hints(kind)
    if is_dataclass(kind):
        # It said which of several classes this is.
        value = {key: each for key, each in value.items() if key != "kind"}
    missing = sorted(getattr(kind, "__required_keys__", hints.keys()) - value.keys())
    unknown = sorted(value.keys() - hints.keys())
    if missing or unknown:
        raise AdapterError(f"{where.removesuffix(':')}: missing keys {missing}, unknown keys {unknown}")
    found = {key: typed(hints[key], each, _inside(where, key)) for key, each in value.items()}
    try:
        return kind(**found)
    except WideError as error:
        raise AdapterError(f"{where}: {error}") from error


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return {
        name: get_args(hint)[0] if get_origin(hint) is typing.NotRequired else hint
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    }


def _has_keys(kind: Any) -> bool:
    return is_dataclass(kind) or typing.is_typeddict(kind)


def _inside(where: str, key: str) -> str:
    return f"{where} {key}" if where.endswith(":") else f"{where}.{key}"


def _unwanted(where: str, value: object, kind: Any) -> AdapterError:
    return AdapterError(f"{where} is {reprlib.repr(value)}, wanted {_words(kind)}")


def _words(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        high = "" if parts[1].high == math.inf else f" and at most {parts[1].high:g}"
        return f"{_words(parts[0])} of at least {parts[1].low:g}{high}"
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (list, tuple):
        several = origin is list or parts[-1] is ...
        return f"a list of {_words(parts[0]) if several else ' and '.join(map(_words, parts))}"
    if _has_keys(kind):
        return f"an object ({kind.__name__})"
    return _WORDS.get(kind, "an object")
