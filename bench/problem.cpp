#include "bench/problem.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "bench/statistics.h"
#include "bench/suite.h"
#include "testing/limits.h"
#include "testing/memory/tensors.h"

namespace annulus::bench {
namespace {

using testing::Call;
using testing::Case;
using testing::TensorSpec;

// Values drawn for a large tensor before they repeat. A prime: with a power of two the matrices of a
// stack would be equal, and a sum over them no longer a sum of independent numbers.
constexpr std::int64_t kDrawn = 1'048'573;

// Timing does not depend on the values beyond their distribution, so a large tensor repeats its
// first million: drawing half a billion normal numbers would take longer than measuring with them.
void fill_input(const Case& c, const TensorSpec& spec, std::uint64_t seed, Buffer& buffer) {
  const std::int64_t count = std::min(testing::numel_of(spec), kDrawn);
  if (count == 0) return;
  testing::Rng rng(seed);
  std::vector<double> values(static_cast<std::size_t>(count));
  if (c.draw) {
    c.draw(rng, spec, values);
  } else {
    const bool floating = is_floating(spec.dtype);
    for (double& v : values) v = floating ? rng.normal() : 0;
  }
  const std::vector<std::byte> bytes =
      testing::Dense(kCPU, spec.dtype, {count}).write(values).bytes();
  for (std::size_t done = 0; done < buffer.bytes(); done += bytes.size()) {
    copy_bytes(static_cast<std::byte*>(buffer.data()) + done, buffer.device(), bytes.data(), kCPU,
               std::min(bytes.size(), buffer.bytes() - done));
  }
}

TensorView view_of(const TensorSpec& spec, void* data, Device device) {
  return contiguous(data, spec.dtype, spec.shape, device);
}

double relative_rms(const std::vector<double>& ours, const std::vector<double>& reference) {
  double error = 0, scale = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (std::isinf(reference[i]) && ours[i] == reference[i]) continue;  // lse of no key is -inf
    error += (ours[i] - reference[i]) * (ours[i] - reference[i]);
    scale += reference[i] * reference[i];
  }
  return scale > 0 ? std::sqrt(error / scale) : std::sqrt(error);
}

// Rows along the last axis that are zero from end to end.
std::pair<std::int64_t, std::int64_t> count_zero_rows(const TensorSpec& spec,
                                                      const std::vector<double>& values) {
  const std::int64_t width = spec.shape.empty() ? 1 : spec.shape.back();
  if (width == 0) return {0, 0};
  const auto rows = static_cast<std::int64_t>(values.size()) / width;
  std::int64_t zero = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto first = values.begin() + r * width;
    zero += std::all_of(first, first + width, [](double v) { return v == 0; });
  }
  return {zero, rows};
}

}  // namespace

const Call& find_call(const Case& problem, const std::string& name) {
  for (const Call& call : problem.calls) {
    if (call.name == name) return call;
  }
  throw std::logic_error("case " + problem.op + " has no call \"" + name + "\"");
}

std::size_t bytes_of(const TensorSpec& spec) {
  return static_cast<std::size_t>(testing::numel_of(spec) * size_of(spec.dtype));
}

std::size_t workspace_of(const Call& call, Device device) {
  if (!call.workspace) return 0;
  // Any non-null address will do: the query reads shapes, dtypes and the device.
  static std::byte nowhere;
  std::vector<TensorView> in, out;
  for (const auto& spec : call.inputs) in.push_back(view_of(spec, &nowhere, device));
  for (const auto& spec : call.outputs) out.push_back(view_of(spec, &nowhere, device));
  return call.workspace(in, out);
}

Problem::Problem(Case problem, const std::vector<std::string>& calls, Device device)
    : case_(std::move(problem)), device_(device) {
  std::size_t scratch = 0;
  std::uint64_t seed = case_.seed;
  for (const std::string& name : calls) {
    const Call& call = find_call(case_, name);
    Bound bound{&call, {}, {}};
    bytes_ += call.bytes;
    flops_ += call.flops;
    const auto bind = [&](const TensorSpec& spec, bool input) {
      auto [it, fresh] = tensors_.try_emplace(spec.name);
      if (fresh) {
        it->second = Buffer(device, bytes_of(spec));
        if (input) fill_input(case_, spec, ++seed, it->second);
      }
      return view_of(spec, it->second.data(), device);
    };
    for (const auto& spec : call.inputs) bound.in.push_back(bind(spec, true));
    for (const auto& spec : call.outputs) bound.out.push_back(bind(spec, false));
    scratch = std::max(scratch, workspace_of(call, device));
    bound_.push_back(std::move(bound));
  }
  // Scratch is borrowed, so that no repetition pays for an allocation.
  workspace_ = Buffer(device, scratch);
  allocator_ = std::make_unique<BorrowedWorkspace>(workspace_.data(), workspace_.bytes());
  context_.allocator = allocator_.get();
}

void Problem::run() {
  for (const Bound& b : bound_) b.call->run(b.in, b.out, context_);
}

std::vector<double> Problem::values(const std::string& name, std::int64_t count) const {
  synchronize(device_);
  for (const Bound& b : bound_) {
    for (const auto* pair : {&b.call->inputs, &b.call->outputs}) {
      for (const TensorSpec& spec : *pair) {
        if (spec.name != name) continue;
        const testing::Dense host(kCPU, spec.dtype, {std::min(count, testing::numel_of(spec))});
        copy_bytes(host.view().data, kCPU, tensors_.at(name).data(), device_, host.bytes().size());
        return host.values();
      }
    }
  }
  throw std::logic_error("case " + case_.op + " has no tensor \"" + name + "\"");
}

std::vector<Problem::Pieces> Problem::pieces() const {
  std::vector<Pieces> result;
  for (const Bound& b : bound_) {
    const auto bytes = [](const TensorView& v) {
      return static_cast<std::size_t>(v.numel() * size_of(v.dtype));
    };
    std::size_t largest = 0;
    for (const auto* views : {&b.in, &b.out}) {
      for (const TensorView& v : *views) largest = std::max(largest, bytes(v));
    }
    // Tables such as theta are far below 1/64 of the data and stay in cache: not what moves.
    Pieces p;
    p.unit = largest;
    for (const auto* views : {&b.in, &b.out}) {
      for (const TensorView& v : *views) {
        if (bytes(v) * 64 >= largest) p.unit = std::min(p.unit, bytes(v));
      }
    }
    bool divides = p.unit > 0;
    const auto cut = [&](const TensorView& v, auto& pieces) {
      if (p.unit == 0 || bytes(v) * 64 < largest) return;
      divides = divides && bytes(v) % p.unit == 0;
      for (std::size_t at = 0; at + p.unit <= bytes(v); at += p.unit) {
        pieces.push_back(static_cast<std::byte*>(v.data) + at);
      }
    };
    for (const TensorView& v : b.in) cut(v, p.reads);
    for (const TensorView& v : b.out) cut(v, p.writes);
    if (!divides) p = {};
    result.push_back(std::move(p));
  }
  return result;
}

Expected expected_of(const Case& problem, const std::vector<std::string>& calls) {
  Expected e;
  for (const std::string& name : calls) {
    const Call& call = find_call(problem, name);
    e.inputs.push_back(testing::draw_inputs(problem, call));
    e.outputs.push_back(testing::run_reference(call, e.inputs.back()));
  }
  return e;
}

Accuracy measure_accuracy(const Case& problem, const std::vector<std::string>& calls, Device device,
                          const Expected& expected) {
  Accuracy a;
  std::int64_t zero = 0, rows = 0;
  for (std::size_t index = 0; index < calls.size(); ++index) {
    const std::string& name = calls[index];
    const Call& call = find_call(problem, name);
    const testing::Values& reference = expected.outputs[index];
    testing::TestTensors in(call.inputs, device, &expected.inputs[index]);
    testing::TestTensors out(call.outputs, device);
    Context context;
    std::string fault = in.prepare(call);
    call.run(in.views(), out.views(), context);
    synchronize(device);
    testing::Bits bits;
    if (fault.empty()) fault = out.collect(&bits);
    if (!fault.empty()) throw std::runtime_error(name + ": " + fault);
    const Precision precision = call.precision ? call.precision(device) : Precision::kAuto;
    for (std::size_t i = 0; i < bits.size(); ++i) {
      if (call.outputs[i].opaque) continue;  // only the backward reads it
      // The gradient of a number is one sum over everything, which may come out near zero: its
      // relative error says nothing. The tests judge it by the size of its terms.
      if (call.outputs[i].shape.empty()) continue;
      const std::vector<double> ours = testing::decode_all(bits[i], call.outputs[i].dtype);
      const double error = max_relative_error(ours, reference[i]);
      // NaN compares false with everything; it must win.
      if (!(error <= a.max_relative)) {
        a.max_relative = error;
        a.worst_output = name + " " + call.outputs[i].name;
      }
      const bool forward = name == problem.calls.front().name;
      const double guard = testing::guard_of(call.outputs[i].dtype, precision) *
                           (forward ? 1 : testing::kPolicy.guard_backward_factor);
      const double ratio = relative_rms(ours, reference[i]) / guard;
      if (!(ratio <= a.guard_ratio)) a.guard_ratio = ratio;
      const auto [z, r] = count_zero_rows(call.outputs[i], ours);
      zero += z;
      rows += r;
    }
  }
  a.zero_rows = rows > 0 ? static_cast<double>(zero) / static_cast<double>(rows) : 0;
  return a;
}

namespace {

std::vector<Suite>& registry() {
  static std::vector<Suite> suites;
  return suites;
}

}  // namespace

const std::vector<Suite>& all_suites() {
  auto& suites = registry();
  std::sort(suites.begin(), suites.end(),
            [](const Suite& a, const Suite& b) { return a.name < b.name; });
  return suites;
}

std::map<std::string, std::map<std::string, std::string>> implementation_words() {
  std::map<std::string, std::map<std::string, std::string>> words;
  for (const Suite& suite : all_suites()) {
    words[suite.name] = {
        {"annulus", "this library's kernel alone, called from C++ with its defaults"},
        {"annulus-torch",
         "the same operator as PyTorch calls it (annulus-torch in the files): checks, fresh memory "
         "for the outputs and autograd included"},
        {"move", "the row's bytes, read and written and nothing computed: the yardstick"}};
    for (const auto& [impl, about] : suite.implementations) words[suite.name][impl] = about;
  }
  return words;
}

SuiteRegistration::SuiteRegistration(Suite suite) { registry().push_back(std::move(suite)); }

std::size_t peak_bytes_of(const Case& problem, const std::vector<std::string>& calls,
                          Device device) {
  std::map<std::string, std::size_t> tensors;
  std::size_t scratch = 0;
  for (const std::string& name : calls) {
    const Call& call = find_call(problem, name);
    for (const auto* specs : {&call.inputs, &call.outputs}) {
      for (const auto& spec : *specs) tensors[spec.name] = bytes_of(spec);
    }
    scratch = std::max(scratch, workspace_of(call, device));
  }
  std::size_t total = scratch;
  for (const auto& [name, bytes] : tensors) total += bytes;
  return total;
}

}  // namespace annulus::bench
