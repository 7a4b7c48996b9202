// The kernels for Hopper, and whether they are for a call: bf16 and f16 of 128 columns at most, rows whole, intervals of keys
// (no holes, no dropout), sweeps long enough to fill a tile. Everything else is for those of any GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "annulus/attention/cuda/arguments.cuh"

namespace annulus::attention::cuda::sm90 {

bool takes_forward(const char* op, DType dtype, const Problem& p);
// Of dk and dv along with dq; `a` without where its results go.
bool takes_gradient(const char* op, DType dtype, const KeyGradientArgs& a);

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream);
// Returns at once where a.not_finite says so.
template <class T>
void gradient_of(const char* op, const GradientArgs& a, cudaStream_t stream);

// Was the library compiled for Hopper (sm_90a)?
bool available(const char* op);

}  // namespace annulus::attention::cuda::sm90
