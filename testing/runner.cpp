#include "testing/suite.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <exception>
#include <optional>
#include <utility>

#include "annulus/core/errors.h"
#include "testing/limits.h"
#include "testing/memory/allocator.h"
#include "testing/memory/tensors.h"
#include "testing/reference.h"

namespace annulus::testing {

namespace {

enum class Thrown { kNothing, kDeviceError, kOther };

struct Execution {
  Thrown thrown = Thrown::kNothing;
  std::string message;  // of what was thrown
  std::string fault;    // memory that must not have been touched
  std::size_t peak = 0;
  std::size_t held = 0;
  std::size_t promised = 0;  // what the workspace query says of these very tensors
  Bits bits;
};

using Shuffled = std::array<Layout, kLayouts.size()>;

struct Setting {
  Device device = kCPU;
  Layout layout = Layout::kContiguous;  // of all tensors,
  std::optional<Shuffled> each = {};    // or in turn, inputs first: no two of up to seven are alike
  int threads = 1;

  Layout layout_of(std::size_t tensor) const {
    return each ? (*each)[tensor % each->size()] : layout;
  }
};

Shuffled shuffled_layouts(std::uint64_t seed) {
  Shuffled layouts = kLayouts;
  Rng rng(seed);
  for (std::size_t i = layouts.size(); i > 1; --i) {
    const auto other = static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)));
    std::swap(layouts[i - 1], layouts[other]);
  }
  return layouts;
}

Execution execute(const Call& call, const Values& inputs, const Setting& setting,
                  Allocator& allocator) {
  TestTensors in(call.inputs, setting.device, &inputs,
                 [&](std::size_t i) { return setting.layout_of(i); });
  TestTensors out(call.outputs, setting.device, nullptr,
                  [&](std::size_t i) { return setting.layout_of(call.inputs.size() + i); });
  Execution e;
  Context context;
  context.threads = setting.threads;
  context.allocator = &allocator;
  try {
    e.promised = call.workspace(in.views(), out.views());
    in.queue_prepare(call, setting.threads);
    call.run(in.views(), out.views(), context);
    in.fetch();
    out.fetch();
    finish(setting.device);
  } catch (const std::exception& error) {
    const bool of_device = dynamic_cast<const DeviceError*>(&error) != nullptr;
    e.thrown = of_device ? Thrown::kDeviceError : Thrown::kOther;
    e.message = error.what();
  }
  e.peak = context.workspace_peak;
  e.held = context.workspace_bytes;
  for (const std::string& fault : {in.collect(), out.collect(&e.bits)}) {
    if (e.fault.empty()) e.fault = fault;
  }
  return e;
}

bool is_trivial(double v) { return v == 0 || std::isnan(v); }

// All that one case needs: collects failures as it goes.
class CaseRun {
 public:
  CaseRun(const Case& c, Device device, const std::string& repro)
      : case_(c), device_(device), repro_("annulus check --repro \"" + repro + "\"") {}

  CaseResult run(unsigned oracles, std::uint64_t variant) {
    Rng rng(variant);
    const std::vector<Values> inputs = draw_inputs(case_);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      setting_ = {.device = device_,
                  .layout = rng.pick<Layout>(kLayouts),
                  .threads = 1 + static_cast<int>(rng.below(2))};
      check_call(case_.calls[i], inputs[i], oracles);
    }
    return std::move(result_);
  }

  // Of every call that did not throw: what it gave before any oracle.
  std::vector<std::pair<Setting, Bits>>& plain_runs() { return plain_runs_; }

  // One call of it, which has given these bits in that setting before.
  CaseResult run_again(std::size_t call, const Values& inputs, const Setting& setting,
                       const Bits& expected) {
    check_again(case_.calls[call].name, case_.calls[call], inputs, setting, expected);
    return std::move(result_);
  }

 private:
  void report(const std::string& where, const std::string& detail) {
    if (!detail.empty()) {
      result_.failures.push_back({where, detail, repro_, case_.op + " " + case_.params});
    }
  }

  void check_call(const Call& call, const Values& inputs, unsigned oracles) {
    TestAllocator allocator;
    const Execution plain = execute(call, inputs, setting_, allocator);
    const std::string where = call.name + ", layout " + name_of(setting_.layout) + ", threads " +
                              std::to_string(setting_.threads);
    if (plain.thrown != Thrown::kNothing) {
      report(where, "threw: " + plain.message);
      return;
    }
    report(where, plain.fault);
    plain_runs_.emplace_back(setting_, plain.bits);
    check_scratch(where, plain, allocator);
    check_written(where, call, plain.bits);
    Yardstick yardstick;
    if (oracles & kNumbersOracle) check_numbers(call.name, call, inputs, plain.bits, yardstick);
    if (oracles & kLayoutsOracle) check_layouts(call, inputs, plain.bits, yardstick);
    if (oracles & kThreadsOracle) check_threads(call, inputs, plain.bits);
    if (oracles & kWorkspaceOracle) check_workspace(call, inputs, plain);
    if (oracles & kAllocationOracle) check_allocation(call, inputs, plain.bits);
  }

  void check_written(const std::string& where, const Call& call, const Bits& bits) {
    for (std::size_t o = 0; o < bits.size(); ++o) {
      const std::uint64_t poison = poison_bits(call.outputs[o].dtype);
      const auto at = std::find(bits[o].begin(), bits[o].end(), poison);
      if (at != bits[o].end()) {
        report(where, call.outputs[o].name + ": element " + std::to_string(at - bits[o].begin()) +
                          " was never written");
      }
    }
  }

  // What numbers of a call are judged by, whatever the setting that they came from.
  struct Yardstick {
    Values reference, baseline;
    std::vector<double> nearby;  // both made when they are first asked for
    Values sizes;
  };
  void check_numbers(const std::string& where, const Call& call, const Values& inputs,
                     const Bits& bits, Yardstick& yardstick) {
    Values &reference = yardstick.reference, &baseline = yardstick.baseline;
    std::vector<double>& nearby = yardstick.nearby;
    Values& sizes = yardstick.sizes;
    if (reference.empty()) {
      reference = run_reference(call, inputs);
      const std::vector<OutputTrust> trust = trust_of(call, reference);
      result_.outputs.insert(result_.outputs.end(), trust.begin(), trust.end());
      report(where, wrongly_zero(call, reference));
      baseline = run_baseline(call, inputs);
    }
    const bool forward = &call == &case_.calls[0];
    const Precision precision = call.precision ? call.precision(device_) : Precision::kAuto;
    for (std::size_t o = 0; o < reference.size(); ++o) {
      if (call.outputs[o].opaque) continue;
      const std::vector<double> ours = decode_all(bits[o], call.outputs[o].dtype);
      CompareInput in{.dtype = call.outputs[o].dtype,
                      .forward = forward,
                      .reference = reference[o],
                      .baseline = baseline[o],
                      .ours = ours,
                      .limits = case_.limits,
                      .precision = precision,
                      .circular = call.outputs[o].circular,
                      .baseline_error = {},
                      .term_size = {}};
      in.baseline_error = [&] {
        if (nearby.empty()) nearby = baseline_errors_nearby(call, inputs, precision);
        return nearby[o];
      };
      if (!forward || !call.terms.empty()) {
        in.term_size = [&] {
          if (sizes.empty()) sizes = term_sizes(call, inputs, reference);
          return sizes[o];
        };
      }
      const Comparison c = compare(in);
      result_.worst_ratio = std::max(result_.worst_ratio, c.worst_ratio);
      if (!c.fault.empty()) report(where + " " + call.outputs[o].name, c.fault);
    }
  }

  // See limits.h: the largest error of the baseline in every output, over neighbouring problems.
  std::vector<double> baseline_errors_nearby(const Call& call, const Values& inputs,
                                             Precision precision) {
    std::vector<double> largest(call.outputs.size(), 0);
    Rng rng(case_.seed ^ 0x9ea2);
    for (int draw = 0; draw < kPolicy.baseline_draws; ++draw) {
      Values moved = inputs;
      for (std::size_t i = 0; i < moved.size(); ++i) {
        const DType t = call.inputs[i].dtype;
        if (!is_floating(t) || call.inputs[i].derived) continue;
        for (double& v : moved[i]) {
          if (!std::isfinite(v)) continue;
          const double spacing = ulp_at(v, t, precision);
          v += v == 0 ? 0 : (2 * rng.uniform() - 1) * 2 * spacing;
        }
        round_to(t, moved[i]);
      }
      const Values reference = run_reference(call, moved);
      const Values baseline = run_baseline(call, moved);
      for (std::size_t o = 0; o < largest.size(); ++o) {
        for (std::size_t i = 0; i < reference[o].size(); ++i) {
          const double error =
              std::abs(difference(baseline[o][i], reference[o][i], call.outputs[o].circular));
          if (std::isfinite(error)) largest[o] = std::max(largest[o], error);
        }
      }
    }
    return largest;
  }

  // See limits.h: how far the outputs move, in units of h, when each factor of their terms is scaled by
  // 1 +- h.
  Values term_sizes(const Call& call, const Values& inputs, const Values& reference) {
    constexpr double kStep = 0x1p-20;
    constexpr int kDraws = 4;
    Values sizes;
    for (const auto& r : reference) sizes.emplace_back(r.size(), 0.0);
    Rng rng(case_.seed ^ 0xcafe);
    for (int draw = 0; draw < kDraws; ++draw) {
      Values moved = inputs;
      for (std::size_t i = 0; i < call.inputs.size(); ++i) {
        if (!is_factor(call, call.inputs[i].name)) continue;
        for (double& v : moved[i]) v *= 1 + (rng.next() & 1 ? kStep : -kStep);
      }
      const Values all = run_reference(call, moved);
      for (std::size_t o = 0; o < all.size(); ++o) {
        for (std::size_t i = 0; i < all[o].size(); ++i) {
          const double d = difference(all[o][i], reference[o][i], call.outputs[o].circular) / kStep;
          // hypot: squares of 1e200 would overflow.
          sizes[o][i] = std::hypot(sizes[o][i], d / std::sqrt(kDraws));
        }
      }
    }
    return sizes;
  }

  bool is_factor(const Call& call, const std::string& name) const {
    if (!call.terms.empty()) {
      return std::find(call.terms.begin(), call.terms.end(), name) != call.terms.end();
    }
    const auto& outputs = case_.calls[0].outputs;
    return std::any_of(outputs.begin(), outputs.end(),
                       [&](const TensorSpec& s) { return "d" + s.name == name; });
  }

  // Equal bit by bit; any NaN equals any NaN, for its payload means nothing. Of sums in any order: to a rounding or two of the
  // result, and of fp32 beside the largest.
  void check_equal(const std::string& where, const Call& call, const Bits& expected,
                   const Execution& e) {
    if (e.thrown != Thrown::kNothing) return report(where, "threw: " + e.message);
    report(where, e.fault);
    for (std::size_t o = 0; o < expected.size(); ++o) {
      if (expected[o] == e.bits[o]) continue;
      const DType t = call.outputs[o].dtype;
      const bool reordered = call.outputs[o].reordered && device_.type == DeviceType::kCUDA;
      double largest = 0;
      if (reordered) {
        for (const std::uint64_t bits : expected[o]) {
          const double size = std::abs(decode(bits, t));
          if (std::isfinite(size)) largest = std::max(largest, size);
        }
      }
      for (std::size_t i = 0; i < expected[o].size(); ++i) {
        if (expected[o][i] == e.bits[o][i]) continue;
        const double a = decode(expected[o][i], t);
        const double b = decode(e.bits[o][i], t);
        if (reordered && std::abs(a - b) <= 2 * ulp_at(a, t, Precision::kAuto) + 1e-5 * largest) {
          continue;
        }
        if (std::isnan(a) && std::isnan(b) && e.bits[o][i] != poison_bits(t)) continue;
        return report(where, call.outputs[o].name + ": element " + std::to_string(i) +
                                 " has other bits, " + format_number(b) + " and not " +
                                 format_number(a));
      }
    }
  }

  // What a call that succeeded did to its scratch. The query knows nothing of the Context, so it is
  // exact for every number of threads, and it is asked about the very tensors of the call.
  void check_scratch(const std::string& where, const Execution& e, TestAllocator& allocator) {
    report(where, allocator.fault());
    if (e.held != 0) report(where, std::to_string(e.held) + " bytes of workspace are still held");
    if (allocator.peak() != e.promised || e.peak != e.promised) {
      report(where, "the query says " + std::to_string(e.promised) + " bytes, the call took " +
                        std::to_string(allocator.peak()) + " and counted " +
                        std::to_string(e.peak));
    }
  }

  // The call again in another setting: the same bits, and nothing done to memory that is not its own.
  void check_again(const std::string& where, const Call& call, const Values& inputs,
                   const Setting& setting, const Bits& expected) {
    TestAllocator allocator;
    const Execution e = execute(call, inputs, setting, allocator);
    check_equal(where, call, expected, e);
    if (e.thrown == Thrown::kNothing) check_scratch(where, e, allocator);
  }

  void check_layouts(const Call& call, const Values& inputs, const Bits& expected,
                     Yardstick& yardstick) {
    Setting s = setting_;
    const bool to_the_bit = !call.kernels_by_layout || device_.type != DeviceType::kCUDA;
    const auto check = [&](const std::string& where) {
      if (to_the_bit) return check_again(where, call, inputs, s, expected);
      TestAllocator allocator;
      const Execution e = execute(call, inputs, s, allocator);
      if (e.thrown != Thrown::kNothing) return report(where, "threw: " + e.message);
      report(where, e.fault);
      check_scratch(where, e, allocator);
      check_written(where, call, e.bits);
      check_numbers(where, call, inputs, e.bits, yardstick);
    };
    for (const Layout layout : kLayouts) {
      if (layout == setting_.layout) continue;
      s.layout = layout;
      check(call.name + ", layout " + name_of(layout));
    }
    s.each = shuffled_layouts(case_.seed ^ 0x1a40);
    std::string where = call.name + ", layouts that differ:";
    std::size_t n = 0;
    for (const auto* specs : {&call.inputs, &call.outputs}) {
      for (const TensorSpec& spec : *specs) {
        where += (n > 0 ? ", " : " ") + spec.name + " " + name_of(s.layout_of(n));
        ++n;
      }
    }
    check(where);
  }

  void check_threads(const Call& call, const Values& inputs, const Bits& expected) {
    Setting s = setting_;
    for (const int threads : {1, 2, 4, 8}) {
      s.threads = threads;
      check_again(call.name + ", repeated with threads " + std::to_string(threads), call, inputs, s,
                  expected);
    }
  }

  // A call that did not get its scratch.
  void check_refused(const std::string& where, const Execution& e) {
    if (e.thrown != Thrown::kDeviceError) report(where, "must throw DeviceError " + e.message);
    if (e.held != 0) report(where, "workspace is still counted as held");
    report(where, e.fault);
  }

  void check_workspace(const Call& call, const Values& inputs, const Execution& plain) {
    const std::string where = call.name + ", workspace";
    const std::size_t bytes = plain.promised;
    if (bytes != plain.peak) return;  // reported with the plain run
    TestAllocator guarded;
    void* block = bytes > 0 ? guarded.allocate(bytes, device_, nullptr) : nullptr;
    BorrowedWorkspace exact(block, bytes);
    check_equal(where + " borrowed", call, plain.bits, execute(call, inputs, setting_, exact));
    if (bytes == 0) return;
    BorrowedWorkspace short_by_one(block, bytes - 1);
    const Execution e = execute(call, inputs, setting_, short_by_one);
    check_refused(where + " one byte short", e);
    guarded.deallocate(block, bytes, device_, nullptr);
    report(where + " borrowed", guarded.fault());
  }

  void check_allocation(const Call& call, const Values& inputs, const Bits& expected) {
    for (int site = 0; site < 64; ++site) {
      const std::string where = call.name + ", allocation " + std::to_string(site) + " failing";
      TestAllocator failing(site);
      const Execution e = execute(call, inputs, setting_, failing);
      if (!failing.failed()) {  // fewer sites than that: every one has failed once
        check_equal(call.name + ", after failed allocations", call, expected, e);
        return;
      }
      check_refused(where, e);
      report(where, failing.fault());
    }
    report(call.name, "more than 64 allocations in one call");
  }

  const Case& case_;
  Device device_;
  std::string repro_;
  Setting setting_;
  std::vector<std::pair<Setting, Bits>> plain_runs_;
  CaseResult result_;
};

}  // namespace

std::vector<OutputTrust> trust_of(const Call& call, const Values& reference) {
  std::vector<OutputTrust> outputs;
  const auto empty = [](const TensorSpec& s) { return numel_of(s) == 0; };
  if (std::any_of(call.inputs.begin(), call.inputs.end(), empty)) return outputs;
  for (std::size_t o = 0; o < reference.size(); ++o) {
    if (reference[o].empty() || call.outputs[o].opaque || call.outputs[o].zero) continue;
    const auto trivial = std::count_if(reference[o].begin(), reference[o].end(), is_trivial);
    outputs.push_back({call.name + " " + call.outputs[o].name,
                       static_cast<double>(trivial) >
                           kPolicy.mistrusted_share * static_cast<double>(reference[o].size())});
  }
  return outputs;
}

std::string wrongly_zero(const Call& call, const Values& reference) {
  for (std::size_t o = 0; o < reference.size(); ++o) {
    if (call.outputs[o].zero &&
        !std::all_of(reference[o].begin(), reference[o].end(), is_trivial)) {
      return call.outputs[o].name + " is marked as zero by definition and is not";
    }
  }
  return {};
}

bool any_mistrusted(const std::vector<OutputTrust>& outputs) {
  return std::any_of(outputs.begin(), outputs.end(),
                     [](const OutputTrust& t) { return t.mistrusted; });
}

CaseResult run_case(const Case& c, Device device, unsigned oracles, std::uint64_t variant,
                    const std::string& repro) {
  return CaseRun(c, device, repro).run(oracles, variant);
}

unsigned fuzz_oracles(std::uint64_t seed) {
  Rng rng(seed ^ 0x0c1e);
  return kNumbersOracle | 1u << rng.below(4) | 1u << rng.below(4);
}

bool names_word(const std::string& text, const std::string& word) {
  // By hand: <regex> was a third of what testing/'s own files take to compile.
  const auto is_of_a_word = [](char ch) {
    return ch == '_' || std::isalnum(static_cast<unsigned char>(ch)) != 0;
  };
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    const bool begins = at == 0 || !is_of_a_word(text[at - 1]);
    if (begins && (end == text.size() || !is_of_a_word(text[end]))) return true;
  }
  return false;
}

struct GoodCase::Judged {
  // A call, as it was when it was judged.
  struct One {
    Values inputs;
    Layout layout;
    int threads;
    Bits bits;
  };
  Case of;
  Device device;
  std::vector<One> calls = {};
  std::string fault = {};
};

GoodCase::GoodCase(Case c, Device device) {
  const auto judged = std::make_shared<Judged>(Judged{.of = std::move(c), .device = device});
  judged_ = judged;
  CaseRun run(judged->of, device, "the good call");
  const CaseResult first = run.run(kNumbersOracle, 0);
  if (!first.failures.empty()) {
    judged->fault = first.failures[0].detail;
    return;
  }
  std::vector<Values> inputs = draw_inputs(judged->of);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto& [setting, bits] = run.plain_runs()[i];
    judged->calls.push_back(
        {std::move(inputs[i]), setting.layout, setting.threads, std::move(bits)});
  }
}

std::string GoodCase::fault() const {
  if (!judged_->fault.empty()) return judged_->fault;
  for (std::size_t i = 0; i < judged_->calls.size(); ++i) {
    const auto& [inputs, layout, threads, bits] = judged_->calls[i];
    const Setting setting{.device = judged_->device, .layout = layout, .threads = threads};
    CaseRun run(judged_->of, judged_->device, "the good call");
    const CaseResult r = run.run_again(i, inputs, setting, bits);
    if (!r.failures.empty()) return r.failures[0].detail;
  }
  return {};
}

std::string run_bad_call(const BadCall& bad, Device device, const GoodCase* good) {
  using Expect = BadCall::Expect;
  std::optional<Expect> came;
  std::string message;
  try {
    bad.call(device);
  } catch (const std::exception& e) {
    message = e.what();
    if (dynamic_cast<const InvalidArgument*>(&e)) came = Expect::kInvalidArgument;
    if (dynamic_cast<const NotSupported*>(&e)) came = Expect::kNotSupported;
    if (dynamic_cast<const DeviceError*>(&e)) came = Expect::kDeviceError;
    if (!came) return "threw an exception of another kind: " + message;
  }
  if (!came) return "was accepted";
  if (*came != bad.expect) return "threw the wrong type: " + message;
  const std::size_t tag = message.find("] ");
  if (message.empty() || message[0] != '[' || tag == std::string::npos) {
    return "the message names no operator: " + message;
  }
  if (!names_word(message.substr(tag + 2), bad.argument)) {
    return "the message does not name " + bad.argument + ": " + message;
  }
  const std::string after = good ? good->fault() : "";
  return after.empty() ? "" : "the next call fails: " + after;
}

}  // namespace annulus::testing
