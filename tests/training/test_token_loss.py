"""Chunked float32 losses equal the plain formulas, values and gradients."""

import pytest
import torch
from torch.nn import functional

from wide.data.batches import IGNORED
from wide.training import token_loss
from wide.training.token_loss import num_targets, token_losses


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(token_loss, "_ELEMENTS_PER_CHUNK", 40)


def example(dtype=torch.float64):
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 11, dtype=dtype).requires_grad_(True)
    teacher = torch.randn(2, 7, 11, dtype=dtype)
    labels = torch.randint(0, 11, (2, 7))
    labels[0, 3] = labels[1, 0] = IGNORED
    return logits, teacher, labels


def test_cross_entropy_and_its_gradient_are_those_of_pytorch():
    logits, _, labels = example(torch.float32)
    loss, entropy, divergence = token_losses(logits, labels)
    expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(entropy, expected.detach())
    assert divergence == 0
    (found,) = torch.autograd.grad(3 * loss, logits)
    (wanted,) = torch.autograd.grad(3 * expected, logits)
    torch.testing.assert_close(found, wanted)


def test_distillation_is_the_divergence_from_the_teacher_at_target_tokens():
    logits, teacher, labels = example(torch.float32)
    loss, entropy, divergence = token_losses(logits, labels, teacher=teacher, distillation=0.3)
    counted = (labels[:, 1:] != IGNORED).flatten()
    log_p = functional.log_softmax(logits[:, :-1], -1).flatten(0, 1)[counted]
    log_q = functional.log_softmax(teacher[:, :-1], -1).flatten(0, 1)[counted]
    kl = functional.kl_div(log_p, log_q, reduction="sum", log_target=True)
    torch.testing.assert_close(divergence, kl.detach())
    torch.testing.assert_close(loss, 0.7 * entropy + 0.3 * divergence)
    (found,) = torch.autograd.grad(loss, logits)
    ce = functional.nll_loss(log_p, labels[:, 1:].flatten()[counted], reduction="sum")
    (wanted,) = torch.autograd.grad(0.7 * ce + 0.3 * kl, logits)
    torch.testing.assert_close(found, wanted)


def test_ignored_positions_may_hold_anything():
    logits, _, labels = example(torch.float32)
    with torch.no_grad():
        # Position 2 predicts the ignored label 3; the last position predicts nothing.
        logits[0, 2] = logits[1, -1] = float("nan")
    loss, _, _ = token_losses(logits, labels)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2].abs().sum() == 0


def test_gradient_has_the_dtype_of_the_logits():
    logits, _, labels = example(torch.bfloat16)
    loss, _, _ = token_losses(logits, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16


def test_a_second_backward_is_refused_rather_than_wrong():
    logits, _, labels = example(torch.float32)
    loss, _, _ = token_losses(logits, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward again"):
        loss.backward()


def test_number_of_targets_leaves_out_first_and_ignored_tokens():
    assert num_targets(example()[2]) == 2 * 6 - 1
