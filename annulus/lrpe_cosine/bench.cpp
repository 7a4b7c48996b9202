// Suite lrpe-cosine: the speed and memory tables of the seed (forward and backward; 1-D, 2-D, 3-D;
// prefix 0 and 10), and beside them what the seed's operator lacked: dtheta, activations, the
// rotating form, queries and keys in one launch.
//
// One deliberate difference: the seed took E = next_pow2(ceil(D / m)), so that in 3-D (E = 64) the
// first two axes own all 128 columns and the third is never encoded. Here E = ceil(D / m) and every
// axis owns columns. The bytes are the same, so times and memory compare.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "annulus/core/checked.h"
#include "annulus/lrpe_cosine/bench_seed.h"
#include "annulus/lrpe_cosine/test/cases.h"
#include "bench/suite.h"

namespace annulus::bench {
namespace {

using testing::LrpeProblem;

constexpr std::int64_t kH = 12, kD = 128;

LrpeProblem plain(std::int64_t batch, int axes, std::int64_t n, std::int64_t prefix, DType dtype) {
  LrpeProblem p;
  p.B = batch;
  p.H = kH;
  p.D = kD;
  p.E = ceil_div(kD, axes);
  const std::vector<std::int64_t> extents(static_cast<std::size_t>(axes), n);
  p.shape = LrpeGrid(extents);
  p.prefix = prefix;
  p.dtype = dtype;
  p.need_dtheta = false;  // as the seed: theta had no gradient
  p.seed = 1;
  return p;
}

std::int64_t tokens(const LrpeProblem& p) {
  std::int64_t n = 1;
  for (int i = 0; i < p.shape.axes; ++i) n *= p.shape.extent[static_cast<std::size_t>(i)];
  return p.prefix + n;
}

const char* short_name(const std::vector<std::string>& calls) {
  return calls.size() == 2 ? "fwdbwd" : calls[0] == "forward" ? "fwd" : "bwd";
}

// "fwd-1d-n4096-l10-b2": the name every implementation of the row goes by, peers included.
std::string row_name(const LrpeProblem& p, const std::vector<std::string>& calls,
                     const std::string& extra) {
  return fmt::format("{}-{}d-n{}-l{}-b{}{}", short_name(calls), p.shape.axes, p.shape.extent[0],
                     p.prefix, p.B, extra.empty() ? "" : "-" + extra);
}

Row make_row(const LrpeProblem& p, std::vector<std::string> calls, const std::string& extra = "") {
  Row row;
  row.name = row_name(p, calls, extra);
  row.op = p.form == LrpeProblem::Form::kCosine     ? "lrpe_cosine"
           : p.form == LrpeProblem::Form::kCosineQk ? "lrpe_cosine_qk"
                                                    : "lrpe_rotate";
  row.dtype = p.dtype;
  row.params = {{"B", p.B},
                {"H", p.H},
                {"D", p.D},
                {"E", p.E},
                {"prefix", p.prefix},
                {"tokens", tokens(p)},
                {"direction", std::string(short_name(calls))}};
  row.params["shape"] =
      std::vector<std::int64_t>(p.shape.extent.begin(), p.shape.extent.begin() + p.shape.axes);
  if (!extra.empty()) row.params["variant"] = extra;
  row.problem = [p] { return testing::lrpe_case(p); };
  LrpeProblem slice = p;
  slice.B = p.ids == LrpeProblem::Ids::kOwn ? 2 : 1;
  slice.H = tokens(p) <= 4200 ? 2 : 1;
  slice.Hk = p.Hk > 0 ? slice.H : 0;
  row.error_problem = [slice] { return testing::lrpe_case(slice); };
  row.calls = std::move(calls);
  return row;
}

SeedFigure seed_figure(const std::array<double, 4>& columns, const char* unit) {
  SeedFigure f{columns[0], unit, kLrpeSeedHardware, {}};
  for (std::size_t i = 0; i < columns.size(); ++i) {
    f.columns.emplace_back(kLrpeSeedColumns[i], columns[i]);
  }
  return f;
}

Row seed_row(const LrpeSeedRow& s) {
  Row row = make_row(plain(12, s.axes, s.n, s.prefix, DType::kBF16),
                     {s.backward ? "backward" : "forward"});
  row.seed = seed_figure(s.speed_ms, "ms");
  row.memory_name = "memory-" + row.name;
  row.memory_seed = seed_figure(s.memory_mib, "MiB");
  // In the seed's backward x and y are still alive beside dx and dy, and so they are in training.
  row.memory_calls = {"forward"};
  if (s.backward) row.memory_calls.push_back("backward");
  return row;
}

std::vector<Row> quick_rows() {
  struct Shape {
    int axes, n, prefix;
  };
  std::vector<Row> rows;
  for (const Shape s : {Shape{1, 1024, 0}, Shape{1, 4096, 10}, Shape{2, 64, 0}, Shape{3, 16, 10}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const LrpeProblem p = plain(2, s.axes, s.n, s.prefix, dtype);
      rows.push_back(make_row(p, {"forward"}));
      rows.push_back(make_row(p, {"backward"}));
      rows.push_back(make_row(p, {"forward", "backward"}));
    }
  }
  return rows;
}

// What the seed could not do, at one size each.
std::vector<Row> extra_rows(std::int64_t batch, std::int64_t n) {
  using Form = LrpeProblem::Form;
  std::vector<Row> rows;
  const LrpeProblem base = plain(batch, 1, n, 0, DType::kBF16);

  LrpeProblem p = base;
  p.need_dtheta = true;
  rows.push_back(make_row(p, {"backward"}, "dtheta"));

  struct Activation {
    LrpeActivation value;
    const char* name;
  };
  for (const Activation a : {Activation{LrpeActivation::kSilu, "silu"},
                             Activation{LrpeActivation::kSoftmaxFeatures, "softmax-features"},
                             Activation{LrpeActivation::kSoftmaxTokens, "softmax-tokens"}}) {
    p = base;
    p.activation = a.value;
    rows.push_back(make_row(p, {"forward"}, a.name));
    rows.push_back(make_row(p, {"backward"}, a.name));
  }

  p = base;
  p.form = Form::kRotateHalves;
  p.E = kD / 2;
  rows.push_back(make_row(p, {"forward"}, "rotate"));
  rows.push_back(make_row(p, {"backward"}, "rotate"));

  p = base;
  p.form = Form::kCosineQk;
  p.Hk = kH;
  rows.push_back(make_row(p, {"forward"}, "qk"));

  // One long sequence: no two rows share a phase.
  p = plain(1, 1, batch * n, 0, DType::kBF16);
  rows.push_back(make_row(p, {"forward"}));
  rows.push_back(make_row(p, {"backward"}));

  // Packed sequences of up to 60 tokens: the same ones for the whole batch, or others in each row of it.
  for (const LrpeProblem::Ids ids : {LrpeProblem::Ids::kShared, LrpeProblem::Ids::kOwn}) {
    p = base;
    p.ids = ids;
    const char* name = ids == LrpeProblem::Ids::kShared ? "ids" : "own-ids";
    rows.push_back(make_row(p, {"forward"}, name));
    rows.push_back(make_row(p, {"backward"}, name));
  }
  return rows;
}

std::vector<Row> lrpe_rows(const SuiteRequest& request) {
  const Device device{request.device, 0};
  std::vector<Row> rows;
  if (request.size == Size::kQuick) return quick_rows();
  for (const LrpeSeedRow& s : kLrpeSeed) {
    Row row = seed_row(s);
    if (request.size == Size::kMachine) {
      // Of each of the seed's twelve series only the largest that fits, its mover included.
      const auto needs = 2 * peak_bytes_of(row.problem(), row.calls, device);
      const bool same_series = !rows.empty() &&
                               rows.back().params["prefix"] == row.params["prefix"] &&
                               rows.back().params["direction"] == row.params["direction"] &&
                               rows.back().params["E"] == row.params["E"];
      const bool fits = needs <= request.memory_bytes;
      if (same_series && fits) rows.pop_back();
      if (same_series && !fits) continue;
    }
    rows.push_back(std::move(row));
  }
  if (request.size == Size::kFull) {
    for (Row& row : extra_rows(12, 4096)) rows.push_back(std::move(row));
  }
  return rows;
}

const SuiteRegistration registration(
    {"lrpe-cosine",
     "LRPE-cosine: speed and memory, forward and backward, 1-D 2-D "
     "3-D, prefix 0 and 10 (seed 002)",
     lrpe_rows});

}  // namespace
}  // namespace annulus::bench
