"""Services that keep the curves of a training run, through their own libraries."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal, get_args

from wide.errors import ConfigError, MissingExtraError

TrackerName = Literal["wandb", "trackio"]
_PROJECT = "wide"


def require_tracker(name: TrackerName | None) -> None:
    """Refuse a tracker that cannot be used before anything has been trained; None is always fine.

    Raises:
        ConfigError: If there is no such tracker.
        MissingExtraError: If its library is not installed.
    """
    if name is None:
        return
    if name not in get_args(TrackerName):
        raise ConfigError(f"tracker {name!r} is not one of {list(get_args(TrackerName))}; TensorBoard is --tensorboard")
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"the tracker {name} is not installed: pip install {name}, or leave --tracker out")


def require_tensorboard(wanted: bool | None) -> str | None:
    """Refuse TensorBoard that is wanted and cannot be used before anything has been trained.

    Args:
        wanted: True insists on it, None takes it where it is installed, False does without.

    Returns:
        What to say where it is left out because it is not installed, else None.

    Raises:
        MissingExtraError: If it is insisted on and not installed.
    """
    if wanted is False or importlib.util.find_spec("tensorboard") is not None:
        return None
    if wanted:
        raise MissingExtraError("TensorBoard is not installed: pip install 'wide[log]', or leave --tensorboard out")
    return "TensorBoard is not installed (pip install 'wide[log]'): curves go to metrics.jsonl and the report alone"


class Tracker:
    """One run of a tracker; where it goes and who owns it is the library's own configuration.

    Args:
        name: Of the tracker.
        title: Of the stage.
        folder: Of the stage; the folder above it names the run.

    Raises:
        ConfigError: If there is no such tracker.
        MissingExtraError: If its library is not installed.
    """

    def __init__(self, name: TrackerName, title: str, folder: Path | None) -> None:
        """Begin the run."""
        require_tracker(name)
        self._name = name
        library: Any = importlib.import_module(name)
        run = title if folder is None else f"{folder.resolve().parent.name}, {title}"
        self._run = library.init(project=_PROJECT, name=run)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Keep the values of a step."""
        self._run.log(values, step=step)

    def close(self, *, failed: bool = False) -> None:
        """End the run and let the library send what it still holds.

        Args:
            failed: Whether it ended before its last step; trackio has no word for that.
        """
        if failed and self._name == "wandb":
            self._run.finish(exit_code=1)
        else:
            self._run.finish()
