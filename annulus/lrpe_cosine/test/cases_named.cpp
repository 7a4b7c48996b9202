// The hand-picked problems of LRPE (every edge, every defect of the original implementation), the
// fuzzer's distribution, and the registration of both.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "annulus/core/checked.h"
#include "annulus/lrpe_cosine/test/cases.h"

namespace annulus::testing {

namespace {

using Form = LrpeProblem::Form;
using Draw = std::function<void(Rng&, const TensorSpec&, std::span<double>)>;

constexpr std::array kAllForms = {Form::kCosine, Form::kCosineQk, Form::kRotateHalves,
                                  Form::kRotateInterleaved};
constexpr std::array kAllDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::array kActivations = {LrpeActivation::kNone,
                                     LrpeActivation::kRelu,
                                     LrpeActivation::kSigmoid,
                                     LrpeActivation::kSilu,
                                     LrpeActivation::kSoftmaxFeatures,
                                     LrpeActivation::kSoftmaxTokens};

bool is_rotate(Form f) { return f == Form::kRotateHalves || f == Form::kRotateInterleaved; }

class Builder {
 public:
  Case& add(const std::string& name, LrpeProblem p) {
    p.seed = 1000 + cases_.size();
    cases_.push_back(lrpe_case(p));
    cases_.back().params = "'" + name + "' " + cases_.back().params;
    return cases_.back();
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

// `values` for the named tensors, the usual draw for the others.
Draw replacing(Draw usual, std::vector<std::string> names,
               std::function<double(Rng&, std::size_t)> value) {
  return [usual, names, value](Rng& rng, const TensorSpec& spec, std::span<double> v) {
    usual(rng, spec, v);
    if (std::find(names.begin(), names.end(), spec.name) == names.end()) return;
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = value(rng, i);
  };
}

void add_forms_and_types(Builder& b) {
  for (const Form form : kAllForms) {
    for (const DType dtype : kAllDTypes) {
      LrpeProblem p{.form = form, .B = 2, .H = 3, .D = 64, .E = 64, .shape = {37}};
      if (form == Form::kCosineQk) p.H = 6, p.Hk = 2;
      p.dtype = dtype;
      p.prefix = 3;
      b.add("every form and dtype", p);
      p.theta_dtype = dtype;
      p.shape = {5, 7};
      p.E = 33;
      if (is_rotate(form)) p.E = 17;
      b.add("theta in x's dtype, 2-D", p);
    }
  }
}

void add_axes(Builder& b) {
  // Defect 1: E = 64 for D = 128 left axis 3 without a column. These give every axis some.
  b.add("3-D, E = 43: axis 3 owns 42 columns",
        {.B = 2, .H = 2, .D = 128, .E = 43, .shape = {4, 3, 5}, .prefix = 10});
  for (const DType dtype : kAllDTypes) {
    LrpeProblem p{.B = 3, .H = 2, .D = 128, .E = 43, .shape = {4, 3, 5}, .prefix = 1};
    p.dtype = dtype;
    p.need_dtheta = false;
    b.add("3-D, vectors with columns of two axes", p);
  }
  b.add("4-D, E not dividing D", {.B = 2, .H = 2, .D = 30, .E = 8, .shape = {2, 3, 2, 3}});
  b.add("m * E far above D", {.H = 2, .D = 5, .E = 40, .shape = {9, 1}, .prefix = 1});
  b.add("axes of length 1 that own no column", {.H = 1, .D = 8, .E = 8, .shape = {6, 1, 1}});
  b.add("1-D, E > D (defect 4: padding of the wrong axis)",
        {.H = 3, .D = 24, .E = 31, .shape = {17}});
  for (const Form form : {Form::kRotateHalves, Form::kRotateInterleaved}) {
    b.add("rotate, 3-D, E not dividing D/2",
          {.form = form, .B = 2, .H = 2, .D = 40, .E = 7, .shape = {3, 4, 3}, .prefix = 2});
  }
}

void add_activations(Builder& b) {
  for (const LrpeActivation a : kActivations) {
    for (const std::int64_t prefix : {0, 1, 10}) {
      b.add("every activation with prefix",
            {.B = 2, .H = 2, .D = 33, .E = 33, .shape = {70}, .prefix = prefix, .activation = a});
    }
    // Defect of the original's block kernel: wrong beyond one tile of tokens.
    b.add("more tokens than any tile",
          {.B = 1, .H = 1, .D = 4, .E = 4, .shape = {1500}, .prefix = 10, .activation = a});
    b.add("thousands of features",
          {.B = 1, .H = 1, .D = 5000, .E = 5000, .shape = {5}, .activation = a});
    b.add("activation without dtheta", {.B = 2,
                                        .H = 1,
                                        .D = 16,
                                        .E = 8,
                                        .shape = {4, 5},
                                        .activation = a,
                                        .dtype = DType::kBF16,
                                        .need_dtheta = false});
  }
  // Defect 2: the original's relu has derivative 1 at exactly 0.
  Case& relu =
      b.add("relu at exactly 0, and at -0",
            {.B = 2, .H = 1, .D = 8, .E = 8, .shape = {12}, .activation = LrpeActivation::kRelu});
  relu.draw = replacing(relu.draw, {"x"}, [](Rng& rng, std::size_t i) {
    return i % 3 == 0 ? 0.0 : i % 3 == 1 ? -0.0 : rng.normal();
  });
  // Softmax must subtract its maximum, and a column far below it must give zeros and not NaN.
  for (const LrpeActivation a : {LrpeActivation::kSoftmaxFeatures, LrpeActivation::kSoftmaxTokens,
                                 LrpeActivation::kSilu, LrpeActivation::kSigmoid}) {
    Case& c = b.add("logits of +-1e4",
                    {.B = 1, .H = 2, .D = 16, .E = 16, .shape = {20}, .activation = a});
    c.draw = replacing(c.draw, {"x"}, [](Rng& rng, std::size_t i) {
      return i % 5 ? rng.normal() : 1e4 * rng.normal();
    });
  }
}

void add_positions(Builder& b) {
  for (const DType dtype : kAllDTypes) {
    b.add("offset at 2^31",
          {.B = 1, .H = 2, .D = 16, .E = 16, .shape = {40}, .offset = 1ll << 31, .dtype = dtype});
  }
  b.add("offset below -2^31", {.H = 1, .D = 16, .E = 16, .shape = {9}, .offset = -(1ll << 31) - 5});
  b.add("offsets per batch", {.B = 3,
                              .H = 2,
                              .D = 16,
                              .E = 16,
                              .shape = {11},
                              .prefix = 2,
                              .offset = 7,
                              .offset_per_batch = true});
  for (const Form form : kAllForms) {
    LrpeProblem p{.form = form,
                  .B = 4,
                  .H = 4,
                  .Hk = 2,
                  .D = 64,
                  .E = 64,
                  .shape = {1},
                  .offset_per_batch = true,
                  .dtype = DType::kBF16};
    b.add("one decoded token", p);
  }
  // The original's grid holds at most 65 535 tokens; theirs fails here, and so would 16-bit
  // indices.
  b.add("more than 65 535 tokens",
        {.B = 1, .H = 1, .D = 2, .E = 2, .shape = {65600}, .prefix = 10});
  b.add("more than 65 535 tokens, rotate",
        {.form = Form::kRotateHalves, .D = 2, .E = 1, .shape = {65600}});
  b.add("more than 65 535 tokens, softmax over tokens",
        {.D = 1, .E = 1, .shape = {65600}, .activation = LrpeActivation::kSoftmaxTokens});
  b.add("more than 65 535 batch entries", {.B = 66000, .D = 1, .E = 1, .shape = {1}, .prefix = 1});
  b.add("more than 65 535 heads", {.H = 66000, .D = 1, .E = 1, .shape = {2}});
  b.add("many heads", {.H = 1500, .D = 2, .E = 2, .shape = {3}});
  b.add("only prefix tokens", {.B = 2, .H = 2, .D = 8, .E = 8, .shape = {0}, .prefix = 10});
}

void add_sizes(Builder& b) {
  for (const Form form : kAllForms) {
    const LrpeProblem base{.form = form, .B = 2, .H = 2, .Hk = 2, .D = 4, .E = 4, .shape = {3}};
    for (int dimension = 0; dimension < 4; ++dimension) {
      LrpeProblem p = base;
      if (dimension == 0) p.B = 0;
      if (dimension == 1) p.H = p.Hk = 0;
      if (dimension == 2) p.shape = {0};
      if (dimension == 3) p.D = 0;
      b.add("zero size", p);
    }
    LrpeProblem grid = base;
    grid.shape = {3, 0};
    grid.E = 2;
    b.add("zero size of one axis", grid);
    LrpeProblem one = base;
    one.B = one.H = one.Hk = 1;
    one.D = is_rotate(form) ? 2 : 1;
    one.E = 1;
    b.add("the smallest D", one);
  }
  for (const LrpeActivation a :
       {LrpeActivation::kSoftmaxFeatures, LrpeActivation::kSoftmaxTokens}) {
    b.add("softmax of nothing: L = 0",
          {.B = 1, .H = 1, .D = 4, .E = 4, .shape = {0}, .activation = a});
    b.add("softmax of nothing: D = 0",
          {.B = 1, .H = 1, .D = 0, .E = 1, .shape = {4}, .activation = a});
  }
  for (const std::int64_t D : {1, 3, 7, 8, 9, 15, 16, 17, 31, 63, 65, 80, 127, 129, 256, 500}) {
    b.add("D around vector widths", {.B = 3,
                                     .H = 1,
                                     .D = D,
                                     .E = D,
                                     .shape = {5},
                                     .dtype = D % 2 ? DType::kBF16 : DType::kF32});
  }
  for (const std::int64_t B : {5, 8, 13, 33}) {
    b.add("many batch entries share a phase",
          {.B = B, .H = 2, .D = 40, .E = 40, .shape = {6}, .prefix = 1, .dtype = DType::kF16});
  }
}

void add_groups(Builder& b) {
  b.add("qk: GQA 8 to 1",
        {.form = Form::kCosineQk, .B = 2, .H = 8, .Hk = 1, .D = 32, .E = 32, .shape = {19}});
  b.add("qk: more k heads than q heads",
        {.form = Form::kCosineQk, .B = 2, .H = 2, .Hk = 6, .D = 32, .E = 16, .shape = {4, 5}});
  for (const LrpeActivation a : kActivations) {
    b.add("qk: every activation", {.form = Form::kCosineQk,
                                   .B = 2,
                                   .H = 4,
                                   .Hk = 2,
                                   .D = 24,
                                   .E = 24,
                                   .shape = {33},
                                   .prefix = 1,
                                   .activation = a,
                                   .dtype = DType::kF16});
  }
  for (const Form form : kAllForms) {
    LrpeProblem p{.form = form, .B = 2, .H = 2, .Hk = 2, .D = 20, .E = 20, .shape = {13}};
    p.need_dtheta = false;
    b.add("only dx: nothing saved", p);
    p.need_dtheta = true;
    p.need_dx = false;
    b.add("only dtheta", p);
  }
}

void add_values(Builder& b) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Form form : kAllForms) {
    LrpeProblem p{
        .form = form, .B = 2, .H = 2, .Hk = 1, .D = 12, .E = 12, .shape = {6}, .prefix = 2};
    Case& c = b.add("theta not finite: NaN in that column, for tokens with a position only", p);
    c.draw = replacing(c.draw, {"theta"}, [nan](Rng& rng, std::size_t i) {
      return i % 12 == 3   ? nan
             : i % 12 == 5 ? std::numeric_limits<double>::infinity()
                           : rng.normal();
    });
    Case& x = b.add("one NaN in x reaches no other element than its own", p);
    x.draw = replacing(x.draw, {"x", "q", "k"},
                       [nan](Rng& rng, std::size_t i) { return i == 17 ? nan : rng.normal(); });
  }
  Case& huge =
      b.add("theta of 1e30", {.B = 1, .H = 1, .D = 8, .E = 8, .shape = {50}, .need_dtheta = false});
  huge.draw =
      replacing(huge.draw, {"theta"}, [](Rng& rng, std::size_t) { return 1e30 * rng.normal(); });
  Case& tiny =
      b.add("theta below the normal numbers", {.B = 1, .H = 1, .D = 8, .E = 8, .shape = {50}});
  tiny.draw =
      replacing(tiny.draw, {"theta"}, [](Rng& rng, std::size_t) { return 1e-41 * rng.normal(); });
  for (const DType dtype : kAllDTypes) {
    Case& c = b.add(
        "denormal x is not flushed",
        {.B = 1, .H = 1, .D = 8, .E = 8, .shape = {20}, .dtype = dtype, .need_dtheta = false});
    const double size = dtype == DType::kF16 ? 1e-6 : dtype == DType::kF64 ? 1e-310 : 1e-40;
    c.draw =
        replacing(c.draw, {"x"}, [size](Rng& rng, std::size_t) { return size * rng.normal(); });
  }
}

void add_long_axes(Builder& b) {
  // The CPU's phases of a grid are products beyond position 64 of an axis, and rows alone up to there.
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (LrpeProblem p :
         {LrpeProblem{.B = 3, .H = 2, .D = 40, .E = 20, .shape = {33, 3}},
          LrpeProblem{.B = 2, .H = 2, .D = 40, .E = 20, .shape = {2, 64}, .prefix = 1},
          LrpeProblem{.B = 2, .H = 1, .D = 70, .E = 43, .shape = {4, 70}, .prefix = 130},
          LrpeProblem{.B = 2, .H = 1, .D = 48, .E = 30, .shape = {130, 3}},
          LrpeProblem{.B = 2, .H = 2, .D = 128, .E = 43, .shape = {2, 70, 2}},
          LrpeProblem{.B = 1, .H = 1, .D = 20, .E = 5, .shape = {1, 66, 2, 3}},
          LrpeProblem{.B = 1, .H = 1, .D = 12, .E = 7, .shape = {70, 66}}}) {
      p.dtype = dtype;
      p.need_dtheta = false;
      b.add("grids with a long axis", p);
    }
  }
}

// Tokens that say where they are. Like the above they stand last: a case's values follow from its place.
void add_ids(Builder& b) {
  using Ids = LrpeProblem::Ids;
  using Values = LrpeProblem::IdValues;
  std::size_t n = 0;
  for (const Values values : {Values::kPacked, Values::kFarRuns, Values::kNear, Values::kFar}) {
    for (const Ids ids : {Ids::kShared, Ids::kOwn}) {
      for (LrpeProblem p : {LrpeProblem{.B = 3, .H = 2, .D = 24, .E = 24, .shape = {150}},
                            LrpeProblem{.B = 2, .H = 2, .D = 24, .E = 13, .shape = {20, 5}},
                            LrpeProblem{.B = 2, .H = 1, .D = 128, .E = 43, .shape = {4, 5, 3}},
                            LrpeProblem{.B = 2, .H = 1, .D = 10, .E = 3, .shape = {2, 3, 2, 3}}}) {
        p.ids = ids;
        p.id_values = values;
        for (const bool need_dtheta : {true, false}) {
          p.dtype = kAllDTypes[n++ % 4];
          p.need_dtheta = need_dtheta;
          b.add("positions by token", p);
        }
        ++n;  // so that each problem meets each type
      }
    }
  }
  for (const Form form : kAllForms) {
    b.add("positions by token, one decoded", {.form = form,
                                              .B = 4,
                                              .H = 4,
                                              .Hk = 2,
                                              .D = 64,
                                              .E = 64,
                                              .shape = {1},
                                              .ids = Ids::kOwn,
                                              .dtype = DType::kBF16});
  }
  for (const LrpeActivation activation : kActivations) {
    b.add("positions by token, activations", {.B = 2,
                                              .H = 2,
                                              .D = 32,
                                              .E = 16,
                                              .shape = {9, 5},
                                              .activation = activation,
                                              .ids = Ids::kOwn,
                                              .dtype = DType::kBF16});
  }
  b.add("positions by token, no tokens",
        {.B = 2, .H = 2, .D = 8, .E = 8, .shape = {0}, .ids = Ids::kOwn});
  b.add("positions by token, no sequences",
        {.B = 0, .H = 2, .D = 8, .E = 8, .shape = {4}, .ids = Ids::kShared});
}

}  // namespace

std::vector<Case> lrpe_named_cases() {
  Builder b;
  add_forms_and_types(b);
  add_axes(b);
  add_activations(b);
  add_positions(b);
  add_sizes(b);
  add_groups(b);
  add_values(b);
  add_long_axes(b);
  add_ids(b);
  return b.take();
}

namespace {

// Weight on the sizes where tiles begin and end.
std::int64_t draw_length(Rng& rng, std::int64_t most) {
  static constexpr std::array<std::int64_t, 20> kEdges = {
      0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257};
  std::int64_t n = rng.below(2) ? kEdges[static_cast<std::size_t>(rng.below(20))] : rng.below(600);
  if (n == 0 && rng.below(4)) n = 1;  // empty cases are legal and cheap, but prove little
  return std::min(n, most);
}

}  // namespace

LrpeProblem lrpe_fuzz_problem(std::uint64_t seed) {
  static constexpr std::array<std::int64_t, 14> kWidths = {1,  2,  3,  8,   16,  32,  33,
                                                           64, 80, 96, 128, 160, 192, 256};
  Rng rng(seed);
  LrpeProblem p;
  p.seed = seed;
  p.form = kAllForms[static_cast<std::size_t>(rng.below(4))];
  p.dtype = kAllDTypes[static_cast<std::size_t>(rng.below(4))];
  p.theta_dtype = rng.below(2) ? DType::kF32 : p.dtype;
  p.B = rng.below(50) == 0 ? 0 : 1 + rng.below(4);
  p.H = rng.below(80) == 0 ? 0 : 1 + rng.below(4);
  if (p.form == Form::kCosineQk) {
    const std::int64_t ratio = 1 + rng.below(p.H > 2 ? 2 : 8);
    p.Hk = p.H;
    (rng.below(4) ? p.H : p.Hk) *= ratio;
  }
  p.D = rng.below(2) ? kWidths[static_cast<std::size_t>(rng.below(14))] : 1 + rng.below(256);
  if (is_rotate(p.form)) p.D = std::max<std::int64_t>(2, p.D / 2 * 2);
  p.activation = rng.below(3) == 0 ? LrpeActivation::kNone
                                   : kActivations[static_cast<std::size_t>(rng.below(6))];
  if (is_rotate(p.form)) p.activation = LrpeActivation::kNone;
  p.prefix =
      std::array<std::int64_t, 4>{0, 1, 10, rng.below(40)}[static_cast<std::size_t>(rng.below(4))];

  // Few elements in 95 % of the cases, so that ten thousand of them cost minutes; many in the rest.
  const std::int64_t budget = rng.below(20) == 0 ? 60000 : 5000;
  const std::int64_t per_token = std::max<std::int64_t>(1, p.B * (p.H + p.Hk) * p.D);
  const std::int64_t tokens = std::max<std::int64_t>(1, budget / per_token);
  p.prefix = std::min(p.prefix, tokens);

  const std::int64_t columns = is_rotate(p.form) ? p.D / 2 : p.D;
  const int axes = 1 + static_cast<int>(rng.below(4));
  if (axes == 1) {
    p.shape = {draw_length(rng, tokens)};
    // Spare columns of theta, whose gradient is zero: not so many that they are nearly all of it.
    p.E = columns + std::min(rng.below(3) == 0 ? rng.below(20) : 0, 4 * columns);
    static constexpr std::array<std::int64_t, 7> kOffsets = {0,   0,         1,           100000,
                                                             -77, 1ll << 31, -(1ll << 31)};
    p.offset = kOffsets[static_cast<std::size_t>(rng.below(7))];
    if (rng.below(4) == 0) p.offset += rng.below(1 << 20);
    p.offset_per_batch = rng.below(3) == 0;
    const bool origin = p.offset == 0 && !p.offset_per_batch;
    if (p.shape.extent[0] == 1 && origin && Rng(seed ^ 0x11fe).below(16) != 0) p.shape = {2};
  } else {
    std::int64_t left = tokens;
    LrpeGrid grid;
    grid.axes = axes;
    for (int i = 0; i < axes; ++i) {
      const std::int64_t n = std::min<std::int64_t>(left, 1 + rng.below(left > 40 ? 20 : 6));
      grid.extent[static_cast<std::size_t>(i)] = std::max<std::int64_t>(n, 1);
      left /= grid.extent[static_cast<std::size_t>(i)];
    }
    // One token, or a first axis of length 1, has a dtheta of zeros. A few of those are enough.
    if (grid.extent[0] == 1 && Rng(seed ^ 0x11fe).below(16) != 0) grid.extent[0] = 2;
    if (rng.below(60) == 0) grid.extent[static_cast<std::size_t>(rng.below(axes))] = 0;
    const std::int64_t least = ceil_div(columns, axes);
    const std::int64_t most = std::max(least, (columns - 1) / (axes - 1));
    p.E = least + rng.below(most - least + 1);
    for (int i = 0; i < axes; ++i) {  // an axis without a column must have length 1
      auto& n = grid.extent[static_cast<std::size_t>(i)];
      if (i * p.E >= columns) n = std::min<std::int64_t>(n, 1);
    }
    p.shape = grid;
  }
  p.need_dtheta = rng.below(3) != 0;
  p.need_dx = !p.need_dtheta || rng.below(5) != 0;
  if (rng.below(5) == 0 && (p.shape.axes - 1) * p.E < columns) {  // every axis has a column
    p.ids = rng.below(2) ? LrpeProblem::Ids::kShared : LrpeProblem::Ids::kOwn;
    p.id_values = static_cast<LrpeProblem::IdValues>(rng.below(4));
    p.prefix = p.offset = 0;
    p.offset_per_batch = false;
  }
  return p;
}

namespace {
const CasesRegistration kRegistration(
    {.op = "lrpe_cosine",
     .named = lrpe_named_cases,
     .fuzz = [](std::uint64_t seed) { return lrpe_case(lrpe_fuzz_problem(seed)); },
     .bad_calls = lrpe_bad_calls,
     .sanitized = "activation without|thousands of|qk: GQA|only d|3-D, (vectors|E = 43)|"
                  "positions by token, (one|act)|many rows"});
}  // namespace

}  // namespace annulus::testing
