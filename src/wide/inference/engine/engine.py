"""What an optimised model runs when it is called: prompts straight through the layers, decode steps from CUDA graphs.

`generate()` and direct calls keep transformers' interface and semantics. The engine takes what it understands, one run
of causal keys a sequence with left padding, over memory of its own. All else runs masked, and a warning says why.
"""

import functools
import inspect
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from wide.errors import NotAttachedError, UnsupportedModelError, is_out_of_memory
from wide.inference.engine.batching import PagedBatching, handed_on
from wide.inference.engine.cache import EngineCache
from wide.inference.engine.calls import Answer, Kind, Masked, paged_step, prompt, read_call, require_hidden, step
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.generation import wrap_generation
from wide.inference.engine.layer import ForwardOptions
from wide.inference.engine.memory import Memory
from wide.inference.engine.snapshot import IN_TRAINING, Snapshot
from wide.inference.operators.table import OperatorTable
from wide.inference.reading.quantising import REFUSED_COPIES, refuse_gradients
from wide.models.attach import Attachment
from wide.models.gates import cache_of
from wide.models.having import having


class Engine:
    """Stands in for the forward of an optimised model; tables and weights are as `Decoder` takes them.

    Raises UnsupportedModelError if the model has a part that the engine does not compute.
    """

    def __init__(
        self, model: nn.Module, state: Attachment, tables: Sequence[OperatorTable], weights: str = "model"
    ) -> None:
        """Read the model, and take the place of its forward."""
        self._model: Any = model
        self._control, self._routers = state.control, state.routers()
        # What a static plan leaves is copied out of layers whose own weights stay.
        self._is_cut = not state.plan.is_routed and (state.plan.is_static or state.replaced is not None)
        parts = [part for spec in state.specs for part in spec.layer.modules()]
        self._copied = parts if self._is_cut else self._routers
        self._own_hooks = {handle.id for handle in state.handles}
        self._tables, self._weights = tuple(tables), weights
        self._plain: Any = model.forward
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self._lock = threading.RLock()
        self._said: set[str] = set()
        self._num_masked, self._is_removed = 0, False
        self._memory: Memory | None = None
        self._quantised: Sequence[nn.Linear] = ()
        self._read()
        self.batching: PagedBatching | None = None

        @functools.wraps(self._plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        named: dict[str, Any] = {"forward": forward, **REFUSED_COPIES}
        if hasattr(model, "_prepare_cache_for_generation"):
            named |= wrap_generation(model, self._claim)
        # What stood there before, such as a forward of the user's own, comes back.
        self._before = {name: vars(model).get(name) for name in named}
        vars(model).update(named)

    @property
    def decoder(self) -> Decoder:
        """The straight-line form of the model; raises UnsupportedModelError if it was changed and has none now."""
        if self._memory is None:
            raise UnsupportedModelError(self._unreadable)
        return self._memory.decoder

    def made_of(self) -> tuple[Any, ...]:
        """Return what graphs hold of the model: weights, thresholds, and whether routers decide."""
        return self._control.enabled, [each.threshold for each in self._routers], self._snapshot.now()

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Let the first layers alone compute, for checks: behind many layers of random routers rounding decides."""
        self._claim()
        with having(self, _memory=Memory(self.decoder.truncated(num_layers), self._lock)):
            yield

    def remove(self) -> None:
        """Give the model its own forward back and let go of all memory and graphs.

        If a batch runs, which raises NotAttachedError, or memory does not suffice, the model stays optimised.
        """
        with self._lock:
            if self.batching is not None:
                self.batching.release()
            if self._memory is not None:
                self._memory.release()
                try:
                    self._memory.decoder.give_back()
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        error.add_note(
                            "The model stays optimised; wide.deoptimize(model.cpu()) needs no memory of a GPU"
                        )
                    raise
            self._memory, self._is_removed = None, True
            if self.batching is not None:
                self.batching.remove()
            for name, before in self._before.items():
                vars(self._model).pop(name, None)
                if before is not None:
                    vars(self._model)[name] = before

    def _claim(self) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.claim()

    def _read(self) -> None:
        """Read the model into its straight-line form; if it has none, everything runs masked until the next reading."""
        if self._memory is not None and self._memory.decoder.quantised:
            self._memory.decoder.give_back()
        # Reading compares with the model's own forward, which must not come back here.
        self._memory, self._unreadable, self._is_reading = None, "", True
        try:
            with torch.inference_mode(False):
                decoder = Decoder(self._model, tables=self._tables, weights=self._weights)
            self._quantised = decoder.quantised
        except Exception as error:
            self._unreadable = str(error)
            raise
        finally:
            self._is_reading = False
            # Reading moves weights. Those that it refuses may become others.
            self._snapshot = Snapshot(self._model, [*self._copied, *self._quantised], self._own_hooks)
        self._memory = Memory(decoder, self._lock)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a masked call while it runs: reading the model tries its modules, which nobody else may use then."""
        with self._lock:
            self._num_masked += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_masked -= 1

    def _current(self, kind: Kind) -> Memory:
        """Return the memory of the model as it is now, read again if it has changed; steps trust their prompt."""
        if kind != "step":
            self._snapshot.require_unhooked()
        elif self._memory is not None:
            return self._memory
        try:
            if self._snapshot.now() != self._snapshot.then:
                if kind == "paged" and self._memory is not None:
                    # The next prompt reads the model again.
                    raise Masked("generate_batch after the weights have changed")
                if self._num_masked:
                    raise Masked("a changed model while other threads run it masked")
                if self.batching is not None and self.batching.is_running:
                    # The graphs of its steps hold the tensors of the last reading.
                    raise Masked("a changed model while generate_batch runs")
                self._read()
            if self._memory is None:
                raise UnsupportedModelError(self._unreadable)
        except UnsupportedModelError as error:
            instead = "" if self._weights == "model" else f"; its own weights compute, not {self._weights}"
            raise Masked(f"this model since it was changed ({error}{instead})") from error
        return self._memory

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            # Nothing of the engine can be traced.
            return self._plain(*args, **handed_on(self._model.config, kwargs))
        given = kwargs if not args else dict(zip(self._names, args, strict=False)) | kwargs
        try:
            # Memory that is made under inference mode could not be written outside of it.
            normal = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            with self._lock, normal, torch.no_grad():
                logits, cache = self._run(given)
        except Masked as masked:
            reason, cache = str(masked), cache_of(given)
            self._say(reason)
            if isinstance(cache, EngineCache):
                cache.leave_engine(reason)
                require_hidden(cache, given.get("attention_mask"))
            with self._counted():
                return self._plain(*args, **handed_on(self._model.config, kwargs))
        embedded: Any = given.get("inputs_embeds")
        asks = embedded is not None and embedded.requires_grad
        if torch.is_grad_enabled() and (asks or self._snapshot.learns()):
            # The operators have no gradients: whoever asks for one is told so.
            # An empty sum is 0 whatever the embeddings hold.
            logits = logits.detach() + embedded.flatten()[:0].sum() if asks else logits.detach().requires_grad_()
            logits.register_hook(refuse_gradients)
        out = CausalLMOutputWithPast(None, logits, cache)  # type: ignore[arg-type]
        return out.to_tuple() if given.get("return_dict") is False else out

    def _run(self, given: Mapping[str, Any]) -> Answer:
        """Return logits and cache; raise Masked if the masked model has to compute them."""
        if self._is_reading or self._is_removed:
            raise Masked
        model, control = self._model, self._control
        if model.training:
            raise NotAttachedError(IN_TRAINING)
        kind, x, cache = read_call(given, model.config)
        observed = control.observed
        if self._is_cut and not control.enabled:
            raise Masked("the dense model behind a static plan")
        if control.forced is not None:
            raise Masked("force_routing")
        if observed is not None and kind == "paged":
            raise Masked("capture_routing over several forwards")
        memory = self._current(kind)
        if kind != "paged" or not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            memory.follow([router.threshold for router in self._routers])
        run = ForwardOptions(routed=control.enabled, record=None if observed is None else [])
        if kind == "paged":
            logits = paged_step(memory, x, run, given)
        elif kind == "step":
            assert cache is not None
            logits = step(memory, x, cache, run, given)
        else:
            logits, cache = prompt(memory, x, cache, run, given, model.config)
        if observed is not None and run.record is not None and run.routed:
            for layer, masks in zip(observed, run.record, strict=False):
                layer.attention, layer.ffn = (None if mask is None else mask.view(*x.shape[:2], -1) for mask in masks)
                layer.attention_margin = layer.ffn_margin = None
            for router in self._routers:
                # One that lets nothing be skipped has not run.
                if router.threshold == -math.inf and router.layer_index < len(run.record):
                    everything = torch.ones(*x.shape[:2], router.num_groups, dtype=torch.bool, device=x.device)
                    setattr(observed[router.layer_index], router.half_layer, everything)
        return logits, cache

    def _say(self, reason: str) -> None:
        # Transformers warms up with one request as long as its whole cache.
        is_expected = self.batching is not None and self.batching.is_warming_up
        if reason and reason not in self._said and not is_expected:
            self._said.add(reason)
            warnings.warn(
                f"wide: {reason} does not run through the engine of wide.optimize: the masked model computes it, right "
                "but slower, and nothing is skipped",
                stacklevel=4,
            )
