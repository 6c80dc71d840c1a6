"""What an attention module hands to transformers' attention function, seen in small calls, not read from names."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from wide.errors import UnsupportedModelError
from wide.kernels.rope.reference import rotate
from wide.models.block_spec import AttentionSpec

_NAME = "wide_probe"
_TOKENS = 3
_TOLERANCE = 2e-2
# Arguments of the attention function; any other changes what it computes.
_KNOWN = ("dropout", "scaling", "softcap", "sliding_window", "position_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionForm:
    """What an attention computes between its projections.

    Args:
        scale: Factor of the scores.
        window: Keys that a query sees at most, itself included; None = all.
        soft_cap: Bound of the scores; None = unbounded.
        rotates: Whether queries and keys are rotated by their positions.
        interleaved: Whether neighbouring channels form the pairs of that rotation.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    rotates: bool
    interleaved: bool


@torch.no_grad()
def read_form(part: AttentionSpec, cos: Tensor, sin: Tensor, where: str) -> AttentionForm:
    """Return what an attention computes, called for a few tokens with and without a rotation.

    Its projections are plain; cosines and sines are by position, [positions, r]. Raises UnsupportedModelError if it
    cannot be called on its own, asks for something that the engine does not compute, or rotates queries in another way.
    """
    module: Any = part.module
    weight: Any = part.query.weight
    config: Any = getattr(module, "config", None)
    if config is None:
        raise UnsupportedModelError(f"{where} has no configuration that names its attention function")
    cos, sin = cos[None, -_TOKENS:], sin[None, -_TOKENS:]
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def attention(_: object, query: Tensor, key: Tensor, value: Tensor, mask: object, **options: Any) -> Any:
        seen.append((query, options))
        return query.transpose(1, 2).contiguous(), None

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, cos.shape[1], weight.shape[1], generator=generator).to(weight)
    places = torch.arange(cos.shape[1], device=weight.device)[None]
    forward: Callable[..., Any] = type(module).forward
    module.config = copy.copy(config)
    ALL_ATTENTION_FUNCTIONS[_NAME] = attention
    try:
        module.config._attn_implementation = _NAME
        for angles in ((torch.ones_like(cos), torch.zeros_like(sin)), (cos, sin)):
            forward(module, hidden, position_embeddings=angles, attention_mask=None, position_ids=places)
    except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(f"{where} cannot be called on its own: {error}") from error
    finally:
        module.config = config
        del ALL_ATTENTION_FUNCTIONS[_NAME]
    if len(seen) != 2:
        raise UnsupportedModelError(f"{where} calls transformers' attention function {len(seen) / 2:g} times, not once")
    (plain, _), (query, options) = seen
    if options.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{where} looks ahead (is_causal=False); the engine attends causally")
    unknown = [name for name, value in options.items() if name not in _KNOWN and value is not None]
    if unknown:
        raise UnsupportedModelError(f"{where} hands to its attention function {unknown[0]}, which the engine ignores")
    rotates = not torch.equal(query, plain)
    rotated = {form: (paired(cos), paired(sin)) if form else (cos, sin) for form in (False, True)}
    apart = {form: rotate(plain, *rotated[form], interleaved=form) - query for form in rotated}
    forms = [form for form in rotated if bool(apart[form].float().norm() <= _TOLERANCE * query.float().norm())]
    if rotates and not forms:
        raise UnsupportedModelError(f"{where} rotates queries in a way that the engine does not know")
    scale = options.get("scaling")
    return AttentionForm(
        scale=part.head_dim**-0.5 if scale is None else float(scale),
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
        rotates=rotates,
        interleaved=rotates and forms[0],
    )


def paired(angles: Tensor) -> Tensor:
    """Return cosines or sines [..., r] of pairs twice over, the first halves first, also where neighbours are alike."""
    pairs = angles.unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2) if torch.equal(pairs[..., 0], pairs[..., 1]) else angles
