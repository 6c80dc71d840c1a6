// Decode attention on CuTe for sm_80 and newer: blocks share out the keys of a (sequence, unit) pair, and their warps each block of
// keys, 16 for each; a second launch merges what blocks found. Blocks of skipped pairs end at once.
//
// Rows of products are the query heads of a unit, 16 at most; zeros stand for the others, and for places that hold no key.
// Compiled in: FLOAT16, HEAD_DIM (channels of a head), WARPS (of a block), STAGES (of the ring). Called by _cute.py.
#include "cute.cuh"

constexpr int ROWS = 16, KEYS = 16 * WARPS, THREADS = 32 * WARPS;
constexpr int RING = STAGES * KEYS * HEAD_DIM;
constexpr int SHARED_BYTES = (ROWS * HEAD_DIM + 2 * RING) * sizeof(Half);
static_assert(WARPS * ROWS * (HEAD_DIM + 2) * sizeof(float) <= SHARED_BYTES, "what warps found lies where the ring was");
constexpr float LOWEST = -1.0e30f;
using Mma = TiledMMA<MMA_Atom<MmaOp>, Layout<Shape<_1, _1, _1>>, Tile<_16, _16, _16>>;

struct Arguments {
  Half const *q, *k, *v;
  Half* out;
  float *found, *heights;
  int const *lengths, *starts, *pages;
  unsigned char const* mask;
  int num_heads, num_kv_heads, num_units, num_groups, splits, page, window;
  bool capped;
  float scale, cap_in, cap_out;
  int64_t q_sequence, q_head, k_sequence, k_place, k_head, v_sequence, v_place, v_head, mask_sequence, pages_sequence;
};

// Maximum, sum of weights and weighted sum of one channel over parts whose heights (maximum and sum) and channels lie steps apart.
struct Merged {
  float top = LOWEST, total = 0.0f, sum = 0.0f;
};
CUTE_DEVICE Merged merge(float const* heights, float const* channel, int parts, int heights_step, int channel_step) {
  Merged merged;
  for (int part = 0; part < parts; ++part) merged.top = fmaxf(merged.top, heights[part * heights_step]);
  for (int part = 0; part < parts; ++part) {
    const float factor = exp2f(heights[part * heights_step] - merged.top), weight = heights[part * heights_step + 1];
    merged.total += weight * factor;
    // What was not written may hold anything.
    if (weight > 0.0f) merged.sum += channel[part * channel_step] * factor;
  }
  return merged;
}

__global__ void __launch_bounds__(THREADS) attend_kernel(const Arguments given) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const int split = blockIdx.x % given.splits, unit = blockIdx.x / given.splits % given.num_units;
  const int64_t b = blockIdx.x / given.splits / given.num_units;
  const int heads = given.num_heads / given.num_units, kv_head = int64_t(unit) * given.num_kv_heads / given.num_units;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const int high = given.lengths[b];
  int low = given.starts ? given.starts[b] : 0;
  if (given.window) low = cute::max(low, high - given.window);
  const bool runs = !given.mask || given.mask[b * given.mask_sequence + int64_t(unit) * given.num_groups / given.num_units];
  const int blocks = runs && low < high ? (high + KEYS - 1) / KEYS - low / KEYS : 0;
  const int share = ceil_div(blocks, given.splits), begin = cute::min(split * share, blocks);

  auto slot_of = [&](int row) { return (b * given.num_heads + unit * heads + row) * given.splits + split; };
  if (begin >= blocks) {
    if (threadIdx.x < heads) given.heights[2 * slot_of(threadIdx.x)] = LOWEST, given.heights[2 * slot_of(threadIdx.x) + 1] = 0.0f;
    return;
  }

  Half* const shared = reinterpret_cast<Half*>(dynamic_shared);
  auto queries = make_tensor(make_smem_ptr(shared), swizzled<HEAD_DIM>(Int<ROWS>{}, Int<HEAD_DIM>{}));
  auto ring_k = make_tensor(make_smem_ptr(shared + ROWS * HEAD_DIM), swizzled<HEAD_DIM>(Int<KEYS>{}, Int<HEAD_DIM>{}, _1{}, Int<STAGES>{}));
  auto ring_v = make_tensor(make_smem_ptr(shared + ROWS * HEAD_DIM + RING), swizzled<HEAD_DIM>(Int<KEYS>{}, Int<HEAD_DIM>{}, _1{}, Int<STAGES>{}));

  Mma mma;
  auto thread = mma.get_slice(lane);
  auto scores = make_tensor<float>(append(partition_shape_C(mma, Shape<_16, _16>{}), _1{}));
  auto weights = thread.partition_fragment_A(make_tensor<Half>(Shape<_16, _16>{}));
  auto acc = make_tensor<float>(partition_shape_C(mma, Shape<_16, Int<HEAD_DIM>>{}));
  auto key_of = thread.partition_C(make_identity_tensor(Shape<_16, _16>{}));
  auto place_of = thread.partition_C(make_identity_tensor(Shape<_16, Int<HEAD_DIM>>{}));
  auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Half>{}, mma);
  auto columns = thread.partition_fragment_B(make_tensor<Half>(Shape<_16, _16>{}));
  clear(acc);
  // Of rows lane / 4 and 8 below.
  float top[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};

  int n = (low / KEYS + begin) * KEYS, loaded = n;
  share_lines<ROWS, HEAD_DIM, THREADS>([&](int, int row, int column) {
    load_line(&queries(row, column), given.q + b * given.q_sequence + (unit * heads + row) * given.q_head + column, row < heads);
  });
  pipeline<STAGES>(
      cute::min(share, blocks - begin),
      [&](int slot) {
        share_lines<KEYS, HEAD_DIM, THREADS>([&](int, int row, int column) {
          int64_t place = loaded + row;
          const bool there = place >= low && place < high;
          if (given.pages) place = there ? int64_t(given.pages[b * given.pages_sequence + place / given.page]) * given.page + place % given.page : 0;
          load_line(&ring_k(row, column, 0, slot), given.k + b * given.k_sequence + place * given.k_place + kv_head * given.k_head + column, there);
          load_line(&ring_v(row, column, 0, slot), given.v + b * given.v_sequence + place * given.v_place + kv_head * given.v_head + column, there);
        });
        loaded += KEYS;
      },
      [&](int slot) {
        clear(scores);
        auto of_warp = make_coord(warp, 0, 0);
        auto keys = local_tile(ring_k(_, _, _, slot), Shape<_16, Int<HEAD_DIM>, _1>{}, of_warp);
        multiply_stage(mma, queries, keys, scores, [](int) { return true; });
        float highest[2] = {top[0], top[1]};
        CUTE_UNROLL
        for (int i = 0; i < size(scores); ++i) {
          const int key = n + 16 * warp + get<1>(key_of(i));
          if (given.capped) scores(i) = given.cap_out - 2.0f * given.cap_out / (exp2f(scores(i) * given.cap_in) + 1.0f);
          scores(i) = key >= low && key < high ? scores(i) * given.scale : -INFINITY;
          highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], scores(i));
        }
        float factor[2];
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          for (int step = 1; step < 4; step *= 2) highest[half] = fmaxf(highest[half], __shfl_xor_sync(0xffffffff, highest[half], step));
          factor[half] = exp2f(top[half] - highest[half]);
          top[half] = highest[half];
          total[half] *= factor[half];
        }
        // Fragments of scores lie as those of rows do.
        CUTE_UNROLL
        for (int i = 0; i < size(scores); ++i) {
          const float weight = exp2f(scores(i) - top[i / 2 % 2]);
          total[i / 2 % 2] += weight;
          weights(i) = Half(weight);
        }
        CUTE_UNROLL
        for (int i = 0; i < size(acc); ++i) acc(i) *= factor[i / 2 % 2];
        auto values = local_tile(ring_v(_, _, _, slot), Shape<_16, Int<HEAD_DIM>, _1>{}, of_warp)(_, _, 0);
        auto transposed = make_tensor(values.data(), composition(values.layout(), Layout<Shape<Int<HEAD_DIM>, _16>, Stride<_16, _1>>{}));
        auto from = copy_v.get_slice(lane).partition_S(transposed);
        auto to = copy_v.get_slice(lane).retile_D(columns);
        CUTE_UNROLL
        for (int i = 0; i < size<1>(from); ++i) {
          copy(copy_v, from(_, i, 0), to(_, 0, 0));
          CUTE_UNROLL
          for (int part = 0; part < 2; ++part) gemm(mma, weights(_, 0, 0), columns(_, part, 0), acc(_, 0, 2 * i + part));
        }
        n += KEYS;
      });

  CUTE_UNROLL
  for (int half = 0; half < 2; ++half)
    for (int step = 1; step < 4; step *= 2) total[half] += __shfl_xor_sync(0xffffffff, total[half], step);
  float* const heights = reinterpret_cast<float*>(dynamic_shared);
  float* const found = heights + 2 * ROWS * WARPS;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    float* const own = heights + 2 * (ROWS * warp + lane / 4 + 8 * half);
    if (lane % 4 == 0) own[0] = top[half], own[1] = total[half];
  }
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) found[(ROWS * warp + get<0>(place_of(i))) * HEAD_DIM + get<1>(place_of(i))] = acc(i);
  __syncthreads();
  for (int i = threadIdx.x; i < heads * HEAD_DIM; i += THREADS) {
    const int row = i / HEAD_DIM, channel = i % HEAD_DIM;
    const Merged merged = merge(heights + 2 * row, found + i, WARPS, 2 * ROWS, ROWS * HEAD_DIM);
    given.found[slot_of(row) * HEAD_DIM + channel] = merged.sum;
    if (channel == 0) given.heights[2 * slot_of(row)] = merged.top, given.heights[2 * slot_of(row) + 1] = merged.total;
  }
}

// A block for each head; one that attended to nothing gets zeros.
__global__ void __launch_bounds__(THREADS) merge_kernel(const Arguments given) {
  const int64_t first = int64_t(blockIdx.x) * given.splits;
  for (int channel = threadIdx.x; channel < HEAD_DIM; channel += THREADS) {
    const Merged merged = merge(given.heights + 2 * first, given.found + first * HEAD_DIM + channel, given.splits, 2, HEAD_DIM);
    given.out[int64_t(blockIdx.x) * HEAD_DIM + channel] = Half(merged.total > 0.0f ? merged.sum / merged.total : 0.0f);
  }
}

void attention_decode(View q, View k, View v, View lengths, OptionalView mask, OptionalView starts, OptionalView pages, View found, View heights, View out,
                      int64_t num_units, int64_t splits, int64_t window, bool capped, double scale, double cap_in, double cap_out) {
  const bool paged = pages.has_value();
  const Arguments given{data<Half>(q), data<Half>(k), data<Half>(v), data<Half>(out), data<float>(found), data<float>(heights),
                        data<int>(lengths), data<int>(starts), data<int>(pages), data<unsigned char>(mask),
                        int(q.size(1)), int(k.size(2)), int(num_units), mask.has_value() ? int(mask.value().size(1)) : 1, int(splits), int(k.size(1)), int(window),
                        capped, float(scale), float(cap_in), float(cap_out),
                        q.stride(0), q.stride(1), paged ? 0 : k.stride(0), k.stride(1), k.stride(2), paged ? 0 : v.stride(0), v.stride(1), v.stride(2),
                        mask.has_value() ? mask.value().stride(0) : 0, paged ? pages.value().stride(0) : 0};
  launch(attend_kernel, q.size(0) * num_units * splits, THREADS, SHARED_BYTES, q, given);
  launch(merge_kernel, q.size(0) * q.size(1), THREADS, 0, q, given);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_decode, attention_decode);
