"""What an optimised model runs when it is called: prompts straight through the layers, decode steps from CUDA graphs.

`generate()` and direct calls keep transformers' interface and semantics. The engine takes what it understands, one run
of causal keys a sequence with left padding, over memory of its own. Everything else runs masked, as before
`wide.optimize`, with one warning that names the reason.
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
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from wide.errors import NotAttachedError, UnsupportedModelError
from wide.inference.engine.batching import ARGUMENTS, PagedBatching, PagedView, handed_on, is_paged_step
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.engine_cache import EngineCache
from wide.inference.engine.generation import is_trusted, reason_of, wrap_generation
from wide.inference.engine.inputs import KNOWN, kept_rows, read_padding, unexpected_rows
from wide.inference.engine.memory import Memory, has_graph
from wide.inference.engine.run import Run
from wide.inference.engine.snapshot import Snapshot
from wide.inference.operators.table import OperatorTable
from wide.models.attach import Attachment
from wide.models.gates import cache_of

# Longer contexts run masked: their table of positions alone would take hundreds of megabytes.
_MAX_LENGTH = 131072
_Answer = tuple[Tensor, EngineCache | None]


class _Masked(Exception):  # noqa: N818
    """A call that the engine does not take; its message is the reason, empty where there is nothing to say."""


class Engine:
    """Stands in for the forward of an optimised model.

    Args:
        model: Attached.
        state: What wide knows of it.
        tables: Which operator runs where, for each layer.

    Raises:
        UnsupportedModelError: If the model has a part that the engine does not compute.
    """

    def __init__(self, model: nn.Module, state: Attachment, tables: Sequence[OperatorTable]) -> None:
        """Read the model, and take the place of its forward."""
        self._model: Any = model
        self._state, self._tables = state, tuple(tables)
        self._plain: Any = model.forward
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self._lock = threading.RLock()
        self._said: set[str] = set()
        self._memory: Memory | None = None
        self._read()
        self.batching: PagedBatching | None = None

        @functools.wraps(self._plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(args, kwargs)

        def refuse(_memo: dict[int, Any]) -> Any:
            raise NotAttachedError("a copy of an optimised model would run the original; call wide.deoptimize first")

        named: dict[str, Any] = {"forward": forward, "__deepcopy__": refuse}
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
        if self._memory is None:
            raise UnsupportedModelError(self._unreadable)
        return self._memory.decoder

    def made_of(self) -> tuple[Any, ...]:
        """Return what graphs hold of the model: weights, thresholds, and whether routers decide."""
        thresholds = [router.threshold for router in self._state.routers()]
        return self._state.control.enabled, thresholds, self._snapshot.now()

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Let the first layers alone compute, for checks: behind many layers of random routers rounding decides."""
        self._claim()
        whole, self._memory = self._memory, Memory(self.decoder.truncated(num_layers), self._lock)
        try:
            yield
        finally:
            self._memory = whole

    def remove(self) -> None:
        """Give the model its own forward back and let go of all memory and graphs."""
        if self.batching is not None:
            self.batching.remove()
        for name, before in self._before.items():
            vars(self._model).pop(name, None)
            if before is not None:
                vars(self._model)[name] = before
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()
            memory.decoder.unstack()

    def _claim(self) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.claim()

    def _read(self) -> None:
        """Read the model into its straight-line form.

        Raises:
            UnsupportedModelError: If it has none; until the next reading everything runs masked.
        """
        # Reading compares with the model's own forward, which must not come back here.
        self._memory, self._unreadable, self._is_reading = None, "", True
        config = self._model.config.get_text_config(decoder=True)
        length = min(int(getattr(config, "max_position_embeddings", None) or _MAX_LENGTH), _MAX_LENGTH)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("llama_4_scaling_beta"):
            # Beyond, queries grow with their position.
            length = min(length, int(rope["original_max_position_embeddings"]))
        self._snapshot = Snapshot(self._model, self._state)
        try:
            decoder = Decoder(self._model, max_length=length, tables=self._tables)
        except UnsupportedModelError as error:
            self._unreadable = str(error)
            raise
        finally:
            self._is_reading = False
            # Reading moves weights.
            self._snapshot = Snapshot(self._model, self._state)
        self._memory = Memory(decoder, self._lock)

    def _read_again(self) -> None:
        """Read the model again if it has changed since."""
        try:
            if self._snapshot.has_changed():
                self._read()
            self.decoder  # noqa: B018
        except UnsupportedModelError as error:
            raise _Masked(f"this model since it was changed ({error})") from error

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            # Nothing of the engine can be traced.
            return self._plain(*args, **kwargs)
        given = kwargs if not args else dict(zip(self._names, args, strict=False)) | kwargs
        try:
            # Memory that is made under inference mode could not be written outside of it.
            normal = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            with self._lock, normal, torch.no_grad():
                logits, cache = self._run(given)
        except _Masked as masked:
            reason, cache = str(masked), cache_of(given)
            self._say(reason)
            if isinstance(cache, EngineCache):
                with self._lock:
                    cache.leave_engine(reason)
            return self._plain(*args, **handed_on(self._model, kwargs))
        if torch.is_grad_enabled() and self._snapshot.learns():
            # The operators have no gradients: whoever asks for one is told so.
            logits = logits.detach().requires_grad_()
            logits.register_hook(_refuse_gradients)
        out = CausalLMOutputWithPast(None, logits, cache)  # type: ignore[arg-type]
        return out.to_tuple() if given.get("return_dict") is False else out

    def _run(self, given: Mapping[str, Any]) -> _Answer:
        """Return logits and cache.

        Raises:
            _Masked: If the masked model has to compute it.
        """
        ids = given.get("input_ids")
        x = given.get("inputs_embeds") if ids is None else ids
        if not isinstance(x, Tensor) or self._is_reading:
            raise _Masked
        is_paged = ids is not None and is_paged_step(given)
        self._require_known(x, given, KNOWN | ARGUMENTS if is_paged else KNOWN, is_paged=is_paged)
        if self._memory is None:
            self._read_again()
        if is_paged:
            return self._paged(x, given)
        cache = cache_of(given)
        if cache is not None and not isinstance(cache, EngineCache):
            raise _Masked(reason_of(cache))
        if cache is not None and cache.slot is None and cache.get_seq_length():
            raise _Masked(cache.left_for)
        if cache is not None and cache.slot is not None and cache.tokens and ids is not None and x.shape[1] == 1:
            return self._step(ids, cache, given)
        return self._prompt(x, cache, given)

    def _require_known(self, x: Tensor, given: Mapping[str, Any], known: frozenset[str], *, is_paged: bool) -> None:
        """Refuse calls that ask for something that the engine does not compute."""
        control, config = self._state.control, self._model.config
        if self._model.training:
            raise NotAttachedError(
                "this model is optimised, which is for inference; call wide.deoptimize(model) first, or model.eval()"
            )
        if control.forced is not None:
            raise _Masked("force_routing")
        if control.observed is not None and (control.keep_history or is_paged):
            raise _Masked("capture_routing over several forwards")
        if not is_paged and x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise _Masked("a call that is captured in a CUDA graph")
        if torch.is_autocast_enabled(x.device.type):
            raise _Masked("autocast")
        for name, value in given.items():
            if name not in known and value is not None and value is not False:
                raise _Masked(f"the argument {name}=")
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(config, name, False):
                raise _Masked(f"{name}=")

    def _paged(self, ids: Tensor, given: Mapping[str, Any]) -> _Answer:
        """Return the logits of a step of continuous batching, which transformers may be capturing."""
        memory = self._memory
        assert memory is not None
        self._require_unhooked()
        if self._snapshot.has_changed():
            # The next prompt reads the model again.
            raise _Masked("generate_batch after the weights have changed")
        if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            memory.claim()
            self._follow(memory)
        view = PagedView(given)
        if view.longest > memory.decoder.max_length:
            # Transformers warms up with one request as long as its whole cache.
            raise _Masked
        run, kept = Run(routed=self._state.control.enabled), given.get("logits_to_keep")
        stream = memory.decoder.forward(ids, view, run)
        return memory.decoder.logits(stream, run, kept.long() if isinstance(kept, Tensor) else None)[None], None

    def _step(self, ids: Tensor, cache: EngineCache, given: Mapping[str, Any]) -> _Answer:
        """Return the logits after one more token a sequence."""
        memory, slot = self._memory, cache.slot
        assert memory is not None
        assert slot is not None
        if slot.decoder is not memory.decoder:
            raise _Masked("a cache from before the model was changed")
        if ids.shape[0] != slot.cache.batch:
            raise _Masked("another number of sequences than the cache holds")
        if cache.tokens >= memory.decoder.max_length:
            raise _Masked(f"a text of more than {memory.decoder.max_length} tokens")
        trusted, grows = is_trusted(cache), cache.tokens >= slot.cache.room
        if trusted and not grows:
            memory.join()
        else:
            memory.claim()
        if grows:
            slot = memory.grow(cache, cache.tokens + 1)
        unexpected = None if trusted else unexpected_rows(given, slot.cache.lengths + 1)
        if isinstance(unexpected, str):
            raise _Masked(unexpected)
        self._follow(memory)
        run = self._options()
        if run.record is not None:
            memory.claim()
            logits = memory.decoder.step(ids[:, 0], slot.cache, run)
            self._note(run, ids)
        else:
            begun = memory.take(slot, ids[:, 0], routed=run.routed)
            if cache.has_begun:
                # One wrong guess, or one call of another text in between, and this one goes step by step.
                cache.has_begun, cache.is_greedy = False, begun is not None
            logits = slot.step(ids[:, 0], routed=run.routed, pool=memory.pool) if begun is None else begun
        cache.tokens += 1
        # The caller may keep what the next step overwrites.
        logits = logits.clone() if unexpected is None else logits.masked_fill(unexpected[:, None], torch.nan)
        # `generate` will most likely ask for the step behind this one.
        if trusted and cache.is_greedy and cache.tokens < min(cache.room or 0, slot.cache.room):
            cache.has_begun = memory.begin(slot, routed=run.routed)
        return logits[:, None], cache

    def _prompt(self, x: Tensor, cache: EngineCache | None, given: Mapping[str, Any]) -> _Answer:
        """Return the logits that are wanted of several tokens a sequence, and keep their keys and values."""
        self._claim()
        self._require_unhooked()
        past = 0 if cache is None or cache.slot is None else cache.tokens
        keeps = given.get("use_cache")
        if cache is None and (getattr(self._model.config, "use_cache", True) if keeps is None else keeps):
            cache = EngineCache(self._model.config)
        reads, has_cache = not is_trusted(cache), cache is not None
        padding = read_padding(given, x, past, reads_positions=reads, has_cache=has_cache)
        if isinstance(padding, str):
            raise _Masked(padding)
        places = None if padding is None else padding.tolist()
        if past and (cache is None or cache.padding != places):
            raise _Masked("another left padding than that of the tokens before")
        self._read_again()
        memory = self._memory
        assert memory is not None
        if past and cache is not None and cache.slot is not None and cache.slot.decoder is not memory.decoder:
            raise _Masked("a cache from before the model was changed")
        if past + x.shape[1] > memory.decoder.max_length:
            raise _Masked(f"a text of more than {memory.decoder.max_length} tokens")
        memory.join()
        self._follow(memory)
        if cache is not None:
            cache.padding = places
        try:
            return self._fill(memory, x, past, padding, cache, given), cache
        except BaseException:
            # What was begun must not be taken for a prompt.
            if cache is not None and not past:
                cache.slot = None
            raise

    def _fill(
        self,
        memory: Memory,
        x: Tensor,
        past: int,
        padding: Tensor | None,
        cache: EngineCache | None,
        given: Mapping[str, Any],
    ) -> Tensor:
        """Return the logits [B, kept, V] that are wanted of a prompt, and keep its keys and values."""
        decoder, (batch, length), run = memory.decoder, x.shape[:2], self._options()
        if run.record is not None and padding is not None:
            raise _Masked("capture_routing with left padding")
        if padding is not None and length > 1 and not past:
            # The engine pads on the right: each row begins with its first real token.
            places = (torch.arange(length, device=x.device) + padding[:, None]).clamp(max=length - 1)
            x = x.gather(1, places) if x.dim() == 2 else x.take_along_dim(places[..., None], 1)
        lengths = torch.full((batch,), past + length, dtype=torch.int32, device=x.device)
        if padding is not None:
            lengths -= padding.to(torch.int32)
        kept, logits = given.get("logits_to_keep", 0), None
        slot = None if cache is None else memory.room(cache, batch, past + length)
        is_plain = past == 0 and x.dim() == 2 and isinstance(kept, int) and kept == 1 and run.record is None
        if is_plain and has_graph(x, None if slot is None else decoder.widest):
            # A call that keeps nothing borrows memory of all layers, for the sake of its graph.
            lent = memory.free(batch, length) if slot is None else slot
            logits = lent.prompt(x, lengths, routed=run.routed, pool=memory.pool)
        if logits is not None:
            # The caller may keep what the next prompt overwrites.
            logits = logits.clone()
        else:
            keys = decoder.new_cache(batch, length, kept=False) if slot is None else slot.cache
            if padding is None or not past:
                stream = decoder.prompt(x, keys, run, past=past, lengths=lengths)
                rows = kept_rows(batch, length, kept, padding, x.device)
                logits = decoder.logits(stream, run, rows)
            else:
                # Sequences that end at different places run one after the other.
                rows = kept_rows(1, length, kept, None, x.device)
                logits = torch.cat(
                    [
                        decoder.logits(decoder.prompt(x[row, None], keys.row(row), run, past=past - places), run, rows)
                        for row, places in enumerate(padding.tolist())
                    ]
                )
            self._note(run, x)
        if cache is not None:
            cache.tokens = past + length
        return logits.view(batch, -1, logits.shape[-1])

    def _options(self) -> Run:
        control = self._state.control
        return Run(routed=control.enabled, record=None if control.observed is None else [])

    def _note(self, run: Run, x: Tensor) -> None:
        """Give the masks [B * T, N_G] of a forward to who observes it."""
        observed = self._state.control.observed
        if observed is not None and run.record is not None and run.routed:
            for layer, masks in zip(observed, run.record, strict=False):
                shaped = [None if mask is None else mask.view(*x.shape[:2], -1) for mask in masks]
                layer.attention, layer.ffn = shaped
                layer.attention_margin = layer.ffn_margin = None

    def _require_unhooked(self) -> None:
        if self._snapshot.is_training():
            raise NotAttachedError(
                "this model is optimised, which is for inference, and one of its modules is in training mode; call "
                "wide.deoptimize(model) first, or model.eval()"
            )
        if self._snapshot.has_hooks():
            raise _Masked("a hook on one of its modules")

    def _follow(self, memory: Memory) -> None:
        """Let the decoder, in captured graphs too, decide by the thresholds that the model's routers have now."""
        before, thresholds = self._snapshot.thresholds, [router.threshold for router in self._snapshot.routers]
        if thresholds != before:
            self._snapshot.thresholds = thresholds
            memory.claim()
            memory.decoder.follow()
            # Where nothing is skipped no router runs.
            if [each == -math.inf for each in thresholds] != [each == -math.inf for each in before]:
                memory.forget_graphs()

    def _say(self, reason: str) -> None:
        if reason and reason not in self._said:
            self._said.add(reason)
            warnings.warn(
                f"wide: {reason} does not run through the engine of wide.optimize: the masked model computes it, right "
                "but slower, and nothing is skipped",
                stacklevel=4,
            )


def _refuse_gradients(_gradient: Tensor) -> None:
    raise NotAttachedError(
        "this model is optimised, and wide's operators have no gradients; call wide.deoptimize(model) before training"
    )
