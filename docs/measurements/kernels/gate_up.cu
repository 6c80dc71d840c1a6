// An experiment, not part of the package: bench_gate_up/ builds, checks and times each macro's variant.
// Gate + up + SwiGLU on sm_90a: gathered rows of one group times its 128 gate and 128 up channels, only executing pairs.
// Macros (defaults below):
//   CLUSTER 1 every program has row tiles of its own; 2 the two programs of a cluster share a group's weights where their
//     items are of the same group: each loads one box of a stage and multicasts it to both.
//   PREFETCH what the next item needs is loaded while this one is multiplied, and row numbers before they are stored to.
//   FASTSILU 1 one approximate exponential, one approximate reciprocal; 0 the instructions of Triton's exp and division.
//   EPILOGUE 0: nothing is stored, products are kept alive (look for HGMMA in the machine code).
//   GATHER 0: rows come into the ring once and never again, so that products still are of plausible numbers.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef PREFETCH
#define PREFETCH 1
#endif
#ifndef FASTSILU
#define FASTSILU 1
#endif
#ifndef EPILOGUE
#define EPILOGUE 1
#endif
#ifndef GATHER
#define GATHER 1
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef PREGS
#define PREGS 56
#define CREGS 224
#endif
#define STR_(x) #x
#define STR(x) STR_(x)

constexpr int BK = 64, CHANNELS = 128;  // of a stage; of a group
constexpr u32 BOX = CHANNELS * BK * 2, B_STAGE = 2 * BOX;  // gate, then up
constexpr u32 A_UNIT = 64 * BK * 2, A_STAGE = 2 * A_UNIT;
constexpr u32 A_OFFSET = STAGES * B_STAGE, OUT_OFFSET = A_OFFSET + STAGES * A_STAGE;
constexpr u32 LINE = CHANNELS * 2, BUFFER = 16 * LINE;  // of a finished row; of a warp's rows
constexpr u32 BAR_OFFSET = OUT_OFFSET + (EPILOGUE ? 8 * BUFFER : 0);
constexpr u32 SMEM = BAR_OFFSET + 16 * STAGES;
static_assert(SMEM <= 232448 && (CLUSTER == 1 || CLUSTER == 2), "shared memory, cluster");

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
// A stage is free when the consumers of both programs have read it: a neighbour's box may come to it.
__device__ __forceinline__ void release(u32 bar) {
#if CLUSTER == 1
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#else
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r)
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(r) : "memory");
#endif
}
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}
__device__ __forceinline__ void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// 64 rows x 256 channels (128 gate, 128 up): both operands in shared memory, bfloat16 in, float32 out.
#define R128 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define F32(i) F8(i), F8(i + 8), F8(i + 16), F8(i + 24)
__device__ __forceinline__ void wgmma(float (&d)[128], u64 a, u64 b, int scale) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" R128 "}, %128, %129, p, 1, 1, 0, 0;\n}"
               : F32(0), F32(32), F32(64), F32(96)
               : "l"(a), "l"(b), "r"(scale));
}

struct __align__(64) Map {
  char opaque[128];
};
// A box of 128 weight rows x 64, to this program or to the same place of both, counted by each one's barrier.
__device__ __forceinline__ void load_box(u32 to, const Map& map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(k), "r"(row),
               "r"(bar) : "memory");
}
__device__ __forceinline__ void multicast_box(u32 to, const Map& map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map),
               "r"(k), "r"(row), "r"(bar), "h"((u16)3) : "memory");
}

// Volatile: a load that may be delayed until its value is needed hides nothing.
__device__ __forceinline__ int load_int(const int* p) {
  int v;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// A row tile of 128 rows; group -1: none. `other` is the group of the cluster's other program.
struct Item {
  int group, tile, other;
};
__device__ __forceinline__ Item load_item(const int* items, int j, u32 rank) {
  Item item;
#if CLUSTER == 1
  asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(item.group), "=r"(item.tile) : "l"(items + 2 * j));
  item.other = -1;
#else
  int x, y, z, w;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(items + 4 * j));
  item.group = rank ? z : x;
  item.tile = rank ? w : y;
  item.other = rank ? x : z;
#endif
  return item;
}
__device__ __forceinline__ int load_count(const int* counts, Item item) { return load_int(counts + max(item.group, 0)); }
// Rows of a tile that there are; at most 0 where there is no tile.
__device__ __forceinline__ int rows_left(Item item, int count) { return item.group < 0 ? 0 : count - item.tile * 128; }
// Place `place` of a tile in the list of its group, for reading only where it is within the count.
__device__ __forceinline__ int load_row(const int* index, Item item, int place, int M) {
  return load_int(index + max(item.group, 0) * M + min(max(item.tile, 0) * 128 + place, M - 1));
}
// Equal in all lanes, which the compiler must know where products depend on it.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xffffffff, v, 0); }

__device__ __forceinline__ float swiglu(float v, float up) {
  float e, r;
#if FASTSILU
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return v * r * up;
#else
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950408889634f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(v), "f"(1.0f + e));
  return r * up;
#endif
}
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// A round is one use of a stage. The programs of a cluster walk one list, K / 64 rounds an item whatever it is (also where one has
// no tile), so they agree on every round's stage and parity; lists of different clusters have nothing to do with each other.
// No overwrite: `empty` takes all 16 consumer warps' arrivals. A warp arrives for round n + 1 only after a phase n is over somewhere,
// and the first one to be takes all 16 warps for round n; so when a producer passes, both programs have read that stage.
// A neighbour's box before this program's own expect: `full` is in the right phase already (its consumers waited for the one before)
// and cannot end it without this program's 129 arrivals; the count of bytes may be negative until then.
// No deadlock: producers wait only for releases of the round STAGES before, consumers only for both producers' loads of this round,
// and every consumer releases every round, rows or not: the earliest unfinished round can always go on.
// Leaving: consumers have waited for all bytes of all rounds; arrivals at a neighbour come before the last barrier of the cluster.
extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(384, 1)
gate_up(const __grid_constant__ Map gate_map, const __grid_constant__ Map up_map, const u16* __restrict__ x, u16* __restrict__ out, const int* __restrict__ index,
        const int* __restrict__ counts, const int* __restrict__ items, const int* __restrict__ starts, int M, int K, int N) {
  extern __shared__ __align__(1024) unsigned char raw[];
  // The shuffle keeps the compiler from computing the address afresh, from special registers, in every step.
  const u32 base = __shfl_sync(0xffffffff, smem_of(raw), 0);
  const u32 full = base + BAR_OFFSET, empty = full + 8 * STAGES;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, role = thread >> 7;
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 128 + 1);
      bar_init(empty + 8 * s, 8 * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  u32 rank = 0;
#if CLUSTER > 1
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
  const int begin = starts[blockIdx.x / CLUSTER], end = starts[blockIdx.x / CLUSTER + 1];
  const int ksteps = K / BK;

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " STR(PREGS) ";");
    // Eight lanes copy the 128 bytes of a row; a thread has rows `row` + 16 i, which lie alike in the swizzle.
    constexpr int TIMES = 8;
    const int chunk = thread & 7, row = thread >> 3;
    const u32 target = base + A_OFFSET + row * 128 + (chunk ^ (row & 7)) * 16;
    const char* const source = reinterpret_cast<const char*>(x + chunk * 8);
    const u32 stride = K * 2;
    u32 stage = 0, phase = 1;
#if !GATHER
    int fresh = STAGES;
#endif
    u32 rows[TIMES];  // where rows begin, in bytes
    // Zero, but not as the compiler sees it: what is equal in all lanes it moves to a uniform register as soon as it is loaded,
    // and waits for it there.
    const int zero = min(lane, M >> 30);
#if PREFETCH
    Item item = {-1, 0, -1}, next = item;
    int left = 0;
    if (begin < end) {
      item = load_item(items, begin + zero, rank);
      next = load_item(items, min(begin + 1, end - 1) + zero, rank);
      left = rows_left(item, load_count(counts, item));
#pragma unroll
      for (int i = 0; i < TIMES; ++i) rows[i] = load_row(index, item, row + 16 * i, M) * stride;
    }
#endif
    for (int j = begin; j < end; ++j) {
#if PREFETCH
      // The item after the next, and of the next its count and rows.
      const Item after = load_item(items, min(j + 2, end - 1) + zero, rank);
      const int next_count = load_count(counts, next);
      u32 next_rows[TIMES];
#pragma unroll
      for (int i = 0; i < TIMES; ++i) next_rows[i] = load_row(index, next, row + 16 * i, M);
#else
      const Item item = load_item(items, j + zero, rank);
      const int left = rows_left(item, load_count(counts, item));
#pragma unroll
      for (int i = 0; i < TIMES; ++i) rows[i] = row + 16 * i < left ? load_row(index, item, row + 16 * i, M) * stride : 0;
#endif
      const bool shared = CLUSTER > 1 && item.group == item.other;
      const int column = item.group * CHANNELS;
#pragma unroll 1
      for (int k = 0; k < K; k += BK) {
        bar_wait(empty + 8 * stage, phase);
        const u32 bar = full + 8 * stage;
        if (thread == 0) {
          const u32 to = base + stage * B_STAGE;
          bar_expect(bar, item.group >= 0 ? B_STAGE : 0);
          if (shared) {
            if (rank == 0)
              multicast_box(to, gate_map, k, column, bar);
            else
              multicast_box(to + BOX, up_map, k, column, bar);
          } else if (item.group >= 0) {
            load_box(to, gate_map, k, column, bar);
            load_box(to + BOX, up_map, k, column, bar);
          }
        }
        // Rows beyond the count keep what the ring holds: their products are never stored.
#if !GATHER
        if (fresh-- > 0)
#endif
#pragma unroll
          for (int i = 0; i < TIMES; ++i)
            if (row + 16 * i < left)
              asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + stage * A_STAGE + i * 2048), "l"(source + 2 * k + (u64)rows[i]) : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
#if PREFETCH
      item = next;
      next = {after.group + zero, after.tile + zero, after.other};  // a plain copy would be made, and waited for, up there
      left = rows_left(item, next_count);
#pragma unroll
      for (int i = 0; i < TIMES; ++i) rows[i] = next_rows[i] * stride;
#endif
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " STR(CREGS) ";");
    const int unit = role - 1;
    // What this lane's row of the warp's 16 is called.
    const int place = unit * 64 + (warp & 3) * 16 + (lane & 15);
    const u32 buffer = base + OUT_OFFSET + (warp - 4) * BUFFER;
    float acc[128];
    u32 stage = 0, phase = 0;
#if PREFETCH
    Item item = {-1, 0, -1}, next = item;
    int left = 0;
    if (begin < end) {
      item = load_item(items, begin, rank);
      next = load_item(items, min(begin + 1, end - 1), rank);
      left = uniform(rows_left(item, load_count(counts, item)));
    }
#endif
    for (int j = begin; j < end; ++j) {
#if PREFETCH
      const Item after = load_item(items, min(j + 2, end - 1), rank);
      const int next_count = load_count(counts, next);
      const int listed = load_row(index, item, place, M);
#else
      const Item item = load_item(items, j, rank);
      const int left = uniform(rows_left(item, load_count(counts, item)));
#endif
      if (left > unit * 64) {
        int before = 0;
#pragma unroll 1
        for (int step = 0; step < ksteps; ++step) {
          bar_wait(full + 8 * stage, phase);
          // Rows arrive through the generic proxy, the product reads through the asynchronous one.
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          const u64 a = descriptor(base + A_OFFSET + stage * A_STAGE + unit * A_UNIT);
          const u64 b = descriptor(base + stage * B_STAGE);
          wgmma_arrive();
#pragma unroll
          for (int k = 0; k < BK / 16; ++k) wgmma(acc, a + 2 * k, b + 2 * k, step | k);
          wgmma_commit();
          wgmma_wait<1>();
          if (step > 0 && lane == 0) release(empty + 8 * before);
          before = stage;
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
        wgmma_wait<0>();
        if (lane == 0) release(empty + 8 * before);
        __syncwarp();  // the item before has been read out
#if EPILOGUE
#if !PREFETCH
        const int listed = load_row(index, item, place, M);
#endif
        const int target = place < left ? listed : -1;
        // A warp without rows has nothing to do. The branch also keeps arithmetic behind the release of the last stage.
        if (__any_sync(0xffffffff, place < left)) {
          // Gate channel c and up channel c lie in the same thread: 8 channels of rows lane / 4 and + 8 are acc[4 c ..].
          // Sixteen bytes move by the row's number against bank conflicts.
          const u32 put = buffer + (lane & 15) * LINE + (((lane >> 4) ^ (lane & 7)) * 16);
#pragma unroll
          for (int c = 0; c < CHANNELS / 8; c += 2) {
            u32 part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int q = 4 * c + 2 * i;
              part[i] = packed(swiglu(acc[q], acc[64 + q]), swiglu(acc[q + 1], acc[65 + q]));
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(put ^ (c * 16)), "r"(part[0]), "r"(part[1]), "r"(part[2]), "r"(part[3])
                         : "memory");
          }
          __syncwarp();
          u16* const to = out + item.group * CHANNELS + (lane & 15) * 8;
          // All loads before the first store, and predicates: a branch would keep the next one's loads behind.
          u32 v[8][4];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int r = 2 * i + (lane >> 4);
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i][2]), "=r"(v[i][3])
                         : "r"(buffer + r * LINE + (((lane & 15) ^ (r & 7)) * 16)) : "memory");
          }
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int target_row = __shfl_sync(0xffffffff, target, 2 * i + (lane >> 4));
            asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to + (u64)(u32)target_row * (u32)N), "r"(v[i][0]),
                         "r"(v[i][1]), "r"(v[i][2]), "r"(v[i][3]), "r"(target_row) : "memory");
          }
        }
#else
        // Never true, which the compiler cannot know: what nobody uses it leaves out, wgmma too, volatile or not.
        if (M < 0) {
#pragma unroll
          for (int q = 0; q < 128; ++q) reinterpret_cast<float*>(out)[q * 128 + thread] = acc[q];
        }
#endif
      } else {
#pragma unroll 1
        for (int step = 0; step < ksteps; ++step) {
          bar_wait(full + 8 * stage, phase);
          if (lane == 0) release(empty + 8 * stage);
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
#if PREFETCH
      item = next;
      next = after;
      left = uniform(rows_left(item, next_count));
#endif
    }
  }
#if CLUSTER > 1
  // Nobody leaves while a neighbour may still write to its memory or arrive at its barriers.
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
