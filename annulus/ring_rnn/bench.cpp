// Suite ring-rnn: the original's table (forward, B = 256, T = 20), and beside it what the original's operator
// lacked: forward with backward for every gradient, actions that are zero, every precision.
//
// One deliberate difference. In the original's setting every unit's drive is negative, so relu makes it
// zero and the state only decays: any kernel whose drive is negative looks right there. Here the
// global inhibition is J0 = -1 / N, which leaves a quarter of the units active; a record's `active` is
// the share that was seen. The original's own setting is one row, called `dead`.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "annulus/ring_rnn/test/cases.h"
#include "bench/problem.h"
#include "bench/suite.h"

namespace annulus::bench {
namespace {

using testing::RingRnnProblem;
using Actions = RingRnnProblem::Actions;

// The table that started the suite, as published: forward only, relu, fp32 tensors, milliseconds.
constexpr const char* kRingOriginalHardware = "RTX PRO 6000 Blackwell";
constexpr int kRingOriginalB = 256, kRingOriginalT = 20;
// The source's names; its two kernels multiply in fp32 and, on tensor cores, in fp16.
constexpr std::array<const char*, 4> kRingOriginalColumns = {"torch.sum", "torch.matmul", "CUDA",
                                                             "CUDA WMMA"};

struct RingOriginalRow {
  int N;
  int K;
  std::array<double, 4> ms;  // 0: "OOM" or "N/A" in the source
};

constexpr std::array<RingOriginalRow, 12> kRingOriginal = {{
    {128, 16, {9.438, 2.234, 0.372, 0.282}},
    {256, 16, {32.742, 2.846, 0.897, 0.595}},
    {384, 16, {73.732, 8.607, 1.755, 1.269}},
    {512, 16, {130.132, 16.066, 2.795, 1.772}},
    {1024, 16, {755.812, 61.446, 10.172, 6.163}},
    {2048, 16, {3027.348, 241.135, 46.110, 24.455}},
    {2048, 32, {0, 244.381, 76.646, 36.741}},
    {2048, 64, {0, 251.123, 139.247, 62.792}},
    {1024, 2, {116.973, 59.912, 10.112, 0}},
    {1024, 3, {145.126, 59.974, 10.129, 0}},
    {1024, 6, {231.524, 60.584, 10.744, 0}},
    {1024, 12, {553.342, 61.159, 10.549, 0}},
}};

enum class Variant { kPlain, kLive2, kActions, kDead };
constexpr const char* kVariantNames[] = {"", "live2", "actions", "dead"};

// Share of the actions that are not zero in relu(v linspace(-1, 1, K)), v = 0 in 56 of 100 steps.
constexpr double kVelocityDensity = 0.22;

struct Sizes {
  std::int64_t B, N, K, T = kRingOriginalT;
};

RingRnnProblem problem_of(Sizes s, DType dtype, bool backward, Variant variant) {
  RingRnnProblem p;
  p.B = s.B;
  p.N = s.N;
  p.K = s.K;
  p.T = s.T;
  p.dtype = dtype;
  p.activation = RingRnnActivation::kRelu;
  p.J0 = -1 / static_cast<double>(s.N);
  p.gain = 2;
  if (variant == Variant::kLive2) p.live = 2;
  if (variant == Variant::kActions || variant == Variant::kDead) p.actions = Actions::kVelocity;
  if (variant == Variant::kDead) {
    p.J0 = -0.1;
    p.gain = 0.9;
  }
  if (backward) {
    p.gradients = testing::kRingAllGradients;
    p.J0_form = p.J1_form = p.alpha_form = RingRnnProblem::Parameter::kTensor;
  }
  p.seed = 1;
  return p;
}

// Which multiply units a precision can use at best, and what a step reads of the weights.
Work work_of(const RingRnnProblem& p, Device device, bool backward) {
  const PrecisionFacts& facts = facts_of(testing::ring_resolved_precision(p, device));
  Work w{.products = facts.unit, .passes = static_cast<double>(facts.products)};
  const auto width = static_cast<double>(facts.terms * size_of(facts.element));
  const std::int64_t live = p.live < 0 ? p.K : std::min(p.live, p.K);
  w.steps = backward ? 2 * p.T : p.T;
  w.step_bytes = width * static_cast<double>((live + 1) * p.N * p.N);
  return w;
}

// The same problem for the fp64 reference in a second or two: fewer samples, then fewer actions, for
// gradients (four times the work, and slow loops) fewer steps too, but all neurons. relu's derivative
// jumps, so where gradients are judged in rounded arithmetic a unit at the jump would decide: they
// are judged with gelu.
RingRnnProblem error_problem(RingRnnProblem p, bool backward) {
  const double most = backward ? 6e7 : 5.1e8;
  const auto shrink = [&](std::int64_t& extent, std::int64_t least) {
    while (extent > least && 2.0 * static_cast<double>(p.B * p.T * (p.K + 1) * p.N * p.N) > most) {
      extent = std::max(extent / 2, least);
    }
  };
  p.B = std::min<std::int64_t>(p.B, 4);
  shrink(p.B, 1);
  shrink(p.K, 2);
  if (!backward) return p;
  shrink(p.T, 5);
  p.activation = RingRnnActivation::kGelu;
  return p;
}

// Share of the units of the first samples that their input drives: F(y) is above a tenth of the
// state. Read off the states, F(y) = (r_t - (1 - alpha) r_t-1) / alpha, which bf16 states resolve
// to 3 % of r.
double active_share(const Problem& problem, const RingRnnProblem& p) {
  const auto N = static_cast<std::size_t>(p.N), T = static_cast<std::size_t>(p.T);
  const std::vector<double> out = problem.values("out", std::min<std::int64_t>(p.B, 8) * p.T * p.N);
  std::size_t active = 0, seen = 0;
  for (std::size_t at = N; at < out.size(); ++at) {
    if (at / N % T == 0) continue;  // its predecessor belongs to another sample
    const double before = out[at - N];
    const double f = (out[at] - (1 - p.alpha) * before) / p.alpha;
    active += std::fabs(f) > 0.1 * std::fabs(before);
    ++seen;
  }
  return seen == 0 ? 0 : static_cast<double>(active) / static_cast<double>(seen);
}

testing::Case case_of(const RingRnnProblem& p) {
  testing::Case c = testing::ring_rnn_case(p);
  if (p.actions == Actions::kVelocity) {
    const auto K = static_cast<double>(p.K);
    for (testing::Call& call : c.calls) call.flops *= (1 + kVelocityDensity * K) / (1 + K);
  }
  return c;
}

Row make_row(Device device, Sizes sizes, DType dtype, bool backward, Variant variant,
             Precision precision = Precision::kAuto) {
  RingRnnProblem p = problem_of(sizes, dtype, backward, variant);
  p.precision = precision;
  Row row;
  const std::string extra = kVariantNames[static_cast<std::size_t>(variant)];
  row.name = fmt::format("{}-b{}-n{}-k{}-t{}{}", backward ? "fwdbwd" : "fwd", p.B, p.N, p.K, p.T,
                         extra.empty() ? "" : "-" + extra);
  row.op = "ring_rnn";
  if (p.precision != Precision::kAuto) row.impl += std::string("-") + name_of(p.precision);
  row.dtype = p.dtype;
  row.params = {{"B", p.B},
                {"T", p.T},
                {"K", p.K},
                {"N", p.N},
                {"direction", std::string(backward ? "fwdbwd" : "fwd")},
                {"activation", std::string("relu")},
                {"precision", std::string(name_of(testing::ring_resolved_precision(p, device)))}};
  if (!extra.empty()) row.params["variant"] = extra;
  row.work = work_of(p, device, backward);
  row.problem = [p] { return case_of(p); };
  const RingRnnProblem slice = error_problem(p, backward);
  row.error_problem = [slice] { return testing::ring_rnn_case(slice); };
  RingRnnProblem any = slice;
  any.precision = Precision::kAuto;
  row.same_expected = testing::ring_rnn_case(any).params;
  row.observe = [p](const Problem& problem) {
    return Params{{"active", std::round(1e4 * active_share(problem, p)) / 1e4}};
  };
  row.calls = {"forward"};
  if (backward) row.calls.push_back("backward");
  row.with_move = false;  // bound by arithmetic: moving the bytes says nothing
  return row;
}

OriginalFigure original_figure(const RingOriginalRow& s) {
  // Its fastest, on tensor cores where the shape allowed them.
  OriginalFigure f{s.ms[3] > 0 ? s.ms[3] : s.ms[2], "ms", kRingOriginalHardware, {}};
  for (std::size_t i = 0; i < s.ms.size(); ++i) {
    if (s.ms[i] > 0) f.columns.emplace_back(kRingOriginalColumns[i], s.ms[i]);
  }
  return f;
}

std::vector<Row> quick_rows(Device device) {
  std::vector<Row> rows;
  for (const Sizes s : {Sizes{32, 128, 16}, Sizes{256, 128, 16}, Sizes{64, 256, 16},
                        Sizes{256, 256, 3}, Sizes{64, 512, 6}}) {
    const bool first_choice = s.B == 256 && s.N == 128;
    const auto add = [&](DType dtype, bool backward, Variant variant) {
      rows.push_back(make_row(device, s, dtype, backward, variant));
    };
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      add(dtype, false, Variant::kPlain);
      if (first_choice) add(dtype, false, Variant::kLive2);
    }
    add(DType::kF32, true, Variant::kPlain);
    if (first_choice) add(DType::kBF16, true, Variant::kPlain);
  }
  return rows;
}

std::vector<Row> original_rows(const RingOriginalRow& s, Device device) {
  const Sizes sizes{kRingOriginalB, s.N, s.K};
  std::vector<Row> rows;
  const auto add = [&](DType dtype, bool backward, Variant variant,
                       Precision precision = Precision::kAuto) {
    rows.push_back(make_row(device, sizes, dtype, backward, variant, precision));
    const bool plain = variant == Variant::kPlain || variant == Variant::kDead;
    if (plain && !backward && precision == Precision::kAuto)
      rows.back().original = original_figure(s);
  };
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    add(dtype, false, Variant::kPlain);
    if (dtype == DType::kF32 && device.type == DeviceType::kCUDA) {
      for (const Precision p : {Precision::kBf16x6, Precision::kTf32, Precision::kFp32}) {
        add(dtype, false, Variant::kPlain, p);
      }
    }
    add(dtype, true, Variant::kPlain);
  }
  if (s.K == 16 && device.type == DeviceType::kCUDA) {  // CPUs multiply f16 tensors in fp32
    add(DType::kF16, false, Variant::kPlain);
    add(DType::kF16, true, Variant::kPlain);
  }
  if (s.K == 16) add(DType::kBF16, false, Variant::kActions);
  if (s.K == 16 && s.N == 1024) {
    add(DType::kBF16, false, Variant::kLive2);
    add(DType::kF32, false, Variant::kDead);
  }
  return rows;
}

std::vector<Row> ring_rows(const SuiteRequest& request) {
  const Device device{request.device, 0};
  if (request.size == Size::kQuick) return quick_rows(device);
  std::vector<Row> rows;
  for (const RingOriginalRow& s : kRingOriginal) {
    for (Row& row : original_rows(s, device)) {
      if (request.size == Size::kMachine) {
        const testing::Case problem = row.problem();
        double flops = 0;
        for (const std::string& call : row.calls) flops += find_call(problem, call).flops;
        // Two seconds a call on a small CPU are the most that anyone waits for nine of them.
        if (request.device == DeviceType::kCPU && flops > 2e11) continue;
        if (peak_bytes_of(problem, row.calls, device) > request.memory_bytes) continue;
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

const SuiteRegistration registration(
    {"ring-rnn",
     "ring RNN: forward, and forward with every gradient, over neurons, actions and precisions: "
     "the table of the original",
     ring_rows,
     {{"annulus-bf16x6",
       "annulus with precision bf16x6: operands split in three bf16, six products for each, as "
       "exact as fp32"},
      {"annulus-tf32", "annulus with precision tf32: one product of 10 bits each"},
      {"annulus-fp32",
       "annulus with precision fp32: fp32 operands, or bf16x6 where that is as exact and faster"},
      {"torch-sum",
       "as in the original table: a matrix per sample, mixed by a sum over [B, K, N, N], then "
       "applied"},
      {"torch-matmul",
       "as in the original table: a matrix per sample, mixed by a product of depth K, then "
       "applied"},
      {"torch-gemm",
       "one product a step: states scaled by every action, then (B, (K + 1) N) times [Wo; Wa]^T"},
      {"torch-gemm2",
       "one product a step: states times [Wo; Wa]^T, the K + 1 results mixed by the actions after"},
      {"torch-gemm-graph", "torch-gemm recorded as a CUDA graph: no launch costs"},
      {"torch-gemm2-graph", "torch-gemm2 recorded as a CUDA graph: no launch costs"},
      {"torch-gemm-tf32", "torch-gemm with float32 products in tf32"},
      {"torch-gemm-tf32-graph", "torch-gemm-tf32 recorded as a CUDA graph"},
      {"torch-compile", "torch-gemm with its step under torch.compile"}}});

}  // namespace
}  // namespace annulus::bench
