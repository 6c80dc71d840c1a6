"""What the engine has read of a model, and whether the model is still that."""

from typing import Any

from torch import nn

from wide.models.attach import Attachment


class Snapshot:
    """Weights, routers, hooks and forwards of a model at one moment."""

    def __init__(self, model: nn.Module, state: Attachment) -> None:
        self._parts = [part for part in model.modules() if part is not model]
        self._hooks = [_hooks_of(part) for part in self._parts]
        self._state = state
        self._then = self.now()

    def now(self) -> tuple[Any, ...]:
        """Return what the engine has copied from the model, or points at; steps trust that it stays."""
        parameters = [each for part in self._parts for each in part._parameters.values() if each is not None]
        matrices = [
            each for router in self._state.routers() for each in router._parameters.values() if each is not None
        ]
        versions = [None if matrix.is_inference() else matrix._version for matrix in matrices]
        return (*(parameter.data_ptr() for parameter in parameters), *versions)

    def has_changed(self) -> bool:
        """Return whether weights have moved or routers have been written since."""
        return self.now() != self._then

    def has_hooks(self) -> bool:
        """Return whether a module has got hooks or a forward of its own since."""
        return any(_hooks_of(part) != known for part, known in zip(self._parts, self._hooks, strict=True))

    def learns(self) -> bool:
        """Return whether a parameter wants a gradient."""
        return any(each.requires_grad for part in self._parts for each in part._parameters.values() if each is not None)

    def is_training(self) -> bool:
        """Return whether a module is in training mode."""
        return any(part.training for part in self._parts)


def _hooks_of(module: nn.Module) -> tuple[int, bool]:
    """Return how many hooks a module has, and whether it has a forward of its own."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks), "forward" in vars(module)
