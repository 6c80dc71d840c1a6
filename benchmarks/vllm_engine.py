"""One engine of vLLM with drawn weights: its answers against those of the masked model, and what calls take.

Usage: python -m benchmarks.vllm_engine routed|two|dense|off|fp8|int8|w8a8|gate|gate-two|gate-int8|gate-w8a8 [tiny]

Reads commands from stdin, one JSON list a line, such as ["requests", 8], and answers each with a JSON line. `routed`
serves a checkpoint of wide, whose thresholds are put where half of the pairs are skipped, and `gate` one of two layers;
`int8` and `w8a8` serve it with these `wide_weights`, and their gates compare with the weights that these stand for;
`two` serves it by two ranks on two GPUs.
`dense` is vLLM's own model, `fp8` the same with
`--quantization fp8`; `off` is the checkpoint at `wide_sparsity` 0.
Weights are drawn by the engine's loader; the masked model has views of the same tensors, so that nothing is written to
a disk. `benchmarks.vllm_plugin` starts these processes.
"""

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wide.kernels.int8 import rotated
from wide.models.adapter import config_of
from wide.models.attach import attach, attachment
from wide.models.observe import bypass
from wide.profiling.synthetic import SHAPES, set_shares
from wide.vllm.limits import FORM

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Ranks of one engine run what is registered in this file.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_DRAWN: dict[str, Tensor] = {}
"""What the loader drew, by the names of vLLM's model."""
_NEW, _DECODED = 256, 128
_EIGHT_BITS = ("int8", "w8a8")
_SEQUENCES = 64
# Behind many layers of random routers rounding decides.
_GATE_LAYERS = 2
# Products of bfloat16 round to about 0.004.
_HEAD_APART = 0.03


class Engine:
    """vLLM in this process, and beside it the masked model.

    Args:
        tiny: Whether to be a small model in float32, with prompts of a thirty-second, as a CPU can run.
    """

    def __init__(self, mode: str, tiny: bool) -> None:
        from transformers import LlamaConfig
        from vllm import LLM

        self.draw, self.scale, self.is_int8 = random.Random(1), 32 if tiny else 1, mode.endswith(_EIGHT_BITS)
        shape = SHAPES["tiny" if tiny else "llama-3.1-8b"] | (
            {"num_hidden_layers": _GATE_LAYERS} if mode.startswith("gate") else {}
        )
        self.config = LlamaConfig(**shape, tie_word_embeddings=False)
        self.dtype = torch.float32 if tiny else torch.bfloat16
        is_routed, form = mode not in ("dense", "fp8"), mode.rpartition("-")[2]
        with torch.device("meta"):
            self.masked = _hugging_face(self.config, self.dtype, routed=is_routed)
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"drawn-{mode}-{self.scale}"
        folder.mkdir(exist_ok=True)
        content = self.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        if is_routed:
            content |= {"architectures": ["WideLlamaForCausalLM"], "model_type": "wide_llama"}
            content["wide"] = config_of(self.masked)
        (folder / "config.json").write_text(json.dumps(content))
        fields = {"off": {"wide_sparsity": 0}, **{each: {"wide_weights": each} for each in _EIGHT_BITS}}
        overrides: dict[str, Any] = {"hf_overrides": fields[form]} if form in fields else {}
        if mode == "fp8":
            # vLLM quantises while it loads, and draws weights by itself.
            overrides = {"quantization": "fp8", "load_format": "dummy"}
        on_gpu: dict[str, Any] = {
            # Memory for keys and values is named, since several engines start at once on one GPU.
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": {"gate": 2, "routed": 11, "dense": 11}.get(mode.partition("-")[0], 6) << 30,
        }
        options: dict[str, Any] = {
            "load_format": "drawn",
            "dtype": str(self.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "max_model_len": 20000 // self.scale,
            "max_num_batched_tokens": 16384 // self.scale,
            "max_num_seqs": _SEQUENCES,
            "seed": 0,
            "tensor_parallel_size": 2 if form == "two" else 1,
        }
        options |= overrides | ({"enforce_eager": True} if tiny else on_gpu)
        self.started: dict[str, Any] = {}
        try:
            self.llm = LLM(model=str(folder), **options)
        except Exception as error:
            if form != "two":
                raise
            # Its own sums of two GPUs need each to reach the other's memory.
            self.started["no custom all-reduce"] = str(error)[:200]
            self.llm = LLM(model=str(folder), disable_custom_all_reduce=True, **options)
        if torch.cuda.is_available() and form != "two":
            segments = torch.cuda.memory_snapshot()
            pools = sum(each["total_size"] for each in segments if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0))
            self.started["graphs_gib"] = round(pools / 2**30, 2)
        if mode not in ("fp8", *_EIGHT_BITS) and form != "two":
            self._take_views()
        if mode == "routed" or (mode.startswith("gate") and form != "two"):
            ids = torch.tensor(self._prompts(1, 2048), device=self.device)
            set_shares(self.masked, ids, (0.5, 0.5))
            self.set_threshold(None)

    def _take_views(self) -> None:
        """Give the masked model the engine's weights."""
        state: dict[str, Tensor] = {}
        self.llm.apply_model(_round)
        for name, tensor in _DRAWN.items():
            stem, dim = name.rsplit(".", 2)[0], self.config.head_dim
            keys = self.config.num_key_value_heads * dim
            if ".qkv_proj." in name:
                parts = tensor.split((self.config.num_attention_heads * dim, keys, keys))
                state |= {f"{stem}.{part}_proj.weight": each for part, each in zip("qkv", parts, strict=True)}
            elif ".gate_up_proj." in name:
                gate, up = tensor.chunk(2)
                state |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
            else:
                state[name] = tensor[: self.config.vocab_size] if "embed" in name or "lm_head" in name else tensor
        self.device = next(iter(state.values())).device
        self.masked.load_state_dict(state, assign=True)
        with torch.device(self.device):
            self.masked.model.rotary_emb = type(self.masked.model.rotary_emb)(self.config)
        self.masked.eval()

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        """Return random prompts, whose length is scaled."""
        last = self.config.vocab_size - 8
        return [[self.draw.randrange(8, last) for _ in range(max(1, length // self.scale))] for _ in range(count)]

    def set_threshold(self, threshold: float | None) -> None:
        """Give the engine's routers a threshold, or those of the masked model's; graphs read them from memory."""
        wanted = self.thresholds()

        def set_all(worker: Any) -> None:
            for name, module in worker.get_model().named_modules():
                if name.endswith("wide_router"):
                    layer, half = name.split(".")[2], "attention" if "self_attn" in name else "ffn"
                    known: Any = module
                    known.threshold = wanted[f"{layer} {half}"] if threshold is None else threshold
                    known.prepare()

        self.llm.collective_rpc(set_all)
        self.llm.reset_prefix_cache()

    def thresholds(self) -> dict[str, Any]:
        """Return the thresholds by which half is skipped."""
        return {f"{r.layer_index} {r.half_layer}": r.threshold for r in attachment(self.masked).routers()}

    def take_thresholds(self, found: dict[str, float]) -> dict[str, Any]:
        """Have the routers skip as another engine's do."""
        for router in attachment(self.masked).routers():
            router.threshold = found[f"{router.layer_index} {router.half_layer}"]
        self.set_threshold(None)
        return self.skipped()

    def launched(self) -> dict[str, Any]:
        """Have kernels of steps with prompts launched one by one from here on, not by graphs."""

        def forget(worker: Any) -> None:
            graphs = worker.model_runner.cudagraph_manager
            # vLLM of itself records steps of twice as many tokens as requests.
            graphs._candidates = {key: each for key, each in graphs._candidates.items() if key[0] <= 2 * _SEQUENCES}

        self.llm.collective_rpc(forget)
        self.set_threshold(None)
        return {}

    def everything(self) -> dict[str, Any]:
        """Let all groups execute, under routers that decide."""
        self.set_threshold(float("-inf"))
        return {}

    # Answers.

    def gate(self, rounds: dict[str, Any] | None = None) -> dict[str, Any]:
        """Compare log probabilities of greedy tokens with the masked model's.

        Args:
            rounds: Of another engine with the same weights and thresholds; None = its own.
        """
        found: dict[str, Any] = {name: self._compare(each, name) for name, each in (rounds or self.rounds()).items()}
        if self.is_int8:
            apart = self.llm.apply_model(_head_apart)[0]
            found["output head"] = {"apart": apart, "green": max(apart) < _HEAD_APART}
        return found | {"green": all(each["green"] for each in found.values())}

    def rounds(self) -> dict[str, Any]:
        """Return answers to rounds of prompts that take all paths."""
        alone = [self._prompts(1, length)[0] for length in (1, 32, 600, 2048, 4096)]
        mixed = [self._prompts(1, self.draw.choice((1, 160, 700, 1100, 2500)))[0] for _ in range(24)]
        return {
            "alone": [one for prompt in alone for one in self._ask([prompt])],
            "mixed": self._ask(mixed),
            "prefix": self._ask([alone[3] + self._prompts(1, 96)[0], alone[4] + self._prompts(1, 700)[0]]),
            "chunked": self._ask(self._prompts(1, 18000)),
        }

    def all_layers(self, answers: list[Any] | None = None) -> dict[str, Any]:
        """Compare answers, its own if None, with the dense model's: routers let everything execute."""
        found = self._compare(answers or self.whole_answers()["all"], "all layers")
        # Log probabilities of random weights spread by 1.3.
        return found | {"green": found["median_from_dense"] < 0.1 and found["mean_from_dense"] < 0.2}

    def whole_answers(self) -> dict[str, Any]:
        """Return answers where routers let everything execute."""
        self.set_threshold(float("-inf"))
        answers = self._ask([self._prompts(1, each)[0] for each in (1, 600, 1100, 4096)])
        self.set_threshold(None)
        return {"all": answers}

    def _ask(self, prompts: list[list[int]]) -> list[tuple[list[int], list[int], list[float]]]:
        """Return prompts, 16 greedy tokens and the log probabilities that vLLM gave these."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
        answers = self.llm.generate([{"prompt_token_ids": each} for each in prompts], wanted, use_tqdm=False)
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            out = answer.outputs[0]
            new = list(out.token_ids)
            found.append((prompt, new, [step[token].logprob for step, token in zip(out.logprobs, new, strict=True)]))
        return found

    @torch.no_grad()
    def _compare(self, answers: list[tuple[list[int], list[int], list[float]]], name: str) -> dict[str, Any]:
        """Return how far vLLM is from the masked model, how far that is from itself, and from the dense model."""
        apart, again, dense, best = [], [], [], []
        for prompt, new, logprobs in answers:
            given = torch.tensor(logprobs)
            ids, chosen = torch.tensor([prompt + new], device=self.device), torch.tensor(new)[:, None]
            masked = self._logits(ids, len(new))
            apart.append((given - masked.gather(1, chosen)[:, 0]).abs())
            best.append(masked.argmax(1) == chosen[:, 0])
            with bypass(self.masked):
                dense.append((given - self._logits(ids, len(new)).gather(1, chosen)[:, 0]).abs())
            if len(prompt) <= 1100:
                # The same model with other rounding: masks flip where margins are near the threshold.
                self.masked.set_attn_implementation("eager")
                again.append((self._logits(ids, len(new)) - masked).gather(1, chosen)[:, 0].abs())
                self.masked.set_attn_implementation("sdpa")
        parts = {"from_masked": apart, "of_rounding": again, "from_dense": dense}
        joined = {what: torch.cat(each) for what, each in parts.items() if each}
        found: dict[str, Any] = {"tokens": sum(map(len, apart)), "argmax": float(torch.cat(best).float().mean())}
        found |= {f"mean_{what}": float(each.mean()) for what, each in joined.items()}
        found |= {f"median_{what}": float(each.median()) for what, each in joined.items()}
        # Rounding flips masks, which move a token. Wrong ones are as far from the masked model as from the dense one.
        near, far = found["median_from_masked"], found["mean_from_masked"]
        found["green"] = near <= found["median_from_dense"] / 8 and far <= found["mean_from_dense"] / 4
        print(f"gate {name}: {json.dumps(found)}", file=sys.stderr, flush=True)
        return found

    def _logits(self, ids: Tensor, count: int) -> Tensor:
        """Return log probabilities of the last `count` tokens' places, [count, V], on the host."""
        logits = self.masked(ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
        return logits.float().log_softmax(-1).cpu()  # type: ignore[no-any-return]

    # Speeds.

    def token(self, length: int) -> dict[str, Any]:
        """Milliseconds of a further token of one sequence: the difference of two runs."""
        self._once(1, length, 8)
        pairs = [(self._once(1, length, 2), self._once(1, length, _DECODED + 2)) for _ in range(3)]
        return _figures("ms", [(long - short) / _DECODED * 1e3 for short, long in pairs])

    def first_token(self, length: int) -> dict[str, Any]:
        """Milliseconds until the first token of one prompt."""
        self._once(1, length, 1)
        return _figures("ms", [self._once(1, length, 1) * 1e3 for _ in range(5)])

    def requests(self, count: int) -> dict[str, Any]:
        """New tokens a second of requests that come at once, 1024 tokens in and 256 out, prompts included."""
        self._once(count, 1024, 8)
        return _figures("tokens/s", [count * _NEW / self._once(count, 1024, _NEW) for _ in range(2)])

    def _once(self, count: int, length: int, new: int) -> float:
        """Return the seconds of new prompts; tokens are drawn, so that they differ as those of a text do."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": each} for each in self._prompts(count, length)]
        wanted = SamplingParams(temperature=1, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        found = self.llm.generate(prompts, wanted, use_tqdm=False)
        took = time.perf_counter() - started
        assert [len(each.outputs[0].token_ids) for each in found] == [new] * count
        return took

    def skipped(self) -> dict[str, Any]:
        """Return the shares of pairs that attention and FFN skip, of prompts and of drawn tokens, as vLLM counts."""
        self._take()
        self._once(2, 1024, 1)
        prompt = self._take()
        self._once(8, 1, _NEW)
        return {"prompt": prompt, "new": self._take()}

    def _take(self) -> list[float]:
        """Return the shares of what ran since the last call."""
        shares, _ = self.llm.collective_rpc(lambda worker: worker.get_model().tally.take())[0]
        return [round(share, 3) for share in shares.values()]


def _figures(unit: str, found: list[float]) -> dict[str, Any]:
    return {"unit": unit, "value": statistics.median(found), "all": [round(each, 3) for each in found]}


def _hugging_face(config: Any, dtype: torch.dtype, *, routed: bool) -> Any:
    """Return Hugging Face's model, with routers if wanted."""
    from transformers import AutoModelForCausalLM

    import wide

    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    plan = wide.WideConfig(ffn_group_size=128, router_rank=32)
    return attach(model, plan) if routed else model


def register_loader() -> None:
    """Make the load format `drawn` known to vLLM; each rank's process needs that."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("drawn")
    class Drawn(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            config = model_config.hf_config
            draw_weights(model, config)
            if getattr(config, FORM, None) is None or config.num_hidden_layers == _GATE_LAYERS:
                # Others have their own weights, and these would only fill the memory.
                _DRAWN.update((name, parameter.data) for name, parameter in model.named_parameters())


@torch.no_grad()
def draw_weights(model: Any, config: Any) -> None:
    """Draw all weights as Hugging Face initialises them, the same ones in every process, of which ranks take parts."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config).state_dict()
    torch.manual_seed(0)
    # On a GPU, where eight billion take a second; a CPU takes minutes.
    device = next(model.parameters()).device
    # Routers come last: the others are then the same with and without them.
    names = sorted(whole, key=lambda name: "wide_router" in name)
    model.load_weights(
        (
            name,
            torch.ones(whole[name].shape, device=device)
            if "norm" in name
            else torch.normal(0.0, 0.02, whole[name].shape, device=device),
        )
        for name in names
    )


@torch.no_grad()
def _round(model: nn.Module) -> None:
    """Put what int8 weights stand for in the place of what was drawn."""
    for name, module in model.named_modules():
        scale = getattr(module, "weight_scale", None)
        if scale is not None:
            known: Any = module
            weight = rotated(known.weight * scale[:, None], known.weight_rotation)
            _DRAWN[f"{name}.weight"] = weight.to(_DRAWN[f"{name}.weight"].dtype)


@torch.no_grad()
def _head_apart(model: Any) -> list[float]:
    """Return how far an output head of int8 weights is from what they stand for, at some numbers of rows.

    Each is the largest relative error of a token's logits.
    """
    head, found = model.lm_head, []
    weight = head.weight.float() * head.weight_scale[:, None]
    for rows in (1, 3, 8, 33, _SEQUENCES):
        x = torch.randn(rows, weight.shape[1], dtype=head.params_dtype, device=weight.device)
        wanted = x.float() @ weight.T
        size, apart = (each.norm(dim=0) for each in (wanted, head.quant_method.apply(head, x).float() - wanted))
        # Of one row a logit may be near zero.
        found.append(round(float((apart / size.clamp(min=size.median() / 2)).max()), 5))
    return found


def main() -> None:
    """Answer commands."""
    started = time.perf_counter()
    engine = Engine(sys.argv[1], "tiny" in sys.argv[2:])
    answer = engine.started | {"start_s": round(time.perf_counter() - started, 1)}
    while True:
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        name, *values = json.loads(line)
        answer = getattr(engine, name)(*values)


if __name__ in ("__main__", "__mp_main__"):
    for setting, value in SETTINGS.items():
        os.environ.setdefault(setting, value)
    register_loader()
if __name__ == "__main__":
    main()
