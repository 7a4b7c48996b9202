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
      for (const std::int64_t keys : {320, 352, 416}) {  // tiles of other sizes on Hopper
        all.push_back(p);
        all.back().Tk = keys;
      }
      all.push_back(p);
      AttentionProblem& longnet = all.back();
      longnet.form = AttentionProblem::Form::kDilated;
      longnet.Tq = longnet.Tk = 2048;
      longnet.segments = {512, 1024, 2048};
      longnet.rates = {1, 2, 4};
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
        EXPECT_LE(relative_error(a, b), 1e-2) << s.name << " of " << c.params;
        // One row that another block of threads has written over is hardly seen among all.
        const auto columns = static_cast<std::size_t>(s.shape.back());
        const double usual = std::sqrt((b * b).sum() / static_cast<double>(b.size() / columns));
        for (std::size_t i = 0; s.name != "lse" && i < b.size(); i += columns) {
          const Vector one = a[std::slice(i, columns, 1)], other = b[std::slice(i, columns, 1)];
          EXPECT_LE(std::sqrt(((one - other) * (one - other)).sum()),
                    0.1 * (usual + std::sqrt((other * other).sum())))
              << "row " << i / columns << " of " << s.name << " of " << c.params;
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
