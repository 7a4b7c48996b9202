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

constexpr std::array kAllForms = {Form::kCosine,         Form::kCosineQk,
                                  Form::kRotateHalves,   Form::kRotateInterleaved,
                                  Form::kRotateQkHalves, Form::kRotateQkInterleaved};
constexpr std::array kAllDTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::array kActivations = {LrpeActivation::kNone,
                                     LrpeActivation::kRelu,
                                     LrpeActivation::kSigmoid,
                                     LrpeActivation::kSilu,
                                     LrpeActivation::kSoftmaxFeatures,
                                     LrpeActivation::kSoftmaxTokens};

LrpeProblem of_dtype(DType dtype, LrpeProblem p) {
  p.dtype = dtype;
  return p;
}
LrpeProblem without_dtheta(LrpeProblem p) {
  p.need_dtheta = false;
  return p;
}

class Builder {
 public:
  Case& add(const std::string& name, LrpeProblem p) {
    p.seed = 1000 + cases_.size();
    cases_.push_back(lrpe_case(p));
    cases_.back().params = "'" + name + "' " + cases_.back().params;
    return cases_.back();
  }
  // With value(rng, i) for the tensors of these names, and the usual draw for the others.
  template <class F>
  void add_with(const std::string& name, const LrpeProblem& p, std::vector<std::string> names,
                F value) {
    Draw& draw = add(name, p).draw;
    draw = [usual = draw, names, value](Rng& rng, const TensorSpec& spec, std::span<double> v) {
      usual(rng, spec, v);
      if (std::find(names.begin(), names.end(), spec.name) == names.end()) return;
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = value(rng, i);
    };
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

void add_forms_and_types(Builder& b) {
  for (const Form form : kAllForms) {
    for (const DType dtype : kAllDTypes) {
      LrpeProblem p{.form = form, .B = 2, .H = 3, .D = 64, .E = 64, .shape = {37}, .prefix = 3};
      if (is_qk(form)) p.H = 6, p.Hk = 2;
      p.dtype = dtype;
      b.add("every form and dtype", p);
      p.theta_dtype = dtype;
      p.shape = {5, 7};
      p.E = is_rotate(form) ? 17 : 33;
      b.add("theta in x's dtype, 2-D", p);
    }
  }
}

void add_axes(Builder& b) {
  // Defect 1: E = 64 for D = 128 left axis 3 without a column. These give every axis some.
  b.add("3-D, E = 43: axis 3 owns 42 columns",
        {.B = 2, .H = 2, .D = 128, .E = 43, .shape = {4, 3, 5}, .prefix = 10});
  for (const DType dtype : kAllDTypes) {
    const LrpeProblem p{.B = 3, .H = 2, .D = 128, .E = 43, .shape = {4, 3, 5}, .prefix = 1};
    b.add("3-D, vectors with columns of two axes", without_dtheta(of_dtype(dtype, p)));
  }
  b.add("4-D, E not dividing D", {.B = 2, .H = 2, .D = 30, .E = 8, .shape = {2, 3, 2, 3}});
  b.add("m * E twice D", {.H = 2, .D = 5, .E = 5, .shape = {9, 1}, .prefix = 1});
  b.add("axes of length 1 that own no column", {.D = 8, .E = 8, .shape = {6, 1, 1}});
  // Defect 4: the original padded the wrong axis where E is no power of 2.
  b.add("1-D, D no power of 2", {.H = 3, .D = 24, .E = 24, .shape = {17}});
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
          {.D = 4, .E = 4, .shape = {1500}, .prefix = 10, .activation = a});
    b.add("thousands of features", {.D = 5000, .E = 5000, .shape = {5}, .activation = a});
    const LrpeProblem p{.B = 2, .D = 16, .E = 8, .shape = {4, 5}, .activation = a};
    b.add("activation without dtheta", without_dtheta(of_dtype(DType::kBF16, p)));
  }
  // Defect 2: the original's relu has derivative 1 at exactly 0.
  b.add_with("relu at exactly 0, and at -0",
             {.B = 2, .D = 8, .E = 8, .shape = {12}, .activation = LrpeActivation::kRelu}, {"x"},
             [](Rng& rng, std::size_t i) {
               return i % 3 == 0 ? 0.0 : i % 3 == 1 ? -0.0 : rng.normal();
             });
  // Softmax must subtract its maximum, and a column far below it must give zeros and not NaN.
  for (const LrpeActivation a : {LrpeActivation::kSoftmaxFeatures, LrpeActivation::kSoftmaxTokens,
                                 LrpeActivation::kSilu, LrpeActivation::kSigmoid}) {
    b.add_with("logits of +-1e4", {.H = 2, .D = 16, .E = 16, .shape = {20}, .activation = a}, {"x"},
               [](Rng& rng, std::size_t i) { return (i % 5 ? 1 : 1e4) * rng.normal(); });
  }
}

void add_positions(Builder& b) {
  for (const DType dtype : kAllDTypes) {
    b.add("offset at 2^31",
          {.H = 2, .D = 16, .E = 16, .shape = {40}, .offset = 1ll << 31, .dtype = dtype});
  }
  b.add("offset below -2^31", {.D = 16, .E = 16, .shape = {9}, .offset = -(1ll << 31) - 5});
  LrpeProblem offsets{.B = 3, .H = 2, .D = 16, .E = 16, .shape = {11}, .prefix = 2, .offset = 7};
  offsets.offset_per_batch = true;
  b.add("offsets per batch", offsets);
  for (const Form form : kAllForms) {
    LrpeProblem p{.form = form, .B = 4, .H = 4, .Hk = 2, .D = 64, .E = 64, .shape = {1}};
    p.offset_per_batch = true;
    b.add("one decoded token", of_dtype(DType::kBF16, p));
  }
  // The original's grid holds at most 65 535 tokens; theirs fails here, and so would 16-bit
  // indices.
  b.add("more than 65 535 tokens", {.D = 2, .E = 2, .shape = {65600}, .prefix = 10});
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
    for (LrpeProblem p : {LrpeProblem{.B = 0, .H = 2, .Hk = 2, .D = 4, .E = 4, .shape = {3}},
                          LrpeProblem{.B = 2, .H = 0, .Hk = 0, .D = 4, .E = 4, .shape = {3}},
                          LrpeProblem{.B = 2, .H = 2, .Hk = 2, .D = 4, .E = 4, .shape = {0}},
                          LrpeProblem{.B = 2, .H = 2, .Hk = 2, .D = 0, .E = 4, .shape = {3}}}) {
      p.form = form;
      b.add("zero size", p);
    }
    b.add("zero size of one axis",
          {.form = form, .B = 2, .H = 2, .Hk = 2, .D = 4, .E = 2, .shape = {3, 0}});
    b.add("the smallest D", {.form = form, .Hk = 1, .D = is_rotate(form) ? 2 : 1, .shape = {3}});
  }
  for (const LrpeActivation a :
       {LrpeActivation::kSoftmaxFeatures, LrpeActivation::kSoftmaxTokens}) {
    b.add("softmax of nothing: L = 0", {.D = 4, .E = 4, .shape = {0}, .activation = a});
    b.add("softmax of nothing: D = 0", {.D = 0, .E = 1, .shape = {4}, .activation = a});
  }
  for (const std::int64_t D : {1, 3, 7, 8, 9, 15, 16, 17, 31, 63, 65, 80, 127, 129, 256, 500}) {
    const DType dtype = D % 2 ? DType::kBF16 : DType::kF32;
    b.add("D around vector widths", {.B = 3, .D = D, .E = D, .shape = {5}, .dtype = dtype});
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
    LrpeProblem p{.form = Form::kCosineQk, .B = 2, .H = 4, .Hk = 2, .D = 24, .E = 24};
    p.shape = {33};
    p.prefix = 1;
    p.activation = a;
    b.add("qk: every activation", of_dtype(DType::kF16, p));
  }
  for (const Form form : kAllForms) {
    LrpeProblem p{.form = form, .B = 2, .H = 2, .Hk = 2, .D = 20, .E = 20, .shape = {13}};
    b.add("only dx: nothing saved", without_dtheta(p));
    p.need_dx = false;
    b.add("only dtheta", p);
  }
}

void add_values(Builder& b) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                   kInfinity = std::numeric_limits<double>::infinity();
  const auto times = [](double size) {
    return [size](Rng& rng, std::size_t) { return size * rng.normal(); };
  };
  for (const Form form : kAllForms) {
    const LrpeProblem p{
        .form = form, .B = 2, .H = 2, .Hk = 1, .D = 12, .E = 12, .shape = {6}, .prefix = 2};
    b.add_with("theta not finite: NaN in that column, for tokens with a position only", p,
               {"theta"}, [](Rng& rng, std::size_t i) {
                 return i % 12 == 3 ? kNan : i % 12 == 5 ? kInfinity : rng.normal();
               });
    b.add_with("one NaN in x reaches no other element than its own", p, {"x", "q", "k"},
               [](Rng& rng, std::size_t i) { return i == 17 ? kNan : rng.normal(); });
  }
  const LrpeProblem small{.D = 8, .E = 8, .shape = {50}};
  b.add_with("theta of 1e30", without_dtheta(small), {"theta"}, times(1e30));
  b.add_with("theta below the normal numbers", small, {"theta"}, times(1e-41));
  for (const DType dtype : kAllDTypes) {
    const double size = dtype == DType::kF16 ? 1e-6 : dtype == DType::kF64 ? 1e-310 : 1e-40;
    b.add_with("denormal x is not flushed",
               without_dtheta({.D = 8, .E = 8, .shape = {20}, .dtype = dtype}), {"x"}, times(size));
  }
}

void add_long_axes(Builder& b) {
  // The CPU's phases of a grid are products beyond position 64 of an axis, and rows alone up to there.
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const LrpeProblem& p :
         {LrpeProblem{.B = 3, .H = 2, .D = 40, .E = 20, .shape = {33, 3}},
          LrpeProblem{.B = 2, .H = 2, .D = 40, .E = 20, .shape = {2, 64}, .prefix = 1},
          LrpeProblem{.B = 2, .H = 1, .D = 70, .E = 43, .shape = {4, 70}, .prefix = 130},
          LrpeProblem{.B = 2, .H = 1, .D = 48, .E = 30, .shape = {130, 3}},
          LrpeProblem{.B = 2, .H = 2, .D = 128, .E = 43, .shape = {2, 70, 2}},
          LrpeProblem{.B = 1, .H = 1, .D = 20, .E = 5, .shape = {1, 66, 2, 3}},
          LrpeProblem{.B = 1, .H = 1, .D = 12, .E = 7, .shape = {70, 66}}}) {
      b.add("grids with a long axis", without_dtheta(of_dtype(dtype, p)));
    }
  }
}

// Tokens that say where they are. Like the above they stand last: a case's values follow from its place.
void add_ids(Builder& b) {
  using Ids = LrpeProblem::Ids;
  using Values = LrpeProblem::IdValues;
  const auto own = [](LrpeProblem p) {
    p.ids = Ids::kOwn;
    return p;
  };
  std::size_t n = 0;
  for (const Values values : {Values::kPacked, Values::kFarRuns, Values::kNear, Values::kFar}) {
    for (const Ids ids : {Ids::kShared, Ids::kOwn}) {
      for (LrpeProblem p : {LrpeProblem{.B = 3, .H = 2, .D = 24, .E = 24, .shape = {150}},
                            LrpeProblem{.B = 2, .H = 2, .D = 24, .E = 13, .shape = {20, 5}},
                            LrpeProblem{.B = 2, .H = 1, .D = 128, .E = 43, .shape = {4, 5, 3}},
                            LrpeProblem{.B = 2, .H = 1, .D = 10, .E = 3, .shape = {2, 3, 2, 3}}}) {
        p.ids = ids;
        p.id_values = values;
        b.add("positions by token", of_dtype(kAllDTypes[n % 4], p));
        b.add("positions by token", without_dtheta(of_dtype(kAllDTypes[(n + 1) % 4], p)));
        n += 3;  // so that each problem meets each type
      }
    }
  }
  for (const Form form : kAllForms) {
    const LrpeProblem p{.form = form, .B = 4, .H = 4, .Hk = 2, .D = 64, .E = 64, .shape = {1}};
    b.add("positions by token, one decoded", own(of_dtype(DType::kBF16, p)));
  }
  for (const LrpeActivation a : kActivations) {
    const LrpeProblem p{.B = 2, .H = 2, .D = 32, .E = 16, .shape = {9, 5}, .activation = a};
    b.add("positions by token, activations", own(of_dtype(DType::kBF16, p)));
  }
  b.add("positions by token, no tokens", own({.B = 2, .H = 2, .D = 8, .E = 8, .shape = {0}}));
  b.add("positions by token, no sequences",
        {.B = 0, .H = 2, .D = 8, .E = 8, .shape = {4}, .ids = Ids::kShared});
}

// Partial rotary, where theta has too few columns for all pairs, and one row of theta for all heads.
void add_partial(Builder& b) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const Form form : kAllForms) {
    const LrpeProblem shared{
        .form = form, .B = 2, .H = 6, .Hk = 2, .D = 24, .E = 24, .one_row = true, .shape = {33}};
    for (const DType dtype : kAllDTypes) b.add("one row of theta", of_dtype(dtype, shared));
    b.add("one row of theta, only dx", without_dtheta(of_dtype(DType::kBF16, shared)));
    LrpeProblem none = shared;
    none.H = none.Hk = 0;
    b.add("one row of theta, no heads", none);
    if (!is_rotate(form)) continue;
    LrpeProblem p{
        .form = form, .B = 3, .H = 4, .Hk = 2, .D = 64, .E = 8, .shape = {37}, .prefix = 3};
    for (const DType dtype : kAllDTypes) {
      b.add("partial rotary: 16 of 64 columns", of_dtype(dtype, p));
      b.add("partial rotary: 16 of 64 columns", without_dtheta(of_dtype(dtype, p)));
    }
    p.one_row = true;
    b.add("partial rotary, one row of theta", p);
    // Nothing is aligned to a vector.
    b.add("partial rotary: 2-D, 28 of 42 columns", {.form = form,
                                                    .B = 2,
                                                    .H = 2,
                                                    .Hk = 2,
                                                    .D = 42,
                                                    .E = 7,
                                                    .shape = {5, 7},
                                                    .dtype = DType::kBF16});
    b.add("partial rotary: 3-D by token, 18 of 20 columns", {.form = form,
                                                             .B = 2,
                                                             .H = 2,
                                                             .Hk = 4,
                                                             .D = 20,
                                                             .E = 3,
                                                             .shape = {4, 5, 3},
                                                             .ids = LrpeProblem::Ids::kOwn});
    b.add("partial rotary: 2 of 4 columns", {.form = form, .Hk = 1, .D = 4, .E = 1, .shape = {3}});
    b.add("partial rotary: more tokens than any tile", {.form = form,
                                                        .B = 1,
                                                        .H = 2,
                                                        .Hk = 1,
                                                        .D = 8,
                                                        .E = 3,
                                                        .shape = {1500},
                                                        .dtype = DType::kF16});
    p = {
        .form = form, .B = 2, .H = 2, .Hk = 2, .D = 12, .E = 4, .shape = {6}, .need_dtheta = false};
    b.add_with("partial rotary: a NaN that passes through, and one that turns", p,
               {"x", "q", "k", "dy", "dyq", "dyk"}, [](Rng& rng, std::size_t i) {
                 return i % 36 == 9 || i % 36 == 14 ? kNan : rng.normal();
               });
  }
}

std::vector<Case> named_cases() {
  Builder b;
  for (const auto add : {add_forms_and_types, add_axes, add_activations, add_positions, add_sizes,
                         add_groups, add_values, add_long_axes, add_ids, add_partial}) {
    add(b);
  }
  return b.take();
}

// Weight on the sizes where tiles begin and end.
std::int64_t draw_length(Rng& rng, std::int64_t most) {
  static constexpr std::int64_t kEdges[] = {0,  1,  2,  3,  7,  8,  9,   15,  16,  17,
                                            31, 32, 33, 63, 64, 65, 127, 128, 129, 257};
  std::int64_t n = rng.below(2) ? rng.pick<std::int64_t>(kEdges) : rng.below(600);
  if (n == 0 && rng.below(4)) n = 1;  // empty cases are legal and cheap, but prove little
  return std::min(n, most);
}

// A random problem: the same for a seed on every machine.
LrpeProblem fuzz_problem(std::uint64_t seed) {
  static constexpr std::int64_t kWidths[] = {1,  2,  3,  8,   16,  32,  33,
                                             64, 80, 96, 128, 160, 192, 256};
  Rng rng(seed);
  LrpeProblem p;
  p.seed = seed;
  p.form = rng.pick<Form>(kAllForms);
  p.dtype = rng.pick<DType>(kAllDTypes);
  p.theta_dtype = rng.below(2) ? DType::kF32 : p.dtype;
  p.B = rng.below(50) == 0 ? 0 : 1 + rng.below(4);
  p.H = rng.below(80) == 0 ? 0 : 1 + rng.below(4);
  if (is_qk(p.form)) {
    const std::int64_t ratio = 1 + rng.below(p.H > 2 ? 2 : 8);
    p.Hk = p.H;
    (rng.below(4) ? p.H : p.Hk) *= ratio;
  }
  p.D = rng.below(2) ? rng.pick<std::int64_t>(kWidths) : 1 + rng.below(256);
  if (is_rotate(p.form)) p.D = std::max<std::int64_t>(2, p.D / 2 * 2);
  p.activation = rng.below(3) == 0 ? LrpeActivation::kNone : rng.pick<LrpeActivation>(kActivations);
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
    p.E = columns;
    static constexpr std::int64_t kOffsets[] = {0, 0, 1, 100000, -77, 1ll << 31, -(1ll << 31)};
    p.offset = rng.pick<std::int64_t>(kOffsets);
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
  p.one_row = rng.below(4) == 0;
  const std::int64_t too_few = (columns - 1) / p.shape.axes;
  if (is_rotate(p.form) && too_few > 0 && rng.below(3) == 0) p.E = 1 + rng.below(too_few);
  return p;
}

const CasesRegistration kRegistration(
    {.op = "lrpe_cosine",
     .named = named_cases,
     .fuzz = [](std::uint64_t seed) { return lrpe_case(fuzz_problem(seed)); },
     .bad_calls = lrpe_bad_calls,
     .sanitized = "activation without|thousands of|qk: GQA|only d|3-D, (vectors|E = 43)|"
                  "positions by token, (one|act)|many rows|partial rotary: (2-D|more)"});

}  // namespace

}  // namespace annulus::testing
