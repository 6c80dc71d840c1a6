// An experiment, not part of the package: docs/measurements/operators/gemm-k.md says what each macro's variant gave.
// GEMM-K by super-blocks on sm_90a; h arrives sorted: hs[blocks * M, S * G], so that both operands come by tensor maps.
// Row b * M + p of hs is the p-th row of block b's order, zeros where it does not execute a group. Macros (defaults below):
//   MODE 0 coop: two consumers of 64 rows x BN each share a tile of 128 x BN.
//        1 pingpong: each consumer has its own tile of 128 x BN; one writes while the other multiplies.
//        2 hold: coop, and a finished tile stays in registers and leaves in pieces between the products of the next.
//        3 staged: coop, and a finished tile goes to shared memory whole; the producer's three spare warps reduce it.
//   CL_ROWS, CL_COLS: cluster of programs; row neighbours share weights, column neighbours share rows (multicast).
//   FLUSH 0 none (products are kept alive; look for HGMMA in the machine code of whatever leaves a part out), 3 via shared memory (PIECE columns of a row), 5 64 bytes of a row by shuffles, 2 bulk reduction.
//   SUM16: the sum is 0 float32, 1 bfloat16, 2 float16.   LOADS, MULTIPLY = 0: leave that part out.
//   PARTIAL (with SUM16=2, MODE 0 or 1): nothing is added, sums are stored by super-block for another kernel.
//   SIDES (FLUSH=3, float32, BN 128 or 256): slabs belong to halves of the second-level cache in turns, programs take those of the half
//        that they are next to, and sums lie where their half owns the memory: 4 rows x 256 columns in 4 KB (bench_sides/).
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef MODE
#define MODE 1
#endif
#ifndef BN
#define BN 128
#endif
#ifndef STAGES
#define STAGES 6
#endif
#ifndef CL_ROWS
#define CL_ROWS 1
#endif
#ifndef CL_COLS
#define CL_COLS 1
#endif
#ifndef FLUSH
#define FLUSH 3
#endif
#ifndef PIECE
#define PIECE 64
#endif
#ifndef SUM16
#define SUM16 0
#endif
#ifndef LOADS
#define LOADS 1
#endif
#ifndef MULTIPLY
#define MULTIPLY 1
#endif
// Nothing is added here: each super-block's sums are stored in its own order as float16, with a power of two for each
// row of a tile, and another kernel adds what belongs to a row in float32.
#ifndef PARTIAL
#define PARTIAL 0
#endif
#ifndef SIDES
#define SIDES 0
#endif
// Pingpong: a consumer waits for stages only when the other has seen all of its own full. Without that, it may stand two
// rounds ahead of a barrier, whose parity then tells nothing.
#define ORDER (MODE == 1 && LOADS)
#ifndef HINT_A
#define HINT_A 1
#endif
#ifndef HINT_W
#define HINT_W 0
#endif
#ifndef HINT_R
#define HINT_R 0
#endif
#ifndef ZIGZAG
#define ZIGZAG 1
#endif
#ifndef PREGS
#define PREGS 40
#define CREGS 232
#endif
#define STR_(x) #x
#define STR(x) STR_(x)

constexpr int BK = 64, CLUSTER = CL_ROWS * CL_COLS, PEERS = CL_ROWS + CL_COLS - 1;
constexpr int HALVES = MODE == 1 ? 2 : 1;  // 64-row products of a consumer
constexpr int NACC = BN / 2;
constexpr u32 A_UNIT = 64 * BK * 2, A_STAGE = 2 * A_UNIT, B_STAGE = BN * BK * 2;
constexpr u32 A_OFFSET = STAGES * B_STAGE, OUT_OFFSET = A_OFFSET + STAGES * A_STAGE;
constexpr u32 BUFFER = FLUSH == 0 || FLUSH == 5 ? 0 : SUM16 ? 16 * 64 * 2 : 16 * PIECE * 4;
constexpr int PIECE_COLUMNS = SUM16 ? 64 : PIECE, BUFFERS = MODE == 3 ? BN / PIECE_COLUMNS : 1;  // of a warp
constexpr u32 TARGET_OFFSET = OUT_OFFSET + 8 * BUFFERS * BUFFER;  // staged: 128 rows and 2 columns
constexpr u32 BAR_OFFSET = TARGET_OFFSET + (MODE == 3 ? 528 : 0);
constexpr u32 SMEM = BAR_OFFSET + 16 * STAGES + (MODE == 3 ? 32 : 0);
static_assert(SMEM <= 232448, "shared memory");
static_assert(BN % CL_ROWS == 0 && (MODE == 1 || BN <= 256) && CL_COLS <= 2 && CL_ROWS <= 2, "shape");
static_assert(MODE < 2 || FLUSH == 3, "held and staged tiles leave through shared memory");
static_assert(!SIDES || (FLUSH == 3 && !SUM16 && MODE < 2 && 256 % BN == 0), "sums by halves of the cache");
static_assert(!SUM16 || FLUSH == 0 || FLUSH == 3, "16-bit sums leave through shared memory");

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred p;\nW%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D%=;\nbra W%=;\nD%=:\n}" ::"r"(bar),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}
__device__ __forceinline__ void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Products m64nNk16 of a consumer: both operands in shared memory, bfloat16 in, float32 out.
#define R64 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R96 R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define R128 R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define F32(i) F8(i), F8(i + 8), F8(i + 16), F8(i + 24)
#define WGMMA(COLUMNS, COUNT, REGISTERS, A, B, SCALE, ...) \
  __device__ __forceinline__ void wgmma(float (&d)[COUNT], u64 a, u64 b, int scale) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " SCALE ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.bf16.bf16 {" REGISTERS "}, " A ", " B ", p, 1, 1, 0, 0;\n}" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"(scale)); \
  }
WGMMA("128", 64, R64, "%64", "%65", "%66", F32(0), F32(32))
WGMMA("192", 96, R96, "%96", "%97", "%98", F32(0), F32(32), F32(64))
WGMMA("256", 128, R128, "%128", "%129", "%130", F32(0), F32(32), F32(64), F32(96))

// A box to the same place of every program of `mask` (or to this one), counted by each one's barrier.
template <bool SHARED, bool HINT>
__device__ __forceinline__ void load(u32 to, const void* map, int x, int y, u32 bar, u16 mask, u64 policy) {
  if constexpr (SHARED && HINT)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(bar), "h"(mask), "l"(policy) : "memory");
  else if constexpr (SHARED)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(bar), "h"(mask) : "memory");
  else if constexpr (HINT)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map),
                 "r"(x), "r"(y), "r"(bar), "l"(policy) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(x), "r"(y),
                 "r"(bar) : "memory");
}

// The tiles of a cluster, slab after slab: in each every grid-th of the list, costly and cheap ones in turn. Who gets
// one more than others changes from slab to slab. All warps of a cluster walk alike.
struct Walk {
  const int2* items;
  int n, id, grid, slabs;
  int slab, j, first, count;
  __device__ Walk(const int2* items_, int n_, int id_, int grid_, int slabs_) : items(items_), n(n_), id(id_), grid(grid_), slabs(slabs_), slab(-1), j(0), first(0), count(0) {}
  // How many tiles there are.
  __device__ int length() const {
    int sum = 0;
    for (int s = 0; s < slabs; ++s) {
      const int f = (int)((id + (u32)s * (u32)(grid - n % grid)) % (u32)grid);
      sum += f < n ? (n - f + grid - 1) / grid : 0;
    }
    return sum;
  }
  // Moves to the next tile; `at` is its slab, `slabs` after the last one.
  __device__ int2 next(int& at) {
    while (j >= count) {
      if (++slab >= slabs) {
        at = slab = slabs;
        return make_int2(0, 0);
      }
      j = 0;
      first = (int)((id + (u32)slab * (u32)(grid - n % grid)) % (u32)grid);
      count = first < n ? (n - first + grid - 1) / grid : 0;
    }
    at = slab;
#if ZIGZAG
    const int k = j >> 1;
    const int found = first + grid * ((j & 1) ? count - 1 - k : k);
#else
    const int found = first + grid * j;
#endif
    ++j;
    return __ldg(items + found);
  }
};

// Equal in all lanes, which the compiler must know where products depend on it.
__device__ __forceinline__ int2 uniform(int2 item) { return make_int2(__shfl_sync(0xffffffff, item.x, 0), __shfl_sync(0xffffffff, item.y, 0)); }

__device__ __forceinline__ u32 any_of(int w) {
  u32 v = (u32)w;
  return (v | (v >> 8) | (v >> 16) | (v >> 24)) & 255;
}

// Where 64 x BN sums of a warp group go; `row` is the target row of place lane & 15 of the warp, or -1. With SIDES `row` is where
// the row's 256 columns begin in the sums, and `column` counts from there.
struct Target {
  int row, column;
};
#if SIDES
// The half that owns the first 4 KB of the pair-th 8 KB: found in bench_sides, `pages` has one bit for each 2 MB.
__device__ __forceinline__ u32 owner_of(u32 pair, u32 mask, const u32* __restrict__ pages) {
  return (__popc(pair & mask) ^ (__ldg(pages + (pair >> 13)) >> ((pair >> 8) & 31))) & 1;
}
// `group`: which 256 columns of those of this half.
__device__ __forceinline__ int place_of(int row, int group, int side, int quads, u32 mask, const u32* __restrict__ pages) {
  const u32 pair = group * quads + (row >> 2);
  return (int)(pair * 2048 + ((side ^ owner_of(pair, mask, pages)) << 10) + (row & 3) * 256);
}
#endif
#if SUM16
typedef u16 Sum;
#else
typedef float Sum;
#endif

// Adds four columns where `row` is one; a predicate, because branches would keep the loads of the next ones behind.
__device__ __forceinline__ void reduce4(int row, float* to, float x, float y, float z, float t, u64 policy) {
#if HINT_R
  asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %6, 0;\n@p red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;\n}" ::"l"(to), "f"(x), "f"(y),
               "f"(z), "f"(t), "l"(policy), "r"(row) : "memory");
#else
  asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %5, 0;\n@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(t), "r"(row)
               : "memory");
#endif
}
#if SUM16 == 1
#define KIND16 "bf16x2"
#else
#define KIND16 "f16x2"
#endif
__device__ __forceinline__ void reduce8(int row, u16* to, u32 x, u32 y, u32 z, u32 t) {
#if PARTIAL
  asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(t), "r"(row) : "memory");
#else
  asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %5, 0;\n@p red.relaxed.gpu.global.add.noftz.v4." KIND16 " [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(t),
               "r"(row) : "memory");
#endif
}

#if FLUSH == 3 && !SUM16
constexpr int PIECES = BN / PIECE;
// PIECE columns of 16 rows pass through the warp's own buffer, then leave as whole segments of rows.
template <int P> __device__ __forceinline__ void put_piece(const float (&acc)[NACC], u32 buffer) {
  const int lane = threadIdx.x & 31, own = lane >> 2;
  const u32 shift = (own & 3) * 32 + (lane & 3) * 8;
#pragma unroll
  for (int c = 0; c < PIECE / 8; ++c) {
    const int q = (P * (PIECE / 8) + c) * 4;
    const u32 at = buffer + own * (PIECE * 4) + ((c * 32 + shift) & (PIECE * 4 - 1));
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(acc[q]), "f"(acc[q + 1]) : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * PIECE * 4), "f"(acc[q + 2]), "f"(acc[q + 3]) : "memory");
  }
}
// `row` is the target of place lane & 15, `out` the first column.
__device__ __forceinline__ void take_piece(int target, float* out, u32 buffer, int stride, u64 policy) {
  constexpr int LANES = PIECE / 4, AT_ONCE = 32 / LANES;
  const int lane = threadIdx.x & 31;
  out += (lane % LANES) * 4;
#pragma unroll
  for (int i = 0; i < 16 / AT_ONCE; ++i) {
    const int r = i * AT_ONCE + lane / LANES;
    const int row = __shfl_sync(0xffffffff, target, r);
    float x, y, z, w;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
                 : "r"(buffer + r * (PIECE * 4) + (((lane % LANES) * 16 + (r & 3) * 32) & (PIECE * 4 - 1))) : "memory");
    reduce4(row, out + (SIDES ? (u64)(u32)row : (u64)row * (u32)stride), x, y, z, w, policy);
  }
}
#elif FLUSH == 3
constexpr int PIECES = BN / 64;
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 both;
#if SUM16 == 1
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
}
// 64 columns of 16 rows: 128 bytes of a row for eight lanes. Sixteen bytes move by the row's number against conflicts.
template <int P> __device__ __forceinline__ void put_piece(const float (&acc)[NACC], u32 buffer) {
  const int lane = threadIdx.x & 31, own = lane >> 2;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const int q = (P * 8 + c) * 4;
    const u32 at = buffer + own * 128 + ((c ^ own) * 16) + (lane & 3) * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(packed(acc[q], acc[q + 1])) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * 128), "r"(packed(acc[q + 2], acc[q + 3])) : "memory");
  }
}
__device__ __forceinline__ void take_piece(int target, u16* out, u32 buffer, int stride, u64 policy) {
  const int lane = threadIdx.x & 31;
  out += (lane & 7) * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i * 4 + (lane >> 3);
    const int row = __shfl_sync(0xffffffff, target, r);
    u32 x, y, z, w;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(buffer + r * 128 + (((lane & 7) ^ (r & 7)) * 16)) : "memory");
    reduce8(row, out + (u64)row * (u32)stride, x, y, z, w);
  }
}
#elif FLUSH == 2
constexpr int PIECES = BN / PIECE;
// As above, but the copy engine adds the segments; it reads the buffer while the warp goes on.
template <int P> __device__ __forceinline__ void flush_piece(const float (&acc)[NACC], Target t, Sum* sum, u32 buffer, int stride, int N, u64 policy) {
  const int lane = threadIdx.x & 31, own = lane >> 2;
  const u32 shift = (own & 3) * 32 + (lane & 3) * 8;
  const u32 turn = (lane & 3) * 32;  // neighbouring rows lie 32 bytes further, against bank conflicts
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  __syncwarp();
#pragma unroll
  for (int c = 0; c < PIECE / 8; ++c) {
    const int q = (P * (PIECE / 8) + c) * 4;
    const u32 at = buffer + own * (PIECE * 4) + ((c * 32 + shift) & (PIECE * 4 - 1));
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(acc[q]), "f"(acc[q + 1]) : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * PIECE * 4), "f"(acc[q + 2]), "f"(acc[q + 3]) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  const u32 line = buffer + (lane & 15) * (PIECE * 4);
  const bool is_head = lane < 16;
  const u32 bytes = is_head ? PIECE * 4 - turn : turn;
  if (t.row >= 0 && bytes != 0 && t.column + P * PIECE < N) {
    const u32 from = is_head ? line + turn : line;
    float* to = sum + (u64)t.row * (u32)stride + t.column + P * PIECE + (is_head ? 0 : (PIECE * 4 - turn) / 4);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
#elif FLUSH == 5
constexpr int PIECES = BN / 16;
// Neighbouring lanes swap, so that each holds four columns that lie side by side.
template <int P> __device__ __forceinline__ void flush_piece(const float (&acc)[NACC], Target t, Sum* sum, u32 buffer, int stride, int N, u64 policy) {
  const int lane = threadIdx.x & 31, own = lane >> 2;
  const bool odd = lane & 1;
  float* out = sum + t.column + P * 16 + (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int q = P * 8 + 2 * half, row = __shfl_sync(0xffffffff, t.row, own + 8 * half);
    const float k0 = acc[q], k1 = acc[q + 1], l0 = acc[q + 4], l1 = acc[q + 5];
    const float g0 = __shfl_xor_sync(0xffffffff, odd ? k0 : l0, 1), g1 = __shfl_xor_sync(0xffffffff, odd ? k1 : l1, 1);
    if (t.column + P * 16 < N) reduce4(row, out + (u64)row * (u32)stride, odd ? g0 : k0, odd ? g1 : k1, odd ? l0 : g0, odd ? l1 : g1, policy);
  }
}
#else
constexpr int PIECES = 1;
template <int P> __device__ __forceinline__ void flush_piece(const float (&acc)[NACC], Target t, Sum* sum, u32 buffer, int stride, int N, u64 policy) {
  // Never true, which the compiler cannot know: what nobody uses it leaves out, wgmma too, volatile or not.
  if (stride < 0) {
#pragma unroll
    for (int q = 0; q < NACC; ++q) sum[q] = (Sum)acc[q];
  }
}
#endif

#if FLUSH == 3
template <int P> __device__ __forceinline__ void flush_piece(const float (&acc)[NACC], Target t, Sum* sum, u32 buffer, int stride, int N, u64 policy) {
  __syncwarp();
  put_piece<P>(acc, buffer);
  __syncwarp();
  if (t.column + P * PIECE_COLUMNS < N) take_piece(t.row, sum + t.column + P * PIECE_COLUMNS, buffer, stride, policy);
}
template <int P = 0> __device__ __forceinline__ void put_all(const float (&acc)[NACC], u32 buffer) {
  put_piece<P>(acc, buffer + P * BUFFER);
  if constexpr (P + 1 < PIECES) put_all<P + 1>(acc, buffer);
}
#endif
template <int P = 0> __device__ __forceinline__ void flush_all(const float (&acc)[NACC], Target t, Sum* sum, u32 buffer, int stride, int N, u64 policy) {
  flush_piece<P>(acc, t, sum, buffer, stride, N, policy);
  if constexpr (P + 1 < PIECES) flush_all<P + 1>(acc, t, sum, buffer, stride, N, policy);
}
// The piece of a run-time number; registers want a number known to the compiler.
template <int P = 0> __device__ __forceinline__ void flush_one(int piece, const float (&acc)[NACC], Target t, Sum* sum, u32 buffer, int stride, int N, u64 policy) {
  if constexpr (P + 1 == PIECES) {
    flush_piece<P>(acc, t, sum, buffer, stride, N, policy);
  } else {
    if (piece == P) flush_piece<P>(acc, t, sum, buffer, stride, N, policy);
    else flush_one<P + 1>(piece, acc, t, sum, buffer, stride, N, policy);
  }
}

#if PARTIAL
// The factor that brings the largest of a row's sums to [2^14, 2^15), and back: exact powers of two.
__device__ __forceinline__ float factor_of(float largest, float& back) {
  const u32 exponent = (__float_as_uint(largest) >> 23) & 255;
  const u32 field = min(max(268 - (int)exponent, 1), 253);
  back = __uint_as_float((254 - field) << 23);
  return __uint_as_float(field << 23);
}
// Scales rows lane / 4 and lane / 4 + 8 of a warp; `scales` is that of the warp's first row, `tiles` apart.
__device__ __forceinline__ void scale_rows(float (&acc)[NACC], float* scales, int tiles, int valid) {
  const int lane = threadIdx.x & 31, own = lane >> 2;
  float upper = 0.f, lower = 0.f;
#pragma unroll
  for (int q = 0; q < NACC; q += 4) {
    upper = fmaxf(upper, fmaxf(fabsf(acc[q]), fabsf(acc[q + 1])));
    lower = fmaxf(lower, fmaxf(fabsf(acc[q + 2]), fabsf(acc[q + 3])));
  }
#pragma unroll
  for (int x = 1; x < 4; x <<= 1) {
    upper = fmaxf(upper, __shfl_xor_sync(0xffffffff, upper, x));
    lower = fmaxf(lower, __shfl_xor_sync(0xffffffff, lower, x));
  }
  float back_upper, back_lower;
  upper = factor_of(upper, back_upper);
  lower = factor_of(lower, back_lower);
#pragma unroll
  for (int q = 0; q < NACC; q += 4) {
    acc[q] *= upper;
    acc[q + 1] *= upper;
    acc[q + 2] *= lower;
    acc[q + 3] *= lower;
  }
  if ((lane & 3) == 0) {
    if (own < valid) scales[own * tiles] = back_upper;
    if (own + 8 < valid) scales[(own + 8) * tiles] = back_lower;
  }
}
#endif

template <bool B> struct Flag {
  static constexpr bool value = B;
};
struct __align__(64) Map {
  char opaque[128];
};

extern "C" __global__ void
#if CL_ROWS * CL_COLS > 1
__cluster_dims__(CL_ROWS * CL_COLS, 1, 1)
#endif
__launch_bounds__(384, 1)
down_sorted(const __grid_constant__ Map a_map, const __grid_constant__ Map w_map, Sum* sum,
#if PARTIAL
            float* scales,
#endif
            const int* __restrict__ index, const int* __restrict__ counts,
      const int2* __restrict__ items, const int* __restrict__ num_items, int M, int N, int row_tiles, int stride_sum, int S, int G, int slabs, int parts
#if SIDES
      , const u32* __restrict__ side_of, const u32* __restrict__ pages, u32 mask, u32* tickets, volatile u32* seats
#endif
      ) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const u32 base = smem_of(raw), full = base + BAR_OFFSET, empty = full + 8 * STAGES;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, group = thread >> 7;
  u32 rank = 0;
#if CL_ROWS * CL_COLS > 1
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  const int row_rank = rank % CL_ROWS, col_rank = rank / CL_ROWS;
  // Staged: of each unit's 64 rows, whether they are there, and whether they have left.
  const u32 out_full = empty + 8 * STAGES, out_empty = out_full + 16;
#if SIDES
  // A cluster takes the next seat of its half, or of the other, if its own is full.
  if (thread == 0 && rank == 0) {
    const u32 room = gridDim.x / CLUSTER / 2;
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    u32 half = side_of[sm], seat = atomicAdd(tickets + half, 1u);
    if (seat >= room) half ^= 1, seat = atomicAdd(tickets + half, 1u);
    seats[blockIdx.x / CLUSTER] = seat << 1 | half;
    __threadfence();
  }
#endif
  if (thread == 0) {
    if (MODE == 3)
      for (int unit = 0; unit < 2; ++unit) {
        bar_init(out_full + 8 * unit, 4);
        bar_init(out_empty + 8 * unit, 3);
      }
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 1);
      bar_init(empty + 8 * s, 4 * (MODE == 1 ? 1 : 2) * PEERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
#if CL_ROWS * CL_COLS > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
#if SIDES
  const u32 seat = __shfl_sync(0xffffffff, seats[blockIdx.x / CLUSTER], 0);
  const int side = seat & 1;
  Walk walk(items, *num_items, seat >> 1, gridDim.x / CLUSTER / 2, slabs);
#define SLAB(slab) (2 * (slab) + side)
#else
  Walk walk(items, *num_items, blockIdx.x / CLUSTER, gridDim.x / CLUSTER, slabs);
#define SLAB(slab) (slab)
#endif
  const int ksteps = G / BK;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " STR(PREGS) ";");
#if LOADS
    if (thread == 0) {
      u64 first_use, stays;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_use));
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stays));
      const u16 column_mask = ((1 << CL_ROWS) - 1) << (col_rank * CL_ROWS);                       // who shares weights
      const u16 row_mask = CL_COLS == 1 ? 1 << row_rank : (1 | (1 << CL_ROWS)) << row_rank;      // who shares rows
      u32 stage = 0, phase = 1;
      int slab = 0, next_slab = 0;
      int2 item = walk.next(slab);
      while (slab < slabs) {
        const int2 next_item = walk.next(next_slab);
        const int block = item.x / row_tiles;
        const int row = block * M + (item.x % row_tiles) * (128 * CL_ROWS) + row_rank * 128;
        const u32 own = (u32)item.y >> (16 * row_rank), every = any_of(item.y);
        for (int part = 0; part < parts; ++part) {
          const int column = ((SLAB(slab) * parts + part) * CL_COLS + col_rank) * BN;
          for (u32 rest = every; rest != 0; rest &= rest - 1) {
            const int member = __ffs(rest) - 1;
            const u32 upper = (own >> member) & 1, lower = (own >> (8 + member)) & 1;
            const u32 bytes = B_STAGE + (upper + lower) * A_UNIT;
#pragma unroll 1  // 24 registers
            for (int step = 0; step < ksteps; ++step) {
              const int k = member * G + step * BK;
              const u32 bar = full + 8 * stage, a = base + A_OFFSET + stage * A_STAGE;
              bar_wait(empty + 8 * stage, phase);
              bar_expect(bar, bytes);
              load<(CL_ROWS > 1), (HINT_W != 0)>(base + stage * B_STAGE + row_rank * (B_STAGE / CL_ROWS), &w_map, block * S * G + k, column + row_rank * (BN / CL_ROWS), bar,
                                             column_mask, stays);
#if CL_COLS == 1
              if (upper) load<false, (HINT_A != 0)>(a, &a_map, k, row, bar, 0, first_use);
              if (lower) load<false, (HINT_A != 0)>(a + A_UNIT, &a_map, k, row + 64, bar, 0, first_use);
#else
              if (col_rank ? lower : upper) load<true, (HINT_A != 0)>(a + col_rank * A_UNIT, &a_map, k, row + col_rank * 64, bar, row_mask, first_use);
#endif
              if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
              }
            }
          }
        }
        item = next_item;
        slab = next_slab;
      }
    }
#endif
#if MODE == 3
    if (warp > 0) {
      u64 policy = 0;
#if HINT_R
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
      u32 phase = 0;
      for (int tiles = walk.length() * parts; tiles > 0; --tiles, phase ^= 1) {
#pragma unroll 1
        for (int unit = 0; unit < 2; ++unit) {
          bar_wait(out_full + 8 * unit, phase);
          int column;
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(column) : "r"(base + TARGET_OFFSET + 512 + 4 * unit) : "memory");
#pragma unroll 1
          for (int i = warp - 1; i < 4 * PIECES; i += 3) {
            const int quarter = i / PIECES, piece = i % PIECES;
            int target;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(target) : "r"(base + TARGET_OFFSET + unit * 256 + quarter * 64 + (lane & 15) * 4) : "memory");
            if (column + piece * PIECE_COLUMNS < N)
              take_piece(target, sum + column + piece * PIECE_COLUMNS, base + OUT_OFFSET + ((unit * 4 + quarter) * BUFFERS + piece) * BUFFER, stride_sum, policy);
          }
          __syncwarp();
          if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(out_empty + 8 * unit) : "memory");
        }
      }
    }
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " STR(CREGS) ";");
    const int wg = group - 1;
    const u32 buffer = base + OUT_OFFSET + (warp - 4) * BUFFERS * BUFFER;
    u64 policy = 0;
#if HINT_R
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
    // Lane r tells peer r that this warp has read a stage: the programs that write to it.
    u32 peer_empty = empty;
#if CL_ROWS * CL_COLS > 1
    {
      u32 peer = rank;
      if (CL_ROWS == 2 && lane == 1) peer = rank ^ 1;
      if (CL_COLS == 2 && lane == PEERS - 1) peer = (rank + CL_ROWS) % CLUSTER;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer_empty) : "r"(empty), "r"(peer));
    }
#endif
    auto release = [&](int stage) {
      if (lane < PEERS) {
#if CL_ROWS * CL_COLS > 1
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_empty + 8 * stage) : "memory");
#else
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(peer_empty + 8 * stage) : "memory");
#endif
      }
    };
    float acc[HALVES][NACC];
#if !MULTIPLY
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int q = 0; q < NACC; ++q) acc[half][q] = (float)(thread * NACC + q) * 0.25f;
#endif
#if MODE == 2
    float held[NACC];
#pragma unroll
    for (int q = 0; q < NACC; ++q) held[q] = 0.f;
    Target held_target{-1, 0};
    int left = 0;
#endif
    u32 stage = 0, phase = 0;
    int slab = 0, next_slab = 0;
    u32 turn = 0;  // of the program's tiles, counted over both consumers
    int2 item = uniform(walk.next(slab));
    while (slab < slabs) {
      const int2 next_item = walk.next(next_slab);  // looked at only when this tile is done
      const int block = item.x / row_tiles;
      const u32 own = (u32)item.y >> (16 * row_rank), every = any_of(item.y);
      const int place = (item.x % row_tiles) * (128 * CL_ROWS) + row_rank * 128 + (MODE == 1 ? 0 : wg * 64) + (warp & 3) * 16 + (lane & 15);
      const int count = counts[block];
      int rows[HALVES];
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int at = place + 64 * half;
#if PARTIAL
        rows[half] = block * M + min(at, M - 1);
#else
        rows[half] = index[block * M + min(at, M - 1)];
#endif
      }
      for (int part = 0; part < parts; ++part, ++turn) {
#if MODE == 1
        if ((int)(turn & 1) != wg) {
          // The other consumer's stages.
          const u32 after = stage + __popc(every) * ksteps;
          phase ^= (after / STAGES) & 1;
          stage = after % STAGES;
          continue;
        }
#if ORDER
        if (turn > 0) asm volatile("bar.sync %0, 256;" ::"r"(1 + wg) : "memory");
#endif
#endif
        const int column = ((SLAB(slab) * parts + part) * CL_COLS + col_rank) * BN;
#if LOADS
        int pending = -1;
        int used[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) used[half] = 0;
        auto advance = [&]() {
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        };
        // The steps of one group for the halves that execute it.
        auto steps = [&](auto upper, auto lower) {
#pragma unroll 1
          for (int step = 0; step < ksteps; ++step) {
            bar_wait(full + 8 * stage, phase);
#if MULTIPLY
            const u64 b = descriptor(base + stage * B_STAGE);
            const u64 a = descriptor(base + A_OFFSET + stage * A_STAGE + (MODE == 1 ? 0 : wg * A_UNIT));
            wgmma_arrive();
            if constexpr (decltype(upper)::value) {
#pragma unroll
              for (int k = 0; k < BK / 16; ++k) wgmma(acc[0], a + 2 * k, b + 2 * k, used[0] | k);
              used[0] = 1;
            }
            if constexpr (decltype(lower)::value) {
#pragma unroll
              for (int k = 0; k < BK / 16; ++k) wgmma(acc[HALVES - 1], a + (A_UNIT >> 4) + 2 * k, b + 2 * k, used[HALVES - 1] | k);
              used[HALVES - 1] = 1;
            }
            wgmma_commit();
#if MODE == 2
            if (left > 0) {
              flush_one(PIECES - left, held, held_target, sum, buffer, stride_sum, N, policy);
              --left;
            }
#endif
            wgmma_wait<1>();
#endif
            if (pending >= 0) release(pending);
            pending = stage;
            advance();
          }
        };
        // A neighbour's group: its weights came here too.
        auto skip = [&]() {
#if MULTIPLY
          wgmma_wait<0>();
#endif
          if (pending >= 0) release(pending);
          pending = -1;
          for (int step = 0; step < ksteps; ++step) {
            bar_wait(full + 8 * stage, phase);
            release(stage);
            advance();
          }
        };
#pragma unroll 1
        for (u32 rest = every; rest != 0; rest &= rest - 1) {
          const int member = __ffs(rest) - 1;
          u32 mine = own >> member;
          if (MODE != 1) mine >>= 8 * wg;
#if MODE == 1
          mine = (mine & 1) | ((mine >> 7) & 2);
#else
          mine &= 1;
#endif
          if (MODE == 1 && mine == 3) steps(Flag<true>{}, Flag<true>{});
          else if (mine == 1) steps(Flag<true>{}, Flag<false>{});
          else if (MODE == 1 && mine == 2) steps(Flag<false>{}, Flag<true>{});
          else skip();
        }
#if ORDER
        // The next program's tile may start; whoever has the last one must not leave a barrier half full.
        if (next_slab < slabs || part + 1 < parts) asm volatile("bar.arrive %0, 256;" ::"r"(2 - wg) : "memory");
#endif
#if MULTIPLY
        wgmma_wait<0>();
#endif
        if (pending >= 0) release(pending);
#elif MULTIPLY
        // Products of whatever lies in shared memory.
        wgmma_arrive();
        for (int step = 0; step < (int)__popc(every) * ksteps; ++step) {
#pragma unroll
          for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int k = 0; k < BK / 16; ++k) wgmma(acc[half], descriptor(base + A_OFFSET + half * A_UNIT) + 2 * k, descriptor(base) + 2 * k, step | k);
          wgmma_commit();
          wgmma_wait<1>();
        }
        wgmma_wait<0>();
#endif
#if MODE == 2
        for (; left > 0; --left) flush_one(PIECES - left, held, held_target, sum, buffer, stride_sum, N, policy);
        if (((own >> (8 * wg)) & 255) != 0) {
#pragma unroll
          for (int q = 0; q < NACC; ++q) held[q] = acc[0][q];
          held_target = {place < count ? rows[0] : -1, column};
          left = PIECES;
        }
#elif MODE == 3
        bar_wait(out_empty + 8 * wg, ~turn & 1);
        if (((own >> (8 * wg)) & 255) != 0) put_all(acc[0], buffer);
        if (lane < 16) asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + TARGET_OFFSET + (warp - 4) * 64 + lane * 4), "r"(place < count ? rows[0] : -1) : "memory");
        if ((warp & 3) == 0 && lane == 16) asm volatile("st.shared.b32 [%0], %1;" ::"r"(base + TARGET_OFFSET + 512 + 4 * wg), "r"(column) : "memory");
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(out_full + 8 * wg) : "memory");
#else
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
          if (((own >> (8 * (MODE == 1 ? half : wg))) & 255) != 0 && column < N) {
#if PARTIAL
            const int tiles = (N + BN - 1) / BN, top = place + 64 * half - (lane & 15);
            scale_rows(acc[half], scales + (u64)(block * M + min(top, M - 1)) * tiles + column / BN, tiles, count - top);
#endif
#if SIDES
            const int at = place_of(rows[half], ((slab * parts + part) * CL_COLS + col_rank) * BN / 256, side, (M + 3) / 4, mask, pages);
            flush_all(acc[half], Target{place + 64 * half < count ? at : -1, column & 255}, sum, buffer, stride_sum, N, policy);
#else
            flush_all(acc[half], Target{place + 64 * half < count ? rows[half] : -1, column}, sum, buffer, stride_sum, N, policy);
#endif
          }
#endif
      }
      item = uniform(next_item);
      slab = next_slab;
    }
#if MODE == 2
    for (; left > 0; --left) flush_one(PIECES - left, held, held_target, sum, buffer, stride_sum, N, policy);
#endif
#if FLUSH == 2
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
  }
#if CL_ROWS * CL_COLS > 1
  // Nobody leaves while a neighbour may still write to its memory or arrive at its barriers.
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
