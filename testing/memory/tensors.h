// Tensors for a case: values drawn as double and rounded to the dtype, laid out in one of seven ways
// between two canaries, on either device. What a call may not touch is compared byte by byte
// afterwards: all of an input, and of an output the canaries and the gaps between its elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/core/tensor.h"
#include "testing/case.h"
#include "testing/memory/memory.h"

namespace annulus::testing {

class TestAllocator;

enum class Layout : std::uint8_t {
  kContiguous,  // dense, aligned; an empty tensor is a null pointer
  kTransposed,  // (B, L, H, D) in memory for (B, H, L, D); a matrix is stored by columns
  kPaddedRows,  // a slice of rows three elements longer
  kPacked,      // the middle one of three tensors interleaved by row, as q, k and v often are
  kExpanded,    // stride 0 over the first dimension where the values allow it; otherwise that
                // dimension reversed (negative stride) and every second element used
  kOddOffset,   // dense but one element off: aligned to its element and to nothing more
  kReversed,  // dense, and every dimension but the last reversed: negative strides, aligned so that
              // kernels take whole vectors
};
inline constexpr std::array<Layout, 7> kLayouts = {
    Layout::kContiguous, Layout::kTransposed, Layout::kPaddedRows, Layout::kPacked,
    Layout::kExpanded,   Layout::kOddOffset,  Layout::kReversed};
const char* name_of(Layout layout);

inline constexpr std::int64_t kCanaryElements = 1024;

// Raw bits of one element <-> its value. Rounding is to nearest even.
std::uint64_t encode(double value, DType t);
double decode(std::uint64_t bits, DType t);
std::vector<double> decode_all(const std::vector<std::uint64_t>& bits, DType t);
// A signalling NaN, which no arithmetic produces: what every output holds before a call. Integers
// get a pattern of their own.
std::uint64_t poison_bits(DType t);

// Memory that this process may still take on the device; 0 where the system does not say.
std::size_t free_bytes(Device device);

// Fills memory with one pattern of `size` bytes, again and again. By copies of what is there already: a
// case has more canaries and scratch than numbers, and a store an element was a quarter of its time.
void fill_pattern(std::byte* p, std::size_t bytes, const void* pattern, std::size_t size);

// Rounds to what the dtype can hold.
void round_to(DType t, std::span<double> values);

class TestTensor {
 public:
  // An input with these values, in row-major order; without them an output full of poison.
  TestTensor(const TensorSpec& spec, Layout layout, Device device,
             const std::vector<double>* values = nullptr);

  const TensorView& view() const { return view_; }
  const TensorSpec& spec() const { return spec_; }
  bool is_input() const { return input_; }

  // Has the memory brought back from the device as it is when all that was queued before is done.
  void fetch();

  // Of what was fetched, or of the memory now: says what was written that must not be, or nothing. For
  // an output `bits` receives its elements in row-major order.
  std::string collect(std::vector<std::uint64_t>* bits = nullptr);

  // Turns an output that what was queued before has written into an input: what it then holds must not
  // change any more. What was written beside it, collect() or settled() says.
  void settle();
  std::string settled();

 private:
  void lay_out(Layout layout, const std::vector<double>* values);
  std::string judge(std::byte* image, std::vector<std::uint64_t>* bits) const;

  TensorSpec spec_;
  TensorView view_;
  std::int64_t first_ = 0;     // element index of element (0, ..., 0)
  std::int64_t elements_ = 0;  // of the whole buffer, canaries included
  TestMemory memory_;
  TestMemory before_, after_,
      settled_;        // images of it; the last two where they have been asked for
  Ticket ticket_ = 0;  // of the last that was
  bool input_ = false;
};

using Bits = std::vector<std::vector<std::uint64_t>>;  // one entry an output

// Inputs or outputs of a call.
class TestTensors {
 public:
  using LayoutOf = std::function<Layout(std::size_t index)>;
  static Layout contiguous(std::size_t) { return Layout::kContiguous; }

  // Inputs have values, but for derived ones; outputs have none.
  TestTensors(const std::vector<TensorSpec>& specs, Device device, const Values* values = nullptr,
              const LayoutOf& layout_of = contiguous);

  Views views() const { return views_; }
  // Calls `prepare`, which fills the derived ones, and settles them. The first fault, or nothing.
  std::string prepare(const Call& call, int threads = 0);
  // The same without waiting for the device: collect() says whether there was a fault.
  void queue_prepare(const Call& call, int threads = 0);
  void fetch();
  // Of all of them: the first fault, or nothing.
  std::string collect(Bits* bits = nullptr);

 private:
  Device device_;
  std::shared_ptr<TestAllocator> scratch_;  // of `prepare` on CUDA
  std::vector<TestTensor> tensors_;
  std::vector<TensorView> views_;
};

// A dense tensor on either device, for what calls the library or a definition by hand.
class Dense {
 public:
  Dense(Device device, DType dtype, std::vector<std::int64_t> shape);
  Dense& normal(std::uint64_t seed);
  Dense& write(const std::vector<double>& values);
  std::vector<std::byte> bytes() const;
  std::vector<double> values() const;
  TensorView view() const { return contiguous(buffer_.data(), dtype_, shape_, buffer_.device()); }
  // Tokens first .. first + count - 1 of a (B, H, L, D) tensor.
  TensorView tokens(std::int64_t first, std::int64_t count) const { return part(2, first, count); }
  TensorView batch(std::int64_t b) const { return part(0, b, 1); }

 private:
  TensorView part(std::size_t dim, std::int64_t first, std::int64_t count) const;

  DType dtype_;
  std::vector<std::int64_t> shape_;
  Buffer buffer_;
};

}  // namespace annulus::testing
