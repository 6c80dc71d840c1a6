"""vLLM's dense classes of causal LMs, whose routed sublayers are exchanged when they have built themselves."""

import os
from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from wide.vllm.limits import read_pruning
from wide.vllm.sublayers import exchange
from wide.vllm.tally import Reporting


class _Pruned(Reporting):
    """What a pruned class adds to vLLM's dense one; names of parameters stay those of Hugging Face's checkpoint."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        # Has vLLM say in each step which rows are padding (`operators`).
        os.environ["VLLM_MOE_SKIP_PADDING"] = "1"
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        pruning = read_pruning(vllm_config.model_config.hf_config)
        exchange(self.model.layers, pruning)  # type: ignore[attr-defined]
        self.take_over(vllm_config, pruning.weights)

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
