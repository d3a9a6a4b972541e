// A grid of CUDA threads, run on the CPU: enough of CUDA for the kernels of csrc/, so that their logic can be tested where
// there is no GPU. Compile a .cu file as C++ with this directory on the include path.
//
// Blocks run one after the other; the threads of a block are coroutines that hand over at barriers and shuffles, so a
// barrier that not all threads reach is found (the block would never end). What this does not show: races between
// barriers, memory alignment faults of wide loads, and speed.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __global__ static
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr size_t kStack = 64 << 10;

struct Block {
  std::vector<ucontext_t> threads;
  std::vector<char> stacks;
  std::vector<bool> done;
  std::vector<int> generation;  // barriers passed
  std::vector<double> exchange;
  ucontext_t scheduler;
  unsigned current = 0;
  std::function<void()> body;
};
inline Block block;
inline std::vector<unsigned char> dynamic_shared;

inline void hand_over() {
  const unsigned me = block.current;
  swapcontext(&block.threads[me], &block.scheduler);
  threadIdx.x = me;
}

inline void thread_main() {
  block.body();
  block.done[block.current] = true;
}

inline void run_block(unsigned threads) {
  block.threads.resize(threads);
  block.stacks.resize(threads * kStack);
  block.done.assign(threads, false);
  block.generation.assign(threads, 0);
  block.exchange.assign(threads, 0);
  for (unsigned t = 0; t < threads; ++t) {
    getcontext(&block.threads[t]);
    block.threads[t].uc_stack.ss_sp = &block.stacks[t * kStack];
    block.threads[t].uc_stack.ss_size = kStack;
    block.threads[t].uc_link = &block.scheduler;
    makecontext(&block.threads[t], thread_main, 0);
  }
  for (int64_t rounds = 0, left = threads; left > 0; ++rounds) {
    if (rounds > 1000000) {
      std::fprintf(stderr, "a barrier is not reached by all threads of the block\n");
      std::abort();
    }
    left = 0;
    for (unsigned t = 0; t < threads; ++t) {
      if (block.done[t]) continue;
      block.current = threadIdx.x = t;
      swapcontext(&block.scheduler, &block.threads[t]);
      left += !block.done[t];
    }
  }
}

template <class Kernel, class... Args>
void launch(Kernel kernel, unsigned grid, unsigned threads, size_t shared, Args... args) {
  dynamic_shared.assign(shared, 0xff);  // whatever was there before
  gridDim.x = grid;
  blockDim.x = threads;
  block.body = [=] { kernel(args...); };
  for (unsigned b = 0; b < grid; ++b) {
    blockIdx.x = b;
    run_block(threads);
  }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  auto& b = cuda_on_cpu::block;
  const int mine = ++b.generation[b.current];
  const auto all_here = [&] {
    for (int g : b.generation) {
      if (g < mine) return false;
    }
    return true;
  };
  while (!all_here()) cuda_on_cpu::hand_over();
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int other) {
  auto& b = cuda_on_cpu::block;
  const unsigned me = b.current;
  b.exchange[me] = double(value);
  cuda_on_cpu::hand_over();  // every lane of the warp writes,
  const T theirs = T(b.exchange[me ^ unsigned(other)]);
  cuda_on_cpu::hand_over();  // every lane reads, and only then is it overwritten
  return theirs;
}

using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
inline int cudaGetLastError() { return 0; }
template <class Kernel>
int cudaFuncSetAttribute(Kernel, int, int) {
  return 0;
}

#define ML_LAUNCH(kernel, grid, block, shared, stream, ...) \
  ((void)(stream), cuda_on_cpu::launch(kernel, grid, block, shared, __VA_ARGS__))
#define ML_DYNAMIC_SHARED(name) unsigned char* const name = cuda_on_cpu::dynamic_shared.data()
