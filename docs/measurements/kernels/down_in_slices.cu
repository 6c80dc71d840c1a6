// An experiment, not part of the package: docs/measurements/operators/gemm-k.md says what it gave.
// GEMM-K by super-blocks on sm_90a: rows gathered by their pattern, weights shared by a cluster, a finished tile leaves
// while the next is multiplied.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#ifndef CLUSTER
#define CLUSTER 2
#endif
#ifndef FLUSH
#define FLUSH 1
#endif
#ifndef MULTIPLY
#define MULTIPLY 1
#endif
#ifndef GATHER
#define GATHER 1
#endif
#ifndef WEIGHTS
#define WEIGHTS 1
#endif
#ifndef KEEP
#define KEEP 0
#endif
#ifndef SPREAD
#define SPREAD 1
#endif
#define STR_(x) #x
#define STR(x) STR_(x)
#ifndef PREGS
#define PREGS 56
#define CREGS 224
#endif
constexpr int BN = 192, BK = 64, STAGES = 4, UNITS = 2, SLICE = 64, SLICES = BN / SLICE;
constexpr u32 A_UNIT = 64 * BK * 2, A_STAGE = UNITS * A_UNIT, B_STAGE = BN * BK * 2;
constexpr u32 A_OFFSET = STAGES * B_STAGE, OUT_OFFSET = A_OFFSET + STAGES * A_STAGE, BUFFER = 16 * SLICE * 4;
constexpr u32 BAR_OFFSET = OUT_OFFSET + 8 * BUFFER, SMEM = BAR_OFFSET + 16 * STAGES;

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred p;\nW%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D%=;\nbra W%=;\nD%=:\n}" ::"r"(bar), "r"(phase) : "memory");
}
// A stage is free when the consumers of every program that its weights went to have read it.
__device__ __forceinline__ void release(u32 bar) {
  if (CLUSTER == 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
    return;
  }
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r)
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(r) : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(8 * BK * 2 >> 4) << 32) | ((u64)1 << 62);
}
__device__ __forceinline__ void wgmma192(float (&d)[96], u64 a, u64 b, int scale) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, %96, %97, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31]),"+f"(d[32]),"+f"(d[33]),"+f"(d[34]),"+f"(d[35]),"+f"(d[36]),"+f"(d[37]),"+f"(d[38]),"+f"(d[39]),"+f"(d[40]),"+f"(d[41]),"+f"(d[42]),"+f"(d[43]),"+f"(d[44]),"+f"(d[45]),"+f"(d[46]),"+f"(d[47]),"+f"(d[48]),"+f"(d[49]),"+f"(d[50]),"+f"(d[51]),"+f"(d[52]),"+f"(d[53]),"+f"(d[54]),"+f"(d[55]),"+f"(d[56]),"+f"(d[57]),"+f"(d[58]),"+f"(d[59]),"+f"(d[60]),"+f"(d[61]),"+f"(d[62]),"+f"(d[63]),"+f"(d[64]),"+f"(d[65]),"+f"(d[66]),"+f"(d[67]),"+f"(d[68]),"+f"(d[69]),"+f"(d[70]),"+f"(d[71]),"+f"(d[72]),"+f"(d[73]),"+f"(d[74]),"+f"(d[75]),"+f"(d[76]),"+f"(d[77]),"+f"(d[78]),"+f"(d[79]),"+f"(d[80]),"+f"(d[81]),"+f"(d[82]),"+f"(d[83]),"+f"(d[84]),"+f"(d[85]),"+f"(d[86]),"+f"(d[87]),"+f"(d[88]),"+f"(d[89]),"+f"(d[90]),"+f"(d[91]),"+f"(d[92]),"+f"(d[93]),"+f"(d[94]),"+f"(d[95])
      : "l"(a), "l"(b), "r"(scale));
}
__device__ __forceinline__ void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

struct Unions {
  u32 own, every;
};
__device__ __forceinline__ Unions unions_of(int2 item, u32 rank) {
  const u32 w = item.y;
  if (CLUSTER == 1) return {w, (w | (w >> 8)) & 255};
  return {w >> (16 * rank), (w | (w >> 8) | (w >> 16) | (w >> 24)) & 255};
}

// The items of a program in one slab: every grid-th of the list, costly and cheap ones in turn.
struct Walk {
  int first, grid, count;
  __device__ Walk(int n, int first_, int grid_) : first(first_), grid(grid_) { count = first < n ? (n - first + grid - 1) / grid : 0; }
  __device__ int at(int j) const { return first + grid * ((j & 1) ? count - 1 - (j >> 1) : j >> 1); }
};

// A tile on its way out: a warp's 16 rows of BN columns.
struct Leaving {
  float* to;  // Column 0 of the tile in row 0.
  int row;    // Of place lane & 15; -1 = none.
  int columns, slices;
};

template <int P>
__device__ __forceinline__ void leave(const float (&out)[96], const Leaving& tile, u32 buffer, int lane, int stride, u64 keep) {
  const u32 at = buffer + (lane >> 2) * (SLICE * 4);
  const u32 shift = ((lane >> 2) & 3) * 32 + (lane & 3) * 8;
  __syncwarp();
#pragma unroll
  for (int c = 0; c < SLICE / 8; ++c) {
    const int q = (P * (SLICE / 8) + c) * 4;
    const u32 place = at + ((c * 32 + shift) & (SLICE * 4 - 1));
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place), "f"(out[q]), "f"(out[q + 1]) : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(place + 8 * SLICE * 4), "f"(out[q + 2]), "f"(out[q + 3]) : "memory");
  }
  __syncwarp();
  if (P * SLICE >= tile.columns) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = 2 * i + (lane >> 4);
    const int row = __shfl_sync(0xffffffff, tile.row, r);
    float x, y, z, t;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(t)
                 : "r"(buffer + r * (SLICE * 4) + (((lane & 15) * 16 + (r & 3) * 32) & (SLICE * 4 - 1))) : "memory");
    if (row >= 0) {
      float* to = tile.to + (u64)row * stride + P * SLICE + (lane & 15) * 4;
#if KEEP
      asm volatile("red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(t), "l"(keep) : "memory");
#else
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(t) : "memory");
#endif
    }
  }
}
__device__ __forceinline__ void leave_next(const float (&out)[96], Leaving& tile, u32 buffer, int lane, int stride, u64 keep) {
  if (tile.slices == 3) leave<0>(out, tile, buffer, lane, stride, keep);
  else if (tile.slices == 2) leave<1>(out, tile, buffer, lane, stride, keep);
  else leave<2>(out, tile, buffer, lane, stride, keep);
  --tile.slices;
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(384, 1)
gemm_k(const u16* __restrict__ h, const void* w_map, float* sum, const int* __restrict__ index, const int* __restrict__ patterns,
       const int* __restrict__ counts, const int2* __restrict__ items, const int* __restrict__ num_items, int M, int N, int row_tiles,
       int stride_h, int stride_sum, int S, int G, int parts_per_slab) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const u32 base = smem_of(raw), full = base + BAR_OFFSET, empty = full + 8 * STAGES;
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
  const Walk walk(*num_items, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
  const int ksteps = G / BK, all_parts = (N + BN - 1) / BN;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " STR(PREGS) ";");
    const int chunk = thread & 7, row = thread >> 3;
    const u32 target = base + A_OFFSET + row * (BK * 2) + (chunk ^ (row & 7)) * 16;
    u64 once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    u32 stage = 0, phase = 1;
    for (int slab = 0; slab < all_parts && walk.count > 0; slab += parts_per_slab) {
      const int end = min(slab + parts_per_slab, all_parts);
      int2 item = items[walk.at(0)], next_item = items[walk.at(min(1, walk.count - 1))];
      Unions these = unions_of(item, rank);
      u32 rows[8], patts[2] = {0, 0};
      {
        const int block = item.x / row_tiles, count = counts[block];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int place = (item.x % row_tiles) * (128 * CLUSTER) + rank * 128 + row + 16 * i, inside = min(place, M - 1);
          rows[i] = index[block * M + inside];
          patts[i >> 2] |= (place < count ? patterns[block * M + inside] & 255 : 0) << (8 * (i & 3));
        }
      }
      for (int j = 0; j < walk.count; ++j) {
        const int block = item.x / row_tiles;
        // What the next item needs, long before it is needed.
        u32 next_rows[8], next_patts[8];
        const int2 after = items[walk.at(min(j + 2, walk.count - 1))];
        const int next_block = next_item.x / row_tiles, next_count = counts[next_block];
        const int next_place = (next_item.x % row_tiles) * (128 * CLUSTER) + rank * 128 + row;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int inside = min(next_place + 16 * i, M - 1);
          next_rows[i] = index[next_block * M + inside];
          next_patts[i] = patterns[next_block * M + inside];
        }
        for (int part = slab; part < end; ++part) {
          const int column = part * BN;
          for (int member = 0; member < S; ++member) {
            if (!((these.every >> member) & 1)) continue;
            int k = (block * S + member) * G;
            for (int step = 0; step < ksteps; ++step, k += BK) {
              bar_wait(empty + 8 * stage, phase);
              const u32 bar = full + 8 * stage;
              if (thread == 0) {
                bar_expect(bar, WEIGHTS ? B_STAGE : 0);
#if WEIGHTS && CLUSTER > 1
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                        base + stage * B_STAGE + rank * (B_STAGE / CLUSTER)),
                    "l"(w_map), "r"(k), "r"(column + (int)rank * (BN / CLUSTER)), "r"(bar), "h"((u16)((1 << CLUSTER) - 1))
                    : "memory");
#elif WEIGHTS
                asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                                 base + stage * B_STAGE),
                             "l"(w_map), "r"(k), "r"(column), "r"(bar)
                             : "memory");
#endif
              }
#if GATHER
              const u16* source = h + (k + chunk * 8);
#pragma unroll
              for (int i = 0; i < 8; ++i)
                if ((these.own >> (member + (i >> 2) * 8)) & 1)
                  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target + i * 2048 + stage * A_STAGE),
                               "l"(source + (u64)rows[i] * (u32)stride_h), "r"(((patts[i >> 2] >> (8 * (i & 3) + member)) & 1) * 16), "l"(once)
                               : "memory");
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
        these = unions_of(item, rank);
        next_item = after;
        patts[0] = patts[1] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          rows[i] = next_rows[i];
          patts[i >> 2] |= (next_place + 16 * i < next_count ? next_patts[i] & 255 : 0) << (8 * (i & 3));
        }
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " STR(CREGS) ";");
    const int unit = group - 1;
    const u32 buffer = base + OUT_OFFSET + (warp - 4) * BUFFER;
    float acc[96], out[96];
    Leaving tile{sum, -1, 0, 0};
    u64 keep = 0;
#if KEEP
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
#endif
    u32 stage = 0, phase = 0;
    for (int slab = 0; slab < all_parts && walk.count > 0; slab += parts_per_slab) {
      const int end = min(slab + parts_per_slab, all_parts);
      int2 item = items[walk.at(0)];
      for (int j = 0; j < walk.count; ++j) {
        const int block = item.x / row_tiles;
        const Unions these = unions_of(item, rank);
        const u32 mine = (these.own >> (8 * unit)) & 255;
        const int place = (item.x % row_tiles) * (128 * CLUSTER) + rank * 128 + unit * 64 + (warp & 3) * 16 + (lane & 15);
        const int found = index[block * M + min(place, M - 1)], count = counts[block];
        const int2 next_item = items[walk.at(min(j + 1, walk.count - 1))];
        const int steps = __popc(mine) * ksteps;
        for (int part = slab; part < end; ++part) {
          int done = 0, pending = -1;
          for (int member = 0; member < S; ++member) {
            if (!((these.every >> member) & 1)) continue;
            if ((mine >> member) & 1) {
              for (int step = 0; step < ksteps; ++step) {
                bar_wait(full + 8 * stage, phase);
                // Rows arrive through the generic proxy, the product reads through the asynchronous one.
                if (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#if MULTIPLY
                const u64 a = descriptor(base + A_OFFSET + stage * A_STAGE + unit * A_UNIT);
                const u64 b = descriptor(base + stage * B_STAGE);
                wgmma_arrive();
#pragma unroll
                for (int k = 0; k < BK / 16; ++k) wgmma192(acc, a + 2 * k, b + 2 * k, done | k);
                wgmma_commit();
                wgmma_wait<1>();
#endif
                if (pending >= 0 && lane == 0) release(empty + 8 * pending);
                pending = stage;
                if (++stage == STAGES) {
                  stage = 0;
                  phase ^= 1;
                }
#if FLUSH
                // The last tile leaves in slices spread over the products of this one.
#if SPREAD
                while (tile.slices > 0 && done * SLICES >= (SLICES - tile.slices) * steps) leave_next(out, tile, buffer, lane, stride_sum, keep);
#endif
#endif
                ++done;
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
          if (mine != 0) {
#if FLUSH
            while (tile.slices > 0) leave_next(out, tile, buffer, lane, stride_sum, keep);
            tile = {sum + part * BN, place < count ? found : -1, N - part * BN, SLICES};
#pragma unroll
            for (int q = 0; q < 96; ++q) out[q] = acc[q];
#if !SPREAD
            while (tile.slices > 0) leave_next(out, tile, buffer, lane, stride_sum, keep);
#endif
#else
            // Never true, which the compiler cannot know: what nobody uses it leaves out, wgmma too, volatile or not.
            if (count < 0) {
#pragma unroll
              for (int q = 0; q < 96; ++q) sum[q] = acc[q];
            }
#endif
          }
        }
        item = next_item;
      }
    }
#if FLUSH
    while (tile.slices > 0) leave_next(out, tile, buffer, lane, stride_sum, keep);
#endif
  }
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
