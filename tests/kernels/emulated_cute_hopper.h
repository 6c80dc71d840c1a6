// As emulated_cute.h, for kernels on CuTe for Hopper: barriers in memory, boxes of tensor maps and products by descriptors, as PTX's manual
// has them. What is asynchronous happens at once or later, in any order that the hardware may choose; products at the latest when they are
// waited for, so that a stage that is released too early, or filled where nobody reads, gives wrong sums.
#include <cstdint>
// CuTe has no shared memory on a CPU; descriptors hold its addresses.
#define cast_smem_ptr_to_uint cast_nothing
#include <cute/arch/util.hpp>
#undef cast_smem_ptr_to_uint
namespace cute {
static uint32_t cast_smem_ptr_to_uint(void const* pointer);
}
#include "emulated_cute.h"

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

static uint32_t own_address(void const* pointer) {
  const auto found = static_cast<char const*>(pointer) - *own_shared;
  CHECK(found >= 0 && found < 232448);
  return uint32_t(found);
}
static uint32_t cute::cast_smem_ptr_to_uint(void const* pointer) { return own_address(pointer); }
// The same place in a block's memory.
template <class T> static T* in_block(T* pointer, int rank) { return reinterpret_cast<T*>(shared_memory[rank] + own_address(pointer)); }
// Where 128 bytes of swizzled lines have what lies at an address.
static uint32_t swizzled_128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// What is on its way to shared memory.
static std::vector<std::function<void()>> arriving;
static void send(std::function<void()> arrive) { rand() % 2 ? arrive() : arriving.push_back(std::move(arrive)); }
static void let_arrive() {
  if (arriving.empty() || rand() % 2) return;
  std::swap(arriving[rand() % arriving.size()], arriving.back());
  const auto arrive = std::move(arriving.back());
  arriving.pop_back();
  arrive();
}

static int emulated_rank() { return fiber / block_size; }
static void emulated_cluster_sync() { whole_cluster.wait(); }
#define block_rank_in_cluster emulated_rank
#define cluster_sync emulated_cluster_sync

struct EmulatedBarrier {
  uint16_t size, missing;
  int bytes : 31;
  unsigned phase : 1;
  void init(int arrivals) { size = missing = arrivals, bytes = 0, phase = 0; }
  void end_phase() {
    if (!missing && !bytes) missing = size, phase ^= 1;
  }
  void arrive() {
    CHECK(missing > 0);
    --missing;
    end_phase();
  }
  void arrive(int rank) { in_block(this, rank)->arrive(); }
  void arrive_and_expect_tx(int expected) { bytes += expected, arrive(); }
  void complete(int arrived) { bytes -= arrived, end_phase(); }
  void wait(unsigned parity) {
    for (int times = 0; phase == parity; ++times) {
      CHECK(times < 100000);
      let_arrive();
      pause();
    }
  }
};
static_assert(sizeof(EmulatedBarrier) == 8, "as large as the real one");
static void emulated_arrive(uint64_t const* barrier) {
  std::vector<Copy> copies;
  for (auto& group : under_way[fiber]) copies.insert(copies.end(), group.begin(), group.end());
  under_way[fiber].clear();
  const auto to = reinterpret_cast<EmulatedBarrier*>(const_cast<uint64_t*>(barrier));
  send([=] {
    for (const Copy& copy : copies) copy.happen();
    to->arrive();
  });
}
namespace cutlass::arch {
using ::emulated_arrive, ::EmulatedBarrier;
}
#define ClusterTransactionBarrier EmulatedBarrier
#define cpasync_barrier_arrive_noinc emulated_arrive

// What test_cute_emulated.py writes where the driver would put a tensor map.
struct EmulatedMap {
  char const* address;
  int64_t rows, columns, stride, box_rows, box_columns;
};
struct EmulatedBox {
  static void copy(void const* map, uint64_t* barrier, uint64_t, void* to, int k, int row) { copy(map, barrier, uint16_t(1 << emulated_rank()), 0, to, k, row); }
  static void copy(void const* described, uint64_t* barrier, uint16_t ranks, uint64_t, void* to, int k, int row) {
    const auto map = *static_cast<EmulatedMap const*>(described);
    CHECK(map.box_columns == 64 && own_address(to) % 128 == 0);
    for (int rank = 0; rank < 2; ++rank)
      if (ranks >> rank & 1) {
        const auto lines = in_block(static_cast<char*>(to), rank) - own_address(to);
        const auto counted = in_block(reinterpret_cast<EmulatedBarrier*>(barrier), rank);
        const uint32_t first = own_address(to);
        send([=] {
          for (int i = 0; i < map.box_rows * 8; ++i) {
            char* const line = lines + swizzled_128(first + i * 16);
            const int64_t at_row = row + i / 8, at_k = k + i % 8 * 8;
            const bool there = at_row < map.rows && at_k < map.columns;
            there ? memcpy(line, map.address + at_row * map.stride + at_k * 2, 16) : memset(line, 0, 16);
          }
          counted->complete(int(map.box_rows * 128));
        });
      }
  }
};
#define SM90_TMA_LOAD_2D EmulatedBox
#define SM90_TMA_LOAD_MULTICAST_2D EmulatedBox

// Products of a thread in committed groups, the last one open.
static std::vector<std::vector<std::function<void()>>> products[1024];
static void emulated_begin() {}
static void emulated_commit() { products[fiber].emplace_back(); }
template <int N> static void emulated_products_wait() {
  auto& groups = products[fiber];
  while (groups.size() > N + 1) {
    for (auto& multiply : groups.front()) multiply();
    groups.erase(groups.begin());
  }
  __syncwarp();  // which the instruction is
}
#define warpgroup_arrive emulated_begin
#define warpgroup_commit_batch emulated_commit
#define warpgroup_wait emulated_products_wait

namespace cute {
template <class S, class SL, class D, class DL> void copy_unpack(Copy_Traits<SM90_U32x4_STSM_N> const&, Tensor<S, SL> const& source, Tensor<D, DL>& target) {
  CHECK(reinterpret_cast<uintptr_t>(&target(0)) % 16 == 0);
  with_lanes(&target(0), [&](const void** lanes, int lane) {
    for (int i = 0; i < 4; ++i) memcpy(const_cast<uint16_t*>(static_cast<uint16_t const*>(lanes[8 * i + lane / 4])) + lane % 4 * 2, &source(2 * i), 4);
  });
}
namespace SM90::GMMA {
// Sixteen elements of a row of lines of 128 bytes: rows lie in eights, that far apart; where they are is swizzled by address.
template <class T> void read_row(GmmaDescriptor from, int row, float* to) {
  const auto fields = from.bitfield;
  CHECK(LayoutType(fields.layout_type_) == LayoutType::B128 && fields.base_offset_ == 0);
  const uint32_t first = (fields.start_address_ << 4) + row / 8 * (fields.stride_byte_offset_ << 4) + row % 8 * 128;
  for (int k = 0; k < 16; ++k) {
    T value;
    memcpy(&value, *own_shared + swizzled_128(first + k * 2), 2);
    to[k] = float(value);
  }
}
template <template <Major, Major, ScaleIn, ScaleIn> class Op, Major A, Major B, ScaleIn C, ScaleIn D, class TD, class DL, class TA, class AL, class TB, class BL, class TC, class CL>
void mma_unpack(MMA_Traits<Op<A, B, C, D>> const& traits, Tensor<TD, DL>& d, Tensor<TA, AL> const& a, Tensor<TB, BL> const& b, Tensor<TC, CL> const&) {
  static_assert(A == Major::K && B == Major::K);
  using T = typename MMA_Traits<Op<A, B, C, D>>::ValTypeA;
  float* const sums = &d(0);
  const GmmaDescriptor rows(uint64_t(a(0))), columns(uint64_t(b(0)));
  const bool adds = traits.accumulate_ == ScaleOut::One;
  constexpr int WIDTH = decltype(size(d))::value * 2;
  const auto multiply = [=] {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    float of_rows[2][16], of_column[16];
    for (int half = 0; half < 2; ++half) read_row<T>(rows, row + 8 * half, of_rows[half]);
    for (int i = 0; i < WIDTH / 4; ++i) {
      read_row<T>(columns, i / 2 * 8 + lane % 4 * 2 + i % 2, of_column);
      for (int half = 0; half < 2; ++half) {
        float& sum = sums[i / 2 * 4 + 2 * half + i % 2];
        if (!adds) sum = 0;
        for (int k = 0; k < 16; ++k) sum += of_rows[half][k] * of_column[k];
      }
    }
  };
  auto& groups = products[fiber];
  if (groups.empty()) groups.emplace_back();
  groups.size() == 1 && groups[0].empty() && rand() % 2 ? multiply() : groups.back().push_back(multiply);
}
}  // namespace SM90::GMMA
}  // namespace cute

// Of a cluster no thread may leave before everything has arrived, else not the last one.
static void check_arrived() {
  if (whole_cluster.size == block_size) whole_cluster.wait();
  CHECK(arriving.empty());
}
static const bool is_set = (check_end = check_arrived, most_shared = 232448, true);
