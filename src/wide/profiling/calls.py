"""The public calls of a model, timed by the wall clock as their callers see them, candidates interleaved.

`model(...)` of a prompt without a cache, `generate()`, whose one call gives the time to the first token and that of
each further one, and `generate_batch`'s engine.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from wide.errors import EvaluationError
from wide.inference.choice.tuning.timing import Timing, summary
from wide.models.observe import bypass, now

AS_LOADED, DENSE = "as loaded", "dense"
"""Names of the dense model as transformers loads and runs it, and of the dense model in the optimised one's engine."""
FORWARD, FIRST, STEP = "forward", "first token", "step"
"""What is timed: a call of the model, and of `generate()` the first token and each further one."""
Call = Callable[[], Tensor]
# Of a shape: as many rounds as fit, but the model as loaded is timed twice at most, and once where that takes long.
_SECONDS, _QUICK_SECONDS, _MAX_ROUNDS, _LEAST_ROUNDS, _SLOW_ROUNDS = 2.0, 0.5, 10, 2, 2
# Sessions of a candidate in `generate_batch`: graphs are captured in each, then batches are timed.
_MAX_SESSIONS, _SESSION_SECONDS, _TIMED = 5, 10.0, 3
# Prompts of up to so many tokens in all are captured, when their length comes a second time.
_CAPTURED_TOKENS = 4096
# Of the spread of logits: about four times what rounding moves a logit of an 8B model in bfloat16.
_TIE = 0.25
# As many tokens as vLLM takes in a step by default on such GPUs, where it is given prompts at once.
_TOKENS_A_STEP, _PAGE = 16384, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A model and how its calls are opened.

    Args:
        model: In evaluation mode, without an end-of-sequence token, so that `generate()` makes what it is asked for.
        is_dense: Whether an optimised model runs with nothing skipped.
        skipped: Wanted shares of attention and FFN, in records; None = not a routed one.
    """

    name: str
    model: Any
    is_dense: bool = False
    skipped: tuple[float, float] | None = None

    def within(self) -> AbstractContextManager[None]:
        """Return what surrounds its calls."""
        return bypass(self.model) if self.is_dense else nullcontext()


class _FirstToken(StoppingCriteria):
    """Notes when the first token is there, and stops nothing; costs some microseconds a step."""

    def __init__(self) -> None:
        self.at = 0.0
        self._never: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self._never is None:
            self.at = now(input_ids.device)
            self._never = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return self._never


def generate_us(model: Any, ids: Tensor, count: int) -> tuple[float, float, Tensor]:
    """Return the microseconds of a greedy `generate()` to the first token and of each further one, and all tokens.

    Prompts [B, T] are without padding, and the model without an end-of-sequence token; at least 2 tokens are new.
    Raises EvaluationError if it made another number of them.
    """
    first = _FirstToken()
    told = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "stopping_criteria": StoppingCriteriaList([first]),
    }
    began = now(ids.device)
    out = model.generate(**told, max_new_tokens=count, do_sample=False, pad_token_id=0)
    ended = now(ids.device)
    if out.shape[1] != ids.shape[1] + count:
        raise EvaluationError(f"generate() made {out.shape[1] - ids.shape[1]} tokens instead of {count}")
    return 1e6 * (first.at - began), 1e6 * (ended - first.at) / (count - 1), out


def race_calls(
    candidates: Sequence[Candidate], ids: Tensor, generate: int, *, calls: Sequence[str], quick: bool
) -> tuple[dict[str, dict[str, Timing]], dict[str, int]]:
    """Time calls of candidates, one after the other in an order that rotates, for some seconds.

    The calls 'forward', 'generate' or both get prompts [B, T], once or twice before, so that graphs are captured and
    kernels compiled. Return times of `FORWARD`, `FIRST` and `STEP` by candidate, and the most bytes held during its
    calls; of the model as loaded beyond those held before.
    """
    samples: dict[str, dict[str, list[float]]] = {each.name: {} for each in candidates}
    peaks: dict[str, int] = {}

    def once(candidate: Candidate, count: int, *, keeps: bool) -> None:
        # Memory of the optimised model is held all the time; what the other one takes is counted from there.
        held = torch.cuda.memory_allocated() if candidate.name == AS_LOADED else 0
        reset_peak()
        found: dict[str, float] = {}
        with candidate.within():
            if "forward" in calls:
                began = now(ids.device)
                with torch.no_grad():
                    candidate.model(input_ids=ids, use_cache=False, logits_to_keep=1)
                found[FORWARD] = 1e6 * (now(ids.device) - began)
            if "generate" in calls:
                found[FIRST], found[STEP], _ = generate_us(candidate.model, ids, count)
        peaks[candidate.name] = max(peaks.get(candidate.name, 0), torch.cuda.max_memory_allocated() - held)
        for what, value in found.items() if keeps else ():
            samples[candidate.name].setdefault(what, []).append(value)

    for candidate in candidates:
        if candidate.name == AS_LOADED:
            once(candidate, 2, keeps=False)
            continue
        for _ in range(2 if ids.numel() <= _CAPTURED_TOKENS else 1):
            once(candidate, generate, keeps=False)
    limit = _QUICK_SECONDS if quick else _SECONDS
    began, slow = time.perf_counter(), 0.0
    for turn in range(_MAX_ROUNDS):
        for candidate in _rotated(candidates, turn):
            if candidate.name != AS_LOADED:
                once(candidate, generate, keeps=True)
            elif turn < _SLOW_ROUNDS and slow < limit:
                start = time.perf_counter()
                once(candidate, generate, keeps=True)
                slow += time.perf_counter() - start
        if turn + 1 >= _LEAST_ROUNDS and time.perf_counter() - began - slow > limit:
            break
    return {name: {what: summary(each) for what, each in found.items()} for name, found in samples.items()}, peaks


def reset_peak() -> None:
    """Let the count of the most bytes held on a GPU begin again, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def _batching(model: Any, requests: int, prompt: int, new: int) -> Iterator[Any]:
    """Yield a manager of `generate_batch`'s engine, its CUDA graphs on."""
    pages = requests * (-(-(prompt + new) // _PAGE) + 1)
    step = min(_TOKENS_A_STEP, requests * prompt)
    settings = ContinuousBatchingConfig(
        max_batch_tokens=step,
        num_blocks=max(pages, 2 * step // _PAGE),
        max_requests_per_batch=requests,
        # What one batch leaves in the cache must not help the next.
        allow_block_sharing=False,
        use_cuda_graph=torch.cuda.is_available(),
        q_padding_interval_size=min(64, requests),
    )
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    how = {"generation_config": greedy, "continuous_batching_config": settings}
    with model.continuous_batching_context_manager(**how) as manager:
        yield manager


def _batch(manager: Any, prompts: Sequence[list[int]], new: int) -> tuple[float, list[list[int]]]:
    began = now(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    names = manager.add_requests(inputs=[list(prompt) for prompt in prompts], max_new_tokens=new)
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=60)
        if output is None or output.error is not None:
            raise EvaluationError(f"a batch has failed: {'no answer' if output is None else output.error}")
        if output.is_finished():
            found[output.request_id] = list(output.generated_tokens)
    return time.perf_counter() - began, [found[name] for name in names]


def race_batches(
    candidates: Sequence[Candidate], requests: int, prompt: int, new: int, *, quick: bool
) -> dict[str, dict[str, float]]:
    """Return tokens_per_s, the median of `batch_rate`, and num_samples by candidate; at least 2 tokens are new.

    Sessions of candidates follow each other in an order that rotates, and each frees its cache before the next begins,
    so that memory holds one; the model as loaded has one session.
    """
    samples: dict[str, list[float]] = {each.name: [] for each in candidates}
    began = time.perf_counter()
    for turn in range(_MAX_SESSIONS):
        for each in _rotated(candidates, turn):
            if turn == 0 or each.name != AS_LOADED:
                samples[each.name].append(batch_rate(each, requests, prompt, new))
        if turn + 1 >= _LEAST_ROUNDS and (quick or time.perf_counter() - began > _SESSION_SECONDS):
            break
    return {name: {"tokens_per_s": statistics.median(each), "num_samples": len(each)} for name, each in samples.items()}


def _rotated(candidates: Sequence[Candidate], turn: int) -> list[Candidate]:
    first = turn % len(candidates)
    return [*candidates[first:], *candidates[:first]]


def batch_rate(candidate: Candidate, requests: int, prompt: int, new: int) -> float:
    """Return a median: tokens/s of batches in `generate_batch`'s engine, prompts included, once graphs are captured."""
    vocabulary = candidate.model.config.vocab_size
    # As many tokens as there are steps with prompts in them; the second such batch still captures some graphs.
    short = max(1, min(new - 1, -(-requests * prompt // _TOKENS_A_STEP) + 8))
    generator = torch.Generator().manual_seed(requests)
    with candidate.within(), _batching(candidate.model, requests, prompt, new) as manager:
        seconds = []
        for count in (short, short, *[new] * _TIMED):
            prompts = torch.randint(3, vocabulary, (requests, prompt), generator=generator).tolist()
            seconds.append(_batch(manager, prompts, count)[0])
    return requests * new / statistics.median(seconds[-_TIMED:])


@torch.no_grad()
def batch_agreement(model: Any, prompt: int, new: int) -> dict[str, float]:
    """Return how often `model(...)` prefers the tokens of `generate()`, and those of a batch, after what came before.

    An optimised model reads three ragged prompts, then token by token, since int8 rounds prompts and steps in different
    ways. Tokens that tie with the best one count as preferred: rounding decides among them.
    """
    generator = torch.Generator().manual_seed(3)
    lengths = [max(1, prompt - 37 * row) for row in range(3)]
    prompts = [torch.randint(3, model.config.vocab_size, (each,), generator=generator).tolist() for each in lengths]

    def preferred(answers: Sequence[list[int]]) -> float:
        shares = []
        for ids, answer in zip(prompts, answers, strict=True):
            found, cache = [], None
            for tokens in (ids, *([token] for token in answer[:-1])):
                given = torch.tensor([tokens], device=model.device)
                out = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                found.append(out.logits[0, -1].float())
                cache = out.past_key_values
            logits = torch.stack(found)
            chosen = logits.gather(1, torch.tensor(answer, device=model.device)[:, None])[:, 0]
            shares.append(float((logits.amax(1) - chosen <= _TIE * logits.std(1)).float().mean()))
        return statistics.mean(shares)

    given = [torch.tensor([ids], device=model.device) for ids in prompts]
    alone = preferred([generate_us(model, ids, new)[2][0, ids.shape[1] :].tolist() for ids in given])
    with _batching(model, len(prompts), prompt, new) as manager:
        return {"generate": alone, "generate_batch": preferred(_batch(manager, prompts, new)[1])}
