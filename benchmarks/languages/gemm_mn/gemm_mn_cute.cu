// GEMM-MN on CuTe for sm_80 and newer: gathered rows of one group times its weights, by the paper's levels of skipping.
//
//   0  A block whose rows all skip its group ends at once: it is not on the list of tiles.
//   1  Lines of rows beyond the group's count are not loaded.
//   2  Fragments of 16 rows beyond the count are neither read from shared memory nor multiplied.
//
// Rows beyond the count are never stored, and no row's product touches another's: what they hold does not matter.
// Compiled in: FLOAT16, GATED, LEVEL, BM and BN (rows and channels of a tile), BK and STAGES (of the ring). Called by _cute.py.
#include "cute.cuh"

constexpr int PARTS = GATED ? 2 : 1;
using Mma = Warps<BM, BN>::Mma;
constexpr int THREADS = Warps<BM, BN>::THREADS, FRAGMENTS = Warps<BM, BN>::FRAGMENTS, ROWS_OF_THREAD = LINES_OF_THREAD<BM, BK, THREADS>;
constexpr int ROWS_SIZE = STAGES * BM * BK, WEIGHTS_SIZE = STAGES * PARTS * BN * BK;
constexpr int RING = cute::max(ROWS_SIZE + WEIGHTS_SIZE, BM * BN) * sizeof(Half);  // finished rows lie where the ring was
constexpr int SHARED_BYTES = RING + BM * sizeof(int);

struct Arguments {
  Half const *x, *weight, *up, *bias, *up_bias;
  Half* out;
  int const *index, *counts, *tiles, *num_tiles;
  int num_rows, depth, size, block_m, activation;
  int64_t x_step, weight_step, out_step;
};

__global__ void __launch_bounds__(THREADS) gemm_mn_kernel(const Arguments given) {
  extern __shared__ __align__(128) char dynamic_shared[];
  // Parts of a group, then parts of a listed tile, which may have more rows than one of ours.
  const int parts = given.size / BN, splits = ceil_div(given.block_m, BM);
  const int listed = blockIdx.x / (parts * splits), split = blockIdx.x / parts % splits;
  if (listed >= given.num_tiles[0]) return;
  const int group = given.tiles[2 * listed], first = given.tiles[2 * listed + 1] * given.block_m + split * BM;
  const int left = cute::min(given.counts[group] - first, cute::min(BM, given.block_m - split * BM));
  if (left <= 0) return;
  const int channel = group * given.size + blockIdx.x % parts * BN;

  Half* const ring = reinterpret_cast<Half*>(dynamic_shared);
  int* const rows = reinterpret_cast<int*>(dynamic_shared + RING);
  auto ring_rows = make_tensor(make_smem_ptr(ring), swizzled<BK>(Int<BM>{}, Int<BK>{}, Int<STAGES>{}));
  auto ring_weights = make_tensor(make_smem_ptr(ring + ROWS_SIZE), swizzled<BK>(Int<BN>{}, Int<BK>{}, Int<PARTS>{}, Int<STAGES>{}));

  Half const* from[ROWS_OF_THREAD];
  bool there[ROWS_OF_THREAD];
  share_lines<BM, BK, THREADS>([&](int i, int row, int column) {
    there[i] = row < left;
    const int number = there[i] ? given.index[int64_t(group) * given.num_rows + first + row] : 0;
    from[i] = given.x + number * given.x_step + column;
    if (column == 0) rows[row] = there[i] ? number : -1;
  });

  Mma mma;
  auto sums = make_tensor<float>(append(partition_shape_C(mma, Shape<Int<BM>, Int<BN>>{}), Int<PARTS>{}));
  clear(sums);
  auto places = mma.get_slice(threadIdx.x).partition_C(make_identity_tensor(Shape<Int<BM>, Int<BN>>{}));
  bool runs[FRAGMENTS];
  CUTE_UNROLL
  for (int m = 0; m < FRAGMENTS; ++m) runs[m] = LEVEL < 2 || get<0>(places(0, m, 0)) / 16 * 16 < left;

  int k = 0;
  pipeline<STAGES>(
      ceil_div(given.depth, BK),
      [&](int slot) {
        share_lines<BM, BK, THREADS>([&](int i, int row, int column) {
          if (LEVEL < 1 || there[i]) load_line(&ring_rows(row, column, slot), from[i] + k, k + column < given.depth);
        });
        share_lines<PARTS * BN, BK, THREADS>([&](int, int row, int column) {
          Half const* const weight = PARTS == 2 && row >= BN ? given.up : given.weight;
          Half const* const line = weight + (channel + row % BN) * given.weight_step + k + column;
          load_line(&ring_weights(row % BN, column, row / BN, slot), line, k + column < given.depth);
        });
        k += BK;
      },
      [&](int slot) {
        multiply_stage(mma, ring_rows(_, _, slot), ring_weights(_, _, _, slot), sums, [&](int m) { return runs[m]; });
      });

  auto values = sums(_, _, _, 0);
  CUTE_UNROLL
  for (int i = 0; i < size(values); ++i) {
    const int at = channel + get<1>(places(i));
    float value = values(i);
    if (given.bias) value += float(given.bias[at]);
    value = activate(value, given.activation);
    if constexpr (PARTS == 2) {
      float other = sums(_, _, _, PARTS - 1)(i);
      if (given.up_bias) other += float(given.up_bias[at]);
      value *= other;
    }
    values(i) = value;
  }
  store_tile<BM, BN>(mma, values, ring, [&](int row, int column) -> Half* {
    return rows[row] < 0 ? nullptr : given.out + rows[row] * given.out_step + channel + column;
  });
}

void gemm_mn(View x, View weight, OptionalView up, OptionalView bias, OptionalView up_bias, View out, View index, View counts, View tiles, View num_tiles,
             int64_t block_m, int64_t activation) {
  const int size = int(weight.size(0) / counts.numel());
  const Arguments given{data<Half>(x), data<Half>(weight), data<Half>(up), data<Half>(bias), data<Half>(up_bias), data<Half>(out),
                        data<int>(index), data<int>(counts), data<int>(tiles), data<int>(num_tiles),
                        int(x.size(0)), int(x.size(1)), size, int(block_m), int(activation), x.stride(0), weight.stride(0), out.stride(0)};
  launch(gemm_mn_kernel, tiles.size(0) * ceil_div(int(block_m), BM) * (size / BN), THREADS, SHARED_BYTES, x, given);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_mn, gemm_mn);
