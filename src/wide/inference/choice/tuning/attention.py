"""The race of causal attention over one prompt against the libraries' kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from wide.inference.choice.layer_sizes import LayerSizes, candidates, operator_case
from wide.inference.choice.tuning.products import choice_name, exact_mask, normal
from wide.inference.choice.tuning.race import Call, Race, relative
from wide.inference.operators.table import DENSE
from wide.kernels.attention_prefill.op import attention_prefill
from wide.kernels.reorder.op import reorder_sequences
from wide.kernels.tuning import Choice

# Dense peers round to bfloat16 as well.
TOLERANCE = 1.5e-2
LIBRARIES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
"""The peers of attention, by name."""


def library_attention(
    library: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
) -> torch.Tensor:
    """Return attention [B, H_q, T_q, d] of queries over keys and values [B, H_k, T, d] by one of `LIBRARIES`."""
    with sdpa_kernel(LIBRARIES[library]):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def prompt_race(sizes: LayerSizes, length: int, active: float, *, device: torch.device, quick: bool) -> Race:
    """Return the race of one sequence, of the choices that fit; arguments as of `Prompt.draw`."""
    choices = candidates("attention", sizes, length, device, quick=quick)
    return Prompt.draw(sizes, length, active, device=device).race(choices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a race of one sequence attends with: q [1, T, H_q, d], k and v [1, T, H_k, d], a mask [1, T, N_G].

    `active` is the share of (token, group) pairs that execute.
    """

    sizes: LayerSizes
    active: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def draw(cls, sizes: LayerSizes, length: int, active: float, *, device: torch.device) -> "Prompt":
        """Return random queries, keys and values of so many tokens."""
        heads = sizes.query_width // sizes.head_dim
        q, k, v = (
            normal(1, length, count, sizes.head_dim, device=device)
            for count in (heads, sizes.num_kv_heads, sizes.num_kv_heads)
        )
        mask = exact_mask(1, length, sizes.attention_groups, active=active, device=device)
        return cls(sizes=sizes, active=active, q=q, k=k, v=v, mask=mask)

    def race(self, choices: Sequence[Choice]) -> Race:
        """Return the race of choices, with the reordering known, against the libraries' kernels."""
        heads, kv_heads = self.q.shape[2], self.k.shape[2]
        order = reorder_sequences(self.mask, backend="triton")
        heads_first = [part.transpose(1, 2).contiguous() for part in (self.q, self.k, self.v)]
        executing = self.mask.repeat_interleave(heads // self.mask.shape[2], 2)

        def wanted() -> torch.Tensor:
            return library_attention("flash", *heads_first, is_causal=True).transpose(1, 2)

        def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
            return relative(got[executing], wanted[executing])

        raced: dict[str, Sequence[Call]] = {
            f"dense {library}": [partial(library_attention, library, *heads_first, is_causal=True)]
            for library in LIBRARIES
        }
        if heads != kv_heads:
            repeated = [heads_first[0], *(part.repeat_interleave(heads // kv_heads, 1) for part in heads_first[1:])]
            raced["dense cudnn, repeated KV"] = [partial(library_attention, "cudnn", *repeated, is_causal=True)]
        peers = tuple(raced)
        stands_for = dict.fromkeys(peers, DENSE)
        for choice in choices:
            run = partial(attention_prefill, self.q, self.k, self.v, order, backend=choice.backend, tile=choice.tile)
            raced[choice_name(choice)] = [run]
            stands_for[choice_name(choice)] = choice
        operator, case = operator_case("attention", self.sizes, self.q.shape[1], self.active)
        return Race(
            candidates=raced,
            wanted=wanted,
            error=error,
            trusted=peers,
            tolerance=TOLERANCE,
            operator=operator,
            case=case,
            choices=stands_for,
        )
