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
#define TURNS (CHUNK / THREADS)
static_assert(CHUNK % (4 * THREADS) == 0 && CHUNK <= 65536, "digits come four to a word, positions have 16 bits");

// 256 threads: a warp packs 16 rows.
extern "C" __global__ void __launch_bounds__(256) rows_pack(const u8* mask, uint4* packed, u16* counts, int M, int N_G, int stride_m, int stride_g) {
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
extern "C" __global__ void __launch_bounds__(RANK_ROWS) rows_rank(const uint4* packed, const u16* counts, uint4* places, u8* first, int M, int N_G) {
  __shared__ u32 total[MAX_GROUPS];
  __shared__ int rare[MAX_GROUPS];
  const int group = threadIdx.x % MAX_GROUPS;
  if (threadIdx.x < MAX_GROUPS) total[threadIdx.x] = 0, rare[threadIdx.x] = 0;
  __syncthreads();
  const int chunk = blockIdx.x * RANK_ROWS / CHUNK, begin = chunk * (CHUNK / PACK_ROWS);
  const int end = min(begin + CHUNK / PACK_ROWS, (M + PACK_ROWS - 1) / PACK_ROWS);
  u32 sum = 0;
#pragma unroll 8
  for (int i = begin + threadIdx.x / MAX_GROUPS; i < end; i += RANK_ROWS / MAX_GROUPS) sum += counts[i * MAX_GROUPS + group];
  atomicAdd(&total[group], sum);
  __syncthreads();
  if (threadIdx.x < N_G) rare[place_of(total, group, N_G)] = group;
  __syncthreads();
  const int row = blockIdx.x * RANK_ROWS + threadIdx.x;
  if (row >= M) return;
  const uint4 words = packed[row];
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
  for (int i = thread; i < WARPS * DIGITS / 2; i += THREADS) ((u32*)counter)[i] = 0;
  __syncthreads();
  u16* mine = counter + warp * DIGITS;
  u32 item[TURNS], digits[TURNS / 4];  // row, and its place among the warp's rows with its digit; digits, four to a word
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    if (turn < turns) {
      const bool inside = start + 32 * turn < rows;
      const u32 row = inside ? now[start + 32 * turn] : 0;
      const u32 digit = inside ? digit_of(row) : DIGITS;
      const u32 peers = __match_any_sync(ALL, digit);
      const u32 before = inside ? mine[digit] : 0;
      __syncwarp();
      if (inside && lane == __ffs(peers) - 1) mine[digit] = (u16)(before + __popc(peers));
      __syncwarp();
      item[turn] = row | (before + __popc(peers & ((1u << lane) - 1))) << 16;
      if (turn % 4 == 0) digits[turn / 4] = 0;
      digits[turn / 4] |= (digit & (DIGITS - 1)) << (turn % 4 * 8);
    }
  }
  __syncthreads();
  // Where each warp's rows with a digit begin: four threads a digit, eight warps each.
  const int digit = thread / 4, quarter = thread % 4;
  u32 own = 0;
#pragma unroll
  for (int i = 0; i < WARPS / 4; ++i) own += counter[(quarter * (WARPS / 4) + i) * DIGITS + digit];
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
    u16* at = counter + (quarter * (WARPS / 4) + i) * DIGITS + digit;
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
extern "C" __global__ void __launch_bounds__(THREADS) rows_buckets(const u8* first, u16* listed, int* begins, int M, int N_G) {
  extern __shared__ char shared[];
  u16* place = (u16*)shared;                 // [2][CHUNK]
  u16* counter = place + 2 * CHUNK;          // [WARPS][DIGITS]
  u8* bucket = (u8*)(counter + WARPS * DIGITS);  // [CHUNK]
  __shared__ u32 sums[WARPS];
  const int from = blockIdx.x * CHUNK, rows = min(M - from, CHUNK);
  for (int i = threadIdx.x; i < rows; i += THREADS) place[i] = (u16)i, bucket[i] = (u8)(N_G - first[from + i]);
  __syncthreads();
  sort_by_digit(rows, place, place + CHUNK, counter, sums, [&](u32 row) { return (u32)bucket[row]; });
  for (int i = threadIdx.x; i < rows; i += THREADS) listed[from + i] = place[CHUNK + i];
  // CHUNK itself does not fit into the 16 bits of 65536 rows.
  if (threadIdx.x <= N_G + 1) begins[blockIdx.x * (MAX_GROUPS + 2) + threadIdx.x] = threadIdx.x == N_G + 1 ? rows : counter[threadIdx.x];
}

// Bit i of lane r becomes bit r of lane i.
__device__ __forceinline__ u32 transposed(u32 bits, int lane) {
  u32 low = 0x0000ffffu;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const u32 other = __shfl_xor_sync(ALL, bits, step);
    bits = lane & step ? (bits & ~low) | (other >> step & low) : (bits & low) | (other << step & ~low);
    low ^= low << (step / 2);
  }
  return bits;
}

// 1024 threads: a bucket of a chunk.
extern "C" __global__ void __launch_bounds__(THREADS) rows_order(const uint4* places, const u16* listed, const int* begins, int* index, int N_G, int sorted) {
  extern __shared__ char shared[];
  u32* key = (u32*)shared;                                  // [CHUNK]
  u16* place = (u16*)(key + CHUNK);                         // [2][CHUNK]
  u16* counter = place + 2 * CHUNK;                         // [WARPS][DIGITS]
  __shared__ u32 sums[WARPS], total[MAX_GROUPS];
  __shared__ int rare[MAX_GROUPS];
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
  for (int i = thread; i < rows; i += THREADS) {
    const uint4 words = places[listed[i]];
    u32 found = 0, parity = 1;
    for (int k = 0; k < sorted; ++k) {
      parity ^= bit_of(words, rare[k]);
      found = found * 2 + parity;
    }
    key[i] = found;
    place[i] = (u16)i;
  }
  __syncthreads();
  const int passes = (sorted + 7) / 8;
  for (int pass = 0; pass < passes; ++pass)
    sort_by_digit(rows, place + pass % 2 * CHUNK, place + (1 - pass % 2) * CHUNK, counter, sums, [&](u32 row) { return key[row] >> (8 * pass) & (DIGITS - 1); });
  for (int i = thread; i < rows; i += THREADS) index[i] = chunk * CHUNK + listed[place[passes % 2 * CHUNK + i]];
}

// 128 threads: a tile.
extern "C" __global__ void __launch_bounds__(TILE_ROWS) rows_words(const uint4* packed, const int* index, u32* words, u32* unions, int* cost, int M) {
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
