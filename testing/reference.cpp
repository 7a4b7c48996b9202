#include "testing/reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "testing/tensors.h"

namespace annulus::testing {

namespace {

std::uint64_t hash_name(std::uint64_t seed, const std::string& name) {
  std::uint64_t h = 0xcbf29ce484222325ull ^ seed;
  for (const char ch : name) h = (h ^ static_cast<unsigned char>(ch)) * 0x100000001b3ull;
  return Rng(h).next();
}

// Dense storage of one tensor in any dtype.
struct Dense {
  Dense(const TensorSpec& spec, DType dtype) : dtype(dtype) {
    const auto n = static_cast<std::size_t>(numel_of(spec));
    bytes.resize(n * static_cast<std::size_t>(size_of(dtype)) + sizeof(double));
    view = contiguous(bytes.data(), dtype, spec.shape);
    count = n;
  }
  void write(const std::vector<double>& values) {
    const auto size = static_cast<std::size_t>(size_of(dtype));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint64_t bits = encode(values[i], dtype);
      std::memcpy(bytes.data() + i * size, &bits, size);
    }
  }
  std::vector<double> read() const {
    const auto size = static_cast<std::size_t>(size_of(dtype));
    std::vector<double> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, bytes.data() + i * size, size);
      values[i] = decode(bits, dtype);
    }
    return values;
  }

  DType dtype;
  std::size_t count = 0;
  std::vector<std::byte> bytes;
  TensorView view;
};

Values run_dense(const Call& call, const Values& inputs, bool as_f64,
                 const std::function<void(Views, Views)>& f) {
  const auto type = [&](const TensorSpec& s) {
    return as_f64 && is_floating(s.dtype) ? DType::kF64 : s.dtype;
  };
  std::vector<Dense> in, out;
  std::vector<TensorView> in_views, out_views;
  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    in.emplace_back(call.inputs[i], type(call.inputs[i])).write(inputs[i]);
  }
  for (const TensorSpec& s : call.outputs) out.emplace_back(s, type(s));
  for (const Dense& d : in) in_views.push_back(d.view);
  for (const Dense& d : out) out_views.push_back(d.view);
  f(in_views, out_views);
  Values result;
  for (const Dense& d : out) result.push_back(d.read());
  return result;
}

}  // namespace

namespace {

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

}  // namespace annulus::testing
