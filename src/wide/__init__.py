"""Token-wise dynamic width pruning of language models.

    import wide

    model = wide.prune("some/model", "some/text", sparsity=0.5, output="run")

Names are looked up when they are first used, so that `import wide` is light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wide.version import __version__

if TYPE_CHECKING:
    from wide.comparison.compare import compare
    from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, WideConfig
    from wide.evaluation.evaluate import evaluate
    from wide.evaluation.routing_stats import routing_stats
    from wide.inference.optimize import deoptimize, optimize
    from wide.materialisation.checkpoint import load_checkpoint, register_auto_classes, save_checkpoint
    from wide.materialisation.materialise import materialise
    from wide.models.adapter import load, save
    from wide.models.attach import attach, detach
    from wide.models.dial import set_sparsity
    from wide.models.lora import merge_lora
    from wide.models.observe import capture_routing, force_routing
    from wide.plan import Plan
    from wide.training.stages import prune, recover

_HOMES = {
    "ObjectiveConfig": "wide.config",
    "Plan": "wide.plan",
    "RecoverConfig": "wide.config",
    "StageConfig": "wide.config",
    "WideConfig": "wide.config",
    "attach": "wide.models.attach",
    "capture_routing": "wide.models.observe",
    "compare": "wide.comparison.compare",
    "deoptimize": "wide.inference.optimize",
    "detach": "wide.models.attach",
    "evaluate": "wide.evaluation.evaluate",
    "force_routing": "wide.models.observe",
    "load": "wide.models.adapter",
    "load_checkpoint": "wide.materialisation.checkpoint",
    "materialise": "wide.materialisation.materialise",
    "merge_lora": "wide.models.lora",
    "optimize": "wide.inference.optimize",
    "prune": "wide.training.stages",
    "recover": "wide.training.stages",
    "register_auto_classes": "wide.materialisation.checkpoint",
    "routing_stats": "wide.evaluation.routing_stats",
    "save": "wide.models.adapter",
    "save_checkpoint": "wide.materialisation.checkpoint",
    "set_sparsity": "wide.models.dial",
}

__all__ = [
    "ObjectiveConfig",
    "Plan",
    "RecoverConfig",
    "StageConfig",
    "WideConfig",
    "__version__",
    "attach",
    "capture_routing",
    "compare",
    "deoptimize",
    "detach",
    "evaluate",
    "force_routing",
    "load",
    "load_checkpoint",
    "materialise",
    "merge_lora",
    "optimize",
    "prune",
    "recover",
    "register_auto_classes",
    "routing_stats",
    "save",
    "save_checkpoint",
    "set_sparsity",
]


def __getattr__(name: str) -> Any:
    """Return a public name, importing its module at the first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wide' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted({*globals(), *__all__})
