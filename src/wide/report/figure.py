"""What a figure is: a table of what it shows, and which columns stand for place, height, colour and panel."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, TypeVar

import yaml

from wide.errors import WideError

Row = Mapping[str, Any]
"""Numbers and texts by column; None where there is no value."""
Item = TypeVar("Item")
Key = TypeVar("Key")
LOOKS: dict[str, Any] = yaml.safe_load((resources.files("wide.report") / "figures.yaml").read_text(encoding="utf-8"))
"""What `figures.yaml` beside this file says of each kind of records, of names and of tables."""


class MissingRecordsError(WideError, LookupError):
    """A table or figure cannot be drawn because records are missing; the message names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of a report; `figures.yaml` says what its keys mean.

    All that is drawn lies in `rows`, which are also its CSV file; other keys name their columns. `rows` returns what is
    shown, each row with the same columns, and may raise `MissingRecordsError`; `lines` further lines across: names with
    their heights by panel.
    """

    name: str
    title: str
    rows: Callable[[Any], Sequence[Row]]
    missing: str = ""
    x: str
    y: str
    by: str = ""
    panel: str = ""
    kind: Literal["line", "bar", "image"] = "line"
    x_label: str = ""
    y_label: str = ""
    about: str = ""
    error: str = ""
    filled: str = ""
    ideal: str = ""
    ideal_means: str = "ideal"
    words: str = ""
    even: bool = False
    scale: float = 1.0
    top: float | None = None
    log: bool | Literal["wide"] = False
    signed: bool = False
    line_at: float | None = None
    lines: Callable[[Any], Mapping[str, Mapping[str, float]]] = lambda _source: {}
    columns: int = 3
    height: float = 3.4

    def table(self, source: Any) -> Sequence[Row]:
        """Return `rows`, one at least that can be drawn.

        Raises MissingRecordsError if records are missing or damaged: one bad record must not cost a whole page.
        """
        try:
            rows = self.rows(source)
            for column in filter(None, (self.y, self.error, self.ideal)):
                wrong = [row[column] for row in rows if not isinstance(row[column], int | float | None)]
                if wrong:
                    raise TypeError(f"{column!r} is {wrong[0]!r}")
        except (ArithmeticError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise MissingRecordsError(f"its records are damaged ({error!r}); measure them again") from error
        if not self.panels(rows):
            raise MissingRecordsError(f"no value {self.y!r} among the records" if rows else self.missing)
        return rows

    def panels(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
        """Return the rows that are drawn, by panel, in their order."""
        drawn = [row for row in rows if row[self.y] is not None or self.kind == "image"]
        return grouped(drawn, lambda row: str(row[self.panel]) if self.panel else "")

    def series(self, rows: Sequence[Row]) -> dict[tuple[str, bool], list[Row]]:
        """Return the rows of a panel by their line: its name, and whether it is filled."""
        return grouped(
            rows, lambda row: (str(row[self.by]) if self.by else "", not self.filled or bool(row[self.filled]))
        )


def figures(
    kind: str,
    rows: Mapping[str, Callable[[Any], Sequence[Row]]],
    lines: Mapping[str, Callable[[Any], Mapping[str, Mapping[str, float]]]] | None = None,
) -> tuple[Figure, ...]:
    """Return the figures of a kind of records in their order, as `figures.yaml` describes them."""
    across = {name: {"lines": each} for name, each in (lines or {}).items()}
    return tuple(Figure(name=n, rows=rows[n], **look | across.get(n, {})) for n, look in LOOKS[kind].items())


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by what `key` says of them; keys and items keep their order."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def to_csv(rows: Sequence[Row], *, exact: bool = False) -> str:
    """Return rows with the same columns as CSV, a zero without a sign; what there is not stays empty.

    Unless it is to be `exact`, digits after the twelfth are left out: they are of a machine's order of summation, and
    without them the same records give the same file everywhere.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([_number(value, exact) for value in row.values()] for row in rows)
    return stream.getvalue()


def _number(value: Any, exact: bool) -> Any:
    if not isinstance(value, float):
        return value
    return value + 0.0 if exact else float(f"{value:z.12g}")
