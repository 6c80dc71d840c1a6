"""Text in which the background of each token shows how much of the model it executes."""

from collections.abc import Sequence
from html import escape
from typing import Any

from wide.report.style import HALF_NAMES, ink, shade

STEPS = 9
"""Shades of the scale."""
_TITLE_LAYERS = 48


def text_css() -> str:
    """Return the style of coloured text, for the head of a page."""
    shades = "".join(
        f".s{step} {{ background: {shade(step / (STEPS - 1))}; color: {ink(step / (STEPS - 1))}; }}\n"
        for step in range(STEPS)
    )
    return (
        ".tokens { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; background: none; padding: 0; }\n"
        ".tokens span { padding: .15rem 0; border-right: 1px solid #fff; }\n"
        ".scale span { padding: .1rem .5rem; white-space: nowrap; display: inline-block; }\n" + shades
    )


def coloured_text(tokens: Sequence[str], shares: Sequence[Sequence[float | None]], half: str) -> str:
    """Return one text as HTML.

    The scale runs from the token that executes least to the one that executes most, and a legend names both.

    Args:
        tokens: Texts of the tokens, which join to the whole.
        shares: For each token the share of groups that each layer executes, in [0, 1]; None where not routed.
        half: 'attention' or 'ffn'.
    """
    means = [_mean(row) for row in shares]
    low, high = min(means), max(means)
    steps = [round((mean - low) / (high - low) * (STEPS - 1)) if high > low else STEPS // 2 for mean in means]
    spans = "".join(
        f'<span class="s{step}" title="{_title(token, mean, row)}">{_shown(token)}</span>'
        for token, mean, row, step in zip(tokens, means, shares, steps, strict=True)
    )
    name = HALF_NAMES[half]
    legend = "".join(
        f'<span class="s{step}">{100 * (low + (high - low) * step / (STEPS - 1)):.0f} %</span>' for step in range(STEPS)
    )
    summary = (
        f"{len(tokens)} tokens coloured by the share of {name} groups that they execute, mean over layers: "
        f"{100 * low:.0f} to {100 * high:.0f} percent; most: {_most(tokens, means)}"
    )
    return (
        f'<figure aria-label="{escape(summary)}"><figcaption>{escape(name)}, executed groups: '
        f'<span class="scale">{legend}</span></figcaption><pre class="tokens">{spans}</pre></figure>'
    )


def sample_section(sample: Any) -> str:
    """Return the section of a page that shows the sample of a record 'routing.sample', empty without one.

    Args:
        sample: Content of the record, with percent by token and layer; None where it was not measured.
    """
    halves = [half for half in HALF_NAMES if sample and sample.get(half)]
    if not halves:
        return ""
    texts = "".join(
        coloured_text(
            sample["tokens"],
            [[None if share is None else share / 100 for share in row] for row in sample[half]],
            half,
        )
        for half in halves
    )
    return (
        f"<h2>Execution by token</h2>{texts}<p>Darker tokens execute more groups. Point at a token to see its layers; "
        "the values are in figures/tokens.csv.</p>"
    )


def _mean(row: Sequence[float | None]) -> float:
    known = [share for share in row if share is not None]
    return sum(known) / len(known) if known else 0.0


def _title(token: str, mean: float, row: Sequence[float | None]) -> str:
    layers = [f"layer {layer}: {100 * share:.0f} %" for layer, share in enumerate(row) if share is not None]
    more = [f"{len(layers) - _TITLE_LAYERS} layers more"] if len(layers) > _TITLE_LAYERS else []
    lines = [f"{token.strip() or repr(token)}: {100 * mean:.0f} %", *layers[:_TITLE_LAYERS], *more]
    return "&#10;".join(escape(line) for line in lines)


def _shown(token: str) -> str:
    # A line break keeps its sign, so that it can be pointed at; a token without text of its own shows as a dot.
    return escape(token).replace("\n", "↵\n") if token else "·"


def _most(tokens: Sequence[str], means: Sequence[float]) -> str:
    ordered = sorted(range(len(tokens)), key=lambda place: -means[place])
    words = dict.fromkeys(tokens[place].strip() for place in ordered)
    return ", ".join([word for word in words if word][:5])
