#include "testing/suite.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/core/info.h"
#include "testing/bad_calls.h"

namespace annulus::testing {

namespace {

// A sanitizer looks at what calls do to memory. The numbers of the same cases are judged by every other build, and
// the definitions run under it where they are compared with finite differences.
unsigned asked_of(unsigned oracles) { return kSanitized ? oracles & ~kNumbersOracle : oracles; }

// All, but for large cases that have the name of one before them, differing in dtype, columns or values: one in kOneIn.
std::vector<bool> which_run(const std::vector<Case>& cases) {
  std::vector<bool> run(cases.size(), true);
  std::set<std::string> names;
  std::size_t large = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string& params = cases[i].params;  // begins with 'its name'
    const bool again = !names.insert(params.substr(0, params.find('\'', 1))).second;
    double flops = 0;
    for (const Call& call : cases[i].calls) flops += call.flops;
    run[i] = !again || flops < 1e7 || large++ % kOneIn == 0;
  }
  return run;
}

// The cases of one kind.
struct CaseList {
  const OperatorCases& op;
  const char *kind, *key;  // in a row, and in the line that runs one again
  Device device;
  std::function<CaseResult(std::uint64_t number, const std::string& repro)> run;
  std::vector<std::uint64_t> numbers = {};  // empty: any

  std::string repro(std::uint64_t number) const {
    return op.op + " " + key + "=" + std::to_string(number) +
           " device=" + (device.type == DeviceType::kCPU ? "cpu" : "cuda");
  }
};

std::string repro_command(const std::string& text) {
  return "annulus check --repro \"" + text + "\"";
}

std::vector<std::uint64_t> all_below(std::size_t count) {
  std::vector<std::uint64_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

CaseList fuzzed(const OperatorCases& op, Device device) {
  const auto run = [&op, device](std::uint64_t seed, const std::string& repro) {
    return run_case(op.fuzz(seed), device, asked_of(fuzz_oracles(seed)), seed, repro);
  };
  return {op, "fuzz", "seed", device, run};
}

// Those that the options want and that run here, or without options all.
CaseList named(const OperatorCases& op, Device device, const SuiteOptions* options = nullptr) {
  std::vector<Case> cases = op.named();
  std::vector<std::uint64_t> numbers = all_below(cases.size());
  if (options != nullptr) {
    const std::vector<bool> run_here = which_run(cases);
    const auto& wants = options->wants;
    std::erase_if(numbers, [&](std::uint64_t i) {
      return (wants && !wants(cases[i].params)) || !run_here[i];
    });
  }
  const auto run = [cases = std::move(cases), device](std::uint64_t i, const std::string& repro) {
    return run_case(cases[i], device, asked_of(kSanitized ? fuzz_oracles(i) : kAllOracles), i,
                    repro);
  };
  return {op, "named", "case", device, run, std::move(numbers)};
}

CaseList bad(const OperatorCases& op, Device device) {
  std::vector<BadCall> calls = all_bad_calls(op, device);
  std::vector<std::uint64_t> numbers = all_below(calls.size());
  const auto run = [&op, device, calls = std::move(calls),
                    good = GoodCase(op.named().at(0), device)](std::uint64_t i,
                                                               const std::string& repro) {
    CaseResult r;
    const bool and_next = i % kOneIn == 0;
    const std::string fault = run_bad_call(calls[i], device, and_next ? &good : nullptr);
    if (!fault.empty()) r.failures.push_back({calls[i].what, fault, repro_command(repro), op.op});
    return r;
  };
  return {op, "bad calls", "bad", device, run, std::move(numbers)};
}

// `count` of the list's cases from the first on, over several threads. Results are merged in no
// particular order, failures sorted afterwards.
SuiteRow run_list(const CaseList& list, std::uint64_t first, std::int64_t count,
                  const SuiteOptions& options) {
  SuiteRow row{.op = list.op.op, .kind = list.kind, .failures = {}};
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;  // the first that is no case's own: from memory or from the progress
  std::vector<std::pair<std::int64_t, Failure>> failures;
  const auto run_one = [&](std::int64_t i) {
    const std::uint64_t at = first + static_cast<std::uint64_t>(i);
    const std::uint64_t number = list.numbers.empty() ? at : list.numbers[at];
    const std::string repro = list.repro(number);
    CaseResult r;
    try {
      r = list.run(number, repro);
    } catch (const std::exception& e) {  // a fault of the case or of its reference
      r.failures.push_back({"case " + std::to_string(i), e.what(), repro_command(repro), row.op});
    }
    const std::lock_guard lock(mutex);
    for (Failure& failure : r.failures) failures.emplace_back(i, std::move(failure));
    row.worst_ratio = std::max(row.worst_ratio, r.worst_ratio);
    row.mistrusted += any_mistrusted(r.outputs);
    row.outputs.add(r.outputs);
    ++row.cases;
    if (options.progress) options.progress(row.cases, count);
  };
  const auto work = [&]() noexcept {
    for (std::int64_t i = next++; i < count; i = next++) {
      try {
        if (options.stop && options.stop()) return;
        run_one(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next = count;
      }
    }
  };
  {
    std::vector<std::jthread> threads;  // joined where they go out of scope, whatever happens
    const std::int64_t jobs = std::min<std::int64_t>({options.jobs, count, kMostJobs});
    for (std::int64_t j = 1; j < jobs; ++j) {
      try {
        threads.emplace_back(work);
      } catch (const std::system_error&) {  // no more threads to be had: fewer do the same
        break;
      }
    }
    work();
  }
  if (error) std::rethrow_exception(error);
  std::stable_sort(failures.begin(), failures.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [i, failure] : failures) row.failures.push_back(std::move(failure));
  return row;
}

SuiteRow run_whole(const CaseList& list, const SuiteOptions& options) {
  return run_list(list, 0, static_cast<std::int64_t>(list.numbers.size()), options);
}

// The whole number that `digits` are, and nothing else.
template <class Number>
std::optional<Number> whole(std::string_view digits) {
  Number number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

}  // namespace

void TrustCounts::add(const std::vector<OutputTrust>& outputs) {
  for (const OutputTrust& t : outputs) {
    Count& count = outputs_[t.output];
    ++count.cases;
    count.mistrusted += t.mistrusted;
  }
}

std::string TrustCounts::excess() const {
  std::string text;
  for (const auto& [output, count] : outputs_) {
    if (count.cases < 100 || static_cast<double>(count.mistrusted) <=
                                 kPolicy.mistrusted_cases * static_cast<double>(count.cases)) {
      continue;
    }
    text += (text.empty() ? "" : ", ") + output + " in " + std::to_string(count.mistrusted) +
            " of " + std::to_string(count.cases) + " cases";
  }
  return text;
}

bool SuiteRow::too_many_mistrusted() const { return kind == "fuzz" && !outputs.excess().empty(); }

SuiteRow run_named(const OperatorCases& op, const SuiteOptions& options) {
  return run_whole(named(op, options.device, &options), options);
}

SuiteRow run_fuzz(const OperatorCases& op, std::uint64_t first_seed, std::int64_t count,
                  const SuiteOptions& options) {
  return run_list(fuzzed(op, options.device), first_seed, count, options);
}

SuiteRow run_bad_calls(const OperatorCases& op, const SuiteOptions& options) {
  return run_whole(bad(op, options.device), options);
}

std::int64_t cases_asked_for(const std::string& text, const std::string& op) {
  std::istringstream items(text);
  std::string item;
  std::int64_t all = -1, own = -1;
  while (std::getline(items, item, ',')) {
    const std::size_t equals = item.find('=');
    const bool named = equals != std::string::npos;
    if (named) find_cases(item.substr(0, equals));
    const auto count = whole<std::int64_t>(named ? item.substr(equals + 1) : item);
    if (!count || *count < 0) throw std::invalid_argument("'" + item + "' is no number of cases");
    if (!named) all = *count;
    if (named && item.substr(0, equals) == op) own = *count;
  }
  if (all < 0) throw std::invalid_argument("'" + text + "' has no number for all operators");
  return own < 0 ? all : own;
}

const OperatorCases& find_cases(const std::string& op) {
  std::string there;
  for (const OperatorCases& cases : all_cases()) {
    if (cases.op == op) return cases;
    there += (there.empty() ? "" : ", ") + cases.op;
  }
  throw std::invalid_argument("no operator is called '" + op + "'; there are " + there);
}

Repro parse_repro(const std::string& text) {
  std::istringstream words(text);
  std::string word;
  Repro r;
  while (words >> word) {
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (equals == std::string::npos && r.op == nullptr) {
      r.op = &find_cases(word);
    } else if (key == "device" && (value == "cpu" || value == "cuda")) {
      r.device = value == "cpu" ? kCPU : cuda_device(0);
    } else if (key == "seed" || key == "case" || key == "bad") {
      const auto number = whole<std::uint64_t>(value);
      if (!number) throw std::invalid_argument("'" + word + "' has no whole number");
      r.number = *number;
      r.kind = key;
    } else {
      throw std::invalid_argument("'" + word + "' is not understood");
    }
  }
  if (r.op == nullptr || r.kind.empty()) {
    throw std::invalid_argument("expected an operator and seed=N, case=N or bad=N");
  }
  return r;
}

SuiteRow run_repro(const Repro& r) {
  const CaseList list = r.kind == "seed"   ? fuzzed(*r.op, r.device)
                        : r.kind == "case" ? named(*r.op, r.device)
                                           : bad(*r.op, r.device);
  if (r.kind != "seed" && r.number >= list.numbers.size()) {
    throw std::invalid_argument(r.kind + " must be below " + std::to_string(list.numbers.size()));
  }
  return run_list(list, r.number, 1, {});
}

}  // namespace annulus::testing
