#include "testing/suite.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <exception>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace annulus::testing {

namespace {

std::string repro_text(const std::string& op, const char* kind, std::uint64_t number,
                       Device device) {
  return op + " " + kind + "=" + std::to_string(number) +
         " device=" + (device.type == DeviceType::kCPU ? "cpu" : "cuda");
}

std::string repro_command(const std::string& text) {
  return "annulus check --repro \"" + text + "\"";
}

// f(i) for i in 0 .. count-1 over `jobs` threads; results are merged into the row in no particular
// order, failures sorted afterwards. repro(i) is what runs that case again.
template <class Repro, class F>
void for_each_case(std::int64_t count, const SuiteOptions& options, SuiteRow& row, Repro&& repro,
                   F&& f) {
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::int64_t done = 0;
  std::exception_ptr error;  // the first that is no case's own: from memory or from the progress
  std::vector<std::pair<std::int64_t, Failure>> failures;
  const auto run_one = [&](std::int64_t i) {
    CaseResult r;
    try {
      r = f(i);
    } catch (const std::exception& e) {  // a fault of the case or of its reference
      r.failures.push_back(
          {"case " + std::to_string(i), e.what(), repro_command(repro(i)), row.op});
    }
    const std::lock_guard lock(mutex);
    for (Failure& failure : r.failures) failures.emplace_back(i, std::move(failure));
    row.worst_ratio = std::max(row.worst_ratio, r.worst_ratio);
    row.mistrusted += any_mistrusted(r.outputs);
    row.outputs.add(r.outputs);
    ++row.cases;
    if (options.progress) options.progress(++done, count);
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
}

CaseResult fuzz_one(const OperatorCases& op, std::uint64_t seed, Device device) {
  return run_case(op.fuzz(seed), device, fuzz_oracles(seed), seed,
                  repro_text(op.op, "seed", seed, device));
}

CaseResult named_one(const OperatorCases& op, const Case& c, std::uint64_t index, Device device) {
  return run_case(c, device, kAllOracles, index, repro_text(op.op, "case", index, device));
}

CaseResult bad_one(const OperatorCases& op, const BadCall& bad, const Case& good,
                   std::uint64_t index, Device device) {
  CaseResult r;
  const std::string fault = run_bad_call(bad, device, good);
  if (!fault.empty()) {
    r.failures.push_back(
        {bad.what, fault, repro_command(repro_text(op.op, "bad", index, device)), op.op});
  }
  return r;
}

}  // namespace

bool SuiteRow::too_many_mistrusted() const { return kind == "fuzz" && !outputs.excess().empty(); }

SuiteRow run_named(const OperatorCases& op, const SuiteOptions& options) {
  SuiteRow row{.op = op.op, .kind = "named", .failures = {}};
  const std::vector<Case> cases = op.named();
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (!options.wants || options.wants(cases[i].params)) chosen.push_back(i);
  }
  const auto index_of = [&](std::int64_t i) { return chosen[static_cast<std::size_t>(i)]; };
  for_each_case(
      static_cast<std::int64_t>(chosen.size()), options, row,
      [&](std::int64_t i) { return repro_text(op.op, "case", index_of(i), options.device); },
      [&](std::int64_t i) {
        return named_one(op, cases[index_of(i)], index_of(i), options.device);
      });
  return row;
}

SuiteRow run_fuzz(const OperatorCases& op, std::uint64_t first_seed, std::int64_t count,
                  const SuiteOptions& options) {
  SuiteRow row{.op = op.op, .kind = "fuzz", .failures = {}};
  const auto seed_of = [&](std::int64_t i) { return first_seed + static_cast<std::uint64_t>(i); };
  for_each_case(
      count, options, row,
      [&](std::int64_t i) { return repro_text(op.op, "seed", seed_of(i), options.device); },
      [&](std::int64_t i) { return fuzz_one(op, seed_of(i), options.device); });
  return row;
}

SuiteRow run_bad_calls(const OperatorCases& op, const SuiteOptions& options) {
  SuiteRow row{.op = op.op, .kind = "bad calls", .failures = {}};
  const std::vector<BadCall> calls = op.bad_calls(options.device);
  const Case good = op.named().at(0);
  const auto index_of = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for_each_case(
      static_cast<std::int64_t>(calls.size()), options, row,
      [&](std::int64_t i) { return repro_text(op.op, "bad", index_of(i), options.device); },
      [&](std::int64_t i) {
        return bad_one(op, calls[index_of(i)], good, index_of(i), options.device);
      });
  return row;
}

std::int64_t cases_asked_for(const std::string& text, const std::string& op) {
  std::istringstream items(text);
  std::string item;
  std::int64_t all = -1, own = -1;
  while (std::getline(items, item, ',')) {
    const std::size_t equals = item.find('=');
    if (equals != std::string::npos) find_cases(item.substr(0, equals));
    const std::string digits = equals == std::string::npos ? item : item.substr(equals + 1);
    std::int64_t count = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
    if (error != std::errc() || end != digits.data() + digits.size() || count < 0) {
      throw std::invalid_argument("'" + item + "' is no number of cases");
    }
    if (equals == std::string::npos) all = count;
    if (equals != std::string::npos && item.substr(0, equals) == op) own = count;
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
      const auto [end, error] =
          std::from_chars(value.data(), value.data() + value.size(), r.number);
      if (error != std::errc() || end != value.data() + value.size()) {
        throw std::invalid_argument("'" + word + "' has no whole number");
      }
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
  const char* kind = r.kind == "seed" ? "fuzz" : r.kind == "case" ? "named" : "bad calls";
  SuiteRow row{.op = r.op->op, .kind = kind, .failures = {}};
  const auto index = static_cast<std::size_t>(r.number);
  const auto in_range = [&](std::size_t size) {
    if (index >= size) {
      throw std::invalid_argument(r.kind + " must be below " + std::to_string(size));
    }
  };
  CaseResult result;
  if (r.kind == "seed") {
    result = fuzz_one(*r.op, r.number, r.device);
  } else if (r.kind == "case") {
    const std::vector<Case> cases = r.op->named();
    in_range(cases.size());
    result = named_one(*r.op, cases[index], r.number, r.device);
  } else {
    const std::vector<BadCall> calls = r.op->bad_calls(r.device);
    in_range(calls.size());
    result = bad_one(*r.op, calls[index], r.op->named().at(0), r.number, r.device);
  }
  row.cases = 1;
  row.mistrusted = any_mistrusted(result.outputs);
  row.outputs.add(result.outputs);
  row.worst_ratio = result.worst_ratio;
  row.failures = std::move(result.failures);
  return row;
}

}  // namespace annulus::testing
