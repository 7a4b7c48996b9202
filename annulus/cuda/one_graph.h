// Many launches as one node: what a function launches, while the caller records a graph, becomes one
// node of that graph. Only for files compiled with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "annulus/cuda/check.h"

namespace annulus::cuda {

namespace detail {

// Whatever else is being recorded, what this scope does is no part of it.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A stream to record on, and the graph that comes of it.
struct Recording {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;

  Recording() = default;
  ~Recording() {
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
};

}  // namespace detail

// f(a stream) launches; nothing it does may wait. Where nobody records, it launches on `stream`: with a
// graph made, launched and destroyed in every call the test of eight threads crashed.
template <class F>
void record_as_one_node(const char* op, cudaStream_t stream, F&& f) {
  cudaStreamCaptureStatus status;
  ANNULUS_CUDA_CHECK(op, cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusActive) return f(stream);
  const detail::RelaxedCapture relaxed;
  detail::Recording own;
  ANNULUS_CUDA_CHECK(op, cudaStreamCreateWithFlags(&own.stream, cudaStreamNonBlocking));
  ANNULUS_CUDA_CHECK(op, cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeRelaxed));
  try {
    f(own.stream);
  } catch (...) {
    (void)cudaStreamEndCapture(own.stream, &own.graph);
    (void)cudaGetLastError();
    throw;
  }
  ANNULUS_CUDA_CHECK(op, cudaStreamEndCapture(own.stream, &own.graph));
  cudaGraph_t outer = nullptr;
  const cudaGraphNode_t* before = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  std::size_t count = 0;
  ANNULUS_CUDA_CHECK(
      op, cudaStreamGetCaptureInfo(stream, &status, nullptr, &outer, &before, &edges, &count));
  cudaGraphNode_t node;
  ANNULUS_CUDA_CHECK(op, cudaGraphAddChildGraphNode(&node, outer, before, count, own.graph));
  ANNULUS_CUDA_CHECK(op, cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1,
                                                             cudaStreamSetCaptureDependencies));
}

}  // namespace annulus::cuda
