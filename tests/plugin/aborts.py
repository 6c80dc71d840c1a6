"""Send requests of which many are dropped at random places: python aborts.py FOLDER REQUESTS.

Prints how many finished, were dropped and were lost, whether the survivors' tokens are those of the same prompt asked
alone, which keys stay in use, and how the memory of this process grew in the second half.
"""

import asyncio
import json
import os
import random
import sys

AT_ONCE, NEW = 24, 12


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


async def main():
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    folder, count = sys.argv[1], int(sys.argv[2])
    asked = {"dtype": "float32", "max_model_len": 160, "skip_tokenizer_init": True, "max_num_batched_tokens": 256}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, enforce_eager=True, **asked))
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
        grown.append(resident())
    await asyncio.sleep(1)
    left = len(engine.output_processor.request_states)
    await ask("last", 0, None)
    print("aborts", json.dumps(found | {"left": left, "grown_mib": round(grown[1] - grown[0], 1), "sent": count}))
    engine.shutdown()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    asyncio.run(main())
