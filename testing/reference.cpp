#include "testing/reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "testing/limits.h"
#include "testing/memory/tensors.h"

namespace annulus::testing {

namespace {

std::uint64_t hash_name(std::uint64_t seed, const std::string& name) {
  std::uint64_t h = 0xcbf29ce484222325ull ^ seed;
  for (const char ch : name) h = (h ^ static_cast<unsigned char>(ch)) * 0x100000001b3ull;
  return Rng(h).next();
}

Values run_dense(const Call& call, const Values& inputs, bool as_f64,
                 const std::function<void(Views, Views)>& f) {
  std::vector<Dense> in, out;
  std::vector<TensorView> in_views, out_views;
  const auto make = [&](const TensorSpec& s, std::vector<Dense>& all, auto& views) -> Dense& {
    const DType t = as_f64 && is_floating(s.dtype) ? DType::kF64 : s.dtype;
    views.push_back(all.emplace_back(kCPU, t, s.shape).view());
    return all.back();
  };
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    make(call.inputs[i], in, in_views).write(inputs[i]);
  }
  for (const TensorSpec& s : call.outputs) {
    make(s, out, out_views).write(std::vector<double>(static_cast<std::size_t>(numel_of(s))));
  }
  f(in_views, out_views);
  Values result;
  for (const Dense& d : out) result.push_back(d.values());
  return result;
}

std::vector<double> draw_tensor(const Case& c, const TensorSpec& spec) {
  // One case in eight repeats the first slice along the batch, so that the stride-0 layout applies.
  // Only a few slices: where many equal terms are added up, every rounding falls the same way, and
  // limits made for sums of unequal terms say nothing.
  constexpr std::int64_t kMostRepeated = 4;
  const bool repeat = Rng(c.seed ^ 0x5eed).below(8) == 0;
  Rng rng(hash_name(c.seed, spec.name));
  std::vector<double> values(static_cast<std::size_t>(numel_of(spec)));
  if (spec.derived) return values;
  if (c.draw) {
    c.draw(rng, spec, values);
  } else if (is_floating(spec.dtype)) {
    for (double& v : values) v = rng.normal();
  }
  if (repeat && !spec.shape.empty() && spec.shape[0] > 1 && spec.shape[0] <= kMostRepeated &&
      !values.empty()) {
    const std::size_t slice = values.size() / static_cast<std::size_t>(spec.shape[0]);
    for (std::size_t i = slice; i < values.size(); ++i) values[i] = values[i % slice];
  }
  round_to(spec.dtype, values);
  return values;
}

Values draw_first(const Case& c) {
  Values inputs;
  for (const TensorSpec& spec : c.calls[0].inputs) inputs.push_back(draw_tensor(c, spec));
  if (c.refine) c.refine(inputs);
  return inputs;
}

// The inputs of a call, those of the first call as they are there.
Values draw_further(const Case& c, const Call& call, const Values& first) {
  Values inputs;
  const std::vector<TensorSpec>& specs = c.calls[0].inputs;
  for (const TensorSpec& spec : call.inputs) {
    const auto same = std::find_if(specs.begin(), specs.end(),
                                   [&](const TensorSpec& s) { return s.name == spec.name; });
    inputs.push_back(same == specs.end() ? draw_tensor(c, spec)
                                         : first[static_cast<std::size_t>(same - specs.begin())]);
  }
  return inputs;
}

}  // namespace

Values draw_inputs(const Case& c, const Call& call) { return draw_further(c, call, draw_first(c)); }

std::vector<Values> draw_inputs(const Case& c) {
  std::vector<Values> all = {draw_first(c)};
  for (std::size_t i = 1; i < c.calls.size(); ++i) {
    all.push_back(draw_further(c, c.calls[i], all[0]));
  }
  return all;
}

Values run_reference(const Call& call, const Values& inputs) {
  return run_dense(call, inputs, true, call.reference);
}

Values run_baseline(const Call& call, const Values& inputs) {
  return run_dense(call, inputs, false, call.baseline);
}

// --- gradients against finite differences --------------------------------------------------------

namespace {

constexpr std::size_t kMaxElements = 4096;
constexpr double kKink = 1e-6;

bool suitable(const Values& tensors) {
  std::size_t elements = 0;
  for (const auto& t : tensors) {
    elements += t.size();
    // Beside a value of 1e20 the difference a step makes elsewhere in a sum is rounded away.
    if (!std::all_of(t.begin(), t.end(), [](double v) { return std::abs(v) < 1e10; })) return false;
  }
  return elements <= kMaxElements;
}

// The incoming gradient of each forward output, the backward input called "d" + its name; nullptr
// where none belongs to it.
std::vector<const std::vector<double>*> weights_of(const Call& forward, const Call& backward,
                                                   const Values& backward_in) {
  std::vector<const std::vector<double>*> weights;
  for (const TensorSpec& out : forward.outputs) {
    if (out.opaque || out.unpaired) weights.push_back(nullptr);
    for (std::size_t i = 0; i < backward.inputs.size(); ++i) {
      if (backward.inputs[i].name == "d" + out.name) weights.push_back(&backward_in[i]);
    }
  }
  return weights;
}

// Says which gradient is wrong, or nothing.
std::string compare_gradients(const Case& c, const Call& backward, const Values& forward_in,
                              const Values& backward_in) {
  const Call& forward = c.calls[0];
  const auto weights = weights_of(forward, backward, backward_in);
  if (weights.size() != forward.outputs.size()) return "an output has no incoming gradient";
  const Values gradients = run_reference(backward, backward_in);

  // f(+) - f(-), summed as products with the weights of differences, so that equal parts cancel
  // exactly.
  const auto moved_by = [&](const Values& plus, const Values& minus) {
    const Values a = run_reference(forward, plus);
    const Values b = run_reference(forward, minus);
    double sum = 0;
    for (std::size_t o = 0; o < a.size(); ++o) {
      if (weights[o] == nullptr) continue;
      for (std::size_t i = 0; i < a[o].size(); ++i) {
        sum += (*weights[o])[i] * difference(a[o][i], b[o][i], forward.outputs[o].circular);
      }
    }
    return sum;
  };

  for (std::size_t o = 0; o < backward.outputs.size(); ++o) {
    const std::string& gradient_name = backward.outputs[o].name;
    if (backward.outputs[o].unpaired) continue;
    std::size_t input = 0;
    while (input < forward.inputs.size() && "d" + forward.inputs[input].name != gradient_name) {
      ++input;
    }
    if (input == forward.inputs.size()) return gradient_name + " is the gradient of no input";
    const std::vector<double>& x = forward_in[input];
    if (x.empty()) continue;

    // A step suits a phase of any frequency only if it is tried over many sizes; the best one
    // counts. A wrong gradient misses at all of them by far more than the limit. Values next to
    // 0 stay where they are, for relu has no derivative there.
    double best = INFINITY;
    double best_got = 0, best_expected = 0;
    for (const double h : {1e-3, 1e-5, 1e-6, 1e-8, 1e-10, 1e-13}) {
      Rng rng(c.seed + o);
      Values plus = forward_in, minus = forward_in;
      double expected = 0, terms = 0;
      std::size_t tried = 0, moved = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double v = std::abs(x[i]) < kKink ? 0 : rng.normal();
        plus[input][i] = x[i] + h * v;
        minus[input][i] = x[i] - h * v;
        tried += v != 0;
        moved += plus[input][i] != minus[input][i];
        const double term = gradients[o][i] * (plus[input][i] - minus[input][i]);
        expected += term;
        terms += term * term;
      }
      if (tried == 0) best = 0;
      if (tried == 0 || 2 * moved < tried)
        continue;  // a step below the spacing of x proves nothing
      const double got = moved_by(plus, minus);
      // The step itself is the floor: a gradient of exactly zero must give no difference.
      const double scale = std::max(std::sqrt(terms), 1e-9 * h);
      const double error = std::abs(got - expected) / scale;
      if (error < best) best = error, best_got = got / h, best_expected = expected / h;
      if (best <= kPolicy.finite_difference) break;
    }
    if (!(best <= kPolicy.finite_difference)) {
      return gradient_name + ": finite differences give " + format_number(best_got) +
             " along a random direction, the gradient " + format_number(best_expected) +
             " (relative difference " + format_number(best) + ")";
    }
  }
  return {};
}

}  // namespace

GradientCheck check_reference_gradients(const Case& c) {
  const auto backward = std::find_if(c.calls.begin(), c.calls.end(),
                                     [](const Call& call) { return call.name == "backward"; });
  if (backward == c.calls.end()) return {};
  const std::vector<Values> inputs = draw_inputs(c);
  const Values& backward_in = inputs[static_cast<std::size_t>(backward - c.calls.begin())];
  if (!suitable(inputs[0]) || !suitable(backward_in)) return {};
  return {true, compare_gradients(c, *backward, inputs[0], backward_in)};
}

}  // namespace annulus::testing
