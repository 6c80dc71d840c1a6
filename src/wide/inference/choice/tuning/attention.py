"""The race of causal attention over one prompt against the libraries' kernels."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from wide.inference.choice.layer_sizes import LayerSizes, operator_case
from wide.inference.choice.layer_sizes import candidates as candidates_of
from wide.inference.choice.tuning.products import choice_name, exact_mask, normal, shipped_name
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


def prompt_race(
    sizes: LayerSizes,
    length: int,
    active: float,
    choices: Sequence[Choice],
    *,
    device: torch.device,
    shipped: Choice | None = None,
) -> Race:
    """Return the race of one sequence under a share of (token, group) pairs that execute.

    Choices are compared with the reordering known; empty compares what charges it alone. What ships is tried first.
    """
    heads, kv_heads, groups = sizes.query_width // sizes.head_dim, sizes.num_kv_heads, sizes.attention_groups
    q = normal(1, length, heads, sizes.head_dim, device=device)
    k, v = (normal(1, length, kv_heads, sizes.head_dim, device=device) for _ in range(2))
    mask = exact_mask(1, length, groups, active=active, device=device)
    order = reorder_sequences(mask, backend="triton")
    heads_first = [part.transpose(1, 2).contiguous() for part in (q, k, v)]
    executing = mask.repeat_interleave(heads // groups, 2)

    def charged(backend: str, tile: Sequence[int]) -> torch.Tensor:
        return attention_prefill(q, k, v, reorder_sequences(mask, backend="triton"), backend=backend, tile=tile)

    def wanted() -> torch.Tensor:
        return library_attention("flash", *heads_first, is_causal=True).transpose(1, 2)

    def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
        return relative(got[executing], wanted[executing])

    candidates: dict[str, Sequence[Call]] = {
        f"dense {library}": [partial(library_attention, library, *heads_first, is_causal=True)] for library in LIBRARIES
    }
    if heads != kv_heads:
        repeated = [heads_first[0], *(part.repeat_interleave(heads // kv_heads, 1) for part in heads_first[1:])]
        candidates["dense cudnn, repeated KV"] = [partial(library_attention, "cudnn", *repeated, is_causal=True)]
    peers = tuple(candidates)
    stands_for = dict.fromkeys(peers, DENSE)
    names = {"triton": "operator, reorder charged"}
    # Backends whose default is tried.
    defaults = choices or candidates_of("attention", sizes, length, device, quick=True)
    names |= {choice.backend: f"{choice.backend} operator, reorder charged" for choice in defaults if not choice.tile}
    for backend, name in names.items():
        tile = shipped.tile if shipped is not None and shipped.backend == backend else ()
        candidates[name] = [partial(charged, backend, tile)]
    if choices:
        everything = reorder_sequences(torch.ones_like(mask), backend="triton")
        candidates["operator, nothing skipped"] = [partial(attention_prefill, q, k, v, everything, backend="triton")]
    for choice in choices:
        run = partial(attention_prefill, q, k, v, order, backend=choice.backend, tile=choice.tile)
        candidates[choice_name(choice)] = [run]
        stands_for[choice_name(choice)] = choice
    ships = "" if shipped is None else names.get(shipped.backend) or shipped_name(stands_for, shipped)
    operator, case = operator_case("attention", sizes, length, active)
    return Race(
        name=f"prefill T={length} p={active}",
        candidates=candidates,
        wanted=wanted,
        error=error,
        trusted=peers,
        tolerance=TOLERANCE,
        flop=active * 2.0 * length * (length + 1) * heads * sizes.head_dim,
        facts={"length": length, "active": active},
        operator=operator,
        case=case,
        choices=stands_for,
        shipped=ships,
    )
