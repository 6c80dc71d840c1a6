"""What a figure is: a table of what it shows, and which columns stand for place, height, colour and panel."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from wide.errors import WideError

Value = str | float | int | None
Row = Mapping[str, Value]


class MissingRecordsError(WideError, LookupError):
    """A table or figure cannot be drawn because records are missing; the message names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A file of records that figures are drawn from.

    Args:
        path: Where it lies.
        about: What it says of its measurement: device and date.
        command: That measured, empty where it is not known.
        notes: What was left out of it, in words.
    """

    path: str
    about: str = ""
    command: str = ""
    notes: Sequence[str] = ()


class Records(Protocol):
    """What figures are drawn from."""

    @property
    def origins(self) -> Sequence[Origin]:
        """The files that the records lie in."""


Source = TypeVar("Source", bound=Records)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure(Generic[Source]):
    """One figure of a report.

    All that is drawn lies in `rows`, which are also its CSV file; the other arguments name their columns.

    Args:
        name: Of its files, without their endings.
        title: Above it.
        rows: Returns what is shown, each row with the same columns; raises `MissingRecordsError` where records are
            missing.
        x: Column of the place: a number, or a name in the order of the rows.
        y: Column of the height; a row without it is in the table only.
        by: Column that tells lines or bars apart by colour, marker and hatch; empty for one of them.
        panel: Column that tells panels apart; empty for one panel.
        kind: Lines with markers, bars beside each other, or an image with a cell for each `x` and `by`, coloured by
            `y`.
        x_label: Below each panel.
        y_label: Beside the panels; of an image, what its colours mean.
        about: What there is to see, for those who cannot see it.
        error: Column of the error of the height.
        filled: Column that says whether LoRA was trained: points are filled and lines whole, else hollow and dashed.
        ideal: Column of a second height, drawn dotted.
        ideal_means: What dotted lines are called in the legend.
        words: Column of what is written beside a point.
        even: Whether places stand at equal distances in their order, whatever their numbers.
        scale: Factor of the drawn heights; 100 draws shares in percent.
        top: Greatest height, in drawn units; None lets the values decide.
        log: Whether heights are logarithmic; 'wide' where they span more than a factor of 2.5.
        signed: Of an image: values lie in [-1, 1] instead of [0, 1].
        line_at: Height of a black line across the panels, in drawn units.
        lines: Returns further lines across: names with their heights by panel.
        columns: Panels beside each other.
        height: Of a row of panels, inches.
    """

    name: str
    title: str
    rows: Callable[[Source], Sequence[Row]]
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
    lines: Callable[[Source], Mapping[str, Mapping[str, float]]] | None = None
    columns: int = 3
    height: float = 3.4

    def table(self, source: Source) -> Sequence[Row]:
        """Return `rows`, one at least.

        Raises:
            MissingRecordsError: If records are missing or damaged: one bad record must not cost a whole page.
        """
        try:
            rows = self.rows(source)
            for column in filter(None, (self.y, self.error, self.ideal)):
                wrong = [row[column] for row in rows if not isinstance(row[column], int | float | None)]
                if wrong:
                    raise TypeError(f"{column!r} is {wrong[0]!r}")
        except (ArithmeticError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
            raise MissingRecordsError(f"its records are damaged ({error!r}); measure them again") from error
        return rows

    def to_csv(self, source: Source) -> str:
        """Return the rows as CSV, to 12 digits, a zero without a sign; what there is not stays empty.

        Further digits are those of a machine's order of summation: the same records must give the same file.
        """
        rows = self.table(source)
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([_in_csv(value) for value in row.values()] for row in rows)
        return stream.getvalue()

    def panels(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
        """Return the rows that are drawn, by panel, in their order."""
        found: dict[str, list[Row]] = {}
        for row in rows:
            if row[self.y] is not None or self.kind == "image":
                found.setdefault(str(row[self.panel]) if self.panel else "", []).append(row)
        return found

    def series(self, rows: Sequence[Row]) -> dict[tuple[str, bool], list[Row]]:
        """Return the rows of a panel by their line: its name, and whether it is filled."""
        found: dict[tuple[str, bool], list[Row]] = {}
        for row in rows:
            name = str(row[self.by]) if self.by else ""
            found.setdefault((name, not self.filled or bool(row[self.filled])), []).append(row)
        return found


def _in_csv(value: Value) -> str | float | int:
    if value is None:
        return ""
    return float(f"{value:z.12g}") if isinstance(value, float) else value


def required(rows: Sequence[Row], what: str) -> Sequence[Row]:
    """Return the rows of a figure.

    Raises:
        MissingRecordsError: If there are none; the message is `what`.
    """
    if not rows:
        raise MissingRecordsError(what)
    return rows
