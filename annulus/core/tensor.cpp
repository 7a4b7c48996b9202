#include "annulus/core/tensor.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "annulus/core/check.h"
#include "annulus/core/checked.h"

namespace annulus {

namespace {

// Its strides are still to come.
TensorView view_of(void* data, DType dtype, std::span<const std::int64_t> shape, Device device) {
  if (shape.size() > kMaxRank) {
    throw InvalidArgument("[tensor] rank must be at most " + std::to_string(kMaxRank) + " but is " +
                          std::to_string(shape.size()));
  }
  TensorView v{data, dtype, device, static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), v.shape.begin());
  return v;
}

}  // namespace

TensorView contiguous(void* data, DType dtype, std::span<const std::int64_t> shape, Device device) {
  TensorView v = view_of(data, dtype, shape, device);
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    v.stride[i] = step;
    step = checked_mul(step, shape[i] > 0 ? shape[i] : 1, "tensor");
  }
  return v;
}

TensorView strided(void* data, DType dtype, std::span<const std::int64_t> shape,
                   std::span<const std::int64_t> stride, Device device) {
  if (shape.size() != stride.size()) {
    throw InvalidArgument("[tensor] stride must have as many entries as shape, " +
                          std::to_string(shape.size()) + ", but has " +
                          std::to_string(stride.size()));
  }
  TensorView v = view_of(data, dtype, shape, device);
  std::copy(stride.begin(), stride.end(), v.stride.begin());
  return v;
}

std::string shape_string(std::span<const std::int64_t> shape) {
  std::string s = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) s += ", ";
    s += std::to_string(shape[i]);
  }
  return s + (shape.size() == 1 ? ",)" : ")");
}

// --- checks ---------------------------------------------------------------------------------------

void invalid(const char* op, const std::string& argument, const std::string& rule,
             const std::string& came) {
  throw InvalidArgument("[" + std::string(op) + "] " + argument + " must " + rule + " but " + came);
}

namespace {

// The number of elements of a view, if it and the span of their addresses in bytes fit in 63 bits.
std::optional<std::int64_t> addressable(const TensorView& v, std::int64_t size) {
  std::int64_t n = 1, span = 1, reach = 0;
  for (int i = 0; i < v.rank; ++i) {
    const auto k = static_cast<std::size_t>(i);
    if (__builtin_mul_overflow(n, v.shape[k], &n)) return std::nullopt;
    if (v.shape[k] <= 1) continue;
    if (v.stride[k] == INT64_MIN ||
        __builtin_mul_overflow(v.shape[k] - 1, std::abs(v.stride[k]), &reach) ||
        __builtin_add_overflow(span, reach, &span)) {
      return std::nullopt;
    }
  }
  if (n > 0 && __builtin_mul_overflow(span, size, &span)) return std::nullopt;
  return n;
}

}  // namespace

void check_tensor(const char* op, const char* name, const TensorView& v, int rank) {
  if (!v.defined()) invalid(op, name, "be given", "is missing");
  if (v.rank > kMaxRank) {
    invalid(op, name, "have at most " + std::to_string(kMaxRank) + " dimensions",
            "has " + std::to_string(v.rank));
  }
  if (v.rank != rank) {
    invalid(op, name, "have " + std::to_string(rank) + " dimensions",
            "has shape " + shape_string(v.sizes()));
  }
  for (std::int64_t s : v.sizes()) {
    if (s < 0) {
      invalid(op, name, "have no negative size", "has shape " + shape_string(v.sizes()));
    }
  }
  const std::int64_t size = size_of(v.dtype);
  if (size == 0) {
    invalid(op, name, "have a dtype of annulus", "has number " + std::to_string(int(v.dtype)));
  }
  const std::optional<std::int64_t> n = addressable(v, size);
  if (!n) {
    invalid(op, name, "span fewer than 2^63 bytes",
            "has shape " + shape_string(v.sizes()) + " and strides " + shape_string(v.strides()));
  }
  if (*n == 0) return;
  if (v.data == nullptr) invalid(op, name, "have data", "is a null pointer");
  if (reinterpret_cast<std::uintptr_t>(v.data) % static_cast<std::uintptr_t>(size) != 0) {
    invalid(op, name, "be aligned to its " + std::to_string(size) + "-byte elements", "is not");
  }
}

void check_dtype(const char* op, const char* name, const TensorView& v,
                 std::span<const DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), v.dtype) != allowed.end()) return;
  std::string list;
  for (DType t : allowed) {
    if (!list.empty()) list += ", ";
    list += name_of(t);
  }
  invalid(op, name, (allowed.size() > 1 ? "be one of " : "be ") + list,
          std::string("is ") + name_of(v.dtype));
}

void check_shape(const char* op, const char* name, const TensorView& v,
                 std::span<const std::int64_t> want) {
  const auto have = v.sizes();
  if (std::equal(have.begin(), have.end(), want.begin(), want.end())) return;
  invalid(op, name, "have shape " + shape_string(want), "has " + shape_string(have));
}

void check_device(const char* op, const char* name, const TensorView& v, const char* reference_name,
                  const TensorView& reference) {
  if (v.device == reference.device) return;
  invalid(op, name,
          "be on the device of " + std::string(reference_name) + ", " +
              to_string(reference.device) + ",",
          "is on " + to_string(v.device));
}

void check_output_layout(const char* op, const char* name, const TensorView& v) {
  if (v.numel() == 0) return;
  // Sufficient and cheap: sorted by stride, every dimension steps over the whole span of the finer
  // ones. Interleavings that are free of overlap in a cleverer way are refused too; no caller has
  // needed one.
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> dims;
  std::size_t count = 0;
  for (int i = 0; i < v.rank; ++i) {
    const auto k = static_cast<std::size_t>(i);
    if (v.shape[k] <= 1) continue;
    std::size_t at = count++;  // kept in order
    const std::pair dim(std::abs(v.stride[k]), v.shape[k]);
    for (; at > 0 && dim < dims[at - 1]; --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }
  std::int64_t span = 0;
  for (const auto& [step, extent] : std::span(dims).first(count)) {
    if (step <= span) {
      invalid(op, name, "have strides under which no two elements share an address",
              "has strides " + shape_string(v.strides()) + " for shape " + shape_string(v.sizes()));
    }
    span += (extent - 1) * step;
  }
}

namespace {

// First and one-past-last byte a view can touch.
std::pair<std::uintptr_t, std::uintptr_t> byte_span(const TensorView& v) {
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (int i = 0; i < v.rank; ++i) {
    const auto k = static_cast<std::size_t>(i);
    const std::int64_t reach = (v.shape[k] - 1) * v.stride[k];
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(v.data);
  const std::int64_t size = size_of(v.dtype);
  return {base + static_cast<std::uintptr_t>(low * size),
          base + static_cast<std::uintptr_t>((high + 1) * size)};
}

// Whether both lie in rows `period` bytes apart, in parts of them that do not meet: the queries and keys that a
// projection makes side by side, say.
bool apart_in_rows(const TensorView& a, const TensorView& b, std::int64_t period) {
  // The bytes of a row that a view touches: [low, high), low in the row. None where it has more than a row of them.
  const auto part =
      [&](const TensorView& v) -> std::optional<std::pair<std::int64_t, std::int64_t>> {
    const std::int64_t size = size_of(v.dtype);
    TensorView row = v;
    for (std::size_t i = 0; i < v.sizes().size(); ++i) {
      if (v.shape[i] > 1 && v.stride[i] * size % period == 0) row.shape[i] = 1;
    }
    const auto [low, high] = byte_span(row);
    const auto length = static_cast<std::int64_t>(high - low);
    if (length > period) return std::nullopt;
    const auto start = static_cast<std::int64_t>(low % static_cast<std::uintptr_t>(period));
    return std::pair(start, start + length);
  };
  const auto x = part(a), y = part(b);
  if (!x || !y) return false;
  const auto& [x0, x1] = *x;
  const auto& [y0, y1] = *y;
  return x0 < y0 ? x1 <= y0 && y1 - period <= x0 : y1 <= x0 && x1 - period <= y0;
}

bool apart(const TensorView& a, const TensorView& b) {
  const auto [a0, a1] = byte_span(a);
  const auto [b0, b1] = byte_span(b);
  if (a1 <= b0 || b1 <= a0) return true;
  for (std::size_t i = 0; i < a.sizes().size(); ++i) {
    if (a.shape[i] < 2 || a.stride[i] == 0) continue;  // the stride of one element may be anything
    if (apart_in_rows(a, b, std::abs(a.stride[i]) * size_of(a.dtype))) return true;
  }
  return false;
}

}  // namespace

void check_no_overlap(const char* op, const char* name, const TensorView& out,
                      const char* other_name, const TensorView& other) {
  if (!out.defined() || !other.defined() || out.numel() == 0 || other.numel() == 0) return;
  if (!(out.device == other.device)) return;
  if (!apart(out, other)) {
    invalid(op, name, "not overlap " + std::string(other_name) + " in memory", "does");
  }
}

}  // namespace annulus
