"""Token-wise dynamic width pruning of language models: `wide.prune("some/model", "some/text", sparsity=0.5)`.

Names are looked up when they are first used, so that `import wide` is light. transformers' Auto classes, pipelines and
whatever uses them open wide's checkpoints in a process that has imported wide, before or after transformers.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wide.version import __version__

if TYPE_CHECKING:
    from wide.comparison.compare import compare as compare
    from wide.config import ObjectiveConfig as ObjectiveConfig
    from wide.config import RecoverConfig as RecoverConfig
    from wide.config import StageConfig as StageConfig
    from wide.config import WideConfig as WideConfig
    from wide.evaluation.evaluate import evaluate as evaluate
    from wide.evaluation.routing_stats import routing_stats as routing_stats
    from wide.inference.optimize import deoptimize as deoptimize
    from wide.inference.optimize import optimize as optimize
    from wide.materialisation.checkpoint import load_checkpoint as load_checkpoint
    from wide.materialisation.checkpoint import save_checkpoint as save_checkpoint
    from wide.materialisation.materialise import materialise as materialise
    from wide.models.adapter import load as load
    from wide.models.adapter import push_to_hub as push_to_hub
    from wide.models.adapter import save as save
    from wide.models.attach import attach as attach
    from wide.models.attach import detach as detach
    from wide.models.lora import merge_lora as merge_lora
    from wide.models.observe import capture_routing as capture_routing
    from wide.models.observe import force_routing as force_routing
    from wide.models.thresholds import set_sparsity as set_sparsity
    from wide.plan import Plan as Plan
    from wide.runs.text import generate as generate
    from wide.training.callback import RouterCallback as RouterCallback
    from wide.training.stages import prune as prune
    from wide.training.stages import recover as recover

_NAMES = {
    "comparison.compare": ("compare",),
    "config": ("ObjectiveConfig", "RecoverConfig", "StageConfig", "WideConfig"),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.routing_stats": ("routing_stats",),
    "inference.optimize": ("deoptimize", "optimize"),
    "materialisation.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "materialisation.materialise": ("materialise",),
    "models.adapter": ("load", "push_to_hub", "save"),
    "models.attach": ("attach", "detach"),
    "models.thresholds": ("set_sparsity",),
    "models.lora": ("merge_lora",),
    "models.observe": ("capture_routing", "force_routing"),
    "plan": ("Plan",),
    "runs.text": ("generate",),
    "training.callback": ("RouterCallback",),
    "training.stages": ("prune", "recover"),
}
_HOMES = {name: f"wide.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wide' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_AUTO = "transformers.models.auto.configuration_auto"


class _Checkpoints(dict[Any, Any]):
    """What others registered with transformers' AutoConfig, and wide's classes, made when they are first asked for."""

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and str(key).startswith("wide_"):
            import_module("wide.materialisation.checkpoint").register(str(key))
        return super().__contains__(key)


class _WithTransformers:
    """Waits for transformers' registry of models to be imported: importing it from here would take seconds."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        """Find nothing but that registry, which is extended as soon as it has run."""
        if name != _AUTO:
            return None
        sys.meta_path.remove(_WithTransformers)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run: Any = spec.loader.exec_module

            def run_and_extend(module: ModuleType) -> None:
                run(module)
                _extend(module)

            spec.loader.exec_module = run_and_extend  # type: ignore[method-assign]
        return spec


def _extend(registry: ModuleType) -> None:
    known: Any = registry.CONFIG_MAPPING
    known._extra_content = _Checkpoints(known._extra_content)


if _AUTO in sys.modules:
    _extend(sys.modules[_AUTO])
else:
    sys.meta_path.insert(0, _WithTransformers)
