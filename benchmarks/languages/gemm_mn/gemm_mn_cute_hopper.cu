// GEMM-MN on CuTe for Hopper (sm_90a): as gemm_mn.cu, the two programs of a cluster share a group's weights.
//
// Gathered rows of one group times BN channels, gate and up together. One warp group fills a ring of stages, two others multiply
// 64 rows each. A whole tile of 256 rows lies in two programs, each loads half of the weights and multicasts it to both. Of a
// remainder of at most 128 rows (a short tile) each program takes half of the channels. The paper's levels of skipping:
//
//   0  Tiles whose rows all skip their group are not on the list.
//   1  Lines of rows beyond the group's count are not loaded.
//   2  Units of 64 rows beyond the count are not multiplied.
//
// Compiled in: FLOAT16, GATED, ACTIVATION, LEVEL, BN (channels of a tile), STAGES. Called by _cute.py.
#include "cute_hopper.cuh"

constexpr int CLUSTER = 2;
constexpr int WIDTH = GATED ? 2 * BN : BN, BOX_ROWS = WIDTH / 4;  // weight rows of a tile and of a box
// Short tiles that a cluster takes instead of its last whole one, by measurements of gemm_mn.cu.
constexpr int FILL = 3;

struct Arguments {
  TmaDescriptor weight, up;
  Half const *x, *bias, *up_bias;
  Half* out;
  int const *index, *counts, *tiles, *num_tiles;
  int num_rows, depth, size;
  uint32_t x_step, out_step;
};
struct Shared {
  alignas(1024) Half weights[STAGES * WIDTH * BK];
  alignas(1024) Half rows[STAGES * ROWS * BK];
  alignas(1024) Half out[ROWS * cute::min(BN, 128)];
  Barrier full[STAGES], empty[STAGES];
};

// What a program does in one turn: up to 128 rows of a group from place `first` of its list, and channels from `channel` on: BN
// if `whole`, where the other program has the next 128 rows; half of that if not, where it has the same rows and the other half.
struct Item {
  int group, first, channel;
  bool whole;
};
// The items of a cluster. Whole tiles are dealt out in turn, then each cluster that the last turn left free is given FILL short ones,
// forwards once, then backwards: the largest come first, and are not given a third. What is left is dealt out in turn.
struct Items {
  int const* tiles;
  int wholes, all, parts, rank, cluster, clusters;
  CUTE_DEVICE Item at(int turn) const {
    int late = turn - (wholes - cluster + clusters - 1) / clusters, one = cluster + turn * clusters;
    if (late >= 0) {
      const int begun = wholes % clusters, free = (clusters - begun) % clusters, place = cluster - begun;
      const bool fills = free > 0 && place >= 0;
      one = fills && late < FILL ? late * free + (late ? free - 1 - place : place) : FILL * free + cluster + (late - (fills ? FILL : 0)) * clusters;
      one += wholes;
    }
    if (one >= all) return {-1, 0, 0, false};
    const int group = load_int(tiles + one / parts * 2), first = load_int(tiles + one / parts * 2 + 1) * CLUSTER * ROWS;
    const bool whole = late < 0;
    return {group, first + (whole ? rank * ROWS : 0), one % parts * BN + (whole ? 0 : rank * BN / 2), whole};
  }
};
CUTE_DEVICE int rows_left(Item item, int count) { return item.group < 0 ? 0 : count - item.first; }
CUTE_DEVICE int load_count(Arguments const& given, Item item) { return load_int(given.counts + cute::max(item.group, 0)); }
// Entry `place` of an item in the list of its group, for use only where it is within the count.
CUTE_DEVICE int load_row(Arguments const& given, Item item, int place) {
  return load_int(given.index + int64_t(cute::max(item.group, 0)) * given.num_rows + cute::min(item.first + place, given.num_rows - 1));
}

CUTE_DEVICE void produce(Arguments const& given, Shared& shared, Items const& items) {
  // Eight threads copy the line of a row; a thread has rows `row` + 16 i, which lie alike in the swizzle.
  constexpr int STEP = PRODUCERS * LINE / BK, TIMES = ROWS / STEP;
  const int row = threadIdx.x / (BK / LINE), column = threadIdx.x % (BK / LINE) * LINE, depth = given.depth;
  Half* const to = &ring_of<ROWS>(shared.rows)(row, column, 0);
  Turn turn{0, 1};
  Item item = items.at(0), next = items.at(1);
  int left = rows_left(item, load_count(given, item));
  uint32_t rows[TIMES], next_rows[TIMES];
  auto list = [&](Item of, uint32_t* numbers) {
    CUTE_UNROLL
    for (int i = 0; i < TIMES; ++i) numbers[i] = load_row(given, of, row + STEP * i);
  };
  list(item, rows);
  for (int number = 0; item.group >= 0; ++number) {
    // The item after the next, and of the next its count and rows.
    const Item after = items.at(number + 2);
    const int next_count = load_count(given, next);
    list(next, next_rows);
    // Two boxes: of a whole tile's four the first or the last ones, or both of a short tile. Those of up follow those of gate.
    const int box = item.whole ? 2 * items.rank : 0, bytes = (item.whole ? 4 : 2) * BOX_ROWS * BK * sizeof(Half);
    const int channel = item.group * given.size + item.channel + (GATED ? 0 : box * BOX_ROWS);
    const int second_channel = channel + (GATED && !item.whole ? 0 : BOX_ROWS);
    TmaDescriptor const& map = GATED && box ? given.up : given.weight;
    TmaDescriptor const& second_map = GATED && (box || !item.whole) ? given.up : given.weight;
    // The thread's lines of rows, counted in lines of 16 bytes: two instructions make an address of one.
    uint32_t lines[TIMES];
    CUTE_UNROLL
    for (int i = 0; i < TIMES; ++i) lines[i] = (LEVEL || row + STEP * i < left ? rows[i] : 0) * (given.x_step / LINE) + column / LINE;
    CUTE_NO_UNROLL
    for (int k = 0; k < depth; k += BK, turn.next()) {
      Barrier& full = shared.full[turn.stage];
      shared.empty[turn.stage].wait(turn.phase);
      if (threadIdx.x == 0) {
        full.arrive_and_expect_tx(bytes);
        Half* const boxes = shared.weights + (turn.stage * 4 + box) * BOX_ROWS * BK;
        load_box(boxes, map, k, channel, full, item.whole);
        load_box(boxes + BOX_ROWS * BK, second_map, k, second_channel, full, item.whole);
      }
      // A branch for each line would cost more than the zeros that now come for a row beyond the count; nothing is read for them.
      const int there = k + column < depth ? left - row : 0;
      CUTE_UNROLL
      for (int i = 0; i < TIMES; ++i)
        load_line(to + (turn.stage * ROWS + STEP * i) * BK, given.x + uint64_t(lines[i] + k / LINE) * LINE, LEVEL ? STEP * i < there : k + column < depth);
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
    }
    item = next;
    next = after;
    left = rows_left(item, next_count);
    CUTE_UNROLL
    for (int i = 0; i < TIMES; ++i) rows[i] = next_rows[i];
  }
  cp_async_wait<0>();
}

CUTE_DEVICE void consume(Arguments const& given, Shared& shared, Items const& items) {
  const int thread = threadIdx.x - PRODUCERS, lane = thread % 32;
  const int place = thread / 32 * 16 + lane % 16;  // of this lane's row of the warp's 16
  Turn turn{0, 0};
  auto release = [&](int stage) {
    if (lane < CLUSTER) shared.empty[stage].arrive(lane);
  };
  Item item = items.at(0), next = items.at(1);
  // Equal in all lanes, which the compiler must know where products depend on it.
  auto counted = [&](Item of, int count) { return __shfl_sync(0xffffffff, rows_left(of, count), 0); };
  int left = counted(item, load_count(given, item));
  for (int number = 0; item.group >= 0; ++number) {
    const Item after = items.at(number + 2);
    const int next_count = load_count(given, next), listed = load_row(given, item, place);
    // All steps of one item, and its way out.
    auto run = [&](auto width) {
      constexpr int N = decltype(width)::value, CHANNELS = GATED ? N / 2 : N, PIECE = cute::min(CHANNELS, 128);
      Wgmma<N> mma;
      auto slice = mma.get_slice(thread);
      auto a = slice.partition_fragment_A(ring_of<ROWS>(shared.rows));
      auto b = slice.partition_fragment_B(local_tile(ring_of<WIDTH>(shared.weights), Shape<Int<N>, Int<BK>>{}, make_coord(0, 0, _)));
      auto sums = partition_fragment_C(mma, Shape<Int<ROWS>, Int<N>>{});
      mma.accumulate_ = SM90::GMMA::ScaleOut::Zero;
      int before = -1;
      CUTE_NO_UNROLL
      for (int k = 0; k < given.depth; k += BK, turn.next()) {
        shared.full[turn.stage].wait(turn.phase);
        // Rows arrive through the generic proxy, the product reads through the asynchronous one.
        cutlass::arch::fence_view_async_shared();
        multiply(mma, a(_, _, _, turn.stage), b(_, _, _, turn.stage), sums);
        if (before >= 0) release(before);
        before = turn.stage;
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      release(before);
      // A warp without rows has nothing to store. The branch also keeps arithmetic behind the release of the last stage.
      if (!__any_sync(0xffffffff, place < left)) return;
      // Gate and up of a channel lie in the same thread, half of the sums apart.
      auto places = slice.partition_C(make_identity_tensor(Shape<Int<ROWS>, Int<N>>{}));
      const int channel = item.group * given.size + item.channel;
      const auto add = [&](Half const* bias, int from) {
        CUTE_UNROLL
        for (int i = 0; i < CHANNELS / 2; ++i) sums(from + i) += float(bias[channel + get<1>(places(i))]);
      };
      if (given.bias) add(given.bias, 0);
      if (given.up_bias) add(given.up_bias, CHANNELS / 2);
      CUTE_UNROLL
      for (int i = 0; i < CHANNELS / 2; ++i) sums(i) = activate(sums(i), ACTIVATION) * (GATED ? sums(CHANNELS / 2 * GATED + i) : 1.0f);
      CUTE_UNROLL
      for (int piece = 0; piece < CHANNELS / PIECE; ++piece)
        store_rows<PIECE>(piece_of<PIECE>(sums, piece), shared.out, place < left ? listed : -1, given.out + channel + piece * PIECE, given.out_step);
    };
    if (LEVEL < 2 || left > thread / 128 * UNIT) {
      if (item.whole)
        run(Int<WIDTH>{});
      else
        run(Int<WIDTH / 2>{});
    } else {
      CUTE_NO_UNROLL
      for (int k = 0; k < given.depth; k += BK, turn.next()) {
        shared.full[turn.stage].wait(turn.phase);
        __syncwarp();  // all lanes have seen it full before it can be filled again
        release(turn.stage);
      }
    }
    item = next;
    next = after;
    left = counted(item, next_count);
  }
}

// A round is one use of a stage, once for each step of 64 of an item's depth. Both programs of a cluster walk the same items, in as many
// rounds each, so they agree on every round's stage and parity.
//   full[s]   129 arrivals: 128 of this program's producers, when their lines have come, 1 with the bytes to expect, by thread 0; and the
//             bytes of all boxes, also the neighbour's. Round r of a stage ends phase r; consumers wait with parity r & 1.
//   empty[s]  16 arrivals: one lane of each consumer warp of both programs. Producers wait with parity (r & 1) ^ 1 for phase r - 1.
// No overwrite: a warp can arrive for round n + 1 only after some program's phase n of `full` is over, which takes that program's
//   producers, hence all 16 arrivals for round n - 1 (of that stage). A warp that arrived has finished reading, so when a producer passes,
//   both programs' stages are read out, and its box may go to both.
// A box that comes before the neighbour's expect finds `full` in the same phase: the phase before is over (its consumers waited for
//   it), this one lacks the neighbour's own 129 arrivals; the byte count may be negative meanwhile.
// No deadlock: a producer waits only for releases of the round STAGES before, consumers only for loads of this round, of both
//   producers; every consumer, with rows or without, releases every round. The earliest unfinished round always goes on.
// Leaving: a consumer has waited for all bytes of all its rounds, and arrives elsewhere before the last barrier of the cluster.
__global__ void __launch_bounds__(THREADS, 1) gemm_mn_kernel(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      shared.full[stage].init(PRODUCERS + 1);
      shared.empty[stage].init(CONSUMERS / 32 * CLUSTER);
    }
    cutlass::arch::fence_barrier_init();
  }
  const int rank = block_rank_in_cluster(), parts = given.size / BN, all = given.num_tiles[0] * parts;
  cluster_sync();
  const Items items{given.tiles, all - given.num_tiles[1] * parts, all, parts, rank, int(blockIdx.x) / CLUSTER, int(gridDim.x) / CLUSTER};
  if (threadIdx.x < PRODUCERS) {
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    produce(given, shared, items);
  } else {
    cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    consume(given, shared, items);
  }
  // Nobody leaves while a neighbour may still write to its memory or arrive at its barriers.
  __syncwarp();
  cluster_sync();
}

void gemm_mn(View x, OptionalView bias, OptionalView up_bias, View out, View index, View counts, View tiles, View num_tiles, int64_t weight_map,
             int64_t up_map, int64_t blocks) {
  const auto map = [](int64_t at) { return *reinterpret_cast<TmaDescriptor const*>(at); };
  TVM_FFI_ICHECK(x.size(0) * x.stride(0) / LINE < (int64_t(1) << 32)) << "rows of " << x.stride(0) << " elements are too many to count their lines, got " << x.size(0);
  const Arguments given{map(weight_map), map(up_map), data<Half>(x), data<Half>(bias), data<Half>(up_bias), data<Half>(out),
                        data<int>(index), data<int>(counts), data<int>(tiles), data<int>(num_tiles),
                        int(x.size(0)), int(x.size(1)), int(out.size(1) / counts.numel()), uint32_t(x.stride(0)), uint32_t(out.stride(0))};
  launch(gemm_mn_kernel, blocks, THREADS, sizeof(Shared), x, given, CLUSTER);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm_mn, gemm_mn);
