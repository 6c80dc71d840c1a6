"""The entry point: makes wide's checkpoints known in every process of vLLM."""

import logging

TESTED = (0, 26), (0, 32)
"""The oldest and the newest version of vLLM that the modules fit; between these they are used with a warning."""
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

    wrong, fits = version_obstacle(vllm.__version__)
    if not fits:
        _LOGGER.warning("wide's checkpoints cannot be served: %s", wrong)
        return
    Limits.doubt = wrong
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


def version_obstacle(version: str) -> tuple[str, bool]:
    """Return what speaks against a version of vLLM, if anything, and whether wide's modules are used all the same.

    Versions between the tested ones are, and so are development builds without a number.
    """
    numbers = version.split(".")[:2]
    # A clone without tags calls itself 0.1.dev1.
    if not all(number.isdigit() for number in numbers) or numbers in (["0", "0"], ["0", "1"]):
        return "", True
    found = tuple(int(number) for number in numbers)
    if found in TESTED:
        return "", True
    oldest, newest = (".".join(map(str, each)) for each in TESTED)
    wanted = f"vLLM {version} was not tested with wide; install 'vllm=={newest}.*' or 'vllm=={oldest}.*'"
    return wanted, TESTED[0] < found < TESTED[1]
