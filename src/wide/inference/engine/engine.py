"""What an optimised model runs when it is called: prompts straight through the layers, decode steps from CUDA graphs.

`generate()` and direct calls keep transformers' interface and semantics. The engine takes what it computes itself, one
run of causal keys a sequence with left padding, over memory of its own; everything else goes to the layers' own
modules, whose hooks run the same operators, with one warning that names the reason.
"""

import copy
import functools
import inspect
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from wide.errors import NotAttachedError, UnsupportedModelError
from wide.inference.engine.cache import KvCache
from wide.inference.engine.decoder import Decoder
from wide.inference.engine.graphs import CapturedStep, GraphPool, capture_prompt, capture_step
from wide.inference.engine.next_step import Ahead
from wide.inference.engine.paged import ARGUMENTS, PagedStep, handed_on, is_paged_step
from wide.inference.engine.run import Run
from wide.inference.engine.visible_keys import (
    HARMLESS,
    VisibleKeys,
    is_being_recorded,
    mark_left_padded,
    read_left_padding,
    refuse_gradients,
)
from wide.inference.operators.table import OperatorTable
from wide.models.attach import Attachment
from wide.models.gates import cache_name, cache_of

# Longer contexts go the plain way: their table of positions alone would take hundreds of megabytes.
_MAX_LENGTH = 131072
_SMALLEST_ROOM = 256
# Room beyond a prompt where nobody says how many tokens will follow.
_SPARE_ROOM = 256
# Room beyond a prompt that is made at once, however long a text may become.
_FIRST_ROOM = 2048
# Freed memory of earlier calls, with its graphs, that is kept for calls to come: so many, in all this share of a GPU's.
_KEPT_SLOTS = 2
_KEPT_SHARE = 0.125
_HOST_MEMORY = 1 << 33
# Rows of a prompt up to which launching its kernels may take longer than they do; of narrow layers more, as long as
# rows times columns of the widest product, and with them a graph's memory, are those of an 8B model.
_GRAPH_ROWS, _MOST_GRAPH_ROWS, _GRAPH_CELLS = 4096, 16384, 4096 * 28672
_LENGTHS = "attention_mask", "position_ids"
# Arguments of a step of continuous batching.
_BATCHED = HARMLESS | ARGUMENTS
# On a cache of `generate` that cannot run here, which has been said.
_PLAIN = "wide_plain"


class _Slot:
    """Memory for the keys and values of some sequences, and the graphs of the steps that read and write it.

    Args:
        engine: Whose decoder it belongs to.
        cache: The memory.
    """

    def __init__(self, decoder: Decoder, cache: KvCache) -> None:
        """Nothing is captured before the first step."""
        self.decoder, self.cache = decoder, cache
        self.owner: weakref.ref[EngineCache] | None = None
        self._steps: dict[bool, Callable[[Tensor], Tensor]]
        self._prompts: dict[tuple[int, bool], Callable[[Tensor, Tensor], Tensor] | None]
        self.forget()

    @property
    def is_free(self) -> bool:
        """Whether no living cache holds it."""
        owner = None if self.owner is None else self.owner()
        return owner is None or owner.slot is not self

    def forget(self) -> None:
        """Let go of all graphs; they are captured again when they are needed."""
        self._steps, self._prompts = {}, {}

    def captured(self, *, routed: bool) -> CapturedStep | None:
        """Return the graph of a step, None before the first one and on a CPU."""
        step = self._steps.get(routed)
        return step if isinstance(step, CapturedStep) else None

    def step(self, ids: Tensor, *, routed: bool, pool: GraphPool | None) -> Tensor:
        """Return the logits [B, V] after one more token [B] a sequence, in memory that the next step overwrites."""
        step = self._steps.get(routed)
        if step is None:
            run = Run(routed=routed)
            if ids.is_cuda:
                assert pool is not None
                step = capture_step(self.decoder, self.cache, run, pool)
            else:
                step = functools.partial(self.decoder.step, cache=self.cache, run=run)
            self._steps[routed] = step
        return step(ids)

    def prompt(self, ids: Tensor, lengths: Tensor, *, routed: bool, pool: GraphPool | None) -> Tensor | None:
        """Return the logits [B, V] after short prompts [B, T] by a graph; None where none is worth its capture.

        Launching a short prompt's kernels one by one takes longer than they do. Prompts are padded on the right, so
        that one graph serves a range of lengths, and it is captured when such a length comes a second time.
        """
        length = _prompt_bucket(ids.shape[1])
        if pool is None or length > self.cache.room:
            return None
        key = length, routed
        if key not in self._prompts:
            self._prompts[key] = None
            return None
        prompt = self._prompts[key]
        if prompt is None:
            run = Run(routed=routed)
            try:
                prompt = capture_prompt(self.decoder, self.cache, length, run, pool)
            except torch.OutOfMemoryError:
                # Without a graph it may fit; the length has to come twice again.
                del self._prompts[key]
                return None
            self._prompts[key] = prompt
        return prompt(ids, lengths)


class EngineCache(DynamicCache):
    """Keys and values in the engine's memory; an ordinary `DynamicCache` once anyone asks for its layers.

    Args:
        config: The model's.
        room: Tokens of a sequence that it will have to hold; None = unknown.
        is_greedy: Whether the next tokens, of all sequences, will be the likeliest, as far as is known.
    """

    def __init__(self, config: Any, room: int | None = None, *, is_greedy: bool = False) -> None:
        """Hold nothing yet."""
        self.slot: _Slot | None = None
        self._config = config
        self.room, self.is_greedy, self.has_begun = room, is_greedy, False
        self.tokens = 0
        self.padding: list[int] | None = None
        self._layers: list[Any] = []
        super().__init__(config=config)

    @property
    def layers(self) -> list[Any]:
        """Transformers' layers; asked for, they are made, and the engine's memory is free again."""
        self.leave_engine()
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    def __len__(self) -> int:
        """Return the number of layers; asked for a truth value, it must not leave the engine."""
        return len(self._layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of a sequence, padding included."""
        return self.tokens if self.slot is not None else super().get_seq_length(layer_idx)

    @property
    def is_compileable(self) -> bool:
        """Never: the engine replays graphs of its own."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything."""
        return self.slot is not None or super().is_initialized

    @property
    def is_sliding(self) -> list[bool]:
        """Of each layer, whether it keeps a window of keys only once it has left the engine."""
        return [bool(getattr(layer, "is_sliding", False)) for layer in self._layers]

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer, whether its attention is linear, which the engine knows none of."""
        return [False] * len(self._layers)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return all(getattr(layer, "is_croppable", True) for layer in self._layers)

    def __repr__(self) -> str:
        """Say how much it holds."""
        return f"EngineCache(tokens={self.get_seq_length()}, layers={len(self._layers)})"

    def leave_engine(self) -> None:
        """Copy keys and values into ordinary layers, behind the padding that the prompt had."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self._fill(self._layers, slot)
            mark_left_padded(self)
            self.tokens, self.padding = 0, None

    def _fill(self, layers: list[Any], slot: _Slot) -> None:
        for layer, pair in zip(layers, zip(slot.cache.k, slot.cache.v, strict=True), strict=False):
            layer.update(*(_padded(part[:, :, : self.tokens], self.padding) for part in pair))

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineCache":
        """Return an ordinary cache with keys and values of its own."""
        twin = EngineCache(self._config, self.room)
        if self.slot is None:
            twin._layers = copy.deepcopy(self._layers, memo)
        else:
            self._fill(twin._layers, self.slot)
            mark_left_padded(twin)
        return twin

    def __copy__(self) -> "EngineCache":
        """Return a deep copy: two caches cannot share the engine's memory."""
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a file can hold: ordinary layers."""
        return dict(vars(self)) if self.slot is None else dict(vars(copy.deepcopy(self)))


_Found = tuple[Tensor, EngineCache | None]
# Caches of the `generate` that this thread runs, whose masks and positions follow from those of the prompt.
_TRUSTED: ContextVar["weakref.WeakSet[EngineCache] | None"] = ContextVar("_TRUSTED", default=None)


class Engine:
    """Stands in for the forward of an optimised model.

    Args:
        model: Attached, its operators installed.
        state: What wide knows of it.
        tables: Which operator runs where, for each layer.
        keys: What the layers' own modules know of masks, for calls that go their way.
    """

    def __init__(self, model: nn.Module, state: Attachment, tables: Sequence[OperatorTable], keys: VisibleKeys) -> None:
        """Read the model; `why_not` says why the layers' own modules run everything, if they do."""
        self._model: Any = model
        self._state, self._tables, self._keys = state, tuple(tables), keys
        self._plain: Callable[..., Any] = model.forward
        self._prepare_cache: Callable[..., Any] | None = getattr(model, "_prepare_cache_for_generation", None)
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self._slots: list[_Slot]
        device = next(model.parameters()).device
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _HOST_MEMORY
        self._most_kept = _KEPT_SHARE * total
        self._pool: GraphPool | None = None
        self._ahead: Ahead | None = None
        self._stream: Any = None
        self._said: set[str] = set()
        self.why_not: str | None = None
        parts = [part for part in model.modules() if part is not model]
        self._hooked = [(part, _hung_on(part)) for part in parts]
        self._learns = False
        self._decoder: Decoder | None = None
        self._read()
        if self.why_not is not None and next(model.parameters()).is_cuda:
            warnings.warn(
                f"wide: the layers of this model run one by one, without graphs, since {self.why_not}", stacklevel=3
            )
        self._lock = threading.RLock()

        @functools.wraps(self._plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self._forward(args, kwargs)
            # Memory, and what layers know of the running forward, is that of one at a time.
            with self._lock:
                return self._forward(args, kwargs)

        def refuse(_memo: dict[int, Any]) -> Any:
            raise NotAttachedError("a copy of an optimised model would run the original; call wide.deoptimize first")

        named: dict[str, Any] = {"forward": forward, "__deepcopy__": refuse}
        if self._prepare_cache is not None and self._decoder is not None:
            named["_prepare_cache_for_generation"] = self._prepare_engine_cache
            generate: Any = model.generate
            named["generate"] = self._trusting(generate)
        # What stood there before, such as a forward of the user's own, comes back.
        self._before = {name: vars(model).get(name) for name in named}
        vars(model).update(named)

    @property
    def decoder(self) -> Decoder | None:
        """The straight-line form of the model; None where the layers' own modules run everything."""
        return self._decoder

    def made_of(self) -> tuple[Any, ...]:
        """Return what graphs hold of the model: weights, thresholds, and whether routers decide."""
        thresholds = [router.threshold for router in self._state.routers()]
        return self._state.control.enabled, thresholds, self._fingerprint()

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Let the first layers alone compute, for checks: behind many layers of random routers rounding decides."""
        self._drop_ahead()
        whole, self._slots = self._decoder, []
        self._decoder = None if whole is None else whole.truncated(num_layers)
        try:
            yield
        finally:
            self._decoder, self._slots = whole, []

    def remove(self) -> None:
        """Give the model its own forward back and let go of all memory and graphs."""
        self._drop_ahead()
        for name, before in self._before.items():
            vars(self._model).pop(name, None)
            if before is not None:
                vars(self._model)[name] = before
        for slot in self._slots:
            owner = None if slot.owner is None else slot.owner()
            if owner is not None and owner.slot is slot:
                owner.leave_engine()
        self._slots, self._pool = [], None
        if self._decoder is not None:
            self._decoder.unstack()
        self._decoder = None

    def _read(self) -> None:
        """Read the model into its straight-line form, or say in `why_not` why there is none."""
        # Reading compares with the model's own forward, which must not come back here.
        self._slots, self._decoder = [], None
        config = self._model.config.get_text_config(decoder=True)
        length = min(int(getattr(config, "max_position_embeddings", None) or _MAX_LENGTH), _MAX_LENGTH)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("llama_4_scaling_beta"):
            # Beyond, queries grow with their position.
            length = min(length, int(rope["original_max_position_embeddings"]))
        try:
            devices = {parameter.device for parameter in self._model.parameters()}
            if len(devices) > 1:
                raise UnsupportedModelError(f"its weights lie on {len(devices)} devices")
            self._decoder = Decoder(self._model, max_length=length, tables=self._tables)
        except UnsupportedModelError as error:
            self.why_not = str(error)
        self._made_of = self._fingerprint()
        self._routers = self._state.routers()
        self._thresholds = [router.threshold for router in self._routers]

    def _fingerprint(self) -> tuple[Any, ...]:
        """Return what the decoder has copied from the model, or points at; steps trust that it stays."""
        found = (parameter for part, _ in self._hooked for parameter in part._parameters.values())
        parameters = [parameter for parameter in found if parameter is not None]
        self._learns = any(parameter.requires_grad for parameter in parameters)
        routers = self._state.routers()
        matrices = [matrix for router in routers for matrix in router._parameters.values() if matrix is not None]
        versions = [None if matrix.is_inference() else matrix._version for matrix in matrices]
        return (*(parameter.data_ptr() for parameter in parameters), *versions)

    def _follow(self, x: Tensor) -> None:
        """Let the decoder, in captured graphs too, decide by the thresholds that the model's routers have now."""
        before, thresholds = self._thresholds, [router.threshold for router in self._routers]
        if thresholds != before:
            self._thresholds = thresholds
            self._drop_ahead()
            self._join_stream(x)
            if self._decoder is not None:
                self._decoder.follow()
            # Where nothing is skipped no router runs.
            if [each == -math.inf for each in thresholds] != [each == -math.inf for each in before]:
                for slot in self._slots:
                    slot.forget()

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs if not args else dict(zip(self._names, args, strict=False)) | kwargs
        out: _Found | str = ""
        if not torch.compiler.is_compiling():
            # Memory that is made under inference mode could not be written outside of it.
            normal = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            with normal, torch.no_grad():
                out = self._run(given)
        if not isinstance(out, str):
            return self._output(*out, given)
        if out:
            self._say(out)
        cache = cache_of(given)
        if isinstance(cache, EngineCache) and not torch.compiler.is_compiling():
            # Before its masks are read: what it then knows of them must not be forgotten.
            cache.leave_engine()
        # VisibleKeys decides, for the layers' own modules, what wide's attention may take.
        self._keys.before(self._model, args, kwargs)
        found = None
        try:
            found = self._plain(*args, **handed_on(self._model, kwargs))
        finally:
            self._keys.after(self._model, args, found)
        return found

    def _run(self, given: Mapping[str, Any]) -> _Found | str:
        """Return logits and cache, or why the layers' own modules have to compute it ('' = nothing to say)."""
        control = self._state.control
        ids = given.get("input_ids")
        x = given.get("inputs_embeds") if ids is None else ids
        is_ours = self._decoder is not None and not self._model.training and control.observed is control.forced is None
        is_paged = ids is not None and is_paged_step(given)
        if not is_ours or not isinstance(x, Tensor) or given.get("labels") is not None:
            return ""
        if is_being_recorded(x) and not is_paged:
            return ""
        if torch.is_autocast_enabled(x.device.type):
            return "autocast"
        known = _BATCHED if is_paged else HARMLESS
        if any(name not in known and value is not None and value is not False for name, value in given.items()):
            return ""
        if given.get("output_hidden_states") or getattr(self._model.config, "output_hidden_states", False):
            return "output_hidden_states="
        if getattr(self._model.config, "output_attentions", False):
            return "output_attentions="
        if is_paged:
            return self._paged(x, given)
        cache = cache_of(given)
        if isinstance(cache, EngineCache):
            if cache.slot is None and cache.get_seq_length():
                return "a cache whose layers were asked for"
            if cache.slot is not None and cache.slot.decoder is not self._decoder:
                return ""
        elif cache is not None:
            return "" if hasattr(cache, _PLAIN) else f"a {type(cache).__name__} of the caller's own"
        if cache is not None and cache.slot is not None and cache.tokens and ids is not None and x.shape[1] == 1:
            return self._step(ids, cache, given)
        return self._prompt(x, cache, given)

    def _paged(self, ids: Tensor, given: Mapping[str, Any]) -> _Found | str:
        """Return the logits of a step of continuous batching, which transformers may be capturing."""
        obstacle = self._obstacle()
        if obstacle is not None:
            return obstacle
        if self._decoder is None or self._fingerprint() != self._made_of:
            # The next prompt reads the model again; here its attention is that of continuous batching.
            return ""
        if not is_being_recorded(ids):
            self._drop_ahead()
            self._follow(ids)
        step = PagedStep(given, self._decoder.max_length)
        if not step.fits:
            return ""
        run, kept = Run(routed=self._state.control.enabled), given.get("logits_to_keep")
        hidden = self._decoder.paged(ids, step, run)
        logits = self._decoder.logits(hidden, run, kept.long() if isinstance(kept, Tensor) else None)
        return logits[None], None

    def _obstacle(self) -> str | None:
        """Return what of the model's modules keeps the engine from computing them."""
        if any(part.training for part, _ in self._hooked):
            return ""
        is_changed = any(_hung_on(part) != known for part, known in self._hooked)
        return "a hook on one of its modules" if is_changed else None

    def _step(self, ids: Tensor, cache: "EngineCache", given: Mapping[str, Any]) -> _Found | str:
        assert cache.slot is not None
        assert self._decoder is not None
        slot = cache.slot
        if ids.shape[0] != slot.cache.batch or cache.tokens >= self._decoder.max_length:
            return f"more than {self._decoder.max_length} tokens" if ids.shape[0] == slot.cache.batch else ""
        trusted = self._trusts(cache)
        if not trusted:
            self._drop_ahead()
        if cache.tokens >= slot.cache.room:
            slot = self._grown(cache)
        broken = None if trusted else _broken(given, slot.cache.lengths + 1)
        if isinstance(broken, str):
            return broken
        self._join_stream(ids)
        self._follow(ids)
        routed = self._state.control.enabled
        logits = None if self._ahead is None else self._ahead.take(slot.captured(routed=routed), ids[:, 0])
        if cache.has_begun:
            # One wrong guess, or one call of another text in between, and this one goes step by step.
            cache.has_begun, cache.is_greedy = False, logits is not None
        if logits is None:
            logits = slot.step(ids[:, 0], routed=routed, pool=self._pool)
        cache.tokens += 1
        # The caller may keep what the next step overwrites.
        logits = logits.clone() if broken is None else logits.masked_fill(broken[:, None], torch.nan)
        self._go_ahead(cache, slot, routed=routed)
        return logits[:, None], cache

    def _go_ahead(self, cache: "EngineCache", slot: _Slot, *, routed: bool) -> None:
        """Begin the step after this one where `generate` will most likely ask for it."""
        step, room = slot.captured(routed=routed), min(cache.room or 0, slot.cache.room)
        if step is None or not cache.is_greedy or cache.tokens >= room or not self._trusts(cache):
            return
        # A processor may bar tokens that the model has logits but no embedding of.
        if step.logits.shape[1] <= len(slot.decoder.embedding):
            if self._ahead is None:
                self._ahead = Ahead(step.ids.device)
            self._ahead.begin(step, slot.cache)
            cache.has_begun = True

    def _drop_ahead(self) -> None:
        """Take back a step that was begun, before anything else uses the engine's memory; the device waits for it."""
        with self._lock:
            if self._ahead is not None:
                if self._ahead.lengths is not None:
                    self._join_stream(self._ahead.lengths)
                self._ahead.drop()

    def _prompt(self, x: Tensor, cache: "EngineCache | None", given: Mapping[str, Any]) -> _Found | str:
        self._drop_ahead()
        length = x.shape[1]
        past = 0 if cache is None or cache.slot is None else cache.tokens
        obstacle = self._obstacle()
        if obstacle is not None:
            return obstacle
        keeps = given.get("use_cache")
        keeps = getattr(self._model.config, "use_cache", True) if keeps is None else keeps
        if cache is None and keeps:
            cache = EngineCache(self._model.config)
        padding = self._padding(x, past, cache, given)
        if isinstance(padding, str):
            return padding
        if self._fingerprint() != self._made_of:
            # Its routers or the places of its weights have changed since.
            self._read()
        decoder = self._decoder
        if decoder is None or (past and cache is not None and cache.slot is not None and cache.slot.decoder != decoder):
            return ""
        if past + length > decoder.max_length:
            return f"more than {decoder.max_length} tokens"
        self._join_stream(x)
        self._follow(x)
        try:
            return self._fill(x, past, padding, cache, given), cache
        except BaseException:
            # What was begun must not be taken for a prompt.
            if cache is not None and not past:
                cache.slot = None
            raise

    def _fill(
        self, x: Tensor, past: int, padding: Tensor | None, cache: "EngineCache | None", given: Mapping[str, Any]
    ) -> Tensor:
        """Return the logits that are asked for of a prompt, and keep its keys and values."""
        decoder = self._decoder
        assert decoder is not None
        batch, length = x.shape[:2]
        if padding is not None and length > 1 and not past:
            # The engine pads on the right: each row begins with its first real token.
            places = (torch.arange(length, device=x.device) + padding[:, None]).clamp(max=length - 1)
            x = x.gather(1, places) if x.dim() == 2 else x.take_along_dim(places[..., None], 1)
        run = Run(routed=self._state.control.enabled)
        lengths = torch.full((batch,), past + length, dtype=torch.int32, device=x.device)
        if padding is not None:
            lengths -= padding.to(torch.int32)
        kept = given.get("logits_to_keep", 0)
        slot = None if cache is None else self._room(cache, batch, past + length)
        logits = None
        widest = None if slot is None else decoder.widest
        if past == 0 and x.dim() == 2 and isinstance(kept, int) and kept == 1 and _has_graph(x, widest):
            # A call that keeps nothing borrows memory of all layers, for the sake of its graph.
            lent = self._free(batch, length) if slot is None else slot
            logits = lent.prompt(x, lengths, routed=run.routed, pool=self._pool)
        if logits is None:
            memory = decoder.new_cache(batch, length, kept=False) if slot is None else slot.cache
            if padding is None or not past:
                hidden = decoder.prompt(x, memory, run, past=past, lengths=lengths)
            else:
                hidden = self._continue(x, memory, run, [past - places for places in padding.tolist()])
                padding = None
            rows = _rows(batch, length, kept, padding, x.device)
            logits = decoder.logits(hidden, run, None if rows is None else rows.flatten())
        else:
            # The caller may keep what the next prompt overwrites.
            logits = logits.clone()
        if cache is not None:
            cache.tokens = past + length
        return logits.view(batch, -1, logits.shape[-1])

    def _continue(self, x: Tensor, memory: KvCache, run: Run, pasts: list[int]) -> tuple[Tensor, Tensor]:
        """Run more tokens of sequences that end at different places, one sequence after the other."""
        assert self._decoder is not None
        found = [
            self._decoder.prompt(x[row : row + 1], memory.row(row), run, past=past) for row, past in enumerate(pasts)
        ]
        residuals, addends = zip(*found, strict=True)
        return torch.cat(residuals), torch.cat(addends)

    def _padding(
        self, x: Tensor, past: int, cache: "EngineCache | None", given: Mapping[str, Any]
    ) -> Tensor | str | None:
        """Return each row's left padding, int64 [B], None without, or why the prompt goes the plain way."""
        mask, positions = (given.get(name) for name in _LENGTHS)
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            return ""
        found = read_left_padding(mask, past + x.shape[1])
        if isinstance(found, str):
            return ""
        trusted = self._trusts(cache)
        if positions is not None and not trusted:
            wanted = torch.arange(past, past + x.shape[1], device=x.device)
            wanted = wanted if found is None else wanted - found.to(x.device)[:, None]
            if not bool(((positions == wanted) | (wanted < 0)).all()):
                return ""
        if cache is not None and not trusted and found is not None and positions is None:
            # Where the caller counts padding as positions, keys that leave the engine would stand elsewhere.
            return ""
        padding = None if found is None else found.tolist()
        if past and (cache is None or cache.padding != padding):
            return "another left padding than that of the tokens before"
        if cache is not None:
            cache.padding = padding
        return None if found is None else found.to(x.device)

    def _room(self, cache: "EngineCache", batch: int, needed: int) -> _Slot:
        """Return the cache's memory, with room for so many tokens a sequence."""
        assert self._decoder is not None
        if cache.slot is not None:
            return cache.slot if needed <= cache.slot.cache.room else self._grown(cache, needed)
        # Memory grows with the text: many a call ends long before its longest text.
        room = needed + _SPARE_ROOM if cache.room is None else min(cache.room, needed + _FIRST_ROOM)
        wanted = min(max(needed, room), self._decoder.max_length)
        slot = self._free(batch, wanted)
        self._lend(slot, cache)
        return slot

    def _free(self, batch: int, wanted: int) -> _Slot:
        """Return free memory for so many tokens a sequence, used before if there is any."""
        assert self._decoder is not None
        free = [slot for slot in self._slots if slot.is_free]
        fits = [slot for slot in free if slot.cache.batch == batch and slot.cache.room >= wanted]
        if fits:
            slot = min(fits, key=lambda each: each.cache.room)
            dropped = [slot]
        else:
            dropped = free[: max(0, len(free) - _KEPT_SLOTS + 1)]
            room = min(_bucket(wanted), self._decoder.max_length)
            memory = None
            with suppress(torch.OutOfMemoryError):
                memory = self._decoder.new_cache(batch, room)
            if memory is None:
                # Whatever names the free memory keeps it.
                self._slots, free, dropped = [each for each in self._slots if not each.is_free], [], []
                torch.cuda.empty_cache()
                memory = self._decoder.new_cache(batch, room)
            slot = _Slot(self._decoder, memory)
        # The last one is the latest used.
        self._slots = [*(each for each in self._slots if each not in dropped), slot]
        return slot

    def _lend(self, slot: _Slot, cache: "EngineCache") -> None:
        """Give memory to a cache; much of it is not kept when the cache is gone."""

        def gone(_cache: object) -> None:
            # Garbage is collected anywhere: a forward of another thread drops what is too much when it needs memory.
            if not self._lock.acquire(blocking=False):
                return
            free = [each for each in self._slots if each.is_free]
            kept = sum(2 * each.cache.k.nbytes for each in free)
            dropped = []
            for old in free:
                if kept > self._most_kept:
                    dropped.append(old)
                    kept -= 2 * old.cache.k.nbytes
            self._slots = [each for each in self._slots if each not in dropped]
            self._lock.release()

        cache.slot, slot.owner = slot, weakref.ref(cache, gone)

    def _grown(self, cache: "EngineCache", needed: int = 0) -> _Slot:
        """Move a cache into larger memory."""
        self._drop_ahead()
        assert cache.slot is not None
        old = cache.slot.cache
        assert self._decoder is not None
        wanted = min(max(needed, cache.tokens + 1, 3 * old.room // 2), self._decoder.max_length)
        slot = self._free(old.batch, wanted)
        for source, target in ((old.k, slot.cache.k), (old.v, slot.cache.v)):
            target[:, :, :, : cache.tokens] = source[:, :, :, : cache.tokens]
        slot.cache.lengths.copy_(old.lengths)
        self._lend(slot, cache)
        return slot

    def _join_stream(self, tensor: Tensor) -> None:
        """Let the current stream wait for the one that used the engine's memory last."""
        if tensor.is_cuda:
            if self._pool is None:
                self._pool = GraphPool(tensor.device)
            stream = torch.cuda.current_stream(tensor.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def _output(self, logits: Tensor, cache: "EngineCache | None", given: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled() and self._learns:
            # The operators have no gradients: whoever asks for one is told so.
            logits = logits.detach().requires_grad_()
            logits.register_hook(refuse_gradients)
        out = CausalLMOutputWithPast(None, logits, cache)  # type: ignore[arg-type]
        return out.to_tuple() if given.get("return_dict") is False else out

    def _prepare_engine_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Let `generate` begin with the engine's cache where it would take a default or static one."""
        assert self._prepare_cache is not None
        out = self._prepare_cache(*args, **kwargs)
        named = dict(zip(inspect.signature(self._prepare_cache).parameters, args, strict=False)) | kwargs
        inputs: Any = named.get("model_kwargs")
        mode = named.get("generation_mode")
        cache = cache_of(inputs) if isinstance(inputs, dict) else None
        is_default = type(cache) in (DynamicCache, StaticCache) and not getattr(cache, "_is_user_defined", False)
        if not is_default or getattr(cache, "offloading", False) or named["generation_config"].is_assistant:
            return out
        if getattr(mode, "value", mode) not in ("greedy_search", "sample"):
            self._say(str(getattr(mode, "value", mode)).replace("_", " "))
            setattr(cache, _PLAIN, True)
            return out
        is_greedy = getattr(mode, "value", mode) == "greedy_search"
        cache = EngineCache(self._model.config, named.get("max_cache_length"), is_greedy=is_greedy)
        inputs[cache_name(inputs)] = cache
        trusted = _TRUSTED.get()
        if trusted is not None:
            trusted.add(cache)
        return out

    def _trusts(self, cache: "EngineCache | None") -> bool:
        """Whether masks and positions of a running `generate` need not be compared again."""
        return cache is not None and cache in (_TRUSTED.get() or ())

    def _trusting(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return `generate`, which makes masks and positions itself unless it is told otherwise."""

        @functools.wraps(generate)
        def run(*args: Any, **kwargs: Any) -> Any:
            is_plain = kwargs.get("custom_generate") is None and kwargs.get("position_ids") is None
            before = _TRUSTED.set(weakref.WeakSet() if is_plain else None)
            try:
                return generate(*args, **kwargs)
            finally:
                _TRUSTED.reset(before)
                self._drop_ahead()

        return run

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(
                f"wide: {reason} does not run through the optimised model's graphs; its layers' own modules compute "
                "it, skipping as before, but slower. Outputs are right",
                stacklevel=2,
            )


def _hung_on(module: nn.Module) -> tuple[int, bool]:
    """Return how many hooks a module has, and whether it has a forward of its own."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks), "forward" in vars(module)


def _padded(part: Tensor, padding: list[int] | None) -> Tensor:
    """Return keys or values [B, H, T, d] with each sequence moved behind its padding, in memory of their own."""
    part = part.clone()
    for row, places in enumerate(padding or ()):
        if places:
            part[row] = part[row].roll(places, dims=1)
    return part


def _broken(given: Mapping[str, Any], lengths: Tensor) -> Tensor | str | None:
    """Return on the device whose mask or position is not that of one more token [B]; a reason if that is unknown."""
    mask, positions = (given.get(name) for name in _LENGTHS)
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return ""
    checks = [] if mask is None else [mask.to(lengths.device).sum(-1) != lengths]
    if positions is not None:
        checks.append(positions[:, -1].to(lengths.device) + 1 != lengths)
    return torch.stack(checks).any(0) if checks else None


def _rows(batch: int, length: int, kept: int | Tensor, padding: Tensor | None, device: torch.device) -> Tensor | None:
    """Return which rows of [B * T] the logits are asked of, [B, kept]; None = all, in order."""
    places = torch.arange(length, device=device)
    places = places[kept.to(device)] if isinstance(kept, Tensor) else places[-kept:] if kept else places
    if padding is None and len(places) == length:
        return None
    # Padded places have no row; what they give is never used.
    columns = places[None] if padding is None else (places - padding[:, None]).clamp(min=0)
    return torch.arange(batch, device=device)[:, None] * length + columns


def _has_graph(ids: Tensor, widest: int | None) -> bool:
    """Return whether prompts [B, T] are short enough that a graph is worth it.

    Args:
        ids: Tokens.
        widest: Columns of the widest product; None = only short ones, whatever their width.
    """
    rows = ids.shape[0] * _prompt_bucket(ids.shape[1])
    fits = widest is not None and rows <= _MOST_GRAPH_ROWS and rows * widest <= _GRAPH_CELLS
    return ids.is_cuda and (rows <= _GRAPH_ROWS or fits)


def _prompt_bucket(length: int) -> int:
    """Return the length of the graph that serves a prompt: about an eighth longer at most, but for short ones."""
    step = max(64, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


def _bucket(room: int) -> int:
    """Return the next of 256, 384, 512, 768, 1024, ...: few kinds of memory, little of it wasted."""
    size = _SMALLEST_ROOM
    while size < room:
        if 3 * size // 2 >= room:
            return 3 * size // 2
        size *= 2
    return size
