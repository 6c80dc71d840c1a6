"""The entry point: makes wide's checkpoints known in every process of vLLM."""

import logging

OLDEST, BELOW = (0, 26), (0, 27)
"""Versions of vLLM that the modules fit: from the first on, below the second."""
_LOGGER = logging.getLogger("vllm.wide")


def register() -> None:
    """Make the model types, classes and limits of wide's checkpoints known to vLLM.

    vLLM calls this in each of its processes, some of them more than once. What goes wrong is logged, never raised:
    other models must be served all the same.
    """
    try:
        _register()
    except Exception as error:
        _LOGGER.warning("wide's checkpoints cannot be served: %s: %s", type(error).__name__, error)


def _register() -> None:
    import vllm
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import wide  # noqa: F401  makes the types of checkpoints known to transformers
    from wide.vllm.limits import FAMILIES, Limits

    wrong = version_obstacle(vllm.__version__)
    if wrong is not None:
        _LOGGER.warning("wide's checkpoints cannot be served: %s", wrong)
        return
    names = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)}
    classes = {
        f"{kind}{name}": f"wide.vllm.backend:{kind}TransformersForCausalLM"
        for kind in ("Wide", "Sliced")
        for name in names
    }
    natives = [f"Wide{word}ForCausalLM" for word in FAMILIES.values()]
    classes |= {name: f"wide.vllm.model:{name}" for name in natives}
    known = ModelRegistry.get_supported_archs()
    for name, place in classes.items():
        MODELS_CONFIG_MAP[name] = Limits
        if name not in known:
            # By name, so that nothing of a model is imported before it is served.
            ModelRegistry.register_model(name, place)


def version_obstacle(version: str) -> str | None:
    """Return why wide's modules do not fit a version of vLLM, or None; development builds of none are let through."""
    numbers = version.split(".")[:2]
    if not all(number.isdigit() for number in numbers) or numbers == ["0", "0"]:
        return None
    found = tuple(int(number) for number in numbers)
    if OLDEST <= found < BELOW:
        return None
    oldest, below = (".".join(map(str, each)) for each in (OLDEST, BELOW))
    return f"vLLM {version} is not one of the versions that wide knows; install 'vllm>={oldest},<{below}'"
