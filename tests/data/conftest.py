from pathlib import Path

import pytest

from wide.data.tokenizer import load_tokenizer

NANO = Path(__file__).parents[2] / "models/nano"


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(NANO)
