"""One order of rows in CUDA C++ (reorder_rows.cu): five launches; rows are sorted within blocks, nothing waits."""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from wide.kernels.device import cuda_obstacle
from wide.kernels.native.build import cache_folder, cubin
from wide.kernels.native.launch import Kernel
from wide.kernels.reorder.op import ROWS_BACKENDS, Four, rows_outputs
from wide.kernels.reorder.rows_reference import CHUNK_ROWS, SORTED_GROUPS, TILE_ROWS, num_words

# As reorder_rows.cu has them.
_PACK_ROWS, _RANK_ROWS, _ITEM_TILES, _MAX_GROUPS, _THREADS = 128, 256, 256, 128, 1024
# Of keys, the rows of a bucket, two orders of them, ranks, and the counters of each warp.
_SORT_BYTES = (4 + 2 + 2 * 2 + 2) * CHUNK_ROWS + 2 * 32 * 258


class Launch(NamedTuple):
    """How a function of the source is launched."""

    threads: int
    shared_bytes: int = 0


LAUNCHES = {
    "rows_pack": Launch(_THREADS),
    "rows_rank": Launch(_RANK_ROWS),
    "rows_order": Launch(_THREADS, _SORT_BYTES),
    "rows_words": Launch(TILE_ROWS),
    "rows_items": Launch(_ITEM_TILES),
}


def machine_code(words: int, folder: Path) -> bytes:
    """Return the kernels for rows of `words` times 32 groups, from `folder` if they were compiled before."""
    source = Path(__file__).with_name("reorder_rows.cu")
    return cubin(source, folder, architecture="sm_90a", macros={"COUNT": words, "CHUNK": CHUNK_ROWS})


@functools.cache
def _kernels(words: int) -> dict[str, Kernel]:
    code = machine_code(words, cache_folder() / "kernels")
    return {
        name: Kernel(code, name, threads=launch.threads, shared_bytes=launch.shared_bytes, instead="torch")
        for name, launch in LAUNCHES.items()
    }


@ROWS_BACKENDS.register("cuda", needs=cuda_obstacle)
def reorder_rows(mask: torch.Tensor) -> Four:
    """Run `reorder_rows_reference`."""
    num_rows, num_groups = mask.shape
    count, tiles, packs, chunks = (
        num_words(num_groups),
        *(-(-num_rows // size) for size in (TILE_ROWS, _PACK_ROWS, CHUNK_ROWS)),
    )
    run, device, raw = _kernels(count), mask.device, mask.view(torch.uint8)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return raw.new_empty(shape, dtype=dtype)

    packed, places, counts = new(num_rows, 4), new(num_rows, 4), new(packs, _MAX_GROUPS, dtype=torch.int16)
    # Read 16 at once.
    buckets = new(-(-num_rows // 16) * 16, dtype=torch.uint8)
    (index, words, unions, items), cost = rows_outputs(mask), new(tiles)
    run["rows_pack"](device, packs, raw, packed, counts, num_rows, num_groups, *raw.stride())
    run["rows_rank"](device, -(-num_rows // _RANK_ROWS), packed, counts, places, buckets, num_rows, num_groups)
    bits = min(num_groups, SORTED_GROUPS)
    run["rows_order"](device, chunks * (num_groups + 1), places, buckets, index, num_rows, num_groups, bits)
    run["rows_words"](device, tiles, packed, index, words, unions, cost, num_rows)
    run["rows_items"](device, -(-tiles // _ITEM_TILES), cost, items, tiles)
    return index, words, unions, items
