// GEMMs of one to four rows on CuTe: a warp sums some channels, 16 bytes of each a lane; weights that no row needs are not read.
//
// Along the N-axis a warp whose group no row executes ends at once. Along the K-axis a block lists the groups that some row
// executes, and walks lines of listed groups alone, so that no lane idles over skipped ones.
// Compiled in: FLOAT16, ALONG_K, GATED (N-axis only), NUM_ROWS, CHANNELS (of a warp; along the N-axis a divisor of the group).
#include "cute.cuh"

#include <cutlass/fast_math.h>

constexpr int WARPS = 4, PARTS = GATED ? 2 : 1, DEPTH = 4;  // lines that a lane has under way for a channel
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

// A line, or zeros.
CUTE_DEVICE void read_line(Half* to, Half const* from, bool there) {
  *reinterpret_cast<uint128_t*>(to) = there ? *reinterpret_cast<uint128_t const*>(from) : uint128_t(uint64_t(0));
}

__global__ void __launch_bounds__(32 * WARPS) gemv_kernel(const Arguments given) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const int lane = threadIdx.x % 32, channel = (blockIdx.x * WARPS + threadIdx.x / 32) * CHANNELS;
#if ALONG_K
  // Listed groups, with a bit for each row that executes one.
  int* const listed = reinterpret_cast<int*>(dynamic_shared);
  int* const number = listed + given.num_groups;
  if (threadIdx.x < 32) {
    int found = 0;
    for (int first = 0; first < given.num_groups; first += 32) {
      const int group = first + lane;
      int rows = 0;
      for (int row = 0; row < NUM_ROWS; ++row)
        if (group < given.num_groups && given.mask[row * given.mask_step + group]) rows |= 1 << row;
      const unsigned votes = __ballot_sync(0xffffffff, rows != 0);
      if (rows) listed[found + __popc(votes & ((1u << lane) - 1))] = group << 4 | rows;
      found += __popc(votes);
    }
    if (lane == 0) *number = found;
  }
  __syncthreads();
  const int lines = *number * given.lines_of_group.divisor;
  if (channel >= given.width) return;
#else
  const int lines = given.depth / LINE, group = channel / given.size;
  if (channel >= given.width) return;
  int executing = 0;
  for (int row = 0; row < NUM_ROWS; ++row)
    if (given.mask[row * given.mask_step + group]) executing |= 1 << row;
  if (!executing) {
    if (given.zeroes && lane < CHANNELS * NUM_ROWS) given.out[int64_t(lane / CHANNELS) * given.width + channel + lane % CHANNELS] = Half(0.0f);
    return;
  }
#endif

  auto sums = make_tensor<float>(Shape<Int<NUM_ROWS>, Int<CHANNELS>, Int<PARTS>>{});
  clear(sums);
  CUTE_NO_UNROLL
  for (int first = lane; first < lines; first += 32 * DEPTH) {
    alignas(16) Half weights[DEPTH][CHANNELS][PARTS][LINE];
    int at[DEPTH], rows[DEPTH];
    CUTE_UNROLL
    for (int d = 0; d < DEPTH; ++d) {
      const int line = first + 32 * d;
      at[d] = line * LINE, rows[d] = line < lines ? (1 << NUM_ROWS) - 1 : 0;
#if ALONG_K
      int entry, rest;
      given.lines_of_group(entry, rest, line);
      const int found = line < lines ? listed[entry] : 0;
      at[d] = (found >> 4) * given.size + rest * LINE, rows[d] = found & 15;
#endif
      CUTE_UNROLL
      for (int c = 0; c < CHANNELS; ++c) {
        const bool there = rows[d] && channel + c < given.width;
        read_line(weights[d][c][0], given.weight + (channel + c) * given.weight_step + at[d], there);
        if (PARTS == 2) read_line(weights[d][c][PARTS - 1], given.up + (channel + c) * given.up_step + at[d], there);
      }
    }
    CUTE_UNROLL
    for (int d = 0; d < DEPTH; ++d)
      CUTE_UNROLL
      for (int row = 0; row < NUM_ROWS; ++row) {
        alignas(16) Half values[LINE];
        read_line(values, given.x + row * given.x_step + at[d], rows[d] >> row & 1);
        CUTE_UNROLL
        for (int i = 0; i < LINE; ++i)
          CUTE_UNROLL
          for (int c = 0; c < CHANNELS; ++c)
            CUTE_UNROLL
            for (int part = 0; part < PARTS; ++part) sums(row, c, part) += float(values[i]) * float(weights[d][c][part][i]);
      }
  }
  CUTE_UNROLL
  for (int i = 0; i < size(sums); ++i)
    CUTE_UNROLL
    for (int step = 16; step > 0; step /= 2) sums(i) += __shfl_xor_sync(0xffffffff, sums(i), step);
  if (lane > 0) return;
  CUTE_UNROLL
  for (int c = 0; c < CHANNELS; ++c)
    CUTE_UNROLL
    for (int row = 0; row < NUM_ROWS; ++row) {
      const int at = channel + c;
      if (at >= given.width) continue;
      float value = sums(row, c, 0);
      if (given.bias) value += float(given.bias[at]);
#if !ALONG_K
      value = activate(value, given.activation);
      if constexpr (PARTS == 2) value *= sums(row, c, PARTS - 1) + (given.up_bias ? float(given.up_bias[at]) : 0.0f);
      if (given.zeroes && !(executing >> row & 1)) value = 0.0f;
#endif
      given.out[int64_t(row) * given.width + at] = Half(value);
    }
}

void gemv(View x, View weight, OptionalView up, OptionalView bias, OptionalView up_bias, View mask, View out, int64_t activation, bool zeroes) {
  const int num_groups = int(mask.size(1)), grouped = int(ALONG_K ? x.size(1) : weight.size(0)), size = grouped / num_groups;
  TVM_FFI_ICHECK(num_groups <= MAX_GROUPS) << "a block lists at most " << MAX_GROUPS << " groups, got " << num_groups;
  const Arguments given{data<Half>(x), data<Half>(weight), data<Half>(up), data<Half>(bias), data<Half>(up_bias), data<Half>(out),
                        data<unsigned char>(mask), int(weight.size(0)), int(x.size(1)), size, num_groups, int(activation), zeroes,
                        x.stride(0), weight.stride(0), up.has_value() ? up.value().stride(0) : 0, mask.stride(0),
                        cutlass::FastDivmod(cute::max(size / LINE, 1))};
  launch(gemv_kernel, ceil_div(given.width, WARPS * CHANNELS), 32 * WARPS, ALONG_K ? (num_groups + 1) * int(sizeof(int)) : 0, x, given);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemv, gemv);
