"""Codebooks of FFN masks: fit them to margins, let routers take codewords, and count what sorted tiles would execute.

A codeword is a mask over all groups of a layer; each token takes the one with the highest score, the sum over groups of
its margin times +1 (executes) or -1 (skips).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from wide.models.attach import attachment
from wide.models.observe import capture_routing, judging
from wide.models.router import EXECUTE, SKIP, Router
from wide.profiling.mask_tiles import gray_rows, in_order, rare_groups, tile_unions

_ROUNDS, _SETTLED = 40, 1e-5
_ROUNDS_OF_REFIT = 3
_BISECTIONS = 20
# Margins of training that a refit reads.
_KEPT_TOKENS = 16_384
_CHUNK = 1 << 24


class Codebook:
    """Masks of one layer.

    Args:
        code: bool [C, N_G], True executes.
        offset: Added to all margins before they are scored, so that the share that executes is the wanted one.
    """

    def __init__(self, code: Tensor, offset: float) -> None:
        """Keep the code as the matrix of the scores, too."""
        self.code, self.offset = code, offset
        self.signs = code.float() * 2 - 1

    def choose(self, margin: Tensor) -> Tensor:
        """Return the codeword of each token, int64 `[...]`, for margins `[..., N_G]`."""
        return ((margin + self.offset) @ self.signs.T).argmax(-1)

    def with_threshold(self, threshold: float) -> "Codebook":
        """Return the codebook that chooses at a threshold of 0 what this one does at `threshold`."""
        return Codebook(self.code, self.offset - threshold)


def fit(
    margin: Tensor, size: int, share: float, *, seed: int = 17, start: Codebook | None = None, rounds: int = _ROUNDS
) -> Codebook:
    """Fit a codebook: tokens to their best codewords, bits to the sums of their tokens' margins, in turns.

    The offset is chosen in every turn such that the codewords of all tokens execute `share` of the pairs.

    Args:
        margin: Of the router, less its threshold, float32 [M, N_G].
        size: Codewords, C.
        share: To execute, in (0, 1).
        seed: Of the tokens whose masks are the first codewords.
        start: Codewords to begin with instead.
        rounds: At most so many turns.
    """
    book = start
    if book is None:
        # By numpy: the same tokens on every device.
        chosen = np.random.default_rng(seed).permutation(len(margin))[:size]
        book = Codebook(margin[torch.from_numpy(chosen).to(margin.device)] >= 0, 0.0)
    best = -1.0
    for _ in range(rounds):
        tokens, scores = _assign(book, margin)
        counts = torch.bincount(tokens, minlength=size)
        empty = (counts == 0).nonzero().flatten()
        if len(empty):
            # Tokens that their codewords serve worst get codewords of their own.
            lost = (margin + book.offset).abs().sum(-1) - scores
            tokens[lost.topk(len(empty)).indices] = empty
            counts = torch.bincount(tokens, minlength=size)
        sums = torch.zeros(size, margin.shape[1], device=margin.device).index_add_(0, tokens, margin)
        book = _at_share(sums / counts.clamp(min=1).unsqueeze(-1), counts, share)
        value = float(((sums + book.offset * counts.unsqueeze(-1)) * book.signs).sum())
        if not len(empty) and abs(value - best) <= _SETTLED * abs(best):
            break
        best = value
    return _with_share(book, margin, share)


def _with_share(book: Codebook, margin: Tensor, share: float) -> Codebook:
    """Return the same codewords with the offset, found by bisection, at which the chosen ones execute `share`."""
    sizes = book.code.float().mean(-1)
    spread = float(margin.abs().max())
    low, high = book.offset - spread, book.offset + spread
    for _ in range(_BISECTIONS):
        middle = Codebook(book.code, (low + high) / 2)
        is_less = float(sizes[_assign(middle, margin)[0]].mean()) < share
        low, high = (middle.offset, high) if is_less else (low, middle.offset)
    return Codebook(book.code, (low + high) / 2)


def _assign(book: Codebook, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Return codeword and score of each token, in pieces that bound the memory for scores."""
    pieces = [((part + book.offset) @ book.signs.T).max(-1) for part in margin.split(max(1, _CHUNK // len(book.code)))]
    return torch.cat([piece.indices for piece in pieces]), torch.cat([piece.values for piece in pieces])


def _at_share(means: Tensor, counts: Tensor, share: float) -> Codebook:
    """Return the codebook whose bits are the `share` highest mean margins, codewords weighted by their tokens."""
    flat, order = means.flatten().sort(descending=True)
    weights = counts.unsqueeze(-1).expand_as(means).flatten()[order].double()
    reached = weights.cumsum(0) / weights.sum()
    last = int((reached - share).abs().argmin())
    offset = -float(flat[last])
    return Codebook(means >= -offset, offset)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How routers that take codewords are trained.

    Args:
        gradient: 'groups': that of each group's own gate, whose noise the margins get before they are scored; 'choice':
            that of a Gumbel-softmax over the codewords, with the probabilities that a router of independent groups
            gives to these masks.
        commitment: Weight of the cross-entropy between each group's own decision and its bit of the codeword, nats per
            token and group. It keeps margins near the codewords, which the gradient of 'groups' knows nothing of.
        refit_at: Training forwards, from 1, after which codebooks are fitted anew to recent margins.
    """

    gradient: str = "groups"
    commitment: float = 0.0
    refit_at: frozenset[int] = frozenset()


class Snapped:
    """Stands in for the forward of one FFN router: masks are codewords.

    Args:
        router: Whose forward it becomes.
        codebook: None fits one to the margins of the first forward.
        size: Codewords of that fit.
        share: To execute, of that fit.
        training: What happens in training mode.
    """

    def __init__(
        self,
        router: Router,
        codebook: Codebook | None,
        *,
        size: int = 0,
        share: float = 0.5,
        training: Training | None = None,
    ) -> None:
        """Put it in the forward's place."""
        self.router, self.codebook = router, codebook
        self._training = training or Training()
        self._size, self._share = size, share
        self._seen = 0
        self._recent: list[Tensor] = []
        router.forward = self  # type: ignore[assignment]

    def remove(self) -> None:
        """Give the router its own forward back."""
        del self.router.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the mask `[B, T, N_G]`, as `Router.forward` does."""
        router = self.router
        logits = router.logits(hidden)
        margin = logits[..., EXECUTE] - logits[..., SKIP]
        if self.codebook is None:
            self.codebook = fit(margin.flatten(0, -2) - router.threshold, self._size, self._share)
        if router.training:
            self._remember(margin.detach())
            mask = self._trained_mask(margin)
        else:
            mask = self.codebook.code[self.codebook.choose(margin - router.threshold)]
        if router.control.observed is not None:
            router._observe(router.control.observed[router.layer_index], mask, margin)
        return mask

    def _trained_mask(self, margin: Tensor) -> Tensor:
        book, heat = self.codebook, self.router.control.temperature
        assert book is not None
        by_group = self._training.gradient == "groups"
        # Half of the score is the logarithm of the probability of a mask, up to a constant.
        values = margin if by_group else 0.5 * (margin + book.offset) @ book.signs.T
        if self.router.control.noise:
            uniform = torch.rand_like(values).clamp(1e-6, 1 - 1e-6)
            gumbel = -(-uniform.log()).log()
            # The difference of two Gumbel variables is logistic.
            values = values + (uniform.log() - (1 - uniform).log() if by_group else gumbel)
        chosen = book.choose(values) if by_group else values.argmax(-1)
        soft = (values / heat).sigmoid() if by_group else (values / heat).softmax(-1) @ book.code.float()
        hard = book.code[chosen].float()
        if self._training.commitment and margin.requires_grad:
            own = (margin.detach() + book.offset).sigmoid()
            pull = self._training.commitment / margin[..., 0].numel() * (own - hard)
            margin.register_hook(lambda gradient: gradient + pull)
        return hard + (soft - soft.detach())

    def _remember(self, margin: Tensor) -> None:
        if not self._training.refit_at:
            return
        self._recent.append(margin.flatten(0, -2))
        while sum(map(len, self._recent[1:])) >= _KEPT_TOKENS:
            self._recent.pop(0)
        self._seen += 1
        if self._seen in self._training.refit_at:
            self.refit(torch.cat(self._recent))

    def refit(self, margin: Tensor) -> None:
        """Fit the codebook anew from where it is, at the share that it executes now, to margins `[M, N_G]`."""
        book = self.codebook
        assert book is not None
        share = float(book.code[book.choose(margin)].float().mean())
        self.codebook = fit(margin, len(book.code), share, start=book, rounds=_ROUNDS_OF_REFIT)


def ffn_routers(model: nn.Module) -> list[Router]:
    """Return the routers of the FFN halves, in the order of the layers."""
    return [router for router in attachment(model).routers() if router.half_layer == "ffn"]


@contextmanager
def snapped(model: nn.Module, books: Sequence[Codebook], training: Training | None = None) -> Iterator[None]:
    """Let the FFN routers of a model take codewords inside the block.

    Args:
        model: An attached model.
        books: Of each FFN router.
        training: What happens in training mode.
    """
    found = [Snapped(router, book, training=training) for router, book in zip(ffn_routers(model), books, strict=True)]
    try:
        yield
    finally:
        for one in found:
            one.remove()


def fit_codebooks(model: nn.Module, input_ids: Tensor, size: int, shares: Sequence[float]) -> list[Codebook]:
    """Fit a codebook to each FFN router over a text, each with the earlier layers on their codewords already.

    Args:
        model: An attached model.
        input_ids: int64 `[B, T]`, all of it in one forward.
        size: Codewords.
        shares: To execute, of each FFN router.
    """
    routers = ffn_routers(model)
    found = [Snapped(router, None, size=size, share=share) for router, share in zip(routers, shares, strict=True)]
    try:
        with judging(model):
            model.base_model(input_ids=input_ids, use_cache=False)  # type: ignore[operator]
    finally:
        for one in found:
            one.remove()
    return [one.codebook for one in found if one.codebook is not None]


def ffn_masks(model: nn.Module, input_ids: Tensor) -> list[Tensor]:
    """Return the masks of the FFN routers over a text, bool [B * T, N_G] each, in one forward."""
    routers = ffn_routers(model)
    # The hook that copies what was observed sits on the whole model, head included, hence piece by piece.
    found: list[list[Tensor]] = [[] for _ in routers]
    with judging(model), capture_routing(model) as routing:
        for part in input_ids.split(8):
            model(input_ids=part, use_cache=False)
            for masks, router in zip(found, routers, strict=True):
                mask = routing[router.layer_index].ffn
                assert mask is not None
                masks.append(mask.flatten(0, 1))
    return [torch.cat(masks) for masks in found]


def tiles_of(mask: Tensor) -> dict[str, float]:
    """Return what tiles of rows sorted by mask execute, as shares of all pairs.

    `padded_64`: rows of a codeword filled up to units of 64, a tile a unit; `padded_128`: the same in units of 128;
    `pairs_128`: units of 64, two neighbours a tile; `sorted_64`, `sorted_128`: sorted rows without filling up, so that
    some tiles span codewords. Rows are in the Gray order of the masks, rare groups first.

    Args:
        mask: bool [M, N_G].
    """
    rows = mask.cpu().numpy()
    # The rows of a codeword are sorted as one.
    packed = np.packbits(rows, axis=1)
    _, first, counts = np.unique(packed.view(f"V{packed.shape[1]}").ravel(), return_index=True, return_counts=True)
    order = gray_rows(rows[first][:, rare_groups(rows)])
    codes, counts = rows[first][order], counts[order]
    in_place = np.repeat(codes, counts, axis=0)
    found = {"ideal": float(rows.mean()), "used": float(len(codes))}
    found |= {"largest": float(counts.max()), "smallest": float(counts.min())}
    for tile in (64, 128):
        found[f"sorted_{tile}"] = in_order(in_place, np.arange(len(rows)), tile).executed
        found[f"padded_{tile}"] = float((-(-counts // tile) * codes.sum(1)).sum() * tile / rows.size)
    units = np.repeat(codes, -(-counts // 64), axis=0)
    found["pairs_128"] = float(tile_unions(units, 2).sum() * 128 / rows.size)
    return found
