#include "testing/memory/tensors.h"

#include <cstring>
#include <fstream>
#include <utility>

#include "annulus/core/values.h"
#include "annulus/cuda/memory.h"
#include "testing/memory/allocator.h"

namespace annulus::testing {

const char* name_of(Layout layout) {
  constexpr const char* kNames[] = {"contiguous",           "transposed", "padded rows",  "packed",
                                    "expanded or reversed", "odd offset", "reversed rows"};
  return kNames[static_cast<std::size_t>(layout)];
}

// The low bytes come first on every machine we run on.
std::uint64_t encode(double value, DType t) {
  std::uint64_t bits = 0;
  visit_stored(t, [&]<class T>() {
    const auto stored = static_cast<T>(static_cast<wide_t<T>>(value));
    std::memcpy(&bits, &stored, sizeof stored);
  });
  return bits;
}

double decode(std::uint64_t bits, DType t) { return decode_all({bits}, t).front(); }

std::vector<double> decode_all(const std::vector<std::uint64_t>& bits, DType t) {
  std::vector<double> values(bits.size());
  visit_stored(t, [&]<class T>() {
    for (std::size_t i = 0; i < bits.size(); ++i) {
      T stored;
      std::memcpy(&stored, &bits[i], sizeof stored);
      values[i] = static_cast<double>(static_cast<wide_t<T>>(stored));
    }
  });
  return values;
}

std::uint64_t poison_bits(DType t) {
  // f64, f32, f16, bf16, i32, i64, bool
  constexpr std::uint64_t kPoison[] = {0x7ff5a5a5a5a5a5a5, 0x7fa5a5a5,         0x7d5a, 0x7fa5,
                                       0x5a5a5a5a,         0x5a5a5a5a5a5a5a5a, 0x5a};
  return kPoison[static_cast<std::size_t>(t)];
}

std::size_t free_bytes(Device device) {
  if (device.type == DeviceType::kCUDA) return cuda::free_bytes(device.index);
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::size_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return 0;
}

void fill_pattern(std::byte* p, std::size_t bytes, const void* pattern, std::size_t size) {
  constexpr std::size_t kNear = 16384;  // what is copied from stays in the nearest cache
  std::size_t done = std::min(size, bytes);
  if (done > 0) std::memcpy(p, pattern, done);
  while (done < bytes) {
    const std::size_t more = std::min({done, kNear / size * size, bytes - done});
    std::memcpy(p + done, p, more);
    done += more;
  }
}

void round_to(DType t, std::span<double> values) {
  visit_stored(t, [&]<class T>() {
    using Wide = wide_t<T>;
    for (double& v : values) {
      v = static_cast<double>(static_cast<Wide>(static_cast<T>(static_cast<Wide>(v))));
    }
  });
}

namespace {

// Row-major slices along the first dimension all hold the same bits.
bool equal_slices(const TensorSpec& spec, const std::vector<double>& values) {
  if (spec.shape.empty() || spec.shape[0] < 2 || values.empty()) return false;
  const std::size_t slice = values.size() / static_cast<std::size_t>(spec.shape[0]);
  return std::memcmp(values.data(), values.data() + slice,
                     (values.size() - slice) * sizeof(double)) == 0;
}

// f with the unsigned type of an element's size.
template <class F>
void visit_word(DType t, F&& f) {
  switch (size_of(t)) {
    case 1:
      return f.template operator()<std::uint8_t>();
    case 2:
      return f.template operator()<std::uint16_t>();
    case 4:
      return f.template operator()<std::uint32_t>();
    default:
      return f.template operator()<std::uint64_t>();
  }
}

}  // namespace

TestTensor::TestTensor(const TensorSpec& spec, Layout layout, Device device,
                       const std::vector<double>* values)
    : spec_(spec),
      view_(contiguous(nullptr, spec.dtype, spec.shape, device)),
      input_(values != nullptr) {
  lay_out(layout, values);
  const auto size = static_cast<std::size_t>(size_of(spec_.dtype));
  const std::uint64_t poison = poison_bits(spec_.dtype);
  const std::size_t bytes = static_cast<std::size_t>(elements_) * size;
  before_ = TestMemory(device, TestMemory::Kind::kHost, bytes);
  fill_pattern(before_.data(), bytes, &poison, size);
  if (input_) {
    TensorView image = view_;
    image.data = before_.data() + first_ * size_of(spec_.dtype);
    store_values(image, *values);
  }
  memory_ = TestMemory(device, TestMemory::Kind::kDevice, bytes);
  queue_copy(device, memory_.data(), before_.data(), bytes);
  if (view_.numel() > 0 || layout != Layout::kContiguous) {
    view_.data = memory_.data() + first_ * size_of(spec_.dtype);
  }
}

void TestTensor::lay_out(Layout layout, const std::vector<double>* values) {
  const std::size_t rank = spec_.shape.size();

  // The order of the dimensions in memory, outermost first.
  std::array<std::size_t, kMaxRank> order{};
  for (std::size_t i = 0; i < rank; ++i) order[i] = i;
  if (layout == Layout::kTransposed && rank >= 3) std::swap(order[rank - 3], order[rank - 2]);
  if (layout == Layout::kTransposed && rank == 2) std::swap(order[0], order[1]);

  auto& stride = view_.stride;
  std::int64_t lead = 0;  // elements before element (0, ..., 0)
  const bool expanded = layout == Layout::kExpanded;
  const bool reversed = expanded && !(values != nullptr && equal_slices(spec_, *values));
  std::int64_t step = reversed ? 2 : 1;
  for (std::size_t i = rank; i-- > 0;) {
    const std::size_t dim = order[i];
    stride[dim] = step;
    step *= std::max<std::int64_t>(spec_.shape[dim], 1);
    if (i + 1 == rank) {  // the innermost: what follows it is a whole row
      if (layout == Layout::kPaddedRows) step += 3;
      if (layout == Layout::kPacked && rank == 1) stride[dim] = 3, lead = 1, step *= 3;
      if (layout == Layout::kPacked && rank > 1) lead = step, step *= 3;
    }
  }
  if (rank > 0 && expanded && spec_.shape[0] > 0) {
    if (reversed) lead = (spec_.shape[0] - 1) * stride[0];
    stride[0] = reversed ? -stride[0] : 0;
  }
  if (layout == Layout::kOddOffset) lead = 1;
  for (std::size_t dim = 0; layout == Layout::kReversed && dim + 1 < rank; ++dim) {
    lead += std::max<std::int64_t>(spec_.shape[dim] - 1, 0) * stride[dim];
    stride[dim] = -stride[dim];
  }
  first_ = kCanaryElements + lead;
  elements_ = 2 * kCanaryElements + lead + std::max<std::int64_t>(step, 1);
}

void TestTensor::fetch() {
  after_ = TestMemory(memory_.device(), TestMemory::Kind::kHost, memory_.bytes());
  ticket_ = queue_copy(memory_.device(), after_.data(), memory_.data(), memory_.bytes());
}

void TestTensor::settle() {
  fetch();
  settled_ = std::move(after_);
}

std::string TestTensor::settled() {
  if (!settled_.defined()) return {};
  finish(memory_.device(), ticket_);
  std::vector<std::byte> image(settled_.data(), settled_.data() + settled_.bytes());
  const std::string fault = judge(image.data(), nullptr);
  before_ = std::move(settled_);
  settled_ = {};
  input_ = true;
  return fault;
}

std::string TestTensor::collect(std::vector<std::uint64_t>* bits) {
  if (!after_.defined()) fetch();
  finish(memory_.device(), ticket_);
  std::string fault = settled();
  const std::string own = judge(after_.data(), bits);
  after_ = {};
  return fault.empty() ? own : fault;
}

// The image is spoilt.
std::string TestTensor::judge(std::byte* image, std::vector<std::uint64_t>* bits) const {
  const auto size = static_cast<std::size_t>(size_of(spec_.dtype));
  visit_word(spec_.dtype, [&]<class Word>() {
    auto* elements = reinterpret_cast<Word*>(image) + first_;
    if (bits != nullptr) {
      bits->resize(static_cast<std::size_t>(view_.numel()));
      for_each_offset(view_, [&](std::size_t i, std::int64_t at) { (*bits)[i] = elements[at]; });
    }
    if (input_) return;  // an output's elements may change; everything around them may not
    const auto poison = static_cast<Word>(poison_bits(spec_.dtype));
    for_each_offset(view_, [&](std::size_t, std::int64_t at) { elements[at] = poison; });
  });
  if (std::memcmp(image, before_.data(), before_.bytes()) == 0) return {};
  std::size_t at = 0;
  while (image[at] == before_.data()[at]) ++at;
  const std::int64_t element = static_cast<std::int64_t>(at / size) - first_;
  const bool canary = static_cast<std::int64_t>(at / size) < kCanaryElements ||
                      static_cast<std::int64_t>(at / size) >= elements_ - kCanaryElements;
  return (canary   ? "canary of "
          : input_ ? "input "
                   : "gap in ") +
         spec_.name + " was overwritten, first at element " + std::to_string(element) +
         " from its start";
}

TestTensors::TestTensors(const std::vector<TensorSpec>& specs, Device device, const Values* values,
                         const LayoutOf& layout_of)
    : device_(device) {
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const bool given = values != nullptr && !specs[i].derived;
    tensors_.emplace_back(specs[i], layout_of(i), device, given ? &(*values)[i] : nullptr);
    views_.push_back(tensors_.back().view());
  }
}

void TestTensors::queue_prepare(const Call& call, int threads) {
  if (!call.prepare) return;
  Context context;
  context.threads = threads;
  // The library's own allocator gives memory back to the device whenever that has nothing to do.
  if (device_.type == DeviceType::kCUDA) scratch_ = std::make_shared<TestAllocator>();
  context.allocator = scratch_.get();
  call.prepare(views_, context);
  for (TestTensor& t : tensors_) {
    if (!t.is_input()) t.settle();
  }
}

std::string TestTensors::prepare(const Call& call, int threads) {
  queue_prepare(call, threads);
  finish(device_);
  std::string fault = scratch_ ? scratch_->fault() : "";
  for (TestTensor& t : tensors_) {
    const std::string beside = t.settled();
    if (fault.empty()) fault = beside;
  }
  return fault;
}

void TestTensors::fetch() {
  for (TestTensor& t : tensors_) t.fetch();
}

std::string TestTensors::collect(Bits* bits) {
  std::string fault;
  for (TestTensor& t : tensors_) {
    const std::string own = t.collect(bits != nullptr ? &bits->emplace_back() : nullptr);
    if (fault.empty()) fault = own;
  }
  if (fault.empty() && scratch_) fault = scratch_->fault();
  return fault;
}

Dense::Dense(Device device, DType dtype, std::vector<std::int64_t> shape)
    : dtype_(dtype), shape_(std::move(shape)) {
  const std::int64_t count = contiguous(nullptr, dtype, shape_).numel();
  buffer_ = Buffer(device, static_cast<std::size_t>(count * size_of(dtype)));
}

Dense& Dense::normal(std::uint64_t seed) {
  Rng rng(seed);
  std::vector<double> values(static_cast<std::size_t>(view().numel()));
  for (double& v : values) v = rng.normal();
  return write(values);
}

Dense& Dense::write(const std::vector<double>& values) {
  if (buffer_.device() == kCPU) {
    store_values(view(), values);
  } else {
    Dense host(kCPU, dtype_, shape_);
    host.write(values);
    copy_bytes(buffer_.data(), buffer_.device(), host.buffer_.data(), kCPU, buffer_.bytes());
  }
  return *this;
}

std::vector<std::byte> Dense::bytes() const {
  synchronize(buffer_.device());
  std::vector<std::byte> host(buffer_.bytes());
  copy_bytes(host.data(), kCPU, buffer_.data(), buffer_.device(), host.size());
  return host;
}

std::vector<double> Dense::values() const {
  std::vector<std::byte> host = bytes();
  return load_values<double>(contiguous(host.data(), dtype_, shape_));
}

TensorView Dense::part(std::size_t dim, std::int64_t first, std::int64_t count) const {
  TensorView v = view();
  v.data = static_cast<std::byte*>(v.data) + first * v.stride[dim] * size_of(dtype_);
  v.shape[dim] = count;
  return v;
}

}  // namespace annulus::testing
