from pathlib import Path

import pytest
import torch

NANO = Path(__file__).parents[2] / "models/nano"


@pytest.fixture(scope="session")
def tokenizer():
    from wide.data.tokenizer import load_tokenizer

    return load_tokenizer(NANO)


@pytest.fixture(scope="session")
def plain_model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()


@pytest.fixture
def attached_model():
    from transformers import AutoModelForCausalLM

    from wide.config import WideConfig
    from wide.models.attach import attach

    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    torch.manual_seed(0)
    attach(model, WideConfig(ffn_group_size=192, router_rank=4))
    return model
