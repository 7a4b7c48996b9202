#include "testing/bad_calls.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "annulus/cuda/memory.h"

namespace annulus::testing {

TensorView AttemptTensors::input(const char* name, std::vector<std::int64_t> shape, DType t) {
  const TensorSpec spec{name, t, std::move(shape)};
  const std::vector<double> values(static_cast<std::size_t>(numel_of(spec)), 0.25);
  tensors_.push_back(std::make_unique<TestTensor>(spec, Layout::kContiguous, device_, values));
  return tensors_.back()->view();
}

TensorView AttemptTensors::output(const char* name, std::vector<std::int64_t> shape, DType t) {
  const TensorSpec spec{name, t, std::move(shape)};
  tensors_.push_back(std::make_unique<TestTensor>(spec, Layout::kContiguous, device_));
  return tensors_.back()->view();
}

Device AttemptTensors::other_device() const {
  return device_.type == DeviceType::kCPU ? cuda_device(0) : kCPU;
}

void AttemptTensors::verify_untouched() {
  synchronize(device_);
  for (auto& t : tensors_) {
    std::vector<std::uint64_t> bits;
    const std::string fault = t->collect(&bits);
    if (!fault.empty()) throw std::logic_error("a refused call wrote: " + fault);
    const auto written = [&](std::uint64_t b) { return b != poison_bits(t->spec().dtype); };
    if (!t->is_input() && std::any_of(bits.begin(), bits.end(), written)) {
      throw std::logic_error("a refused call wrote to " + t->spec().name);
    }
  }
}

void set_shape(TensorView& v, std::initializer_list<std::int64_t> shape) {
  v = contiguous(v.data, v.dtype, {shape.begin(), shape.size()}, v.device);
}

void shift_bytes(TensorView& v, int bytes) { v.data = static_cast<std::byte*>(v.data) + bytes; }

}  // namespace annulus::testing
