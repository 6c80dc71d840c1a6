"""Leaves sublayers of a live model out, any set of them, and scores many such sets at once.

Sublayers are numbered in execution order: 2i is the attention and 2i + 1 the FFN of layer i. A kept-set says for each
whether it runs. One that does not is not computed: its module answers with zeros, as under a plan's `Skipped`, and
norms and residual connections stay the family's own.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from wide.data.progress import progress
from wide.errors import EvaluationError, NotAttachedError
from wide.evaluation.perplexity import window_losses
from wide.methods.calibration import num_predicted
from wide.methods.method import Effort
from wide.models.attach import is_attached
from wide.models.block_spec import BlockSpec, feed_forward, require_own_keys
from wide.models.discovery import discover
from wide.models.gates import input_of
from wide.models.having import having
from wide.models.observe import judging, model_device
from wide.plan import Dense, Half, LayerPlan, Plan, Skipped

KeptSets = npt.NDArray[np.bool_]
"""`[K, 2L]`, or `[2L]` for one: True where the sublayer runs."""


def whole_layers(keep: KeptSets) -> KeptSets:
    """Return the kept sublayers `[..., 2L]` of kept layers `[..., L]`."""
    return np.repeat(keep, 2, axis=-1)


def plan_without(removed: Iterable[int], num_layers: int) -> Plan:
    """Return the plan that leaves some sublayers out."""
    gone = set(removed)
    halves: list[Half] = [Skipped() if number in gone else Dense() for number in range(2 * num_layers)]
    return Plan(tuple(LayerPlan(attention=halves[i], ffn=halves[i + 1]) for i in range(0, 2 * num_layers, 2)))


def both_halves(layers: Iterable[int]) -> list[int]:
    """Return the sublayers of some layers."""
    return [number for layer in layers for number in (2 * int(layer), 2 * int(layer) + 1)]


class BlockGates:
    """Scores a causal LM without some of its sublayers; between calls the model is as it was.

    `ids` are calibration windows, int64 `[N, T]`; the outputs of all layers on one micro-batch of them are held in
    memory. `effort` counts the tokens read so far. Raises NotAttachedError if the model has routers or a plan already,
    and UnsupportedModelError if its structure, or the FFN of a layer, is unknown.
    """

    def __init__(self, model: nn.Module, ids: Tensor, batch_size: int) -> None:
        if is_attached(model):
            raise NotAttachedError("this model has routers or a plan already; call wide.detach(model) first")
        self.model, self.ids, self.batch_size = model, ids, batch_size
        self.effort = Effort()
        self.specs: tuple[BlockSpec, ...] = discover(model)
        require_own_keys(self.specs, "layers cannot be left out one by one; take another method")
        for spec in self.specs:
            feed_forward(spec)

    @property
    def num_layers(self) -> int:
        """Decoder layers, L."""
        return len(self.specs)

    @contextmanager
    def keeping(self, keep: KeptSets) -> Iterator[None]:
        """Run the model without the sublayers that are False in `keep` `[2L]` inside the block.

        An attention that is left out writes no keys and values, so run forwards with `use_cache=False`; to generate,
        attach `plan_without` them instead.
        """
        with ExitStack() as stack:
            for number in np.flatnonzero(~keep):
                _, part = self.specs[number // 2].sublayers()[number % 2]
                nothing = lambda *args, **kwargs: (torch.zeros_like(input_of(args, kwargs)), None)  # noqa: E731
                stack.enter_context(having(part.module, forward=torch.zeros_like if number % 2 else nothing))
            yield

    def dense_nll(self) -> float:
        """Return the mean loss of the whole model, nats per predicted token; raises EvaluationError if not finite."""
        nll = float(self.mean_nll(np.ones((1, 2 * self.num_layers), dtype=np.bool_), title="the whole model")[0])
        if not math.isfinite(nll):
            raise EvaluationError(f"the unpruned model's loss on the text is {nll}: try bfloat16 or float32")
        return nll

    def mean_nll(self, keeps: KeptSets, title: str) -> npt.NDArray[np.float64]:
        """Return the mean negative log-likelihood per predicted token under each kept-set, nats, float64 `[K]`.

        `keeps` is `[K, 2L]`. It equals a plain forward for each; work that neighbouring sets share is done once: sets
        are visited in the order of their prefixes, and a forward starts at the first layer that differs from the set
        before. Equal sets are scored once. The tokens of each different set count as effort, shared work included.
        """
        different, place = np.unique(keeps, axis=0, return_inverse=True)
        batches = self.ids.split(self.batch_size)
        device = model_device(self.model)
        sums = torch.zeros(len(different), dtype=torch.float64, device=device)
        # The first layer that runs otherwise than in the set before.
        starts = [0, *((different[1:] != different[:-1]).argmax(axis=1) // 2).tolist()]
        outputs: dict[int, Any] = {}
        work = [(batch, index) for batch in batches for index in range(len(different))]
        with judging(self.model):
            for batch, index in progress(work, title=title, unit="forward"):
                if index == 0:
                    moved = batch.to(device)
                with self._resuming(outputs, starts[index]), self.keeping(different[index]):
                    logits = self.model(input_ids=moved, use_cache=False).logits
                # A model spread over devices returns its logits on another one than it reads from.
                sums[index] += window_losses(logits, moved.to(logits.device))[0].sum().to(device)
        self.effort.tokens_forward += len(different) * self.ids.numel()
        return (sums.cpu().numpy() / num_predicted(self.ids))[place.reshape(-1)]

    @contextmanager
    def _resuming(self, outputs: dict[int, Any], start: int) -> Iterator[None]:
        """Let every layer before the start return the output of the last of them; note the others' as they come."""

        def note(index: int, _module: nn.Module, _args: Any, output: Any) -> None:
            outputs[index] = output

        with ExitStack() as stack:
            for spec in self.specs[:start]:
                stack.enter_context(having(spec.layer, forward=lambda *_, **__: outputs[start - 1]))
            for spec in self.specs[start:]:
                hook = functools.partial(note, spec.index)
                stack.callback(spec.layer.register_forward_hook(hook).remove)
            yield


def undefined_as_worst(nlls: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return losses with +inf for NaN: a set whose forward broke down is the worst one."""
    return np.where(np.isnan(nlls), np.inf, nlls)
