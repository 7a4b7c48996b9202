// Many launches as one: what a function does on a stream is recorded as a graph and launched as such,
// or becomes one node of the graph that the caller is recording. Only for files compiled with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "annulus/cuda/check.h"

namespace annulus::cuda {

namespace detail {

// A stream to record on, and the graph that comes of it.
class Recording {
 public:
  explicit Recording(const char* op) : op_(op) {
    // Whatever the caller is recording, making a stream of our own is no part of it.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    ANNULUS_CUDA_CHECK(op_, cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t made = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    ANNULUS_CUDA_CHECK(op_, cudaThreadExchangeStreamCaptureMode(&mode));
    throw_on_error(made, op_, "a stream to record on");
  }
  ~Recording() {
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  template <class F>
  cudaGraph_t record(F&& f) {
    ANNULUS_CUDA_CHECK(op_, cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      f(stream_);
    } catch (...) {
      (void)cudaStreamEndCapture(stream_, &graph_);
      (void)cudaGetLastError();
      throw;
    }
    ANNULUS_CUDA_CHECK(op_, cudaStreamEndCapture(stream_, &graph_));
    return graph_;
  }

 private:
  const char* op_;
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
};

}  // namespace detail

// f(a stream) launches; nothing it does may wait.
template <class F>
void launch_as_one_graph(const char* op, cudaStream_t stream, F&& f) {
  detail::Recording recording(op);
  const cudaGraph_t graph = recording.record(f);
  cudaStreamCaptureStatus status;
  cudaGraph_t outer = nullptr;
  const cudaGraphNode_t* before = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  std::size_t count = 0;
  ANNULUS_CUDA_CHECK(
      op, cudaStreamGetCaptureInfo(stream, &status, nullptr, &outer, &before, &edges, &count));
  if (status == cudaStreamCaptureStatusActive) {
    cudaGraphNode_t node;
    ANNULUS_CUDA_CHECK(op, cudaGraphAddChildGraphNode(&node, outer, before, count, graph));
    ANNULUS_CUDA_CHECK(op, cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1,
                                                               cudaStreamSetCaptureDependencies));
    return;
  }
  cudaGraphExec_t executable = nullptr;
  ANNULUS_CUDA_CHECK(op, cudaGraphInstantiate(&executable, graph, 0));
  const cudaError_t launched = cudaGraphLaunch(executable, stream);
  (void)cudaGraphExecDestroy(executable);  // the driver keeps it until it has run
  throw_on_error(launched, op, "launch of a graph");
}

}  // namespace annulus::cuda
