"""Is the order the reference's."""

from typing import Any

import torch
from calls import SHIPPED, Kernels, Recorded, called
from masks import NUM_MASKS, cases, laid_out, mask_of, with_rows
from record import DEVICE, Record, say

from wide.kernels.reorder_rows.reference import reorder_rows_reference

PARTS = ("index", "words", "unions", "items")


def differences(got: Any, wanted: Any) -> list[str]:
    """Return what differs, in words."""
    found = []
    for name, g, w in zip(PARTS, got, wanted, strict=True):
        if g.shape != w.shape or g.dtype != w.dtype:
            found.append(f"{name}: {g.dtype} {tuple(g.shape)} instead of {w.dtype} {tuple(w.shape)}")
        elif not torch.equal(g, w):
            wrong = (g != w).flatten().nonzero().flatten()
            at = int(wrong[0])
            found.append(
                f"{name}: {len(wrong)} of {g.numel()}, first at {at}: {int(g.flatten()[at])} instead of {int(w.flatten()[at])}"
            )
    return found


def must_equal(got: Any, wanted: Any, what: str) -> None:
    found = differences(got, wanted)
    if found:
        raise AssertionError(f"{what}: {'; '.join(found)}")


def litter(rows: int, byte: int = 1) -> None:
    """Leave freed memory full of a byte, in the sizes that a call takes; 1 is a bucket, too."""
    tiles, packs, padded = -(-rows // 128), -(-rows // 128), -(-rows // 16) * 16
    sizes = [16 * rows] * 4 + [256 * packs] * 2 + [padded, 4 * rows, 4 * tiles, 4 * tiles]
    sizes += [4 * words * rows for words in (2, 3, 4)] + [8 * words * tiles for words in (2, 3, 4)]
    kept = [torch.empty(max(size, 1), dtype=torch.uint8, device=DEVICE).fill_(byte) for size in sizes]
    del kept


def check_one(kernels: Kernels, mask: torch.Tensor, way: str, name: str) -> None:
    wanted = reorder_rows_reference(mask)
    litter(len(mask))
    must_equal(called(kernels, mask), wanted, f"{name}, contiguous")
    litter(len(mask))
    other = laid_out(mask, way)
    assert torch.equal(other, mask)
    must_equal(called(kernels, other), wanted, f"{name}, {way}")
    recorded = Recorded(kernels, other)
    for byte in (255, 127):
        recorded.fill(byte)
        recorded.again()
        must_equal(recorded.result, wanted, f"{name}, memory of {byte}")


def in_a_graph(kernels: Kernels, rows: int, groups: int, turned: bool) -> None:
    masks = [
        mask_of(kind, rows, groups, 7 + i).to(DEVICE)
        for i, kind in enumerate((0.5, 0.1, "correlated", 0.0, 1.0, "rates"))
    ]
    static = masks[0].clone()
    if turned:
        static = static.t().contiguous().t()
    called(kernels, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = called(kernels, static)
    for i, mask in enumerate([*masks[1:], *masks]):
        static.copy_(mask)
        for part in result:
            part.fill_(-1)
        graph.replay()
        must_equal(result, reorder_rows_reference(mask), f"graph of {rows} rows, {groups} groups, mask {i}")


def equality(record: Record, masks: dict[str, torch.Tensor]) -> None:
    for rows, groups, kind, way, seed in cases(NUM_MASKS):
        name = f"{rows} rows, {groups} groups, {kind}, {way}"

        def check(rows=rows, groups=groups, kind=kind, way=way, seed=seed, name=name) -> None:
            mask = mask_of(kind, rows, groups, seed).to(DEVICE)
            check_one(SHIPPED, mask, way, name)
            record.add(rows=rows, groups=groups, kind=kind, way=way, seed=seed, equal=True)
            say("equal:", name)

        record.attempt(name, check)
    for name, mask in masks.items():
        for rows in (4096, 16384, 40000):

            def check_trained(name=name, mask=mask, rows=rows) -> None:
                check_one(SHIPPED, with_rows(mask, rows), "transposed", f"{name}, {rows}")
                record.add(rows=rows, groups=mask.shape[1], kind=name, equal=True)
                say("equal:", name, rows)

            record.attempt(f"{name}, {rows} rows", check_trained)
    if DEVICE != "cuda":
        return
    for rows, groups, turned in (
        (33, 9, False),
        (1000, 40, True),
        (4096, 96, False),
        (16384, 112, False),
        (33000, 128, True),
    ):
        name = f"graph of {rows} rows, {groups} groups, turned {turned}"

        def replay(rows=rows, groups=groups, turned=turned, name=name) -> None:
            in_a_graph(SHIPPED, rows, groups, turned)
            record.add(what=name, equal=True)
            say("equal:", name)

        record.attempt(name, replay)

    def against_the_cpu() -> None:
        mask = mask_of("rates", 20000, 96, 5)
        must_equal(
            [part.cpu() for part in called(SHIPPED, mask.to(DEVICE))],
            reorder_rows_reference(mask),
            "the CPU's reference",
        )
        record.add(what="the CPU's reference, 20000 rows", equal=True)
        say("equal: the CPU's reference")

    def twice() -> None:
        mask = mask_of(0.5, 16384, 112, 3).to(DEVICE)
        wanted = reorder_rows_reference(mask)
        results = [called(SHIPPED, mask) for _ in range(300)]
        wrong = sum(bool(differences(result, wanted)) for result in results)
        if wrong:
            raise AssertionError(f"{wrong} of 300 calls on one mask differ: a race")
        record.add(what="300 calls of 16384 rows without waiting", equal=True)
        say("equal: 300 calls in a row")

    def other_stream() -> None:
        mask = mask_of(0.3, 16384, 96, 4).to(DEVICE)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            result = called(SHIPPED, mask)
        stream.synchronize()
        must_equal(result, reorder_rows_reference(mask), "another stream")
        record.add(what="another stream", equal=True)
        say("equal: another stream")

    for call in (against_the_cpu, twice, other_stream):
        record.attempt(call.__name__, call)
