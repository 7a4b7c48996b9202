#include "cli/device.h"

#include "annulus/core/errors.h"
#include "annulus/cuda/memory.h"

namespace annulus::cli {

Device pick_device(const std::string& name) {
  const std::string why_not =
      cuda::built() ? cuda::why_unavailable() : std::string("this build has no CUDA");
  if (name == "cuda" && !why_not.empty()) {
    throw NotSupported("device cuda is not available: " + why_not);
  }
  return name == "cuda" || (name == "auto" && why_not.empty()) ? cuda_device() : kCPU;
}

}  // namespace annulus::cli
