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
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from wide.materialisation.checkpoint import register as register_type
    from wide.vllm.limits import FAMILIES, Limits

    wrong = version_obstacle(vllm.__version__)
    if wrong is not None:
        _LOGGER.warning("wide's checkpoints cannot be served: %s", wrong)
        return
    # What vLLM takes for any family that it does not know.
    MODELS_CONFIG_MAP.setdefault("TransformersForCausalLM", Limits)
    for family, word in FAMILIES.items():
        name = f"Wide{word}ForCausalLM"
        register_type(f"wide_{family}")
        MODELS_CONFIG_MAP[name] = Limits
        if name not in ModelRegistry.get_supported_archs():
            # By name, so that nothing of a model is imported before it is served.
            ModelRegistry.register_model(name, f"wide.vllm.model:{name}")


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
