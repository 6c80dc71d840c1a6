// Put in front of a kernel on CuTe, it makes the whole source a library for the CPU, called as that for a GPU is: CuTe's layouts are what
// they are, the instructions that it wraps are done here, warp by warp. Copies that are not waited for may or may not have happened.
#include <cute/tensor.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

#include "emulated.h"

#undef __shared__
#define __shared__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__

#define CHECK(what) \
  if (!(what)) fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what), abort()

struct Copy {
  const void* from;
  void* to;
  bool there;
  void happen() const { there ? memcpy(to, from, 16) : memset(to, 0, 16); }
};
static std::vector<std::vector<Copy>> under_way[1024];
static void cp_async(const void* from, void* to, bool there) {
  CHECK((uintptr_t(to) % 16 == 0) && (!there || uintptr_t(from) % 16 == 0));
  auto& groups = under_way[fiber];
  if (groups.empty()) groups.emplace_back();
  const Copy copy{from, to, there};
  rand() % 2 ? copy.happen() : groups.back().push_back(copy);
}
static void emulated_fence() { under_way[fiber].emplace_back(); }
template <int N> static void emulated_wait() {
  auto& groups = under_way[fiber];
  // The last one is not committed yet, which waiting for all does not ask.
  for (size_t left = groups.size(); left > (N ? N + 1 : 0); --left) {
    for (const Copy& copy : groups.front()) copy.happen();
    groups.erase(groups.begin());
  }
}
#define cp_async_fence emulated_fence
#define cp_async_wait emulated_wait

// What every lane of a warp offers to the others.
static const void* shown[32][32];
template <class Function> static void with_lanes(const void* own, Function function) {
  const void** lanes = shown[fiber / 32];
  lanes[threadIdx.x % 32] = own;
  __syncwarp();
  function(lanes, threadIdx.x % 32);
  __syncwarp();
}
static float __shfl_xor_sync(unsigned all, float value, int bits) {
  unsigned word;
  memcpy(&word, &value, 4);
  word = __shfl_xor_sync(all, word, bits);
  memcpy(&value, &word, 4);
  return value;
}
static int __any_sync(unsigned all, bool vote) { return __ballot_sync(all, vote) != 0; }
static float __fdividef(float a, float b) { return a / b; }
static void atomicAdd(float* at, float value) { *at += value; }
static void atomicOr(unsigned* at, unsigned value) { *at |= value; }

namespace cute {
template <> struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t, uint128_t> {
  using SRegisters = uint128_t[1];
  using DRegisters = uint128_t[1];
  static void copy(uint128_t const& from, uint128_t& to, bool there) { cp_async(&from, &to, there); }
};
template <> struct SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint128_t, uint128_t> : SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t, uint128_t> {};
// Four matrices of 8 rows of 16 bytes: register i of a lane is word lane % 4 of row lane / 4 of matrix i, whose address lane 8 i + row gives.
template <class Source, class Target, bool TRANSPOSED> void load_matrices(Source const& source, Target& target) {
  uint16_t* to = reinterpret_cast<uint16_t*>(&target(0));
  CHECK(reinterpret_cast<uintptr_t>(&source(0)) % 16 == 0);
  with_lanes(&source(0), [&](const void** lanes, int lane) {
    for (int i = 0; i < 8; ++i) {
      const int row = lane / 4, column = lane % 4 * 2 + i % 2, matrix = i / 2;
      to[i] = static_cast<const uint16_t*>(lanes[8 * matrix + (TRANSPOSED ? column : row)])[TRANSPOSED ? row : column];
    }
  });
}
template <class S, class SL, class D, class DL> void copy_unpack(Copy_Traits<SM75_U32x4_LDSM_N> const&, Tensor<S, SL> const& source, Tensor<D, DL>& target) {
  load_matrices<Tensor<S, SL>, Tensor<D, DL>, false>(source, target);
}
template <class S, class SL, class D, class DL> void copy_unpack(Copy_Traits<SM75_U16x8_LDSM_T> const&, Tensor<S, SL> const& source, Tensor<D, DL>& target) {
  load_matrices<Tensor<S, SL>, Tensor<D, DL>, true>(source, target);
}
template <class T, class D, class A, class B, class C> void multiply(D& d, A const& a, B const& b, C const& c) {
  struct {
    const T *a, *b;
  } const own{&a(0), &b(0)};
  float sums[4];
  with_lanes(&own, [&](const void** lanes, int lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = c(i);
      for (int k = 0; k < 16; ++k) {
        const auto of_a = static_cast<decltype(&own)>(lanes[row % 8 * 4 + k % 8 / 2]), of_b = static_cast<decltype(&own)>(lanes[column * 4 + k % 8 / 2]);
        sum += float(of_a->a[k % 2 + row / 8 * 2 + k / 8 * 4]) * float(of_b->b[k % 2 + k / 8 * 2]);
      }
      sums[i] = sum;
    }
  });
  for (int i = 0; i < 4; ++i) d(i) = sums[i];
}
template <class D, class DL, class A, class AL, class B, class BL, class C, class CL>
void mma_unpack(MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> const&, Tensor<D, DL>& d, Tensor<A, AL> const& a, Tensor<B, BL> const& b, Tensor<C, CL> const& c) {
  multiply<bfloat16_t>(d, a, b, c);
}
template <class D, class DL, class A, class AL, class B, class BL, class C, class CL>
void mma_unpack(MMA_Traits<SM80_16x8x16_F32F16F16F32_TN> const&, Tensor<D, DL>& d, Tensor<A, AL> const& a, Tensor<B, BL> const& b, Tensor<C, CL> const& c) {
  multiply<half_t>(d, a, b, c);
}
}  // namespace cute

// What a thread must leave behind it, and the largest shared memory of a block: of an A100.
static void (*check_end)() = [] {};
static int most_shared = 166912;
template <class Arguments, class On>
void launch(void (*kernel)(Arguments), int64_t blocks, int threads, int shared_bytes, On const&, Arguments const& arguments, unsigned cluster = 1) {
  CHECK(shared_bytes <= most_shared && threads * cluster <= 1024 && blocks % cluster == 0);
  poison = 0xff;  // a NaN, as halves and as floats
  for (auto& groups : under_way) groups.clear();
  launch(int(blocks), threads, [=] { kernel(arguments), check_end(); }, cluster);
}
