"""vLLM's dense classes of causal LMs, whose routed sublayers are exchanged when they have built themselves."""

import os
from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from wide.vllm.int8 import quantise_linears
from wide.vllm.limits import read_pruning
from wide.vllm.sublayers import exchange
from wide.vllm.tally import Reporting, Tally


class _Pruned(Reporting):
    """What a pruned class adds to vLLM's dense one; names of parameters stay those of Hugging Face's checkpoint."""

    # vLLM refuses adapters of LoRA and pipelines by these.
    supports_lora = False
    supports_pp = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        # Has vLLM say in each step which rows are padding (`operators`).
        os.environ["VLLM_MOE_SKIP_PADDING"] = "1"
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        pruning = read_pruning(vllm_config.model_config.hf_config)
        exchange(self.model.layers, pruning)  # type: ignore[attr-defined]
        quantise_linears(self, pruning.weights)  # type: ignore[arg-type]
        self.tally = Tally(self)  # type: ignore[arg-type]
        self.most_rows = vllm_config.scheduler_config.max_num_batched_tokens

    def forward(self, input_ids: Any, positions: Any, *arguments: Any, **options: Any) -> Any:
        """Return the last hidden states."""
        # Before vLLM compiles: then it gives Triton another folder for each configuration, where these would be lost.
        self.warm()
        return super().forward(input_ids, positions, *arguments, **options)  # type: ignore[misc]


class WideLlamaForCausalLM(_Pruned, LlamaForCausalLM):
    """Llama with routers."""


class WideMistralForCausalLM(_Pruned, MistralForCausalLM):
    """Mistral with routers."""


class WideQwen2ForCausalLM(_Pruned, Qwen2ForCausalLM):
    """Qwen2 with routers."""


class WideQwen3ForCausalLM(_Pruned, Qwen3ForCausalLM):
    """Qwen3 with routers."""
