"""Send requests of which many are dropped at random places: python aborts.py FOLDER REQUESTS.

Prints how many finished, were dropped and were lost, how many survivors' tokens are not those of the same prompt asked
alone, how many requests stay behind, and how the memory of this process, and of GPUs, grew in the second half. On a
GPU the engine runs in bfloat16, where tokens may differ between batches.
"""

import asyncio
import json
import os
import random
import subprocess
import sys

AT_ONCE, NEW = 24, 12


def used(on_gpu):
    with open("/proc/self/statm") as file:
        found = {"grown_mib": int(file.read().split()[1]) * 4096 / 2**20}
    if on_gpu:
        # The engine is another process; other GPUs may be in use.
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        asked = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        found["grown_gpu_mib"] = int(subprocess.check_output(asked, text=True))
    return found


async def main():
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    folder, count, on_gpu = sys.argv[1], int(sys.argv[2]), current_platform.is_cuda()
    asked = {"max_model_len": 160, "skip_tokenizer_init": True, "max_num_batched_tokens": 256}
    asked |= {"dtype": "bfloat16"} if on_gpu else {"dtype": "float32", "enforce_eager": True}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **asked))
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.choice((1, 7, 40, 90)))] for _ in range(16)]
    wanted = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    found = {"finished": 0, "dropped": 0, "lost": 0, "other": 0}
    known = {}

    async def ask(name, which, leaves):
        seen = []
        async for output in engine.generate({"prompt_token_ids": prompts[which]}, wanted, name):
            seen = list(output.outputs[0].token_ids)
            if leaves is not None and len(seen) >= leaves:
                found["dropped"] += 1
                return
        found["finished" if len(seen) == NEW else "lost"] += 1
        found["other"] += known.setdefault(which, seen) != seen

    for which in range(len(prompts)):
        await ask(f"alone-{which}", which, None)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number):
        async with room:
            leaves = draw.randrange(0, NEW) if draw.random() < 0.4 else None
            task = asyncio.create_task(ask(f"r{number}", draw.randrange(len(prompts)), leaves))
            if draw.random() < 0.2:
                # As a client whose connection breaks, some of them before the first token.
                await asyncio.sleep(draw.random() * 0.2)
                if not task.done():
                    task.cancel()
                    found["dropped"] += 1
            await asyncio.gather(task, return_exceptions=True)

    grown = []
    for half in range(2):
        await asyncio.gather(*(one(number) for number in range(half * count // 2, (half + 1) * count // 2)))
        grown.append(used(on_gpu))
    await asyncio.sleep(1)
    left = len(engine.output_processor.request_states)
    await ask("last", 0, None)
    found |= {name: round(grown[1][name] - grown[0][name], 1) for name in grown[0]}
    print("aborts", json.dumps(found | {"left": left, "sent": count}))
    engine.shutdown()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    asyncio.run(main())
