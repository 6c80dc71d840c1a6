"""What an optimised model runs when it is called: prompts straight through the layers, decode steps from CUDA graphs.

`generate()` and direct calls keep transformers' interface and semantics. The engine takes what it understands, one run
of causal keys a sequence with left padding, over memory of its own. Everything else runs masked, as before
`wide.optimize`, with one warning that names the reason.
"""

import functools
import inspect
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from wide.errors import NotAttachedError, UnsupportedModelError
from wide.inference.engine.batching import ARGUMENTS, PagedBatching, handed_on, is_paged_step
from wide.inference.engine.calls import Answer, Masked, paged_step, prompt, step
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.engine_cache import EngineCache
from wide.inference.engine.generation import is_trusted, reason_of, wrap_generation
from wide.inference.engine.inputs import KNOWN, read_padding
from wide.inference.engine.memory import Memory
from wide.inference.engine.snapshot import Snapshot
from wide.inference.operators.table import OperatorTable
from wide.inference.reading.quantising import REFUSED_COPIES, refuse_gradients
from wide.models.attach import Attachment
from wide.models.gates import cache_of

_KNOWN_PAGED = KNOWN | ARGUMENTS
# Longer contexts run masked: their table of positions alone would take hundreds of megabytes.
_MAX_LENGTH = 131072


def _require_known(model: Any, control: Any, x: Tensor, given: Mapping[str, Any], *, is_paged: bool) -> None:
    """Refuse calls that ask for something that the engine does not compute."""
    if model.training:
        raise NotAttachedError(
            "this model is optimised, which is for inference; call wide.deoptimize(model) first, or model.eval()"
        )
    if control.forced is not None:
        raise Masked("force_routing")
    if control.observed is not None and (control.keep_history or is_paged):
        raise Masked("capture_routing over several forwards")
    if not is_paged and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Masked("a call that is captured in a CUDA graph")
    if torch.is_autocast_enabled(x.device.type):
        raise Masked("autocast")
    for name, value in given.items():
        if name not in (_KNOWN_PAGED if is_paged else KNOWN) and value is not None and value is not False:
            raise Masked(f"the argument {name}=")
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, name, False):
            raise Masked(f"{name}=")


def _decoder(model: Any, tables: Sequence[OperatorTable], weights: str) -> Decoder:
    """Return a model's straight-line form, for texts as long as it has positions for."""
    config = model.config.get_text_config(decoder=True)
    length = min(int(getattr(config, "max_position_embeddings", None) or _MAX_LENGTH), _MAX_LENGTH)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        # Beyond, queries grow with their position.
        length = min(length, int(rope["original_max_position_embeddings"]))
    with torch.inference_mode(False):
        return Decoder(model, max_length=length, tables=tables, weights=weights)


class Engine:
    """Stands in for the forward of an optimised model.

    Args:
        tables: Which operator runs where, for each layer.
        weights: Format of the layers' projections: 'model', 'int8' or 'w8a8'.

    Raises:
        UnsupportedModelError: If the model has a part that the engine does not compute.
    """

    def __init__(
        self, model: nn.Module, state: Attachment, tables: Sequence[OperatorTable], weights: str = "model"
    ) -> None:
        """Read the model, and take the place of its forward."""
        self._model: Any = model
        self._state, self._tables, self._weights = state, tuple(tables), weights
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
        """The straight-line form of the model.

        Raises:
            UnsupportedModelError: If the model has been changed into one that the engine does not compute.
        """
        return self._ready.decoder

    def made_of(self) -> tuple[Any, ...]:
        """Return what graphs hold of the model: weights, thresholds, and whether routers decide."""
        return self._state.control.enabled, [each.threshold for each in self._state.routers()], self._snapshot.now()

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Let the first layers alone compute, for checks: behind many layers of random routers rounding decides."""
        self._claim()
        whole, self._memory = self._memory, Memory(self.decoder.truncated(num_layers), self._lock)
        try:
            yield
        finally:
            self._memory = whole
            self._ready.follow()

    def remove(self) -> None:
        """Give the model its own forward back and let go of all memory and graphs.

        Raises:
            NotAttachedError: If a batch runs. As where memory does not suffice, the model then stays optimised.
        """
        with self._lock:
            if self.batching is not None:
                self.batching.release()
            if self._memory is not None:
                self._memory.release()
                try:
                    self._memory.decoder.give_back()
                except torch.OutOfMemoryError as error:
                    error.add_note("The model stays optimised; wide.deoptimize(model.cpu()) needs no memory of a GPU")
                    raise
            self._memory, self._is_removed = None, True
            if self.batching is not None:
                self.batching.remove()
            for name, before in self._before.items():
                vars(self._model).pop(name, None)
                if before is not None:
                    vars(self._model)[name] = before

    @property
    def _ready(self) -> Memory:
        """The memory, of a model that could be read."""
        if self._memory is None:
            raise UnsupportedModelError(self._unreadable)
        return self._memory

    def _claim(self) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.claim()

    def _read(self) -> None:
        """Read the model into its straight-line form.

        Raises:
            UnsupportedModelError: If it has none; until the next reading everything runs masked.
        """
        if self._memory is not None and self._memory.decoder.quantised:
            self._memory.decoder.give_back()
        # Reading compares with the model's own forward, which must not come back here.
        self._memory, self._unreadable, self._is_reading = None, "", True
        try:
            decoder = _decoder(self._model, self._tables, self._weights)
            self._quantised = decoder.quantised
        except Exception as error:
            self._unreadable = str(error)
            raise
        finally:
            self._is_reading = False
            # Reading moves weights. Those that it refuses may become others.
            self._snapshot = Snapshot(self._model, self._state, self._quantised)
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

    def _read_again(self) -> None:
        """Read the model again if it has changed since."""
        try:
            if self._snapshot.has_changed():
                if self._num_masked:
                    raise Masked("a changed model while other threads run it masked")
                if self.batching is not None and self.batching.is_running:
                    # The graphs of its steps hold the tensors of the last reading.
                    raise Masked("a changed model while generate_batch runs")
                self._read()
            self._ready  # noqa: B018
        except UnsupportedModelError as error:
            instead = "" if self._weights == "model" else f"; its own weights compute, not {self._weights}"
            raise Masked(f"this model since it was changed ({error}{instead})") from error

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            # Nothing of the engine can be traced.
            return self._plain(*args, **handed_on(self._model, kwargs))
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
            with self._counted():
                return self._plain(*args, **handed_on(self._model, kwargs))
        if torch.is_grad_enabled() and self._snapshot.learns():
            # The operators have no gradients: whoever asks for one is told so.
            logits = logits.detach().requires_grad_()
            logits.register_hook(refuse_gradients)
        out = CausalLMOutputWithPast(None, logits, cache)  # type: ignore[arg-type]
        return out.to_tuple() if given.get("return_dict") is False else out

    def _run(self, given: Mapping[str, Any]) -> Answer:
        """Return logits and cache.

        Raises:
            Masked: If the masked model has to compute it.
        """
        ids = given.get("input_ids")
        x = given.get("inputs_embeds") if ids is None else ids
        if not isinstance(x, Tensor) or self._is_reading or self._is_removed:
            raise Masked
        control, is_paged = self._state.control, ids is not None and is_paged_step(given)
        _require_known(self._model, control, x, given, is_paged=is_paged)
        if self._memory is None:
            self._read_again()
        if is_paged:
            self._require_unhooked()
            if self._snapshot.has_changed():
                # The next prompt reads the model again.
                raise Masked("generate_batch after the weights have changed")
            return paged_step(self._ready, control, x, given)
        cache = cache_of(given)
        if cache is not None and not isinstance(cache, EngineCache):
            raise Masked(reason_of(cache))
        if cache is not None and cache.slot is None and cache.get_seq_length():
            raise Masked(cache.left_for)
        if cache is not None and cache.slot is not None and cache.tokens and ids is not None and x.shape[1] == 1:
            return step(self._ready, control, ids, cache, given), cache
        return self._prompt(x, cache, given)

    def _prompt(self, x: Tensor, cache: EngineCache | None, given: Mapping[str, Any]) -> Answer:
        """Return the logits that are wanted of several tokens a sequence, and keep their keys and values."""
        self._require_unhooked()
        past = 0 if cache is None or cache.slot is None else cache.tokens
        keeps = given.get("use_cache")
        if cache is None and (getattr(self._model.config, "use_cache", True) if keeps is None else keeps):
            cache = EngineCache(self._model.config)
        reads, has_cache = not is_trusted(cache), cache is not None
        padding = read_padding(given, x, past, reads_positions=reads, has_cache=has_cache)
        if isinstance(padding, str):
            raise Masked(padding)
        places = None if padding is None else padding.tolist()
        if past and (cache is None or cache.padding != places):
            raise Masked("another left padding than that of the tokens before")
        self._read_again()
        if cache is not None:
            cache.padding = places
        kept = given.get("logits_to_keep", 0)
        try:
            logits = prompt(self._ready, self._state.control, x, past, padding, cache, kept)
        except BaseException:
            # What was begun must not be taken for a prompt, nor for tokens of an earlier one.
            if cache is not None and not past:
                cache.slot = None
            elif cache is not None:
                cache.slot.cache.lengths.copy_(past - torch.tensor(places or 0, device=x.device))
            raise
        if cache is not None:
            cache.tokens = past + x.shape[1]
        return logits, cache

    def _require_unhooked(self) -> None:
        if self._snapshot.is_training():
            raise NotAttachedError(
                "this model is optimised, which is for inference, and one of its modules is in training mode; call "
                "wide.deoptimize(model) first, or model.eval()"
            )
        if self._snapshot.has_hooks():
            raise Masked("a hook on one of its modules")

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
