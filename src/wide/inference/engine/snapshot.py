"""What the engine has read of a model, and whether the model is still that."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from wide.inference.reading.quantising import state_of
from wide.models.attach import Attachment

_HARMLESS_HOOKS = "transformers.utils.output_capturing"


class Snapshot:
    """Modules, weights, routers, hooks and forwards of a model at one moment.

    Args:
        model: Attached.
        state: What wide knows of it.
        quantised: Layers of whose weights the engine has copies.
    """

    def __init__(self, model: nn.Module, state: Attachment, quantised: Sequence[nn.Linear]) -> None:
        """Look at all modules."""
        self._model, self._state, self._quantised = model, state, quantised
        self._parts = [part for part in model.modules() if part is not model]
        self._forwards = [vars(part).get("forward") for part in self._parts]
        self._own_hooks = {handle.id for handle in state.handles}
        self._then = self.now()

    def now(self) -> tuple[Any, ...]:
        """Return what the engine has copied from the model, or points at; steps trust that it stays."""
        parameters = [each for part in self._parts for each in part._parameters.values() if each is not None]
        copied = [*self._state.routers(), *self._quantised]
        matrices = [each for part in copied for each in part._parameters.values()]
        versions = [None if each is None else state_of(each)[1] for each in matrices]
        children = [child for part in (self._model, *self._parts) for child in part._modules.values()]
        return (*children, *(parameter.data_ptr() for parameter in parameters), *versions)

    def has_changed(self) -> bool:
        """Return whether modules were replaced, weights moved or routers written since."""
        return self.now() != self._then

    def has_hooks(self) -> bool:
        """Return whether a module has hooks that are not wide's, or another forward than before."""
        forwards = [vars(part).get("forward") for part in self._parts]
        return any(map(self._is_foreign, self._parts)) or forwards != self._forwards

    def learns(self) -> bool:
        """Return whether a parameter wants a gradient."""
        return any(each.requires_grad for part in self._parts for each in part._parameters.values() if each is not None)

    def is_training(self) -> bool:
        """Return whether a module is in training mode."""
        return any(part.training for part in self._parts)

    def _is_foreign(self, module: nn.Module) -> bool:
        hooks = {**module._forward_hooks, **module._forward_pre_hooks}
        # transformers leaves hooks behind that do nothing once a call has asked for hidden states.
        return any(
            number not in self._own_hooks and not getattr(hook, "__module__", "").startswith(_HARMLESS_HOOKS)
            for number, hook in hooks.items()
        )
