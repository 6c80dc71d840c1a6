// An experiment, not part of the package: docs/measurements/operators/gemm-k.md says what each macro's variant gave.
// GEMM-K without sums that leave: a tile keeps 256 rows x 128 columns in registers, columns along M of wgmma, rows along N. The rows of a
// tile that execute a group are packed into fewer slots; each row may only use three of them, so that adding a slot's product to its
// row's sum is at most three predicated additions. Behind native/hopper.cuh and the header that bench_slots/header.py writes.
// EXPAND=0: slots are added in place; LOADS: 1 weights, 2 rows, 3 both; PING: the two consumers take turns; CLUSTER=2: weights shared.
#ifndef CREGS
#define CREGS 232
#define PREGS 40
#endif
#ifndef EXPAND
#define EXPAND 1
#endif
#ifndef LOADS
#define LOADS 3
#endif
#ifndef PING
#define PING 1
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define DIMS
#endif
constexpr int BK = 64, CHANNELS = 128, TOKENS = 256;
constexpr u32 W_STAGE = CHANNELS * BK * 2, H_STAGE = SLOTS * 4 * BK * 2, STAGE = W_STAGE + H_STAGE;
#ifndef STAGES
#define STAGES 6
#endif
constexpr u32 META = 128, META_OFFSET = STAGES * STAGE;
constexpr u32 BAR_OFFSET = META_OFFSET + STAGES * META, SMEM = BAR_OFFSET + 16 * STAGES;
static_assert(SMEM == SHARED_BYTES, "shared memory");
constexpr int PER_THREAD = (SLOTS * 4 + 31) / 32 * 2; // rows of a producer thread
constexpr int LIST_WORDS = 16 * PER_THREAD / 2;       // u16 entries
// 28 bits a word: seven in each byte, as many as there are predicates.
constexpr int CLASS_WORDS = (64 * EDGES + 27) / 28, BIT_WORDS = 4 * CLASS_WORDS;
__host__ __device__ constexpr int bit_of(int q) { return q % 28 / 7 * 8 + q % 7; }
constexpr int RECORD = LIST_WORDS + BIT_WORDS + 4;

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else __syncthreads();
}
// A stage is free when the consumers of all programs that its weights go to have read it.
__device__ __forceinline__ void release(u32 bar) {
  if (CLUSTER == 1) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#pragma unroll
  for (int r = 0; r < CLUSTER && CLUSTER > 1; ++r)
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(r) : "memory");
}
__device__ __forceinline__ void multicast_box(u32 to, const Map& map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map),
               "r"(k), "r"(row), "r"(bar), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}
__device__ __forceinline__ u32 load_u32(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 load_shared(u32 at) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
template <int A, int B> struct Spread {
  __device__ static __forceinline__ void go(float (&acc)[128], const float (&d)[TEMP], const u32 (&bits)[CLASS_WORDS]) {
    if constexpr (B - A == 1) {
      constexpr int e = A / 64, t = A % 64, s = SLOT[t][e], to = 4 * (t / 2) + t % 2, from = 4 * (s / 2) + s % 2;
      asm("{\n.reg .pred p;\n.reg .b32 v;\nand.b32 v, %4, %5;\nsetp.ne.b32 p, v, 0;\n@p add.f32 %0, %0, %2;\n@p add.f32 %1, %1, %3;\n}"
          : "+f"(acc[to]), "+f"(acc[to + 2]) : "f"(d[from]), "f"(d[from + 2]), "r"(bits[A / 28]), "n"(1u << bit_of(A)));
    } else {
      Spread<A, (A + B) / 2>::go(acc, d, bits);
      Spread<(A + B) / 2, B>::go(acc, d, bits);
    }
  }
};
#if PING
#define TURN() asm volatile("bar.sync %0, 256;" ::"r"(1 + unit) : "memory")
#else
#define TURN()
#endif
struct Item { int tile, column; };
__device__ __forceinline__ Item item_of(int one, int tiles, int parts, int rank) {
  // Panels of 8 tiles, in which the tile goes first.
  constexpr int PANEL = 8 / CLUSTER;
  const int panel = one / (PANEL * parts), in = one % (PANEL * parts), wide = min(PANEL, tiles - panel * PANEL);
  return {(panel * PANEL + in % wide) * CLUSTER + rank, in / wide * CHANNELS};
}

extern "C" __global__ void DIMS __launch_bounds__(384, 1)
spread(const __grid_constant__ Map weight_map, const u16* __restrict__ h, u16* __restrict__ out, const u32* __restrict__ records, const u32* __restrict__ entries,
       const int* __restrict__ counts, int M, int N, int size, int stride_h, int stride_out, int capacity) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const u32 base = smem_of(raw);
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
  cluster_sync();
  const int rank = cluster_rank(), begin = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  const int parts = N / CHANNELS, tiles = (M + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER), number = parts * tiles, steps = size / BK;
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " TEXT(PREGS) ";");
    const int chunk = thread & 7, row = thread >> 3;
    const u32 target = base + W_STAGE + row * 128 + (chunk ^ (row & 7)) * 16;
    u32 stage = 0, phase = 1;
    for (int one = begin; one < number; one += stride) {
      const Item item = item_of(one, tiles, parts, rank);
      const int count = load_int(counts + item.tile);
      const u16* const source = h + (u64)(item.tile * TOKENS) * (u32)stride_h + chunk * 8;
      const u32* list = records + (u64)item.tile * capacity * RECORD + row * (PER_THREAD / 2);
      const u32* entry = entries + item.tile * capacity;
      u32 next[PER_THREAD / 2], next_entry = 0;
      if (count > 0) {
        next_entry = load_u32(entry);
#pragma unroll
        for (int i = 0; i < PER_THREAD / 2; ++i) next[i] = load_u32(list + i);
      }
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        u32 mine[PER_THREAD / 2];
        const u32 now = next_entry;
#pragma unroll
        for (int i = 0; i < PER_THREAD / 2; ++i) mine[i] = next[i];
        const u32* const extra = list - row * (PER_THREAD / 2) + LIST_WORDS;
        list += RECORD;
        ++entry;
        if (k + 1 < count) {
          next_entry = load_u32(entry);
#pragma unroll
          for (int i = 0; i < PER_THREAD / 2; ++i) next[i] = load_u32(list + i);
        }
        const int first = (int)(now >> 8) * size;
#pragma unroll 1
        for (int at = first; at < first + size; at += BK) {
          bar_wait(empty + 8 * stage, phase);
          const u32 bar = full + 8 * stage, to = target + stage * STAGE;
          if (thread == 0) {
            if (LOADS & 1) {
              bar_expect(bar, W_STAGE);
              if (CLUSTER > 1) multicast_box(base + stage * STAGE + rank * (W_STAGE / CLUSTER), weight_map, at, item.column + rank * (CHANNELS / CLUSTER), bar);
              else load_box(base + stage * STAGE, weight_map, at, item.column, bar);
            } else asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
          }
          if (at == first && thread < (BIT_WORDS + 4) / 4)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + META_OFFSET + stage * META + thread * 16), "l"(extra + thread * 4) : "memory");
          if (LOADS & 2) {
#pragma unroll
            for (int i = 0; i < (SLOTS * 4 + 15) / 16; ++i) {
              const u32 r = i % 2 ? mine[i / 2] >> 16 : mine[i / 2] & 0xffff;
              if (r != 0xffff) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * 2048), "l"(source + r * (u32)stride_h + at) : "memory");
            }
          }
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " TEXT(CREGS) ";");
    const int unit = role - 1;
    float acc[128];
    float d[TEMP];
#pragma unroll
    for (int i = 0; i < TEMP; ++i) d[i] = 0.0f;
    u32 stage = 0, phase = 0;
#if PING
    if (unit == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
    for (int one = begin; one < number; one += stride) {
      const Item item = item_of(one, tiles, parts, rank);
      const int count = load_int(counts + item.tile);
#pragma unroll
      for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        u32 bits[CLASS_WORDS];
        int n = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
          const bool two = step + 1 < steps;
          const u32 s0 = stage;
          u32 s1 = stage + 1, phase1 = phase;
          if (s1 == STAGES) {
            s1 = 0;
            phase1 ^= 1;
          }
          bar_wait(full + 8 * s0, phase);
          if (step == 0) {
            const u32 meta = base + META_OFFSET + s0 * META;
            n = uniform((int)load_shared(meta + 4 * BIT_WORDS) & 255);
#pragma unroll
            for (int i = 0; i < CLASS_WORDS; ++i) bits[i] = load_shared(meta + (lane & 3) * (4 * CLASS_WORDS) + 4 * i);
          }
          if (two) bar_wait(full + 8 * s1, phase1);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          const u64 a = descriptor(base + s0 * STAGE + unit * (64 * BK * 2)), b = descriptor(base + s0 * STAGE + W_STAGE);
          const u64 a1 = descriptor(base + s1 * STAGE + unit * (64 * BK * 2)), b1 = descriptor(base + s1 * STAGE + W_STAGE);
          const u64 a2 = two ? a1 : a, b2 = two ? b1 : b;
          switch (n) {
#define CASE(X)                                                                                     \
  case X / 4: {                                                                                     \
    TURN();                                                                                         \
    wgmma_arrive();                                                                                 \
    wgmma_n<X>(d, a, b, step);                                                                      \
    wgmma_n<X>(d, a + 2, b + 2, 1);                                                                 \
    wgmma_n<X>(d, a + 4, b + 4, 1);                                                                 \
    if (two) {                                                                                      \
      wgmma_n<X>(d, a + 6, b + 6, 1);                                                               \
      wgmma_n<X>(d, a1, b1, 1);                                                                     \
      wgmma_n<X>(d, a1 + 2, b1 + 2, 1);                                                             \
      wgmma_n<X>(d, a1 + 4, b1 + 4, 1);                                                             \
    }                                                                                               \
    wgmma_commit();                                                                                 \
    wgmma_n<X>(d, a2 + 6, b2 + 6, 1);                                                               \
    wgmma_commit();                                                                                 \
  } break;
            FOR_SIZES(CASE)
            default: TURN();
          }
#if PING
          wgmma_wait<1>();
          asm volatile("bar.arrive %0, 256;" ::"r"(2 - unit) : "memory");
#endif
          wgmma_wait<0>();
          __syncwarp();
          if (lane == 0) {
            release(empty + 8 * s0);
            if (two) release(empty + 8 * s1);
          }
          stage = s1;
          phase = phase1;
          if (two && ++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
        if constexpr (EXPAND) {
          if (CLUSTER == 1 || n > 0) Spread<0, 64>::go(acc, d, bits);
          if (n > BAND0) Spread<64, 128>::go(acc, d, bits);
          if (n > BAND1) Spread<128, 192>::go(acc, d, bits);
        }
        else {
#pragma unroll
          for (int i = 0; i < TEMP; ++i) acc[i] += d[i];
        }
      }
      const int channel = item.column + unit * 64 + (warp & 3) * 16 + lane / 4;
#pragma unroll
      for (int t = 0; t < 64; ++t) {
        const int token = item.tile * TOKENS + 8 * (t / 2) + 2 * (lane & 3) + t % 2;
        if (token < M) {
          u16* const to = out + (u64)token * (u32)stride_out + channel;
          const u32 both = packed(acc[4 * (t / 2) + t % 2], acc[4 * (t / 2) + t % 2 + 2]);
          to[0] = (u16)both;
          to[8] = (u16)(both >> 16);
        }
      }
    }
#if PING
    // The last arrival of the other is taken, so that none is left.
    if (unit == 0) asm volatile("bar.sync 1, 256;" ::: "memory");
#endif
  }
  if (CLUSTER > 1) cluster_sync();
}

#ifndef WALK
#define WALK 12
#define LAST_WALK 48
#endif
// How many slots are tried: whole bands, and in the last one two by two.
__device__ __forceinline__ int level(int wanted) {
  return wanted <= BAND0 ? BAND0 : wanted <= BAND1 ? BAND1 : min(SLOTS, max((wanted + 1) & ~1, BAND1 + 2));
}

// A block per tile, four threads (one per class of tokens) per group. counts, entries (group << 8 | slots of a class), records.
extern "C" __global__ void DIMS __launch_bounds__(512, 1)
assign(const unsigned char* __restrict__ mask, u32* __restrict__ records, u32* __restrict__ entries, int* __restrict__ counts, int M, int groups, int capacity) {
  __shared__ unsigned char owners[SLOTS][512];
  __shared__ u64 neighbours[64];
  __shared__ u32 totals[2][32];
  const int thread = threadIdx.x, group = thread >> 2, c = thread & 3, lane = thread & 31, warp = thread >> 5, tile = blockIdx.x;
  for (int t = thread; t < 64; t += blockDim.x) neighbours[t] = NEIGHBOURS[t];
  __syncthreads();
  u64 rest = 0;
  if (group < groups) {
#pragma unroll 32
    for (int t = 0; t < 64; ++t) {
      const int row = tile * TOKENS + 8 * (t / 2) + 2 * c + t % 2;
      if (row < M && mask[(u64)row * groups + group]) rest |= 1ull << t;
    }
  }
  int begun = 0;
  const u32 quad = 0xfu << (lane & 28);
  for (int round = 0;; ++round) {
    // Eight groups a warp. With a cluster an entry is made where any of its tiles needs one.
    u32 heads = __ballot_sync(0xffffffff, rest != 0);
    heads = (heads | heads >> 1 | heads >> 2 | heads >> 3) & 0x11111111;
    u32* const shown = totals[round & 1];
    if (lane == 0) {
      if (CLUSTER == 1) shown[warp] = heads;
      else
        for (int r = 0; r < CLUSTER; ++r)
          asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nst.shared::cluster.u32 [remote], %2;\n}" ::"r"(smem_of(shown + cluster_rank() * 16 + warp)), "r"(r),
                       "r"(heads) : "memory");
    }
    cluster_sync();
    int place = begun, sum = 0;
    bool has = false;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) {
      u32 every = shown[w];
      if (CLUSTER > 1) every |= shown[16 + w];
      if (w < warp) place += __popc(every);
      if (w == warp) {
        place += __popc(every & ((1u << (lane & 28)) - 1));
        has = every >> (lane & 28) & 1;
      }
      sum += __popc(every);
    }
    if (sum == 0) break;
    begun += sum;
    const bool absent = (__ballot_sync(0xffffffff, rest != 0) & quad) == 0;
    if (has) {
      int most = __popcll(rest);
      most = max(most, __shfl_xor_sync(quad, most, 1));
      most = max(most, __shfl_xor_sync(quad, most, 2));
      // Many more than slots: half of them now, the others in another pass.
      const int wanted = most > SLOTS + 8 ? (__popcll(rest) + 1) / 2 : SLOTS - 1;
      u64 take = rest;
      while (__popcll(take) > wanted) take &= ~(1ull << (63 - __clzll((long long)take)));
      int limit = level(most > SLOTS + 8 ? (most + 1) / 2 : min(most, SLOTS)), walk = 0, token = -1;
      u64 unused = ~0ull, todo = take, left = 0, within = (1ull << limit) - 1, back = 0;
      u32 random = 1;
      // A token without a free candidate takes one of them from another, which goes on; for so many steps.
      for (;;) {
        if (token < 0) {
          if (todo == 0) {
            if (left == 0 || limit >= SLOTS) break;
            limit = level(limit + 1);
            within = (1ull << limit) - 1;
            todo = left;
            left = 0;
          }
          token = __ffsll((long long)todo) - 1;
          todo &= todo - 1;
          walk = 0;
          back = 0;
        }
        u64 near = neighbours[token] & within;
        const u64 free = near & unused;
        if (free) {
          const int s = __ffsll((long long)free) - 1;
          unused &= ~(1ull << s);
          owners[s][thread] = token;
          token = -1;
        } else {
          if (near & (near - 1)) near &= ~back;
          if (near == 0 || ++walk > (limit < SLOTS ? WALK : LAST_WALK)) {
            left |= 1ull << token;
            token = -1;
          } else {
            random = random * 1664525u + 1013904223u;
            if ((near & (near - 1)) && (random >> 16 & 1)) near &= near - 1;
            if ((near & (near - 1)) && (random >> 17 & 1)) near &= near - 1;
            const int s = __ffsll((long long)near) - 1, out = owners[s][thread];
            owners[s][thread] = token;
            back = 1ull << s;
            token = out;
          }
        }
      }
      limit = max(limit, __shfl_xor_sync(quad, limit, 1));
      limit = max(limit, __shfl_xor_sync(quad, limit, 2));
      left |= rest & ~take;
      u32* const record = records + ((u64)tile * capacity + place) * RECORD;
      u16* const list = (u16*)record;
      u32 bits[CLASS_WORDS];
#pragma unroll
      for (int i = 0; i < CLASS_WORDS; ++i) bits[i] = 0;
      for (int s = 0; s < PER_THREAD * 4; ++s) {
        const bool taken = s < SLOTS && !(unused >> s & 1);
        const int n = 8 * (s / 2) + 2 * c + s % 2;
        u32 row = 0xffff;
        if (taken) {
          const int t = owners[s][thread], e = __popcll(neighbours[t] & ((1ull << s) - 1));
          row = 8 * (t / 2) + 2 * c + t % 2;
#pragma unroll
          for (int i = 0; i < CLASS_WORDS; ++i)
            if (i == (64 * e + t) / 28) bits[i] |= 1u << bit_of(64 * e + t);
        }
        list[n % 16 * PER_THREAD + n / 16] = (u16)row;
      }
#pragma unroll
      for (int i = 0; i < CLASS_WORDS; ++i) record[LIST_WORDS + c * CLASS_WORDS + i] = bits[i];
      if (c == 0) {
        int n = SLOTS * 4;
        const bool none = absent;
#define ROUND(X) if (X >= limit * 4 && X < n) n = X;
        FOR_SIZES(ROUND)
        record[LIST_WORDS + BIT_WORDS] = entries[tile * capacity + place] = (u32)group << 8 | (none ? 0u : (u32)(n / 4));
      }
      rest = left;
    }
  }
  if (thread == 0) counts[tile] = begun;
}
