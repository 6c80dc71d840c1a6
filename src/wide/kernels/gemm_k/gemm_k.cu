// GEMM-K for Hopper (sm_90a) over one sort of any number of groups: each row is in one tile, its sum stays in registers and is
// stored once.
//
// A tile is 128 sorted rows times 256 columns and executes the groups that any of its rows executes; of these each consumer
// multiplies those that one of its own 64 rows executes. One warp group fills a ring of stages: rows are gathered, in a group
// that a row skips it is zero there and never read; weights come as boxes of a tensor map. Structure and barriers are those of
// gemm_mn.cu, without clusters: the rows of two programs differ in what they execute, and each would wait for the other's groups.
// What rows and units of 64 rows execute comes as words of 32 groups each, those of a row where its tile's producer reaches them,
// those of a unit a tile ahead.
//
// Compiled for each combination of: WORDS of the groups; HAS_BIAS; FLOAT16 (else bfloat16), INT8, behind native/hopper.cuh. Parameters are described at
// `gemm_k` in _cuda.py.

constexpr int STAGES = 4, COLUMNS = 256, ROWS = 128;
constexpr u32 B_STAGE = COLUMNS * LINE, A_UNIT = 64 * LINE, A_STAGE = 2 * A_UNIT;
constexpr u32 A_OFFSET = STAGES * B_STAGE, OUT_OFFSET = A_OFFSET + STAGES * A_STAGE;
constexpr u32 BUFFER = 16 * STORED_LINE;  // of a warp's finished rows
constexpr u32 BAR_OFFSET = OUT_OFFSET + 8 * BUFFER;
constexpr u32 SMEM = BAR_OFFSET + 16 * STAGES;
static_assert(SMEM == SHARED_BYTES, "the launch must ask for as much shared memory");

__device__ __forceinline__ void release(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }

// What a program does in one turn: the sorted rows from `first` on, columns from `column` on. first -1: nothing.
struct Item {
  int first, column;
};
struct Items {
  const int* items;
  int parts, number;
  __device__ Item at(int turn) const {
    const int one = (int)blockIdx.x + turn * (int)gridDim.x;
    if (one >= number) return {-1, 0};
    int tile;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(tile) : "l"(items + one / parts));
    return {tile * ROWS, one % parts * COLUMNS};
  }
};
// A word of the groups of one of a tile's two units; the first tile's where there is none.
__device__ __forceinline__ u32 load_union(const int* unions, Item item, int unit, int word) {
  return load_int(unions + (max(item.first, 0) / 64 + unit) * WORDS + word);
}
// Entry `place` of a tile in a list over all sorted rows; the last one beyond its end.
__device__ __forceinline__ int load_entry(const int* list, Item item, int place, int M) { return load_int(list + min(max(item.first, 0) + place, M - 1)); }

// Every round is one use of a stage; producer and both consumers walk the same groups of the same items. A consumer that does
// not execute a group waits for its rounds and releases them, so that phases stay in step.
extern "C" __global__ void __launch_bounds__(384, 1)
gemm_k(const __grid_constant__ Map weight_map, const Element* __restrict__ h, u16* __restrict__ out, const u16* __restrict__ bias, const int* __restrict__ index,
       const int* __restrict__ words, const int* __restrict__ unions, const int* __restrict__ listed_items, int M, int N, int size, int stride_h, int stride_out
#if INT8
       ,
       const float* __restrict__ x_scale, const float* __restrict__ scale
#endif
) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const u32 base = smem_of(raw);
  const u32 full = base + BAR_OFFSET, empty = full + 8 * STAGES;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, role = thread >> 7;
  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full + 8 * s, 128 + 1);
      bar_init(empty + 8 * s, 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const int parts = N / COLUMNS, steps = size / BK;
  const Items items{listed_items, parts, (M + ROWS - 1) / ROWS * parts};

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " TEXT(PRODUCER_REGISTERS) ";");
    // Eight lanes copy the 128 bytes of a row; a thread has rows `row` + 16 i, which lie alike in the swizzle.
    constexpr int TIMES = 8;
    const int chunk = thread & 7, row = thread >> 3;
    const u32 target = base + A_OFFSET + row * 128 + (chunk ^ (row & 7)) * 16;
    const Element* const source = h + chunk * CHUNK;
    u32 stage = 0, phase = 1;
    u32 rows[TIMES], pattern[TIMES];
    Item item = items.at(0), next = items.at(1);
    u32 unit_words[2] = {load_union(unions, item, 0, 0), load_union(unions, item, 1, 0)};
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
      rows[i] = load_entry(index, item, row + 16 * i, M);
      pattern[i] = load_entry(words, item, row + 16 * i, M);
    }
    // Hidden from the compiler: where there is one word it would keep the rows' addresses, for which there are no registers.
    int number = WORDS;
    asm volatile("" : "+r"(number));
    for (int turn = 0; item.first >= 0; ++turn) {
      // The item after the next, and of the next its rows.
      const Item after = items.at(turn + 2);
      u32 next_rows[TIMES];
#pragma unroll
      for (int i = 0; i < TIMES; ++i) next_rows[i] = load_entry(index, next, row + 16 * i, M);
#pragma unroll 1
      for (int word = 0; word < number; ++word) {
        // What comes after this word: the next one, or the first of the next item.
        const bool last = word + 1 == number;
        const Item coming = last ? next : item;
        const int coming_word = last ? 0 : word + 1;
        const u32 own[2] = {unit_words[0], unit_words[1]};
        unit_words[0] = load_union(unions, coming, 0, coming_word);
        unit_words[1] = load_union(unions, coming, 1, coming_word);
        u32 next_pattern[TIMES];
#pragma unroll
        for (int i = 0; i < TIMES; ++i) next_pattern[i] = load_entry(words + coming_word * M, coming, row + 16 * i, M);
        for (u32 rest = own[0] | own[1]; rest != 0; rest &= rest - 1) {
          const int bit = __ffs(rest) - 1, member = word * 32 + bit;
          const u32 executes[2] = {own[0] >> bit & 1, own[1] >> bit & 1};
#pragma unroll 1
          for (int k = member * size; k < (member + 1) * size; k += BK) {
            bar_wait(empty + 8 * stage, phase);
            const u32 bar = full + 8 * stage, rows_to = target + stage * A_STAGE;
            if (thread == 0) {
              bar_expect(bar, B_STAGE);
              load_box(base + stage * B_STAGE, weight_map, k, item.column, bar);
            }
            // Places beyond the last row repeat it: their products are never stored.
#pragma unroll
            for (int i = 0; i < TIMES; ++i)
              if (executes[i / (TIMES / 2)])
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(rows_to + i * 2048), "l"(source + (u64)rows[i] * (u32)stride_h + k),
                             "r"((pattern[i] >> bit & 1) * 16) : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
            if (++stage == STAGES) {
              stage = 0;
              phase ^= 1;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < TIMES; ++i) pattern[i] = next_pattern[i];
      }
      item = next;
      next = after;
#pragma unroll
      for (int i = 0; i < TIMES; ++i) rows[i] = next_rows[i];
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " TEXT(CONSUMER_REGISTERS) ";");
    const int unit = role - 1;
    // What this lane's row of the warp's 16 is called.
    const int place = unit * 64 + (warp & 3) * 16 + (lane & 15);
    const u32 buffer = base + OUT_OFFSET + (warp - 4) * BUFFER;
    Sum acc[128];
    u32 stage = 0, phase = 0;
    Item item = items.at(0), next = items.at(1);
    u32 next_own[WORDS], next_other[WORDS];
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      next_own[word] = load_union(unions, item, unit, word);
      next_other[word] = load_union(unions, item, 1 - unit, word);
    }
    for (int turn = 0; item.first >= 0; ++turn) {
      const Item after = items.at(turn + 2);
      const int listed = load_entry(index, item, place, M);
#if INT8
      const float own_scale = x_scale[listed];
#endif
      u32 own[WORDS], every[WORDS];
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        own[word] = uniform(next_own[word]);
        every[word] = own[word] | uniform(next_other[word]);
      }
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        next_own[word] = load_union(unions, next, unit, word);
        next_other[word] = load_union(unions, next, 1 - unit, word);
      }
      int used = 0, before = -1;
      auto advance = [&]() {
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      };
      auto finish = [&]() {
        wgmma_wait<0>();
        if (before >= 0 && lane == 0) release(empty + 8 * before);
        before = -1;
      };
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        for (u32 rest = every[word]; rest != 0; rest &= rest - 1) {
          if (own[word] & rest & (0 - rest)) {
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
              bar_wait(full + 8 * stage, phase);
              // Rows arrive through the generic proxy, the product reads through the asynchronous one.
              asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
              const u64 a = descriptor(base + A_OFFSET + stage * A_STAGE + unit * A_UNIT);
              const u64 b = descriptor(base + stage * B_STAGE);
              wgmma_arrive();
#pragma unroll
              for (int k = 0; k < 4; ++k) wgmma<256>(acc, a + 2 * k, b + 2 * k, used | k);
              wgmma_commit();
              wgmma_wait<1>();
              if (before >= 0 && lane == 0) release(empty + 8 * before);
              before = stage;
              used = 1;
              advance();
            }
          } else {
            finish();
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
              bar_wait(full + 8 * stage, phase);
              __syncwarp();  // all lanes have seen it full before it can be filled again
              if (lane == 0) release(empty + 8 * stage);
              advance();
            }
          }
        }
      }
      finish();
      const int target = item.first + place < M ? listed : -1;
#if INT8
      store_rows(acc, used, buffer, lane, item.column, target, bias, out, stride_out, RowScales(own_scale, lane), scale);
#else
      store_rows(acc, used, buffer, lane, item.column, target, bias, out, stride_out);
#endif
      item = next;
      next = after;
    }
  }
}
