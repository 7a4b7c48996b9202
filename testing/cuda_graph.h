// CUDA streams and graphs for tests: what a call does on a stream, recorded, counted and replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "annulus/cuda/check.h"

namespace annulus::testing {

inline void check_cuda(cudaError_t error, const char* what) {
  annulus::cuda::throw_on_error(error, "graph test", what);
}

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "synchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// What f does on the stream, recorded and not run.
class Graph {
 public:
  template <class F>
  Graph(const Stream& stream, F&& f) {
    check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
               "begin capture");
    try {
      f();
    } catch (...) {
      (void)cudaStreamEndCapture(stream.get(), &graph_);
      if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
      throw;
    }
    check_cuda(cudaStreamEndCapture(stream.get(), &graph_), "end capture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "instantiate");
  }
  ~Graph() {
    (void)cudaGraphExecDestroy(executable_);
    (void)cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay(const Stream& stream) const {
    check_cuda(cudaGraphLaunch(executable_, stream.get()), "launch");
  }
  // Nodes of one type, kernels unless told.
  int count(cudaGraphNodeType wanted = cudaGraphNodeTypeKernel) const {
    int found = 0;
    for (const cudaGraphNode_t node : nodes()) {
      cudaGraphNodeType type;
      check_cuda(cudaGraphNodeGetType(node, &type), "node type");
      found += type == wanted;
    }
    return found;
  }
  std::vector<cudaGraphNode_t> nodes() const {
    std::size_t n = 0;
    check_cuda(cudaGraphGetNodes(graph_, nullptr, &n), "nodes");
    std::vector<cudaGraphNode_t> all(n);
    check_cuda(cudaGraphGetNodes(graph_, all.data(), &n), "nodes");
    return all;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace annulus::testing
