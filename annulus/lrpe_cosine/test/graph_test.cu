// LRPE in CUDA graphs: every call is captured on a stream of its own and replayed with new offsets,
// and the captured graph says how many kernels a call launches.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/cuda_graph.h"
#include "testing/dense.h"
#include "testing/reference.h"

namespace annulus::testing {
namespace {

using Form = LrpeProblem::Form;
using Bytes = std::vector<std::vector<std::byte>>;

// The tensors of one call on the device, and the call on a stream.
class Prepared {
 public:
  Prepared(const Case& c, const Call& call) : call_(call) {
    const Values values = draw_inputs(c, call);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const TensorSpec& spec = call.inputs[i];
      inputs_.push_back(std::make_unique<Dense>(cuda_device(0), spec.dtype, spec.shape));
      inputs_.back()->write(values[i]);
      in_.push_back(inputs_.back()->view());
      if (spec.name == "offsets") offsets_ = in_.back();
    }
    for (const TensorSpec& spec : call.outputs) {
      outputs_.push_back(std::make_unique<Dense>(cuda_device(0), spec.dtype, spec.shape));
      out_.push_back(outputs_.back()->view());
    }
  }
  void run(const Stream& stream) const {
    Context context;
    context.stream = stream.get();
    call_.run(in_, out_, context);
  }
  // New offsets and outputs full of NaN, in the order of the stream.
  void reset(const Stream& stream, const std::vector<std::int64_t>& offsets) {
    set_offsets(stream, offsets);
    clear_outputs(stream);
  }
  void clear_outputs(const Stream& stream) {
    for (const TensorView& v : out_) {
      const auto size = static_cast<std::size_t>(v.numel() * size_of(v.dtype));
      check_cuda(cudaMemsetAsync(v.data, 0xff, size, stream.get()), "clear");
    }
  }
  Bytes results(const Stream& stream) const {
    stream.wait();
    Bytes all;
    for (const auto& t : outputs_) all.push_back(t->bytes());
    return all;
  }

 private:
  void set_offsets(const Stream& stream, const std::vector<std::int64_t>& offsets) {
    std::vector<std::int32_t> narrow(offsets.begin(), offsets.end());
    const void* source = offsets_.dtype == DType::kI64 ? static_cast<const void*>(offsets.data())
                                                       : static_cast<const void*>(narrow.data());
    const auto bytes = static_cast<std::size_t>(offsets_.numel() * size_of(offsets_.dtype));
    check_cuda(cudaMemcpyAsync(offsets_.data, source, bytes, cudaMemcpyHostToDevice, stream.get()),
               "offsets");
    stream.wait();  // `narrow` ends here
  }

  Call call_;
  std::vector<std::unique_ptr<Dense>> inputs_, outputs_;
  std::vector<TensorView> in_, out_;
  TensorView offsets_;
};

class LrpeGraph : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = annulus::cuda::why_unavailable();
    if (!why.empty()) GTEST_SKIP() << "no CUDA device: " << why;
  }
};

std::vector<LrpeProblem> problems() {
  std::vector<LrpeProblem> all;
  for (const Form form :
       {Form::kCosine, Form::kCosineQk, Form::kRotateHalves, Form::kRotateInterleaved}) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
      for (const LrpeActivation activation :
           {LrpeActivation::kNone, LrpeActivation::kSilu, LrpeActivation::kSoftmaxFeatures,
            LrpeActivation::kSoftmaxTokens}) {
        const bool rotate = form == Form::kRotateHalves || form == Form::kRotateInterleaved;
        if (rotate && activation != LrpeActivation::kNone) continue;
        LrpeProblem p{.form = form, .B = 3, .H = 4, .Hk = 2, .D = 64, .E = 64, .shape = {150}};
        p.prefix = 2;
        p.dtype = dtype;
        p.activation = activation;
        p.offset_per_batch = true;
        p.seed = 2 * (1000 + all.size()) + all.size() / 4 % 2;  // i32 and i64 offsets
        all.push_back(p);
      }
    }
  }
  return all;
}

TEST_F(LrpeGraph, ReplaysWithNewOffsetsEqualPlainCalls) {
  const std::vector<std::vector<std::int64_t>> offsets = {
      {0, 0, 0}, {5, -70000, 2147483000}, {123456, 7, 1}};
  for (const LrpeProblem& p : problems()) {
    const Case c = lrpe_case(p);
    for (const Call& call : c.calls) {
      SCOPED_TRACE(c.params + " " + call.name);
      Stream stream;
      Prepared work(c, call);
      const Graph graph(stream, [&] { work.run(stream); });
      Bytes previous;
      for (const std::vector<std::int64_t>& values : offsets) {
        work.reset(stream, values);
        graph.replay(stream);
        const Bytes replayed = work.results(stream);
        work.reset(stream, values);
        work.run(stream);
        EXPECT_TRUE(replayed == work.results(stream)) << "a replay has other bits";
        EXPECT_FALSE(replayed == previous) << "new offsets changed nothing";
        previous = replayed;
      }
    }
  }
}

// Several axes and ids: a graph holds all it needs of the host's call (the original copied `shape` to the device in
// every call, from memory that was gone at the replay).
TEST_F(LrpeGraph, ReplaysOfGridsAndIdsEqualPlainCalls) {
  std::vector<LrpeProblem> all;
  for (const Form form : {Form::kCosine, Form::kCosineQk, Form::kRotateHalves}) {
    const std::int64_t E = form == Form::kRotateHalves ? 11 : 22;
    LrpeProblem grid{.form = form, .B = 2, .H = 4, .Hk = 2, .D = 64, .E = E, .shape = {3, 5, 7}};
    grid.prefix = 2;
    all.push_back(grid);
    LrpeProblem ids = grid;
    ids.prefix = 0;
    ids.ids = LrpeProblem::Ids::kOwn;
    all.push_back(ids);
  }
  for (const LrpeProblem& p : all) {
    const Case c = lrpe_case(p);
    for (const Call& call : c.calls) {
      SCOPED_TRACE(c.params + " " + call.name);
      Stream stream;
      Prepared work(c, call);
      const Graph graph(stream, [&] { work.run(stream); });
      work.clear_outputs(stream);
      work.run(stream);
      const Bytes plain = work.results(stream);
      for (int replay = 0; replay < 2; ++replay) {
        work.clear_outputs(stream);
        graph.replay(stream);
        EXPECT_TRUE(plain == work.results(stream)) << "a replay has other bits";
      }
    }
  }
}

// The header promises q and k in one launch; with nothing to reduce the other forms need no more.
TEST_F(LrpeGraph, OneKernelWhereNothingIsReduced) {
  for (const Form form :
       {Form::kCosine, Form::kCosineQk, Form::kRotateHalves, Form::kRotateInterleaved}) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      LrpeProblem p{.form = form, .B = 2, .H = 4, .Hk = 2, .D = 64, .E = 64, .shape = {150}};
      p.dtype = dtype;
      p.need_dtheta = false;
      const Case c = lrpe_case(p);
      for (const Call& call : c.calls) {
        SCOPED_TRACE(c.params + " " + call.name);
        Stream stream;
        const Prepared work(c, call);
        const Graph graph(stream, [&] { work.run(stream); });
        EXPECT_EQ(graph.count(), 1);
        EXPECT_EQ(graph.nodes().size(), 1u) << "memory nodes, copies or fills beside the kernel";
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
