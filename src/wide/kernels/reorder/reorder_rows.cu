// One order of rows by all their groups, as reorder_rows_reference: five launches, nothing waits for the host.
//
// rows_pack     masks to words of 32 groups, and how many of each 128 rows execute a group
// rows_rank     the same words with the groups of each chunk of rows from the rarest to the most frequent one (places), and the bucket
//               of each row: its first place, the last place first
// rows_order    finds the rows of a bucket and sorts them by the Gray rank over the places that the fewest of them execute
// rows_words    what the sorted rows execute, what units of 64 of them do, and how many groups a tile of two units executes
// rows_items    tiles by that number, descending, ties by tile
//
// COUNT: words that a row takes, 2 to 4. CHUNK: rows of a chunk. Loops are kept rolled where they are long: a block runs each function
// once, and its instructions, not yet in the cache, cost more than what unrolling saves.
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
// Blocks of 32 rows whose columns fit where positions will lie.
#define KEPT (6 * CHUNK / (4 * MAX_GROUPS))
static_assert(CHUNK % RANK_ROWS == 0 && CHUNK <= 16 * THREADS, "a thread looks at the buckets of 16 rows");

// 1024 threads: a warp packs 4 rows.
extern "C" __global__ void __launch_bounds__(THREADS) rows_pack(const u8* __restrict__ mask, uint4* __restrict__ packed, u16* __restrict__ counts, int M, int N_G, int stride_m, int stride_g) {
  __shared__ u32 total[MAX_GROUPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = blockIdx.x * PACK_ROWS + 4 * warp;
  if (threadIdx.x < MAX_GROUPS) total[threadIdx.x] = 0;
  u8 executes[4][COUNT];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int group = 32 * k + lane;
      executes[i][k] = begin + i < M && group < N_G ? mask[(long long)(begin + i) * stride_m + (long long)group * stride_g] : 0;
    }
  u32 mine[COUNT] = {}, own[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const u32 word = __ballot_sync(ALL, executes[i][k]);
      if (lane == i) own[k] = word;
      mine[k] += executes[i][k] != 0;
    }
  if (lane < 4 && begin + lane < M) packed[begin + lane] = make_uint4(own[0], own[1], own[2], own[3]);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < COUNT; ++k) atomicAdd(&total[32 * k + lane], mine[k]);
  __syncthreads();
  if (threadIdx.x < MAX_GROUPS) counts[blockIdx.x * MAX_GROUPS + threadIdx.x] = (u16)total[threadIdx.x];
}

// How many of MAX_GROUPS different values are below one of them; PARTS neighbouring threads ask for the same one.
template <int PARTS> __device__ __forceinline__ int place_of(const u32* values, u32 one, int part) {
  int place = 0;
#pragma unroll 4
  for (int i = part; i < MAX_GROUPS / 4; i += PARTS) {
    const uint4 other = ((const uint4*)values)[i];
    place += (other.x < one) + (other.y < one) + (other.z < one) + (other.w < one);
  }
#pragma unroll
  for (int step = 1; step < PARTS; step *= 2) place += __shfl_xor_sync(ALL, place, step);
  return place;
}

// What groups are put in order by: how many rows execute one, ties by number; `last` ones come after all others.
__device__ __forceinline__ u32 rarity(u32 total, int group, bool last) { return (last ? CHUNK + 1 : total) * MAX_GROUPS + group; }

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

// 256 threads, a row each; all blocks of a chunk put its groups in order by themselves. A row that executes nothing has bucket 0.
extern "C" __global__ void __launch_bounds__(RANK_ROWS) rows_rank(const uint4* __restrict__ packed, const uint4* __restrict__ counts, uint4* __restrict__ places, u8* __restrict__ buckets, int M, int N_G) {
  __shared__ u32 total[MAX_GROUPS];
  __shared__ __align__(16) u32 values[MAX_GROUPS];
  __shared__ int place[MAX_GROUPS];
  __shared__ u32 columns[RANK_ROWS / 32][MAX_GROUPS];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x * RANK_ROWS + thread;
  const uint4 words = row < M ? packed[row] : make_uint4(0, 0, 0, 0);
  if (thread < MAX_GROUPS) total[thread] = 0;
  __syncthreads();
  const int chunk = blockIdx.x * RANK_ROWS / CHUNK, begin = chunk * (CHUNK / PACK_ROWS);
  const int end = min(begin + CHUNK / PACK_ROWS, (M + PACK_ROWS - 1) / PACK_ROWS);
  // Eight groups of 16 bits a thread.
  const int part = thread % (MAX_GROUPS / 8);
  u32 sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 8
  for (int i = begin + thread / (MAX_GROUPS / 8); i < end; i += RANK_ROWS / (MAX_GROUPS / 8)) {
    const uint4 found = counts[i * (MAX_GROUPS / 8) + part];
    const u32 pair[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) sum[k] += pair[k / 2] >> (k % 2 * 16) & 0xffff;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    sum[k] += __shfl_xor_sync(ALL, sum[k], MAX_GROUPS / 8);
    // Group 8 part + k lies at 16 k + part: neighbouring threads add in different banks.
    if (lane < MAX_GROUPS / 8) atomicAdd(&total[MAX_GROUPS / 8 * k + part], sum[k]);
  }
  __syncthreads();
  if (thread < MAX_GROUPS) values[thread] = rarity(total[MAX_GROUPS / 8 * (thread % 8) + thread / 8], thread, thread >= N_G);
  __syncthreads();
  constexpr int PARTS = RANK_ROWS / MAX_GROUPS;
  const int found = place_of<PARTS>(values, values[thread / PARTS], thread % PARTS);
  if (thread % PARTS == 0) place[thread / PARTS] = found;
  __syncthreads();
  // The columns of 32 rows, a group each, to their places and back.
  const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int k = 0; k < COUNT; ++k) columns[warp][place[32 * k + lane]] = transposed(word[k], lane);
  __syncwarp();
  u32 put[4] = {0, 0, 0, 0};
  int first = N_G;
#pragma unroll
  for (int k = COUNT - 1; k >= 0; --k) {
    put[k] = transposed(columns[warp][32 * k + lane], lane);
    if (put[k]) first = 32 * k + __ffs(put[k]) - 1;
  }
  if (row >= M) return;
  places[row] = make_uint4(put[0], put[1], put[2], put[3]);
  buckets[row] = (u8)(N_G - first);
}

// Sum of the values of all threads before this one; `whole` becomes that of all. `sums` [WARPS] may be used again after a __syncthreads.
__device__ __forceinline__ u32 sum_before(u32 value, u32* sums, u32& whole) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 up_to = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(ALL, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  u32 warps = sums[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(ALL, warps, step);
    if (lane >= step) warps += other;
  }
  whole = __shfl_sync(ALL, warps, 31);
  const u32 earlier = __shfl_sync(ALL, warps, warp == 0 ? 0 : warp - 1);
  return up_to - value + (warp == 0 ? 0 : earlier);
}

// One pass of a sort of rows by a byte of their keys; rows of equal digits keep their order. Warp w has the positions from 32 w turns on.
// `now`, or 0 for rows as they are numbered, and `key` must have been written before a __syncthreads; `next` may be read.
__device__ __forceinline__ void sort_by_digit(int rows, const u16* now, u16* next, const u32* key, int shift, u16* rank, u16* counter, u32* sums) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int turns = (rows + THREADS - 1) / THREADS, begin = warp * turns * 32 + lane;
  for (int i = thread; i < WARPS * PITCH / 8; i += THREADS) ((uint4*)counter)[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  u16* mine = counter + warp * PITCH;
#pragma unroll 1
  for (int at = begin; at < begin + 32 * turns && at - lane < rows; at += 32) {
    const bool inside = at < rows;
    const u32 digit = inside ? key[now ? now[at] : at] >> shift & (DIGITS - 1) : 0;
    // The lanes with this digit. Eight ballots are faster where many digits occur at random, slower where rows are alike.
    const u32 peers = __match_any_sync(ALL, inside ? digit : DIGITS + lane);
    const u32 before = mine[digit], below = peers & ((1u << lane) - 1);
    __syncwarp();
    if (inside) {
      rank[at] = (u16)(before + __popc(below));
      if (below == 0) mine[digit] = (u16)(before + __popc(peers));
    }
    __syncwarp();
  }
  __syncthreads();
  // Where each warp's rows with a digit begin: four threads a digit, eight warps each.
  u16* of_digit = counter + thread % 4 * (WARPS / 4) * PITCH + thread / 4;
  u32 found[WARPS / 4], own = 0, whole;
#pragma unroll
  for (int i = 0; i < WARPS / 4; ++i) own += found[i] = of_digit[i * PITCH];
  u32 start = sum_before(own, sums, whole);
#pragma unroll
  for (int i = 0; i < WARPS / 4; ++i) {
    of_digit[i * PITCH] = (u16)start;
    start += found[i];
  }
  __syncthreads();
#pragma unroll 1
  for (int at = begin; at < begin + 32 * turns && at < rows; at += 32) {
    const int row = now ? now[at] : at;
    next[mine[key[row] >> shift & (DIGITS - 1)] + rank[at]] = (u16)row;
  }
  __syncthreads();
}

// The rows among 16 whose bucket is one, a bit each, and how many have an earlier one; buckets are at most 128, and 255 where no row is.
__device__ __forceinline__ void look_up(const uint4& buckets, u32 one, u32& same, u32& earlier) {
  const u32 word[4] = {buckets.x, buckets.y, buckets.z, buckets.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const u32 other = word[k] ^ one * 0x01010101u, equal = ~(((other & 0x7f7f7f7fu) + 0x7f7f7f7fu) | other | 0x7f7f7f7fu) >> 7;
    same |= (equal * 0x01020408u >> 24 & 15) << (4 * k);
    // Of two bytes at once, whether adding 256 less the bucket carries.
    const u32 less = 0x01000100u - one * 0x00010001u;
    earlier += 4 - __popc((word[k] & 0x00ff00ffu) + less & 0x01000100u) - __popc((word[k] >> 8 & 0x00ff00ffu) + less & 0x01000100u);
  }
}

// 1024 threads: a bucket of a chunk.
extern "C" __global__ void __launch_bounds__(THREADS) rows_order(const uint4* __restrict__ places, const uint4* __restrict__ buckets, int* __restrict__ index, int M, int N_G, int sorted) {
  extern __shared__ __align__(16) char shared[];
  u32* key = (u32*)shared;            // [CHUNK]
  u16* listed = (u16*)(key + CHUNK);  // [CHUNK]
  u16* place = listed + CHUNK;        // [2][CHUNK]
  u16* rank = place + 2 * CHUNK;      // [CHUNK]
  u16* counter = rank + CHUNK;        // [WARPS][PITCH]
  u32* columns = (u32*)place;         // [KEPT][MAX_GROUPS], before positions
  __shared__ u32 sums[WARPS], total[MAX_GROUPS];
  __shared__ __align__(16) u32 values[MAX_GROUPS];
  __shared__ int rare[MAX_GROUPS];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunk = blockIdx.x / (N_G + 1), bucket = blockIdx.x % (N_G + 1), own = N_G - bucket;
  u32 same = 0, earlier = 0;
  const int left = min(M - chunk * CHUNK, CHUNK) - 16 * thread;
  if (left > 0) {
    uint4 found = buckets[chunk * (CHUNK / 16) + thread];
    if (left < 16) {
      found.x |= left < 4 ? ALL << (8 * left) : 0;
      found.y |= left < 8 ? ALL << (8 * max(left - 4, 0)) : 0;
      found.z |= left < 12 ? ALL << (8 * max(left - 8, 0)) : 0;
      found.w |= ALL << (8 * max(left - 12, 0));
    }
    look_up(found, bucket, same, earlier);
  }
  if (thread < MAX_GROUPS) total[thread] = 0;
  u32 whole;
  int at = (int)(sum_before(earlier << 16 | __popc(same), sums, whole) & 0xffff);
  const int rows = whole & 0xffff;
  if (rows == 0) return;
  for (; same; same &= same - 1) listed[at++] = (u16)(16 * thread + __ffs(same) - 1);
  __syncthreads();
  index += chunk * CHUNK + (whole >> 16);
  if (rows == 1) {
    if (thread == 0) index[0] = chunk * CHUNK + listed[0];
    return;
  }
  places += (long long)chunk * CHUNK;
  // Of the 32 rows of a warp's turn, the column of each place: to `column`, and how many there are.
  const auto to_columns = [&](int begin, u32* column, u32* mine) {
    const uint4 words = begin + lane < rows ? places[listed[begin + lane]] : make_uint4(0, 0, 0, 0);
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const u32 found = transposed(word[k], lane);
      column[32 * k + lane] = found;
      mine[k] += __popc(found);
    }
  };
  const bool kept = rows <= 32 * KEPT;
  u32 mine[COUNT] = {};
#pragma unroll 1
  for (int begin = warp * 32; begin < rows; begin += THREADS) to_columns(begin, columns + (kept ? begin / 32 : warp) * MAX_GROUPS, mine);
  if (warp * 32 < rows)
#pragma unroll
    for (int k = 0; k < COUNT; ++k) atomicAdd(&total[32 * k + lane], mine[k]);
  __syncthreads();
  // All rows of a bucket are alike at places up to its own.
  if (thread < MAX_GROUPS) values[thread] = rarity(total[thread], thread, thread <= own || thread >= N_G);
  __syncthreads();
  constexpr int PARTS = THREADS / MAX_GROUPS;
  const int found = place_of<PARTS>(values, values[thread / PARTS], thread % PARTS);
  if (thread % PARTS == 0) rare[found] = thread / PARTS;
  __syncthreads();
  // Lane b gives bit b of the keys; the rarest place is the highest one.
  const int bit = lane < sorted ? rare[sorted - 1 - lane] : 0;
#pragma unroll 1
  for (int begin = warp * 32; begin < rows; begin += THREADS) {
    const u32* column = columns + (kept ? begin / 32 : warp) * MAX_GROUPS;
    if (!kept) {
      __syncwarp();
      to_columns(begin, columns + warp * MAX_GROUPS, mine);
      __syncwarp();
    }
    u32 bits = transposed(lane < sorted ? column[bit] : 0, lane);
    // The parity of each bit and those above it; the bucket's own place, which all execute, turns it.
#pragma unroll
    for (int step = 1; step < 32; step *= 2) bits ^= bits >> step;
    if (begin + lane < rows) key[begin + lane] = ~bits & ALL >> (32 - sorted);
  }
  __syncthreads();
  // What lies below the places that differ within the bucket follows from the bits above.
  const int alike = sorted - max(0, min(sorted, N_G - 1 - own)), begin = alike / 8, end = alike == sorted ? begin : (sorted + 7) / 8;
  const u16* now = 0;
#pragma unroll 1
  for (int pass = begin; pass < end; ++pass) {
    u16* next = place + (pass & 1) * CHUNK;
    sort_by_digit(rows, now, next, key, 8 * pass, rank, counter, sums);
    now = next;
  }
  for (int i = thread; i < rows; i += THREADS) index[i] = chunk * CHUNK + listed[now ? now[i] : i];
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
