"""CoopPruner: layers as players of a game; what each contributes is read off a surrogate of the perplexity.

Source: "Pruning as a Cooperative Game: Surrogate-Assisted Layer Contribution Estimation for Large Language Models",
2026.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wide.data.batches import TokenBlocks
from wide.data.progress import progress
from wide.errors import EvaluationError
from wide.evaluation.perplexity import exp_or_infinity
from wide.methods.block_gates import BlockGates, KeptSets, both_halves, plan_without, whole_layers
from wide.methods.calibration import calibration_windows, json_number
from wide.methods.catalogue import CoopPrunerConfig
from wide.methods.method import Decision, Target
from wide.models.discovery import discover

_REFERENCE_LAYERS = 32
_PAPER_REMOVED = (2, 5, 8, 11, 14)
_SPANNING_FIRST, _SPANNING_LAST, _SPANNING_STRATA = 2, 20, 7
# Rows of the surrogate's input at a time: 64 layers of 32 thousand sets take 8 MiB.
_ROWS_PER_CHUNK = 1 << 15

Utility = Callable[[Tensor], Tensor]
"""Kept-sets, float `[K, L]` of zeros and ones -> their worth, `[K]`."""


def removed_counts(num_layers: int, count: int, strata: str) -> list[int]:
    """Return the numbers of removed layers that are sampled, ascending; 'spanning' reaches to `count` at least."""
    scale = num_layers / _REFERENCE_LAYERS
    wanted: Sequence[float] = [removed * scale for removed in _PAPER_REMOVED]
    if strata == "spanning":
        last = max(_SPANNING_LAST * scale, count)
        wanted = np.linspace(_SPANNING_FIRST * scale, last, _SPANNING_STRATA).tolist()
    # Removing nothing or everything says nothing about single layers.
    return sorted({min(max(round(removed), 1), max(num_layers - 1, 1)) for removed in wanted})


def sample_kept_layers(num_layers: int, removed: Sequence[int], count: int, generator: np.random.Generator) -> KeptSets:
    """Return random sets of kept layers, `[count, L]`; the strata take turns, and within one all sets are as likely.

    `removed` has the number of removed layers of each stratum.
    """
    rank = generator.random((count, num_layers)).argsort(axis=1).argsort(axis=1)
    dropped = np.resize(np.asarray(removed, dtype=np.int64), count)
    return rank >= dropped[:, None]


def measured_utilities(gates: BlockGates, kept: KeptSets, *, dense: float) -> npt.NDArray[np.float64]:
    """Return perplexity of the whole model / perplexity of each set of layers, `[K]`; NaN where a forward broke down.

    `kept` is `[K, L]`; `dense` is the mean loss of the whole model, nats per token.
    """
    nlls = gates.mean_nll(whole_layers(kept), title="cooppruner: sets of layers")
    with np.errstate(over="ignore"):
        utilities: npt.NDArray[np.float64] = np.exp(dense - nlls)
    return np.where(np.isfinite(nlls), utilities, np.nan)


def finite_pairs(kept: KeptSets, utilities: npt.NDArray[np.float64]) -> tuple[KeptSets, npt.NDArray[np.float64]]:
    """Return the sets whose utility is finite, together with it; raises EvaluationError if there is none."""
    finite = np.isfinite(utilities)
    if not finite.any():
        raise EvaluationError(f"no loss of {len(kept)} sets of layers is finite: try bfloat16 or float32")
    return kept[finite], utilities[finite]


def fit_surrogate(kept: KeptSets, utilities: npt.NDArray[np.float64], settings: CoopPrunerConfig) -> nn.Module:
    """Return a surrogate fitted to finite utilities `[K]` of sets `[K, L]`, a `Utility` in float32 on the CPU.

    It is L -> 2L -> 1, CELU inside, a sigmoid at the end, and begins uniform within 1 / sqrt(inputs); the seed decides
    it.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    inputs = torch.from_numpy(kept.astype(np.float32))
    wanted = torch.from_numpy(utilities.astype(np.float32))
    # Their own initial weights would come from the global generator, which is the caller's.
    layers = kept.shape[1]
    first, second = (nn.utils.skip_init(nn.Linear, *sizes) for sizes in ((layers, 2 * layers), (2 * layers, 1)))
    for linear in (first, second):
        for parameter in linear.parameters():
            bound = linear.in_features**-0.5
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    surrogate = nn.Sequential(first, nn.CELU(), second, nn.Sigmoid(), nn.Flatten(0))
    optimizer = torch.optim.SGD(surrogate.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, settings.rate_step, settings.rate_decay)
    with torch.enable_grad():
        for _ in progress(range(settings.epochs), title="cooppruner: surrogate", unit="epoch"):
            for batch in torch.randperm(len(inputs), generator=generator).split(settings.surrogate_batch_size):
                optimizer.zero_grad()
                F.mse_loss(surrogate(inputs[batch]), wanted[batch]).backward()
                optimizer.step()
            schedule.step()
    return surrogate


@torch.no_grad()
def explained_variance(utility: Utility, kept: KeptSets, utilities: npt.NDArray[np.float64]) -> float:
    """Return which share of the variance of measured utilities `[K]` a surrogate explains; 1 is perfect, 0 the mean's.

    Utilities that are all equal count as explained.
    """
    predicted = utility(torch.from_numpy(kept.astype(np.float32))).double().numpy()
    spread = float(utilities.var())
    return 1.0 - float(np.square(predicted - utilities).mean()) / spread if spread else 1.0


@torch.no_grad()
def contributions(utility: Utility, kept: KeptSets, dtype: torch.dtype = torch.float32) -> npt.NDArray[np.float64]:
    """Return what each layer adds to the utility, averaged over sets of the others: `[L]` float64.

    For layer i it is the mean over the sets, `[K, L]`, of utility(with i) - utility(without i). With strata of all
    sizes this is the Shapley value; with fewer it is a stratified contribution.
    """
    sets = torch.from_numpy(kept).to(dtype)
    sums = np.zeros(sets.shape[1], dtype=np.float64)
    for chunk in sets.split(_ROWS_PER_CHUNK):
        for layer in range(sets.shape[1]):
            both = chunk.clone()
            both[:, layer] = 1
            gain = utility(both).double()
            both[:, layer] = 0
            gain -= utility(both).double()
            sums[layer] += float(gain.sum())
    return sums / len(sets)


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: CoopPrunerConfig) -> Decision:
    """Decide which layers to leave out; both measures of the target are the same here.

    Raises ConfigError if the text is too short, and EvaluationError if no loss is finite.
    """
    num_layers = len(discover(model))
    count = round(target.sparsity * num_layers)
    if count == 0:
        return Decision(plan=plan_without((), num_layers))
    gates = BlockGates(model, calibration_windows(blocks, settings), settings.batch_size)
    strata = removed_counts(num_layers, count, settings.strata)
    generator = np.random.default_rng(settings.seed)
    sets = sample_kept_layers(num_layers, strata, settings.num_masks, generator)
    dense = gates.dense_nll()
    measured = measured_utilities(gates, sets, dense=dense)
    sets, utilities = finite_pairs(sets, measured)
    surrogate = fit_surrogate(sets, utilities, settings)
    others = sample_kept_layers(num_layers, strata, settings.num_contribution_masks, generator)
    values = contributions(surrogate, others)
    order = np.argsort(values, kind="stable")
    return Decision(
        plan=plan_without(both_halves(order[:count]), num_layers),
        effort=gates.effort,
        notes={
            "removed": order[:count].tolist(),
            "order": order.tolist(),
            "contributions": values.tolist(),
            "strata": strata,
            "undefined_utilities": len(measured) - len(utilities),
            "surrogate_fit": explained_variance(surrogate, sets, utilities),
            "dense_perplexity": json_number(exp_or_infinity(dense)),
        },
        deviations=_deviations(settings, count, strata, num_layers),
    )


def _deviations(settings: CoopPrunerConfig, count: int, strata: Sequence[int], num_layers: int) -> tuple[str, ...]:
    deviations = [
        "calibrated on the benchmark's corpus, the original on BookCorpus",
        "sets whose loss is not finite are dropped together with their label, and all others train the surrogate; the "
        "original drops the label alone, and the first sets",
    ]
    most = max(strata)
    if settings.strata == "spanning":
        deviations.append(f"sets with up to {most} layers removed are sampled, the original's stop at 14 of 32")
    elif num_layers != _REFERENCE_LAYERS:
        deviations.append(
            f"sets with {', '.join(map(str, strata))} of {num_layers} layers removed are sampled, in proportion to the "
            "original's 2, 5, 8, 11, 14 of 32"
        )
    if settings.strata == "paper" and count > most:
        deviations.append(
            f"{count} layers are removed and, as in the original, sets with at most {most} removed are sampled: the "
            "contributions are extrapolated; strata='spanning' reaches the target"
        )
    return tuple(deviations)
