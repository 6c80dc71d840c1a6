"""Goes back to the routers of the lowest loss of late, when the loss has risen, and on at half the learning rate.

Routers that lose a group that matters rarely win it back by themselves: the loss rises in some ten steps, and stays.
"""

import statistics
import warnings
from collections.abc import Mapping

import torch
from torch import nn

from wide.training.checkpoint import Checkpoint, restore, snapshot
from wide.training.parallel import DataParallel

EVERY = 10
"""Steps whose mean is judged."""
# A rise is so many nats, and so many deviations of the mean, above the lowest mean of so many steps.
_NATS, _DEVIATIONS, _AGE = 0.3, 6, 100
# Losses count where so much of the target is skipped.
_NEAR = 0.9
_TIMES = 3


class LossWatch:
    """Sees each step's loss, and keeps the routers and the optimiser as they were at the lowest mean, on the CPU.

    Args:
        lowest: Where to go back to.
        recent: Losses of the last steps at the target, at most `EVERY`.
        times: How often the loss has risen; more than three times is only told.
    """

    def __init__(self, title: str, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._title, self._parameters, self._optimizer = title, parameters, optimizer
        self.lowest: Checkpoint | None = None
        self.recent: list[float] = []
        self.times = 0

    @property
    def scale(self) -> float:
        """What the learning rate is multiplied by: from the same routers, at the same rate, the loss rises again."""
        return 0.5 ** min(self.times, _TIMES)

    def see(self, step: int, found: Mapping[str, float], parallel: DataParallel) -> None:
        """Take in what a step measured, and after each `EVERY` steps, judge their mean."""
        if found["sparsity.mean"] < _NEAR * found["sparsity.target"]:
            self.recent.clear()
        self.recent = [*self.recent, found["lm_loss"]][-EVERY:]
        if (step + 1) % EVERY or len(self.recent) < EVERY:
            return
        loss, lowest = parallel.agree(statistics.fmean(self.recent)), self.lowest
        if lowest is None or loss < lowest.measured["loss"] or step - lowest.step >= _AGE:
            deviation = statistics.stdev(self.recent) / EVERY**0.5
            measured = {"loss": loss, "deviation": deviation}
            self.lowest = snapshot(step + 1, self._parameters, self._optimizer, measured=measured)
        elif loss > lowest.measured["loss"] + max(_NATS, _DEVIATIONS * lowest.measured["deviation"]):
            self._go_back(step, loss, lowest, tells=parallel.is_first)

    def _go_back(self, step: int, loss: float, lowest: Checkpoint, *, tells: bool) -> None:
        self.times += 1
        advice = f"the routers go back to those of step {lowest.step}, and on at half the learning rate"
        if self.times > _TIMES:
            advice = "it rarely falls as low again; try another seed"
        else:
            restore(lowest, self._parameters, self._optimizer)
        if tells and self.times <= _TIMES + 1:
            risen = f"the loss has risen from {lowest.measured['loss']:.2f} to {loss:.2f}"
            warnings.warn(f"{self._title}, step {step}: {risen}, so {advice}", stacklevel=2)
