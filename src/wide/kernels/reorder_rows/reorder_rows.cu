// One order of rows by all their groups, as reorder_rows_reference: six launches, nothing waits for the host.
//
// rows_pack     masks to words of 32 groups, and how many of each 128 rows execute a group
// rows_rank     the same words with the groups of each chunk of rows from the rarest to the most frequent one: places
// rows_buckets  rows by the first place that they execute, the last place first
// rows_order    the rows of a bucket by the Gray rank over the places that the fewest of them execute
// rows_words    what the sorted rows execute, what units of 64 of them do, and how many groups a tile of two units executes
// rows_items    tiles by that number, descending, ties by tile
//
// COUNT: words that a row takes, 2 to 4. CHUNK: rows of a chunk, 32 threads x 32 warps x TURNS.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define ALL 0xffffffffu
#define MAX_GROUPS 128
#define PACK_ROWS 128
#define RANK_ROWS 256
#define TILE_ROWS 128
#define THREADS 1024
#define WARPS 32
#define DIGITS 256
// Of the counters of a warp: those of one digit, eight warps apart, lie in different banks.
#define PITCH (DIGITS + 2)
#define TURNS (CHUNK / THREADS)
static_assert(CHUNK % (4 * THREADS) == 0 && CHUNK <= 32768, "digits come four to a word, positions have 16 bits");

// 256 threads: a warp packs 16 rows.
extern "C" __global__ void __launch_bounds__(256) rows_pack(const u8* __restrict__ mask, uint4* __restrict__ packed, u16* __restrict__ counts, int M, int N_G, int stride_m, int stride_g) {
  __shared__ u32 total[MAX_GROUPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < MAX_GROUPS) total[threadIdx.x] = 0;
  __syncthreads();
  u32 mine[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = 0; i < PACK_ROWS / 8; ++i) {
    const int row = blockIdx.x * PACK_ROWS + warp * (PACK_ROWS / 8) + i;
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int group = 32 * k + lane;
      const bool executes = row < M && group < N_G && mask[(long long)row * stride_m + (long long)group * stride_g];
      words[k] = __ballot_sync(ALL, executes);
      mine[k] += executes;
    }
    if (lane == 0 && row < M) packed[row] = make_uint4(words[0], words[1], words[2], words[3]);
  }
#pragma unroll
  for (int k = 0; k < COUNT; ++k) atomicAdd(&total[32 * k + lane], mine[k]);
  __syncthreads();
  if (threadIdx.x < MAX_GROUPS) counts[blockIdx.x * MAX_GROUPS + threadIdx.x] = (u16)total[threadIdx.x];
}

// Number of entries of `total` that come before one, ties by place.
__device__ __forceinline__ int place_of(const u32* total, int one, int entries) {
  int place = 0;
  for (int other = 0; other < entries; ++other) place += total[other] < total[one] || (total[other] == total[one] && other < one);
  return place;
}

__device__ __forceinline__ u32 bit_of(const uint4& words, int bit) {
  const u32 word = bit < 64 ? (bit < 32 ? words.x : words.y) : (bit < 96 ? words.z : words.w);
  return word >> (bit % 32) & 1;
}

// 256 threads, a row each; all blocks of a chunk put its groups in order by themselves. A row that executes nothing has place N_G.
extern "C" __global__ void __launch_bounds__(RANK_ROWS) rows_rank(const uint4* __restrict__ packed, const uint4* __restrict__ counts, uint4* __restrict__ places, u8* __restrict__ first, int M, int N_G) {
  __shared__ u32 total[MAX_GROUPS];
  __shared__ int rare[MAX_GROUPS];
  const int row = blockIdx.x * RANK_ROWS + threadIdx.x;
  const uint4 words = row < M ? packed[row] : make_uint4(0, 0, 0, 0);
  if (threadIdx.x < MAX_GROUPS) total[threadIdx.x] = 0;
  __syncthreads();
  const int chunk = blockIdx.x * RANK_ROWS / CHUNK, begin = chunk * (CHUNK / PACK_ROWS);
  const int end = min(begin + CHUNK / PACK_ROWS, (M + PACK_ROWS - 1) / PACK_ROWS);
  // Eight groups of 16 bits a thread.
  const int part = threadIdx.x % (MAX_GROUPS / 8);
  u32 sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 8
  for (int i = begin + threadIdx.x / (MAX_GROUPS / 8); i < end; i += RANK_ROWS / (MAX_GROUPS / 8)) {
    const uint4 found = counts[i * (MAX_GROUPS / 8) + part];
    const u32 pair[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) sum[k] += pair[k / 2] >> (k % 2 * 16) & 0xffff;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) atomicAdd(&total[8 * part + k], sum[k]);
  __syncthreads();
  if (threadIdx.x < N_G) rare[place_of(total, threadIdx.x, N_G)] = threadIdx.x;
  __syncthreads();
  if (row >= M) return;
  u32 found[4] = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
    for (int i = 0; i < min(32, N_G - 32 * k); ++i) found[k] |= bit_of(words, rare[32 * k + i]) << i;
  places[row] = make_uint4(found[0], found[1], found[2], found[3]);
  int place = N_G;
#pragma unroll
  for (int k = COUNT - 1; k >= 0; --k)
    if (found[k]) place = 32 * k + __ffs(found[k]) - 1;
  first[row] = (u8)place;
}

// One pass of a sort of up to CHUNK rows by digits of a byte; rows of equal digits keep their order. Warp w has the places from 32 w
// turns on. Afterwards counter[d] is where the rows with digit d begin. `now` and what `digit_of` reads must have been written before a
// __syncthreads; `next` may be read.
template <class Digit> __device__ __forceinline__ void sort_by_digit(int rows, const u16* now, u16* next, u16* counter, u32* sums, Digit digit_of) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int turns = (rows + THREADS - 1) / THREADS, start = warp * turns * 32 + lane;
  for (int i = thread; i < WARPS * PITCH / 2; i += THREADS) ((u32*)counter)[i] = 0;
  u32 item[TURNS], digits[TURNS / 4] = {};  // row, and its place among the warp's rows with its digit; digits, four to a word
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int at = start + 32 * turn;
    item[turn] = turn < turns && at < rows ? now[at] : 0;
  }
  __syncthreads();
  u16* mine = counter + warp * PITCH;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    if (turn < turns) {
      const bool inside = start + 32 * turn < rows;
      // Read here: all digits at once would not fit into the registers.
      const u32 digit = inside ? digit_of(item[turn]) : 0;
      digits[turn / 4] |= digit << (turn % 4 * 8);
      // The lanes with this digit, a bit at a time.
      u32 peers = __ballot_sync(ALL, inside);
#pragma unroll
      for (int bit = 1; bit < DIGITS; bit *= 2) {
        const u32 set = __ballot_sync(ALL, digit & bit);
        peers &= digit & bit ? set : ~set;
      }
      const u32 before = mine[digit];
      __syncwarp();
      if (inside && lane == __ffs(peers) - 1) mine[digit] = (u16)(before + __popc(peers));
      __syncwarp();
      item[turn] |= (before + __popc(peers & ((1u << lane) - 1))) << 16;
    }
  }
  __syncthreads();
  // Where each warp's rows with a digit begin: four threads a digit, eight warps each.
  const int digit = thread / 4, quarter = thread % 4;
  u32 own = 0;
#pragma unroll
  for (int i = 0; i < WARPS / 4; ++i) own += counter[(quarter * (WARPS / 4) + i) * PITCH + digit];
  u32 up_to = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(ALL, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  u32 whole = sums[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(ALL, whole, step);
    if (lane >= step) whole += other;
  }
  const u32 earlier = __shfl_sync(ALL, whole, warp == 0 ? 0 : warp - 1);
  u32 begin = up_to - own + (warp == 0 ? 0 : earlier);
#pragma unroll
  for (int i = 0; i < WARPS / 4; ++i) {
    u16* at = counter + (quarter * (WARPS / 4) + i) * PITCH + digit;
    const u32 found = *at;
    *at = (u16)begin;
    begin += found;
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
    if (turn < turns && start + 32 * turn < rows) next[mine[digits[turn / 4] >> (turn % 4 * 8) & (DIGITS - 1)] + (item[turn] >> 16)] = (u16)item[turn];
  __syncthreads();
}

// 1024 threads: a chunk. Rows of the chunk by bucket, and where each bucket begins; bucket b has the rows whose first place is N_G - b.
extern "C" __global__ void __launch_bounds__(THREADS) rows_buckets(const u8* __restrict__ first, u16* __restrict__ listed, int* __restrict__ begins, int M, int N_G) {
  extern __shared__ __align__(16) char shared[];
  u16* place = (u16*)shared;                 // [2][CHUNK]
  u16* counter = place + 2 * CHUNK;          // [WARPS][PITCH]
  u8* bucket = (u8*)(counter + WARPS * PITCH);  // [CHUNK]
  __shared__ u32 sums[WARPS];
  const int from = blockIdx.x * CHUNK, rows = min(M - from, CHUNK);
  for (int i = threadIdx.x; i < rows; i += THREADS) place[i] = (u16)i, bucket[i] = (u8)(N_G - first[from + i]);
  __syncthreads();
  sort_by_digit(rows, place, place + CHUNK, counter, sums, [&](u32 row) { return (u32)bucket[row]; });
  for (int i = threadIdx.x; i < rows; i += THREADS) listed[from + i] = place[CHUNK + i];
  if (threadIdx.x <= N_G + 1) begins[blockIdx.x * (MAX_GROUPS + 2) + threadIdx.x] = threadIdx.x == N_G + 1 ? rows : counter[threadIdx.x];
}

// Bit i of lane r becomes bit r of lane i.
__device__ __forceinline__ u32 transposed(u32 bits, int lane) {
  u32 low = 0x0000ffffu;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const u32 other = __shfl_xor_sync(ALL, bits, step), keep = lane & step ? ~low : low;
    bits = (bits & keep) | (__funnelshift_r(other, other, lane & step ? step : 32 - step) & ~keep);
    low ^= low << (step / 2);
  }
  return bits;
}

// 1024 threads: a bucket of a chunk.
extern "C" __global__ void __launch_bounds__(THREADS) rows_order(const uint4* __restrict__ places, const u16* __restrict__ listed, const int* __restrict__ begins, int* __restrict__ index, int N_G, int sorted) {
  extern __shared__ __align__(16) char shared[];
  u32* key = (u32*)shared;                                  // [CHUNK]
  u16* place = (u16*)(key + CHUNK);                         // [2][CHUNK]
  u16* counter = place + 2 * CHUNK;                         // [WARPS][PITCH]
  __shared__ u32 sums[WARPS], total[MAX_GROUPS];
  __shared__ int rare[MAX_GROUPS], picks[COUNT + 1];
  __shared__ uint2 pick[32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunk = blockIdx.x / (N_G + 1), bucket = blockIdx.x % (N_G + 1), own = N_G - bucket;
  const int from = begins[chunk * (MAX_GROUPS + 2) + bucket], rows = begins[chunk * (MAX_GROUPS + 2) + bucket + 1] - from;
  if (rows == 0) return;
  listed += chunk * CHUNK + from;
  places += (long long)chunk * CHUNK;
  index += chunk * CHUNK + from;
  if (rows == 1) {
    if (thread == 0) index[0] = chunk * CHUNK + listed[0];
    return;
  }
  if (thread < MAX_GROUPS) total[thread] = 0;
  __syncthreads();
  u32 mine[4] = {0, 0, 0, 0};
  for (int begin = warp * 32; begin < rows; begin += THREADS) {
    const uint4 words = begin + lane < rows ? places[listed[begin + lane]] : make_uint4(0, 0, 0, 0);
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < COUNT; ++k) mine[k] += __popc(transposed(word[k], lane));
  }
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
    if (warp * 32 < rows) atomicAdd(&total[32 * k + lane], mine[k]);
  __syncthreads();
  // All rows of a bucket are alike at places up to its own.
  if (thread <= own && thread < N_G) total[thread] = ALL;
  __syncthreads();
  if (thread < N_G) rare[place_of(total, thread, N_G)] = thread;
  __syncthreads();
  // The bits of a key by the word that they come from: how far to turn it, and where the bit goes.
  if (thread < sorted) {
    const int bit = rare[thread], to = sorted - 1 - thread;
    int at = 0;
    for (int k = 0; k < sorted; ++k) at += rare[k] / 32 < bit / 32 || (rare[k] / 32 == bit / 32 && k < thread);
    pick[at] = make_uint2(bit - to & 31, 1u << to);
  }
  if (thread <= COUNT) {
    int before = 0;
    for (int k = 0; k < sorted; ++k) before += rare[k] / 32 < thread;
    picks[thread] = before;
  }
  __syncthreads();
  for (int i = thread; i < rows; i += THREADS) {
    const uint4 words = places[listed[i]];
    const u32 word[4] = {words.x, words.y, words.z, words.w};
    u32 found = 0;
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
      for (int at = picks[k]; at < picks[k + 1]; ++at) found |= __funnelshift_r(word[k], word[k], pick[at].x) & pick[at].y;
    // The parity of each bit and those above it; the bucket's own place, which all execute, turns it.
#pragma unroll
    for (int step = 1; step < 32; step *= 2) found ^= found >> step;
    key[i] = ~found & ALL >> (32 - sorted);
    place[i] = (u16)i;
  }
  __syncthreads();
  // What lies below the places that differ within the bucket follows from the bits above.
  const int same = sorted - max(0, min(sorted, N_G - 1 - own)), begin = same / 8, end = same == sorted ? begin : (sorted + 7) / 8;
  for (int pass = begin; pass < end; ++pass)
    sort_by_digit(rows, place + (pass - begin) % 2 * CHUNK, place + (1 - (pass - begin) % 2) * CHUNK, counter, sums, [&](u32 row) { return key[row] >> (8 * pass) & (DIGITS - 1); });
  for (int i = thread; i < rows; i += THREADS) index[i] = chunk * CHUNK + listed[place[(end - begin) % 2 * CHUNK + i]];
}

// 128 threads: a tile.
extern "C" __global__ void __launch_bounds__(TILE_ROWS) rows_words(const uint4* __restrict__ packed, const int* __restrict__ index, u32* __restrict__ words, u32* __restrict__ unions, int* __restrict__ cost, int M) {
  __shared__ u32 parts[TILE_ROWS / 32][COUNT];
  const int at = blockIdx.x * TILE_ROWS + threadIdx.x, warp = threadIdx.x / 32;
  const uint4 row = at < M ? packed[index[at]] : make_uint4(0, 0, 0, 0);
  const u32 word[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    if (at < M) words[(long long)k * M + at] = word[k];
    const u32 any = __reduce_or_sync(ALL, word[k]);
    if (threadIdx.x % 32 == 0) parts[warp][k] = any;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int executed = 0;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const u32 low = parts[0][k] | parts[1][k], high = parts[2][k] | parts[3][k];
      unions[(2 * blockIdx.x) * COUNT + k] = low;
      unions[(2 * blockIdx.x + 1) * COUNT + k] = high;
      executed += __popc(low | high);
    }
    cost[blockIdx.x] = executed;
  }
}

// 256 threads, a tile each.
extern "C" __global__ void __launch_bounds__(256) rows_items(const int* cost, int* items, int tiles) {
  __shared__ int others[256];
  const int tile = blockIdx.x * 256 + threadIdx.x, mine = tile < tiles ? cost[tile] : 0;
  int place = 0;
  for (int begin = 0; begin < tiles; begin += 256) {
    __syncthreads();
    if (begin + (int)threadIdx.x < tiles) others[threadIdx.x] = cost[begin + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < min(256, tiles - begin); ++i) place += others[i] > mine || (others[i] == mine && begin + i < tile);
  }
  if (tile < tiles) items[place] = tile;
}
