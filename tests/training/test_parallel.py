"""Two processes with half the batch each equal one process with the joint batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import RandomSource, dense_model, freeze_noise, routed_model, stage

from wide.config import ObjectiveConfig, WideConfig
from wide.models.attach import attachment
from wide.training.objective import Objective
from wide.training.progress_log import RunOptions
from wide.training.stages import prune
from wide.training.trainer import Trainer

WORKER = Path(__file__).parent / "rank_worker.py"


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(WORKER.parent)])}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    messages = [worker.communicate(timeout=300)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], messages
    return folder


def test_loss_measurements_and_gradients_are_those_of_the_joint_batch(two_processes):
    from rank_worker import joint_steps

    found = [load_file(str(two_processes / f"step-{rank}.safetensors")) for rank in range(2)]
    wanted = joint_steps(None)
    for rank in range(2):
        assert found[rank].keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[rank][name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_run_on_two_processes_ends_with_the_parameters_of_one_process(two_processes):
    model = freeze_noise(routed_model())
    objective = Objective(model, ObjectiveConfig(sparsity=0.3))
    outcome = Trainer(model, objective, RandomSource(), stage(steps=5), RunOptions(title="stage 1")).train()
    found = load_file(str(two_processes / "run.safetensors"))
    assert outcome.tokens == 5 * 4 * 16
    for name, parameter in model.named_parameters():
        if "wide_router" in name:
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-3, atol=1e-5)
    assert len(list((two_processes / "run" / "checkpoints").iterdir())) == 2


def test_processes_that_share_the_clustering_all_have_the_orders_of_one_process(two_processes):
    config = WideConfig(ffn_group_size=16, router_rank=4, ffn_grouping="clustered", start_tokens=128)
    model = prune(dense_model(), RandomSource(), config=config, stage=stage(steps=1))
    wanted = attachment(model).regrouped.orders()
    assert len(wanted) == 2
    for rank in range(2):
        found = load_file(str(two_processes / f"orders-{rank}.safetensors"))
        assert all(torch.equal(found[name], order) for name, order in wanted.items())
