#include <atomic>
#include <cstdint>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/sm90/launch.h"

namespace annulus::attention::cuda::sm90 {

namespace {

// Is the current device a Hopper, and are there kernels for it? Asked once a device.
bool on_hopper(const char* op) {
  const int device = current_device(op);
  enum : signed char { kUnknown, kNo, kYes };
  static std::atomic<signed char> known[64] = {};
  std::atomic<signed char>* const found = device < 64 ? known + device : nullptr;
  if (found != nullptr && *found != kUnknown) return *found == kYes;
  const bool yes = is_hopper(device) && available(op);
  if (found != nullptr) *found = yes ? kYes : kNo;
  return yes;
}

bool takes(const char* op, DType dtype, const Problem& p) {
  if (dtype != DType::kBF16 && dtype != DType::kF16) return false;
  if (p.D > 128 || p.Dv > 128 || p.dropout.any() || p.scale_first || p.pattern.has_holes()) {
    return false;
  }
  if (!p.q.whole || !p.k.whole || !p.v.whole) return false;
  constexpr std::int64_t kMostRows = INT32_MAX - 256;  // what they say of tiles are ints
  if (p.Tq > kMostRows || p.Tk > kMostRows) return false;
  if (p.pattern.kind == Kind::kBlocks && p.pattern.blocks.size != 128) return false;
  return on_hopper(op);
}

}  // namespace

bool takes_forward(const char* op, DType dtype, const Problem& p) {
  return p.longest_sweep(true) > kShortSweep && takes(op, dtype, p);
}
bool takes_gradient(const char* op, DType dtype, const KeyGradientArgs& a) {
  const Problem& p = a.p;
  const std::int64_t rows = p.B * p.H * (p.layers > 1 ? p.rows.count : p.Tq);
  if (rows * p.D / 8 >= UINT32_MAX) return false;  // they count dq in vectors of 8
  return p.longest_sweep(false) > kShortSweep && a.do_.whole && takes(op, dtype, p);
}

}  // namespace annulus::attention::cuda::sm90
