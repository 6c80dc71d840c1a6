"""Greedy tokens of vLLM's engine for checkpoints, one after the other: python tokens.py RUNS [spawned].

RUNS is a JSON object of names and [FOLDER, OPTIONS], arguments of `vllm.LLM`. Engines run in this process, whose start
takes longer than theirs, or `spawned` in processes of their own. Prints prompts and tokens of each. Prompts are of
mixed length, so that steps hold prompts and single tokens together.
"""

import json
import os
import random
import sys

NEW, LENGTHS = 16, (1, 2, 5, 17, 33, 64, 100)


def ask(folder, options):
    from vllm import LLM, SamplingParams

    counts, number = options.pop("counts", False), options.pop("prompts", 64)
    defaults = {"dtype": "float32", "max_model_len": 160, "skip_tokenizer_init": True, "max_num_batched_tokens": 256}
    engine = LLM(model=folder, **(defaults | options))
    draw = random.Random(1)
    last = engine.llm_engine.model_config.hf_config.vocab_size
    prompts = [[draw.randrange(3, last) for _ in range(draw.choice(LENGTHS))] for _ in range(number)]
    # The same beginning twice: with a prefix cache the second request's keys are there already.
    prompts += [[*prompt, 5, 6] for prompt in prompts if len(prompt) > 60]
    wanted = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    found = {"prompts": prompts, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    if counts:
        # Of this prompt alone, which no cache holds yet.
        prompt = [draw.randrange(3, last) for _ in range(100)]
        engine.apply_model(lambda model: model.tally.take())
        engine.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        found["counted"] = prompt, *engine.apply_model(lambda model: model.tally.take())[0]
    return found


def main():
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    for name, (folder, options) in json.loads(sys.argv[1]).items():
        print("found", json.dumps({name: ask(folder, options)}), flush=True)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if "spawned" in sys.argv[2:] else "0"
    main()
