"""Which implementation runs: named by the caller, or taken from the table of measurements."""

from dataclasses import dataclass, field

import torch

from wide.errors import ConfigError
from wide.kernels.contract import Case, Operator
from wide.kernels.tuning import Choice, TuningTable

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSet:
    """Chooses one implementation per operator and shape, explicitly.

    Args:
        device: Where the operators run.
        backend: Name of a backend, or 'auto': the fastest measured one.
        table: The measurements that 'auto' follows; measured tiles also serve a named backend.
    """

    device: torch.device
    backend: str = AUTO
    table: TuningTable = field(default_factory=TuningTable)

    def choose(self, operator: Operator, case: Case) -> Choice:
        """Return what to run for a case.

        'auto' without a measurement takes 'dense' where the operator has it, so that it never loses to dense; else
        'triton' on devices that run it, else 'torch'.

        Raises:
            ConfigError: If the operator has no backend of that name.
            UnsupportedBackendError: If the named or measured backend cannot run the case here.
        """
        measured = self.table.measured(operator.name, self.device, case)
        if self.backend != AUTO:
            if self.backend not in operator.backends:
                raise ConfigError(
                    f"{operator.name} has no backend {self.backend!r}; choose one of {sorted(operator.backends)} or "
                    f"'{AUTO}'"
                )
            operator.require(self.backend, self.device, case)
            return measured if measured and measured.backend == self.backend else Choice(backend=self.backend)
        if measured is not None:
            operator.require(measured.backend, self.device, case)
            return measured
        order = ("dense", "triton", "torch")
        name = next(n for n in order if n in operator.backends and operator.supports(n, self.device, case) is None)
        return Choice(backend=name)
