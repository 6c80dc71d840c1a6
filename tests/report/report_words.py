"""A figure in words, so that tests can say what is drawn."""

import io

from wide.report.drawing import draw as draw_rows
from wide.report.drawing import style


def describe(figure, source):
    """Return the heights of each line of each panel, in drawn units."""
    parts = []
    for panel, rows in figure.panels(figure.table(source)).items():
        if figure.kind == "image":
            parts.append(f"{panel}: {len(rows)} cells")
            continue
        for (name, filled), points in figure.series(rows).items():
            kind = "" if filled else " (without LoRA)"
            values = ", ".join(f"{height(figure, row)} at {place(row[figure.x])}" for row in points)
            parts.append(f"{', '.join(filter(None, (panel, name)))}{kind}: {values}")
    return f"{figure.about}. {'; '.join(parts)}."


def height(figure, row):
    drawn = figure.scale * row[figure.y]
    return f"{drawn:z.2f}" if abs(drawn) < 100 else f"{drawn:.4g}"


def place(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(figure, source):
    """Return what matplotlib is to draw."""
    return draw_rows(figure, figure.table(source), source)


def draw_svg(figure, source):
    """Return a figure as SVG and in words."""
    svg = io.StringIO()
    with style():
        draw(figure, source).savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue(), describe(figure, source)
