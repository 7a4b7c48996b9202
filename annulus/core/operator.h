// What every operator's public function does before a kernel runs: it checks its arguments by one list,
// which reads as the documentation of the call, and picks the backend of their device. (Its scratch:
// core/scratch.h.) And how it makes itself known.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/core/check.h"
#include "annulus/core/context.h"
#include "annulus/core/device.h"
#include "annulus/core/errors.h"
#include "annulus/core/info.h"
#include "annulus/core/tensor.h"

namespace annulus {

// One static of this in an operator's .cpp puts it among operators(), so no central list exists.
class OperatorRegistration {
 public:
  explicit OperatorRegistration(OperatorInfo info);
};

// A few values without a heap: the dtypes or the extents that an argument may have.
template <class T, std::size_t most>
struct Few {
  std::array<T, most> value{};
  std::size_t count = 0;

  Few() = default;
  Few(std::initializer_list<T> from) : count(from.size()) {
    std::copy(from.begin(), from.end(), value.begin());
  }
  Few(std::span<const T> from) : count(from.size()) {
    std::copy(from.begin(), from.end(), value.begin());
  }
  std::span<const T> all() const { return {value.data(), count}; }
};

// An extent that the argument itself decides.
inline constexpr std::int64_t kAny = -1;

struct Argument {
  const char* name = "";
  TensorView view = {};
  Few<DType, 4> dtypes = {};
  Few<std::int64_t, kMaxRank> shape = {};  // its rank, and extents or kAny
  bool output = false;
  bool optional = false;
  bool scalar_too = false;        // a rank of 0 will do in place of `shape`
  std::string_view same_as = {};  // the input that an output may be itself: same data, same strides
};

// The arguments of one call, in the order in which they are checked: what an extent is read from comes
// before what is compared with it. The first of them leads: all others are on its device.
class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) { list_.reserve(24); }

  void add(const Argument& argument) { list_.push_back(argument); }
  void input(const char* name, const TensorView& view, Few<DType, 4> dtypes,
             Few<std::int64_t, kMaxRank> shape) {
    add({.name = name, .view = view, .dtypes = dtypes, .shape = shape});
  }
  void optional_input(const char* name, const TensorView& view, Few<DType, 4> dtypes,
                      Few<std::int64_t, kMaxRank> shape) {
    add({.name = name, .view = view, .dtypes = dtypes, .shape = shape, .optional = true});
  }
  void output(const char* name, const TensorView& view, Few<DType, 4> dtypes,
              Few<std::int64_t, kMaxRank> shape) {
    add({.name = name, .view = view, .dtypes = dtypes, .shape = shape, .output = true});
  }
  void optional_output(const char* name, const TensorView& view, Few<DType, 4> dtypes,
                       Few<std::int64_t, kMaxRank> shape) {
    add({.name = name,
         .view = view,
         .dtypes = dtypes,
         .shape = shape,
         .output = true,
         .optional = true});
  }

  // Throws InvalidArgument at the first argument that is missing or has a wrong rank, size, address,
  // dtype, shape or device, at an output two of whose elements share an address, at one that overlaps
  // another argument, and at a context with a negative number of threads.
  void check(const Context& context) const;
  // The same for a question about sizes, which needs no data.
  void check_sizes() const;

 private:
  void check_each(bool with_data) const;

  const char* op_;
  std::vector<Argument> list_;
};

// The lists of the calls that this thread makes while it lives: what a test derives the calls from
// that must be refused.
class ArgumentsRecorder {
 public:
  struct Call {
    std::string op;
    std::vector<Argument> arguments;
  };

  ArgumentsRecorder();
  ~ArgumentsRecorder();
  ArgumentsRecorder(const ArgumentsRecorder&) = delete;
  ArgumentsRecorder& operator=(const ArgumentsRecorder&) = delete;

  std::vector<Call> calls;

 private:
  ArgumentsRecorder* before_;
};

#ifdef ANNULUS_HAVE_CUDA  // which the files that pick a backend are compiled with

// Runs the backend of the device: cpu(), or cuda(), which a build without CUDA never compiles a call
// of, so that it may name functions that are not there.
template <class Cpu, class Cuda>
auto dispatch([[maybe_unused]] const char* op, Device device, Cpu&& cpu,
              [[maybe_unused]] Cuda&& cuda) -> decltype(cpu()) {
  if (device.type == DeviceType::kCPU) return cpu();
#if ANNULUS_HAVE_CUDA
  return cuda();
#else
  throw NotSupported("[" + std::string(op) +
                     "] device must be cpu: this build has no CUDA backend");
#endif
}

// What an operator says of its support on CUDA, where the build has it.
template <class Cuda>
Support cuda_support([[maybe_unused]] Cuda&& support) {
#if ANNULUS_HAVE_CUDA
  return support();
#else
  return {false, "this build has no CUDA backend (ANNULUS_CUDA=OFF)"};
#endif
}

#endif

}  // namespace annulus
