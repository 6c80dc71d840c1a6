"""Standard errors of perplexities over independent units of text: windows or documents, not the tokens inside them."""

import math
from collections.abc import Sequence


def ratio_stderr(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return the standard error of sum / count by the ratio estimator; None for fewer than two units."""
    units, total = len(sums), math.fsum(counts)
    if units < 2 or not total:
        return None
    mean = math.fsum(sums) / total
    squares = math.fsum((value - mean * count) ** 2 for value, count in zip(sums, counts, strict=True))
    return math.sqrt(squares * units / (units - 1)) / total


def perplexity_stderr(losses: Sequence[float], tokens: Sequence[float]) -> float | None:
    """Return the standard error of exp(losses / tokens); None for fewer than two units, or where it is no number.

    Losses are of units, in nats; tokens may be words, for a perplexity per word. Of losses of which another model's on
    the same units are taken off, it is that of the two perplexities' ratio: what is hard for both does not count as
    noise.
    """
    if not all(map(math.isfinite, losses)):
        return None
    error = ratio_stderr(losses, tokens)
    try:
        # A small change of the mean changes its exponential in proportion to that.
        return None if error is None else error * math.exp(math.fsum(losses) / math.fsum(tokens))
    except OverflowError:
        return None
