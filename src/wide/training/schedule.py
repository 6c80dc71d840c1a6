"""Learning rate, temperature, sparsity target and weight as pure functions of the optimiser step, counted from 0."""

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


def sparsity_target(step: int, *, steps: int, final: float, ramp: float) -> float:
    """Return the target sparsity: rising linearly over the first `ramp` share of the steps, then constant."""
    rising = round(ramp * steps)
    return final if step >= rising else final * (step + 1) / rising


def sparsity_weight(step: int, *, steps: int, final: float, ramp: bool) -> float:
    """Return the weight of the sparsity term: constant, or from 0 at the first step to `final` at the last.

    Source: D-LLM's released training code, a quarter of a sine.
    """
    return final * math.sin(0.5 * math.pi * step / (steps - 1)) if ramp and steps > 1 else final
