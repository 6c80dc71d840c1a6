"""Other ways of the source."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from calls import SHIPPED, Kernels, Recorded, called
from equality import must_equal
from masks import buckets, cases, independent, mask_of, with_rows
from record import DEVICE, Record, say
from times import by_kernel, keep

from wide.kernels.native.build import cubin
from wide.kernels.native.launch import Kernel
from wide.kernels.reorder_rows import _cuda
from wide.kernels.reorder_rows.reference import CHUNK_ROWS, reorder_rows_reference
from wide.profiling.timing import time_interleaved

MATCH = "    const u32 peers = __match_any_sync(ALL, inside ? digit : DIGITS + lane);\n"
BALLOTS = """    u32 peers = __ballot_sync(ALL, inside);
#pragma unroll
    for (int bit = 1; bit < DIGITS; bit *= 2) {
      const u32 set = __ballot_sync(ALL, digit & bit);
      peers &= digit & bit ? set : ~set;
    }
"""
PATCHES: dict[str, tuple[tuple[str, str], ...]] = {
    # The shipped text again: how much a copy of the same code differs.
    "same": (),
    "ballots": ((MATCH, BALLOTS),),
    "ballots, rolled": ((MATCH, BALLOTS.replace("#pragma unroll", "#pragma unroll 1")),),
}


def patched(name: str) -> str:
    text = Path(_cuda.__file__).with_name("reorder_rows.cu").read_text()
    for old, new in PATCHES[name]:
        if text.count(old) != 1:
            raise AssertionError(f"{name}: {text.count(old)} places to patch: {old}")
        text = text.replace(old, new)
    return text


def kernels_of(text: str, folder: Path) -> Kernels:
    """Return what stands for `_cuda._kernels`, of this source."""
    folder.mkdir(parents=True)
    source = folder / "reorder_rows.cu"
    source.write_text(text)

    @functools.cache
    def find(words: int) -> dict[str, Any]:
        code = cubin(source, folder / "kept", architecture="sm_90a", macros={"COUNT": words, "CHUNK": CHUNK_ROWS})
        return {
            name: Kernel(code, name, threads=launch.threads, shared_bytes=launch.shared_bytes, instead="torch")
            for name, launch in _cuda.LAUNCHES.items()
        }

    return find


def resources(record: Record, name: str, kernels: Kernels) -> None:
    """Add registers and local memory."""
    from cuda.bindings import driver

    mask = mask_of(0.5, 256, 112, 1).to(DEVICE)
    called(kernels, mask)
    wanted = {"registers": "NUM_REGS", "local_bytes": "LOCAL_SIZE_BYTES", "static_shared": "SHARED_SIZE_BYTES"}
    found = {}
    for function, kernel in kernels(4).items():
        handle = kernel._function(torch.cuda.current_device())
        found[function] = {}
        for word, attribute in wanted.items():
            _, value = driver.cuFuncGetAttribute(
                getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}"), handle
            )
            found[function][word] = int(value)
    record.add(what="resources", variant=name, functions=found)
    say(name, {function: tuple(about.values()) for function, about in found.items()})


def launch_floor(record: Record) -> None:
    """Time launches that do next to nothing."""
    few = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(few)
    items = SHIPPED(4)["rows_items"]

    def launches(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                items(few.device, 1, few, out, 1)

        return run

    calls: dict[str, Any] = {f"{count} x rows_items of one tile": launches(count) for count in (1, 2, 5)}
    recorded = Recorded(SHIPPED, mask_of(0.5, 16384, 112, 17).to(DEVICE))
    for name, _, arguments in recorded.launches:
        if name == "rows_order":
            # No row in any bucket: blocks begin and end.
            arguments[3].fill_(255)
    calls["rows_order, 113 blocks without rows"] = lambda: recorded.again("rows_order")
    keep(record, time_interleaved(calls, rounds=20), lambda name: {"what": "floor"})


def check_way(record: Record, name: str, way: Callable[[torch.Tensor], Any], masks: dict[str, torch.Tensor]) -> None:
    for rows, groups, kind, _, seed in cases(24):
        mask = mask_of(kind, rows, groups, seed).to(DEVICE)
        must_equal(way(mask), reorder_rows_reference(mask), f"{name}: {rows}, {groups}, {kind}")
    for trained, mask in masks.items():
        mask = with_rows(mask, 16384)
        must_equal(way(mask), reorder_rows_reference(mask), f"{name}: {trained}")
    record.add(what="equality", variant=name, equal=True)
    say("equal:", name)


def variants(record: Record, masks: dict[str, torch.Tensor]) -> None:
    record.attempt("floor", lambda: launch_floor(record))
    ready: dict[str, Kernels] = {"shipped": SHIPPED}
    ways: dict[str, Callable[[torch.Tensor], Any]] = {"shipped": lambda mask: called(SHIPPED, mask)}
    with tempfile.TemporaryDirectory() as folder:
        for name in PATCHES:

            def build(name=name) -> None:
                found = kernels_of(patched(name), Path(folder) / name.replace(" ", "_"))
                check_way(record, name, lambda mask: called(found, mask), masks)
                ready[name] = found
                ways[name] = lambda mask: called(found, mask)

            record.attempt(f"variant {name}", build)
        for name, found in ready.items():
            record.attempt(f"resources of {name}", lambda name=name, found=found: resources(record, name, found))
        for rows in (16384, 4096):
            chosen = {"independent 0.5, 112": independent(rows, 112, 0.5, 17).to(DEVICE)}
            chosen |= {name: with_rows(mask, rows) for name, mask in masks.items()}
            for mask_name, mask in chosen.items():

                def race(rows=rows, mask_name=mask_name, mask=mask) -> None:
                    calls = {name: lambda way=way: way(mask) for name, way in ways.items()}
                    facts = {"what": "variants", "mask": mask_name, "rows": rows, **buckets(mask)}
                    keep(record, time_interleaved(calls, rounds=20), lambda name: facts)

                record.attempt(f"variants, {mask_name}, {rows}", race)
        for name, way in ways.items():
            for mask_name, mask in chosen_for_profile(masks).items():
                facts = {"variant": name, "mask": mask_name, "rows": 16384}
                record.attempt(
                    f"profiler, {name}, {mask_name}",
                    lambda way=way, mask=mask, facts=facts: by_kernel(record, way, mask, facts),
                )


def chosen_for_profile(masks: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the independent mask and up to two trained ones."""
    last = [name for name in masks if name.endswith(("5", "2"))][:2] or list(masks)[:2]
    found = {"independent 0.5, 112": independent(16384, 112, 0.5, 17).to(DEVICE)}
    return found | {name: with_rows(masks[name], 16384) for name in last}
