"""`wide export`: an adapter and its base as one Hugging Face checkpoint, cut where its plan is static."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wide.cli.arguments import Arguments
from wide.errors import ConfigError, UsageError
from wide.runs.folder import require_apart
from wide.runs.process import say
from wide.runs.settings import AdapterOptions, build
from wide.writing import whole_folder

_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What is written.

    Args:
        output: New folder for the checkpoint and the tokenizer.
        how: 'sliced' takes what a static plan prunes out of the matrices (an ordinary checkpoint where whole layers go,
            else one of a class that wide registers); 'masked' writes zeros in the dense shapes, an ordinary checkpoint
            that saves no work; 'whole' keeps the base's weights and adds routers or scales. LoRA is merged into
            each. null is 'whole' where tokens are routed, else 'sliced'.
    """

    output: str
    how: Literal["sliced", "masked", "whole"] | None = None


def arguments() -> Arguments:
    flags = Arguments("export", "Write a base and its adapter as one checkpoint that Hugging Face's classes load.")
    flags.add_fields(AdapterOptions)
    flags.add_fields(ExportOptions)
    flags.add_switch("overwrite", "Replace the checkpoint in --output.")
    return flags


def run(given: Sequence[str]) -> None:
    values = arguments().parse(given)
    options, wanted = build(AdapterOptions, values), build(ExportOptions, values)
    if options.adapter is None:
        raise UsageError("name what is to be exported with --adapter: an adapter's folder, or that of its run")
    target = Path(wanted.output)
    _check_target(target, overwrite=values["overwrite"])
    require_apart(target, values)
    from wide.data.progress import loading
    from wide.data.tokenizer import load_tokenizer
    from wide.materialisation.checkpoint import HOW_TO_LOAD
    from wide.models.adapter import config_of
    from wide.models.attach import attachment
    from wide.models.card import finish_folder
    from wide.models.files import write_sums
    from wide.runs.sources import load_routed

    tokenizer = load_tokenizer(options.model)
    model = load_routed(options, keeps_dtype=True)
    how = wanted.how or ("whole" if attachment(model).plan.is_routed else "sliced")
    before = _logits(model)
    with whole_folder(target) as folder:
        facts = config_of(model)
        with loading():
            ordinary = _write(model, how, folder)
        tokenizer.save_pretrained(folder)
        if ordinary:
            finish_folder(folder, facts, HOW_TO_LOAD.partition("\n")[2], "transformers")
            write_sums(folder)
        else:
            finish_folder(folder, facts, HOW_TO_LOAD)
    after = _logits(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    say(f"{target}: {how}, {size:,} parameters")
    dtype = str(model.dtype).removeprefix("torch.")
    rounds = "" if dtype == "float32" else f", in {dtype}"
    if rounds and how == "whole":
        rounds += "; rounding can change close decisions of routers: --dtype float32 shows whether that is all"
    difference = float((after - before).norm() / before.norm())
    say(f"logits of {_TOKENS} tokens differ by {difference:.1e} (relative{rounds})")
    first = "" if ordinary else ", after import wide"
    say(f"load it with AutoModelForCausalLM.from_pretrained({str(target)!r}){first}; wide eval and wide generate, too")


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite or not (target / "config.json").is_file():
        way = "" if overwrite else ", or replace the checkpoint in it with --overwrite"
        raise ConfigError(f"{target} exists already; name a new folder with --output{way}")


def _write(model: Any, how: str, folder: Path) -> bool:
    """Write the model, and return whether transformers loads it without wide."""
    from wide.materialisation.checkpoint import SlicedMixin, save_checkpoint
    from wide.materialisation.materialise import materialise
    from wide.models.lora import merge_lora

    if how == "whole":
        merge_lora(model)
        save_checkpoint(model, folder)
        return False
    materialise(model, "masked" if how == "masked" else "sliced").save_pretrained(folder)
    return not isinstance(model, SlicedMixin)


def _logits(model: Any) -> Any:
    """Return float32 logits `[1, T, V]` on the CPU, of tokens spread over the vocabulary."""
    import torch

    ids = torch.arange(_TOKENS, device=model.device).unsqueeze(0) * (model.config.vocab_size // _TOKENS)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float().cpu()
