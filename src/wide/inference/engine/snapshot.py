"""What the engine has read of a model, and whether the model is still that."""

from collections.abc import Sequence, Set
from typing import Any

from torch import nn

from wide.errors import NotAttachedError
from wide.inference.engine.calls import Masked
from wide.inference.reading.quantising import state_of

IN_TRAINING = (
    "this model, or one of its modules, is in training mode, and an optimised model is for inference; call "
    "wide.deoptimize(model) first, or model.eval()"
)
_HARMLESS_HOOKS = "transformers.utils.output_capturing"


class Snapshot:
    """Modules, weights, routers, hooks and forwards of a model at one moment; `then` is what `now` was.

    The engine has copies of the weights of modules that are `copied`; `own_hooks` are the numbers of wide's hooks.
    """

    def __init__(self, model: nn.Module, copied: Sequence[nn.Module], own_hooks: Set[int]) -> None:
        self._model, self._copied, self._own_hooks = model, copied, own_hooks
        self._parts = [part for part in model.modules() if part is not model]
        self._forwards = [vars(part).get("forward") for part in self._parts]
        self.then = self.now()

    def now(self) -> tuple[Any, ...]:
        """Return what the engine has copied from the model, or points at; steps trust that it stays."""
        parameters = [each for part in self._parts for each in part._parameters.values() if each is not None]
        matrices = [each for part in self._copied for each in part._parameters.values()]
        versions = [None if each is None else state_of(each)[1] for each in matrices]
        children = [child for part in (self._model, *self._parts) for child in part._modules.values()]
        return (*children, *(parameter.data_ptr() for parameter in parameters), *versions)

    def require_unhooked(self) -> None:
        """Raise NotAttachedError if a part trains, Masked if one has another hook or forward than before."""
        # Linear layers and embeddings are the same in training, and `resize_token_embeddings` leaves new ones in it.
        if any(part.training for part in self._parts if type(part) not in (nn.Linear, nn.Embedding)):
            raise NotAttachedError(IN_TRAINING)
        hooks = [each for part in self._parts for each in (part._forward_hooks, part._forward_pre_hooks) if each]
        # transformers leaves hooks behind that do nothing once a call has asked for hidden states.
        is_hooked = any(
            number not in self._own_hooks and not getattr(hook, "__module__", "").startswith(_HARMLESS_HOOKS)
            for found in hooks
            for number, hook in found.items()
        )
        if is_hooked or [vars(part).get("forward") for part in self._parts] != self._forwards:
            raise Masked("a hook on one of its modules")

    def learns(self) -> bool:
        """Return whether a parameter wants a gradient."""
        return any(each.requires_grad for part in self._parts for each in part._parameters.values() if each is not None)
