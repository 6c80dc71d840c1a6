// An experiment, not part of the package: docs/measurements/operators/gemm-k.md says what each macro's variant gave.
// GEMM-K by super-blocks on sm_90a: gathered rows, wgmma, sums leave shared memory as bulk reductions.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef BK
#define BK 32
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef PIECE
#define PIECE 256
#endif
#ifndef NBUF
#define NBUF 1
#endif
#ifndef FLUSH
#define FLUSH 2  // 2 all, 1 only into shared memory, 0 none
#endif
#ifndef GATHER
#define GATHER 1
#endif
#ifndef WEIGHTS
#define WEIGHTS 1
#endif
#ifndef MULTIPLY
#define MULTIPLY 1
#endif
#ifndef HINTS
#define HINTS 0
#endif
#ifndef ZIGZAG
#define ZIGZAG 1
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef PREGS
#define PREGS 88
#define CREGS 208
#endif
#define STR_(x) #x
#define STR(x) STR_(x)
#define BN 256
#define UNITS 2

constexpr u32 A_UNIT = 64 * BK * 2;
constexpr u32 A_STAGE = UNITS * A_UNIT;
constexpr u32 B_STAGE = BN * BK * 2;
constexpr u32 B_OFFSET = 0;
constexpr u32 A_OFFSET = STAGES * B_STAGE;
constexpr u32 OUT_OFFSET = A_OFFSET + STAGES * A_STAGE;
constexpr u32 BUFFER = 16 * PIECE * 4;
constexpr u32 BAR_OFFSET = OUT_OFFSET + 8 * NBUF * BUFFER;
constexpr u32 SMEM = BAR_OFFSET + 16 * STAGES + 64;
static_assert(SMEM <= 232448, "shared memory");
constexpr u64 LAYOUT_TYPE = BK == 64 ? 1 : 2;  // 128 or 64 bytes of swizzle
constexpr u32 SBO = 8 * BK * 2;

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// A stage is free when the consumers of every CTA that its weights went to have read it.
__device__ __forceinline__ void release(u32 bar) {
#if CLUSTER == 1
  bar_arrive(bar);
#else
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r)
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(r) : "memory");
#endif
}
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
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(SBO >> 4) << 32) | (LAYOUT_TYPE << 62);
}

// 128 accumulators of a 64 x 256 product.
__device__ __forceinline__ void wgmma256(float (&d)[128], u64 a, u64 b, int scale) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
      " %128, %129, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]),"+f"(d[32]),"+f"(d[33]),"+f"(d[34]),"+f"(d[35]),"+f"(d[36]),"+f"(d[37]),"+f"(d[38]),"+f"(d[39]),"+f"(d[40]),"+f"(d[41]),"+f"(d[42]),"+f"(d[43]),"+f"(d[44]),"+f"(d[45]),"+f"(d[46]),"+f"(d[47]),"+f"(d[48]),"+f"(d[49]),"+f"(d[50]),"+f"(d[51]),"+f"(d[52]),"+f"(d[53]),"+f"(d[54]),"+f"(d[55]),"+f"(d[56]),"+f"(d[57]),"+f"(d[58]),"+f"(d[59]),"+f"(d[60]),"+f"(d[61]),"+f"(d[62]),"+f"(d[63]),"+f"(d[64]),"+f"(d[65]),"+f"(d[66]),"+f"(d[67]),"+f"(d[68]),"+f"(d[69]),"+f"(d[70]),"+f"(d[71]),"+f"(d[72]),"+f"(d[73]),"+f"(d[74]),"+f"(d[75]),"+f"(d[76]),"+f"(d[77]),"+f"(d[78]),"+f"(d[79]),"+f"(d[80]),"+f"(d[81]),"+f"(d[82]),"+f"(d[83]),"+f"(d[84]),"+f"(d[85]),"+f"(d[86]),"+f"(d[87]),"+f"(d[88]),"+f"(d[89]),"+f"(d[90]),"+f"(d[91]),"+f"(d[92]),"+f"(d[93]),"+f"(d[94]),"+f"(d[95]),"+f"(d[96]),"+f"(d[97]),"+f"(d[98]),"+f"(d[99]),"+f"(d[100]),"+f"(d[101]),"+f"(d[102]),"+f"(d[103]),"+f"(d[104]),"+f"(d[105]),"+f"(d[106]),"+f"(d[107]),"+f"(d[108]),"+f"(d[109]),"+f"(d[110]),"+f"(d[111]),"+f"(d[112]),"+f"(d[113]),"+f"(d[114]),"+f"(d[115]),"+f"(d[116]),"+f"(d[117]),"+f"(d[118]),"+f"(d[119]),"+f"(d[120]),"+f"(d[121]),"+f"(d[122]),"+f"(d[123]),"+f"(d[124]),"+f"(d[125]),"+f"(d[126]),"+f"(d[127])
      : "l"(a), "l"(b), "r"(scale));
}

__device__ __forceinline__ void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Which groups a tile's units execute, and any unit of the cluster.
struct Unions {
  u32 own, every;
};
__device__ __forceinline__ Unions unions_of(int2 item, const int* table, u32 rank) {
  Unions found;
#if CLUSTER == 1
  found.own = item.y;
  found.every = (item.y | (item.y >> 8)) & 255;
#elif CLUSTER == 2
  found.own = (u32)item.y >> (16 * rank);
  u32 w = item.y;
  found.every = (w | (w >> 8) | (w >> 16) | (w >> 24)) & 255;
#else
  u32 w = 0;
  found.own = table[item.x * CLUSTER + rank];
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) w |= table[item.x * CLUSTER + r];
  found.every = (w | (w >> 8)) & 255;
#endif
  return found;
}

// The items of a program in one slab: every grid-th of the list, costly and cheap ones in turn.
struct Walk {
  int n, first, grid, count;
  __device__ Walk(int n_, int first_, int grid_) : n(n_), first(first_), grid(grid_) { count = first < n ? (n - first + grid - 1) / grid : 0; }
  __device__ int at(int j) const {
#if ZIGZAG
    int k = j >> 1;
    return first + grid * ((j & 1) ? count - 1 - k : k);
#else
    return first + grid * j;
#endif
  }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(384, 1)
gemm_k(const u16* __restrict__ h, const void* w_map, float* sum, const int* __restrict__ index, const int* __restrict__ patterns,
       const int* __restrict__ counts, const int2* __restrict__ items, const int* __restrict__ num_items, const int* __restrict__ table, int M, int row_tiles,
       int stride_h, int stride_sum, int S, int G, int slabs, int parts) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const u32 base = smem_of(raw);
  const u32 full = base + BAR_OFFSET, empty = full + 8 * STAGES;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, group = thread >> 7;
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 128 + 1);
      bar_init(empty + 8 * s, 4 * UNITS * CLUSTER);
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
  const int n = *num_items;
  const Walk walk(n, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
  const int total_items = walk.count;
  const int ksteps = G / BK;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " STR(PREGS) ";");
    // CHUNKS threads copy the bytes of a row, 16 each.
    constexpr int CHUNKS = BK / 8, ROWS = 128 / CHUNKS, TIMES = 128 / ROWS;
    const int chunk = thread % CHUNKS, row = thread / CHUNKS;
    u64 first_use;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_use));
    u32 target[TIMES];
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
      int r = row + ROWS * i;
      int local = r & 63;
      int swizzled = BK == 64 ? chunk ^ (local & 7) : chunk ^ ((local >> 1) & 3);
      target[i] = base + A_OFFSET + (r >> 6) * A_UNIT + local * (BK * 2) + swizzled * 16;
    }
    u32 stage = 0, phase = 1;
    for (int slab = 0; slab < slabs; ++slab) {
      if (total_items == 0) break;
      int2 item = items[walk.at(0)];
      u32 rows[TIMES], patts[TIMES];
      int2 next_item = total_items > 1 ? items[walk.at(1)] : item;
      Unions these = unions_of(item, table, rank);
      int count = counts[item.x / row_tiles];
#pragma unroll
      for (int i = 0; i < TIMES; ++i) {
        int place = (item.x % row_tiles) * (128 * CLUSTER) + rank * 128 + row + ROWS * i;
        int clamped = min(place, M - 1);
        rows[i] = index[(item.x / row_tiles) * M + clamped];
        patts[i] = place < count ? patterns[(item.x / row_tiles) * M + clamped] : 0;
      }
      for (int j = 0; j < total_items; ++j) {
        const int block = item.x / row_tiles;
        const u32 unions = these.own, every = these.every;
        // What the next item needs, long before it is needed.
        u32 next_rows[TIMES], next_patts[TIMES];
        int2 after = j + 2 < total_items ? items[walk.at(j + 2)] : next_item;
        const int next_block = next_item.x / row_tiles;
        const int next_count = counts[next_block];
        const Unions next_unions = unions_of(next_item, table, rank);
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
          int clamped = min((next_item.x % row_tiles) * (128 * CLUSTER) + rank * 128 + row + ROWS * i, M - 1);
          next_rows[i] = index[next_block * M + clamped];
          next_patts[i] = patterns[next_block * M + clamped];
        }
        for (int part = 0; part < parts; ++part) {
          const int column = (slab * parts + part) * BN;
          for (int member = 0; member < S; ++member) {
            if (!((every >> member) & 1)) continue;
            int k = (block * S + member) * G;
            for (int step = 0; step < ksteps; ++step, k += BK) {
              bar_wait(empty + 8 * stage, phase);
              const u32 bar = full + 8 * stage;
              if (thread == 0) {
                bar_expect(bar, WEIGHTS ? B_STAGE : 0);
#if WEIGHTS
#if CLUSTER > 1
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                        base + B_OFFSET + stage * B_STAGE + rank * (B_STAGE / CLUSTER)),
                    "l"(w_map), "r"(k), "r"(column + (int)rank * (BN / CLUSTER)), "r"(bar), "h"((u16)((1 << CLUSTER) - 1))
                    : "memory");
#else
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                        base + B_OFFSET + stage * B_STAGE),
                    "l"(w_map), "r"(k), "r"(column), "r"(bar)
                    : "memory");
#endif
#endif
              }
#if GATHER
#pragma unroll
              for (int i = 0; i < TIMES; ++i) {
                if ((unions >> (member + ((row + ROWS * i) >> 6) * 8)) & 1) {
                  const u16* source = h + (u64)rows[i] * stride_h + (k + chunk * 8);
                  u32 bytes = ((patts[i] >> member) & 1) ? 16 : 0;
#if HINTS & 1
                  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target[i] + stage * A_STAGE), "l"(source),
                               "r"(bytes), "l"(first_use)
                               : "memory");
#else
                  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target[i] + stage * A_STAGE), "l"(source), "r"(bytes)
                               : "memory");
#endif
                }
              }
#endif
              asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
              if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
              }
            }
          }
        }
        item = next_item;
        these = next_unions;
        next_item = after;
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
          int place = (item.x % row_tiles) * (128 * CLUSTER) + rank * 128 + row + ROWS * i;
          rows[i] = next_rows[i];
          patts[i] = place < next_count ? next_patts[i] : 0;
        }
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " STR(CREGS) ";");
    const int unit = group - 1, part_warp = warp & 3;
    const u32 buffers = base + OUT_OFFSET + (unit * 4 + part_warp) * (NBUF * BUFFER);
    const int own = lane >> 2;
    float acc[128];
    u64 keep;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
    u32 stage = 0, phase = 0;
    for (int slab = 0; slab < slabs; ++slab) {
      if (total_items == 0) break;
      int2 item = items[walk.at(0)];
      Unions these = unions_of(item, table, rank);
      for (int j = 0; j < total_items; ++j) {
        const int block = item.x / row_tiles;
        const u32 unions = these.own, every = these.every;
        const u32 mine = (unions >> (8 * unit)) & 255;
        const int place = (item.x % row_tiles) * (128 * CLUSTER) + rank * 128 + unit * 64 + part_warp * 16 + (lane & 15);
        const int count = counts[block];
        const int row = index[block * M + min(place, M - 1)];
        const int2 next_item = items[walk.at(min(j + 1, total_items - 1))];
        const Unions next_unions = unions_of(next_item, table, rank);
        for (int part = 0; part < parts; ++part) {
          int first = 1;
          int pending = -1;
          for (int member = 0; member < S; ++member) {
            if (!((every >> member) & 1)) continue;
            if ((mine >> member) & 1) {
              for (int step = 0; step < ksteps; ++step) {
                bar_wait(full + 8 * stage, phase);
#if GATHER
                // Rows arrive through the generic proxy, the product reads through the asynchronous one.
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
#if MULTIPLY
                const u64 a = descriptor(base + A_OFFSET + stage * A_STAGE + unit * A_UNIT);
                const u64 b = descriptor(base + B_OFFSET + stage * B_STAGE);
                wgmma_arrive();
#pragma unroll
                for (int k = 0; k < BK / 16; ++k) wgmma256(acc, a + 2 * k, b + 2 * k, !(first && k == 0));
                wgmma_commit();
                wgmma_wait<1>();
#endif
                first = 0;
                if (pending >= 0 && lane == 0) release(empty + 8 * pending);
                pending = stage;
                if (++stage == STAGES) {
                  stage = 0;
                  phase ^= 1;
                }
              }
            } else {
              // The last product's stage must be free before these steps come round to it.
#if MULTIPLY
              wgmma_wait<0>();
#endif
              if (pending >= 0 && lane == 0) release(empty + 8 * pending);
              pending = -1;
              for (int step = 0; step < ksteps; ++step) {
                bar_wait(full + 8 * stage, phase);
                if (lane == 0) release(empty + 8 * stage);
                if (++stage == STAGES) {
                  stage = 0;
                  phase ^= 1;
                }
              }
            }
          }
#if MULTIPLY
          wgmma_wait<0>();
#endif
          if (pending >= 0 && lane == 0) release(empty + 8 * pending);
#if FLUSH >= 3
          if (mine != 0) {
            float* out = sum + (slab * parts + part) * BN;
#if FLUSH < 5
            constexpr int LANES = PIECE / 4, AT_ONCE = 32 / LANES;
            const u32 shift = (own & 3) * 32 + (lane & 3) * 8;
#pragma unroll
            for (int p = 0; p < BN / PIECE; ++p) {
              const u32 buffer = buffers + (p % NBUF) * BUFFER;
              __syncwarp();
#pragma unroll
              for (int c = 0; c < PIECE / 8; ++c) {
                const int q = (p * (PIECE / 8) + c) * 4;
                const u32 at = buffer + own * (PIECE * 4) + ((c * 32 + shift) & (PIECE * 4 - 1));
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(acc[q]), "f"(acc[q + 1]) : "memory");
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * PIECE * 4), "f"(acc[q + 2]), "f"(acc[q + 3]) : "memory");
              }
              __syncwarp();
#pragma unroll
              for (int i = 0; i < 16 / AT_ONCE; ++i) {
                const int r = i * AT_ONCE + lane / LANES;
                const int target = __shfl_sync(0xffffffff, place < count ? row : -1, r);
                float x, y, z, t;
                const u32 at = buffer + r * (PIECE * 4) + (((lane % LANES) * 16 + (r & 3) * 32) & (PIECE * 4 - 1));
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(t) : "r"(at) : "memory");
                if (target >= 0) {
                  float* to = out + (u64)target * stride_sum + p * PIECE + (lane % LANES) * 4;
#if FLUSH == 3
                  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(t) : "memory");
#else
                  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(t) : "memory");
#endif
                }
              }
            }
#else
            // Neighbouring lanes swap, so that each holds four columns that lie side by side.
            const int upper = __shfl_sync(0xffffffff, place < count ? row : -1, own), lower = __shfl_sync(0xffffffff, place < count ? row : -1, own + 8);
            const bool odd = lane & 1;
            float* to0 = out + (u64)upper * stride_sum + (odd ? 8 : 0) + (lane & 2) * 2;
            float* to1 = out + (u64)lower * stride_sum + (odd ? 8 : 0) + (lane & 2) * 2;
#pragma unroll
            for (int c = 0; c < BN / 8; c += 2) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const float k0 = acc[c * 4 + 2 * half], k1 = acc[c * 4 + 2 * half + 1], l0 = acc[c * 4 + 4 + 2 * half], l1 = acc[c * 4 + 5 + 2 * half];
                const float s0 = odd ? k0 : l0, s1 = odd ? k1 : l1;
                const float g0 = __shfl_xor_sync(0xffffffff, s0, 1), g1 = __shfl_xor_sync(0xffffffff, s1, 1);
                const float x = odd ? g0 : k0, y = odd ? g1 : k1, z = odd ? l0 : g0, t = odd ? l1 : g1;
                if ((half ? lower : upper) >= 0)
                  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"((half ? to1 : to0) + c * 8), "f"(x), "f"(y), "f"(z), "f"(t) : "memory");
              }
            }
#endif
          }
#elif FLUSH
          if (mine != 0) {
            float* out = sum + (u64)row * stride_sum + (slab * parts + part) * BN;
            const u32 turn = (lane & 3) * 32;  // of row (lane & 15): neighbouring rows lie 32 bytes further, against bank conflicts
#pragma unroll
            for (int p = 0; p < BN / PIECE; ++p) {
              const u32 buffer = buffers + (p % NBUF) * BUFFER;
              asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(NBUF - 1) : "memory");
              __syncwarp();
              const u32 shift = (own & 3) * 32 + (lane & 3) * 8;
#pragma unroll
              for (int c = 0; c < PIECE / 8; ++c) {
                const int q = (p * (PIECE / 8) + c) * 4;
                const u32 at = buffer + own * (PIECE * 4) + ((c * 32 + shift) & (PIECE * 4 - 1));
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(acc[q]), "f"(acc[q + 1]) : "memory");
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * PIECE * 4), "f"(acc[q + 2]), "f"(acc[q + 3]) : "memory");
              }
              asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
              __syncwarp();
#if FLUSH == 2
              const u32 line = buffer + (lane & 15) * (PIECE * 4);
              const bool is_head = lane < 16;
              const u32 bytes = is_head ? PIECE * 4 - turn : turn;
              if (place < count && bytes != 0) {
                const u32 from = is_head ? line + turn : line;
                float* to = out + p * PIECE + (is_head ? 0 : (PIECE * 4 - turn) / 4);
#if HINTS & 2
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(to), "r"(from), "r"(bytes), "l"(keep)
                             : "memory");
#else
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
#endif
              }
              asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
            }
          }
#else
          // Never true, which the compiler cannot know: what nobody uses it leaves out, wgmma too, volatile or not.
          if (count < 0) {
#pragma unroll
            for (int q = 0; q < 128; ++q) sum[q] = acc[q];
          }
#endif
        }
        item = next_item;
        these = next_unions;
      }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
