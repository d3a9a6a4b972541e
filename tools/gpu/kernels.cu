// Every kernel of csrc/ on buffers of exactly its size, for tools that watch memory: compute-sanitizer on a GPU, and on a
// CPU, compiled as C++ with tests/cuda_on_cpu.h, the compiler's own sanitizers. Results are not looked at.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/common/launch.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
using cudaStream_t = void*;
static int cudaMalloc(void** p, size_t n) { return (*p = std::malloc(n)) == nullptr; }
static int cudaFree(void* p) { return std::free(p), 0; }
static int cudaDeviceSynchronize() { return 0; }
enum { cudaMemcpyHostToDevice };
static int cudaMemcpy(void* to, const void* from, size_t n, int) { return std::memcpy(to, from, n), 0; }
#endif

namespace {

int runs = 0;

void must(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: CUDA error %d\n", what, error);
  std::exit(1);
}

void launched(int error, const char* what) {
  must(error, what);
  must(int(cudaDeviceSynchronize()), what);
  ++runs;
}

int64_t size_of(int dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

// Device memory of exactly `bytes`, behind `skip` bytes that move its address; filled with small numbers in any dtype.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t skip = 0) : skip_(skip) {
    const std::vector<unsigned char> content(size_t(bytes + skip) + 1, 0x3c);
    must(int(cudaMalloc(&start_, size_t(bytes + skip ? bytes + skip : 1))), "cudaMalloc");
    must(int(cudaMemcpy(start_, content.data(), size_t(bytes + skip), cudaMemcpyHostToDevice)), "cudaMemcpy");
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(start_); }
  void set(const void* from, int64_t bytes) {
    must(int(cudaMemcpy(static_cast<char*>(start_) + skip_, from, size_t(bytes), cudaMemcpyHostToDevice)), "cudaMemcpy");
  }
  template <class T = void>
  T* get() {
    return reinterpret_cast<T*>(static_cast<char*>(start_) + skip_);
  }

 private:
  void* start_ = nullptr;
  int64_t skip_;
};

void swiglu(int dtype, int64_t n, int64_t off) {
  const int64_t bytes = n * size_of(dtype), skip = off * size_of(dtype);
  Buffer grad(bytes, skip), gate(bytes, skip), up(bytes, skip), out(bytes, skip), dgate(bytes, skip), dup(bytes, skip);
  launched(megatron_lite_swiglu_forward(dtype, gate.get(), up.get(), out.get(), n, nullptr), "swiglu_forward");
  launched(megatron_lite_swiglu_backward(dtype, grad.get(), gate.get(), up.get(), dgate.get(), dup.get(), n, nullptr),
           "swiglu_backward");
}

void rms_norm(int dtype, bool wide, int64_t rows, int64_t hidden, int64_t off) {
  const int compute = dtype == kFloat64 ? kFloat64 : kFloat32, weight_dtype = wide ? compute : dtype;
  const int64_t bytes = rows * hidden * size_of(dtype), skip = off * size_of(dtype), w = size_of(weight_dtype);
  const int64_t blocks = rows < 3 ? rows : 3;
  Buffer grad(bytes, skip), x(bytes, skip), y(bytes, skip), dx(bytes, skip);
  Buffer weight(hidden * w, off * w), dweight(hidden * w, off * w);
  Buffer scale(rows * size_of(compute)), partial(blocks * hidden * size_of(compute));
  launched(megatron_lite_rms_norm_forward(dtype, weight_dtype, x.get(), weight.get(), 1e-5, y.get(), scale.get(), rows,
                                          hidden, nullptr),
           "rms_norm_forward");
  launched(megatron_lite_rms_norm_backward(dtype, weight_dtype, grad.get(), x.get(), weight.get(), scale.get(), dx.get(),
                                           dweight.get(), partial.get(), blocks, rows, hidden, nullptr),
           "rms_norm_backward");
}

void adamw(int dtype, int grad_dtype, int out_dtype, int64_t n, int64_t off) {
  const int64_t s = size_of(dtype), g = size_of(grad_dtype), o = size_of(out_dtype);
  Buffer out(n * o, off * o), master(n * s, off * s), m(n * s, off * s), v(n * s, off * s), grad(n * g, off * g);
  Buffer factor(8), skip(1);
  const MegatronLiteAdamw c{0.999, 0.9, 0.1, 0.95, 0.05, 1e-3, 1.5, 1e-8, 1.0};
  for (const unsigned char skipped : {0, 1}) {
    skip.set(&skipped, 1);
    launched(megatron_lite_adamw(dtype, grad_dtype, out_dtype, out.get(), master.get(), grad.get(), m.get(), v.get(), c,
                                 kFloat64, factor.get(), skip.get(), 1, n, nullptr),
             "adamw");
  }
  launched(megatron_lite_adamw(dtype, grad_dtype, dtype, nullptr, master.get(), grad.get(), m.get(), v.get(), c, kFloat32,
                               nullptr, nullptr, 0, n, nullptr),
           "adamw");
}

void philox(const std::vector<int64_t>& starts, int64_t length) {
  const int64_t rows = int64_t(starts.size());
  const std::vector<double> zeros(32 * 14, 0.0);
  Buffer normal(rows * length * 4), keep(rows * length), table(32 * 14 * 8), start(rows * 8), above(rows * 8);
  table.set(zeros.data(), 32 * 14 * 8);
  start.set(starts.data(), rows * 8);
  launched(megatron_lite_philox_normal(normal.get<float>(), table.get<double>(), start.get<int64_t>(), rows, length, 1, 2,
                                       0.02, nullptr),
           "philox_normal");
  launched(megatron_lite_philox_keep(keep.get<bool>(), start.get<int64_t>(), above.get<int64_t>(), above.get<int64_t>(),
                                     above.get<int64_t>(), rows, length, 1, 2, uint64_t(1) << 30, nullptr),
           "philox_keep");
}

}  // namespace

int main() {
  for (const int dtype : {kFloat32, kFloat64, kBfloat16, kFloat16}) {
    for (const int64_t off : {0, 1}) {
      for (const int64_t n : {1, 7, 255, 2048, 4099}) swiglu(dtype, n, off);
      for (const bool wide : {false, true}) {
        rms_norm(dtype, wide, 1, 1, off);
        rms_norm(dtype, wide, 19, 64, off);
        rms_norm(dtype, wide, 3, 1025, off);
        rms_norm(dtype, wide, 5, 4104, off);
        rms_norm(dtype, wide, 2, 16384, off);
      }
    }
  }
  for (const int64_t off : {0, 1, 3}) {
    for (const int64_t n : {1, 1023, 2051}) {
      adamw(kFloat32, kFloat32, kBfloat16, n, off);
      adamw(kFloat32, kBfloat16, kFloat16, n, off);
      adamw(kFloat32, kFloat16, kFloat32, n, off);
      adamw(kFloat64, kFloat64, kFloat64, n, off);
    }
  }
  philox({0, 1, 2, 3}, 1);
  philox({7, 4096}, 1023);
  philox({5}, 4096);
  std::printf("%d launches\n", runs);
  return 0;
}
