// Runs gemv_int8.cu on a CPU; `run` takes what the kernel does and the number of blocks.
#include "emulated.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#define EMULATED
static float as_float(uint16_t bits) {
#if FLOAT16
  _Float16 v;
  memcpy(&v, &bits, 2);
  return v;
#else
  const uint32_t wide = uint32_t(bits) << 16;
  float v;
  memcpy(&v, &wide, 4);
  return v;
#endif
}
static uint16_t as_half(float v) {
#if FLOAT16
  const _Float16 half = v;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
#else
  uint32_t bits;
  memcpy(&bits, &v, 4);
  if (v != v) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}
static uint32_t added(uint32_t x, uint32_t y) {
  const auto part = [=](int shift) { return uint32_t(as_half(as_float(uint16_t(x >> shift)) + as_float(uint16_t(y >> shift)))); };
  return part(0) | part(16) << 16;
}
static float exponential(float v) { return std::exp(v); }
static uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t select) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
// As PTX lays out fragments of m16n8k16: of lane 4 g + t, a0 and a2 are row g, a1 and a3 row g + 8; a0, a1, b0 are places 2 t and + 1 of
// the 16, a2, a3, b1 the same + 8; b's column is g; d[0], d[1] are row g, columns 2 t and + 1, the others row g + 8. Bytes in place of
// halves make it m16n8k32. `value(word, place)` is one of the EACH that a word holds.
template <int EACH, class T, class Value>
static void multiply_fragments(T (&d)[4], const uint32_t (&own)[6], Value value) {
  static uint32_t given[32][32][6];
  const int lane = threadIdx.x % 32;
  auto& warp = given[fiber / 32];
  __syncwarp();
  memcpy(warp[lane], own, sizeof own);
  __syncwarp();
  const auto at = [&](int of, int word, int place) { return value(warp[of][word], place % EACH); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8 * EACH; ++k) {
      const int of = k % (4 * EACH) / EACH, half = k / (4 * EACH);
      d[i] += at(row % 8 * 4 + of, row / 8 + half * 2, k) * at(column * 4 + of, 4 + half, k);
    }
  }
  __syncwarp();
}
static void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_fragments<2>(d, {a0, a1, a2, a3, b0, b1}, [](uint32_t word, int place) { return as_float(uint16_t(word >> 16 * place)); });
}
static void multiply(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_fragments<4>(d, {a0, a1, a2, a3, b0, b1}, [](uint32_t word, int place) { return int(int8_t(word >> 8 * place)); });
}
struct Words {
  unsigned of[4];
};
template <class T> static Words load_words(const T* p) {
  Words v;
  if (reinterpret_cast<uintptr_t>(p) % 16) abort();
  memcpy(&v, p, 16);
  return v;
}
static unsigned packed(float low, float high) { return as_half(low) | unsigned(as_half(high)) << 16; }
static unsigned transposed(unsigned two) {
  static unsigned given[32][32];
  const int lane = threadIdx.x % 32;
  __syncwarp();
  given[fiber / 32][lane] = two;
  __syncwarp();
  const auto half = [&](int row, int column) { return given[fiber / 32][row * 4 + column / 2] >> 16 * (column & 1) & 0xffff; };
  const unsigned found = half(lane % 4 * 2, lane / 4) | half(lane % 4 * 2 + 1, lane / 4) << 16;
  __syncwarp();
  return found;
}
#define load_weights load_words
#define load_row load_words
#include "kernel.cu"

extern "C" void run(int blocks, const Element* x, const signed char* weight, const signed char* up_weight, const u16* bias, const u16* up_bias, const float* scale,
                    const float* up_scale, const float* x_scale, const u8* mask, u16* out, int M, int N, int K, int stride_x, int stride_w, int stride_up, int stride_mask, int groups) {
  launch(blocks, THREADS, [=] {
    gemv_int8(x, weight, up_weight, bias, up_bias, scale, up_scale, x_scale, mask, out, M, N, K, stride_x, stride_w, stride_up, stride_mask, groups);
  });
}
