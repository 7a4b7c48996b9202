// The test of the tests, with LRPE-cosine: more than thirty bugs, most of them real ones from this family of
// operators. The runner must report every one, by the check named.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/core/scratch.h"
#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/memory/tensors.h"
#include "testing/planted_bugs.h"

namespace annulus::testing {
namespace {

using P = LrpeProblem;
using Form = LrpeProblem::Form;

const P kSmall{.B = 2, .H = 3, .D = 8, .E = 8, .shape = {9}, .prefix = 1, .seed = 4};

Case small(void (*change)(P&) = [](P&) {}) { return sound(lrpe_case(with(kSmall, change))); }
Case of(const P& p) { return sound(lrpe_case(p)); }

// Computes another problem on the same tensors: an operator that misreads its options.
Bug computing(const P& wrong, std::size_t call = kForward) {
  return [of = lrpe_case(wrong).calls[call]](const Right&, Tensors& t) { define(of, t); };
}

// Changes one element of y.
Bug off(std::size_t element, double factor) {
  return after([=](Tensors& t) { t["y"][element] *= factor; });
}

// Adds dx to what was there.
Case accumulating(Case c) {
  Call& call = c.calls[kBackward];
  call.run = [run = call.run](Views in, Views out, Context& context) {
    const std::vector<double> before = load_values<double>(out[0]);
    run(in, out, context);
    edit(out[0], [&](std::size_t i, double v) { return v + before[i]; });
  };
  return c;
}

// Writes dx with the strides of x. Small, so that whatever is written lies within the canaries.
Case misplacing() {
  Case c = of({.B = 1, .H = 2, .D = 4, .E = 4, .shape = {3}, .seed = 4});
  Call& call = c.calls[kBackward];
  call.run = [run = call.run](Views in, Views out, Context& context) {
    std::vector<TensorView> spoilt(out.begin(), out.end());
    spoilt[0].stride = in[1].stride;
    run(in, spoilt, context);
  };
  return c;
}

std::vector<Planted> wrong_numbers() {
  const P two_axes{.B = 1, .H = 1, .D = 8, .E = 4, .shape = {3, 5}, .seed = 4};
  const P three_axes{.B = 1, .H = 2, .D = 12, .E = 4, .shape = {2, 2, 3}, .seed = 4};
  const P turned{
      .form = Form::kRotateInterleaved, .B = 1, .H = 2, .D = 8, .E = 4, .shape = {5}, .seed = 4};
  const P partial{
      .form = Form::kRotateHalves, .B = 1, .H = 2, .D = 8, .E = 2, .shape = {5}, .seed = 4};
  const P one_row = with(kSmall, [](P& p) { p.one_row = true; });
  const P far = with(kSmall, [](P& p) { p.offset = 1ll << 31; });
  const P softmax = with(kSmall, [](P& p) { p.activation = LrpeActivation::kSoftmaxTokens; });
  Case grouped = of(
      {.form = Form::kCosineQk, .B = 1, .H = 4, .Hk = 2, .D = 4, .E = 4, .shape = {5}, .seed = 4});
  grouped.draw = nullptr;  // all normal: the rows of theta differ
  Case turned_groups = of({.form = Form::kRotateQkHalves,
                           .B = 1,
                           .H = 4,
                           .Hk = 2,
                           .D = 4,
                           .E = 2,
                           .shape = {5},
                           .seed = 4});
  turned_groups.draw = nullptr;
  Case naive = small([](P& p) { p.offset = 1 << 20; });
  naive.calls[kForward].run = [f = naive.calls[kForward].baseline](Views in, Views out, Context&) {
    f(in, out);
  };
  Case wrong_definition = lrpe_case(kSmall);
  wrong_definition.calls[kBackward].reference =
      [right = wrong_definition.calls[kBackward].reference](Views in, Views out) {
        right(in, out);
        edit(out[1], [](std::size_t, double v) { return v * 1.0001; });
      };
  return {
      {"head and token strides swapped", "forward y",
       misreading(of({.B = 2, .H = 5, .D = 4, .E = 4, .shape = {5}, .seed = 4}), kForward,
                  [](auto& in) { std::swap(in[0].stride[1], in[0].stride[2]); })},
      {"last tile dropped", "never written",
       then(small(), kForward,
            [](Views, Views out, Context&) {
              TensorView last = out[0];  // the last token again as it was
              last.data = static_cast<float*>(last.data) + (last.shape[2] - 1) * last.stride[2];
              last.shape[2] = 1;
              last.dtype = DType::kI32;
              edit(last, [](std::size_t, double) {
                return static_cast<double>(poison_bits(DType::kF32));
              });
            })},
      {"prefix off by one", "forward y", small(),
       computing(with(kSmall, [](P& p) { p.prefix = 2, p.shape = {8}; }))},
      {"axis 3 never encoded", "forward y", of(three_axes), after([](Tensors& t) {
         for (std::size_t i = 0; i < t["y"].size(); ++i) {
           const std::size_t row = i / 24, c = i % 24;
           if (c >= 8 && c < 12) t["y"][i] = t["x"][row * 12 + c];
           if (c >= 20) t["y"][i] = 0;
         }
       })},
      {"axes unravelled in the reverse order", "forward y", of(two_axes),
       computing(with(two_axes,
                      [](P& p) {
                        p.shape = {5, 3};
                      }))},
      {"relu' is 1 at exactly 0", "backward dx",
       drawing(small([](P& p) { p.activation = LrpeActivation::kRelu, p.need_dtheta = false; }),
               "x", [](std::size_t i, double v) { return i == 7 ? 0 : v; }),
       given([](Tensors& t) { t["x"][7] = 1; })},
      {"theta gets no gradient", "backward dtheta", small(),
       after([](Tensors& t) { t["dtheta"] = 0.0; })},
      {"dtheta forgets the second block of columns", "backward dtheta",
       of({.B = 1, .H = 2, .D = 8, .E = 5, .shape = {3, 4}, .seed = 4}), after([](Tensors& t) {
         for (std::size_t i = 0; i < t["dtheta"].size(); ++i) t["dtheta"][i] *= i % 5 < 3 ? 0.5 : 1;
       })},
      {"fp32 product of position and theta", "relative rms", naive},
      {"positions kept in 32 bits", "forward y", of(far),
       computing(with(kSmall, [](P& p) { p.offset = -(1ll << 31); }))},
      {"the first entry of offsets is used for every batch", "forward y",
       misreading(small([](P& p) { p.offset_per_batch = true; }), kForward,
                  [](auto& in) { in[2].stride[0] = 0; })},
      {"the first row of position_ids is used for every batch", "forward y",
       misreading(small([](P& p) { p.prefix = 0, p.ids = P::Ids::kOwn; }), kForward,
                  [](auto& in) { in[2].stride[0] = 0; })},
      {"offset ignored in the backward", "backward", small([](P& p) { p.offset = 5; }),
       computing(kSmall, kBackward)},
      {"GQA groups interleaved", "forward yq", grouped, after([](Tensors& t) {
         // Head 1 takes row 1 of theta and head 2 row 0: what `head % rows` would read.
         for (std::size_t i = 40; i < 120; ++i) {
           const std::size_t h = i / 40, token = i / 8 % 5, c = i % 4;
           const double phase = static_cast<double>(token) * t["theta"][h % 2 * 4 + c];
           t["yq"][i] =
               t["q"][(h * 5 + token) * 4 + c] * (i % 8 < 4 ? std::cos(phase) : std::sin(phase));
         }
       })},
      {"interleaved pairs taken for halves", "forward y", of(turned),
       computing(with(turned, [](P& p) { p.form = Form::kRotateHalves; }))},
      {"partial rotary pairs columns c and c + D/2", "forward y", of(partial),
       after([](Tensors& t) {
         for (std::size_t i = 0; i < t["y"].size(); i += 8) {
           for (std::size_t c = 0; c < 2; ++c) {
             const double phase = static_cast<double>(i / 8 % 5) * t["theta"][i / 40 * 2 + c];
             const double x1 = t["x"][i + c], x2 = t["x"][i + c + 4];
             t["y"][i + c] = x1 * std::cos(phase) - x2 * std::sin(phase);
             t["y"][i + c + 4] = x1 * std::sin(phase) + x2 * std::cos(phase);
             t["y"][i + c + 2] = t["x"][i + c + 2];
           }
         }
       })},
      {"partial rotary leaves the gradient of the rest at 0", "backward dx", of(partial),
       after([](Tensors& t) {
         for (std::size_t i = 0; i < t["dx"].size(); ++i) t["dx"][i] *= i % 8 < 4 ? 1 : 0;
       })},
      {"partial rotary turns the rest by 0, which spreads a NaN", "where the reference is",
       drawing(of(partial), "x", [](std::size_t i, double v) { return i == 5 ? NAN : v; }),
       after([](Tensors& t) { t["y"][7] += 0 * t["x"][5]; })},
      {"one row of theta: its gradient forgets a head", "backward dtheta", of(one_row),
       after([](Tensors& t) { t["dtheta"] *= 2.0 / 3; })},
      {"rotate: the rows of theta go to queries, not to groups of them", "forward yq",
       turned_groups, after([](Tensors& t) {
         for (std::size_t h = 1; h < 3; ++h) {  // head 1 takes row 1, head 2 row 0
           for (std::size_t i = h * 20; i < (h + 1) * 20; i += 4) {
             for (std::size_t c = 0; c < 2; ++c) {
               const double phase = static_cast<double>(i / 4 % 5) * t["theta"][h % 2 * 2 + c];
               t["yq"][i + c] =
                   t["q"][i + c] * std::cos(phase) - t["q"][i + c + 2] * std::sin(phase);
               t["yq"][i + c + 2] =
                   t["q"][i + c] * std::sin(phase) + t["q"][i + c + 2] * std::cos(phase);
             }
           }
         }
       })},
      {"softmax over tokens leaves out the prefix", "forward y", of(softmax), after([](Tensors& t) {
         for (std::size_t i = 0; i < t["y"].size(); ++i) t["y"][i] *= i / 16 % 10 == 0 ? 1 : 1.08;
       })},
      {"softmax over the wrong dimension", "forward y", of(softmax),
       computing(with(kSmall, [](P& p) { p.activation = LrpeActivation::kSoftmaxFeatures; }))},
      {"theta rounded to bf16", "forward y", small(), given([](Tensors& t) {
         t["theta"] = t["theta"].apply([](double v) {
           return static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(v))));
         });
       })},
      {"one bf16 element two ulps off", "ulps of the exact value",
       small([](P& p) { p.dtype = DType::kBF16; }), off(33, 1 + 0x1p-6)},
      {"rotate: one f16 element two ulps off", "ulps of the exact value",
       small([](P& p) { p.form = Form::kRotateHalves, p.dtype = DType::kF16; }),
       off(33, 1 + 0x1p-9)},
      {"silu in f32 right to 3e-7 of the largest", "relative maximum",
       small([](P& p) { p.activation = LrpeActivation::kSilu; }), after([](Tensors& t) {
         Vector& y = t["y"];
         for (double& v : y) v *= std::abs(v) == std::abs(y).max() ? 1 + 3e-7 : 1;
       })},
      {"NaN swallowed", "where the reference is nan",
       drawing(small(), "x", [](std::size_t i, double v) { return i == 5 ? NAN : v; }),
       after([](Tensors& t) {
         t["y"] = t["y"].apply([](double v) { return std::isnan(v) ? 0 : v; });
       })},
      {"dx added to what was there", "backward dx", accumulating(small())},
      {"the definition itself has a wrong gradient", "gradients of the reference: dtheta",
       sound(std::move(wrong_definition))},
  };
}

void write_float(const TensorView& v, std::int64_t element, float value) {
  static_cast<float*>(v.data)[element] = value;
}
void move_last_bit(const TensorView& v) {
  edit(v, [](std::size_t i, double x) { return i == 2 ? x * (1 + 0x1p-23) : x; });
}

Workspace scratch(Context& context, std::size_t bytes = 256) {
  return Workspace(context, "op", kCPU, bytes);
}
// Does this after its work, and says that it takes so much scratch.
Case scratching(Run f, std::size_t call = kForward, std::size_t said = 256) {
  Case c = then(small(), call, std::move(f));
  c.calls[call].workspace = [said](Views, Views) { return said; };
  return c;
}
// Does this where it gets no scratch.
Case out_of_memory(void (*f)(Views in)) {
  return scratching([f](Views in, Views, Context& context) {
    try {
      const Workspace w = scratch(context);
    } catch (const DeviceError&) {
      f(in);
    }
  });
}

std::vector<Planted> wrong_manners() {
  const auto calls = std::make_shared<std::atomic<int>>(0);
  return {
      {"writes one element past the end", "canary",
       then(small(), kForward,
            [](Views, Views out, Context&) {
              std::int64_t last = 0;
              for (std::size_t d = 0; d < 4; ++d) {
                if (out[0].stride[d] > 0) last += (out[0].shape[d] - 1) * out[0].stride[d];
              }
              for (int i = 1; i <= 900; i += 31) write_float(out[0], last + i, 1.0f);
            })},
      {"writes the padding between rows", "gap",
       then(small(), kForward,
            [](Views, Views out, Context&) {
              if (out[0].stride[2] > out[0].shape[3]) write_float(out[0], out[0].shape[3], 0.0f);
            })},
      {"changes an input", "input x",
       then(small(), kForward, [](Views in, Views, Context&) { write_float(in[0], 0, 3.0f); })},
      {"other bits from call to call", "repeated with threads",
       then(small(), kForward,
            [calls](Views, Views out, Context&) {
              if ((*calls)++ % 3 == 2) move_last_bit(out[0]);
            })},
      {"other bits for another thread count", "repeated with threads 4",
       then(small(), kBackward,
            [](Views, Views out, Context& context) {
              if (context.threads == 4) move_last_bit(out[1]);
            })},
      {"takes every last stride for 1", "layout expanded or reversed",
       misreading(small(), kForward, [](auto& in) { in[0].stride[3] = 1; })},
      {"aligned loads on unaligned memory", "layout odd offset",
       then(small(), kForward,
            [](Views in, Views out, Context&) {
              if (reinterpret_cast<std::uintptr_t>(in[0].data) % 16 != 0) move_last_bit(out[0]);
            })},
      {"writes dx with the strides of x", "layouts that differ", misplacing()},
      {"workspace query a byte too small", "the query says",
       scratching([](Views, Views, Context& context) { const Workspace w = scratch(context); },
                  kForward, 255)},
      {"writes past the end of its workspace", "beyond its end",
       scratching([](Views, Views, Context& context) {
         const Workspace w = scratch(context);
         w.data()[256] = std::byte{0};
       })},
      {"with four threads, writes past the end of its workspace",
       "threads 4: workspace was written beyond its end",
       scratching([](Views, Views, Context& context) {
         const Workspace w = scratch(context);
         if (context.threads >= 4) w.data()[256] = std::byte{0};
       })},
      {"in one layout only, writes past the end of its workspace",
       "layout transposed: workspace was written beyond its end",
       scratching([](Views, Views out, Context& context) {
         const Workspace w = scratch(context);
         if (out[0].stride[1] < out[0].stride[2]) w.data()[256] = std::byte{0};
       })},
      {"with eight threads, takes more workspace than the query says", "threads 8: the query says",
       scratching(
           [](Views, Views, Context& context) {
             const Workspace w = scratch(context, context.threads >= 8 ? 512 : 256);
           },
           kBackward)},
      {"reads workspace it has not written", "forward y",
       scratching([](Views, Views out, Context& context) {
         const Workspace w = scratch(context);
         const auto garbage = static_cast<double>(reinterpret_cast<const float*>(w.data())[5]);
         edit(out[0], [&](std::size_t i, double v) { return i == 3 ? v + garbage : v; });
       })},
      {"leaks its workspace", "not freed",
       then(
           small(), kForward,
           [](Views, Views, Context& context) { context.allocator->allocate(64, kCPU, nullptr); })},
      {"with four threads, leaks its workspace", "threads 4: workspace was not freed",
       then(small(), kBackward,
            [](Views, Views, Context& context) {
              if (context.threads >= 4) context.allocator->allocate(64, kCPU, nullptr);
            })},
      {"with workspace a byte short, writes before it throws", "one byte short",
       out_of_memory([](Views in) {
         write_float(in[0], 0, 3.0f);
         throw;
       })},
      {"ignores a failed allocation", "must throw DeviceError", out_of_memory([](Views) {})},
      {"throws std::bad_alloc for a failed allocation", "must throw DeviceError",
       out_of_memory([](Views) { throw std::bad_alloc(); })},
  };
}

TEST(PlantedBugs, EveryOneIsKilled) {
  expect_all_killed(wrong_numbers());
  expect_all_killed(wrong_manners());
}

TEST(PlantedBugs, WithoutABugNothingIsReported) {
  expect_sound(small());
  for (const Form form :
       {Form::kCosineQk, Form::kRotateHalves, Form::kRotateInterleaved, Form::kRotateQkHalves}) {
    P p{.form = form, .B = 2, .H = 4, .Hk = 2, .D = 8, .E = 8, .shape = {5}, .seed = 4};
    expect_sound(of(p));
    p.one_row = true;
    expect_sound(of(p));
    if (!is_rotate(form)) continue;
    p.E = 3;
    expect_sound(of(p));
  }
}

}  // namespace
}  // namespace annulus::testing
