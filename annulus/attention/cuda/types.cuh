// The kernels of one type; included by the file of that type alone, so that types compile side by side.
#pragma once

#include <algorithm>

#include "annulus/attention/cuda/forward.cuh"
#include "annulus/attention/cuda/key_gradient.cuh"
#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/query_gradient.cuh"

namespace annulus::attention::cuda {

template <class T>
void forward_of(const char* op, const ForwardArgs& a, cudaStream_t stream) {
  visit_columns(std::max(a.p.D, a.p.Dv),
                [&]<int kColumns>() { launch_forward<T, kColumns>(op, a, stream); });
}
template <class T>
void query_gradient_of(const char* op, const QueryGradientArgs& a, cudaStream_t stream) {
  visit_columns(std::max(a.p.D, a.p.Dv),
                [&]<int kColumns>() { launch_query_gradient<T, kColumns>(op, a, stream); });
}
template <class T>
void key_gradient_of(const char* op, const KeyGradientArgs& a, cudaStream_t stream) {
  visit_columns(std::max(a.p.D, a.p.Dv),
                [&]<int kColumns>() { launch_key_gradient<T, kColumns>(op, a, stream); });
}

}  // namespace annulus::attention::cuda
