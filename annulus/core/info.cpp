#include "annulus/core/info.h"

#include <algorithm>
#include <fstream>
#include <string>

#include "annulus/core/operator.h"
#include "annulus/cpu/features.h"
#include "annulus/cpu/parallel.h"

namespace annulus {

namespace {

std::vector<OperatorInfo>& registry() {
  static std::vector<OperatorInfo> operators;
  return operators;
}

// The value of the first "key : value" line of /proc/cpuinfo; empty when there is none.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto start = line.find_first_not_of(" \t", colon + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return "";
}

// Arm cores have no name in /proc/cpuinfo, only part numbers.
std::string arm_core_name(const std::string& part) {
  if (part == "0xd0c") return "Neoverse-N1";
  if (part == "0xd40") return "Neoverse-V1";
  if (part == "0xd49") return "Neoverse-N2";
  if (part == "0xd4f") return "Neoverse-V2";
  return part.empty() ? "unknown CPU" : "Arm core " + part;
}

}  // namespace

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;  // names itself
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

BuildInfo build_info() {
  return {.version = ANNULUS_VERSION_STRING,
          .commit = ANNULUS_COMMIT_STRING,
          .compiler = kCompiler,
          .cuda = ANNULUS_CUDA_STRING,
          .simd = ANNULUS_HWY_STRING,
          .blas = ANNULUS_BLAS_STRING,
          .openmp = ANNULUS_OPENMP_STRING};
}

std::string cpu_name() {
  const std::string model = cpuinfo("model name");
  return model.empty() ? arm_core_name(cpuinfo("CPU part")) : model;
}

std::string cpu_features() { return cpu::simd_description(); }

int cpu_threads() { return cpu::resolve_threads(0); }

std::vector<OperatorInfo> operators() {
  auto sorted = registry();
  std::sort(sorted.begin(), sorted.end(),
            [](const OperatorInfo& a, const OperatorInfo& b) { return a.name < b.name; });
  return sorted;
}

OperatorRegistration::OperatorRegistration(OperatorInfo info) {
  registry().push_back(std::move(info));
}

}  // namespace annulus
