// Prefill attention on CuTe for sm_80 and newer: a block owns gathered queries of one unit of heads and streams the keys that they see,
// by the paper's levels of skipping.
//
//   0  A block without queries ends at once.
//   1  Rows beyond the count are not loaded.
//   2  Fragments of 16 rows beyond the count are neither read from shared memory nor multiplied.
//
// Rows are tokens x heads of the unit. Those beyond the count are never stored, and no row's products touch another's. Tokens ascend, so
// that the first and the last one say which keys some row sees, and which all do: only the others are masked element by element.
// Compiled in: FLOAT16, LEVEL, HEAD_DIM (channels of a head), STAGES (of the ring). Called by _cute.py.
#include "cute.cuh"

// Keys that a row's token sees: from the first to before the second.
struct Row {
  int low, high, token, head;
};

// Threads share lines of 8 elements evenly. A warp has two fragments of rows for each one of keys that it reads, if registers hold its sums.
constexpr int WARPS = HEAD_DIM % 3 ? 4 : 3, FRAGMENTS = HEAD_DIM > 128 ? 1 : 2, KEYS = HEAD_DIM > 128 ? 32 : 64;
constexpr int THREADS = 32 * WARPS, ROWS = 16 * WARPS * FRAGMENTS;
constexpr int STEP = THREADS * LINE / HEAD_DIM;  // between a thread's lines
constexpr int RING = STAGES * KEYS * HEAD_DIM;
constexpr int HALVES = (ROWS * HEAD_DIM + 2 * RING) * sizeof(Half), SHARED_BYTES = HALVES + ROWS * sizeof(Row);
// Units whose blocks run side by side: enough to fill a GPU, few enough that their keys and values stay in the L2 cache.
constexpr int BAND = 16;
constexpr float LOWEST = -1.0e30f;
using Mma = TiledMMA<MMA_Atom<MmaOp>, Layout<Shape<Int<WARPS>, _1, _1>>, Tile<Int<16 * WARPS>, _16, _16>>;

struct Arguments {
  Half const *q, *k, *v;
  Half* out;
  int const *index, *counts, *starts, *runs;
  int num_queries, num_keys, num_heads, num_kv_heads, num_units, num_groups, pairs, band, max_tiles, window;
  bool capped;
  float scale, cap_in, cap_out;
  int64_t q_sequence, q_token, q_head, k_sequence, k_place, k_head, k_step, v_sequence, v_place, v_head, v_step;
};

__global__ void __launch_bounds__(THREADS) attention_prefill_kernel(const Arguments given) {
  extern __shared__ __align__(128) char dynamic_shared[];
  // Within a band of units, the last tile of each comes first: longest first, and the empty ones last.
  const int in_band = blockIdx.x % (given.max_tiles * given.band);
  const int pair = blockIdx.x / (given.max_tiles * given.band) * given.band + in_band % given.band;
  if (pair >= given.pairs) return;
  const int64_t b = pair / given.num_units;
  const int unit = pair % given.num_units, heads = given.num_heads / given.num_units, tokens = ROWS / heads;
  const int64_t column = b * given.num_groups + int64_t(unit) * given.num_groups / given.num_units;
  const int kv_head = int64_t(unit) * given.num_kv_heads / given.num_units;
  const int count = given.counts[column], tile = ceil_div(count, tokens) - 1 - in_band / given.band;
  if (tile < 0) return;
  int const* const listed = given.index + column * given.num_queries + tile * tokens;
  const int left = cute::min(count - tile * tokens, tokens), rows = left * heads;

  auto described = [&](int row) {
    const int token = listed[cute::min(row / heads, left - 1)], head = unit * heads + row % heads;
    if (given.runs) return Row{given.runs[token], given.runs[given.num_queries + token], token, head};
    const int high = token + given.num_keys - given.num_queries + 1, low = given.starts ? given.starts[b] : 0;
    return Row{given.window ? cute::max(low, high - given.window) : low, high, token, head};
  };

  Half* const shared = reinterpret_cast<Half*>(dynamic_shared);
  auto queries = make_tensor(make_smem_ptr(shared), swizzled<HEAD_DIM>(Int<ROWS>{}, Int<HEAD_DIM>{}));
  auto ring_k = make_tensor(make_smem_ptr(shared + ROWS * HEAD_DIM), swizzled<HEAD_DIM>(Int<KEYS>{}, Int<HEAD_DIM>{}, _1{}, Int<STAGES>{}));
  auto ring_v = make_tensor(make_smem_ptr(shared + ROWS * HEAD_DIM + RING), swizzled<HEAD_DIM>(Int<KEYS>{}, Int<HEAD_DIM>{}, Int<STAGES>{}));
  Row* const row_of = reinterpret_cast<Row*>(dynamic_shared + HALVES);
  for (int row = threadIdx.x; row < ROWS; row += THREADS) row_of[row] = described(row);
  __syncthreads();
  // Read again where they are needed, which spares registers.
  Row const &first = row_of[0], &last = row_of[ROWS - 1];
  share_lines<ROWS, HEAD_DIM, THREADS>([&](int, int row, int column) {
    Half const* const from = given.q + b * given.q_sequence + row_of[row].token * given.q_token + row_of[row].head * given.q_head;
    if (LEVEL < 1 || row < rows) load_line(&queries(row, column), from + column, true);
  });

  Mma mma;
  auto thread = mma.get_slice(threadIdx.x);
  auto scores = make_tensor<float>(append(partition_shape_C(mma, Shape<Int<ROWS>, Int<KEYS>>{}), _1{}));
  auto weights = thread.partition_fragment_A(make_tensor<Half>(Shape<Int<ROWS>, _16>{}));
  auto acc = make_tensor<float>(partition_shape_C(mma, Shape<Int<ROWS>, Int<HEAD_DIM>>{}));
  auto place_of = thread.partition_C(make_identity_tensor(Shape<Int<ROWS>, Int<KEYS>>{}));
  auto copy_v = make_tiled_copy_B(Copy_Atom<SM75_U16x8_LDSM_T, Half>{}, mma);
  auto columns = thread.partition_fragment_B(make_tensor<Half>(Shape<_16, _16>{}));
  clear(acc);
  float top[FRAGMENTS][2], total[FRAGMENTS][2];
  bool multiplied[FRAGMENTS];
  CUTE_UNROLL
  for (int m = 0; m < FRAGMENTS; ++m) {
    multiplied[m] = LEVEL < 2 || get<0>(place_of(0, m, 0)) / 16 * 16 < rows;
    top[m][0] = top[m][1] = LOWEST, total[m][0] = total[m][1] = 0.0f;
  }

  int n = first.low / KEYS * KEYS, loaded = n + threadIdx.x * LINE / HEAD_DIM;
  Half const* key = given.k + b * given.k_sequence + loaded * given.k_place + kv_head * given.k_head + threadIdx.x * LINE % HEAD_DIM;
  Half const* value = given.v + b * given.v_sequence + loaded * given.v_place + kv_head * given.v_head + threadIdx.x * LINE % HEAD_DIM;
  pipeline<STAGES>(
      first.low < last.high ? (last.high - n + KEYS - 1) / KEYS : 0,
      [&](int slot) {
        const int low = first.low, high = last.high;
        share_lines<KEYS, HEAD_DIM, THREADS>([&](int, int row, int column) {
          // Places that hold no key of the tile may hold anything, and 0 * NaN is NaN.
          const bool there = loaded >= low && loaded < high;
          load_line(&ring_k(row, column, 0, slot), key, there);
          load_line(&ring_v(row, column, slot), value, there);
          loaded += STEP, key += given.k_step, value += given.v_step;
        });
      },
      [&](int slot) {
        clear(scores);
        multiply_stage(mma, queries, ring_k(_, _, _, slot), scores, [&](int m) { return multiplied[m]; });
        const bool masked = n < last.low || n + KEYS > first.high;
        // A fragment whose rows stand before the step's keys is done with. Beside that, without this choice the compiler reads values so
        // early that registers do not hold them.
        bool sees[FRAGMENTS];
        CUTE_UNROLL
        for (int m = 0; m < FRAGMENTS; ++m) {
          sees[m] = multiplied[m] && n < row_of[get<0>(place_of(0, m, 0)) / 16 * 16 + 15].high;
          if (!sees[m]) continue;
          CUTE_UNROLL
          for (int half = 0; half < 2; ++half) {
            auto row = scores(make_coord(_, half), m, _, 0);
            auto place = place_of(make_coord(_, half), m, _);
            if (given.capped) {
              CUTE_UNROLL
              for (int i = 0; i < size(row); ++i) row(i) = given.cap_out - __fdividef(2.0f * given.cap_out, exp2f(row(i) * given.cap_in) + 1.0f);
            }
            if (masked) {
              const Row seen = row_of[get<0>(place(0))];
              CUTE_UNROLL
              for (int i = 0; i < size(row); ++i)
                if (n + get<1>(place(i)) < seen.low || n + get<1>(place(i)) >= seen.high) row(i) = -INFINITY;
            }
            float highest = top[m][half];
            CUTE_UNROLL
            for (int i = 0; i < size(row); ++i) highest = fmaxf(highest, row(i));
            for (int step = 1; step < 4; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
            const float factor = exp2f((top[m][half] - highest) * given.scale), height = highest * given.scale;
            top[m][half] = highest;
            total[m][half] *= factor;
            CUTE_UNROLL
            for (int i = 0; i < size(row); ++i) {
              row(i) = exp2f(row(i) * given.scale - height);
              total[m][half] += row(i);
            }
            auto sums = acc(make_coord(_, half), m, _);
            CUTE_UNROLL
            for (int i = 0; i < size(sums); ++i) sums(i) *= factor;
          }
        }
        auto stage = ring_v(_, _, slot);
        auto transposed = make_tensor(stage.data(), composition(stage.layout(), Layout<Shape<Int<HEAD_DIM>, Int<KEYS>>, Stride<Int<KEYS>, _1>>{}));
        auto from = copy_v.get_slice(threadIdx.x).partition_S(transposed);
        auto to = copy_v.get_slice(threadIdx.x).retile_D(columns);
        CUTE_UNROLL
        for (int k = 0; k < KEYS / 16; ++k) {
          // Two fragments of scores side by side lie as one of rows does.
          CUTE_UNROLL
          for (int m = 0; m < FRAGMENTS; ++m) {
            CUTE_UNROLL
            for (int i = 0; i < 8; ++i) weights(i, m, 0) = Half(scores(i % 4, m, 2 * k + i / 4, 0));
          }
          CUTE_UNROLL
          for (int i = 0; i < HEAD_DIM / 16; ++i) {
            copy(copy_v, from(_, i, k), to(_, 0, 0));
            CUTE_UNROLL
            for (int m = 0; m < FRAGMENTS; ++m)
              if (sees[m]) {
                CUTE_UNROLL
                for (int part = 0; part < 2; ++part) gemm(mma, weights(_, m, 0), columns(_, part, 0), acc(_, m, 2 * i + part));
              }
          }
        }
        n += KEYS;
      });

  CUTE_UNROLL
  for (int m = 0; m < FRAGMENTS; ++m) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float whole = total[m][half];
      for (int step = 1; step < 4; step *= 2) whole += __shfl_xor_sync(0xffffffff, whole, step);
      // A query that sees no key gets zeros.
      const float factor = 1.0f / (whole == 0.0f ? 1.0f : whole);
      auto sums = acc(make_coord(_, half), m, _);
      CUTE_UNROLL
      for (int i = 0; i < size(sums); ++i) sums(i) *= factor;
    }
  }
  store_tile<ROWS, HEAD_DIM>(mma, acc, shared, [&](int row, int column) -> Half* {
    const int64_t place = (b * given.num_queries + row_of[row].token) * given.num_heads + row_of[row].head;
    return row < rows ? given.out + place * HEAD_DIM + column : nullptr;
  });
}

void attention_prefill(View q, View k, View v, View out, View index, View counts, OptionalView starts, OptionalView runs, int64_t num_units, int64_t window,
                       bool capped, double scale, double cap_in, double cap_out) {
  const int64_t pairs = q.size(0) * num_units, tokens = ROWS / (q.size(2) / num_units);
  const int64_t band = cute::min(pairs, int64_t(BAND)), max_tiles = ceil_div(q.size(1), tokens);
  const Arguments given{data<Half>(q), data<Half>(k), data<Half>(v), data<Half>(out), data<int>(index), data<int>(counts), data<int>(starts), data<int>(runs),
                        int(q.size(1)), int(k.size(1)), int(q.size(2)), int(k.size(2)), int(num_units), int(counts.size(1)), int(pairs), int(band),
                        int(max_tiles), int(window), capped, float(scale), float(cap_in), float(cap_out),
                        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2), STEP * k.stride(1),
                        v.stride(0), v.stride(1), v.stride(2), STEP * v.stride(1)};
  launch(attention_prefill_kernel, ceil_div(pairs, band) * band * max_tiles, THREADS, SHARED_BYTES, q, given);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_prefill, attention_prefill);
