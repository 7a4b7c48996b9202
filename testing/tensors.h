// Tensors for a case: values drawn as double and rounded to the dtype, laid out in one of six ways
// between two canaries, on either device. What a call may not touch is compared byte by byte
// afterwards: all of an input, and of an output the canaries and the gaps between its elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/tensor.h"
#include "testing/case.h"

namespace annulus::testing {

enum class Layout : std::uint8_t {
  kContiguous,  // dense, aligned; an empty tensor is a null pointer
  kTransposed,  // (B, L, H, D) in memory for (B, H, L, D); a matrix is stored by columns
  kPaddedRows,  // a slice of rows three elements longer
  kPacked,      // the middle one of three tensors interleaved by row, as q, k and v often are
  kExpanded,    // stride 0 over the first dimension where the values allow it; otherwise that
                // dimension reversed (negative stride) and every second element used
  kOddOffset,   // dense but one element off: aligned to its element and to nothing more
};
inline constexpr std::array<Layout, 6> kLayouts = {Layout::kContiguous, Layout::kTransposed,
                                                   Layout::kPaddedRows, Layout::kPacked,
                                                   Layout::kExpanded,   Layout::kOddOffset};
const char* name_of(Layout layout);

inline constexpr std::int64_t kCanaryElements = 1024;

// Raw bits of one element <-> its value. Rounding is to nearest even.
std::uint64_t encode(double value, DType t);
double decode(std::uint64_t bits, DType t);
// A signalling NaN, which no arithmetic produces: what every output holds before a call. Integers
// get a pattern of their own.
std::uint64_t poison_bits(DType t);

std::int64_t numel_of(const TensorSpec& spec);

// Fills memory with one pattern of `size` bytes, again and again. By copies of what is there already: a
// case has more canaries and scratch than numbers, and a store an element was a quarter of its time.
void fill_pattern(std::byte* p, std::size_t bytes, const void* pattern, std::size_t size);

// Rounds to what the dtype can hold.
void round_to(DType t, std::span<double> values);

class TestTensor {
 public:
  // An input with these values, in row-major order.
  TestTensor(const TensorSpec& spec, Layout layout, Device device, std::span<const double> values);
  // An output full of poison.
  TestTensor(const TensorSpec& spec, Layout layout, Device device);

  TensorView view() const;
  const TensorSpec& spec() const { return spec_; }
  bool is_input() const { return input_; }

  // Brings the memory back from the device; says what was written that must not be, or nothing. For
  // an output `bits` receives its elements in row-major order.
  std::string collect(std::vector<std::uint64_t>* bits);

  // Turns an output that has been written into an input: what it holds now must not change any
  // more. Says what was written beside it, or nothing.
  std::string settle();

 private:
  void lay_out(Layout layout, std::span<const double> values);
  void fill_and_upload(std::span<const double> values);

  TensorSpec spec_;
  Device device_;
  std::array<std::int64_t, kMaxRank> stride_{};
  std::int64_t first_ = 0;            // element index of element (0, ..., 0)
  std::vector<std::int64_t> offset_;  // element index of every element, row-major
  std::int64_t elements_ = 0;         // of the whole buffer, canaries included
  std::vector<std::byte> before_;
  Buffer buffer_;
  bool null_ = false;
  bool input_ = false;
};

}  // namespace annulus::testing
