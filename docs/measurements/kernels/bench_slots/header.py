"""Writes slots.cuh: wgmma for every number of slots, and which three slots each row of a tile may use."""

BANDS = (14, 28, 42)
FACTORS, SHIFTS = (9, 3, 11), (11, 12, 12)
SIZES = [4 * band for band in BANDS[:-1]] + list(range(4 * BANDS[-2] + 8, 4 * BANDS[-1] + 1, 8))


def slot(edge: int, row: int) -> int:
    """Return a slot of its class (rows with the same remainder of half their number by 4) for the row's `edge`."""
    return 14 * edge + (FACTORS[edge] * row + SHIFTS[edge] * (row // 14)) % 14


def product(size: int) -> str:
    """Return one wgmma of 64 columns by so many slots."""
    count = size // 2
    names = ",".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    text = (
        f"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\nwgmma.mma_async.sync.aligned.m64n{size}k16.f32."
        f'" HALF "." HALF " {{{names}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}'
    )
    return f'  if constexpr (N == {size}) asm volatile("{text}" : {operands} : "l"(a), "l"(b), "r"(scale));'


def header() -> str:
    """Return the text of slots.cuh."""
    table = [[slot(edge, row) for edge in range(3)] for row in range(64)]
    rows = ",".join("{" + ",".join(map(str, slots)) + "}" for slots in table)
    bits = ",".join(f"{sum(1 << s for s in slots)}ull" for slots in table)
    lines = [
        f"#define SLOTS {BANDS[-1]}",
        "#define EDGES 3",
        f"#define BAND0 {BANDS[0]}",
        f"#define BAND1 {BANDS[1]}",
        f"#define TEMP {2 * BANDS[-1]}",
        f"constexpr unsigned char SLOT[64][3] = {{{rows}}};",
        f"__device__ const unsigned long long NEIGHBOURS[64] = {{{bits}}};",
        "template <int N> __device__ __forceinline__ void wgmma_n(float (&d)[TEMP], u64 a, u64 b, int scale) {",
        *(product(size) for size in SIZES),
        "}",
        "#define FOR_SIZES(X) " + " ".join(f"X({size})" for size in SIZES),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(header(), end="")
