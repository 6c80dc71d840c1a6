// What the kernels on CuTe share: rows copied into swizzled shared memory, a ring of stages, products of 16 x 8 x 16 with
// fragments of rows left out, finished tiles scattered by rows, and launches on PyTorch's stream. They run on sm_80 and newer.
//
// Compiled in: FLOAT16 (else bfloat16).
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cute/tensor.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

using namespace cute;
using View = tvm::ffi::TensorView;
using OptionalView = tvm::ffi::Optional<tvm::ffi::TensorView>;

#if FLOAT16
using Half = half_t;
using MmaOp = SM80_16x8x16_F32F16F16F32_TN;
#else
using Half = bfloat16_t;
using MmaOp = SM80_16x8x16_F32BF16BF16F32_TN;
#endif
constexpr int LINE = 8;  // elements of 16 bytes, as which everything is copied

// ---- Memory ----

// A line, once the thread has waited for it. Without `there` zeros, and nothing is read.
CUTE_DEVICE void load_line(Half* to, Half const* from, bool there) {
  SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(*reinterpret_cast<uint128_t const*>(from), *reinterpret_cast<uint128_t*>(to), there);
}
CUTE_DEVICE void store_line(Half* to, Half const* from) { *reinterpret_cast<uint128_t*>(to) = *reinterpret_cast<uint128_t const*>(from); }

// Rows of WIDTH elements, a multiple of 16, without conflicts of banks; extents as `Int`.
template <int WIDTH, class... Extents> CUTE_HOST_DEVICE constexpr auto swizzled(Extents... extents) {
  constexpr int PIECE = WIDTH % 64 == 0 ? 64 : WIDTH % 32 == 0 ? 32 : 16;
  using Pattern = Swizzle<PIECE == 64 ? 3 : PIECE == 32 ? 2 : 1, 3, 3>;
  return tile_to_shape(composition(Pattern{}, Layout<Shape<_8, Int<PIECE>>, Stride<Int<PIECE>, _1>>{}), make_shape(extents...));
}

// Give the lines of ROWS rows of WIDTH elements to a block's threads: `copy(i, row, column)` for the thread's i-th line. All its
// lines have one column, and its rows are alike for every tile of the same shape.
template <int ROWS, int WIDTH, int THREADS, class Copy> CUTE_DEVICE void share_lines(Copy copy) {
  constexpr int LINES = WIDTH / LINE, STEP = THREADS / LINES;
  static_assert(THREADS % LINES == 0, "threads share rows evenly");
  CUTE_UNROLL
  for (int i = 0; i < ceil_div(ROWS, STEP); ++i) {
    const int row = threadIdx.x / LINES + i * STEP;
    if (ROWS % STEP == 0 || row < ROWS) copy(i, row, int(threadIdx.x % LINES) * LINE);
  }
}
template <int ROWS, int WIDTH, int THREADS> constexpr int LINES_OF_THREAD = ceil_div(ROWS, THREADS / (WIDTH / LINE));

// `load(slot)` is called once for each step, in order, SLOTS - 1 steps ahead of `multiply(slot)`. Every step commits one
// group of copies, whatever it loads. At the end nobody reads or writes shared memory any more.
template <int SLOTS, class Load, class Multiply> CUTE_DEVICE void pipeline(int steps, Load load, Multiply multiply) {
  CUTE_UNROLL
  for (int slot = 0; slot < SLOTS - 1; ++slot) {
    if (slot < steps) load(slot);
    cp_async_fence();
  }
  int slot = 0, next = SLOTS - 1;
  CUTE_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<SLOTS - 2>();
    __syncthreads();
    if (step + SLOTS - 1 < steps) load(next);
    cp_async_fence();
    multiply(slot);
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
    next = next + 1 == SLOTS ? 0 : next + 1;
  }
  cp_async_wait<0>();
  __syncthreads();
}

// ---- Products ----

// A tile by warps of 32 rows (two fragments of 16) and half of the columns, all of them if there are but 16.
template <int ROWS, int COLUMNS> struct Warps {
  static constexpr int ALONG_M = ROWS / 32, ALONG_N = COLUMNS >= 32 ? 2 : 1, THREADS = 32 * ALONG_M * ALONG_N, FRAGMENTS = 2;
  using Mma = TiledMMA<MMA_Atom<MmaOp>, Layout<Shape<Int<ALONG_M>, Int<ALONG_N>, _1>>, Tile<Int<16 * ALONG_M>, Int<16 * ALONG_N>, _16>>;
};
using Matrices = Copy_Atom<SM75_U32x4_LDSM_N, Half>;

// Add rows [rows, depth] times weights [columns, depth, parts] to sums (.., fragment of rows, fragment of columns, part). A fragment of 16
// rows for which `runs` says no (to a whole warp) is neither read nor multiplied. Every so many threads multiply rows and weights of their own.
template <class Mma, class Rows, class Weights, class Sums, class Runs>
CUTE_DEVICE void multiply_stage(Mma mma, Rows const& rows, Weights const& weights, Sums& sums, Runs runs) {
  const int index = threadIdx.x % int(size(Mma{}));
  auto thread = mma.get_slice(index);
  auto copy_a = make_tiled_copy_A(Matrices{}, mma);
  auto copy_b = make_tiled_copy_B(Matrices{}, mma);
  auto a = thread.partition_fragment_A(rows);
  auto b = thread.partition_fragment_B(weights(_, _, 0));
  auto from_a = copy_a.get_slice(index).partition_S(rows);
  auto from_b = copy_b.get_slice(index).partition_S(weights);
  auto to_a = copy_a.get_slice(index).retile_D(a);
  auto to_b = copy_b.get_slice(index).retile_D(b);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    CUTE_UNROLL
    for (int m = 0; m < size<1>(a); ++m)
      if (runs(m)) copy(copy_a, from_a(_, m, k), to_a(_, m, k));
    CUTE_UNROLL
    for (int part = 0; part < size<3>(sums); ++part) {
      copy(copy_b, from_b(_, _, k, part), to_b(_, _, k));
      CUTE_UNROLL
      for (int m = 0; m < size<1>(a); ++m)
        if (runs(m)) {
          CUTE_UNROLL
          for (int n = 0; n < size<1>(b); ++n) gemm(mma, a(_, m, k), b(_, n, k), sums(_, m, n, part));
        }
    }
  }
}

// Round a tile of values (.., fragment of rows, fragment of columns) and store its rows through shared memory: `place(row,
// column)` says where a line goes, or null.
template <int ROWS, int COLUMNS, class Mma, class Values, class Place>
CUTE_DEVICE void store_tile(Mma mma, Values const& values, Half* shared, Place place) {
  auto tile = make_tensor(make_smem_ptr(shared), swizzled<COLUMNS>(Int<ROWS>{}, Int<COLUMNS>{}));
  auto rounded = make_tensor_like<Half>(values);
  CUTE_UNROLL
  for (int i = 0; i < size(values); ++i) rounded(i) = Half(values(i));
  auto pairs = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Half>{}, mma).get_slice(threadIdx.x);
  copy(Copy_Atom<UniversalCopy<uint32_t>, Half>{}, pairs.retile_S(rounded), pairs.partition_D(tile));
  __syncthreads();
  share_lines<ROWS, COLUMNS, decltype(size(Mma{}))::value>([&](int, int row, int column) {
    if (Half* to = place(row, column)) store_line(to, &tile(row, column));
  });
}

CUTE_DEVICE float activate(float v, int activation) {
  // 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
  const float inner = activation == 2 ? 1.5957691216057308f * (v + 0.044715f * v * v * v) : v;
  if (activation == 1 || activation == 2) return __fdividef(v, 1.0f + exp2f(-1.4426950408889634f * inner));
  if (activation != 3) return v;
  v = v < 0.0f ? 0.0f : v;  // a NaN stays one
  return v * v;
}

// ---- Launches ----

template <class T> T* data(View const& tensor) { return static_cast<T*>(tensor.data_ptr()); }
template <class T> T* data(OptionalView const& tensor) { return tensor.has_value() ? data<T>(tensor.value()) : nullptr; }

#ifdef __CUDACC__
template <class Arguments>
void launch(void (*kernel)(Arguments), int64_t blocks, int threads, int shared_bytes, View const& on, Arguments const& arguments, unsigned cluster = 1) {
  if (blocks == 0) return;
  TVM_FFI_ICHECK(blocks < (int64_t(1) << 31)) << "a grid of " << blocks << " blocks is too large; give fewer rows";
  const DLDevice device = on.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeClusterDimension;
  together.val.clusterDim = {cluster, 1, 1};
  const cudaLaunchConfig_t config{dim3(unsigned(blocks)), dim3(threads), size_t(shared_bytes), stream, &together, cluster > 1};
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, arguments);
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "CUDA says: " << cudaGetErrorString(error);
}
#endif
