"""What a figure is: a drawing and the table of what it shows, both made of the same records."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


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
Value = str | float | int | None


@dataclass(frozen=True, slots=True)
class Sheet:
    """The values of a figure.

    Args:
        header: Names of the columns, with units where they have one.
        rows: As many values as the header has names; None where there is none.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def to_csv(self) -> str:
        """Return the values as CSV, to 12 digits, a zero without a sign; what there is not stays empty.

        Further digits are those of a machine's order of summation: the same records must give the same file.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([_in_csv(value) for value in row] for row in self.rows)
        return stream.getvalue()


def _in_csv(value: Value) -> str | float | int:
    if value is None:
        return ""
    return float(f"{value:z.12g}") if isinstance(value, float) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure(Generic[Source]):
    """One figure of a report.

    Args:
        name: Of its files, without their endings.
        title: Above it.
        size: Width and height in inches.
        draw: Draws into an empty figure of matplotlib and returns the sentence that says what there is to see, for
            those who cannot see it; raises `MissingRecordsError` where records that it needs are missing.
        sheet: Returns what is drawn as a table; raises the same error.
        height: Returns the height in inches where it grows with the records; raises the same error.
        files: Returns the paths of the files whose records are drawn; None means all of the source.
    """

    name: str
    title: str
    size: tuple[float, float]
    draw: Callable[[Any, Source], str]
    sheet: Callable[[Source], Sheet]
    height: Callable[[Source], float] | None = None
    files: Callable[[Source], Iterable[str]] | None = None

    def size_of(self, source: Source) -> tuple[float, float]:
        """Return width and height in inches for these records."""
        return self.size if self.height is None else (self.size[0], self.height(source))

    def origins(self, source: Source) -> list[Origin]:
        """Return the files whose records are drawn; raises what `draw` does."""
        wanted = None if self.files is None else set(self.files(source))
        return [origin for origin in source.origins if wanted is None or origin.path in wanted]
