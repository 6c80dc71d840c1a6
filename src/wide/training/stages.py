"""The two stages of the paper as functions: `prune` trains routers, `recover` adds LoRA."""

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import nn

from wide.config import BEFORE, ObjectiveConfig, RecoverConfig, StageConfig, WideConfig, recorded_objective
from wide.data.batches import BatchSource, TokenBlocks
from wide.errors import ConfigError, WideError
from wide.models.adapter import require_describable, save
from wide.models.attach import attachment, detach, is_attached, plan_for
from wide.models.discovery import discover
from wide.models.lora import add_lora, require_same_lora
from wide.models.observe import model_device, own_randomness
from wide.models.plan_check import check_plan
from wide.models.pretrained import device_name, load_pretrained
from wide.models.sharding import is_sharded
from wide.plan import Plan
from wide.records import fingerprint, versions
from wide.schema import require
from wide.training.checkpoint import has_checkpoint
from wide.training.inference_target import calibration_batches, meet_target
from wide.training.memory import saying_what_fits
from wide.training.objective import Objective
from wide.training.parallel import DataParallel
from wide.training.progress_log import StageOptions, TrackerName, require_tracker
from wide.training.start import attach_started, start_settings
from wide.training.text_source import ShiftedSource, TrainingData, batch_source, describe_source
from wide.training.trainer import Trainer, micro_batch_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prune(
    model: Any,
    data: TrainingData,
    *,
    sparsity: float | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    config: WideConfig | Plan | None = None,
    objective: ObjectiveConfig | None = None,
    stage: StageConfig | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    calibrate_threshold: bool = True,
    tensorboard: str | Path | None = None,
    tracker: TrackerName | None = None,
) -> Any:
    """Train routers until the model skips the wanted share (stage 1), and return the model.

    The base is frozen; it is attached first if it has no routers. Afterwards thresholds are calibrated on training
    text, and that of the routers is set so that inference, which samples no noise, meets the target too. Where it
    fails or is interrupted, a model that came without routers is given back without them; with `output`, `resume`
    continues from the checkpoint that was written.

    Args:
        model: A Hugging Face causal LM, trained in place, or the name or folder of one.
        data: Name or path of a text source, texts, or packed blocks (which keep their own sequence length).
        sparsity: Wanted share of skipped work in [0, 1); None means that of `objective`, else 0.5.
        tokenizer: None loads the model's own, where text must be tokenised.
        config: Groups and routers, or a plan of routed and dense sublayers; None means the defaults. Not for a model
            that has routers.
        objective: Measure of sparsity, weights, distillation.
        stage: Steps, sizes and rates; None means the paper's.
        output: Folder for `adapter/`, `checkpoints/` and `metrics.jsonl`; None writes nothing.
        resume: Continue from the newest checkpoint in `output`, if there is one.
        calibrate_threshold: Whether the threshold may be moved off 0, the paper's argmax, to meet the target.
        tensorboard: Folder for TensorBoard's files; None writes none.
        tracker: Service that keeps the curves, too ('wandb' or 'trackio'); None = none.

    Raises:
        ConfigError: If settings contradict, no router is planned, or `output` has checkpoints without `resume`.
        NotAttachedError: If the model is optimised.
        MissingExtraError: If the tracker is not installed.
        DataError: If the text is too short or does not fit the model's vocabulary.
        UnsupportedModelError: If the model cannot be routed.
        ShapeError: If a group size does not divide.
        TrainingError: If the loss is not finite, a checkpoint cannot be written, or the GPU's memory is full.

    Source: paper, section 3.2 (router training) and section 4.1 (settings).
    """
    require_tracker(tracker)
    objective = _objective(objective, sparsity)
    require(WideConfig | Plan | None, config, "config", "a WideConfig or a Plan")
    require(StageConfig | None, stage, "stage", "a StageConfig")
    stage = stage or StageConfig()
    folder = _free_folder(output, resume)
    model = _loaded(model)
    if is_attached(model):
        if config is not None:
            raise ConfigError("this model carries a plan already, so config= cannot change it; detach it first")
        state = attachment(model)
        state.require_not_optimised()
        if state.lora is not None and not state.lora.merged:
            raise ConfigError("this model has LoRA, which stage 1 would train too; use wide.recover with an objective=")
        plan = state.plan
    else:
        specs = discover(model)
        plan = config if isinstance(config, Plan) else plan_for(config or WideConfig(), specs)
        check_plan(plan, specs, {})
    if not plan.is_routed:
        raise ConfigError("this plan has no router to train; attach it (wide.attach), and train LoRA with wide.recover")
    parallel = DataParallel.from_environment(model_device(model))
    micro_batch_size(stage, parallel.world)
    source = batch_source(data, model, tokenizer=tokenizer, stage=stage)
    options = StageOptions(title="stage 1", output=folder, resume=resume, tensorboard=tensorboard, tracker=tracker)
    came_bare, start, calibrate = not is_attached(model), {}, calibrate_threshold
    try:
        if came_bare:
            with own_randomness(model_device(model), stage.seed):
                start = attach_started(model, plan, config, source, objective, stage, parallel, folder, resume=resume)
        settings = start_settings(config)
        _run("prune", model, source, objective, stage, options, parallel, calibrate=calibrate, start=(settings, start))
    except BaseException:
        # Ctrl-C, too: with routers of a run that did not end, the model could not be pruned again.
        if came_bare and is_attached(model):
            detach(model)
        raise
    return model


def recover(
    model: Any,
    data: TrainingData,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    objective: ObjectiveConfig | None = None,
    stage: RecoverConfig | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    calibrate_threshold: bool | None = None,
    tensorboard: str | Path | None = None,
    tracker: TrackerName | None = None,
) -> Any:
    """Train LoRA on all linear layers together with the routers (stage 2), and return the model.

    Under a plan without routers only LoRA is trained, without a sparsity term; what is pruned stays pruned. On the
    same blocks as earlier stages, training goes on in their order, whatever the seed, with those that none has read.
    Arguments without an entry are as for `prune`.

    Args:
        model: A model after `prune`, `wide.load` or `wide.attach`, trained in place.
        objective: None means that of stage 1, as the adapter records it; without routers, only its distillation
            counts, where `stage` names none.
        stage: Steps, sizes, rates and LoRA; None means the paper's.
        output: As for `prune`; a folder of its own.
        calibrate_threshold: As for `prune`; None means as in stage 1. With frozen routers the threshold stays.

    Raises:
        NotAttachedError: If the model has no plan, is optimised, has LoRA merged, or `output` could get no adapter.
        MissingExtraError: If PEFT is not installed.
        ConfigError: If settings contradict each other or LoRA that is there already, or no target is recorded and
            none given.
        DataError: As for `prune`.
        TrainingError: As for `prune`.

    Source: paper, section 3.2 (LoRA tuning) and section 4.1 (settings).
    """
    state = attachment(model)
    state.require_not_optimised()
    require_tracker(tracker)
    require(RecoverConfig | None, stage, "stage", "a RecoverConfig")
    require(ObjectiveConfig | None, objective, "objective", "an ObjectiveConfig")
    stage = stage or RecoverConfig()
    train_routers = stage.train_routers and state.plan.is_routed
    if not state.plan.is_routed:
        objective = dataclasses.replace(objective or ObjectiveConfig(), sparsity=0.0, weight=0.0)
    objective = objective or _objective_of_stage_1(state.provenance)
    if stage.distillation is not None:
        objective = dataclasses.replace(objective, distillation=stage.distillation)
    if not train_routers:
        # Frozen routers have no gradient to steer them; the rates are still measured.
        objective = dataclasses.replace(objective, weight=0.0)
    folder = _free_folder(output, resume)
    parallel = DataParallel.from_environment(model_device(model))
    micro_batch_size(stage, parallel.world)
    source = batch_source(data, model, tokenizer=tokenizer, stage=stage)
    came_bare = state.lora is None
    if state.lora is None or state.lora.merged:
        with own_randomness(model_device(model), stage.seed):
            add_lora(model, rank=stage.lora_rank, alpha=stage.lora_alpha, dropout=stage.lora_dropout)
    else:
        require_same_lora(state.lora, stage)
    options = StageOptions(
        title="stage 1+2" if state.plan.is_routed else "LoRA",
        output=folder,
        resume=resume,
        train_routers=train_routers,
        anneal=stage.restart_temperature,
        tensorboard=tensorboard,
        tracker=tracker,
    )
    if calibrate_threshold is None:
        calibrate_threshold = state.provenance.get("prune", {}).get("inference", {}).get("adjusted", True)
    calibrate = calibrate_threshold and train_routers
    try:
        _run("recover", model, source, objective, stage, options, parallel, calibrate=calibrate)
    except WideError:  # Not an error of the GPU, which asking for values would hide.
        lora = state.lora
        if came_bare and lora and not any(bool(p.any()) for n, p in lora.named_parameters().items() if "lora_B" in n):
            lora.unload()  # Once it has learnt, the routers have moved with it.
            state.lora = None
        raise
    return model


def _run(
    name: str,
    model: Any,
    source: BatchSource,
    objective: ObjectiveConfig,
    stage: StageConfig,
    options: StageOptions,
    parallel: DataParallel,
    *,
    calibrate: bool,
    start: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
) -> None:
    """Train one stage, calibrate thresholds, record what happened, and write the adapter.

    `start` holds the settings and the facts of what was done before the first step.
    """
    if options.output is not None:
        # What cannot be saved at the end is not trained.
        require_describable(model)
    settings, facts = start
    data, provenance = describe_source(source), attachment(model).provenance
    text, split = getattr(source, "name", None), getattr(source, "split", None)
    seed, content, earlier, read = None, None, None, 0
    for each in provenance.values() if name == "recover" else ():
        # Not the latest stage alone: between two on the same blocks there may be one on others.
        if isinstance(each, dict) and each.get("data") == data:
            batch, skipped = each["stage"]["batch_size"], each.get("order", {}).get("first_sample", 0)
            samples = (each["steps"] - (-skipped // batch)) * batch
            earlier, read = (each, samples) if samples > read else (earlier, read)
    if isinstance(source, TokenBlocks):
        seed, content = source.seed, None if options.output is None else source.content_hash()
    if earlier is not None:
        # On the same blocks, those that earlier stages read are left out: the first ones of their order, which is kept.
        if isinstance(source, TokenBlocks):
            seed = earlier.get("order", {}).get("seed", earlier["stage"]["seed"])
            source = source.cut(source.sequence_length, seed=seed)
        source = ShiftedSource(source, read)
    order = {"seed": seed, "first_sample": read}
    loss = Objective(model, objective, parallel=parallel, fuse=stage.compile)
    told: dict[str, Any] = {"stage": name, "data": data, "start": settings, "objective": dataclasses.asdict(objective)}
    known = _facts(model, told, stage)
    key = fingerprint(list(known.values()))
    known |= {"order": order, "content": content}
    if not options.train_routers:
        # No checkpoint brings them back.
        known["frozen routers"] = _hash_of_routers(model)
    options = dataclasses.replace(options, fingerprint=key, facts=known)
    with saying_what_fits(options.title, model, stage, distils=objective.distillation > 0, world=parallel.world):
        outcome = Trainer(model, loss, source, stage, options, parallel=parallel).train()
    size = micro_batch_size(stage, parallel.world)
    batches = calibration_batches(source, step=stage.steps, batch_size=stage.batch_size, micro_batch_size=size)
    inference = meet_target(model, batches, objective, adjust=calibrate, parallel=parallel)
    found = dataclasses.asdict(outcome)
    told = {
        "objective": dataclasses.asdict(objective),
        "stage": dataclasses.asdict(stage),
        "at_the_end_of_training": found.pop("last"),
        **found,
        "inference": inference,
        "data": data,
        "order": order,
        "text": text,
        "split": split,
        "processes": parallel.world,
        "sharded": is_sharded(model),
        "device": device_name(model),
        "versions": versions(),
    }
    attachment(model).note(name, told | ({"start": facts} if facts else {}))
    if options.output is not None:
        save(model, options.output / "adapter")
    parallel.barrier()


def _facts(model: nn.Module, facts: dict[str, Any], stage: StageConfig) -> dict[str, Any]:
    """Return facts together with what else checkpoints are recognised by; their hash is that of the values in order."""
    state = attachment(model)
    base = {key: value for key, value in state.base.items() if key not in ("name_or_path", "revision")}
    # How often checkpoints are written changes nothing.
    settings = dataclasses.asdict(dataclasses.replace(stage, checkpoint_every=0))
    settings = {key: value for key, value in settings.items() if (key, value) not in BEFORE.items()}
    orders = {} if state.regrouped is None else state.regrouped.orders()
    pruned = state.static_parameters() | ({} if state.replaced is None else state.replaced.values())
    static = {name: float(values.detach().double().sum()) for name, values in pruned.items()}
    order_of = {name: order.tolist() for name, order in orders.items()}
    found = {"model": base, "plan": state.plan.to_json(), "settings": settings, "groups": order_of, "values": static}
    return facts | found


def _hash_of_routers(model: nn.Module) -> str:
    values = {
        f"{place}.{name}": value.cpu().contiguous()
        for place, router in enumerate(attachment(model).routers())
        for name, value in router.state_dict().items()
    }
    return hashlib.sha256(to_bytes(values)).hexdigest()[:16]


def _objective(objective: ObjectiveConfig | None, sparsity: float | None) -> ObjectiveConfig:
    require(ObjectiveConfig | None, objective, "objective", "an ObjectiveConfig")
    if objective is None:
        return ObjectiveConfig() if sparsity is None else ObjectiveConfig(sparsity=sparsity)
    if sparsity is not None and sparsity != objective.sparsity:
        raise ConfigError(f"sparsity={sparsity} contradicts objective.sparsity={objective.sparsity}; give one of them")
    return objective


def _objective_of_stage_1(provenance: dict[str, Any]) -> ObjectiveConfig:
    try:
        return ObjectiveConfig(**recorded_objective(provenance["prune"]["objective"]))
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "this model records no objective that this version knows; pass objective=wide.ObjectiveConfig(...)"
        ) from error


def _free_folder(output: str | Path | None, resume: bool) -> Path | None:
    if output is None:
        if resume:
            raise ConfigError("resume needs the output folder whose checkpoints are to be continued")
        return None
    require(str | Path, output, "output", "a folder")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output {folder} is a file; name a folder")
    if not resume and has_checkpoint(folder):
        raise ConfigError(
            f"{folder} holds checkpoints of another run; continue it with resume=True, or choose or empty a folder"
        )
    return folder


def _loaded(model: Any) -> Any:
    if isinstance(model, nn.Module):
        return model
    local = os.environ.get("LOCAL_RANK")
    device = f"cuda:{local}" if local is not None and torch.cuda.is_available() else None
    return load_pretrained(str(model), device=device)
