"""What races try, by operator, device and size of groups; the device's defaults come first."""

import torch

from wide.inference.choice.layer_sizes import LayerSizes, misfit
from wide.inference.operators.products import BLOCK_M
from wide.inference.operators.table import SUMS, OperatorName
from wide.kernels.attention_prefill.tiles import PrefillTile
from wide.kernels.device import backend_obstacle, hopper_obstacle
from wide.kernels.gemm_k.tiles import STORED_TILE, KTile
from wide.kernels.gemm_k.tiles import default_tile as default_k_tile
from wide.kernels.gemm_mn.tiles import CLUSTER_TILE, MnTile
from wide.kernels.gemm_mn.tiles import default_tile as default_mn_tile
from wide.kernels.gemv import MAX_ROWS
from wide.kernels.gemv.tiles import GemvTile
from wide.kernels.native.cute import LEVELS, CuteTile
from wide.kernels.reordering import PATTERN_GROUPS
from wide.kernels.tuning import PACKAGED, Choice

# Rows of a tile, and the tile.
_MN_GATED = (
    (128, MnTile(128, 64, 4, 8, 1, 2)),
    (128, MnTile(128, 64, 3, 8, 1, 2)),
    (128, MnTile(128, 64, 4, 8, 1, 1)),
    (128, MnTile(64, 64, 3, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 2)),
    (64, MnTile(128, 64, 2, 4, 2, 2)),
    (64, MnTile(128, 64, 4, 4, 1, 1)),
    (64, MnTile(64, 64, 4, 4, 2, 2)),
)
_MN_PLAIN = (
    (128, MnTile(256, 64, 4, 8, 1, 1)),
    (128, MnTile(256, 64, 3, 8, 1, 1)),
    (128, MnTile(128, 64, 3, 4, 2, 1)),
    (64, MnTile(256, 64, 5, 4, 1, 1)),
    (64, MnTile(256, 64, 4, 4, 1, 1)),
    (64, MnTile(256, 64, 2, 4, 2, 1)),
    (64, MnTile(128, 64, 4, 4, 2, 1)),
    (64, MnTile(128, 64, 3, 4, 3, 1)),
    (64, MnTile(64, 64, 4, 4, 3, 1)),
)
_K_TILES = (
    (64, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (64, KTile(128, 64, 3, 4, 3, 1)),
    (64, KTile(128, 64, 4, 4, 2, 1)),
    (64, KTile(256, 64, 4, 4, 1, 1)),
    (64, KTile(256, 64, 2, 4, 2, 1)),
    (128, KTile(128, 64, 3, 4, 2, 1, run=4)),
    (128, KTile(128, 64, 3, 4, 2, 1)),
    (128, KTile(256, 64, 3, 8, 1, 1, run=4)),
    (128, KTile(256, 64, 4, 8, 1, 1)),
)
# Groups in a super-block that are worth trying, by channels of a group.
_SUPER_BLOCKS = {128: (8, 6, 4), 256: (4, 5, 3), 512: (4, 8)}
_GEMV = tuple(
    GemvTile(block_n=n, block_k=k, num_warps=w)
    for n, k, w in (
        (4, 2048, 4), (2, 4096, 4), (4, 1024, 2), (2, 1024, 2), (2, 2048, 4), (4, 1024, 4), (2, 1024, 1), (1, 2048, 2),
        (2, 512, 1), (4, 512, 1), (4, 2048, 8), (8, 512, 2), (8, 1024, 4), (4, 4096, 8), (1, 4096, 4),
    )
)  # fmt: skip
_PREFILL = tuple(
    PrefillTile(block_m=m, block_n=n, num_warps=w, num_stages=s, uses_tma=tma)
    for m, n, w, s, tma in (
        (128, 128, 8, 2, 1), (128, 128, 8, 3, 1), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (64, 128, 4, 2, 1),
        (64, 64, 4, 3, 1), (128, 64, 4, 2, 1), (128, 128, 8, 2, 0), (128, 64, 8, 3, 0), (64, 64, 4, 3, 0),
    )
)  # fmt: skip
_FEW_GEMV, _FEW_PREFILL = 8, 4


def candidates(
    name: OperatorName, sizes: LayerSizes, rows: int, device: torch.device, *, quick: bool, packaged: bool = False
) -> list[Choice]:
    """Return what may run an operator of a layer beside the dense one, none of it twice.

    Args:
        name: Of the operator.
        sizes: Of the layer.
        rows: Tokens; of a sequence, for attention over a prompt.
        device: Where.
        quick: The defaults of each backend and a few tiles more alone.
        packaged: Whether to name backends of `PACKAGED`, too.
    """
    if name == "attention":
        # On Hopper it is the fastest, and one kernel compiles in seconds: tried wherever it is installed.
        found = [Choice(backend="tilelang")] if packaged or hopper_obstacle(device) is None else []
        found += [Choice(backend="triton", tile=tile) for tile in (_PREFILL[:_FEW_PREFILL] if quick else _PREFILL)]
        if packaged:
            found += [Choice(backend="tilelang", tile=PrefillTile(128, 128, 8, 2))]
            found += [Choice(backend="cute", tile=CuteTile(level)) for level in LEVELS]
    elif rows <= MAX_ROWS:
        found = [Choice(backend="triton", tile=tile) for tile in (_GEMV[:_FEW_GEMV] if quick else _GEMV)]
        found += [Choice(backend=backend) for backend in PACKAGED] if packaged else []
    elif name in SUMS:
        found = _input_groups(name, sizes, rows, device, quick=quick)
        if packaged:
            # One sort of all groups, of some, and one for each group as in the paper.
            blocks = dict.fromkeys((max(sizes.grouped(name)[1], PATTERN_GROUPS), PATTERN_GROUPS, 1))
            found += [
                Choice(backend="cute", tile=CuteTile(level), block_m=BLOCK_M, groups_per_block=block)
                for block in blocks
                for level in LEVELS[1:]
                # One sort of many groups has one kernel.
                if block <= PATTERN_GROUPS or level == CuteTile().level
            ]
    else:
        found = _output_groups(name, sizes, device, quick=quick)
        if packaged:
            found += [Choice(backend="cute", tile=CuteTile(level), block_m=CLUSTER_TILE[0]) for level in LEVELS]
    if packaged:
        # With the tiles that they take by default, and rows sorted as for others.
        rows_sorted = [each for each in found if each.backend == "triton" and each.block_m]
        sorts = dict.fromkeys((each.block_m, each.groups_per_block) for each in rows_sorted)
        found += [Choice(backend="tilelang", block_m=m, groups_per_block=groups) for m, groups in sorts]
    runs = {backend: backend_obstacle(backend, device) is None for backend in ("cuda", *PACKAGED)}
    return [
        choice
        for choice in dict.fromkeys(found)
        if choice.backend not in runs or (runs[choice.backend] and misfit(name, sizes, choice) is None)
    ]


def _output_groups(name: OperatorName, sizes: LayerSizes, device: torch.device, *, quick: bool) -> list[Choice]:
    _, _, size = sizes.grouped(name)
    gated = sizes.gates(name)
    tiles = [
        (m, default_mn_tile(device, group_size=size, block_m=m, gated=gated, stacked=gated, dtype=torch.bfloat16))
        for m in (BLOCK_M, BLOCK_M // 2)
    ]
    listed = () if quick else _MN_GATED if gated else _MN_PLAIN
    others = [(m, tile) for m, tile in listed if size % tile.block_n == 0]
    return [
        *(Choice(backend="triton", tile=tile, block_m=m) for m, tile in tiles),
        # Rows are sorted into the tiles that the kernel takes, so that it has no list of its own to make.
        Choice(backend="cuda", tile=CLUSTER_TILE, block_m=CLUSTER_TILE[0]),
        *(Choice(backend="triton", tile=tile, block_m=m) for m, tile in others),
    ]


def _input_groups(
    name: OperatorName, sizes: LayerSizes, rows: int, device: torch.device, *, quick: bool
) -> list[Choice]:
    _, groups, size = sizes.grouped(name)
    width = sizes.hidden_size
    blocks = (PATTERN_GROUPS,) if groups <= PATTERN_GROUPS else _SUPER_BLOCKS.get(size, (8, 4))
    default = default_k_tile(device, group_size=size, num_rows=rows, width=width, block_m=BLOCK_M, dtype=torch.bfloat16)
    tiles = [(BLOCK_M, default)]
    if not quick:
        fitting = [(m, t) for m, t in _K_TILES if width % t.block_n == 0 and size % t.block_k == 0]
        tiles += [(m, t._replace(slab=default.slab // t.block_n * t.block_n)) for m, t in fitting]
    # One sort of all groups, then super-blocks of some.
    whole = max(groups, PATTERN_GROUPS)
    return [
        Choice(backend="cuda", tile=STORED_TILE, block_m=STORED_TILE[0], groups_per_block=whole),
        *(
            Choice(backend="triton", tile=tile, block_m=m, groups_per_block=block)
            for block in (blocks[:1] if quick else blocks)
            for m, tile in tiles
        ),
    ]
