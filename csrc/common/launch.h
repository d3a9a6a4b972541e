// What the CUDA sources offer to the host file: plain C functions over raw pointers.
//
// nvcc compiles the .cu files without any header of torch, in seconds, and this header is all that both sides share.
// Every function enqueues on `stream` and returns the CUDA error of the launch (0 for success).
#pragma once

#include <cstdint>

enum MegatronLiteDtype : int { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFloat16 = 3 };

struct MegatronLiteAdamw {
  double decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps, factor;
};

extern "C" {

int megatron_lite_swiglu_forward(int dtype, const void* gate, const void* up, void* out, int64_t n, void* stream);

int megatron_lite_swiglu_backward(int dtype, const void* grad, const void* gate, const void* up, void* grad_gate,
                                  void* grad_up, int64_t n, void* stream);

int megatron_lite_rms_norm_forward(int dtype, int weight_dtype, const void* x, const void* weight, double eps, void* y,
                                   void* scale, int64_t rows, int64_t hidden, void* stream);

// partial: [blocks, hidden] in the dtype of the computation.
int megatron_lite_rms_norm_backward(int dtype, int weight_dtype, const void* grad, const void* x, const void* weight,
                                    const void* scale, void* grad_x, void* grad_weight, void* partial, int64_t blocks,
                                    int64_t rows, int64_t hidden, void* stream);

// param_out may be null (the master is the model's weight). factor and skip may be null; they are read on the device.
int megatron_lite_adamw(int dtype, int grad_dtype, int out_dtype, void* param_out, void* master, const void* grad,
                        void* exp_avg, void* exp_avg_sq, MegatronLiteAdamw c, int factor_dtype, const void* factor,
                        const void* skip, int skip_bytes, int64_t n, void* stream);

int megatron_lite_philox_normal(float* out, const double* table, const int64_t* start, int64_t rows, int64_t length,
                                uint32_t key0, uint32_t key1, double std, void* stream);

int megatron_lite_philox_keep(bool* out, const int64_t* start, const int64_t* above1, const int64_t* above2,
                              const int64_t* above3, int64_t rows, int64_t length, uint32_t key0, uint32_t key1,
                              uint64_t threshold, void* stream);
}
