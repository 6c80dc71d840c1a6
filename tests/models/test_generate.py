"""The ordinary generate() of transformers works on a routed model."""

import pytest
import torch
from families import make, tokens
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

import wide
from wide.config import WideConfig
from wide.errors import DataError
from wide.models.attach import attach
from wide.models.observe import capture_routing, force_routing
from wide.runs.settings import GenerationOptions
from wide.runs.text import continue_prompt


def routed():
    return attach(make("llama"), WideConfig(ffn_group_size=16))


def test_left_padding_changes_nothing_for_the_valid_tokens():
    model, ids = routed(), tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    valid = torch.cat([torch.zeros(1, 3), torch.ones(1, 6)], dim=1).long()
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad(), capture_routing(model) as routing:
        alone = model(ids).logits
        masks = [layer.ffn.clone() for layer in routing]
        batched = model(padded, attention_mask=valid, position_ids=positions).logits
        assert all(torch.equal(layer.ffn[:, 3:], mask) for layer, mask in zip(routing, masks, strict=True))
    torch.testing.assert_close(batched[:, 3:], alone, atol=1e-5, rtol=1e-4)
    together = model.generate(
        torch.cat([padded, tokens(1, 9, seed=5)]),
        attention_mask=torch.cat([valid, torch.ones(1, 9, dtype=torch.long)]),
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
    )
    single = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    assert together[0, 9:].tolist() == single[0, 6:].tolist()


def test_sampling_is_reproducible_from_a_seed():
    model, ids = routed(), tokens(1, 6)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(model.generate(ids, max_new_tokens=8, do_sample=True, eos_token_id=None).tolist())
    assert runs[0] == runs[1]


def test_one_token_at_a_time_equals_the_whole_sequence_under_forced_masks():
    model, ids = routed(), tokens(2, 7)
    with torch.no_grad(), capture_routing(model) as routing:
        full = model(ids).logits
    steps, cache = [], None
    with torch.no_grad(), force_routing(model, routing):
        for position in range(7):
            out = model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, atol=1e-5, rtol=1e-4)


def test_beam_search_runs_routed():
    model, ids = routed(), tokens(2, 6)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    greedy = model.generate(ids, **given)
    found = model.generate(ids, num_beams=3, **given)
    whole = model.generate(ids, num_beams=3, use_cache=False, **given)
    assert found.tolist() == whole.tolist() != greedy.tolist()


@pytest.mark.batches_on_cpu
def test_continuous_batching_gives_the_tokens_of_generate():
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = routed()
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 9)]
    # Left to itself the cache takes most of the machine's memory.
    pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=pages, progress_bar=False
    )
    found = {tuple(r.prompt_ids): list(r.generated_tokens) for r in results.values()}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :]
        assert found[tuple(prompt)] == expected.tolist()


def test_a_text_that_is_continued_keeps_its_spaces(capsys):
    words = ["\u2581time", "\u2581a", "<s>"]
    core = Tokenizer(Unigram([(word, -1.0) for word in words], unk_id=0))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<s>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    model = routed()
    # All tokens are as likely, and the first one is taken.
    model.model.norm.weight.data.zero_()
    assert wide.generate(model, "a", tokenizer=tokenizer, max_new_tokens=2) == " time time"
    asked = [{"role": "user", "content": "a"}]
    assert wide.generate(model, asked, tokenizer=tokenizer, max_new_tokens=2) == "time time"
    # A template may refuse a chat, and would leave out what it does not find.
    tokenizer.chat_template += "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    for told, words in (
        ({"system": "Be kind"}, "the prompt: the tokenizer's chat template refuses the messages: no system"),
        ({"prompt": [{"role": "user", "text": "a"}]}, "wanted 'role' and a text as 'content'"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "wanted 'role' and a text"),
        ({"prompt": []}, "the prompt: the tokenizer's chat template refuses the messages"),
    ):
        with pytest.raises(DataError, match=words):
            wide.generate(model, told.pop("prompt", asked), tokenizer=tokenizer, max_new_tokens=2, **told)
    continue_prompt(model, tokenizer, "a", GenerationOptions(max_new_tokens=2), streams=True)
    assert capsys.readouterr().out == "a time time\n"
