"""SkipGPT: each token executes or skips the attention and the FFN of every layer; keys and values are never skipped.

'skipgpt' is as the WIDE paper runs it, with its own routers and schedule, 'skipgpt-original' as its authors released
it.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

from wide.methods.catalogue import SkipGPTConfig, SkipGPTOriginalConfig
from wide.methods.method import sublayer_plan
from wide.methods.routed import Routing
from wide.models.block_spec import BlockSpec
from wide.models.router import Router

_DEFAULT_RANK_SHARE = 4


def route(specs: Sequence[BlockSpec], settings: SkipGPTConfig, asked: Routing) -> Routing:
    """Return the row of the WIDE paper: bottleneck routers on the residual stream that each sublayer reads."""
    return dataclasses.replace(
        asked,
        config=sublayer_plan(specs, rank=settings.router_rank, router_input="residual", bias=True),
        uniform=settings.uniform,
        deviations=(
            f"routers are linear bottlenecks of rank {settings.router_rank}, the original's are MLPs",
            "the FFN's router reads the stream after the attention, the original's the stream before it",
            f"the temperature ends at {asked.stage.temperature_end:g}, the original's at 1",
            "inference routes by margin, the original samples",
        ),
    )


def route_original(specs: Sequence[BlockSpec], settings: SkipGPTOriginalConfig, asked: Routing) -> Routing:
    """Return the authors' row: MLP routers, both of a layer on its input, with their temperatures and weight.

    Steps, sizes and learning rate stay those that are asked for.
    """
    rank = settings.router_rank or max(specs[0].hidden_size // _DEFAULT_RANK_SHARE, 1)
    return dataclasses.replace(
        asked,
        config=sublayer_plan(specs, rank=rank, router_input="layer_input", bias=True, form="mlp"),
        stage=dataclasses.replace(
            asked.stage, temperature_start=settings.temperature_start, temperature_end=settings.temperature_end
        ),
        objective=dataclasses.replace(asked.objective, weight=settings.weight),
        initialise=None if settings.router_init == "kaiming" else partial(Router.reset_parameters, like_linear=True),
        deviations=(
            "LoRA, the same for all rows, trains routers on at its own temperatures; the original freezes them",
            "inference routes by margin, the original samples at temperature 1",
            "padding is left out of the skip rate, the original counts it",
        ),
    )
