// What the kernels for Hopper (sm_90a) share; put in front of each of them. FLOAT16 chooses halves, else they are bfloat16.
// With INT8 both operands are int8, sums are exact int32, and scales of rows and output channels are applied at the end.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#if FLOAT16
#define HALF "f16"
#else
#define HALF "bf16"
#endif
#if INT8
typedef signed char Element;
typedef int Sum;
#define KIND "k32.s32.s8.s8"
#define FLAGS "p"
#define SUM "+r"
#else
typedef u16 Element;
typedef float Sum;
#define KIND "k16.f32." HALF "." HALF
#define FLAGS "p, 1, 1, 0, 0"
#define SUM "+f"
#endif
constexpr u32 LINE = 128;  // bytes of a row or a weight row in one stage, four products
constexpr int BK = LINE / sizeof(Element), CHUNK = 16 / sizeof(Element);

// Of a thread; they start with 168 each, and together may have no more: a warp group that asks for them waits for ever.
#define PRODUCER_REGISTERS 72
#define CONSUMER_REGISTERS 216
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * 168, "more registers than the launch has");
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred p;\nW%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D%=;\nbra W%=;\nD%=:\n}" ::"r"(bar),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}
__device__ __forceinline__ void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// 64 rows x 256 or 128 columns: both operands in shared memory, 32 bytes of each row.
#define R64 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R128 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F8(i) SUM(d[i]), SUM(d[i + 1]), SUM(d[i + 2]), SUM(d[i + 3]), SUM(d[i + 4]), SUM(d[i + 5]), SUM(d[i + 6]), SUM(d[i + 7])
#define F32(i) F8(i), F8(i + 8), F8(i + 16), F8(i + 24)
template <int N> __device__ __forceinline__ void wgmma(Sum (&d)[128], u64 a, u64 b, int scale) {
  if constexpr (N == 256)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256" KIND " {" R128 "}, %128, %129, " FLAGS ";\n}"
                 : F32(0), F32(32), F32(64), F32(96)
                 : "l"(a), "l"(b), "r"(scale));
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128" KIND " {" R64 "}, %64, %65, " FLAGS ";\n}"
                 : F32(0), F32(32)
                 : "l"(a), "l"(b), "r"(scale));
}

struct __align__(64) Map {
  char opaque[128];
};
// A box of a tensor map, counted by the barrier.
__device__ __forceinline__ void load_box(u32 to, const Map& map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(k), "r"(row),
               "r"(bar) : "memory");
}

// Volatile: a load that may be delayed until its value is needed hides nothing.
__device__ __forceinline__ int load_int(const int* p) {
  int v;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// Equal in all lanes, which the compiler must know where products depend on it.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xffffffff, v, 0); }

__device__ __forceinline__ float widened(const u16* p) {
  float v;
  u16 bits;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(bits) : "l"(p));
#if FLOAT16
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
#else
  v = __uint_as_float((u32)bits << 16);
#endif
  return v;
}
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 both;
  asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

#if INT8
// Scales of rows lane / 4 and + 8 of a warp's 16, of which lane r holds that of row r.
struct RowScales {
  float of[2];
  __device__ RowScales(float own, int lane) : of{__shfl_sync(0xffffffff, own, lane / 4), __shfl_sync(0xffffffff, own, lane / 4 + 8)} {}
};
// Those of two neighbouring output channels. Not `.nc`: all of a tile's would be loaded at once, for which there are no registers.
__device__ __forceinline__ float2 load_pair(const float* p) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
#endif

constexpr u32 STORED_LINE = 128 * 2;  // bytes of a row of half a tile
// Store a warp's 16 rows of 256 sums, each where `target` of its lane says (-1: nowhere), through shared memory 128 columns
// at a time: a lane stores 16 bytes, 16 lanes the same row. Without `used` sums are zero.
__device__ __forceinline__ void store_rows(Sum (&acc)[128], int used, u32 buffer, int lane, int first_column, int target, const u16* bias, u16* out,
                                           int stride_out
#if INT8
                                           ,
                                           RowScales row_scales, const float* scale
#endif
) {
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    __syncwarp();  // what was there has been read out
    // 8 columns of rows lane / 4 and + 8 are acc[4 c ..]. Sixteen bytes move by the row's number against bank conflicts.
    const u32 put = buffer + (lane & 15) * STORED_LINE + (((lane >> 4) ^ (lane & 7)) * 16);
    const int column = first_column + piece * 128;
#pragma unroll
    for (int c = 0; c < 16; c += 2) {
      u32 part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q = 64 * piece + 4 * c + 2 * i;
        float low = used ? acc[q] : 0, high = used ? acc[q + 1] : 0;
        const int at = column + (c + (i >> 1)) * 8 + (lane & 3) * 2;
#if INT8
        const float2 factor = load_pair(scale + at);
        low *= row_scales.of[i & 1] * factor.x;
        high *= row_scales.of[i & 1] * factor.y;
#endif
#if HAS_BIAS
        low += widened(bias + at);
        high += widened(bias + at + 1);
#endif
        part[i] = packed(low, high);
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(put ^ (c * 16)), "r"(part[0]), "r"(part[1]), "r"(part[2]), "r"(part[3])
                   : "memory");
    }
    __syncwarp();
    u16* const to = out + column + lane % 16 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = 2 * i + lane / 16;
      const int target_row = __shfl_sync(0xffffffff, target, r);
      u32 v0, v1, v2, v3;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v0), "=r"(v1), "=r"(v2), "=r"(v3)
                   : "r"(buffer + r * STORED_LINE + ((lane % 16 ^ (r & 7)) * 16)) : "memory");
      if (target_row >= 0)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + (u64)target_row * (u32)stride_out), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
    }
  }
}
