// Products of one to 32 rows with int8 weights, for sm_80 and newer: weights go from memory to registers, and tensor cores add up.
//
// A warp owns 16 channels (of gate and up 16 each; of more than 16 rows 32, since each reads all rows) and shares out the inputs with
// others of its block, 64 at a time. A block of several such teams reads rows from memory once, the others find them in its cache. Of such a piece a lane reads 16 bytes of two weight rows, and turns them into halves, unless the rows are
// int8, too; which inputs a product takes together does not matter, so the rows are read in the same order, and nothing moves between
// lanes. A conversion instruction would take four times as long as the two or three here.
//
// Compiled for each combination of: SUMS (groups lie along the inputs, else along the channels, or there are none); GATED; ACTIVATION 0
// none, 1 silu, 2 gelu_tanh, 3 relu2; HAS_MASK, ZERO_SKIPPED, HAS_BIAS, HAS_UP_BIAS; FLOAT16 (else bfloat16); GROUP (channels of a group,
// where groups lie along the inputs); TILES (of eight rows: 1, 2 or 4); WARPS of a block, in TEAMS; INT8 (rows are int8 and have scales); ROTATES
// (rows are multiplied by a Hadamard matrix first, in blocks of 16 or 64 channels; 0 = they are not). Parameters are described at
// `gemv_mn` and `gemv_k` in op.py.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int THREADS = 32 * WARPS, CHANNELS = 16;
constexpr int PIECE = 64;                           // inputs that a warp multiplies at a time
constexpr int PARTS = GATED || TILES > 2 ? 2 : 1;   // times 16 weight rows: of two matrices, or neighbours
constexpr int OUTPUTS = GATED ? CHANNELS : CHANNELS * PARTS;   // of a team
static_assert(TEAMS == 1 || !HAS_MASK, "a team that skips its channels would leave the others waiting");
constexpr int AHEAD = PARTS == 2 ? 2 : 4;           // pieces whose weights are under way
constexpr int ROUND = TILES < 2 ? 1 : 2;            // tiles that are added up at a time
constexpr int TEAM = WARPS / TEAMS;
constexpr int TURNS = (OUTPUTS * 8 * ROUND + 32 * TEAM - 1) / (32 * TEAM);
constexpr int ROW_WORDS = INT8 ? 1 : 2;             // times 16 bytes of a row make up a lane's share of a piece
constexpr int MAX_GROUPS = 1024;
#if INT8
typedef signed char Element;
typedef int Sum;
#else
typedef u16 Element;
typedef float Sum;
#endif

#ifndef EMULATED
struct Words {
  u32 of[4];
};
#if FLOAT16
#define HALF "f16"
#else
#define HALF "bf16"
#endif
// Read once: weights shall not displace the rows in the first-level cache.
__device__ __forceinline__ Words load_weights(const signed char* p) {
  Words v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.of[0]), "=r"(v.of[1]), "=r"(v.of[2]), "=r"(v.of[3]) : "l"(p));
  return v;
}
__device__ __forceinline__ Words load_row(const Element* p) {
  Words v;
  asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.of[0]), "=r"(v.of[1]), "=r"(v.of[2]), "=r"(v.of[3]) : "l"(p));
  return v;
}
// 16 channels times 8 rows, over 16 inputs.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same of int8, over 32 inputs.
__device__ __forceinline__ void multiply(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// x + y of two halves each.
__device__ __forceinline__ u32 added(u32 x, u32 y) {
  u32 sum;
#if FLOAT16
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(0x3F803F80u), "r"(y));
#endif
  return sum;
}
__device__ __forceinline__ float as_float(u16 bits) {
#if FLOAT16
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
#else
  return __uint_as_float((u32)bits << 16);
#endif
}
__device__ __forceinline__ u16 as_half(float v) {
  u16 bits;
  asm("cvt.rn." HALF ".f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 both;
  asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
// Of 8 x 8 halves, of which lane 4 r + c / 2 holds two of row r, those of column r.
__device__ __forceinline__ u32 transposed(u32 two) {
  u32 found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(two));
  return found;
}
__device__ __forceinline__ float exponential(float v) { return __expf(v); }
#endif

// Two of four int8 values as halves: exact. SELECT picks them.
template <u32 SELECT> __device__ __forceinline__ u32 converted(u32 word) {
#if FLOAT16
  // 1024 + 128 + value, whose last eight bits are the value's with the sign turned over.
  return added(__byte_perm(word ^ 0x80808080u, 0x64646464u, SELECT), 0xE480E480u);
#else
  // 128 + value for values from 0 on, and 256 + 2 (value + 128) below, where the last bit of the exponent is the sign: what is taken
  // away is 128 or 256, and without that bit the first part is 128 + the seven others.
  const u32 both = __byte_perm(word, 0x43434343u, SELECT);
  return added(both & 0xFF7FFF7Fu, (both & 0xFF80FF80u) ^ 0x80008000u);
#endif
}
__device__ __forceinline__ float activate(float v) {
#if ACTIVATION == 1
  return v / (1.0f + exponential(-v));
#elif ACTIVATION == 2
  // 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
  return v / (1.0f + exponential(-1.5957691216057308f * (v + 0.044715f * v * v * v)));
#elif ACTIVATION == 3
  v = v < 0.0f ? 0.0f : v;  // a NaN stays one
  return v * v;
#else
  return v;
#endif
}

// The Hadamard matrix as a fragment: entry (i, j) has the sign of the number of bits that i and j share. Of input 16 a + 4 s + b of a
// piece, s is the product's turn, and a and b make up its place in the product, the same for rows and columns.
struct Rotation {
  u32 of[4];
  __device__ explicit Rotation(int lane) {
    constexpr u32 SIZE = FLOAT16 ? (ROTATES == 64 ? 0x3000 : 0x3400) : (ROTATES == 64 ? 0x3E00 : 0x3E80);  // 1/8 or 1/4
    const int row = lane >> 3, column = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of[i] = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int shared = ((lane >> 2 & 1) + i % 2 * 2) & (e + i / 2 * 2);
        const u32 odd = (__popc(shared) + (ROTATES == 64 ? __popc(row & column) : 0)) & 1;
        if (ROTATES == 64 || row == column) of[i] |= (SIZE | odd << 15) << 16 * e;
      }
    }
  }
  // A piece of eight rows, as a product reads it.
  __device__ __forceinline__ void turn(Words (&rows)[2]) const {
    Words found[2];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      float d[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u32 sign = ((s & k) == 1 || (s & k) == 2) ? 0x80008000u : 0;
        multiply(d, of[0] ^ sign, of[1] ^ sign, of[2] ^ sign, of[3] ^ sign, rows[k / 2].of[k % 2 * 2], rows[k / 2].of[k % 2 * 2 + 1]);
      }
      found[s / 2].of[s % 2 * 2] = transposed(packed(d[0], d[1]));
      found[s / 2].of[s % 2 * 2 + 1] = transposed(packed(d[2], d[3]));
    }
    rows[0] = found[0];
    rows[1] = found[1];
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, WARPS > 8 ? 1 : TILES > 1 || ROTATES ? 2 : 3)
gemv_int8(const Element* __restrict__ x, const signed char* __restrict__ weight, const signed char* __restrict__ up_weight, const u16* __restrict__ bias,
          const u16* __restrict__ up_bias, const float* __restrict__ scale, const float* __restrict__ up_scale, const float* __restrict__ x_scale, const u8* __restrict__ mask,
          u16* __restrict__ out, int M, int N, int K, int stride_x, int stride_w, int stride_up, int stride_mask, int groups) {
  __shared__ Sum sums[WARPS][PARTS * ROUND][4][32];
  __shared__ u16 list[SUMS ? MAX_GROUPS : 1];
  __shared__ u32 votes[WARPS];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  // Written so that one team costs no register.
  const int team = TEAMS > 1 ? warp / TEAM : 0, member = TEAMS > 1 ? warp % TEAM : warp, own = TEAMS > 1 ? thread % (32 * TEAM) : thread;
  const int first = (blockIdx.x * TEAMS + team) * OUTPUTS;
  int pieces = K / PIECE;
  if (SUMS) {
    // The groups that some row executes, in order.
    int count = 0;
    for (int start = 0; start < groups; start += THREADS) {
      const int group = start + thread;
      bool executes = false;
      for (int row = 0; row < M; ++row) executes |= group < groups && mask[row * stride_mask + group];
      const u32 vote = __ballot_sync(0xffffffff, executes);
      if (lane == 0) votes[warp] = vote;
      __syncthreads();
      int place = count + __popc(vote & ((1u << lane) - 1));
      for (int w = 0; w < WARPS; ++w) {
        const int found = __popc(votes[w]);
        place += w < warp ? found : 0;
        count += found;
      }
      if (executes) list[place] = (u16)group;
      __syncthreads();
    }
    pieces = count * (GROUP / PIECE);
  } else if (HAS_MASK) {
    const int group = first / (N / groups);
    bool executes = false;
    for (int row = 0; row < M; ++row) executes |= mask[row * stride_mask + group] != 0;
    if (!executes) {
      if (ZERO_SKIPPED)
        for (int i = own; i < OUTPUTS * M; i += 32 * TEAM) out[(i / OUTPUTS) * N + first + i % OUTPUTS] = 0;
      return;
    }
  }
  // Fragments of products: lane / 4 is a channel (and 8 more) and a row, lane % 4 where the inputs of a piece begin.
  const int inner = lane >> 2, begin = (lane & 3) * 16;
  const signed char* from[PARTS];
  from[0] = weight + (long long)(first + inner) * stride_w + begin;
  if (PARTS == 2) from[PARTS - 1] = GATED ? up_weight + (long long)(first + inner) * stride_up + begin : from[0] + (long long)CHANNELS * stride_w;
  const int down[2] = {8 * stride_w, 8 * (GATED ? stride_up : stride_w)};
  Sum total[PARTS * TILES][4] = {};
#if ROTATES
  const Rotation rotation(lane);
#endif
#pragma unroll 1
  for (int start = member; start < pieces; start += TEAM * AHEAD) {
    Words weights[AHEAD][PARTS][2];
    int at[AHEAD], group[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      // Beyond the last piece it is read again, and multiplied by zeros.
      const int piece = min(start + a * TEAM, pieces - 1);
      group[a] = SUMS ? list[piece / (GROUP / PIECE)] : 0;
      at[a] = SUMS ? group[a] * GROUP + piece % (GROUP / PIECE) * PIECE : piece * PIECE;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        weights[a][p][0] = load_weights(from[p] + at[a]);
        weights[a][p][1] = load_weights(from[p] + at[a] + down[p]);
      }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      Words rows[TILES][ROW_WORDS];
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const int row = inner + 8 * t;
        bool counts = row < M && start + a * TEAM < pieces;
        // Of a group that a row skips it may hold anything.
        if (SUMS && counts && M > 1) counts = mask[row * stride_mask + group[a]] != 0;
        const Element* const p = x + (long long)row * stride_x + at[a] + begin;
        rows[t][0] = rows[t][ROW_WORDS - 1] = {};
        if (counts) {
          rows[t][0] = load_row(p);
          if (ROW_WORDS == 2) rows[t][ROW_WORDS - 1] = load_row(p + 8);
        }
#if ROTATES
        rotation.turn(rows[t]);
#endif
      }
#if INT8
#pragma unroll
      for (int s = 0; s < 4; s += 2)
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          const Words &low = weights[a][p][0], &high = weights[a][p][1];
#pragma unroll
          for (int t = 0; t < TILES; ++t) multiply(total[p * TILES + t], low.of[s], high.of[s], low.of[s + 1], high.of[s + 1], rows[t][0].of[s], rows[t][0].of[s + 1]);
        }
#else
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          const u32 low = weights[a][p][0].of[s], high = weights[a][p][1].of[s];
          const u32 a0 = converted<0x4140>(low), a1 = converted<0x4140>(high), a2 = converted<0x4342>(low), a3 = converted<0x4342>(high);
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            const Words& part = rows[t][s / 2];
            multiply(total[p * TILES + t], a0, a1, a2, a3, part.of[s % 2 * 2], part.of[s % 2 * 2 + 1]);
          }
        }
#endif
    }
  }
#pragma unroll
  for (int begun = 0; begun < TILES; begun += ROUND) {
    if (begun > 0) __syncthreads();
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int t = 0; t < ROUND; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[warp][p * ROUND + t][i][lane] = total[p * TILES + begun + t][i];
    __syncthreads();
    // A thread finishes a channel of a row: where its sum lies in a fragment is fixed.
    for (int turn = 0; turn < TURNS; ++turn) {
      const int one = own + turn * 32 * TEAM;
      if (one >= OUTPUTS * min(8 * ROUND, M - 8 * begun)) break;
      const int channel = one % OUTPUTS, place = one / OUTPUTS, row = 8 * begun + place;
      const int owner = (channel & 7) * 4 + (row & 7) / 2, slot = (channel >> 3 & 1) * 2 + (row & 1), tile = place >> 3;
      float value[2];
#pragma unroll
      for (int p = 0; p < (GATED ? 2 : 1); ++p) {
        const int part = GATED ? p : channel / CHANNELS;
        Sum sum = 0;
        for (int w = 0; w < TEAM; ++w) sum += sums[team * TEAM + w][part * ROUND + tile][slot][owner];
        value[p] = (float)sum;
        if (INT8) value[p] *= x_scale[row];
      }
      const int to = first + channel;
      value[0] *= scale[to];
      if (HAS_BIAS) value[0] += as_float(bias[to]);
      value[0] = activate(value[0]);
      if (GATED) {
        value[1] *= up_scale[to];
        if (HAS_UP_BIAS) value[1] += as_float(up_bias[to]);
        value[0] *= value[1];
      }
      if (ZERO_SKIPPED && HAS_MASK && !SUMS && !mask[row * stride_mask + first / (N / groups)]) value[0] = 0.0f;
      out[(long long)row * N + to] = as_half(value[0]);
    }
  }
}
