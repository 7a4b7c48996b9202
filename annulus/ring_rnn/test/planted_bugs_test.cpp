// The test of the tests, with the ring RNN: its equations written down once more, right but for one
// planted bug at a time. The runner must report every one, by the check named.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/dtype.h"
#include "annulus/ring_rnn/test/cases.h"
#include "testing/planted_bugs.h"

namespace annulus::testing {
namespace {

enum class Bug {
  kNone,
  kGeluSlope,        // phi with 1 / sqrt(pi): the original's
  kReluSlopeAtZero,  // 1
  kTMajorOutput,     // (T, B, N) written where (B, T, N) is read: the original's
  kLastTileDropped,  // columns of W beyond the last whole sixteen
  kStateUpdatedInPlace,
  kStateRoundedToBf16,  // between steps
  kResetAfterStep,
  kResetToZero,
  kMaskIgnored,
  kMaskIgnoredBackward,
  kJ0FoldedIntoWo,  // and then scaled by J1
  kDriveAfterActivation,
  kZeroSkipByFirstSample,
  kFirstAlphaForAll,
  kHnBeforeLastStep,
  kLinspaceAngles,       // the end of the circle included: the original's
  kAngleFromZero,        // [0, 2 pi)
  kAlphaMissingInSlope,  // g = F'(y) l
  kLeakMissingBackward,
  kDaMissesLastNeuron,
  kDaOfStateAfterStep,
  kDwaTransposed,
  kDwaUnscaled,
  kDwoUnscaled,
  kDj0OfLastSample,
  kDj1WithTransposedWo,
  kDalphaOfState,  // l F(y), without - s
  kDr0MissesResets,
  kGradientCrossesReset,
  kDhnIgnored,
  kStaleCheckpoint,  // every stretch begins with the state of the one before
};

// Like the header's equations, dense, in double.
class Network {
 public:
  Network(const RingRnnProblem& problem, Bug planted, const Call& call, Views in)
      : p(problem), bug(planted) {
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (!call.inputs[i].derived) v[call.inputs[i].name] = load_values<double>(in[i]);
    }
    B = size(p.B), T = size(p.T), K = size(p.K), N = size(p.N);
    alpha = v.count("alpha") ? v["alpha"] : std::vector<double>{p.alpha};
    if (alpha.size() != N || bug == Bug::kFirstAlphaForAll) alpha.assign(N, alpha.at(0));
    J0 = v.count("J0") ? v["J0"][0] : p.J0;
    J1 = v.count("J1") ? v["J1"][0] : p.J1;
  }

  struct Sample {
    std::vector<std::vector<double>> s, y, r;
  };

  bool masked(std::size_t b, std::size_t t) const { return p.mask && v.at("mask")[b * T + t] == 0; }
  bool is_reset(std::size_t b, std::size_t t) const {
    return p.reset && v.at("reset")[b * T + t] != 0;
  }
  std::vector<double> row(const char* name, std::size_t b) const {
    const auto first = v.at(name).begin() + static_cast<std::ptrdiff_t>(b * N);
    return {first, first + static_cast<std::ptrdiff_t>(N)};
  }
  double weight(std::size_t k, std::size_t i, std::size_t j) const {
    return k == 0 ? v.at("Wo")[i * N + j] : v.at("Wa")[((k - 1) * N + i) * N + j];
  }
  double channel(std::size_t b, std::size_t t, std::size_t k) const {
    if (k == 0) return J1;
    const auto& A = v.at("A");
    if (bug == Bug::kZeroSkipByFirstSample && A[t * K + k - 1] == 0) return 0;
    return A[(b * T + t) * K + k - 1];
  }
  double F(double y) const {
    switch (p.activation) {
      case RingRnnActivation::kRelu:
        return std::max(y, 0.0);
      case RingRnnActivation::kGelu:
        return 0.5 * y * std::erfc(-y / std::numbers::sqrt2);
      case RingRnnActivation::kTanh:
        return std::tanh(y);
      case RingRnnActivation::kSilu:
        return y / (1 + std::exp(-y));
    }
    return y;
  }
  double slope(double y) const {
    switch (p.activation) {
      case RingRnnActivation::kRelu:
        return y > 0 || (y == 0 && bug == Bug::kReluSlopeAtZero) ? 1 : 0;
      case RingRnnActivation::kGelu: {
        const double norm = bug == Bug::kGeluSlope ? std::numbers::pi : 2 * std::numbers::pi;
        return 0.5 * std::erfc(-y / std::numbers::sqrt2) +
               y * std::exp(-0.5 * y * y) / std::sqrt(norm);
      }
      case RingRnnActivation::kTanh:
        return 1 - std::tanh(y) * std::tanh(y);
      case RingRnnActivation::kSilu: {
        const double s = 1 / (1 + std::exp(-y));
        return s * (1 + y * (1 - s));
      }
    }
    return 1;
  }

  Sample run(std::size_t b) const {
    Sample m;
    std::vector<double> r = row("r0", b);
    const auto reset = [&] {
      r = row(p.reset_state ? "reset_state" : "r0", b);
      if (bug == Bug::kResetToZero) r.assign(N, 0.0);
    };
    for (std::size_t t = 0; t < T; ++t) {
      if (is_reset(b, t) && bug != Bug::kResetAfterStep) reset();
      m.s.push_back(r);
      double sum = 0;
      for (const double x : r) sum += x;
      const std::size_t columns = bug == Bug::kLastTileDropped ? N / 16 * 16 : N;
      std::vector<double> y(N);
      for (std::size_t i = 0; i < N; ++i) {
        y[i] = bug == Bug::kJ0FoldedIntoWo ? J1 * J0 * sum : J0 * sum;
        for (std::size_t k = 0; k <= K; ++k) {
          for (std::size_t j = 0; j < columns; ++j)
            y[i] += channel(b, t, k) * weight(k, i, j) * r[j];
        }
        const double drive = p.drive ? v.at("drive")[(b * T + t) * N + i] : 0;
        const bool late = bug == Bug::kDriveAfterActivation;
        y[i] += late ? 0 : drive;
        if (masked(b, t) && bug != Bug::kMaskIgnored) continue;
        const double next =
            (1 - alpha[i]) * m.s.back()[i] + alpha[i] * (F(y[i]) + (late ? drive : 0));
        (bug == Bug::kStateUpdatedInPlace ? r[i] : y_next(t, i)) = next;
      }
      if (bug != Bug::kStateUpdatedInPlace && !(masked(b, t) && bug != Bug::kMaskIgnored)) {
        r = scratch_;
      }
      if (is_reset(b, t) && bug == Bug::kResetAfterStep) reset();
      if (bug == Bug::kStateRoundedToBf16) {
        for (double& x : r)
          x = static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(x))));
      }
      m.y.push_back(std::move(y));
      m.r.push_back(r);
    }
    return m;
  }

  void forward(const Call& call, Views to) const {
    std::map<std::string, std::vector<double>> o;
    for (const TensorSpec& s : call.outputs) o[s.name] = {};
    std::vector<double> out(B * T * N), saved(B * T * N);
    for (std::size_t b = 0; b < B; ++b) {
      const Sample m = run(b);
      for (std::size_t t = 0; t < T; ++t) {
        const std::size_t at = bug == Bug::kTMajorOutput ? t * B + b : b * T + t;
        std::copy(m.r[t].begin(), m.r[t].end(), out.begin() + static_cast<std::ptrdiff_t>(at * N));
        double X = 0, Y = 0;
        for (std::size_t i = 0; i < N; ++i) {
          const auto turns = static_cast<double>(bug == Bug::kLinspaceAngles ? N - 1 : N);
          const double place = 2 * std::numbers::pi * static_cast<double>(i) / turns;
          X += m.r[t][i] * std::cos(place);
          Y += m.r[t][i] * std::sin(place);
        }
        double angle = std::atan2(Y, X);
        if (bug == Bug::kAngleFromZero && angle < 0) angle += 2 * std::numbers::pi;
        o["angle"].push_back(angle);
        o["amplitude"].push_back(std::hypot(X, Y));
      }
      const std::vector<double>& last = bug == Bug::kHnBeforeLastStep ? m.s.back() : m.r.back();
      o["h_n"].insert(o["h_n"].end(), last.begin(), last.end());
    }
    o["out"] = out;
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      std::vector<double>& values = o[call.outputs[i].name];
      values.resize(static_cast<std::size_t>(to[i].numel()));  // saved: zeros will do here
      store_values(to[i], values);
    }
  }

  void backward(const Call& call, Views to) const {
    std::vector<double> dA(B * T * K), dWa(K * N * N), dWo(N * N), dr0(B * N), dJ0(1), dJ1(1),
        dalpha(N), ddrive(B * T * N), dreset(B * N);
    for (std::size_t b = 0; b < B; ++b) {
      Sample m = run(b);
      if (bug == Bug::kStaleCheckpoint) spoil_checkpoints(m, b);
      std::vector<double> l =
          p.dh_n && bug != Bug::kDhnIgnored ? row("dh_n", b) : std::vector<double>(N, 0.0);
      for (std::size_t t = T; t-- > 0;) {
        const std::vector<double>&s = m.s[t], &y = m.y[t];
        for (std::size_t i = 0; p.dout && i < N; ++i) l[i] += v.at("dout")[(b * T + t) * N + i];
        if (!masked(b, t) || bug == Bug::kMaskIgnoredBackward) {
          std::vector<double> g(N), ds(N);
          double sum_g = 0, sum_s = 0;
          for (std::size_t i = 0; i < N; ++i) {
            g[i] = (bug == Bug::kAlphaMissingInSlope ? 1 : alpha[i]) * slope(y[i]) * l[i];
            sum_g += g[i];
            sum_s += s[i];
            ddrive[(b * T + t) * N + i] = g[i];
            dalpha[i] += l[i] * (F(y[i]) - (bug == Bug::kDalphaOfState ? 0 : s[i]));
          }
          if (bug == Bug::kDj0OfLastSample && b + 1 == B) dJ0[0] = 0;
          dJ0[0] += sum_g * sum_s;
          for (std::size_t j = 0; j < N; ++j) {
            ds[j] = (bug == Bug::kLeakMissingBackward ? 0 : 1 - alpha[j]) * l[j] + J0 * sum_g;
            for (std::size_t k = 0; k <= K; ++k) {
              double u = 0, across = 0;
              for (std::size_t i = 0; i < N; ++i) {
                u += weight(k, i, j) * g[i];
                across += weight(k, j, i) * g[i];
              }
              ds[j] += channel(b, t, k) * u;
              const double state = bug == Bug::kDaOfStateAfterStep ? m.r[t][j] : s[j];
              if (k == 0) dJ1[0] += s[j] * (bug == Bug::kDj1WithTransposedWo ? across : u);
              if (k > 0 && !(bug == Bug::kDaMissesLastNeuron && j + 1 == N)) {
                dA[(b * T + t) * K + k - 1] += state * u;
              }
              for (std::size_t i = 0; i < N; ++i) {
                const bool bare = bug == (k == 0 ? Bug::kDwoUnscaled : Bug::kDwaUnscaled);
                const double d = (bare ? 1 : channel(b, t, k)) * g[i] * s[j];
                const bool turned = bug == Bug::kDwaTransposed && k > 0;
                (k == 0 ? dWo[i * N + j]
                        : dWa[((k - 1) * N + (turned ? j : i)) * N + (turned ? i : j)]) += d;
              }
            }
          }
          l = ds;
        }
        if (is_reset(b, t)) {
          for (std::size_t i = 0; i < N; ++i) {
            const bool own = p.reset_state || bug == Bug::kDr0MissesResets;
            (own ? dreset : dr0)[b * N + i] += l[i];
            if (bug != Bug::kGradientCrossesReset) l[i] = 0;
          }
        }
      }
      for (std::size_t i = 0; i < N; ++i) dr0[b * N + i] += l[i];
    }
    if (p.alpha_form != RingRnnProblem::Parameter::kPerNeuron) {
      double sum = 0;
      for (const double d : dalpha) sum += d;
      dalpha = {sum};
    }
    const std::map<std::string, const std::vector<double>*> all = {
        {"dA", &dA},         {"dWa", &dWa},       {"dWo", &dWo},
        {"dr0", &dr0},       {"dJ0", &dJ0},       {"dJ1", &dJ1},
        {"dalpha", &dalpha}, {"ddrive", &ddrive}, {"dreset_state", &dreset}};
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      store_values(to[i], *all.at(call.outputs[i].name));
    }
  }

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  double& y_next(std::size_t, std::size_t i) const {
    scratch_.resize(N);
    return scratch_[i];
  }
  void spoil_checkpoints(Sample& m, std::size_t b) const {
    const std::size_t every = size(p.checkpoint);
    for (std::size_t t = every; t < T; ++t) {
      if (!is_reset(b, t)) m.s[t] = m.s[t - every];
    }
  }

  const RingRnnProblem& p;
  Bug bug;
  std::map<std::string, std::vector<double>> v;
  std::size_t B = 0, T = 0, K = 0, N = 0;
  double J0 = 0, J1 = 0;
  std::vector<double> alpha;
  mutable std::vector<double> scratch_;
};

RingRnnProblem small() {
  RingRnnProblem p;
  p.B = 3, p.T = 5, p.K = 2, p.N = 21;
  p.activation = RingRnnActivation::kGelu;
  p.J0 = -0.03, p.J1 = 0.7, p.alpha = 0.4;
  p.alpha_form = RingRnnProblem::Parameter::kPerNeuron;
  p.drive = p.reset = p.mask = p.h_n = p.dh_n = p.readout = true;
  p.gain = 0.6;
  p.gradients = kRingAllGradients;
  p.seed = 6;
  return p;
}

Case with_bug(const RingRnnProblem& p, Bug bug) {
  Case c = made_sound(ring_rnn_case(p));
  c.calls[kForward].run = [p, bug, call = c.calls[kForward]](Views in, Views out, Context&) {
    Network(p, bug, call, in).forward(call, out);
  };
  c.calls[kBackward].run = [p, bug, call = c.calls[kBackward]](Views in, Views out, Context&) {
    Network(p, bug, call, in).backward(call, out);
  };
  return c;
}

Planted plant(
    const char* bug, const char* killed_by, Bug which,
    const std::function<void(RingRnnProblem&)>& change = [](RingRnnProblem&) {}) {
  return {bug, killed_by, [=] {
            RingRnnProblem p = small();
            change(p);
            return with_bug(p, which);
          }};
}

std::vector<Planted> wrong_equations() {
  using P = RingRnnProblem;
  return {
      plant("gelu' with 1 / sqrt(pi)", "backward dr0", Bug::kGeluSlope),
      plant("output in (T, B, N)", "forward out", Bug::kTMajorOutput),
      plant("last tile of neurons dropped", "forward out", Bug::kLastTileDropped),
      plant("state updated while it is read", "forward out", Bug::kStateUpdatedInPlace),
      plant("state rounded to bf16 between steps", "forward h_n", Bug::kStateRoundedToBf16,
            [](P& p) { p.dtype = DType::kBF16, p.precision = Precision::kFp32; }),
      plant("reset after the step", "forward out", Bug::kResetAfterStep),
      plant("reset to zero", "forward out", Bug::kResetToZero),
      plant("mask ignored", "forward out", Bug::kMaskIgnored),
      plant("mask ignored in the backward", "backward ddrive", Bug::kMaskIgnoredBackward),
      plant("J0 folded into Wo, so scaled by J1", "forward out", Bug::kJ0FoldedIntoWo),
      plant("drive added after the activation", "forward out", Bug::kDriveAfterActivation),
      plant("a channel skipped because the first sample's action is zero", "forward out",
            Bug::kZeroSkipByFirstSample, [](P& p) { p.actions = P::Actions::kSparse; }),
      plant("the first alpha for every neuron", "forward out", Bug::kFirstAlphaForAll),
      plant("h_n is the state before the last step", "forward h_n", Bug::kHnBeforeLastStep),
      plant("preferred angles of linspace", "forward angle", Bug::kLinspaceAngles),
      plant("alpha missing in g", "backward ddrive", Bug::kAlphaMissingInSlope),
      plant("leak missing in the backward", "backward dr0", Bug::kLeakMissingBackward),
      plant("dA without its last neuron", "backward dA", Bug::kDaMissesLastNeuron),
      plant("dA of the state after the step", "backward dA", Bug::kDaOfStateAfterStep),
      plant("dWa transposed", "backward dWa", Bug::kDwaTransposed),
      plant("dWa without the action", "backward dWa", Bug::kDwaUnscaled),
      plant("dWo without J1", "backward dWo", Bug::kDwoUnscaled),
      plant("dJ0 of the last sample only", "backward dJ0", Bug::kDj0OfLastSample),
      plant("dJ1 with Wo transposed", "backward dJ1", Bug::kDj1WithTransposedWo),
      plant("dalpha without the state", "backward dalpha", Bug::kDalphaOfState),
      plant("dr0 without what flows back through resets", "backward dr0", Bug::kDr0MissesResets),
      plant("gradient carried on across a reset", "backward dr0", Bug::kGradientCrossesReset),
      plant("dh_n ignored", "backward dr0", Bug::kDhnIgnored),
      plant("checkpoint of the stretch before", "backward dWo", Bug::kStaleCheckpoint,
            [](P& p) { p.checkpoint = 2; }),
      {"relu' is 1 at exactly 0", "backward ddrive",
       [] {
         P p = small();
         p.activation = RingRnnActivation::kRelu;
         Case c = with_bug(p, Bug::kReluSlopeAtZero);
         c.refine = nullptr;
         c.draw = [usual = c.draw](Rng& rng, const TensorSpec& spec, std::span<double> v) {
           usual(rng, spec, v);
           for (double& x : v) x = spec.name == "r0" || spec.name == "drive" ? 0 : x;
         };
         return c;
       }},
      {"an angle from 0 to 2 pi", "outside of [-pi, pi]",
       [] {
         P p = small();
         p.drive = false;
         Case c = with_bug(p, Bug::kAngleFromZero);
         c.draw = [usual = c.draw](Rng& rng, const TensorSpec& spec, std::span<double> v) {
           usual(rng, spec, v);  // a bump at three quarters of the circle
           for (std::size_t i = 0; spec.name == "r0" && i < v.size(); ++i)
             v[i] = i % 21 == 16 ? 3 : 0;
         };
         return c;
       }},
  };
}

// Runs the naive program of another precision, or of other inputs, in the place of ours.
Case with_precision(Precision asked, Precision used, DType dtype = DType::kF32) {
  RingRnnProblem p = small();
  p.precision = asked;
  p.dtype = dtype;
  RingRnnProblem q = p;
  q.precision = used;
  Case c = made_sound(ring_rnn_case(p));
  for (std::size_t i = 0; i < c.calls.size(); ++i) {
    c.calls[i].run = [call = ring_rnn_case(q).calls[i]](Views in, Views out, Context&) {
      std::vector<std::vector<std::uint64_t>> storage;  // dense copies
      const auto dense = [&](const TensorView& v, bool read) {
        storage.emplace_back(static_cast<std::size_t>(v.numel()) + 1);
        TensorView d = contiguous(storage.back().data(), v.dtype, v.sizes());
        if (read) store_values(d, load_values<double>(v));
        return d;
      };
      std::vector<TensorView> from, to;
      for (std::size_t n = 0; n < in.size(); ++n)
        from.push_back(dense(in[n], !call.inputs[n].derived));
      for (const TensorView& v : out) to.push_back(dense(v, false));
      call.baseline(from, to);
      for (std::size_t n = 0; n < out.size(); ++n) store_values(out[n], load_values<double>(to[n]));
    };
  }
  return c;
}

std::vector<Planted> wrong_precisions() {
  return {
      {"bf16 where fp32 was asked for", "forward out",
       [] { return with_precision(Precision::kFp32, Precision::kBf16); }},
      {"bf16 where bf16x3 was asked for", "backward dWa",
       [] { return with_precision(Precision::kBf16x3, Precision::kBf16); }},
      {"bf16x3 where fp32 was asked for", "ratio to baseline",
       [] { return with_precision(Precision::kFp32, Precision::kBf16x3); }},
      {"bf16x3 where bf16x6 was asked for", "backward dWa",
       [] { return with_precision(Precision::kBf16x6, Precision::kBf16x3); }},
      {"bf16 for f16 tensors", "ratio to baseline",
       [] { return with_precision(Precision::kAuto, Precision::kBf16, DType::kF16); }},
  };
}

TEST(PlantedRingRnnBugs, EveryOneIsKilled) {
  std::vector<Planted> all = wrong_equations();
  for (Planted& p : wrong_precisions()) all.push_back(std::move(p));
  EXPECT_GE(all.size(), 30u);
  expect_all_killed(all);
}

TEST(PlantedRingRnnBugs, WithoutABugNothingIsReported) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto f : {RingRnnActivation::kRelu, RingRnnActivation::kGelu,
                         RingRnnActivation::kTanh, RingRnnActivation::kSilu}) {
      RingRnnProblem p = small();
      p.dtype = dtype;
      p.activation = f;
      expect_sound(with_bug(p, Bug::kNone));
      p.reset_state = true;
      p.checkpoint = 2;
      p.alpha_form = RingRnnProblem::Parameter::kTensor;
      p.actions = RingRnnProblem::Actions::kSparse;
      expect_sound(with_bug(p, Bug::kNone));
    }
  }
  expect_sound(with_precision(Precision::kBf16x3, Precision::kBf16x3));
  expect_sound(with_precision(Precision::kBf16, Precision::kBf16));
  expect_sound(with_precision(Precision::kBf16x3, Precision::kFp32));
  expect_sound(with_precision(Precision::kAuto, Precision::kFp32, DType::kF16));
}

}  // namespace
}  // namespace annulus::testing
