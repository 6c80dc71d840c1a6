"""The Hugging Face model itself: dense, masked and after `wide.optimize`, each captured in a CUDA graph.

The runtime of the other races has fused norms and RoPE of its own; here everything but the routed halves is the
family's, as for whoever calls `wide.optimize` and keeps using the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wide.inference.optimize import optimize
from wide.models.attach import attachment
from wide.models.observe import bypass, force_routing
from wide.profiling.captured import captured_call, captured_race
from wide.profiling.energy import EnergyCounter
from wide.routing import LayerRouting

# Two paths of one model in bfloat16 under the same masks stay within this on a deep model.
_LIMIT = 6e-2


class Forms(NamedTuple):
    """One attached model twice.

    Args:
        masked: Attached; bypassed, it is the dense model.
        optimised: The same weights and routers, fused.
    """

    masked: Any
    optimised: Any


def optimised_forms(make: Callable[[], Any], *, backend: str, executed: tuple[float, float]) -> Forms:
    """Return both forms of a model.

    Args:
        make: Returns the attached model, the same one each time.
        backend: Of `wide.optimize`.
        executed: Shares of attention and FFN pairs that are expected to execute.
    """
    return Forms(masked=make(), optimised=optimize(make(), backend=backend, executed=executed))


@torch.no_grad()
def optimised_gate(forms: Forms, ids: Tensor) -> dict[str, Any]:
    """Compare the logits of both forms under the same random masks of 50 %.

    Args:
        forms: Both.
        ids: Prompt, [1, T].
    """
    generator = torch.Generator(device=ids.device).manual_seed(5)
    masks: list[dict[str, Tensor | None]] = [{"attention": None, "ffn": None} for _ in attachment(forms.masked).specs]
    for router in attachment(forms.masked).routers():
        drawn = torch.rand(*ids.shape, router.num_groups, generator=generator, device=ids.device)
        masks[router.layer_index][router.half_layer] = drawn < 0.5
    routing = [LayerRouting(**pair) for pair in masks]
    logits = []
    for model in forms:
        with force_routing(model, routing):
            logits.append(model(ids, use_cache=False).logits.float())
    error = ((logits[1] - logits[0]).norm() / logits[0].norm()).item()
    # NaN is no agreement.
    error = error if error == error else float("inf")
    return {"tokens": ids.shape[1], "optimised_error": error, "limit": _LIMIT, "green": error <= _LIMIT}


def optimised_race(
    forms: Forms, what: str, ids: Tensor, length: int, *, quick: bool, energy: EnergyCounter | None
) -> list[dict[str, Any]]:
    """Return one record each of the dense, the masked and the optimised model; routers decide in the last two.

    Args:
        forms: Both forms.
        what: 'prefill' or 'decode'.
        ids: Tokens of each sequence, [B, T] for a prefill and [B, 1] for a step.
        length: Tokens of a prompt, or cached before the step.
        quick: Fewer samples.
        energy: The counter that joules are measured with; None leaves them out.
    """
    masked = captured_call(forms.masked, what, ids, length)

    def dense() -> Tensor:
        with bypass(forms.masked):
            return masked()

    calls = {"dense": dense, "masked": masked, "optimised": captured_call(forms.optimised, what, ids, length)}
    return captured_race(calls, what, length, ids.shape[0], quick=quick, energy=energy)
