// An experiment, not part of the package: which half of the second-level cache is next to which multiprocessor, which
// half owns which 4 KB of an allocation, and what reductions and loads reach within a half and across. operators/gemm-k.md.
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 sm_number() {
  u32 id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}
// Clocks of one addition of zero: it is made where the line is owned.
__device__ __forceinline__ u32 latency(u32* line) {
  u32 begin, end, value;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(begin)::"memory");
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 0;" : "=r"(value) : "l"(line) : "memory");
  asm volatile("add.u32 %0, %1, 0;" : "=r"(value) : "r"(value) : "memory");
  if (value == 0xffffffffu) line[1] = value;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(end)::"memory");
  return end - begin;
}

// One program a multiprocessor, one after the other, so that nobody waits for another: clocks of 64 additions, by lines of one chunk.
extern "C" __global__ void multiprocessors(u32* chunk, u32* turn, u32* out) {
  if (threadIdx.x != 0) return;
  while (atomicAdd(turn, 0) != blockIdx.x) __nanosleep(200);
  u32 sum = 0;
  for (int i = 0; i < 32; ++i) latency(chunk + i * 32);
  for (int i = 0; i < 64; ++i) sum += latency(chunk + (i & 31) * 32);
  out[sm_number()] = sum;
  __threadfence();
  atomicAdd(turn, 1);
}

// Programs on the multiprocessors of side 0 take one chunk of 4 KB after the other: the least clocks of eight additions.
extern "C" __global__ void chunks(char* base, u32 number, const u32* side_of, u32* next, u32* out) {
  if (side_of[sm_number()] != 0 || (threadIdx.x & 31) != 0) return;
  for (;;) {
    const u32 c = atomicAdd(next, 1);
    if (c >= number) return;
    u32 least = 0xffffffffu;
    for (int i = 0; i < 8; ++i) least = min(least, latency((u32*)(base + (u64)c * 4096 + ((c * 5 + 1) & 31) * 128)));
    out[c] = least;
  }
}

// `pairs` pairs of chunks, in each of which owner[pair] tells the side of the first chunk. Warps below `adders` add to
// chunks, others read. `where`: 0 own side, 1 the other, 2 both in turns. Everything is done `rounds` times by each warp.
extern "C" __global__ void __launch_bounds__(1024, 1)
bandwidth(float* sums, u32 sum_pairs, const u32* sum_owner, u32 where_sums, const float* data, u32 data_pairs, const u32* data_owner, u32 where_data, const u32* side_of, u32 adders, u32 rounds, float* sink) {
  const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = side_of[sm_number()];
  const bool adds = warp < adders;
  const u32 pairs = adds ? sum_pairs : data_pairs, where = adds ? where_sums : where_data;
  const u32* owner = adds ? sum_owner : data_owner;
  char* base = adds ? (char*)sums : (char*)data;
  u32 pair = (u32)(((u64)(blockIdx.x * 32 + warp) * 2654435761u) % pairs);
  float4 got = make_float4(0, 0, 0, 0);
  for (u32 i = 0; i < rounds; ++i) {
    u32 wanted = where == 0 ? side : where == 1 ? side ^ 1 : (i & 1);
    char* at = base + (u64)pair * 8192 + ((wanted ^ owner[pair]) & 1) * 4096 + lane * 16;
    if (adds) {
#pragma unroll
      for (int k = 0; k < 8; ++k)
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at + k * 512), "f"(1.f), "f"(1.f), "f"(1.f), "f"(1.f) : "memory");
    } else {
      float4 v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k)
        asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[k].x), "=f"(v[k].y), "=f"(v[k].z), "=f"(v[k].w) : "l"(at + k * 512) : "memory");
#pragma unroll
      for (int k = 0; k < 8; ++k) got.x += v[k].x, got.y += v[k].y, got.z += v[k].z, got.w += v[k].w;
    }
    pair += 32 * 132 + 1;
    while (pair >= pairs) pair -= pairs;
  }
  if (got.x + got.y + got.z + got.w == 1.2345f) sink[0] = got.x;
}

// Sums as down_sorted.cu leaves them with SIDES to rows of bfloat16; a program for each 8 KB, 256 threads.
extern "C" __global__ void __launch_bounds__(256)
drain(const float* __restrict__ sums, unsigned short* __restrict__ out, u32 rows, u32 columns, u32 width, u32 mask, const u32* __restrict__ pages) {
  const u32 quads = (rows + 3) / 4, pair = blockIdx.x, group = pair / quads, row = (pair % quads) * 4 + threadIdx.x / 64;
  const u32 owner = (__popc(pair & mask) ^ (pages[pair >> 13] >> ((pair >> 8) & 31))) & 1;
#pragma unroll
  for (u32 half = 0; half < 2; ++half) {
    const float4 v = __ldcs((const float4*)(sums + (u64)pair * 2048 + half * 1024) + threadIdx.x);
    const u32 slab = group / (width / 256) * 2 + (half ^ owner), column = slab * width + group % (width / 256) * 256 + threadIdx.x % 64 * 4;
    uint2 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.x) : "f"(v.y), "f"(v.x));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.y) : "f"(v.w), "f"(v.z));
    if (row < rows) *(uint2*)(out + (u64)row * columns + column) = packed;
  }
}
