// What this build is and what it can run here, with reasons. (Operators add themselves: core/operator.h.)
#pragma once

#include <string>
#include <vector>

#include "annulus/core/device.h"
#include "annulus/core/dtype.h"
#include "annulus/core/macros.h"

namespace annulus {

struct Support {
  bool available = false;
  std::string reason;  // why not; or, when available, which implementation runs ("highway NEON")
};

// A way to multiply that an operator offers, and how exact its results are with it.
struct PrecisionInfo {
  std::string name;     // as options name it
  std::string product;  // what of the operands it keeps
  double state_error, gradient_error;
};

struct OperatorInfo {
  std::string name;
  std::string summary;  // one line
  std::vector<DType> dtypes;
  std::vector<std::string> gradients;  // inputs that have one
  bool deterministic = true;           // always; or only where Context::deterministic asks for it
  Support (*support)(DeviceType) = nullptr;
  std::vector<PrecisionInfo> precisions = {};  // where it offers more than its dtypes' own
  std::string precisions_measured_with = {};
  bool in_graphs = true;  // CUDA graphs take its calls; not: they wait for others on the host
};

struct BuildInfo {
  std::string version;
  std::string commit;  // of the sources, "unknown" outside a checkout
  std::string compiler;
  std::string cuda;  // toolkit version and architectures, or "not built"
  std::string simd;  // Highway version and dispatch, or "none"
  std::string blas;
  std::string openmp;
};

ANNULUS_API BuildInfo build_info();
ANNULUS_API std::string cpu_name();
ANNULUS_API std::string cpu_features();  // the SIMD target that will run, and bf16 where there
ANNULUS_API int cpu_threads();           // what Context::threads = 0 means here
// Sorted by name.
ANNULUS_API std::vector<OperatorInfo> operators();

}  // namespace annulus
