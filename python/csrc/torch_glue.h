// What every operator's torch.cpp shares: torch tensor -> TensorView, output and scratch allocation by
// torch, the current stream and device, and errors that Python can turn into typed exceptions.
//
// Only the stable part of libtorch is used (torch/csrc/stable, the C shim), so one binary built
// against torch 2.10 loads in every later version.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "annulus/core/checked.h"
#include "annulus/core/context.h"
#include "annulus/core/errors.h"
#include "annulus/core/tensor.h"

#if !defined(TORCH_TARGET_VERSION)
#error \
    "compile with -DTORCH_TARGET_VERSION=0x020a000000000000, so that torch 2.10 can load the result"
#endif

// Only CUDA builds of torch have it. Weak, so that a module built against a CPU-only torch loads in
// both kinds.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream)
    __attribute__((weak));
struct CUDAStreamGuardOpaque;
extern "C" AOTITorchError aoti_torch_create_cuda_stream_guard(void* stream, int32_t device_index,
                                                              CUDAStreamGuardOpaque** guard)
    __attribute__((weak));
extern "C" AOTITorchError aoti_torch_delete_cuda_stream_guard(CUDAStreamGuardOpaque* guard)
    __attribute__((weak));

namespace annulus::torch_glue {

using Tensor = torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// torch carries a C++ exception to Python as a RuntimeError with the plain message; errors.py reads
// the type back from the front of it.
template <class F>
auto typed_errors(F&& call) {
  try {
    return std::forward<F>(call)();
  } catch (const InvalidArgument& e) {
    throw std::runtime_error(std::string("annulus.InvalidArgument: ") + e.what());
  } catch (const NotSupported& e) {
    throw std::runtime_error(std::string("annulus.NotSupported: ") + e.what());
  } catch (const RankLost& e) {
    throw std::runtime_error(
        "annulus.RankLost: rank=" + std::to_string(e.rank) + " hop=" + std::to_string(e.hop) +
        " direction=" + (e.direction == RankLost::Direction::kSend ? "send" : "receive") +
        " waited_s=" + std::to_string(e.waited_s) + ": " + e.what());
  } catch (const DeviceError& e) {
    throw std::runtime_error(std::string("annulus.DeviceError: ") + e.what());
  }
}

inline std::string argument(const char* op, const char* name) {
  return "[" + std::string(op) + "] " + name;
}

// A value of an argument that torch passes as text.
template <class E>
struct Choice {
  const char* name;
  E value;
};

template <class E, std::size_t n>
E chosen(const char* op, const char* argument_name, const std::string& text,
         const std::array<Choice<E>, n>& choices) {
  std::string names;
  for (std::size_t i = 0; i < n; ++i) {
    if (text == choices[i].name) return choices[i].value;
    names += i == 0 ? "" : i + 1 < n ? ", " : " or ";
    names += choices[i].name;
  }
  throw InvalidArgument(argument(op, argument_name) + " must be " + names + " but is '" + text +
                        "'");
}

// A dtype of torch's that is none of ours. torch keeps these numbers: they are part of its files.
inline std::string foreign_dtype_name(std::int32_t code) {
  switch (code) {
    case 0:
      return "uint8";
    case 1:
      return "int8";
    case 2:
      return "int16";
    case 8:
    case 9:
    case 10:
      return "a complex one";
    default:
      return "number " + std::to_string(code) + " of torch's list";
  }
}

inline DType dtype_from_torch(const char* op, const char* name, const Tensor& t) {
  std::int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  if (code == aoti_torch_dtype_float32()) return DType::kF32;
  if (code == aoti_torch_dtype_bfloat16()) return DType::kBF16;
  if (code == aoti_torch_dtype_float16()) return DType::kF16;
  if (code == aoti_torch_dtype_float64()) return DType::kF64;
  if (code == aoti_torch_dtype_int64()) return DType::kI64;
  if (code == aoti_torch_dtype_int32()) return DType::kI32;
  if (code == aoti_torch_dtype_bool()) return DType::kBool;
  throw InvalidArgument(
      argument(op, name) +
      " must have a dtype that annulus knows (f64, f32, f16, bf16, i64, i32, bool) but has " +
      foreign_dtype_name(code));
}

inline std::int32_t dtype_to_torch(DType t) {
  switch (t) {
    case DType::kF64:
      return aoti_torch_dtype_float64();
    case DType::kF32:
      return aoti_torch_dtype_float32();
    case DType::kF16:
      return aoti_torch_dtype_float16();
    case DType::kBF16:
      return aoti_torch_dtype_bfloat16();
    case DType::kI32:
      return aoti_torch_dtype_int32();
    case DType::kI64:
      return aoti_torch_dtype_int64();
    case DType::kBool:
      return aoti_torch_dtype_bool();
  }
  throw InvalidArgument("[torch] dtype is not one of annulus's");
}

// A view of the tensor's own memory: nothing is copied, whatever the strides.
inline TensorView view_of(const char* op, const char* name, const Tensor& t) {
  if (!t.defined()) throw InvalidArgument(argument(op, name) + " must be a tensor but is None");
  TensorView v;
  v.dtype = dtype_from_torch(op, name, t);
  std::int32_t device_type = 0;
  std::int32_t device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device_index));
  if (device_type == aoti_torch_device_type_cuda()) {
    v.device = cuda_device(device_index);
  } else if (device_type != aoti_torch_device_type_cpu()) {
    throw InvalidArgument(argument(op, name) +
                          " must be on a CPU or CUDA device but is on torch's device type number " +
                          std::to_string(device_type));
  }
  const std::int64_t rank = t.dim();
  if (rank > kMaxRank) {
    throw InvalidArgument(argument(op, name) + " must have at most " + std::to_string(kMaxRank) +
                          " dimensions but has " + std::to_string(rank));
  }
  v.rank = static_cast<int>(rank);
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &strides));
  for (std::size_t i = 0; i < static_cast<std::size_t>(rank); ++i) {
    v.shape[i] = sizes[i];
    v.stride[i] = strides[i];
  }
  v.data = t.data_ptr();
  return v;
}

inline TensorView view_of(const char* op, const char* name, const std::optional<Tensor>& t) {
  return t ? view_of(op, name, *t) : TensorView{};
}

// A tensor of torch's allocator, uninitialised, with the given strides (in elements).
inline Tensor new_strided(const char* op, const char* name, std::span<const std::int64_t> size,
                          std::span<const std::int64_t> stride, std::int32_t torch_dtype,
                          Device device) {
  const bool on_cuda = device.type == DeviceType::kCUDA;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<std::int64_t>(size.size()), size.data(), stride.data(), torch_dtype,
      on_cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
      on_cuda ? device.index : 0, &handle);
  if (error != TORCH_SUCCESS) {
    throw DeviceError(argument(op, name) + " could not be allocated: torch has no room for shape " +
                      shape_string(size) + " on " + to_string(device));
  }
  return Tensor(handle);
}

// What stands where an output was not asked for (an op cannot return an undefined tensor).
inline Tensor nothing(const char* op, const char* name, DType dtype, Device device) {
  const std::array<std::int64_t, 1> zero{0}, one{1};
  return new_strided(op, name, zero, one, dtype_to_torch(dtype), device);
}

// Outputs are described first, as views without memory: the library checks the inputs and counts its
// scratch from the description, so that a bad call has allocated nothing. allocate() then gives the
// view its memory, and returns the tensor that keeps it.

// A dense row-major view shaped as `like`. Extents of 0 count as 1, as torch's own dense strides do.
inline TensorView dense_like(const char* op, const TensorView& like) {
  TensorView v = like;
  v.data = nullptr;
  std::int64_t stride = 1;
  for (std::size_t i = static_cast<std::size_t>(std::max(v.rank, 0)); i-- > 0;) {
    v.stride[i] = stride;
    stride = checked_mul(stride, std::max<std::int64_t>(v.shape[i], 1), op);
  }
  return v;
}

// An output that was not asked for: not defined(), but allocate() knows what (0,) to put there.
inline TensorView absent(DType dtype, Device device) {
  TensorView v;
  v.dtype = dtype;
  v.device = device;
  return v;
}

inline TensorView dense(const char* op, std::initializer_list<std::int64_t> shape, DType dtype,
                        Device device) {
  TensorView v = absent(dtype, device);
  v.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), v.shape.begin());
  return dense_like(op, v);
}

inline Tensor allocate(const char* op, const char* name, TensorView& v) {
  if (!v.defined()) return nothing(op, name, v.dtype, v.device);
  const auto rank = static_cast<std::size_t>(v.rank);
  Tensor t = new_strided(op, name, {v.shape.data(), rank}, {v.stride.data(), rank},
                         dtype_to_torch(v.dtype), v.device);
  v.data = t.data_ptr();
  return t;
}

// Makes `device` the current one for the length of a call, and knows torch's stream on it.
class CurrentDevice {
 public:
  CurrentDevice(const char* op, Device device) {
    if (device.type != DeviceType::kCUDA) return;
    if (aoti_torch_get_current_cuda_stream == nullptr) {
      throw NotSupported("[" + std::string(op) + "] this torch has no CUDA, so no CUDA stream");
    }
    guard_.emplace(device.index);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream_));
  }
  void* stream() const { return stream_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* stream_ = nullptr;
};

// Makes `stream` torch's on this thread, for what it allocates there, too: a new thread has the default one.
class CurrentStream {
 public:
  CurrentStream(Device device, void* stream) {
    if (device.type != DeviceType::kCUDA) return;
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_stream_guard(stream, device.index, &guard_));
  }
  ~CurrentStream() {
    if (guard_ != nullptr) (void)aoti_torch_delete_cuda_stream_guard(guard_);
  }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  CUDAStreamGuardOpaque* guard_ = nullptr;
};

// Memory the library asks for starts on such a boundary. torch aligns CPU memory to 64 bytes only.
inline constexpr std::size_t kAlignment = 256;

// What annulus.last_backend() says: autograd runs backwards in threads of its own, so the module keeps what
// the Contexts of all its calls said (module.cpp).
void keep_backends(const Context& context) noexcept;

// How many threads a call may have (module.cpp).
int call_threads();

// Device, stream, thread count and scratch of one call, all torch's own: the library allocates
// nothing behind torch's back, and torch's memory statistics show every byte.
class Call {
 public:
  Call(const char* op, Device device, std::size_t workspace_bytes)
      : current_(op, device), workspace_(allocate(op, device, workspace_bytes)) {
    context.stream = current_.stream();
    context.threads = call_threads();
    context.allocator = &workspace_.allocator;
  }
  ~Call() { keep_backends(context); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Context context;

 private:
  struct Scratch {
    std::optional<Tensor> tensor;  // keeps the memory
    BorrowedWorkspace allocator;
  };

  static Scratch allocate(const char* op, Device device, std::size_t bytes) {
    if (bytes == 0) return {std::nullopt, BorrowedWorkspace(nullptr, 0)};
    const bool pad = device.type == DeviceType::kCPU;
    const std::array<std::int64_t, 1> size{
        static_cast<std::int64_t>(bytes + (pad ? kAlignment : 0))};
    const std::array<std::int64_t, 1> stride{1};
    Tensor t = new_strided(op, "workspace", size, stride, aoti_torch_dtype_uint8(), device);
    void* start = t.data_ptr();
    std::size_t room = static_cast<std::size_t>(size[0]);
    if (pad) std::align(kAlignment, bytes, start, room);
    return {std::move(t), BorrowedWorkspace(start, bytes)};
  }

  CurrentDevice current_;
  Scratch workspace_;
};

// The gradients that a backward is asked for: bit i of `needed` is the forward's tensor i. They are
// added in that order, described as they will be, and allocated once the call is known to be good.
class Gradients {
 public:
  Gradients(const char* op, std::int64_t needed) : op_(op), needed_(needed) {}
  bool needs(std::size_t i) const { return (needed_ >> i & 1) != 0; }

  // `place` becomes the description where this gradient is asked for, and stays undefined elsewhere.
  void add(const char* name, TensorView& place, const TensorView& description) {
    if (needs(count_++)) {
      if (!description.defined()) {
        throw InvalidArgument(argument(op_, name) +
                              " must not be asked for where its input is left out, but is");
      }
      place = description;
      wanted_.push_back({name, &place});
    }
  }
  std::vector<Tensor> allocate() const {
    std::vector<Tensor> result;
    for (const auto& [name, place] : wanted_) {
      result.push_back(torch_glue::allocate(op_, name, *place));
    }
    return result;
  }

 private:
  const char* op_;
  std::int64_t needed_;
  std::size_t count_ = 0;
  std::vector<std::pair<const char*, TensorView*>> wanted_;
};

}  // namespace annulus::torch_glue
