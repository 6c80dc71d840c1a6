"""What a comparison calls its measurements: method, sparsity, seed, and whether LoRA was added."""

from dataclasses import dataclass

_CALIBRATED, _RECOVERED = "calibrated", "recovered"


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One point of a comparison's grid.

    Args:
        method: Name of the row.
        sparsity: Target, in [0, 1); 0 for the dense model.
        seed: Of calibration and training.
    """

    method: str
    sparsity: float
    seed: int

    @property
    def folder(self) -> str:
        """Name of the folder that holds what the cell leaves behind."""
        return f"{self.method}-{self.sparsity:g}-seed{self.seed}"

    @property
    def title(self) -> str:
        """Name for a line on the terminal."""
        return f"{self.method}{'' if not self.sparsity else f' {self.sparsity:.4g}'} seed {self.seed}"

    def subject(self, *, recovered: bool) -> str:
        """Return the subject of the cell's records, after calibration or after LoRA."""
        return f"{self.method}/{self.sparsity:g}/{self.seed}/{_RECOVERED if recovered else _CALIBRATED}"


def read_subject(subject: str) -> tuple[Cell, bool] | None:
    """Return the cell that a subject names and whether LoRA was added; None for subjects of another kind."""
    parts = subject.split("/")
    if len(parts) != 4 or parts[3] not in (_CALIBRATED, _RECOVERED):
        return None
    try:
        return Cell(parts[0], float(parts[1]), int(parts[2])), parts[3] == _RECOVERED
    except ValueError:
        return None


def read_folder(name: str) -> Cell | None:
    """Return the cell whose folder has this name, None where it is no cell's."""
    method, _, rest = name.rpartition("-seed")
    method, _, sparsity = method.rpartition("-")
    try:
        return Cell(method, float(sparsity), int(rest)) if method else None
    except ValueError:
        return None
