// What the kernels on CuTe for Hopper (sm_90a) share: a ring of stages that one warp group fills and two others multiply, 64 rows each
// (wgmma); boxes of weights by tensor maps, gathered rows line by line; barriers, releases, and the way out of finished rows.
//
// Compiled in: FLOAT16 (else bfloat16), STAGES (of the ring).
#pragma once
#include "cute.cuh"

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

constexpr int ROWS = 128, UNIT = 64, BK = 64;  // of a tile, of a product, and depth of a stage: a line of 128 bytes
constexpr int PRODUCERS = 128, CONSUMERS = 256, THREADS = PRODUCERS + CONSUMERS;
// Of a thread; they start with 168 each, and together may have no more: a warp group that asks for them waits for ever.
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 216;
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * 168, "more registers than the launch has");

using Barrier = cutlass::arch::ClusterTransactionBarrier;
template <int WIDTH>
using Wgmma = decltype(make_tiled_mma(SM90::GMMA::ss_op_selector<Half, Half, float, Shape<Int<UNIT>, Int<WIDTH>, Int<BK>>>(), Layout<Shape<_2, _1, _1>>{}));
// Rows of a line, one stage behind the other, as both wgmma and tensor maps swizzle them.
template <int NUMBER> CUTE_DEVICE auto ring_of(Half* from) {
  return make_tensor(make_smem_ptr(from), tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Half>{}, Shape<Int<NUMBER>, Int<BK>, Int<STAGES>>{}));
}

// A use of a stage: which one, and the parity to wait for. A producer's first wait, with parity 1, ends at once.
struct Turn {
  int stage, phase;
  CUTE_DEVICE void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// A box of a tensor map, counted by the barrier; to the same place of both programs of a cluster and counted by each one's barrier, or not.
CUTE_DEVICE void load_box(Half* to, TmaDescriptor const& map, int k, int row, Barrier& bar, bool multicast) {
  const auto hint = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);
  if (multicast)
    SM90_TMA_LOAD_MULTICAST_2D::copy(&map, reinterpret_cast<uint64_t*>(&bar), uint16_t(3), hint, to, k, row);
  else
    SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&bar), hint, to, k, row);
}
// Volatile: a load that may be delayed until its value is needed hides nothing.
CUTE_DEVICE int load_int(int const* from) { return *const_cast<int const volatile*>(from); }

// Add a stage's rows times its weights to sums, and have all products but these finished.
template <class Mma, class A, class B, class Sums> CUTE_DEVICE void multiply(Mma& mma, A const& a, B const& b, Sums& sums) {
  warpgroup_fence_operand(sums);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    gemm(mma, a(_, _, k), b(_, _, k), sums);
    mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_wait<1>();
  warpgroup_fence_operand(sums);
}

// The sums of one piece of COLUMNS columns.
template <int COLUMNS, class Sums> CUTE_DEVICE auto piece_of(Sums& sums, int piece) {
  return make_tensor(sums.data() + piece * COLUMNS / 2, partition_shape_C(Wgmma<COLUMNS>{}, Shape<Int<ROWS>, Int<COLUMNS>>{}));
}
// Round COLUMNS columns of a tile's values and store those of its rows that `out` has, `there`, through shared memory. A warp does so
// with its own 16, lane r knows (and lane r + 16) which row of `out` the r-th one is, or -1.
template <int COLUMNS, class Values>
CUTE_DEVICE void store_rows(Values const& values, Half* shared, int target, Half* out, uint32_t step, int there = COLUMNS) {
  constexpr int LANES = COLUMNS / LINE;
  const int lane = threadIdx.x % 32, first = (threadIdx.x - PRODUCERS) / 32 * 16;
  auto tile = make_tensor(make_smem_ptr(shared), swizzled<COLUMNS>(Int<ROWS>{}, Int<COLUMNS>{}));
  auto rounded = make_tensor_like<Half>(values);
  CUTE_UNROLL
  for (int i = 0; i < size(values); ++i) rounded(i) = Half(values(i));
  using Matrix = Copy_Atom<SM90_U32x4_STSM_N, Half>;
  auto matrices = make_tiled_copy_C(Matrix{}, Wgmma<COLUMNS>{}).get_slice(threadIdx.x - PRODUCERS);
  __syncwarp();  // what was there has been read out
  copy(Matrix{}, matrices.retile_S(rounded), matrices.partition_D(tile));
  __syncwarp();
  CUTE_UNROLL
  for (int i = 0; i < 16 * LANES / 32; ++i) {
    const int row = 32 / LANES * i + lane / LANES, column = lane % LANES * LINE;
    const int to = __shfl_sync(0xffffffff, target, row);
    if (to >= 0 && column < there) store_line(out + to * int64_t(step) + column, &tile(first + row, column));
  }
}
