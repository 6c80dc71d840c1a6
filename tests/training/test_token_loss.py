"""Chunked float32 losses equal the plain formulas, values and gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from wide.data.batches import IGNORED
from wide.training import token_loss
from wide.training.token_loss import OutputHead, num_targets, token_losses


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(token_loss, "ELEMENTS_PER_CHUNK", 40)


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


class Capped(torch.nn.Module):
    """A model of a head alone, which caps its logits; `twice` does what a head apart cannot know."""

    def __init__(self, *, twice=False):
        super().__init__()
        self.lm_head, self.twice = torch.nn.Linear(5, 11), twice
        self.config = SimpleNamespace(final_logit_softcapping=2.0, get_text_config=lambda: self.config)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, states):
        logits = 2.0 * torch.tanh(self.lm_head(states) / 2.0)
        return SimpleNamespace(logits=logits * 2 if self.twice else logits)


@pytest.mark.parametrize(("changes", "is_apart"), [({}, True), ({"twice": True}, False), ({"trained": True}, False)])
@pytest.mark.parametrize("distillation", [0.0, 0.3])
def test_losses_and_gradients_of_states_are_those_of_their_logits(changes, is_apart, distillation):
    model = Capped(twice=changes.get("twice", False)).requires_grad_("trained" in changes)
    _, _, labels = example()
    given, teacher = torch.randn(2, 7, 5, requires_grad=True), torch.randn(2, 7, 5)
    head, expected, found = OutputHead(model), [], []
    wanted = {"labels": labels, "distillation": distillation}
    expected += token_losses(model(given).logits, teacher=model(teacher).logits.detach(), **wanted)
    expected += torch.autograd.grad(3 * expected[0], given)
    for _ in range(2):
        states, apart = head.states(model, states=given)
        with torch.no_grad():
            taught, _ = head.states(model, states=teacher)
        assert (apart is head) == is_apart
        found = list(token_losses(states, teacher=taught, head=apart, **wanted))
        found += torch.autograd.grad(3 * found[0], given)
        torch.testing.assert_close(found, expected)


def test_a_head_with_lora_gets_its_gradient():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(settings, Capped().requires_grad_(False))
    given, labels, found = torch.randn(2, 7, 5), example()[2], []
    head, trained = OutputHead(model), [p for p in model.parameters() if p.requires_grad]
    for states, apart in ((model(given).logits, None), head.states(model, states=given)):
        found.append(torch.autograd.grad(token_losses(states, labels, head=apart)[0], trained))
    assert len(trained) == 2
    torch.testing.assert_close(found[0], found[1])


def test_number_of_targets_leaves_out_first_and_ignored_tokens():
    assert num_targets(example()[2]) == 2 * 6 - 1
