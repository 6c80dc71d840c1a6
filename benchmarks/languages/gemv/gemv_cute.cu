// GEMMs of one to four rows on CuTe: a block sums some channels, its threads share out their lines; weights that no row needs are not read.
//
// Along the N-axis a block whose group no row executes ends at once. Along the K-axis a block lists the groups that some row
// executes, and walks lines of listed groups alone, so that no thread idles over skipped ones. Lines go through shared memory: of loads into
// registers ptxas lets two or three be under way, to need fewer of those.
// Compiled in: FLOAT16, ALONG_K, GATED (N-axis only), NUM_ROWS, CHANNELS (of a block; along the N-axis a divisor of the group).
#include "cute.cuh"

#include <cutlass/fast_math.h>

constexpr int WARPS = 4, THREADS = 32 * WARPS, STAGES = 4, PARTS = GATED ? 2 : 1;
constexpr int WEIGHTS = CHANNELS * PARTS, LINES = WEIGHTS + NUM_ROWS;  // lines of a thread in a stage
constexpr int SUMS = NUM_ROWS * WEIGHTS, RING = STAGES * LINES * THREADS * LINE;
constexpr int MAX_GROUPS = 8192;

struct Arguments {
  Half const *x, *weight, *up, *bias, *up_bias;
  Half* out;
  unsigned char const* mask;
  int width, depth, size, num_groups, activation;
  bool zeroes;
  int64_t x_step, weight_step, up_step, mask_step;
  cutlass::FastDivmod lines_of_group;
};

__global__ void __launch_bounds__(THREADS) gemv_kernel(const Arguments given) {
  extern __shared__ __align__(128) char dynamic_shared[];
  Half* const shared = reinterpret_cast<Half*>(dynamic_shared);
  float* const found = reinterpret_cast<float*>(shared + RING);  // by each warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = blockIdx.x * CHANNELS;
#if ALONG_K
  // Listed groups, with a bit for each row that executes one.
  int* const counts = reinterpret_cast<int*>(found + WARPS * SUMS);
  int* const listed = counts + WARPS;
  int number = 0;
  for (int first = 0; first < given.num_groups; first += THREADS) {
    const int group = first + threadIdx.x;
    int rows = 0;
    for (int row = 0; row < NUM_ROWS; ++row)
      if (group < given.num_groups && given.mask[row * given.mask_step + group]) rows |= 1 << row;
    const unsigned votes = __ballot_sync(0xffffffff, rows != 0);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int place = number + __popc(votes & ((1u << lane) - 1));
    for (int other = 0; other < WARPS; ++other) {
      if (other < warp) place += counts[other];
      number += counts[other];
    }
    if (rows) listed[place] = group << 4 | rows;
    __syncthreads();
  }
  const int lines = number * given.lines_of_group.divisor;
#else
  const int lines = given.depth / LINE, group = channel / given.size;
  int executing = 0;
  for (int row = 0; row < NUM_ROWS; ++row)
    if (given.mask[row * given.mask_step + group]) executing |= 1 << row;
  if (!executing) {
    if (given.zeroes && threadIdx.x < CHANNELS * NUM_ROWS)
      given.out[int64_t(threadIdx.x / CHANNELS) * given.width + channel + threadIdx.x % CHANNELS] = Half(0.0f);
    return;
  }
#endif

  auto ring = make_tensor(make_smem_ptr(shared), Layout<Shape<Int<LINE>, Int<THREADS>, Int<LINES>, Int<STAGES>>>{})(_, threadIdx.x, _, _);
  auto sums = make_tensor<float>(Shape<Int<NUM_ROWS>, Int<WEIGHTS>>{});
  clear(sums);
  int line = threadIdx.x;
  pipeline<STAGES>(
      ceil_div(lines, +THREADS),
      [&](int slot) {
        int at = line * LINE, rows = line < lines ? (1 << NUM_ROWS) - 1 : 0;
#if ALONG_K
        if (rows) {
          int entry, rest;
          given.lines_of_group(entry, rest, line);
          at = (listed[entry] >> 4) * given.size + rest * LINE, rows = listed[entry] & 15;
        }
#endif
        CUTE_UNROLL
        for (int c = 0; c < CHANNELS; ++c) {
          const bool there = rows && channel + c < given.width;
          load_line(&ring(0, c, slot), given.weight + (channel + c) * given.weight_step + at, there);
          if (PARTS == 2) load_line(&ring(0, WEIGHTS / 2 + c, slot), given.up + (channel + c) * given.up_step + at, there);
        }
        // Rows stay in the first cache, for all blocks read them. One that skips a group may hold anything there.
        CUTE_UNROLL
        for (int row = 0; row < NUM_ROWS; ++row)
          SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint128_t>::copy(*reinterpret_cast<uint128_t const*>(given.x + row * given.x_step + at),
                                                           *reinterpret_cast<uint128_t*>(&ring(0, WEIGHTS + row, slot)), rows >> row & 1);
        line += THREADS;
      },
      [&](int slot) {
        alignas(16) Half read[LINES][LINE];
        CUTE_UNROLL
        for (int i = 0; i < LINES; ++i) store_line(read[i], &ring(0, i, slot));
        CUTE_UNROLL
        for (int i = 0; i < LINE; ++i)
          CUTE_UNROLL
          for (int row = 0; row < NUM_ROWS; ++row)
            CUTE_UNROLL
            for (int w = 0; w < WEIGHTS; ++w) sums(row, w) += float(read[WEIGHTS + row][i]) * float(read[w][i]);
      });
  CUTE_UNROLL
  for (int i = 0; i < SUMS; ++i) {
    CUTE_UNROLL
    for (int step = 16; step > 0; step /= 2) sums(i) += __shfl_xor_sync(0xffffffff, sums(i), step);
    if (lane == 0) found[warp * SUMS + i] = sums(i);
  }
  __syncthreads();
  const int row = threadIdx.x / CHANNELS, c = threadIdx.x % CHANNELS, at = channel + c;
  if (row >= NUM_ROWS || at >= given.width) return;
  const auto sum = [&](int part) {
    float value = 0.0f;
    for (int other = 0; other < WARPS; ++other) value += found[other * SUMS + sums.layout()(row, part * CHANNELS + c)];
    return value;
  };
  float value = sum(0);
  if (given.bias) value += float(given.bias[at]);
#if !ALONG_K
  value = activate(value, given.activation);
  if constexpr (PARTS == 2) value *= sum(1) + (given.up_bias ? float(given.up_bias[at]) : 0.0f);
  if (given.zeroes && !(executing >> row & 1)) value = 0.0f;
#endif
  given.out[int64_t(row) * given.width + at] = Half(value);
}

void gemv(View x, View weight, OptionalView up, OptionalView bias, OptionalView up_bias, View mask, View out, int64_t activation, bool zeroes) {
  const int num_groups = int(mask.size(1)), grouped = int(ALONG_K ? x.size(1) : weight.size(0)), size = grouped / num_groups;
  TVM_FFI_ICHECK(num_groups <= MAX_GROUPS) << "a block lists at most " << MAX_GROUPS << " groups, got " << num_groups;
  const Arguments given{data<Half>(x), data<Half>(weight), data<Half>(up), data<Half>(bias), data<Half>(up_bias), data<Half>(out),
                        data<unsigned char>(mask), int(weight.size(0)), int(x.size(1)), size, num_groups, int(activation), zeroes,
                        x.stride(0), weight.stride(0), up.has_value() ? up.value().stride(0) : 0, mask.stride(0),
                        cutlass::FastDivmod(cute::max(size / LINE, 1))};
  const int shared_bytes = RING * int(sizeof(Half)) + (WARPS * SUMS + (ALONG_K ? WARPS + num_groups : 0)) * int(sizeof(float));
  launch(gemv_kernel, ceil_div(given.width, CHANNELS), THREADS, shared_bytes, x, given);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemv, gemv);
