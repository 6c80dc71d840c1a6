"""What a run shows and keeps of its course: a bar or plain lines, records, and optionally TensorBoard or a tracker."""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from wide.data.progress import bar_of
from wide.errors import ConfigError, MissingExtraError
from wide.records import Record, RecordFile, read_records
from wide.writing import write_whole

TrackerName = Literal["wandb", "trackio"]
_PROJECT = "wide"

_UNITS = {
    **dict.fromkeys(("loss", "lm_loss", "distillation"), "nat/token"),
    **dict.fromkeys(("sparsity.mean", "sparsity.attention", "sparsity.ffn", "sparsity.target"), "share"),
    **dict.fromkeys(("temperature", "learning_rate", "gradient_norm"), "1"),
    "tokens_per_second": "token/s",
}


def require_tracker(name: TrackerName | None) -> None:
    """Refuse a tracker that cannot be used before anything has been trained; None is always fine.

    Raises ConfigError if there is no such tracker, and MissingExtraError if its library is not installed.
    """
    if name is None:
        return
    if name not in get_args(TrackerName):
        raise ConfigError(f"tracker {name!r} is not one of {list(get_args(TrackerName))}; TensorBoard is --tensorboard")
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"the tracker {name} is not installed: pip install {name}, or leave --tracker out")


def require_tensorboard(wanted: bool | None) -> str | None:
    """Return what to say where TensorBoard is left out because it is not installed, else None.

    True insists on it, and raises MissingExtraError if it is not installed; None takes it where it is, False does
    without.
    """
    if wanted is False or importlib.util.find_spec("tensorboard") is not None:
        return None
    if wanted:
        raise MissingExtraError("TensorBoard is not installed: pip install 'wide[log]', or leave --tensorboard out")
    return "TensorBoard is not installed (pip install 'wide[log]'): curves go to metrics.jsonl and the report alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """What a training stage is told besides its settings.

    Args:
        title: Name of the stage, e.g. 'stage 1'.
        fingerprint: Hash of what the course of the run depends on; `facts` are as of `CheckpointFolder`.
        train_routers: Otherwise only LoRA is trained, on the routing of inference.
        anneal: Follow the temperature schedule; otherwise stay at its end.
    """

    title: str
    output: Path | None = None
    resume: bool = False
    fingerprint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    train_routers: bool = True
    anneal: bool = True
    tensorboard: str | Path | None = None
    tracker: TrackerName | None = None


class ProgressLog:
    """Shows and records steps, under the title of the stage; silent on all processes but the first.

    `first_step` counts the steps that were done before, whose records are continued; `device` is named in every record.
    """

    def __init__(
        self, options: StageOptions, *, steps: int, first_step: int, device: str = "", silent: bool = False
    ) -> None:
        title, folder, tracker = options.title, options.output, options.tracker
        self._title, self._silent, self._steers = title, silent, options.train_routers
        self._bar = bar_of(total=steps, initial=first_step, desc=title, unit="step", leave=True)
        self._records, self._board = None, None
        self._tracker: Any = None
        if folder is not None and not silent:
            path = folder / "metrics.jsonl"
            _forget_from(path, title, first_step)
            self._records = RecordFile(path, config_fingerprint=options.fingerprint, device=device)
        if options.tensorboard is not None and not silent:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtraError("TensorBoard is not installed: pip install 'wide[log]'") from error
            # Steps that are done again replace those of the interrupted run.
            self._board = SummaryWriter(str(options.tensorboard), purge_step=first_step or None)
        if tracker is not None and not silent:
            # Where curves go and who owns them is the library's own configuration.
            name = title if folder is None else f"{folder.resolve().parent.name}, {title}"
            self._tracker = importlib.import_module(tracker).init(project=_PROJECT, name=name)
            # trackio has no word for a run that failed.
            self._failure = {"exit_code": 1} if tracker == "wandb" else {}

    def add(self, points: list[tuple[int, dict[str, float]]]) -> None:
        """Show the last point and record all of them; a point is (step, name -> value)."""
        if self._silent or not points:
            return
        step, last = points[-1]
        self._bar.set_postfix_str(_summary(last, steers=self._steers), refresh=False)
        self._bar.n = step + 1
        self._bar.refresh()
        if self._records is not None:
            self._records.append(
                Record(
                    subject=self._title,
                    metric=f"training.{name}",
                    value=value,
                    unit=_UNITS[name],
                    step=at,
                    where="training",
                )
                for at, values in points
                for name, value in values.items()
            )
        for at, values in points:
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(f"{self._title}/{name}", value, at)
            if self._tracker is not None:
                self._tracker.log(values, step=at)

    def close(self, *, failed: bool = False) -> None:
        """Finish the bar and the files; a run that `failed` ended early, and no tracker calls it finished."""
        self._bar.close()
        if self._board is not None:
            self._board.close()
        if self._tracker is not None:
            self._tracker.finish(**(self._failure if failed else {}))


def _summary(values: dict[str, float], *, steers: bool) -> str:
    routers = (
        f"skipped attention {values['sparsity.attention']:.1%} FFN {values['sparsity.ffn']:.1%} (target "
        f"{values['sparsity.target']:.1%}), temperature {values['temperature']:.2f}, "
    )
    return (
        f"loss {values['loss']:.3f}, LM {values['lm_loss']:.3f}, {routers if steers else ''}"
        f"{values['tokens_per_second']:,.0f} tokens/s"
    )


def _forget_from(path: Path, subject: str, first_step: int) -> None:
    if not path.is_file():
        return
    records, _ = read_records(path)
    kept = [r for r in records if r.subject != subject or (r.step is not None and r.step < first_step)]
    if len(kept) < len(records):
        write_whole(path, "".join(json.dumps(asdict(r), sort_keys=True) + "\n" for r in kept))
