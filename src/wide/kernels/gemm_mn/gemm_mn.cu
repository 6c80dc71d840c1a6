// GEMM-MN for Hopper (sm_90a): the two programs of a cluster share a group's weights.
//
// Gathered rows of one group times 256 of its weight rows (128 gate and 128 up, or 256 of a plain product), only executing
// pairs. One warp group fills a ring of stages, two others multiply 64 rows each; they meet at barriers in memory only.
// A tile of 256 rows lies in two programs, each loads half of the weights and multicasts it to both: 32 KB a step instead of 48,
// as in cuBLAS.
// Of a remainder of at most 128 rows (a short tile) each program takes half of the channels. One of at most 64 rows is thin:
// what takes time there is the way of a stage from memory, so a stage holds two steps of it.
//
// Compiled for each combination of: GATED; ACTIVATION 0 none, 1 silu, 2 gelu_tanh, 3 relu2; HAS_BIAS, HAS_UP_BIAS;
// FLOAT16 (else bfloat16); INT8; DENSE: every row executes the one group, in their own order. They stand behind native/hopper.cuh. Parameters are described at `gemm_mn` in _cuda.py.

constexpr int CLUSTER = 2, STAGES = 4;
constexpr int BOX_ROWS = 64;  // of a box of weights
constexpr u32 BOX = BOX_ROWS * LINE, B_STAGE = 4 * BOX;
constexpr u32 A_UNIT = 64 * LINE, A_STAGE = 2 * A_UNIT;
constexpr u32 A_OFFSET = STAGES * B_STAGE, OUT_OFFSET = A_OFFSET + STAGES * A_STAGE;
constexpr u32 BUFFER = 16 * STORED_LINE;  // of a warp's finished rows
constexpr u32 BAR_OFFSET = OUT_OFFSET + 8 * BUFFER;
constexpr u32 SMEM = BAR_OFFSET + 16 * STAGES;
static_assert(SMEM == SHARED_BYTES, "the launch must ask for as much shared memory");
constexpr int COLUMNS = GATED ? 128 : 256;  // channels of a tile
// Short tiles that a cluster takes instead of its last whole one. Two of 128 rows last a little longer than that, three thin
// ones a tenth, where one more on top of whole ones would cost a third.
constexpr int FILL = 3;
// A stage is free when the consumers of both programs have read it: a neighbour's box may come to it. Without
// `.release.cluster`, which would compile to a fence of the whole GPU; what wgmma reads is read when the wait for it ends.
__device__ __forceinline__ void release(u32 bar) {
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r)
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(r) : "memory");
}
template <int N> struct Number {
  static constexpr int value = N;
};
template <int N, bool T> struct Width : Number<N> {
  static constexpr bool thin = T;
};
// A box of 64 weight rows x 64, to the same place of both programs, counted by each one's barrier.
__device__ __forceinline__ void multicast_box(u32 to, const Map& map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map),
               "r"(k), "r"(row), "r"(bar), "h"((u16)3) : "memory");
}

// What a program does in one turn: up to 128 rows of a group, from place `first` of its list, and its channels from `channel`
// on: `COLUMNS` if `shared`, where the cluster's other program has the next 128 rows; half of that if not, where it has the
// same rows and the other half. group -1: nothing.
struct Item {
  int group, first, channel;
  bool shared;
};
// The items of a cluster. Whole tiles, of 256 rows, are dealt out in turn. What the last turn leaves free is filled with short
// ones, up to `FILL` to a cluster, before any takes one more: dealt out in turn as well, one too many would cost a whole turn.
struct Items {
  const int* tiles;
  int whole, shorts, parts, rank, cluster, clusters;
  __device__ int begun() const { return whole % clusters; }
  __device__ int unfilled() const { return (clusters - begun()) % clusters; }
  __device__ int own() const { return (whole - cluster + clusters - 1) / clusters; }
  // Those that fill up are dealt out forwards once, then backwards: the largest ones come first, and are not given a third.
  __device__ int filling(int layer, int place, int free) const { return layer * free + (layer == 0 ? place : free - 1 - place); }
  __device__ int number() const {
    const int place = cluster - begun(), free = unfilled(), beyond = shorts - FILL * free - cluster;
    int found = own() + (beyond > 0 ? (beyond + clusters - 1) / clusters : 0);
    if (free > 0 && place >= 0)
      for (int layer = 0; layer < FILL; ++layer) found += filling(layer, place, free) < shorts;
    return found;
  }
  __device__ Item at(int turn, int number) const {
    if (turn >= number) return {-1, 0, 0, false};
    const int place = cluster - begun(), free = unfilled(), late = turn - own();
    int one = cluster + turn * clusters;
    if (late >= 0) {
      const bool fills = free > 0 && place >= 0;
      one = whole + (fills && late < FILL ? filling(late, place, free) : FILL * free + cluster + (late - (fills ? FILL : 0)) * clusters);
    }
    int group = 0, tile = one / parts;
    if (!DENSE) {
      asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(group), "=r"(tile) : "l"(tiles + 2 * (one / parts)));
    }
    const bool shared = late < 0;
    const int channel = one % parts * COLUMNS;
    return {group, tile * 256 + (shared ? rank * 128 : 0), channel + (shared ? 0 : rank * (COLUMNS / 2)), shared};
  }
};
__device__ __forceinline__ bool is_thin(Item item, int left) { return !item.shared && left <= 64; }
__device__ __forceinline__ int load_count(const int* counts, Item item, int M) { return DENSE ? M : load_int(counts + max(item.group, 0)); }
// Rows of an item that there are; at most 0 where there is nothing.
__device__ __forceinline__ int rows_left(Item item, int count) { return item.group < 0 ? 0 : count - item.first; }
// Entry `place` of an item in the list of its group, for reading only where it is within the count.
__device__ __forceinline__ int load_row(const int* index, Item item, int place, int M) {
  const int at = min(item.first + place, M - 1);
  return DENSE ? at : load_int(index + (u64)max(item.group, 0) * (u32)M + at);
}
__device__ __forceinline__ float logistic(float v) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}
__device__ __forceinline__ float activate(float v) {
#if ACTIVATION == 1
  return v * logistic(v);
#elif ACTIVATION == 2
  // 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
  return v * logistic(1.5957691216057308f * (v + 0.044715f * v * v * v));
#elif ACTIVATION == 3
  v = v < 0.0f ? 0.0f : v;  // a NaN stays one
  return v * v;
#else
  return v;
#endif
}
// A round is one use of a stage. Both programs of a cluster walk the same items, in as many rounds each (short tiles have the
// same rows in both), so they agree on every round's stage and parity whatever an item is.
// No overwrite: `empty` counts all 16 consumer warps, and a warp can arrive for round n + 1 only after some program's phase n
//   is over, which takes all 16 arrivals for round n. A warp that arrived has finished reading, so when a producer passes, both
//   programs' stages of that round are read out, and its box may go to both.
// A box that comes before the neighbour's expect finds `full` in the same phase: the phase before is over (its consumers
//   waited for it), this one lacks the neighbour's own 129 arrivals; the byte count may be negative meanwhile.
// No deadlock: a producer waits only for releases of the round STAGES before, consumers only for loads of this round, of
//   both producers; every consumer, with rows or without, releases every round. The earliest unfinished round always goes on.
// Leaving: a consumer has waited for all bytes of all its rounds, and arrives elsewhere before the last cluster barrier.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
gemm_mn(const __grid_constant__ Map weight_map, const __grid_constant__ Map up_map, const Element* __restrict__ x, u16* __restrict__ out, const u16* __restrict__ bias,
        const u16* __restrict__ up_bias, const int* __restrict__ index, const int* __restrict__ counts, const int* __restrict__ tiles,
        const int* __restrict__ num_tiles, int M, int K, int size, int stride_x, int stride_out
#if INT8
        ,
        const float* __restrict__ x_scale, const float* __restrict__ scale, const float* __restrict__ up_scale
#endif
) {
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
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const int parts = size / COLUMNS;
  const int shorts = (DENSE ? (M - 1) % 256 < 128 : load_int(num_tiles + 1)) * parts, every = (DENSE ? (M + 255) / 256 : load_int(num_tiles)) * parts;
  const Items items{tiles, every - shorts, shorts, parts, (int)rank, (int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER};
  const int turns = items.number(), ksteps = K / BK;

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " TEXT(PRODUCER_REGISTERS) ";");
    // Eight lanes copy the 128 bytes of a row; a thread has rows `row` + 16 i, which lie alike in the swizzle.
    constexpr int TIMES = 8;
    const int chunk = thread & 7, row = thread >> 3;
    const u32 target = base + A_OFFSET + row * 128 + (chunk ^ (row & 7)) * 16;
    const Element* const source = x + chunk * CHUNK;
    u32 stage = 0, phase = 1;
    u32 rows[TIMES];
    Item item = items.at(0, turns), next = items.at(1, turns);
    int left = rows_left(item, load_count(counts, item, M));
#pragma unroll
    for (int i = 0; i < TIMES; ++i) rows[i] = load_row(index, item, row + 16 * i, M);
    for (int turn = 0; turn < turns; ++turn) {
      // The item after the next, and of the next its count and rows.
      const Item after = items.at(turn + 2, turns);
      const int next_count = load_count(counts, next, M);
      u32 next_rows[TIMES];
#pragma unroll
      for (int i = 0; i < TIMES; ++i) next_rows[i] = load_row(index, next, row + 16 * i, M);
      const int weight_row = item.group * size + item.channel;
      // Rows beyond the count keep what the ring holds: their products are never stored.
      auto gather = [&](int first, int rows_there, int at, int k) {
#pragma unroll
        for (int i = 0; i < TIMES; ++i)
          if (i < rows_there && row + 16 * i < left)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(first + at * A_UNIT + i * 2048), "l"(source + (u64)rows[i] * (u32)stride_x + k) : "memory");
      };
      // The two boxes of one step of a short tile.
      auto halves = [&](u32 to, int k, u32 bar) {
        load_box(to, weight_map, k, weight_row, bar);
        load_box(to + BOX, GATED ? up_map : weight_map, k, weight_row + (GATED ? 0 : BOX_ROWS), bar);
      };
      const bool thin = is_thin(item, left);
#pragma unroll 1
      for (int k = 0; k < K; k += thin ? 2 * BK : BK) {
        bar_wait(empty + 8 * stage, phase);
        const u32 bar = full + 8 * stage, to = base + stage * B_STAGE, rows_to = target + stage * A_STAGE;
        const bool twice = thin && k + BK < K;
        if (thread == 0) {
          bar_expect(bar, item.shared || twice ? B_STAGE : B_STAGE / 2);
          if (item.shared) {
            // The first two boxes, or the last two: of up, or the next 128 rows of the same weights.
            const Map& map = GATED && rank ? up_map : weight_map;
            const int first = weight_row + (GATED ? 0 : rank * 2 * BOX_ROWS);
            multicast_box(to + rank * 2 * BOX, map, k, first, bar);
            multicast_box(to + rank * 2 * BOX + BOX, map, k, first + BOX_ROWS, bar);
          } else {
            halves(to, k, bar);
            if (twice) halves(to + 2 * BOX, k + BK, bar);
          }
        }
        if (thin) {
          gather(rows_to, TIMES / 2, 0, k);
          if (twice) gather(rows_to, TIMES / 2, 1, k + BK);
        } else {
          gather(rows_to, TIMES, 0, k);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
      item = next;
      next = after;
      left = rows_left(item, next_count);
#pragma unroll
      for (int i = 0; i < TIMES; ++i) rows[i] = next_rows[i];
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " TEXT(CONSUMER_REGISTERS) ";");
    const int unit = role - 1;
    // What this lane's row of the warp's 16 is called.
    const int place = unit * 64 + (warp & 3) * 16 + (lane & 15);
    const u32 buffer = base + OUT_OFFSET + (warp - 4) * BUFFER;
    Sum acc[128];
    u32 stage = 0, phase = 0;
    Item item = items.at(0, turns), next = items.at(1, turns);
    int left = uniform(rows_left(item, load_count(counts, item, M)));
    for (int turn = 0; turn < turns; ++turn) {
      const Item after = items.at(turn + 2, turns);
      const int next_count = load_count(counts, next, M);
      const int listed = load_row(index, item, place, M);
      // All steps of one item, and its way out.
      auto multiply = [&](auto width) {
        constexpr int N = decltype(width)::value, CHANNELS = GATED ? N / 2 : N;
        constexpr bool THIN = decltype(width)::thin;
        int before = 0;
        // One round: a step of four products, or two. No branch lies between two products, or the compiler waits for each of them.
        auto round = [&](auto steps, bool first) {
          bar_wait(full + 8 * stage, phase);
          // Rows arrive through the generic proxy, the product reads through the asynchronous one.
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          const u64 a = descriptor(base + A_OFFSET + stage * A_STAGE + unit * A_UNIT);
          const u64 b = descriptor(base + stage * B_STAGE);
          wgmma_arrive();
#pragma unroll
          for (int k = 0; k < 4; ++k) wgmma<N>(acc, a + 2 * k, b + 2 * k, !first | k);
          if constexpr (decltype(steps)::value == 2) {
#pragma unroll
            for (int k = 0; k < 4; ++k) wgmma<N>(acc, a + (A_UNIT >> 4) + 2 * k, b + (2 * BOX >> 4) + 2 * k, 1);
          }
          wgmma_commit();
          if (THIN) {
            // Waited for at once: the sooner a stage is free, the sooner its next content is under way.
            wgmma_wait<0>();
            if (lane == 0) release(empty + 8 * stage);
          } else {
            wgmma_wait<1>();
            if (!first && lane == 0) release(empty + 8 * before);
            before = stage;
          }
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        };
        if constexpr (THIN) {
#pragma unroll 1
          for (int step = 0; step + 1 < ksteps; step += 2) round(Number<2>{}, step == 0);
          if (ksteps & 1) round(Number<1>{}, ksteps == 1);
        } else {
#pragma unroll 1
          for (int step = 0; step < ksteps; ++step) round(Number<1>{}, step == 0);
          wgmma_wait<0>();
          if (lane == 0) release(empty + 8 * before);
        }
        const int target = place < left ? listed : -1;
        // A warp without rows has nothing to do. The branch also keeps arithmetic behind the release of the last stage.
        if (!__any_sync(0xffffffff, place < left)) return;
#if INT8
        const RowScales row_scales(target < 0 ? 0.0f : x_scale[target], lane);
#endif
        // Through shared memory 128 channels at a time: a lane stores 16 bytes, neighbours the same row.
        constexpr int PIECE = CHANNELS < 128 ? CHANNELS : 128, LANES = PIECE / 8;
#pragma unroll
        for (int piece = 0; piece < CHANNELS / PIECE; ++piece) {
          __syncwarp();  // what was there has been read out
          // Gate channel c and up channel c lie in the same thread: 8 channels of rows lane / 4 and + 8 are acc[4 c ..].
          // Sixteen bytes move by the row's number against bank conflicts.
          const u32 put = buffer + (lane & 15) * STORED_LINE + (((lane >> 4) ^ (lane & 7)) * 16);
          const int channel = item.channel + piece * PIECE;
#pragma unroll
          for (int c = 0; c < PIECE / 8; c += 2) {
            u32 part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int q = PIECE / 2 * piece + 4 * c + 2 * i;
              float low = acc[q], high = acc[q + 1];
              const int at = item.group * size + channel + (c + (i >> 1)) * 8 + (lane & 3) * 2;
#if INT8
              const float2 factor = load_pair(scale + at);
              low *= row_scales.of[i & 1] * factor.x;
              high *= row_scales.of[i & 1] * factor.y;
#endif
#if HAS_BIAS
              low += widened(bias + at);
              high += widened(bias + at + 1);
#endif
              low = activate(low);
              high = activate(high);
#if GATED
              float low_up = acc[N / 4 + q], high_up = acc[N / 4 + 1 + q];
#if INT8
              const float2 up_factor = load_pair(up_scale + at);
              low_up *= row_scales.of[i & 1] * up_factor.x;
              high_up *= row_scales.of[i & 1] * up_factor.y;
#endif
#if HAS_UP_BIAS
              low_up += widened(up_bias + at);
              high_up += widened(up_bias + at + 1);
#endif
              low *= low_up;
              high *= high_up;
#endif
              part[i] = packed(low, high);
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(put ^ (c * 16)), "r"(part[0]), "r"(part[1]), "r"(part[2]), "r"(part[3])
                         : "memory");
          }
          __syncwarp();
          u16* const to = out + item.group * size + channel + lane % LANES * 8;
#pragma unroll
          for (int i = 0; i < LANES / 2; ++i) {
            const int r = 32 / LANES * i + lane / LANES;
            const int target_row = __shfl_sync(0xffffffff, target, r);
            u32 v0, v1, v2, v3;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v0), "=r"(v1), "=r"(v2), "=r"(v3)
                         : "r"(buffer + r * STORED_LINE + ((lane % LANES ^ (r & 7)) * 16)) : "memory");
            if (target_row >= 0)
              asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + (u64)target_row * (u32)stride_out), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
          }
        }
      };
      if (left > unit * 64) {
        if (item.shared)
          multiply(Width<256, false>{});
        else if (left > 64)
          multiply(Width<128, false>{});
        else
          multiply(Width<128, true>{});
      } else {
#pragma unroll 1
        for (int step = 0; step < ksteps; step += is_thin(item, left) ? 2 : 1) {
          bar_wait(full + 8 * stage, phase);
          if (lane == 0) release(empty + 8 * stage);
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
      item = next;
      next = after;
      left = uniform(rows_left(item, next_count));
    }
  }
  // Nobody leaves while a neighbour may still write to its memory or arrive at its barriers.
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
