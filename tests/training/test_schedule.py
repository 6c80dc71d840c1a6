import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wide.config import StageConfig
from wide.errors import ConfigError
from wide.training.trainer import learning_rate, temperature


def test_learning_rate_rises_to_the_peak_and_falls_towards_zero():
    rates = [learning_rate(step, steps=100, peak=2.0, warmup=0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01


@given(st.integers(1, 500), st.floats(0, 1), st.data())
def test_learning_rate_never_exceeds_the_peak_nor_vanishes(steps, warmup, data):
    step = data.draw(st.integers(0, steps - 1))
    assert 0 < learning_rate(step, steps=steps, peak=1e-3, warmup=warmup) <= 1e-3


def test_temperature_is_linear_between_both_ends():
    assert [temperature(s, steps=10, start=5.0, end=0.5) for s in (0, 9)] == [5.0, 0.5]
    assert temperature(3, steps=10, start=5.0, end=0.5) == pytest.approx(3.5)
    assert temperature(0, steps=1, start=5.0, end=0.5) == 5.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 1e4}, r"steps must be a whole number, got 10000\.0"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"batch_size": None}, "batch_size must be a whole number, got None"),
        ({"micro_batch_size": "2"}, "micro_batch_size must be a whole number or null, got '2'"),
        ({"compile": None}, "compile must be true or false, got None"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number, got inf"),
        ({"warmup": math.nan}, r"warmup must lie in \[0, 1\], got nan"),
    ],
)
def test_settings_that_are_no_numbers_are_refused(settings, words):
    assert StageConfig(steps=np.int64(3), learning_rate=1).steps == 3
    with pytest.raises(ConfigError, match=words):
        StageConfig(**settings)
