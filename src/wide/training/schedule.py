"""Learning rate and temperature as pure functions of the optimiser step, counted from 0."""

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: float) -> float:
    """Return the learning rate: linear warm-up to the peak over that share of the steps, then a cosine towards 0."""
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


def temperature(step: int, *, steps: int, start: float, end: float) -> float:
    """Return the Gumbel-softmax temperature: linear from `start` at the first step to `end` at the last.

    Source: paper, section 4.1 (5 to 0.5).
    """
    return start + (end - start) * step / max(steps - 1, 1)
