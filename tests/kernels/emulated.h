// Enough of CUDA C++ to run a kernel's source on a CPU: the threads of a cluster take turns wherever they wait for each other, clusters
// run one after the other. It finds wrong logic and many races; what only a GPU does (limits of a launch, machine code, memory) it cannot.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using std::max;
using std::min;

#ifndef __VECTOR_TYPES_H__
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
#endif

struct Place {
  int x;
};
static Place threadIdx, blockIdx, gridDim;
static int fiber, block_size;  // the running thread's number in its cluster; threads of a block
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

// The running block's stands for `extern __shared__`, which declares the pointer once more.
alignas(1024) static char shared_memory[2][232448];
static char (*own_shared)[];
#define dynamic_shared (*own_shared)
static int poison = 0xa5;
static unsigned offered[32][32];

// A thread begins in its own context and from then on jumps: a swap of contexts asks the system twice, which is most of the time.
struct Thread {
  ucontext_t begin;
  jmp_buf place;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool began, ended;
};
static std::vector<Thread> block_threads(1024);
static jmp_buf scheduler;
static std::function<void()> running;

// The others' turn.
static void pause() {
  if (!_setjmp(block_threads[fiber].place)) _longjmp(scheduler, 1);
}
struct Together {
  int size, waiting = 0, times = 0;
  void wait() {
    const int now = times;
    if (++waiting == size) {
      waiting = 0;
      ++times;
    }
    while (times == now) pause();
  }
};
static Together whole_cluster, whole_block[2], whole_warp[32];

static void __syncthreads() { whole_block[fiber / block_size].wait(); }
static void __syncwarp() { whole_warp[fiber / 32].wait(); }

// What a function makes of the values that all lanes of a warp offer.
template <class Function> static unsigned together(unsigned value, Function function) {
  unsigned* lanes = offered[fiber / 32];
  lanes[threadIdx.x % 32] = value;
  __syncwarp();
  const unsigned found = function(lanes);
  __syncwarp();
  return found;
}
static unsigned __ballot_sync(unsigned, bool vote) {
  return together(vote, [](const unsigned* lanes) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= lanes[lane] << lane;
    return found;
  });
}
static unsigned __match_any_sync(unsigned, unsigned value) {
  return together(value, [=](const unsigned* lanes) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= unsigned(lanes[lane] == value) << lane;
    return found;
  });
}
static unsigned __reduce_or_sync(unsigned, unsigned value) {
  return together(value, [](const unsigned* lanes) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= lanes[lane];
    return found;
  });
}
static unsigned __shfl_sync(unsigned, unsigned value, int from) {
  return together(value, [=](const unsigned* lanes) { return lanes[from]; });
}
static unsigned __shfl_up_sync(unsigned all, unsigned value, int step) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(all, value, lane >= step ? lane - step : lane);
}
static unsigned __shfl_xor_sync(unsigned all, unsigned value, int bits) { return __shfl_sync(all, value, threadIdx.x % 32 ^ bits); }
static int __popc(unsigned value) { return __builtin_popcount(value); }
static unsigned __funnelshift_r(unsigned low, unsigned high, int bits) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  return unsigned(both >> (bits & 31));
}
static int __ffs(unsigned value) { return __builtin_ffs(value); }
static void atomicAdd(unsigned* at, unsigned value) { __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }

static void run_thread() {
  running();
  block_threads[fiber].ended = true;
  _longjmp(scheduler, 1);
}

static void launch(int blocks, int size, std::function<void()> kernel, int cluster = 1) {
  running = kernel;
  gridDim.x = blocks;
  block_size = size;
  const int threads = size * cluster;
  for (int first = 0; first < blocks; first += cluster) {
    memset(shared_memory, poison, sizeof shared_memory);
    whole_cluster = {threads};
    for (Together& block : whole_block) block = {size};
    for (Together& warp : whole_warp) warp = {32};
    for (int i = 0; i < threads; ++i) {
      Thread& thread = block_threads[i];
      thread.began = thread.ended = false;
      getcontext(&thread.begin);
      thread.begin.uc_stack.ss_sp = thread.stack.data();
      thread.begin.uc_stack.ss_size = thread.stack.size();
      thread.begin.uc_link = nullptr;
      makecontext(&thread.begin, run_thread, 0);
    }
    std::vector<int> turns(threads);
    for (int i = 0; i < threads; ++i) turns[i] = i;
    for (int left = threads; left;) {
      left = 0;
      // In another order each time: what depends on it is a race.
      for (int i = threads - 1; i > 0; --i) std::swap(turns[i], turns[rand() % (i + 1)]);
      for (int thread : turns)
        if (!block_threads[thread].ended) {
          fiber = thread;
          threadIdx.x = thread % size;
          blockIdx.x = first + thread / size;
          own_shared = reinterpret_cast<char(*)[]>(shared_memory[thread / size]);
          if (!_setjmp(scheduler)) {
            if (block_threads[thread].began) _longjmp(block_threads[thread].place, 1);
            block_threads[thread].began = true;
            setcontext(&block_threads[thread].begin);
          }
          left += !block_threads[thread].ended;
        }
    }
  }
}
