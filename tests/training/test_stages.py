"""`prune` and `recover`: from text to a saved adapter that skips what was asked for."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from tiny import CONFIG, RandomSource, batch, dense_model, routed_model, stage

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, recorded_objective
from wide.data.batches import TokenBlocks
from wide.data.token_stream import TokenStream
from wide.errors import ConfigError, DataError, NotAttachedError, ShapeError
from wide.materialisation.checkpoint import load_checkpoint, save_checkpoint
from wide.models.adapter import load
from wide.models.attach import attachment, is_attached, trained_on
from wide.models.lora import merge_lora
from wide.models.thresholds import measure_sparsity, set_sparsity
from wide.training import inference_target, stages
from wide.training.stages import prune, recover
from wide.training.text_source import ShiftedSource, batch_source

VOCABULARY = 258


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    words = ["group", "token", "skips", "layer", "width", "router"]
    return [" ".join(rng.choices(words, k=60)) + "." for _ in range(40)]


def model(**changes):
    return dense_model(vocab_size=VOCABULARY, **changes)


def lora_stage(**changes):
    return RecoverConfig(**({"steps": 6, "batch_size": 4, "sequence_length": 16, "lora_rank": 2} | changes))


@pytest.mark.usefixtures("every_point")
def test_pruning_texts_meets_the_target_at_inference_and_saves_an_adapter(texts, tiny_tokenizer, tmp_path, monkeypatch):
    # As many as a user's run reads, so that other text agrees.
    monkeypatch.setattr(inference_target, "_MIN_TOKENS", 4096)
    base = model()
    pruned = prune(
        base, texts, sparsity=0.4, tokenizer=tiny_tokenizer, config=CONFIG, stage=stage(steps=30), output=tmp_path
    )
    assert pruned is base
    facts = attachment(pruned).provenance["prune"]
    assert json.loads(json.dumps(facts)) == facts
    assert facts["objective"]["sparsity"] == 0.4
    assert facts["tokens"] == 30 * 4 * 16
    assert facts["inference"]["sparsity"] == pytest.approx(0.4, abs=0.01)
    source = batch_source(texts, pruned, tokenizer=tiny_tokenizer, stage=StageConfig(sequence_length=16, seed=5))
    others = [source.batch_at(i, batch_size=8) for i in range(20)]
    threshold = attachment(pruned).routers()[0].threshold
    assert measure_sparsity(pruned, others, threshold) == pytest.approx(0.4, abs=0.01)

    again = load(model(), tmp_path / "adapter")
    assert attachment(again).thresholds_by_sparsity == attachment(pruned).thresholds_by_sparsity
    ids = others[0].input_ids
    assert torch.equal(again(input_ids=ids).logits, pruned(input_ids=ids).logits)
    assert not pruned.training


@pytest.mark.usefixtures("every_point")
def test_a_target_for_attention_and_ffn_each_is_met_by_a_threshold_each(texts, tiny_tokenizer, tmp_path):
    objective = ObjectiveConfig(sparsity=0.4, target="uniform", weight=0.0)
    pruned = prune(
        model(),
        texts,
        tokenizer=tiny_tokenizer,
        config=CONFIG,
        objective=objective,
        stage=stage(steps=2),
        output=tmp_path,
    )
    facts = attachment(pruned).provenance["prune"]["inference"]
    thresholds = [router.threshold for router in attachment(pruned).routers()]
    assert len(set(thresholds)) == 2
    assert facts["threshold"] == {r.half_layer: r.threshold for r in attachment(pruned).routers()}
    assert [router.threshold for router in attachment(load(model(), tmp_path / "adapter")).routers()] == thresholds
    # LoRA on frozen routers leaves both as they are.
    pytest.importorskip("peft")
    recover(pruned, texts, tokenizer=tiny_tokenizer, stage=lora_stage(train_routers=False, steps=2))
    assert [router.threshold for router in attachment(pruned).routers()] == thresholds


def test_a_target_that_no_threshold_reaches_is_said(texts, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(inference_target, "calibrate_thresholds", lambda *given, **named: [(0.2, -1.0), (0.3, 0.0)])
    with pytest.warns(UserWarning, match=r"reaches 20\.0% to 30\.0% here, not the target of 90\.0%: .* skip 30\.0%"):
        pruned = prune(model(), texts, sparsity=0.9, tokenizer=tiny_tokenizer, config=CONFIG, stage=stage(steps=2))
    assert {router.threshold for router in attachment(pruned).routers()} == {0.0}


def test_the_threshold_stays_at_argmax_when_asked(texts, tiny_tokenizer):
    pruned = prune(
        model(), texts, tokenizer=tiny_tokenizer, config=CONFIG, stage=stage(steps=2), calibrate_threshold=False
    )
    facts = attachment(pruned).provenance["prune"]["inference"]
    assert facts["threshold"] == {"attention": 0.0, "ffn": 0.0}
    assert facts["sparsity"] == facts["argmax_sparsity"]
    assert {router.threshold for router in attachment(pruned).routers()} == {0.0}


def test_recovery_takes_its_target_from_stage_1_and_trains_lora_and_routers(texts, tiny_tokenizer, tmp_path):
    pytest.importorskip("peft")
    pruned = prune(model(), texts, sparsity=0.3, tokenizer=tiny_tokenizer, config=CONFIG, stage=stage(steps=6))
    routers = [r.up.detach().clone() for r in attachment(pruned).routers()]
    recover(pruned, texts, tokenizer=tiny_tokenizer, stage=lora_stage(), output=tmp_path)
    state = attachment(pruned)
    assert state.provenance["recover"]["objective"]["sparsity"] == 0.3
    assert state.provenance["recover"]["inference"]["sparsity"] == pytest.approx(0.3, abs=0.01)
    assert any(p.abs().sum() > 0 for n, p in state.lora.named_parameters().items() if "lora_B" in n)
    assert all(not torch.equal(r.up, before) for r, before in zip(state.routers(), routers, strict=True))
    again = load(model(), tmp_path / "adapter")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, pruned(input_ids=ids).logits)


def test_recovery_with_frozen_routers_trains_lora_on_the_routing_of_inference(texts, tiny_tokenizer):
    pytest.importorskip("peft")
    pruned = prune(model(), texts, tokenizer=tiny_tokenizer, config=CONFIG, stage=stage(steps=3))
    before = [(r.up.detach().clone(), r.threshold) for r in attachment(pruned).routers()]
    recover(pruned, texts, tokenizer=tiny_tokenizer, stage=lora_stage(train_routers=False))
    for router, (weights, threshold) in zip(attachment(pruned).routers(), before, strict=True):
        assert torch.equal(router.up, weights)
        assert router.threshold == threshold


def test_lora_that_is_there_already_is_trained_with_its_own_settings_only(tmp_path):
    pytest.importorskip("peft")
    pruned = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2))
    recover(pruned, RandomSource(), stage=lora_stage(lora_dropout=0.3), output=tmp_path)
    again = load(dense_model(), tmp_path / "adapter")
    before = attachment(again).lora.state_dict()
    for changes, words in (
        ({}, "already, and lora_dropout 0.1 instead of 0.3 was asked for; ask for what it has"),
        ({"lora_dropout": 0.3, "lora_alpha": 4.0}, "already, and lora_alpha 4.0 instead of 32.0 was"),
        ({"lora_rank": 4}, "already, and lora_rank 4 instead of 2, lora_dropout 0.1 instead of 0.3 was"),
    ):
        with pytest.raises(ConfigError, match=words):
            recover(again, RandomSource(), stage=lora_stage(**changes))
    with pytest.raises(ConfigError, match=r"has LoRA.*wide\.recover"):
        prune(again, RandomSource(), stage=stage(steps=1))
    assert all(torch.equal(value, before[name]) for name, value in attachment(again).lora.state_dict().items())
    recover(again, RandomSource(), stage=lora_stage(lora_dropout=0.3))
    assert any(not torch.equal(value, before[name]) for name, value in attachment(again).lora.state_dict().items())


def test_recovery_resumes_bit_for_bit(texts, tiny_tokenizer, tmp_path):
    pytest.importorskip("peft")

    class Stop(RandomSource):
        def batch_at(self, step, **options):
            if step == 5 and self.armed:
                raise RuntimeError("crash")
            return super().batch_at(step, **options)

    source, found = Stop(), []
    for armed, folder, resume in ((False, None, False), (True, tmp_path, False), (False, tmp_path, True)):
        source.armed = armed
        pruned = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2))
        try:
            recover(pruned, source, stage=lora_stage(checkpoint_every=2), output=folder, resume=resume)
        except RuntimeError:
            continue
        found.append(attachment(pruned).lora.state_dict())
    assert len(found) == 2
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_finished_run_is_not_trained_again_when_resumed(tmp_path):
    first = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=4), output=tmp_path)
    second = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=4), output=tmp_path, resume=True)
    facts = [attachment(m).provenance["prune"] for m in (first, second)]
    assert facts[1] == facts[0] | {"seconds": facts[1]["seconds"], "seconds_before": facts[1]["seconds"]}
    assert facts[1]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (ConfigError, r"\[0, 1\)", {"sparsity": 1.0}),
        (ConfigError, "contradicts", {"sparsity": 0.3, "objective": ObjectiveConfig(sparsity=0.4)}),
        (ConfigError, "output folder", {"resume": True}),
        (ShapeError, "does not divide|choose one of", {"config": "bad"}),
        (DataError, "one block needs", {"data": ["short"]}),
        (DataError, "no text", {"data": [" "]}),
        (DataError, "vocabulary", {"small": True}),
    ],
)
def test_bad_wishes_are_refused_before_anything_is_changed(error, words, changes, texts, tiny_tokenizer):
    from wide.config import WideConfig

    base = dense_model() if changes.pop("small", False) else model()
    if changes.get("config") == "bad":
        changes["config"] = WideConfig(ffn_group_size=7)
    data = changes.pop("data", texts)
    with pytest.raises(error, match=words):
        prune(base, data, tokenizer=tiny_tokenizer, **({"config": CONFIG, "stage": stage()} | changes))
    assert not is_attached(base)


def test_checkpoints_of_another_run_are_not_written_over(tmp_path):
    prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2), output=tmp_path)
    with pytest.raises(ConfigError, match="resume=True"):
        prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2), output=tmp_path)
    with pytest.raises(ConfigError, match="other settings"):
        prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=3), output=tmp_path, resume=True)


def test_thresholds_are_kept_where_nothing_is_trained_and_dropped_where_training_ends_early(tmp_path):
    class Stop(RandomSource):
        def batch_at(self, step, **options):
            if step == 1:
                raise RuntimeError("crash")
            return super().batch_at(step, **options)

    pruned = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=4), sparsity=0.3, output=tmp_path)
    set_sparsity(pruned, threshold=0.125)
    before = list(attachment(pruned).thresholds_by_sparsity)
    with pytest.raises(ConfigError, match="other settings"):
        prune(pruned, RandomSource(), stage=stage(steps=5), sparsity=0.3, output=tmp_path, resume=True)
    assert {router.threshold for router in attachment(pruned).routers()} == {0.125}
    assert attachment(pruned).thresholds_by_sparsity == before
    with pytest.raises(RuntimeError, match="crash"):
        prune(pruned, Stop(), stage=stage(steps=4), sparsity=0.3)
    assert {router.threshold for router in attachment(pruned).routers()} == {0.0}
    with pytest.raises(ConfigError, match="no calibrated thresholds"):
        set_sparsity(pruned, 0.3)


def test_lora_that_was_never_trained_is_taken_off_again(tmp_path):
    pytest.importorskip("peft")

    class Stop(RandomSource):
        def batch_at(self, step, **options):
            if step == 4:
                raise RuntimeError("crash")
            return super().batch_at(step, **options)

    def ready():
        return prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2), sparsity=0.3)

    recover(ready(), RandomSource(), stage=lora_stage(), output=tmp_path)
    pruned = ready()
    before = {name: (p.requires_grad, p.clone()) for name, p in pruned.named_parameters()}
    with pytest.raises(ConfigError, match="other settings"):
        recover(pruned, RandomSource(), stage=lora_stage(steps=7), output=tmp_path, resume=True)
    weight = pruned.lm_head.weight
    weight.data += 1
    with pytest.raises(NotAttachedError, match="base weights changed"):
        recover(pruned, RandomSource(), stage=lora_stage(), output=tmp_path / "other")
    weight.data.copy_(before["lm_head.weight"][1])
    assert attachment(pruned).lora is None
    after = dict(pruned.named_parameters())
    assert list(after) == list(before)
    assert all(p.requires_grad == before[name][0] and torch.equal(p, before[name][1]) for name, p in after.items())
    # What has moved stays.
    with pytest.raises(RuntimeError, match="crash"):
        recover(pruned, Stop(), stage=lora_stage())
    assert attachment(pruned).lora is not None


def test_the_first_error_is_told_where_lora_cannot_be_read_any_more(monkeypatch):
    pytest.importorskip("peft")

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Broken(RandomSource):
        def batch_at(self, step, **options):
            monkeypatch.setattr(type(attachment(pruned).lora), "named_parameters", lost)
            raise RuntimeError("the first error")

    pruned = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2), sparsity=0.3)
    with pytest.raises(RuntimeError, match="the first error"):
        recover(pruned, Broken(), stage=lora_stage())


def test_checkpoints_from_before_an_option_existed_are_of_the_same_run(monkeypatch):
    base = routed_model()
    now = stages._facts(base, {}, stage())
    assert stages._facts(base, {}, stage(adam_beta2=0.95)) != now
    asdict = dataclasses.asdict
    monkeypatch.setattr(
        stages.dataclasses, "asdict", lambda each: {k: v for k, v in asdict(each).items() if k != "adam_beta2"}
    )
    assert stages._facts(base, {}, stage()) == now


def test_a_stage_on_frozen_routers_is_not_continued_on_others(tmp_path):
    pytest.importorskip("peft")

    def run(seed, threshold=0.0, **changes):
        pruned = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=2, seed=seed))
        set_sparsity(pruned, threshold=threshold)
        settings = lora_stage(**({"train_routers": False} | changes))
        return recover(pruned, RandomSource(), stage=settings, output=tmp_path, resume=True)

    whole = run(1)
    for seed, threshold in ((2, 0.0), (1, 0.5)):
        with pytest.raises(ConfigError, match=r"\(frozen routers '\w+' -> '\w+'\); repeat those"):
            run(seed, threshold)
    with pytest.raises(ConfigError, match=r"\(frozen routers .*, settings.learning_rate 0.0002 -> 0.1, settings.train"):
        run(1, learning_rate=0.1, train_routers=True)
    assert attachment(run(1)).lora.state_dict().keys() == attachment(whole).lora.state_dict().keys()
    # Those of an earlier version do not say.
    file = tmp_path / "checkpoints" / "step-00000006" / "checkpoint.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "facts"}))
    run(1)
    with pytest.raises(ConfigError, match="settings, model or data; repeat"):
        run(1, learning_rate=0.1)


def test_a_stage_is_not_continued_on_text_that_was_edited_in_the_middle(tmp_path, monkeypatch):
    def run(changed, **changes):
        tokens = np.arange(160, dtype=np.uint32) % 40
        tokens[80] += changed
        text = TokenStream(tokens=tokens, starts=np.zeros(1, np.int64), largest_id=40)
        how = {"config": CONFIG, "stage": stage(steps=2), "output": tmp_path, "resume": True}
        return prune(dense_model(), TokenBlocks(text, 16), **(how | changes))

    run(0)
    run(0)
    with monkeypatch.context() as patch:
        # Without checkpoints it is not read for that.
        patch.setattr(TokenBlocks, "content_hash", None)
        run(0, output=None, resume=False)
    with pytest.raises(ConfigError, match=r"\(content '\w+' -> '\w+'\); repeat those"):
        run(1)


def test_trained_routers_come_back_from_the_checkpoint_whatever_lies_underneath(tmp_path):
    pytest.importorskip("peft")

    def run(seed, **changes):
        pruned = prune(
            dense_model(), RandomSource(), config=CONFIG, stage=stage(**({"steps": 2, "seed": seed} | changes))
        )
        return recover(pruned, RandomSource(), stage=lora_stage(), output=tmp_path, resume=True)

    first, second = run(1), run(2)
    for one, other in zip(attachment(first).routers(), attachment(second).routers(), strict=True):
        assert torch.equal(one.up, other.up)
    # After so many blocks others would be read.
    with pytest.raises(ConfigError, match=r"\(order.first_sample 8 -> 12\)"):
        run(1, steps=3)


def test_groups_cannot_be_changed_on_a_model_that_has_routers():
    with pytest.raises(ConfigError, match="detach"):
        prune(routed_model(), RandomSource(), config=CONFIG, stage=stage(steps=1))


def test_an_optimised_model_is_refused_before_it_is_changed(texts, tiny_tokenizer):
    routed = routed_model(vocab_size=VOCABULARY)
    attachment(routed).engine = object()
    with pytest.raises(NotAttachedError, match="this model is optimised"):
        prune(routed, texts, sparsity=0.5, tokenizer=tiny_tokenizer, stage=stage(steps=1))
    with pytest.raises(NotAttachedError, match="this model is optimised"):
        recover(routed, texts, objective=ObjectiveConfig(), tokenizer=tiny_tokenizer, stage=lora_stage(steps=1))
    assert attachment(routed).lora is None


def test_recovery_needs_routers_and_a_target():
    with pytest.raises(NotAttachedError):
        recover(dense_model(), RandomSource())
    with pytest.raises(ConfigError, match="objective="):
        recover(routed_model(), RandomSource())


def test_the_second_stage_reads_on_where_the_first_one_stopped(texts, tiny_tokenizer):
    source = batch_source(texts, model(), tokenizer=tiny_tokenizer, stage=StageConfig(sequence_length=16, seed=1))
    assert isinstance(source, TokenBlocks)
    shifted = ShiftedSource(source, 10)
    assert torch.equal(shifted.batch_at(0, batch_size=4).input_ids, source.batch_at(3, batch_size=4).input_ids)


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_no_block_of_stage_1_is_read_again_under_another_seed(seeds, texts, tiny_tokenizer, monkeypatch):
    pytest.importorskip("peft")
    read, plain = [], TokenBlocks.batch
    monkeypatch.setattr(TokenBlocks, "batch", lambda self, at: (read.append(list(at)), plain(self, at))[1])

    def blocks_read(train):
        read.clear()
        train()
        # Described by its ends before training, and calibrated on what comes after it.
        return {block for at in read[1:4] for block in at}

    sizes = {"batch_size": 8, "sequence_length": 256, "steps": 3}
    pruned = model(max_position_embeddings=256)
    source = batch_source(
        texts, pruned, tokenizer=tiny_tokenizer, stage=StageConfig(sequence_length=256, seed=seeds[0])
    )
    assert 48 <= len(source) < 80
    first = blocks_read(lambda: prune(pruned, source, config=CONFIG, stage=stage(**sizes)))
    again = source.cut(256, seed=seeds[1])
    second = blocks_read(lambda: recover(pruned, again, stage=lora_stage(**sizes)))
    assert (len(first), len(second), first & second) == (24, 24, set())
    assert attachment(pruned).provenance["prune"]["order"] == {"seed": seeds[0], "first_sample": 0}
    assert attachment(pruned).provenance["recover"]["order"] == {"seed": seeds[0], "first_sample": 24}
    # A batch that begins at a whole number of its size.
    blocks_read(lambda: recover(pruned, again, stage=lora_stage(**sizes | {"batch_size": 5, "steps": 1})))
    assert attachment(pruned).provenance["recover"]["order"] == {"seed": seeds[0], "first_sample": 48}
    assert not set(read[1]) & (first | second)
    recover(pruned, source, stage=lora_stage(**sizes | {"batch_size": 3, "steps": 1}))
    assert attachment(pruned).provenance["recover"]["order"]["first_sample"] == 55
    other = batch_source(texts[::-1], pruned, tokenizer=tiny_tokenizer, stage=StageConfig(sequence_length=256))
    for text, first_sample in ((other, 0), (source, 60), (other, 3)):
        recover(pruned, text, stage=lora_stage(**sizes | {"batch_size": 3, "steps": 1}))
        assert attachment(pruned).provenance["recover"]["order"]["first_sample"] == first_sample


def test_what_every_run_of_a_stage_read_is_remembered(texts, tiny_tokenizer):
    pytest.importorskip("peft")
    pruned = model()
    prune(pruned, RandomSource(), config=CONFIG, stage=stage(steps=1))
    for name in ("first", "second", "third"):
        source = batch_source(texts, pruned, tokenizer=tiny_tokenizer, stage=StageConfig(sequence_length=16))
        source.name = name
        recover(pruned, source, stage=lora_stage(steps=1))
    assert sorted(stage["text"] for stage in trained_on(pruned).values()) == ["first", "second", "third"]


def test_lora_that_was_merged_is_not_trained_on(tmp_path):
    pytest.importorskip("peft")
    pruned = prune(dense_model(), RandomSource(), config=CONFIG, stage=stage(steps=1))
    merge_lora(recover(pruned, RandomSource(), stage=lora_stage(steps=1)))
    with pytest.raises(NotAttachedError, match=r"LoRA merged.*full checkpoint"):
        recover(pruned, RandomSource(), stage=lora_stage(steps=1))
    again = load_checkpoint(save_checkpoint(pruned, tmp_path / "full"))
    # No adapter could describe the result.
    with pytest.raises(NotAttachedError, match="save_checkpoint"):
        recover(again, RandomSource(), stage=lora_stage(steps=1), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_steps_of_a_source_may_be_of_different_lengths(tmp_path, monkeypatch):
    class Growing(RandomSource):
        def batch_at(self, step, *, batch_size, rank=0, world=1):
            return batch(batch_size, 16 + step, seed=step)

    monkeypatch.setattr(inference_target, "_MIN_TOKENS", 200)
    for resume in (False, True):
        where = {"output": tmp_path, "resume": resume}
        facts = attachment(prune(dense_model(), Growing(), config=CONFIG, stage=stage(steps=2), **where)).provenance
        assert facts["prune"]["tokens"] == 4 * (16 + 17)
        assert facts["prune"]["inference"]["tokens"] == 4 * (18 + 19 + 20)


def test_options_of_an_earlier_version_count_only_where_they_were_on():
    objective = ObjectiveConfig(smoothing=0.05)
    record = dataclasses.asdict(objective) | {"ramp": 0.0, "per_token": False}
    assert ObjectiveConfig(**recorded_objective(record)) == objective
    with pytest.raises(TypeError, match="ramp"):
        ObjectiveConfig(**recorded_objective(record | {"ramp": 0.5}))
