"""Groups of processes that train together, forked from one that has imported everything.

Every scenario writes what it found into FOLDER; the tests compare that with what one process finds.
"""

import ctypes
import errno
import functools
import json
import math
import os
import random
import signal
import socket
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny import RandomSource, batch, dense_model, freeze_noise, routed_model, stage

import wide
from wide.config import ObjectiveConfig, RecoverConfig, WideConfig
from wide.data.batches import TokenBatch, TokenBlocks
from wide.data.token_stream import TokenStream
from wide.errors import WideError
from wide.methods.apply import apply
from wide.methods.catalogue import DDPConfig, DLLMConfig, SkipGPTConfig, get
from wide.methods.method import Target
from wide.models import thresholds
from wide.models.attach import attachment, detach
from wide.models.pretrained import load_pretrained
from wide.training import checkpoint, inference_target, router_fit, token_loss
from wide.training.modes import rehearsal, trainable_parameters, training_mode
from wide.training.objective import Objective
from wide.training.parallel import DataParallel
from wide.training.progress_log import StageOptions
from wide.training.stages import prune, recover
from wide.training.text_source import read_batches
from wide.training.token_loss import OutputHead
from wide.training.trainer import Trainer

GROUPS = {"ffn_group_size": 16, "router_rank": 4}
PLAIN = WideConfig(**GROUPS)
FITTED = WideConfig(**GROUPS, router_bias=True, ffn_grouping="clustered", router_start="fitted", start_tokens=64)
# So far away that all rates stay on one side of it: then it does not matter which sequences are measured together.
FAR = ObjectiveConfig(sparsity=0.95)
TAUGHT = ObjectiveConfig(sparsity=0.95, distillation=0.5)
# In micro-batches of one sequence the noise is the same whatever the number of processes.
ONE = {"micro_batch_size": 1, "steps": 3}
# The other methods that train, of which the model stays as it is.
OTHERS = {
    "skipgpt": SkipGPTConfig(router_rank=4),
    "dllm": DLLMConfig(router_rank=4),
    "ddp": DDPConfig(steps=4, batch_size=4, micro_batch_size=1, sequence_length=16),
}
LORA = RecoverConfig(batch_size=4, sequence_length=16, micro_batch_size=1, steps=2, learning_rate=1e-2)
ELASTIC = stage(micro_batch_size=1, steps=8, checkpoint_every=2)


def group(world, work, *, seconds=400.0, killed=(), delay=0.0):
    """Run `work(rank)` in so many forked processes and return how each ended: its exit status, or minus a signal.

    Some of them are killed after a delay in seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            _run_as(rank, world, port, work)
        children.append(child)
    if killed:
        time.sleep(delay)
        for rank in killed:
            os.kill(children[rank], signal.SIGKILL)
    ends, until = [], time.monotonic() + seconds
    for child in children:
        ended, status = 0, 0
        while not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        ends.append(os.waitstatus_to_exitcode(status))
    return ends


def _run_as(rank, world, port, work):
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in facts.items()}, MASTER_ADDR="127.0.0.1")
    # Of the threads that read a model, two would otherwise replace the parent's pool at once, and one would find none.
    torch.set_num_threads(1)
    try:
        work(rank)
        if dist.is_initialized():
            dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _load(model, *, sharded):
    DataParallel.from_environment(torch.device("cpu"))
    return load_pretrained(str(model), dtype="float32", device="cpu", sharded=sharded)


def joint_steps(parallel):
    """Return what one step gives."""
    return _joint_step(parallel, ObjectiveConfig(sparsity=0.3, target="uniform"))


def _joint_step(parallel, config, model=None):
    """Return loss, measurements and router gradients of one batch of unequally padded halves."""
    whole, parallel = batch(rows=4), parallel or DataParallel()
    valid = whole.valid.clone()
    valid[:2, -6:] = False
    whole = TokenBatch(input_ids=whole.input_ids, labels=whole.labels, valid=valid)
    share = 4 // parallel.world
    part = slice(share * parallel.rank, share * (parallel.rank + 1))
    mine = TokenBatch(input_ids=whole.input_ids[part], labels=whole.labels[part], valid=whole.valid[part])
    model = freeze_noise(model or routed_model())
    parameters = trainable_parameters(model, routers=True)
    with training_mode(model, routers=True, gradient_checkpointing=False):
        loss, measured = Objective(model, config, parallel=parallel)(mine)
        loss.backward()
    parallel.average_gradients(parameters.values())
    found = {name: parameter.grad for name, parameter in parameters.items()}
    return found | {name: getattr(measured, name) for name in ("loss", "lm_loss", "attention", "ffn", "sparsity")}


def replicated(folder, _model, _rank):
    """Train a little with the base on every process."""
    parallel = DataParallel.from_environment(torch.device("cpu"))
    save_file(joint_steps(parallel), str(folder / f"step-{parallel.rank}.safetensors"))
    model = freeze_noise(routed_model())
    if parallel.rank:
        # The first process's parameters count.
        for router in attachment(model).routers():
            router.reset_parameters()
    objective = Objective(model, ObjectiveConfig(sparsity=0.3), parallel=parallel)
    options = StageOptions(title="stage 1", output=folder / "run")
    Trainer(model, objective, RandomSource(), stage(steps=5, checkpoint_every=2), options, parallel=parallel).train()
    if parallel.is_first:
        trained = {n: p.detach() for n, p in model.named_parameters() if "wide_router" in n}
        save_file(trained, str(folder / "run.safetensors"))
    clustered = WideConfig(**GROUPS, ffn_grouping="clustered", start_tokens=128)
    model = prune(dense_model(), RandomSource(), config=clustered, stage=stage(steps=1))
    save_file(attachment(model).regrouped.orders(), str(folder / f"orders-{parallel.rank}.safetensors"))
    (folder / f"thresholds-{parallel.rank}.json").write_text(json.dumps(calibrated(parallel.rank, parallel)))
    _refuse_together(folder, parallel)


def calibrated(rank, parallel):
    """Return the thresholds that a process ends with where each has text of its own.

    It has so few tokens that the tables of two ranks have other lengths.
    """
    model, text = routed_model(), [batch(rows=1, length=4, seed=rank)]
    with patch.object(inference_target, "DEFAULT_POINTS", thresholds.DEFAULT_POINTS):
        inference_target.meet_target(model, text, FAR, adjust=True, parallel=parallel)
    return attachment(model).thresholds_by_sparsity


def _refuse_together(folder, parallel):
    """Write what every process says when the disk of the first is full, and when one of them computes no number."""
    inner, said = Path.write_bytes, {}

    def is_full(_path, _content):
        raise OSError(errno.ENOSPC, "No space left on device")

    class NoNumbers(RandomSource):
        def batch_at(self, step, *, batch_size, rank=0, world=1):
            if step == 1 and rank == 1:
                model.lm_head.weight.data.fill_(float("nan"))
            return super().batch_at(step, batch_size=batch_size, rank=rank, world=world)

    for name, source in (("full", RandomSource()), ("nan", NoNumbers())):
        Path.write_bytes = is_full if name == "full" else inner
        model = dense_model()
        try:
            prune(model, source, config=PLAIN, stage=stage(steps=2, checkpoint_every=1), output=folder / name)
        except WideError as error:
            said[name] = str(error)
    (folder / f"said-{parallel.rank}.json").write_text(json.dumps(said))


def _groups_that_always_execute(model):
    """Let groups execute always at any cost; processes that decide otherwise would wait for each other."""
    wide.attach(model, WideConfig(**GROUPS, router_bias=True))
    text = read_batches(RandomSource(), batch_size=4, micro_batch_size=4, tokens=64)
    with patch.multiple(router_fit, _CRUCIAL=-math.inf, _LEAST=-math.inf):
        always = router_fit.fit_routers(model, text, ObjectiveConfig(sparsity=0.5))
    margins = [router.bias.detach().view(-1, 2).diff().flatten() for router in attachment(model).routers()]
    detach(model)
    assert len(always) == sum(int((margin < -50).sum()) for margin in margins) > 0
    return sorted([*group] for group in always)


def train_all(folder, model, text, *, in_every_way):
    """Do what a run does to a model from beginning to end, and return what can be compared."""
    facts = {}
    if in_every_way:
        with rehearsal(model):
            prune(model, RandomSource(), config=FITTED, stage=stage(micro_batch_size=1, steps=1))
    torch.manual_seed(0)
    facts["base"] = attachment(wide.attach(model, PLAIN)).base["weight_sample"]
    joint = _joint_step(DataParallel.from_environment(torch.device("cpu")), TAUGHT, model)
    facts["step"] = torch.cat([value.flatten() for value in joint.values()]).tolist()
    detach(model)
    if in_every_way:
        facts["balanced"] = _balanced(model)
        prune(model, RandomSource(), config=FITTED, objective=FAR, stage=stage(micro_batch_size=1, steps=1))
        facts["fitted"] = attachment(model).provenance["prune"]["at_the_end_of_training"]["lm_loss"]
        facts["orders"] = {name: order.tolist() for name, order in attachment(model).regrouped.orders().items()}
        detach(model)
        facts["always"] = _groups_that_always_execute(model)
    recomputed = stage(gradient_checkpointing=True, **ONE)
    prune(model, RandomSource(), config=PLAIN, objective=FAR, stage=recomputed, output=folder / "stage1")
    facts["dial"] = attachment(model).thresholds_by_sparsity
    recover(model, RandomSource(), objective=TAUGHT, stage=LORA, output=folder / "stage2")
    facts["types"] = sorted({str(p.dtype) for p in trainable_parameters(model, routers=True).values()})
    wide.set_sparsity(model, 0.4)
    facts["perplexity"] = _perplexity(model, text)
    wide.save(model, folder / "adapter")
    wide.merge_lora(model)
    wide.save_checkpoint(model, folder / "checkpoint", max_shard_size="40KB")
    facts["merged"] = _perplexity(model, text)
    facts["generated"] = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).tolist()
    return facts


def others(model):
    """Return what other methods leave: the share they skip, their loss on their text, by name."""
    tokens = torch.randint(4, 258, (24, 16), generator=torch.Generator().manual_seed(0))
    starts = np.arange(24, dtype=np.int64) * 16
    text = TokenStream(tokens=tokens.flatten().numpy().astype(np.uint32), starts=starts, largest_id=257)
    blocks, found = TokenBlocks(text, 16), {}
    for name, settings in OTHERS.items():
        report = apply(model, get(name), blocks, Target(sparsity=0.9), settings, stage=stage(**ONE), seed=17)
        with torch.no_grad():
            loss = model(tokens[:4], labels=tokens[:4]).loss.item()
        found[name] = [report["attention"], report["ffn"], loss]
        detach(model)
    return found


def _balanced(model):
    """Return the thresholds of attention and FFN where margins of each process but the first are other ones."""
    torch.manual_seed(0)
    wide.attach(model, PLAIN)
    inner, processes = thresholds._bins, DataParallel.from_environment(torch.device("cpu"))
    uniform = ObjectiveConfig(sparsity=0.5, target="uniform")
    with patch.object(thresholds, "_bins", lambda margin: inner(margin) + 40 * processes.rank):
        inference_target.meet_target(model, [batch()], uniform, adjust=True, parallel=processes)
    found = [router.threshold for router in attachment(model).routers()]
    detach(model)
    return found


def _perplexity(model, text):
    return wide.evaluate(model, [text], window=32, compare_dense=False).model.perplexity.nll


@contextmanager
def small_chunks():
    """Take losses eight tokens at a time, and yield of how many the head makes logits at once."""
    rows, inner = [], OutputHead.__call__

    def noted(self, states):
        rows.append(len(states))
        return inner(self, states)

    size = 8 * 258
    with patch.object(token_loss, "ELEMENTS_PER_CHUNK", size), patch.object(OutputHead, "__call__", noted):
        yield rows


def sharded(folder, model, rank):
    """Train on a base that the processes share, once with tied embeddings and once without."""
    text = (model / "text.txt").read_text()
    for kind in ("tied", "untied"):
        base = _load(model / kind, sharded=True)
        own = sum(p.to_local().numel() for p in base.parameters())
        facts = {"share": own / sum(p.numel() for p in base.parameters())}
        with small_chunks() as rows:
            facts |= train_all(folder / kind, base, text, in_every_way=kind == "tied")
        if kind == "untied":
            facts["others"] = others(_load(model / kind, sharded=True))
        facts["rows"] = max(rows)
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(facts))


def memory(folder, model, rank):
    """Note what a process holds and held at most, in units of its share of the base, while it reads and converts it."""
    _load(model / "tied", sharded=True)
    # What earlier tests gave back would otherwise be filled first.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    held, at_most = _kilobytes("RssAnon"), _kilobytes("VmRSS")
    base = load_pretrained(str(model / "large"), dtype="bfloat16", device="cpu", sharded=True)
    share = sum(p.to_local().numel() * p.element_size() for p in base.parameters()) / 1024
    facts = {"held": _kilobytes("RssAnon") - held, "at most": _kilobytes("VmHWM") - at_most}
    (folder / f"memory-{rank}.json").write_text(json.dumps({name: size / share for name, size in facts.items()}))


def _kilobytes(name):
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


def part_of_run(folder, model, *, sharded, dies_in=None, who=(0,), resume=True):
    """Go on with a run; some processes kill themselves before a step."""
    inner = Trainer._step

    def step(self, number):
        if number == dies_in and self._parallel.rank in who:
            os.kill(os.getpid(), signal.SIGKILL)
        inner(self, number)

    Trainer._step = step
    base = _load(model / "tied", sharded=sharded)
    prune(base, RandomSource(), config=PLAIN, objective=FAR, stage=ELASTIC, output=folder, resume=resume)


def elastic(folder, model):
    """Train on two processes, of which one dies, then on four that share the base and all die, then on one."""
    parts = (
        (2, {"sharded": False, "dies_in": 3, "who": (1,), "resume": False}),
        (4, {"sharded": True, "dies_in": 5, "who": (0, 1, 2, 3)}),
        (1, {"sharded": False}),
    )
    run, found = folder / "elastic", []
    for world, how in parts:
        began = time.monotonic()
        ends = group(world, lambda _rank, how=how: part_of_run(run, model, **how))
        kept = checkpoint.CheckpointFolder(run / "checkpoints", fingerprint="").steps()
        found.append({"ends": ends, "seconds": time.monotonic() - began, "kept": kept})
    (folder / "elastic.json").write_text(json.dumps(found))


def random_ends(folder, model):
    """Kill some or all of a group at random moments, again and again, each time in another number of processes."""
    drawn, rounds = random.Random(0), 10
    for number in range(rounds):
        world = drawn.choice((1, 2, 4))
        killed = drawn.sample(range(world), drawn.randint(1, world)) if number < rounds - 1 else []
        how = {"sharded": world > 1 and drawn.random() < 0.5, "resume": number > 0}
        delay = drawn.uniform(0.2, 3.0)
        work = functools.partial(lambda _rank, how: part_of_run(folder / "random", model, **how), how=how)
        group(world, work, killed=killed, delay=delay)


def carry_out(folder, model, *scenarios):
    inference_target._MIN_TOKENS = 64
    for name in scenarios:
        if name in ("elastic", "random_ends"):
            globals()[name](folder, model)
        else:
            ends = group(2, functools.partial(globals()[name], folder, model))
            assert ends == [0, 0], (name, ends)
