"""One process of two, started by `test_parallel.py`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny import RandomSource, batch, dense_model, freeze_noise, routed_model, stage

from wide.config import ObjectiveConfig, WideConfig
from wide.data.batches import TokenBatch
from wide.models.attach import attachment
from wide.training.modes import trainable_parameters, training_mode
from wide.training.objective import Objective
from wide.training.parallel import DataParallel
from wide.training.progress_log import RunOptions
from wide.training.stages import prune
from wide.training.trainer import Trainer


def joint_steps(parallel):
    """Return what one step gives whose penalty is on the mean, and of one whose penalty is on every token."""
    mean = joint_step(parallel, ObjectiveConfig(sparsity=0.3, target="uniform"))
    token = joint_step(parallel, ObjectiveConfig(sparsity=0.3, per_token=True))
    return mean | {f"per_token.{name}": value for name, value in token.items()}


def joint_step(parallel, config):
    """Return loss, measurements and router gradients of one batch of unequally padded halves."""
    whole = batch(rows=4)
    valid = whole.valid.clone()
    valid[:2, -6:] = False
    whole = TokenBatch(input_ids=whole.input_ids, labels=whole.labels, valid=valid)
    part = slice(0, 4) if parallel is None else slice(2 * parallel.rank, 2 * parallel.rank + 2)
    mine = TokenBatch(input_ids=whole.input_ids[part], labels=whole.labels[part], valid=whole.valid[part])
    model = freeze_noise(routed_model())
    parameters = trainable_parameters(model, routers=True)
    with training_mode(model, routers=True, gradient_checkpointing=False):
        loss, measured = Objective(model, config, parallel=parallel)(mine)
        loss.backward()
    if parallel is not None:
        parallel.average_gradients(parameters.values())
    found = {name: parameter.grad for name, parameter in parameters.items()}
    return found | {name: getattr(measured, name) for name in ("loss", "lm_loss", "attention", "ffn", "sparsity")}


def main(folder):
    torch.set_num_threads(1)
    parallel = DataParallel.from_environment(torch.device("cpu"))
    save_file(joint_steps(parallel), str(folder / f"step-{parallel.rank}.safetensors"))
    model = freeze_noise(routed_model())
    if parallel.rank:
        # The first process's parameters count.
        for router in attachment(model).routers():
            router.reset_parameters()
    objective = Objective(model, ObjectiveConfig(sparsity=0.3), parallel=parallel)
    options = RunOptions(title="stage 1", output=folder / "run")
    Trainer(model, objective, RandomSource(), stage(steps=5, checkpoint_every=2), options, parallel=parallel).train()
    if parallel.is_first:
        save_file(
            {n: p.detach() for n, p in model.named_parameters() if "wide_router" in n}, str(folder / "run.safetensors")
        )
    clustered = WideConfig(ffn_group_size=16, router_rank=4, ffn_grouping="clustered", start_tokens=128)
    model = prune(dense_model(), RandomSource(), config=clustered, stage=stage(steps=1))
    save_file(attachment(model).regrouped.orders(), str(folder / f"orders-{parallel.rank}.safetensors"))
    parallel.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
