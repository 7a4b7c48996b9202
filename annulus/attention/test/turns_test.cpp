// More tiles of queries than a GPU has multiprocessors, three for each and more: blocks of threads that stay take their turns. Here
// beside the kernels of any GPU, which the definition has judged; in fp64 it would take minutes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "annulus/attention/test/cases.h"
#include "testing/by_hand.h"

namespace annulus::testing {
namespace {

std::vector<AttentionProblem> problems() {
  std::vector<AttentionProblem> all;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t D : {64, 128}) {
      AttentionProblem p{.B = 4, .Tq = 1000, .Tk = 200, .H = 16, .Hkv = 4, .D = D, .Dv = D};
      p.dtype = dtype;
      p.seed = 5 + all.size();
      all.push_back(p);
      p.causal = true;  // two thirds of the tiles have no key
      p.Tk = 330;
      all.push_back(p);
      p.form = AttentionProblem::Form::kVarlen;
      for (std::int64_t i = 0; i < 60; ++i) {
        p.query_lengths.push_back(i * 37 % 200);
        p.packed_key_lengths.push_back(70 + i * 53 % 150);
      }
      all.push_back(p);
    }
  }
  return all;
}

TEST(AttentionTurns, OfBlocksOfThreadsChangeNothing) {
  skip_without(cuda_device(0));
  if (IsSkipped()) return;
  for (AttentionProblem p : problems()) {
    const Case c = attention_case(p);
    p.portable = true;
    const Case any = attention_case(p);
    const Tensors inputs = draw(c);
    Context context;
    const Tensors own = run(c, cuda_device(0), context, inputs);
    const Tensors portable = run(any, cuda_device(0), context, inputs);
    for (const Call& call : c.calls) {
      for (const TensorSpec& s : call.outputs) {
        const Vector &a = own.at(s.name), &b = portable.at(s.name);
        double apart = 0, size = 0;
        for (std::size_t i = 0; i < a.size(); ++i) {
          if (a[i] == b[i]) continue;  // infinities, too
          apart += (a[i] - b[i]) * (a[i] - b[i]);
          size += b[i] * b[i];
        }
        EXPECT_LE(std::sqrt(apart), 1e-2 * std::sqrt(size)) << s.name << " of " << c.params;
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
