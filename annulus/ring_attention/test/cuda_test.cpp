// Ranks that share one GPU: longer sequences than named cases have, so that Hopper's kernels, several slices and several cells
// take part. Small ones are compared with fp64 by annulus check.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/values.h"
#include "annulus/cuda/memory.h"
#include "annulus/ring_attention/test/patterns.h"
#include "annulus/ring_attention/test/sequence.h"
#include "testing/memory/tensors.h"
#include "testing/reference.h"

namespace annulus::testing {
namespace {

using P = AttentionProblem;

class CudaRingAttention : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = cuda::why_unavailable();
    if (!why.empty()) GTEST_SKIP() << "no CUDA device: " << why;
  }
};

// Some rows more than whole tiles; two cells of deterministic calls. (fp32 on CUDA is three products of bf16: within 2e-5.)
std::vector<P> problems(std::int64_t n) {
  std::vector<P> all;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (P p :
         {ring::dense(n), ring::longnet(n, {256, 512, 2048}, {1, 2, 4}), ring::blocks(n, 128)}) {
      for (const bool causal : {false, true}) {
        p.dtype = dtype;
        p.causal = causal;
        p.D = p.Dv = causal ? 64 : 128;
        p.seed = 11 + all.size();
        all.push_back(p);
      }
    }
  }
  P queries = ring::dense(n);  // whose queries travel
  queries.Hkv = 4, queries.D = queries.Dv = 64, queries.dlse = true;
  all.push_back(queries);
  P window = ring::dense(n);
  window.window_left = 300, window.window_right = 40, window.dtype = DType::kF16;
  window.D = window.Dv = 64;
  all.push_back(window);
  P grouped = ring::longnet(n, {700, 1100}, {1, 3});
  grouped.mode = DilatedMode::kGroupedKv, grouped.D = grouped.Dv = 64;
  grouped.dtype = DType::kBF16;
  all.push_back(grouped);
  P constant = ring::longnet(n, {700, 1100}, {1, 3});
  constant.stop_alpha_gradient = true, constant.D = constant.Dv = 64;
  all.push_back(constant);
  return all;
}

std::vector<double> values_of(const TensorView& v) {
  std::vector<char> bytes(static_cast<std::size_t>(v.numel() * size_of(v.dtype)));
  copy_bytes(bytes.data(), kCPU, v.data, v.device, bytes.size());
  return load_values<double>(contiguous(bytes.data(), v.dtype, v.sizes()));
}

TEST_F(CudaRingAttention, EqualsOneDevice) {
  for (const P& p : problems(1501)) {
    RingSequence s(p, cuda_device(0));
    const RingTensors& t = s.whole();
    const TensorView outputs[] = {t.o, t.lse, t.dq, t.dk, t.dv};
    s.run_alone();
    synchronize(cuda_device(0));
    std::vector<std::vector<double>> want;
    for (const TensorView& v : outputs) want.push_back(values_of(v));
    int turn = 0;
    for (const int ranks : {1, 2, 4}) {
      const Balance balance = ++turn % 2 == 0 ? Balance::kZigzag : Balance::kContiguous;
      for (const bool deterministic : {false, true}) {
        s.run(ranks, balance, deterministic, turn == 2 ? 0 : 300);
        for (std::size_t i = 0; i < want.size(); ++i) {
          EXPECT_LT(relative_error(values_of(outputs[i]), want[i]),
                    p.dtype == DType::kF32 ? 4e-5 : 1e-2)
              << attention_case(p).params << " over " << ranks << " ranks, output " << i
              << (deterministic ? ", deterministic" : "");
        }
      }
    }
  }
}

TEST_F(CudaRingAttention, DeterministicMeansTheSameBitsForEveryDivision) {
  for (const P& p : problems(1500)) {
    RingSequence s(p, cuda_device(0));
    const std::string one = s.run(1, Balance::kContiguous, true);
    for (const int ranks : {2, 3, 4, 8}) {
      const Balance balance = ranks % 2 == 0 ? Balance::kZigzag : Balance::kContiguous;
      EXPECT_EQ(s.apart(one, s.run(ranks, balance, true, ranks == 4 ? 100 : 0)), "")
          << attention_case(p).params << " over " << ranks << " ranks";
    }
  }
}

// A rank that is lost leaves nothing that could be taken for a result.
TEST_F(CudaRingAttention, ALostRankPoisonsTheOthers) {
  P p = ring::dense(600);
  p.D = p.Dv = 64;
  RingSequence s(p, cuda_device(0));
  const auto group = local_communicators(2, {.deadline_s = 0.3});
  Context context;
  RingTensors t = s.whole();
  for (TensorView* v : {&t.q, &t.k, &t.v, &t.o}) v->shape[1] = 300;
  t.lse.shape[2] = 300;
  const RingProblem ring{p, 2, Balance::kContiguous};
  EXPECT_THROW(ring_forward(ring, t, *group[0], context), RankLost);
  TensorView o = s.whole().o;  // row 0 of it
  std::vector<float> row(64);
  copy_bytes(row.data(), kCPU, o.data, o.device, row.size() * sizeof(float));
  for (const float x : row) EXPECT_TRUE(std::isnan(x));
}

}  // namespace
}  // namespace annulus::testing
