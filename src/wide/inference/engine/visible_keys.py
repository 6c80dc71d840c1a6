"""Which keys the queries of a forward see: decided once per forward, before the layers run.

wide's attention knows causal attention over one run of keys a sequence: left padding, then real keys without a hole (a
sliding window is the layer's own affair). Whatever else a caller asks for, packed sequences, holes, right padding,
masks of their own, goes to the family's attention function, which reads the mask.

A step of decoding must not read the device. What was found when the prompt went in is therefore kept with the cache,
and a mask that breaks the promise later gives NaN instead of a wrong number.
"""

import inspect
import warnings
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wide.errors import NotAttachedError
from wide.inference.engine.paged import ARGUMENTS, is_paged_step
from wide.models.gates import cache_of

# On the cache: what is known of the masks it was filled and read with.
_NOTE = "wide_key_runs"
# No mask was given, so nothing is hidden so far; a mask has been read, and leaves one run; it does not.
_ASSUMED, _CHECKED, _BROKEN = "assumed", "checked", "broken"
HARMLESS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache",
    "use_cache",
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "logits_to_keep",
    "cache_position",
    "return_dict",
    "output_hidden_states",
}
"""Arguments of a forward that leave causal attention as it is; whatever else is not None may change the mask."""


class Prefill(NamedTuple):
    """What a forward over several tokens stands on.

    Args:
        past: Tokens in the cache before it.
        starts: First real token of each left-padded sequence, int32 `[B]`; None without padding.
    """

    past: int
    starts: Tensor | None


class Bounds(NamedTuple):
    """The keys that a single query sees.

    Args:
        ends: Place behind the last one, int32 `[B]`.
        starts: Place of the first one, int32 `[B]`; None = 0.
        is_broken: Whether others than those between are hidden, or keys are weighted, bool `[B]`; None = no.
    """

    ends: Tensor
    starts: Tensor | None
    is_broken: Tensor | None


class VisibleKeys:
    """What the layers of one optimised model know of the running forward; outside of one, nothing.

    Args:
        model: The whole model; `before` and `after` are its hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        """Know nothing yet."""
        self.prefill: Prefill | None = None
        self.step = False
        # A step of continuous batching, and what its layers share.
        self.is_paged = False
        self.shared: dict[Any, Any] = {}
        self._bounds: list[tuple[Tensor | None, int, Bounds]] = []
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self.unusual = _unusual_attention(getattr(model, "config", None))
        self._said: set[str] = set()

    def before(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide for the coming forward (a forward pre-hook with keyword arguments)."""
        self.after()
        given = dict(zip(self._names, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        ids = given.get("inputs_embeds") if ids is None else ids
        if ids is None:
            return
        if is_paged_step(given):
            reason = self.unusual or _unusual_inputs(given, HARMLESS | ARGUMENTS)
            self.is_paged = reason is None
            if reason is not None:
                self._say(reason)
            return
        is_recorded = is_being_recorded(ids)
        reason = self.unusual or _unusual_inputs(given)
        if ids.shape[1] == 1:
            reason = reason or _step_obstacle(given, is_recorded=is_recorded)
            self.step = reason is None
        elif is_recorded and (torch.compiler.is_compiling() or _depends_on_values(given)):
            # Lengths and padding of the coming calls are not known while one is recorded.
            reason = reason or "a captured forward over several tokens with a mask, positions or a static cache"
            _note(given, None)
        elif reason is None:
            reason = self._several_tokens(given, ids)
        if reason is not None and not torch.compiler.is_compiling():
            self._say(reason)

    def after(self, _model: object = None, _args: object = None, output: object = None) -> None:
        """Forget the forward (a forward hook): layers called on their own must not go by an earlier one."""
        self.prefill, self.step = None, False
        self.is_paged, self.shared = False, {}
        self._bounds = []
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.requires_grad and not torch.compiler.is_compiling():
            logits.register_hook(refuse_gradients)

    def bounds(self, bias: Tensor | None, keys: Tensor) -> Bounds:
        """Return which of the keys `[B, H_k, S, d]` a single query sees, on the device.

        Args:
            bias: transformers' mask `[B or 1, 1, 1, S]`; None = all.
            keys: Of one layer.
        """
        batch, length = keys.shape[0], keys.shape[2]
        if torch.compiler.is_compiling():
            return _bounds(bias, batch, length, keys.device)
        # All layers of a kind share one mask, so one of them does the work.
        for known, known_length, bounds in self._bounds:
            if known is bias and known_length == length and bounds.ends.device == keys.device:
                return bounds
        found = _bounds(bias, batch, length, keys.device)
        self._bounds.append((bias, length, found))
        return found

    def _several_tokens(self, given: Mapping[str, Any], ids: Tensor) -> str | None:
        """Set `prefill`, or return why not."""
        cache, mask = cache_of(given), _mask_of(given)
        past = 0 if cache is None else int(cache.get_seq_length())
        starts = None
        if mask is None:
            if not _counts_up(given.get("position_ids")):
                return "position_ids that restart inside a row (packed sequences)"
            _note(given, _ASSUMED)
        else:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                _note(given, None)
                return "a prepared attention mask (the caller's own, or that of a static cache)"
            is_padded, is_left = _padding(mask, past + ids.shape[1])
            _note(given, _CHECKED if is_left else _BROKEN)
            if not is_left:
                return "an attention mask with holes, right padding or another length than the sequence"
            starts = mask.to(torch.int32).argmax(-1).to(device=ids.device, dtype=torch.int32) if is_padded else None
        self.prefill = Prefill(past, starts)
        return None

    def _say(self, reason: str) -> None:
        if reason in self._said:
            return
        self._said.add(reason)
        warnings.warn(
            f"wide's attention does not know {reason}: the family's own attention function runs instead, for as long "
            "as the model is called so. Outputs are right, attention skips nothing",
            stacklevel=2,
        )


def refuse_gradients(_gradient: Tensor) -> None:
    """Say that there are none (a hook of the logits)."""
    raise NotAttachedError(
        "this model is optimised, and wide's operators have no gradients; call wide.deoptimize(model) before training"
    )


def read_left_padding(mask: Tensor | None, length: int) -> Tensor | str | None:
    """Return the padding before each sequence, int64 [B], None if there is none, or what else a mask [B, S] hides."""
    if mask is None:
        return None
    is_padded, is_left = _padding(mask, length)
    if not is_padded:
        return None
    return mask.to(torch.int32).argmax(-1) if is_left else "holes, right padding or another length"


def mark_left_padded(cache: Any) -> None:
    """Note on a cache that the masks it was filled with hid left padding at most."""
    setattr(cache, _NOTE, _CHECKED)


def is_being_recorded(ids: Tensor) -> bool:
    """Return whether this forward is traced by a compiler or captured in a CUDA graph, and will run again unseen."""
    return torch.compiler.is_compiling() or (ids.is_cuda and torch.cuda.is_current_stream_capturing())


def is_free_to_read(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _step_obstacle(given: Mapping[str, Any], *, is_recorded: bool) -> str | None:
    """Return why a forward over one token must go by its mask, None if its keys are one run."""
    mask, cache = _mask_of(given), cache_of(given)
    if mask is None:
        return None
    note = getattr(cache, _NOTE, None)
    if not is_recorded and not (note == _CHECKED and isinstance(mask, Tensor) and not is_free_to_read(mask)):
        tensors = list(mask.values()) if isinstance(mask, dict) else [mask]
        tensors = [tensor for tensor in tensors if tensor is not None]
        if not all(isinstance(tensor, Tensor) and tensor.dim() in (2, 4) for tensor in tensors):
            return "an attention mask of an unknown kind"
        if note not in (_CHECKED, _BROKEN) or all(is_free_to_read(tensor) for tensor in tensors):
            note = _CHECKED if all(_is_one_run(tensor) for tensor in tensors) else _BROKEN
            _note(given, note)
    if note is None:
        return "a compiled or captured step whose cache was filled in a way that was not seen"
    return "an attention mask that hides keys between others" if note == _BROKEN else None


def _depends_on_values(given: Mapping[str, Any]) -> bool:
    """Return whether more than shapes says which keys a forward over several tokens sees."""
    if _mask_of(given) is not None or given.get("position_ids") is not None:
        return True
    cache = cache_of(given)
    # Static caches count on the device, so that a replay may stand at another place.
    return cache is not None and bool(getattr(cache, "is_compileable", True))


def _mask_of(given: Mapping[str, Any]) -> Any:
    mask = given.get("attention_mask")
    if isinstance(mask, dict) and all(value is None for value in mask.values()):
        return None
    return mask


def _note(given: Mapping[str, Any], found: str | None) -> None:
    cache = cache_of(given)
    if cache is not None:
        setattr(cache, _NOTE, found)


def _padding(mask: Tensor, length: int) -> tuple[bool, bool]:
    """Return whether a mask `[B, S]` hides anything, and whether that is left padding; waits for the device once."""
    if mask.shape[1] != length:
        return True, False
    real = mask.bool()
    is_left = real[:, -1].all() & (real[:, 1:] >= real[:, :-1]).all()
    is_full, left = torch.stack([real.all(), is_left]).tolist()
    return not is_full, bool(left)


def _counts_up(positions: Any) -> bool:
    """Return whether each position is the next one's predecessor; waits for the device once."""
    return positions is None or bool((positions[..., 1:] - positions[..., :-1] == 1).all())


def _is_one_run(mask: Tensor) -> bool:
    """Return whether the last query of a mask `[B, S]` or `[B, 1, T, S]` sees one run of keys."""
    if mask.dim() == 2:
        mask = mask.bool()[:, None, None]
    elif mask.shape[1] != 1:
        return False
    return not bool(_read(mask)[2].any())


def _bounds(bias: Tensor | None, batch: int, length: int, device: torch.device) -> Bounds:
    if bias is None:
        return Bounds(torch.full((batch,), length, dtype=torch.int32, device=device), None, None)
    ends, starts, is_broken = (part.expand(batch).contiguous() for part in _read(bias[..., :length]))
    return Bounds(ends, starts, is_broken)


def _read(bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return end, start and whether that is not all of it, `[B]`, of the keys that the last query of a mask sees."""
    last = bias[:, 0, -1]
    seen = last if last.dtype == torch.bool else last == 0
    length = seen.shape[1]
    places = torch.arange(1, length + 1, device=seen.device, dtype=torch.int32)
    ends = (seen * places).amax(-1)
    starts = length - (seen * places.flip(0)).amax(-1)
    is_broken = (ends <= starts) | (seen.sum(-1) != ends - starts)
    if last.dtype != torch.bool:
        # Neither shown nor hidden: a bias on the scores.
        is_broken = is_broken | (~seen & (last > torch.finfo(last.dtype).min / 2)).any(-1)
    return ends.to(torch.int32), starts.to(torch.int32), is_broken


def _unusual_attention(config: Any) -> str | None:
    """Return what of a configuration makes masks that are not causal."""
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "attention in both directions"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return f"layers of the kind {sorted(kinds)[0]!r}" if kinds else None


def _unusual_inputs(given: Mapping[str, Any], harmless: Set[str] = HARMLESS) -> str | None:
    if given.keys() <= harmless:
        return None
    for name, value in given.items():
        if name not in harmless and value is not None and value is not False:
            return f"the argument {name}="
    return None
