"""Variants of gate_up.cu: macros, whether the product is whole. build.sh compiles them, bench.py runs them in this order."""

from typing import NamedTuple


class Variant(NamedTuple):
    name: str
    macros: dict
    whole: bool = True  # computes and stores the product: checked before it is timed


BOTH = {"PREFETCH": 1, "FASTSILU": 1}

# Programs that wait for each other come last: what hangs costs time.
VARIANTS = [
    Variant("base", {"CLUSTER": 1, "PREFETCH": 0, "FASTSILU": 0}),
    Variant("prefetch", {"CLUSTER": 1, "PREFETCH": 1, "FASTSILU": 0}),
    Variant("fastsilu", {"CLUSTER": 1, "PREFETCH": 0, "FASTSILU": 1}),
    Variant("both", {"CLUSTER": 1, **BOTH}),
    Variant("both no epilogue", {"CLUSTER": 1, **BOTH, "EPILOGUE": 0}, whole=False),
    Variant("cluster", {"CLUSTER": 2, **BOTH}),
    Variant("cluster no epilogue", {"CLUSTER": 2, **BOTH, "EPILOGUE": 0}, whole=False),
    Variant("cluster no gather", {"CLUSTER": 2, **BOTH, "GATHER": 0}, whole=False),
]


def file_name(variant):
    return variant.name.replace(" ", "_") + ".cubin"


def shared_bytes(variant):
    stages, epilogue = variant.macros.get("STAGES", 4), variant.macros.get("EPILOGUE", 1)
    return stages * (48 * 1024 + 16) + 32768 * epilogue


if __name__ == "__main__":
    for v in VARIANTS:
        print(file_name(v), *[f"-D{k}={x}" for k, x in v.macros.items()])
