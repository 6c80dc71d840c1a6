"""`wide inspect`: what a model can be pruned to, or what an adapter holds; neither loads weights."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from wide.cli.arguments import Arguments
from wide.config import WideConfig
from wide.data.local_names import is_gguf, missing_folder
from wide.errors import UsageError
from wide.grouping import divisors
from wide.models.hub import find_adapter
from wide.runs.process import say
from wide.runs.settings import build
from wide.writing import write_whole

if TYPE_CHECKING:
    from wide.models.block_spec import BlockSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions:
    """What to look at.

    Args:
        model: Hub name or local folder of a base model, of which only the configuration is read, a GGUF file, or a
            pruned checkpoint, whose weights are compared with their sha256.
        adapter: Folder of an adapter, or of a run that holds one.
    """

    model: str | None = None
    adapter: str | None = None


def arguments() -> Arguments:
    flags = Arguments("inspect", "Say what a model can be pruned to (or why not), or what an adapter holds.")
    flags.add_fields(InspectOptions)
    return flags


def run(given: Sequence[str]) -> None:
    options = build(InspectOptions, arguments().parse(given))
    if (options.model is None) == (options.adapter is None):
        given_both = "both" if options.model is not None else "neither"
        raise UsageError(
            "name either --model (what it can be pruned to) or --adapter (what it holds; the base is not needed), "
            f"got {given_both}"
        )
    if options.adapter is not None:
        say(describe_adapter(find_adapter(options.adapter)))
    elif options.model is not None:
        say(_known_or_described(options.model))


def _known_or_described(name: str) -> str:
    """Return what `describe_model` says of a base, from an earlier time if its configuration and all code are the same.

    Importing what builds a model takes five seconds and more; reading what it came to, a fraction of one.
    """
    stored = _stored_configuration(name)
    if stored is None or (Path(name) / "wide_sha256.json").exists():
        return describe_model(name)
    from wide.kernels.native.build import cache_folder

    code = Path(__file__).parents[1].rglob("*.py")
    parts = [name, *(version(package) for package in ("transformers", "torch"))]
    parts += [f"{file} {file.stat().st_mtime_ns}" for file in sorted(code)]
    key = hashlib.sha256("\n".join(parts).encode() + stored).hexdigest()
    place = cache_folder() / "inspect" / f"{key}.txt"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return place.read_text(encoding="utf-8")
    text = describe_model(name)
    # A cache that cannot be written costs time, and nothing else.
    with contextlib.suppress(OSError):
        write_whole(place, text)
    return text


def _stored_configuration(name: str) -> bytes | None:
    """Return the configuration of a model as it lies in its folder or on the hub; None where it cannot be read."""
    if is_gguf(name) or missing_folder(name) is not None:
        return None
    try:
        if Path(name).exists():
            return (Path(name) / "config.json").read_bytes()
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json")).read_bytes()
    # Whatever is wrong is said by what loads it.
    except Exception:
        return None


def describe_adapter(folder: Path) -> str:
    """Return base model, plan, training, sparsity per layer, thresholds and file sizes of an adapter, as text."""
    from wide.models.adapter import read_config

    config = read_config(folder)
    base = config["base"]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [
        f"{folder}: adapter for {base.get('name_or_path') or base['model_type']} ({base['model_type']}, "
        f"{base['num_layers']} layers), written by wide {config['wide_version']}",
        *(f"  {line}" for line in config["plan"].in_words()),
        *(["  base weights replaced"] if config["has_weights"] else []),
        *_facts(config["provenance"]),
        *_thresholds(config["dial"], has_routers=bool(config["thresholds"])),
        *(f"  {path.relative_to(folder)!s:<34}{path.stat().st_size / 1024:>12,.1f} KiB" for path in files),
    ]
    return "\n".join(lines)


class _Brief(yaml.SafeDumper):
    """Writes numbers with four digits."""


_Brief.add_representer(float, lambda writer, value: writer.represent_float(float(f"{value:.4g}")))


def _facts(provenance: Mapping[str, Any]) -> list[str]:
    """Return what an adapter says of its making as YAML; a method's notes are for programs, and may be long."""
    told = {
        name: {key: part for key, part in value.items() if key != "notes"} if isinstance(value, dict) else value
        for name, value in provenance.items()
    }
    text = yaml.dump(told, Dumper=_Brief, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return [f"  {line}" for line in text.splitlines()] if told else []


def _thresholds(calibrated: "Sequence[tuple[float, float | str]]", *, has_routers: bool) -> list[str]:
    if not has_routers:
        return ["  no routers: what it prunes is the same for every token"]
    if not calibrated:
        return ["  no calibrated thresholds: --sparsity cannot be set"]
    step = max(1, len(calibrated) // 10)
    shown = [*calibrated[::step], calibrated[-1]] if (len(calibrated) - 1) % step else calibrated[::step]
    points = ", ".join(f"{float(sparsity):.0%}: {float(threshold):+.3g}" for sparsity, threshold in shown)
    return [f"  {len(calibrated)} calibrated thresholds, sparsity: threshold of the margin, logits", f"    {points}"]


def describe_model(name: str) -> str:
    """Return sizes, group sizes that divide, and where the work lies in a model, as text."""
    from wide.models.discovery import discover
    from wide.models.files import check_sums
    from wide.models.plan_check import attention_group_sizes
    from wide.models.pretrained import is_pruned_checkpoint, load_skeleton

    checked = check_sums(Path(name), however_large=True)
    if is_pruned_checkpoint(name):
        return _describe_checkpoint(name, checked)
    model = load_skeleton(name)
    specs = discover(model)
    first = specs[0]
    attention = first.attention
    same = all(_sizes(spec) == _sizes(first) for spec in specs)
    heads = f"{attention.num_query_heads} / {attention.num_kv_heads} of {attention.head_dim} channels"
    head_groups = ", ".join(map(str, attention_group_sizes(attention)))
    lines = [
        f"{name}: {model.config.model_type}, {type(model).__name__}, can be pruned",
        *_gguf_types(name),
        *_quantisation(name, getattr(model.config, "quantization_config", None)),
        f"  layers              {len(specs)}{'' if same else ' (sizes below: first layer; they differ)'}",
        f"  hidden size         {first.hidden_size}",
        f"  query / KV heads    {heads}",
        f"  attention groups    default {attention.kv_group_size} channels; possible {head_groups}",
    ]
    if first.ffn is None:
        lines.append(f"  FFN                 not routed: {first.ffn_reason}")
    else:
        sizes = ", ".join(str(size) for size in divisors(first.ffn.width) if size >= 8)
        lines.append(f"  FFN width           {first.ffn.width}")
        lines.append(f"  FFN groups          default {WideConfig().ffn_group_size} channels; possible {sizes}")
        reasons = [spec.ffn_reason for spec in specs if spec.ffn is None]
        lines += [f"  FFN not routed      in {len(reasons)} layers: {reasons[0]}"] if reasons else []
    return "\n".join([*lines, *_work(specs, int(model.config.get_text_config().vocab_size))])


def _gguf_types(name: str) -> list[str]:
    if not is_gguf(name):
        return []
    from gguf import GGUFReader

    found = Counter(tensor.tensor_type.name for tensor in GGUFReader(name).tensors)
    words = ", ".join(f"{count} of {kind}" for kind, count in found.most_common())
    return [f"  GGUF                {found.total()} tensors, {words}; weights are dequantised when they are loaded"]


def _quantisation(name: str, stored: dict[str, Any] | None) -> list[str]:
    from wide.models.pretrained import dequantising

    if stored is None:
        return []
    stays = "stay so: routers can be trained, wide.optimize refuses them"
    what = "are dequantised when they are loaded" if dequantising(name, stored) else stays
    return [f"  weights             quantised by {stored['quant_method']}; they {what}"]


def _describe_checkpoint(name: str, checked: Sequence[str]) -> str:
    from transformers import PreTrainedConfig

    from wide.models.adapter import check_config

    facts, _ = PreTrainedConfig.get_config_dict(name)
    lines = [f"{name}: pruned checkpoint of type {facts['model_type']}"]
    if "wide" in facts:
        config = check_config(facts["wide"], f"{name}/config.json: wide")
        lines += [*(f"  {line}" for line in config["plan"].in_words()), *_facts(config["provenance"])]
        lines += _thresholds(config["dial"], has_routers=bool(config["thresholds"]))
    found = f"{len(checked)} compared with their sha256, as they were written" if checked else "no sha256 beside them"
    return "\n".join([*lines, f"  weight files: {found}"])


def _sizes(spec: "BlockSpec") -> tuple[Any, ...]:
    attention, ffn = spec.attention, spec.ffn
    return attention.num_query_heads, attention.num_kv_heads, attention.head_dim, None if ffn is None else ffn.width


def _work(specs: "Sequence[BlockSpec]", vocab_size: int) -> list[str]:
    from wide.models.attach import plan_for
    from wide.models.cost import costs

    # Groups of one channel always divide, and shares do not depend on the group size.
    found = costs(specs, plan_for(WideConfig(ffn_group_size=1), specs), vocab_size)
    other = sum(layer.other for layer in found.layers)
    parts = [
        ("attention Q and O", sum(layer.attention for layer in found.layers), "skipped by group"),
        ("FFN", sum(layer.ffn for layer in found.layers), "skipped by group"),
        ("K, V and the like", sum(layer.fixed for layer in found.layers) - other, "always executed"),
        ("not routed", other, "always executed; of experts, those that a token runs"),
        ("output head", found.head, "always executed"),
    ]
    total = sum(part for _, part, _ in parts)
    lines = [f"  matrix products     {total / 1e6:,.2f} MFLOP per token (attention scores not counted)"]
    return lines + [f"    {name:<18}{part / total:>6.1%}  {kind}" for name, part, kind in parts if part]
