// CUDA streams and graphs for tests: what a call does on a stream, recorded, counted and replayed; and a call
// of a case with its tensors on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/context.h"
#include "annulus/cuda/check.h"
#include "testing/dense.h"
#include "testing/reference.h"

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

// The tensors of one call on the device, and the call on a stream.
class PreparedCall {
 public:
  using Bytes = std::vector<std::vector<std::byte>>;

  PreparedCall(const Case& c, std::size_t call) : case_(c), index_(call), call_(c.calls[call]) {
    for (const TensorSpec& spec : call_.inputs) add(spec, inputs_, in_);
    for (const TensorSpec& spec : call_.outputs) add(spec, outputs_, out_);
    scratch_ = Buffer(cuda_device(0), call_.workspace(in_, out_));
  }
  // Values of another draw, and what an earlier function of the operator makes of them.
  void draw(std::uint64_t seed) {
    case_.seed = seed;
    const std::vector<Values> values = draw_inputs(case_);
    for (std::size_t i = 0; i < inputs_.size(); ++i) inputs_[i].write(values[index_][i]);
    Context context;
    if (call_.prepare) call_.prepare(in_, context);
    synchronize(cuda_device(0));
  }
  void run(const Stream& stream) const {
    BorrowedWorkspace workspace(scratch_.data(), scratch_.bytes());
    Context context;
    context.stream = stream.get();
    context.allocator = &workspace;
    call_.run(in_, out_, context);
  }
  // What f leaves in outputs that were full of NaN; nothing of those whose bits may change (TensorSpec::reordered).
  template <class F>
  Bytes results_of(const Stream& stream, F&& f) const {
    for (const TensorView& v : out_) {
      const auto size = static_cast<std::size_t>(v.numel() * size_of(v.dtype));
      check_cuda(cudaMemsetAsync(v.data, 0xff, size, stream.get()), "clear");
    }
    f();
    stream.wait();
    Bytes all;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      if (!call_.outputs[i].reordered) all.push_back(outputs_[i].bytes());
    }
    return all;
  }

 private:
  using Tensors = std::vector<Dense>;
  static void add(const TensorSpec& spec, Tensors& tensors, std::vector<TensorView>& views) {
    views.push_back(tensors.emplace_back(cuda_device(0), spec.dtype, spec.shape).view());
  }

  Case case_;
  std::size_t index_;
  const Call& call_;
  Tensors inputs_, outputs_;
  std::vector<TensorView> in_, out_;
  Buffer scratch_;
};

}  // namespace annulus::testing
