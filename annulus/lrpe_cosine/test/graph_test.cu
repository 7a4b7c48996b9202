// What an LRPE call launches, counted in its captured graph. That replays have the bits of plain calls, for
// every operator, is in testing/graph_test.cu.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/cuda_graph.h"
#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using Form = LrpeProblem::Form;

class LrpeGraph : public DeviceTest {
 protected:
  static void expect_kernels(LrpeProblem p, int count) {
    p.need_dtheta = false;
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      p.dtype = dtype;
      const Case c = lrpe_case(p);
      for (std::size_t i = 0; i < c.calls.size(); ++i) {
        SCOPED_TRACE(c.params + " " + c.calls[i].name);
        const Stream stream;
        const PreparedCall work(c, i);
        const Graph graph(stream, [&] { work.run(stream); });
        EXPECT_EQ(graph.count(), count);
        EXPECT_EQ(graph.nodes().size(), static_cast<std::size_t>(count))
            << "memory nodes, copies or fills beside the kernels";
      }
    }
  }
};

// The header promises q and k in one launch; with nothing to reduce the other forms need no more.
TEST_F(LrpeGraph, OneKernelWhereNothingIsReduced) {
  for (const Form form : {Form::kCosine, Form::kCosineQk, Form::kRotateHalves,
                          Form::kRotateInterleaved, Form::kRotateQkHalves}) {
    expect_kernels({.form = form, .B = 2, .H = 4, .Hk = 2, .D = 64, .E = 64, .shape = {150}}, 1);
  }
}

// ... and one more for the columns that pass through, of q and k together.
TEST_F(LrpeGraph, TwoKernelsOfPartialRotary) {
  for (const Form form : {Form::kRotateInterleaved, Form::kRotateQkHalves}) {
    expect_kernels({.form = form, .B = 2, .H = 4, .Hk = 2, .D = 64, .E = 8, .shape = {150}}, 2);
  }
}

}  // namespace
}  // namespace annulus::testing
