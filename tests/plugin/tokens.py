"""Compare vLLM's greedy tokens of a checkpoint with those of the masked model: python tokens.py FOLDER OPTIONS.

OPTIONS is JSON: arguments of `vllm.LLM`. Prints how many of the prompts gave the same tokens. Prompts are of mixed
length, so that steps hold prompts and single tokens together.
"""

import json
import os
import random
import sys

NEW, LENGTHS = 16, (1, 2, 5, 17, 33, 64, 100)


def main():
    import torch
    from vllm import LLM, SamplingParams

    import wide
    from wide.profiling.synthetic import skipped_shares

    folder, options = sys.argv[1], json.loads(sys.argv[2])
    counts = options.pop("counts", False)
    defaults = {"dtype": "float32", "max_model_len": 160, "skip_tokenizer_init": True, "max_num_batched_tokens": 256}
    engine = LLM(model=folder, **(defaults | options))
    masked = wide.load_checkpoint(folder, dtype=torch.float32)
    sparsity = options.get("hf_overrides", {}).get("wide_sparsity")
    if sparsity is not None:
        wide.set_sparsity(masked, sparsity)
    draw = random.Random(1)
    prompts = [[draw.randrange(3, masked.config.vocab_size) for _ in range(draw.choice(LENGTHS))] for _ in range(64)]
    # The same beginning twice: with a prefix cache the second request's keys are there already.
    prompts += [[*prompt, 5, 6] for prompt in prompts if len(prompt) > 60]
    wanted = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    same = 0
    for prompt, output in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        known = masked.generate(ids, attention_mask=ids.ne(-1), max_new_tokens=NEW, eos_token_id=-1, do_sample=False)
        same += known[0, len(prompt) :].tolist() == list(output.outputs[0].token_ids)
    shares = []
    if hasattr(masked.config, "wide"):
        with wide.capture_routing(masked) as routing:
            masked(torch.tensor(prompts[-1:]))
        shares = [round(float(layer.ffn.float().mean()), 2) for layer in routing]
    print(f"{same} of {len(prompts)} alike; executed {shares}")
    if counts:
        # Of this prompt alone, which no cache holds yet.
        prompt = [draw.randrange(3, masked.config.vocab_size) for _ in range(100)]
        engine.apply_model(lambda model: model.tally.take())
        engine.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        counted, tokens = engine.apply_model(lambda model: model.tally.take())[0]
        known = dict(zip(("attention", "the FFN"), skipped_shares(masked, torch.tensor([prompt])), strict=True))
        print("counted", json.dumps([counted, known, tokens]))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if "counts" in json.loads(sys.argv[2]):
        # Functions reach a model in this process only.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main()
