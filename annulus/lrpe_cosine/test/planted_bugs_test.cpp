// The test of the tests, with LRPE-cosine: more than thirty bugs, most of them real ones from this family of
// operators. The runner must report every one, by the check named.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/core/scratch.h"
#include "annulus/lrpe_cosine/test/cases.h"
#include "testing/planted_bugs.h"
#include "testing/tensors.h"

namespace annulus::testing {
namespace {

using Form = LrpeProblem::Form;
// A case without a fault.
Case sound(const LrpeProblem& p) { return made_sound(lrpe_case(p)); }

const LrpeProblem kSmall{.B = 2, .H = 3, .D = 8, .E = 8, .shape = {9}, .prefix = 1, .seed = 4};

Case then(const LrpeProblem& p, std::size_t call, Run f) {
  return spoilt_after(sound(p), call, std::move(f));
}

// Computes another problem on the same tensors: an operator that misreads its options.
Case computing(const LrpeProblem& p, std::size_t call, const LrpeProblem& wrong) {
  Case c = sound(p);
  c.calls[call].run = perfect_run(lrpe_case(wrong).calls[call]);
  return c;
}

LrpeProblem with(LrpeProblem p, const std::function<void(LrpeProblem&)>& change) {
  change(p);
  return p;
}

std::vector<Planted> wrong_numbers() {
  return {
      {"head and token strides swapped", "forward y",
       [] {
         return misreading(sound({.B = 2, .H = 5, .D = 4, .E = 4, .shape = {5}, .seed = 4}),
                           kForward, [](auto& in) { std::swap(in[0].stride[1], in[0].stride[2]); });
       }},
      {"last tile dropped", "never written",
       [] {
         Case c = sound(kSmall);
         const Call call = c.calls[kForward];
         c.calls[kForward].run = [call](Views in, Views out, Context& context) {
           const std::vector<double> poison = load_values<double>(out[0]);
           call.run(in, out, context);
           TensorView last = out[0];  // the last token again as it was
           last.data = static_cast<float*>(last.data) + (last.shape[2] - 1) * last.stride[2];
           last.shape[2] = 1;
           TensorView bits = last;
           bits.dtype = DType::kI32;
           store_values(bits, std::vector<double>(static_cast<std::size_t>(last.numel()),
                                                  static_cast<double>(poison_bits(DType::kF32))));
         };
         return c;
       }},
      {"prefix off by one", "forward y",
       [] {
         return computing(kSmall, kForward,
                          with(kSmall, [](auto& p) { p.prefix = 2, p.shape = {8}; }));
       }},
      {"axis 3 never encoded", "forward y",
       [] {
         const LrpeProblem p{.B = 1, .H = 2, .D = 12, .E = 4, .shape = {2, 2, 3}, .seed = 4};
         return then(p, kForward, [](Views in, Views out, Context&) {
           const std::vector<double> x = load_values<double>(in[0]);
           edit(out[0], [&](std::size_t i, double v) {
             const std::size_t row = i / 24, c = i % 24;
             if (c >= 8 && c < 12) return x[row * 12 + c];
             return c >= 20 ? 0.0 : v;
           });
         });
       }},
      {"axes unravelled in the reverse order", "forward y",
       [] {
         const LrpeProblem p{.B = 1, .H = 1, .D = 8, .E = 4, .shape = {3, 5}, .seed = 4};
         return computing(p, kForward, with(p, [](auto& q) { q.shape = {5, 3}; }));
       }},
      {"relu' is 1 at exactly 0", "backward dx",
       [] {
         const LrpeProblem p = with(kSmall, [](auto& q) {
           q.activation = LrpeActivation::kRelu;
           q.need_dtheta = false;
         });
         Case c = sound(p);
         c.draw = [usual = c.draw](Rng& rng, const TensorSpec& spec, std::span<double> v) {
           usual(rng, spec, v);
           if (spec.name == "x") v[7] = 0;
         };
         return mistaking(std::move(c), kBackward, 1, [](double v) { return v == 0 ? 1 : v; });
       }},
      {"theta gets no gradient", "backward dtheta",
       [] {
         return then(kSmall, kBackward, [](Views, Views out, Context&) {
           edit(out[1], [](std::size_t, double) { return 0.0; });
         });
       }},
      {"dtheta forgets the second block of columns", "backward dtheta",
       [] {
         const LrpeProblem p{.B = 1, .H = 2, .D = 8, .E = 5, .shape = {3, 4}, .seed = 4};
         return then(p, kBackward, [](Views, Views out, Context&) {
           edit(out[1], [](std::size_t i, double v) { return i % 5 < 3 ? v * 0.5 : v; });
         });
       }},
      {"fp32 product of position and theta", "relative rms",
       [] {
         const LrpeProblem p = with(kSmall, [](auto& q) { q.offset = 1 << 20; });
         Case c = sound(p);
         c.calls[kForward].run = [naive = c.calls[kForward].baseline](Views in, Views out,
                                                                      Context&) { naive(in, out); };
         return c;
       }},
      {"positions kept in 32 bits", "forward y",
       [] {
         return computing(with(kSmall, [](auto& p) { p.offset = 1ll << 31; }), kForward,
                          with(kSmall, [](auto& p) { p.offset = -(1ll << 31); }));
       }},
      {"the first entry of offsets is used for every batch", "forward y",
       [] {
         return misreading(sound(with(kSmall, [](auto& p) { p.offset_per_batch = true; })),
                           kForward, [](auto& in) { in[2].stride[0] = 0; });
       }},
      {"the first row of position_ids is used for every batch", "forward y",
       [] {
         return misreading(sound(with(kSmall,
                                      [](auto& p) {
                                        p.prefix = 0;
                                        p.ids = LrpeProblem::Ids::kOwn;
                                      })),
                           kForward, [](auto& in) { in[2].stride[0] = 0; });
       }},
      {"offset ignored in the backward", "backward",
       [] { return computing(with(kSmall, [](auto& p) { p.offset = 5; }), kBackward, kSmall); }},
      {"GQA groups interleaved", "forward yq",
       [] {
         const LrpeProblem p{.form = Form::kCosineQk,
                             .B = 1,
                             .H = 4,
                             .Hk = 2,
                             .D = 4,
                             .E = 4,
                             .shape = {5},
                             .seed = 4};
         Case c = then(p, kForward, [](Views in, Views out, Context&) {
           // Head 1 takes row 1 of theta and head 2 row 0: what `head % rows` would read.
           const std::vector<double> q = load_values<double>(in[0]),
                                     theta = load_values<double>(in[2]);
           edit(out[0], [&](std::size_t i, double v) {
             const std::size_t h = i / 40, t = i / 8 % 5, c = i % 4;
             if (h != 1 && h != 2) return v;
             const double phase = static_cast<double>(t) * theta[h % 2 * 4 + c];
             return q[(h * 5 + t) * 4 + c] * (i % 8 < 4 ? std::cos(phase) : std::sin(phase));
           });
         });
         c.draw = nullptr;  // all normal: the rows of theta differ
         return c;
       }},
      {"interleaved pairs taken for halves", "forward y",
       [] {
         const LrpeProblem p{.form = Form::kRotateInterleaved,
                             .B = 1,
                             .H = 2,
                             .D = 8,
                             .E = 4,
                             .shape = {5},
                             .seed = 4};
         return computing(p, kForward, with(p, [](auto& q) { q.form = Form::kRotateHalves; }));
       }},
      {"softmax over tokens leaves out the prefix", "forward y",
       [] {
         const LrpeProblem p =
             with(kSmall, [](auto& q) { q.activation = LrpeActivation::kSoftmaxTokens; });
         return then(p, kForward, [](Views, Views out, Context&) {
           edit(out[0], [](std::size_t i, double v) { return i / 16 % 10 == 0 ? v : v * 1.08; });
         });
       }},
      {"softmax over the wrong dimension", "forward y",
       [] {
         return computing(
             with(kSmall, [](auto& q) { q.activation = LrpeActivation::kSoftmaxTokens; }), kForward,
             with(kSmall, [](auto& q) { q.activation = LrpeActivation::kSoftmaxFeatures; }));
       }},
      {"theta rounded to bf16", "forward y",
       [] {
         Case c = sound(kSmall);
         return mistaking(std::move(c), kForward, 1, [](double v) {
           return static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(v))));
         });
       }},
      {"one bf16 element two ulps off", "ulps of the exact value",
       [] {
         return then(with(kSmall, [](auto& p) { p.dtype = DType::kBF16; }), kForward,
                     [](Views, Views out, Context&) {
                       edit(out[0],
                            [](std::size_t i, double v) { return i == 33 ? v * (1 + 0x1p-6) : v; });
                     });
       }},
      {"rotate: one f16 element two ulps off", "ulps of the exact value",
       [] {
         const LrpeProblem p = with(kSmall, [](auto& q) {
           q.form = Form::kRotateHalves;
           q.dtype = DType::kF16;
         });
         return then(p, kForward, [](Views, Views out, Context&) {
           edit(out[0], [](std::size_t i, double v) { return i == 33 ? v * (1 + 0x1p-9) : v; });
         });
       }},
      {"silu in f32 right to 3e-7 of the largest", "relative maximum",
       [] {
         const LrpeProblem p = with(kSmall, [](auto& q) { q.activation = LrpeActivation::kSilu; });
         return then(p, kForward, [](Views, Views out, Context&) {
           const std::vector<double> y = load_values<double>(out[0]);
           std::size_t largest = 0;
           for (std::size_t i = 0; i < y.size(); ++i) {
             if (std::abs(y[i]) > std::abs(y[largest])) largest = i;
           }
           edit(out[0], [&](std::size_t i, double v) { return i == largest ? v * (1 + 3e-7) : v; });
         });
       }},
      {"NaN swallowed", "where the reference is nan",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views out, Context&) {
           edit(out[0], [](std::size_t, double v) { return std::isnan(v) ? 0.0 : v; });
         });
         c.draw = [usual = c.draw](Rng& rng, const TensorSpec& spec, std::span<double> v) {
           usual(rng, spec, v);
           if (spec.name == "x") v[5] = NAN;
         };
         return c;
       }},
      {"dx added to what was there", "backward dx",
       [] {
         Case c = sound(kSmall);
         c.calls[kBackward].run = [run = c.calls[kBackward].run](Views in, Views out,
                                                                 Context& context) {
           const std::vector<double> before = load_values<double>(out[0]);
           run(in, out, context);
           edit(out[0], [&](std::size_t i, double v) { return v + before[i]; });
         };
         return c;
       }},
      {"the definition itself has a wrong gradient", "gradients of the reference: dtheta",
       [] {
         Case c = lrpe_case(kSmall);
         c.calls[kBackward].reference = [right = c.calls[kBackward].reference](Views in,
                                                                               Views out) {
           right(in, out);
           edit(out[1], [](std::size_t, double v) { return v * 1.0001; });
         };
         return made_sound(std::move(c));
       }},
  };
}

void write_float(const TensorView& v, std::int64_t element, float value) {
  static_cast<float*>(v.data)[element] = value;
}

std::vector<Planted> wrong_manners() {
  return {
      {"writes one element past the end", "canary",
       [] {
         return then(kSmall, kForward, [](Views, Views out, Context&) {
           std::int64_t last = 0;
           for (std::size_t d = 0; d < 4; ++d) {
             if (out[0].stride[d] > 0) last += (out[0].shape[d] - 1) * out[0].stride[d];
           }
           for (int i = 1; i <= 900; i += 31) write_float(out[0], last + i, 1.0f);
         });
       }},
      {"writes the padding between rows", "gap",
       [] {
         return then(kSmall, kForward, [](Views, Views out, Context&) {
           if (out[0].stride[2] > out[0].shape[3]) write_float(out[0], out[0].shape[3], 0.0f);
         });
       }},
      {"changes an input", "input x",
       [] {
         return then(kSmall, kForward,
                     [](Views in, Views, Context&) { write_float(in[0], 0, 3.0f); });
       }},
      {"other bits from call to call", "repeated with threads",
       [] {
         auto calls = std::make_shared<std::atomic<int>>(0);
         return then(kSmall, kForward, [calls](Views, Views out, Context&) {
           if ((*calls)++ % 3 != 2) return;
           edit(out[0], [](std::size_t i, double v) { return i == 20 ? v * (1 + 0x1p-23) : v; });
         });
       }},
      {"other bits for another thread count", "repeated with threads 4",
       [] {
         return then(kSmall, kBackward, [](Views, Views out, Context& context) {
           if (context.threads != 4) return;
           edit(out[1], [](std::size_t i, double v) { return i == 2 ? v * (1 + 0x1p-22) : v; });
         });
       }},
      {"takes every last stride for 1", "layout expanded or reversed",
       [] { return misreading(sound(kSmall), kForward, [](auto& in) { in[0].stride[3] = 1; }); }},
      {"aligned loads on unaligned memory", "layout odd offset",
       [] {
         return then(kSmall, kForward, [](Views in, Views out, Context&) {
           if (reinterpret_cast<std::uintptr_t>(in[0].data) % 16 == 0) return;
           edit(out[0], [](std::size_t i, double v) { return i == 2 ? v * (1 + 0x1p-23) : v; });
         });
       }},
      {"workspace query a byte too small", "the query says",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views, Context& context) {
           Workspace w(context, "op", kCPU, 256);
         });
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{255}; };
         return c;
       }},
      {"writes past the end of its workspace", "beyond its end",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views, Context& context) {
           Workspace w(context, "op", kCPU, 256);
           w.data()[256] = std::byte{0};
         });
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
      {"with four threads, writes past the end of its workspace",
       "threads 4: workspace was written beyond its end",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views, Context& context) {
           Workspace w(context, "op", kCPU, 256);
           if (context.threads >= 4) w.data()[256] = std::byte{0};
         });
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
      {"with four threads, leaks its workspace", "threads 4: workspace was not freed",
       [] {
         return then(kSmall, kBackward, [](Views, Views, Context& context) {
           if (context.threads >= 4) context.allocator->allocate(64, kCPU, nullptr);
         });
       }},
      {"with eight threads, takes more workspace than the query says", "threads 8: the query says",
       [] {
         Case c = then(kSmall, kBackward, [](Views, Views, Context& context) {
           Workspace w(context, "op", kCPU, context.threads >= 8 ? 512 : 256);
         });
         c.calls[kBackward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
      {"in one layout only, writes past the end of its workspace",
       "layout transposed: workspace was written beyond its end",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views out, Context& context) {
           Workspace w(context, "op", kCPU, 256);
           if (out[0].stride[1] < out[0].stride[2]) w.data()[256] = std::byte{0};
         });
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
      {"writes dx with the strides of x", "layouts that differ",
       [] {
         // Small, so that whatever is written lies within the canaries.
         Case c = sound({.B = 1, .H = 2, .D = 4, .E = 4, .shape = {3}, .seed = 4});
         c.calls[kBackward].run = [run = c.calls[kBackward].run](Views in, Views out,
                                                                 Context& context) {
           std::vector<TensorView> spoilt(out.begin(), out.end());
           spoilt[0].stride = in[1].stride;
           run(in, spoilt, context);
         };
         return c;
       }},
      {"with workspace a byte short, writes before it throws", "one byte short",
       [] {
         Case c = sound(kSmall);
         c.calls[kForward].run = [run = c.calls[kForward].run](Views in, Views out,
                                                               Context& context) {
           try {
             Workspace w(context, "op", kCPU, 256);
           } catch (const DeviceError&) {
             write_float(in[0], 0, 3.0f);
             throw;
           }
           run(in, out, context);
         };
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
      {"reads workspace it has not written", "forward y",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views out, Context& context) {
           Workspace w(context, "op", kCPU, 256);
           const auto* scratch = reinterpret_cast<const float*>(w.data());
           edit(out[0], [&](std::size_t i, double v) {
             return i == 3 ? v + static_cast<double>(scratch[5]) : v;
           });
         });
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
      {"leaks its workspace", "not freed",
       [] {
         return then(kSmall, kForward, [](Views, Views, Context& context) {
           context.allocator->allocate(64, kCPU, nullptr);
         });
       }},
      {"ignores a failed allocation", "must throw DeviceError",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views, Context& context) {
           try {
             Workspace w(context, "op", kCPU, 256);
           } catch (const DeviceError&) {
           }
         });
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
      {"throws std::bad_alloc for a failed allocation", "must throw DeviceError",
       [] {
         Case c = then(kSmall, kForward, [](Views, Views, Context& context) {
           try {
             Workspace w(context, "op", kCPU, 256);
           } catch (const DeviceError&) {
             throw std::bad_alloc();
           }
         });
         c.calls[kForward].workspace = [](Views, Views) { return std::size_t{256}; };
         return c;
       }},
  };
}

TEST(PlantedBugs, EveryOneIsKilled) {
  std::vector<Planted> all = wrong_numbers();
  for (Planted& p : wrong_manners()) all.push_back(std::move(p));
  EXPECT_GE(all.size(), 30u);
  expect_all_killed(all);
}

TEST(PlantedBugs, WithoutABugNothingIsReported) {
  std::vector<LrpeProblem> problems = {kSmall};
  for (const Form form : {Form::kCosineQk, Form::kRotateHalves, Form::kRotateInterleaved}) {
    problems.push_back(
        {.form = form, .B = 2, .H = 4, .Hk = 2, .D = 8, .E = 8, .shape = {5}, .seed = 4});
  }
  for (const LrpeProblem& p : problems) expect_sound(sound(p));
}

}  // namespace
}  // namespace annulus::testing
