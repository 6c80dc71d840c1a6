"""What routers skipped, read from counters on the device and logged while a server works."""

import logging
import math
import time
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank

from wide.vllm.int8 import quantise_linears
from wide.vllm.sublayers import Router
from wide.vllm.warming import warm

_SECONDS = 10.0
_LOGGER = logging.getLogger("vllm.wide")


class Reporting:
    """What a model class adds to vLLM's; it calls `take_over` when the routers are there."""

    # vLLM refuses adapters of LoRA and pipelines by these.
    supports_lora = False
    supports_pp = False
    tally: "Tally"
    # Of a step.
    most_rows: int
    is_warm = False

    def take_over(self, vllm_config: Any, weights: str) -> None:
        """Have weights kept in one of `WEIGHTS`, and count what routers skip."""
        quantise_linears(self, weights)  # type: ignore[arg-type]
        self.tally = Tally(self)  # type: ignore[arg-type]
        self.most_rows = vllm_config.scheduler_config.max_num_batched_tokens

    def warm(self) -> None:
        """Run the kernels of all layers, once."""
        if not self.is_warm:
            self.is_warm = True
            warm(self, self.most_rows)  # type: ignore[arg-type]

    def compute_logits(self, *arguments: Any, **options: Any) -> Any:
        """Return logits; no graph holds this call, so that every step comes here, vLLM's own before all others."""
        self.warm()
        self.tally.report()
        return super().compute_logits(*arguments, **options)  # type: ignore[misc]


class Tally:
    """Shares of (token, group) pairs that the attentions and FFNs of a model skipped, over this rank's groups.

    Counters are added to where routers decide, so that steps cost nothing more; reading them waits for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = [(n, m) for n, m in model.named_modules() if isinstance(m, Router) and m.decides]
        halves = ("attention", "the FFN")
        self.routers = {
            half: [m for n, m in routers if ("attn" in n or "attention" in n) == (half == "attention")]
            for half in halves
        }
        self.before: dict[tuple[str, str], list[list[int]]] = {}
        self.due: float | None = None

    def take(self, reader: str = "") -> tuple[dict[str, float], int]:
        """Return the shares that were skipped since this reader's last call, and how many tokens that were."""
        shares, tokens = {}, 0
        for half, routers in self.routers.items():
            if not routers:
                continue
            now = torch.stack([router.counts for router in routers]).tolist()
            known = self.before.get((reader, half)) or [[0, 0]] * len(now)
            self.before[reader, half] = now
            pairs = skipped = 0
            for router, new, old in zip(routers, now, known, strict=True):
                executed, tokens = ((a - b) % 2**32 for a, b in zip(new, old, strict=True))
                pairs += tokens * router.num_groups
                skipped += tokens * (router.num_groups + router.extra) - executed
            shares[half] = skipped / max(pairs, 1)
        return shares, tokens

    def report(self) -> None:
        """Log what was skipped since the last line, ten seconds after it at the earliest."""
        now = time.monotonic()
        if self.due is not None and now < self.due:
            return
        if get_tensor_model_parallel_rank() != 0:
            self.due = math.inf
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        is_first, self.due = self.due is None, now + _SECONDS
        shares, tokens = self.take("log")
        # What comes first are runs of vLLM's own, which measure memory and record graphs.
        if tokens and not is_first:
            words = " and ".join(f"{share:.1%} of {half}" for half, share in shares.items())
            _LOGGER.info("wide skipped %s in %s tokens", words, f"{tokens:,}")
