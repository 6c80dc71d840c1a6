// GEMM-K on CuTe for Hopper (sm_90a), where each row is in one tile: its sum stays in registers and is stored once.
//
// A tile is 128 rows, sorted by the groups that they execute, times 256 columns. One warp group fills a ring of stages, two others multiply
// 64 rows each. Programs are no clusters: each would wait for what rows of another execute. The paper's levels of skipping:
//
//   0  Groups that no row of a tile executes are passed over, with their copies, barriers and products.
//   1  Of the others' rows only those that execute the group are loaded; zeros stand for the rest, which may hold anything.
//   2  Units of 64 rows of which none executes the group are neither filled with zeros nor multiplied.
//
// Items, tiles of rows times columns, are dealt out in turn, or drawn by whoever is free: where tiles execute different shares of many groups,
// the dearest would fall to the same programs in every turn.
//
// Compiled in: FLOAT16, LEVEL (1 or 2), WORDS (of 32 groups), STAGES, DRAWN. Called by _cute.py.
#include "cute_hopper.cuh"

// PANEL: column tiles that drawn items sweep together, so that rows and weights that run side by side are few.
constexpr int BN = 256, PIECE = 128, PANEL = 4;

CUTE_DEVICE int draw(int* counter) {
#ifdef __CUDACC__
  int value;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(value) : "l"(counter));
  return value;
#else
  return (*counter)++;
#endif
}

struct Arguments {
  TmaDescriptor weight;
  Half const *h, *bias;
  Half* out;
  int const *index, *words, *unions, *items;
  int num_rows, width, size;
  int* counter;  // of items that were drawn, beyond the first of each program
  uint32_t h_step, out_step;
};
struct Shared {
  alignas(1024) Half weights[STAGES * BN * BK];
  alignas(1024) Half rows[STAGES * ROWS * BK];
  alignas(1024) Half out[ROWS * PIECE];
  Barrier full[STAGES], empty[STAGES];
#if DRAWN
  Barrier known[2], read[2];
  int firsts[2], columns[2];
#endif
};

// What a program does in one turn: sorted rows from `first` on, columns from `column` on. first -1: nothing.
struct Item {
  int first, column;
};
CUTE_DEVICE Item item_of(Arguments const& given, int one) {
  const int parts = (given.width + BN - 1) / BN, tiles = (given.num_rows + ROWS - 1) / ROWS;
  if (one >= tiles * parts) return {-1, 0};
  if (!DRAWN) return {load_int(given.items + one / parts) * ROWS, one % parts * BN};
  // The last panel may be narrower.
  const int before = one / (tiles * PANEL) * PANEL, in = cute::min(int(PANEL), parts - before);
  one -= before * tiles;
  return {load_int(given.items + one / in) * ROWS, (before + one % in) * BN};
}
CUTE_DEVICE Item item_at(Arguments const& given, int turn) {
  return item_of(given, blockIdx.x + turn * gridDim.x);
}
#if DRAWN
// The item after item `turn` of this program, which thread 0 told; every warp asks once for each.
CUTE_DEVICE Item told(Shared& shared, int turn) {
  const int place = turn % 2;
  shared.known[place].wait(turn / 2 % 2);
  const Item found{__shfl_sync(0xffffffff, shared.firsts[place], 0), __shfl_sync(0xffffffff, shared.columns[place], 0)};
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared.read[place].arrive();
  return found;
}
CUTE_DEVICE void tell(Shared& shared, int turn, Item item) {
  const int place = turn % 2;
  shared.read[place].wait(turn / 2 % 2 ^ 1);
  shared.firsts[place] = item.first;
  shared.columns[place] = item.column;
  shared.known[place].arrive();
}
#endif
// Groups that any row of a unit executes; something where there is nothing.
CUTE_DEVICE uint32_t load_union(Arguments const& given, Item item, int unit, int word) {
  return load_int(given.unions + (cute::max(item.first, 0) / UNIT + unit) * WORDS + word);
}
// Entry `place` of a tile in a list over all sorted rows; beyond its end the last one, whose products are never stored.
CUTE_DEVICE int load_entry(Arguments const& given, int const* list, Item item, int place) {
  return load_int(list + cute::min(cute::max(item.first, 0) + place, given.num_rows - 1));
}

CUTE_DEVICE void produce(Arguments const& given, Shared& shared) {
  // Eight threads copy the line of a row; a thread has rows `row` + 16 i, which lie alike in the swizzle.
  constexpr int STEP = PRODUCERS * LINE / BK, TIMES = ROWS / STEP;
  const int row = threadIdx.x / (BK / LINE), column = threadIdx.x % (BK / LINE) * LINE, size = given.size;
  Half* const to = &ring_of<ROWS>(shared.rows)(row, column, 0);
  struct Word {
    uint32_t units[2], rows[TIMES];
  };
  // What units and rows execute.
  auto load_word = [&](Item of, int word) {
    Word found{load_union(given, of, 0, word), load_union(given, of, 1, word)};
    CUTE_UNROLL
    for (int i = 0; i < TIMES; ++i) found.rows[i] = load_entry(given, given.words + int64_t(word) * given.num_rows, of, row + STEP * i);
    return found;
  };
  Turn turn{0, 1};
#if DRAWN
  Item item = item_of(given, blockIdx.x), next{-1, 0};
  int ticket = 0;
#else
  Item item = item_at(given, 0), next = item_at(given, 1);
#endif
  uint32_t rows[TIMES];
#if !DRAWN
  uint32_t next_rows[TIMES];
#endif
  auto list = [&](Item of, uint32_t* numbers) {
    CUTE_UNROLL
    for (int i = 0; i < TIMES; ++i) numbers[i] = load_entry(given, given.index, of, row + STEP * i);
  };
  list(item, rows);
  Word known = load_word(item, 0);
  for (int number = 0; item.first >= 0; ++number) {
#if DRAWN
    if (threadIdx.x == 0) ticket = draw(given.counter);
#else
    // The item after the next, and of the next its rows.
    const Item after = item_at(given, number + 2);
    list(next, next_rows);
#endif
    // The thread's lines of rows, counted in lines of 16 bytes: two instructions make an address of one.
    uint32_t lines[TIMES];
    CUTE_UNROLL
    for (int i = 0; i < TIMES; ++i) lines[i] = rows[i] * (given.h_step / LINE) + column / LINE;
    CUTE_NO_UNROLL
    for (int word = 0; word < WORDS; ++word) {
#if DRAWN
      // Drawn at the beginning, looked up in the middle: neither is waited for.
      if (word == WORDS / 2) {
        if (threadIdx.x == 0) tell(shared, number, item_of(given, ticket + int(gridDim.x)));
        __syncwarp();
      }
      if (word == WORDS - 1) next = told(shared, number);
#endif
      const Word coming = word + 1 < WORDS ? load_word(item, word + 1) : load_word(next, 0);
#if DRAWN
      // Equal in all lanes, which the compiler cannot see of items from shared memory.
      CUTE_UNROLL
      for (int unit = 0; unit < 2; ++unit) known.units[unit] = __shfl_sync(0xffffffff, known.units[unit], 0);
#endif
      for (uint32_t rest = known.units[0] | known.units[1]; rest != 0; rest &= rest - 1) {
        const uint32_t group = rest & (0 - rest);
        // Rows of which units: said for a whole group, for a branch in each step costs as much as what it saves.
        auto fill = [&](auto begin, auto end) {
          const int first = (word * 32 + __ffs(rest) - 1) * size;
          CUTE_NO_UNROLL
          for (int k = first; k < first + size; k += BK, turn.next()) {
            Barrier& full = shared.full[turn.stage];
            shared.empty[turn.stage].wait(turn.phase);
            if (threadIdx.x == 0) {
              full.arrive_and_expect_tx(BN * BK * sizeof(Half));
              load_box(shared.weights + turn.stage * BN * BK, given.weight, k, item.column, full, false);
            }
            CUTE_UNROLL
            for (int i = begin; i < end; ++i)
              load_line(to + (turn.stage * ROWS + STEP * i) * BK, given.h + uint64_t(lines[i] + k / LINE) * LINE, known.rows[i] & group);
            cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
          }
        };
        if (LEVEL < 2 || (known.units[0] & known.units[1] & group))
          fill(_0{}, Int<TIMES>{});
        else if (known.units[0] & group)
          fill(_0{}, Int<TIMES / 2>{});
        else
          fill(Int<TIMES / 2>{}, Int<TIMES>{});
      }
      known = coming;
    }
    item = next;
#if DRAWN
    list(item, rows);
#else
    next = after;
    CUTE_UNROLL
    for (int i = 0; i < TIMES; ++i) rows[i] = next_rows[i];
#endif
  }
  cp_async_wait<0>();
}

CUTE_DEVICE void consume(Arguments const& given, Shared& shared) {
  using Mma = Wgmma<BN>;
  const int thread = threadIdx.x - PRODUCERS, lane = thread % 32, unit = thread / 128;
  const int place = thread / 32 * 16 + lane % 16;  // of this lane's row of the warp's 16
  Turn turn{0, 0};
  auto release = [&](int stage) {
    if (lane == 0) shared.empty[stage].arrive();
  };
#if DRAWN
  Item item = item_of(given, blockIdx.x), next{-1, 0};
#else
  Item item = item_at(given, 0), next = item_at(given, 1);
#endif
  uint32_t next_own[WORDS], next_other[WORDS];
  auto look = [&](Item of) {
    CUTE_UNROLL
    for (int word = 0; word < WORDS; ++word) {
      next_own[word] = load_union(given, of, unit, word);
      next_other[word] = load_union(given, of, 1 - unit, word);
    }
  };
  look(item);
  for (int number = 0; item.first >= 0; ++number) {
#if !DRAWN
    const Item after = item_at(given, number + 2);
#endif
    const int listed = load_entry(given, given.index, item, place);
    // Equal in all lanes, which the compiler must know where products depend on it.
    uint32_t own[WORDS], every[WORDS];
    CUTE_UNROLL
    for (int word = 0; word < WORDS; ++word) {
      own[word] = __shfl_sync(0xffffffff, next_own[word], 0);
      every[word] = own[word] | __shfl_sync(0xffffffff, next_other[word], 0);
    }
#if !DRAWN
    look(next);
#endif
    Mma mma;
    auto slice = mma.get_slice(thread);
    auto a = slice.partition_fragment_A(ring_of<ROWS>(shared.rows));
    auto b = slice.partition_fragment_B(ring_of<BN>(shared.weights));
    auto sums = partition_fragment_C(mma, Shape<Int<ROWS>, Int<BN>>{});
    mma.accumulate_ = SM90::GMMA::ScaleOut::Zero;
    int before = -1;
    auto finish = [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      if (before >= 0) release(before);
      before = -1;
    };
    // The products of all words are the same ones: copies of them ptxas 13.0 would have wait for each other.
    CUTE_NO_UNROLL
    for (int word = 0; word < WORDS; ++word) {
      uint32_t rest = every[0], executed = own[0];
      CUTE_UNROLL
      for (int i = 1; i < WORDS; ++i)
        if (i == word) rest = every[i], executed = own[i];
      for (; rest != 0; rest &= rest - 1) {
        if (LEVEL < 2 || executed & rest & (0 - rest)) {
          CUTE_NO_UNROLL
          for (int k = 0; k < given.size; k += BK, turn.next()) {
            shared.full[turn.stage].wait(turn.phase);
            // Rows arrive through the generic proxy, the product reads through the asynchronous one.
            cutlass::arch::fence_view_async_shared();
            multiply(mma, a(_, _, _, turn.stage), b(_, _, _, turn.stage), sums);
            if (before >= 0) release(before);
            before = turn.stage;
          }
        } else {
          finish();
          CUTE_NO_UNROLL
          for (int k = 0; k < given.size; k += BK, turn.next()) {
            shared.full[turn.stage].wait(turn.phase);
            __syncwarp();  // all lanes have seen it full before it can be filled again
            release(turn.stage);
          }
        }
      }
    }
    finish();
#if DRAWN
    next = told(shared, number);
    look(next);
#endif
    if (mma.accumulate_ == SM90::GMMA::ScaleOut::Zero) clear(sums);
    if (given.bias) {
      auto places = slice.partition_C(make_identity_tensor(Shape<Int<ROWS>, Int<BN>>{}));
      CUTE_UNROLL
      for (int i = 0; i < size(sums); ++i) {
        const int at = item.column + get<1>(places(i));
        if (at < given.width) sums(i) += float(given.bias[at]);
      }
    }
    CUTE_UNROLL
    for (int piece = 0; piece < BN / PIECE; ++piece) {
      const int column = item.column + piece * PIECE, target = item.first + place < given.num_rows ? listed : -1;
      store_rows<PIECE>(piece_of<PIECE>(sums, piece), shared.out, target, given.out + column, given.out_step, given.width - column);
    }
    item = next;
#if !DRAWN
    next = after;
#endif
  }
}

// A round is one use of a stage, once for each step of 64 of each group of an item that any of its rows executes; producers and both
// consumers walk the same groups of the same items, so they agree on every round's stage and parity.
//   full[s]   129 arrivals: 128 producers, when their lines have come, 1 with the bytes to expect, by thread 0; and those bytes.
//             Round r of a stage ends phase r; consumers wait with parity r & 1.
//   empty[s]  8 arrivals: one lane of each consumer warp, when its products are done. Producers wait with parity (r & 1) ^ 1.
// No deadlock: a producer waits only for releases of the round STAGES before, consumers only for loads of this round; a consumer that
//   does not execute a group waits for its rounds and releases them, too. The earliest unfinished round always goes on.
// Where items are drawn, t counts those of a program:
//   known[p]  1 arrival, by thread 0, when it has told the item after item t, p = t % 2: phase t / 2.
//   read[p]   12 arrivals, a lane of each warp that has read it; thread 0 waits for them before it tells the item after item t + 2.
__global__ void __launch_bounds__(THREADS, 1) gemm_k_kernel(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      shared.full[stage].init(PRODUCERS + 1);
      shared.empty[stage].init(CONSUMERS / 32);
    }
#if DRAWN
    for (int place = 0; place < 2; ++place) {
      shared.known[place].init(1);
      shared.read[place].init(THREADS / 32);
    }
#endif
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < PRODUCERS) {
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    produce(given, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    consume(given, shared);
  }
}

void gemm_k(View h, OptionalView bias, View out, View index, View words, View unions, View items, int64_t group_size, int64_t weight_map, int64_t blocks, int64_t counter) {
  TVM_FFI_ICHECK(h.size(0) * h.stride(0) / LINE < (int64_t(1) << 32)) << "rows of " << h.stride(0) << " elements are too many to count their lines, got " << h.size(0);
  const Arguments given{*reinterpret_cast<TmaDescriptor const*>(weight_map), data<Half>(h), data<Half>(bias), data<Half>(out),
                        data<int>(index), data<int>(words), data<int>(unions), data<int>(items),
                        int(h.size(0)), int(out.size(1)), int(group_size), reinterpret_cast<int*>(counter), uint32_t(h.stride(0)), uint32_t(out.stride(0))};
  launch(gemm_k_kernel, blocks, THREADS, sizeof(Shared), h, given);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_k, gemm_k);
