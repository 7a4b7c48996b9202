// Suite lrpe-cosine: the speed and memory tables of the original (forward and backward; 1-D, 2-D, 3-D;
// prefix 0 and 10), and beside them what the original's operator lacked: dtheta, activations, the
// rotating form, queries and keys in one launch.
//
// One deliberate difference: the original took E = next_pow2(ceil(D / m)), so that in 3-D (E = 64) the
// first two axes own all 128 columns and the third is never encoded. Here E = ceil(D / m) and every
// axis owns columns. The bytes are the same, so times and memory compare.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "annulus/core/checked.h"
#include "annulus/lrpe_cosine/bench_original.h"
#include "annulus/lrpe_cosine/test/cases.h"
#include "bench/suite.h"

namespace annulus::bench {
namespace {

using testing::LrpeProblem;
using testing::tokens_of;

constexpr std::int64_t kH = 12, kD = 128;

LrpeProblem plain(std::int64_t batch, int axes, std::int64_t n, std::int64_t prefix, DType dtype) {
  const std::vector<std::int64_t> extents(static_cast<std::size_t>(axes), n);
  return {.B = batch,
          .H = kH,
          .D = kD,
          .E = ceil_div(kD, axes),
          .shape = LrpeGrid(extents),
          .prefix = prefix,
          .dtype = dtype,
          .need_dtheta = false,  // as the original: theta had no gradient
          .seed = 1};
}

const char* short_name(const std::vector<std::string>& calls) {
  return calls.size() == 2 ? "fwdbwd" : calls[0] == "forward" ? "fwd" : "bwd";
}

Row make_row(const LrpeProblem& p, std::vector<std::string> calls, const std::string& extra = "") {
  Row row;
  // "fwd-1d-n4096-l10-b2": every implementation of the row goes by it, peers included.
  row.name = fmt::format("{}-{}d-n{}-l{}-b{}{}", short_name(calls), p.shape.axes, p.shape.extent[0],
                         p.prefix, p.B, extra.empty() ? "" : "-" + extra);
  row.op =
      std::string(is_rotate(p.form) ? "lrpe_rotate" : "lrpe_cosine") + (is_qk(p.form) ? "_qk" : "");
  row.dtype = p.dtype;
  row.params = {{"B", p.B},
                {"H", p.H},
                {"D", p.D},
                {"E", p.E},
                {"prefix", p.prefix},
                {"tokens", tokens_of(p)},
                {"direction", std::string(short_name(calls))}};
  row.params["shape"] =
      std::vector<std::int64_t>(p.shape.extents().begin(), p.shape.extents().end());
  if (!extra.empty()) row.params["variant"] = extra;
  row.problem = [p] { return testing::lrpe_case(p); };
  LrpeProblem slice = p;
  slice.B = p.ids == LrpeProblem::Ids::kOwn ? 2 : 1;
  slice.H = tokens_of(p) <= 4200 ? 2 : 1;
  slice.Hk = p.Hk > 0 ? slice.H : 0;
  row.error_problem = [slice] { return testing::lrpe_case(slice); };
  row.calls = std::move(calls);
  return row;
}

OriginalFigure original_figure(std::span<const double> columns, const char* unit) {
  OriginalFigure f{columns[0], unit, kLrpeOriginalHardware, {}};
  for (std::size_t i = 0; i < columns.size(); ++i) {
    f.columns.emplace_back(kLrpeOriginalColumns[i], columns[i]);
  }
  return f;
}

Row original_row(const LrpeOriginalSeries& s, int n, std::span<const double, 8> figures) {
  Row row =
      make_row(plain(12, s.axes, n, s.prefix, DType::kBF16), {s.backward ? "backward" : "forward"});
  row.original = original_figure(figures.first<4>(), "ms");
  row.memory_name = "memory-" + row.name;
  row.memory_original = original_figure(figures.last<4>(), "MiB");
  // In the original's backward x and y are still alive beside dx and dy, and so they are in training.
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

// What the original could not do, at one size each.
std::vector<Row> extra_rows(std::int64_t batch, std::int64_t n) {
  std::vector<Row> rows;
  const LrpeProblem base = plain(batch, 1, n, 0, DType::kBF16);
  const auto both = [&](const char* name, LrpeProblem p, auto change) {
    change(p);
    for (const char* call : {"forward", "backward"}) rows.push_back(make_row(p, {call}, name));
  };
  const auto activated = [&](const char* name, LrpeActivation activation) {
    both(name, base, [&](LrpeProblem& p) { p.activation = activation; });
  };
  // Packed sequences of up to 60 tokens: the same ones for the whole batch, or others in each row of it.
  const auto by_ids = [&](const char* name, LrpeProblem::Ids ids) {
    both(name, base, [&](LrpeProblem& p) { p.ids = ids; });
  };

  LrpeProblem dtheta = base;
  dtheta.need_dtheta = true;
  rows.push_back(make_row(dtheta, {"backward"}, "dtheta"));
  activated("silu", LrpeActivation::kSilu);
  activated("softmax-features", LrpeActivation::kSoftmaxFeatures);
  activated("softmax-tokens", LrpeActivation::kSoftmaxTokens);
  both("rotate", base, [](LrpeProblem& p) {
    p.form = LrpeProblem::Form::kRotateHalves;
    p.E = kD / 2;
  });
  LrpeProblem qk = base;
  qk.form = LrpeProblem::Form::kCosineQk;
  qk.Hk = kH;
  rows.push_back(make_row(qk, {"forward"}, "qk"));
  // As a transformer has it: four query heads to a key head, one theta for all of them.
  both("rotate-qk", base, [](LrpeProblem& p) {
    p.form = LrpeProblem::Form::kRotateQkHalves;
    p.Hk = kH / 4;
    p.E = kD / 2;
    p.one_row = true;
  });
  // One long sequence: no two rows share a phase.
  both("", plain(1, 1, batch * n, 0, DType::kBF16), [](LrpeProblem&) {});
  by_ids("ids", LrpeProblem::Ids::kShared);
  by_ids("own-ids", LrpeProblem::Ids::kOwn);
  return rows;
}

std::vector<Row> lrpe_rows(const SuiteRequest& request) {
  const Device device{request.device, 0};
  std::vector<Row> rows;
  if (request.size == Size::kQuick) return quick_rows();
  for (const LrpeOriginalSeries& series : kLrpeOriginal) {
    const std::size_t before = rows.size();
    int n = series.first_n;
    for (const auto& figures : series.rows) {
      Row row = original_row(series, n, figures);
      n *= 2;
      if (request.size == Size::kMachine && rows.size() > before) {
        // Of each series only the largest that fits, its mover included.
        if (2 * peak_bytes_of(row.problem(), row.calls, device) > request.memory_bytes) break;
        rows.pop_back();
      }
      rows.push_back(std::move(row));
    }
  }
  if (request.size == Size::kFull) {
    for (Row& row : extra_rows(12, 4096)) rows.push_back(std::move(row));
  }
  return rows;
}

const SuiteRegistration registration(
    {"lrpe-cosine",
     "LRPE-cosine: speed and memory, forward and backward, 1-D 2-D "
     "3-D, prefix 0 and 10: the tables of the original",
     lrpe_rows,
     {{"torch-eager",
       "the formula as one writes it in torch: phases in float32, cos and sin of them, two "
       "products, "
       "a concatenation, each a pass over memory"},
      {"torch-compile", "torch-eager under torch.compile, for this shape alone"}}});

}  // namespace
}  // namespace annulus::bench
