// GEMM-K on CuTe for sm_80 and newer: tiles of rows sorted by the groups that they execute, by the paper's levels of skipping.
//
//   0  Groups that no row of a tile executes are passed over, with their copies, barriers and products.
//   1  Of the others' rows only those that execute the group are loaded; zeros stand for the rest, which may hold anything.
//   2  Fragments of 16 rows of which none executes the group are neither read from shared memory nor multiplied.
//
// The ring goes on from group to group. Compiled in: FLOAT16, LEVEL (1 or 2), STORES (every row is in one tile, and stored;
// else tiles are added to float32), BM and BN (rows and columns of a tile), BK and STAGES (of the ring). Called by _cute.py.
#include "cute.cuh"

using Mma = Warps<BM, BN>::Mma;
constexpr int THREADS = Warps<BM, BN>::THREADS, FRAGMENTS = Warps<BM, BN>::FRAGMENTS;
constexpr int MAX_WORDS = 4;  // of 32 groups
constexpr int ROWS_SIZE = STAGES * BM * BK, WEIGHTS_SIZE = STAGES * BN * BK;
constexpr int RING = cute::max(ROWS_SIZE + WEIGHTS_SIZE, BM * BN) * sizeof(Half);  // finished rows lie where the ring was
constexpr int SHARED_BYTES = RING + ((1 + MAX_WORDS) * BM + MAX_WORDS) * sizeof(int);

struct Arguments {
  Half const *h, *weight, *bias;
  void* out;
  int const *index, *words, *counts, *tiles, *num_tiles;
  int num_rows, width, size, num_words, block_m, groups_per_block;
  int64_t h_step, weight_step;
};

CUTE_DEVICE bool has(unsigned const* bits, int step, int group) { return bits[group / 32 * step] >> group % 32 & 1; }
// The next group of a union behind one, and its number at the end, which is larger than any.
CUTE_DEVICE int next_group(unsigned const* united, int group) {
  for (++group; group < 32 * MAX_WORDS; group = (group / 32 + 1) * 32) {
    const unsigned bits = united[group / 32] >> group % 32;
    if (bits) return group + __ffs(bits) - 1;
  }
  return group;
}
CUTE_DEVICE void add_pair(float* to, float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float2*>(to), make_float2(first, second));
#else
  atomicAdd(to, first);
  atomicAdd(to + 1, second);
#endif
}

__global__ void __launch_bounds__(THREADS) gemm_k_kernel(const Arguments given) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const int parts = ceil_div(given.width, BN), splits = ceil_div(given.block_m, BM);
  const int listed = blockIdx.x / (parts * splits), split = blockIdx.x / parts % splits;
  // Tiles of several lists are pairs, those of rows in one order are single numbers.
  if (given.num_tiles && listed >= given.num_tiles[0]) return;
  const int block = given.counts ? given.tiles[2 * listed] : 0;
  const int first = (given.counts ? given.tiles[2 * listed + 1] : given.tiles[listed]) * given.block_m + split * BM;
  const int count = given.counts ? given.counts[block] : given.num_rows;
  const int left = cute::min(count - first, cute::min(BM, given.block_m - split * BM));
  if (left <= 0) return;
  const int column_of_block = blockIdx.x % parts * BN, first_group = block * given.groups_per_block;

  Half* const ring = reinterpret_cast<Half*>(dynamic_shared);
  int* const rows = reinterpret_cast<int*>(dynamic_shared + RING);
  unsigned* const bits = reinterpret_cast<unsigned*>(rows + BM);
  unsigned* const united = bits + MAX_WORDS * BM;
  auto ring_rows = make_tensor(make_smem_ptr(ring), swizzled<BK>(Int<BM>{}, Int<BK>{}, Int<STAGES>{}));
  auto ring_weights = make_tensor(make_smem_ptr(ring + ROWS_SIZE), swizzled<BK>(Int<BN>{}, Int<BK>{}, _1{}, Int<STAGES>{}));

  if (threadIdx.x < MAX_WORDS) united[threadIdx.x] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < BM; row += THREADS) {
    const int64_t place = int64_t(block) * given.num_rows + first + row;
    rows[row] = row < left ? given.index[place] : -1;
    for (int word = 0; word < MAX_WORDS; ++word) {
      const bool known = row < left && word < given.num_words;
      const unsigned found = known ? given.words[place + int64_t(word) * given.num_rows] : 0;
      bits[word * BM + row] = found;
      if (found) atomicOr(&united[word], found);
    }
  }
  __syncthreads();
  int num_groups = 0;
  for (int word = 0; word < MAX_WORDS; ++word) num_groups += __popc(united[word]);

  Mma mma;
  auto sums = make_tensor<float>(append(partition_shape_C(mma, Shape<Int<BM>, Int<BN>>{}), _1{}));
  clear(sums);
  auto places = mma.get_slice(threadIdx.x).partition_C(make_identity_tensor(Shape<Int<BM>, Int<BN>>{}));

  Half const* from[LINES_OF_THREAD<BM, BK, THREADS>];
  share_lines<BM, BK, THREADS>([&](int i, int row, int column) { from[i] = given.h + cute::max(rows[row], 0) * given.h_step + column; });
  int loaded_group = next_group(united, -1), loaded_k = 0;  // of the next step to load
  int group = -1, k = given.size;                           // of the step to multiply
  bool runs[FRAGMENTS];
  pipeline<STAGES>(
      num_groups * ceil_div(given.size, BK),
      [&](int slot) {
        const int at = (first_group + loaded_group) * given.size + loaded_k;
        share_lines<BM, BK, THREADS>([&](int i, int row, int column) {
          load_line(&ring_rows(row, column, slot), from[i] + at, loaded_k + column < given.size && has(bits + row, BM, loaded_group));
        });
        share_lines<BN, BK, THREADS>([&](int, int row, int column) {
          const bool there = loaded_k + column < given.size && column_of_block + row < given.width;
          load_line(&ring_weights(row, column, 0, slot), given.weight + (column_of_block + row) * given.weight_step + at + column, there);
        });
        loaded_k += BK;
        if (loaded_k >= given.size) {
          loaded_k = 0;
          loaded_group = next_group(united, loaded_group);
        }
      },
      [&](int slot) {
        if (k >= given.size) {
          k = 0;
          group = next_group(united, group);
          CUTE_UNROLL
          for (int m = 0; m < FRAGMENTS; ++m) {
            const int row = get<0>(places(0, m, 0)) / 16 * 16 + threadIdx.x % 16;
            runs[m] = LEVEL < 2 || __any_sync(0xffffffff, has(bits + row, BM, group));
          }
        }
        k += BK;
        multiply_stage(mma, ring_rows(_, _, slot), ring_weights(_, _, _, slot), sums, [&](int m) { return runs[m]; });
      });

  auto values = sums(_, _, _, 0);
#if STORES
  CUTE_UNROLL
  for (int i = 0; i < size(values); ++i) {
    const int at = column_of_block + get<1>(places(i));
    if (given.bias && at < given.width) values(i) += float(given.bias[at]);
  }
  store_tile<BM, BN>(mma, values, ring, [&](int row, int column) -> Half* {
    const bool there = rows[row] >= 0 && column_of_block + column < given.width;
    return there ? static_cast<Half*>(given.out) + int64_t(rows[row]) * given.width + column_of_block + column : nullptr;
  });
#else
  CUTE_UNROLL
  for (int i = 0; i < size(values); i += 2) {
    const int row = rows[get<0>(places(i))], column = column_of_block + get<1>(places(i));
    if (row >= 0 && column < given.width) add_pair(static_cast<float*>(given.out) + int64_t(row) * given.width + column, values(i), values(i + 1));
  }
#endif
}

void gemm_k(View h, View weight, OptionalView bias, View out, View index, View words, OptionalView counts, View tiles, OptionalView num_tiles, int64_t num_words,
            int64_t block_m, int64_t groups_per_block, int64_t group_size) {
  const Arguments given{data<Half>(h), data<Half>(weight), data<Half>(bias), out.data_ptr(),
                        data<int>(index), data<int>(words), data<int>(counts), data<int>(tiles), data<int>(num_tiles),
                        int(h.size(0)), int(weight.size(0)), int(group_size), int(num_words), int(block_m), int(groups_per_block), h.stride(0), weight.stride(0)};
  launch(gemm_k_kernel, tiles.size(0) * ceil_div(int(block_m), BM) * ceil_div(given.width, BN), THREADS, SHARED_BYTES, h, given);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_k, gemm_k);
