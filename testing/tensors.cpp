#include "testing/tensors.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace annulus::testing {

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return "contiguous";
    case Layout::kTransposed:
      return "transposed";
    case Layout::kPaddedRows:
      return "padded rows";
    case Layout::kPacked:
      return "packed";
    case Layout::kExpanded:
      return "expanded or reversed";
    case Layout::kOddOffset:
      return "odd offset";
  }
  return "unknown";
}

std::uint64_t encode(double value, DType t) {
  switch (t) {
    case DType::kF64:
      return std::bit_cast<std::uint64_t>(value);
    case DType::kF32:
      return std::bit_cast<std::uint32_t>(static_cast<float>(value));
    case DType::kF16:
      return float16(static_cast<float>(value)).bits;
    case DType::kBF16:
      return bfloat16(static_cast<float>(value)).bits;
    case DType::kI32:
      return static_cast<std::uint32_t>(static_cast<std::int32_t>(value));
    case DType::kI64:
      return static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
    case DType::kBool:
      return value != 0;
  }
  return 0;
}

double decode(std::uint64_t bits, DType t) {
  switch (t) {
    case DType::kF64:
      return std::bit_cast<double>(bits);
    case DType::kF32:
      return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    case DType::kF16: {
      float16 h;
      h.bits = static_cast<std::uint16_t>(bits);
      return static_cast<double>(static_cast<float>(h));
    }
    case DType::kBF16: {
      bfloat16 h;
      h.bits = static_cast<std::uint16_t>(bits);
      return static_cast<double>(static_cast<float>(h));
    }
    case DType::kI32:
      return static_cast<double>(static_cast<std::int32_t>(bits));
    case DType::kI64:
      return static_cast<double>(static_cast<std::int64_t>(bits));
    case DType::kBool:
      return bits != 0;
  }
  return 0;
}

std::uint64_t poison_bits(DType t) {
  switch (t) {
    case DType::kF64:
      return 0x7ff5a5a5a5a5a5a5ull;
    case DType::kF32:
      return 0x7fa5a5a5u;
    case DType::kF16:
      return 0x7d5au;
    case DType::kBF16:
      return 0x7fa5u;
    case DType::kI32:
      return 0x5a5a5a5au;
    case DType::kI64:
      return 0x5a5a5a5a5a5a5a5aull;
    case DType::kBool:
      return 0x5au;
  }
  return 0;
}

std::int64_t numel_of(const TensorSpec& spec) {
  std::int64_t n = 1;
  for (std::int64_t s : spec.shape) n *= s;
  return n;
}

void fill_pattern(std::byte* p, std::size_t bytes, const void* pattern, std::size_t size) {
  std::size_t done = std::min(size, bytes);
  if (done > 0) std::memcpy(p, pattern, done);
  while (done < bytes) {
    const std::size_t more = std::min(done, bytes - done);
    std::memcpy(p + done, p, more);
    done += more;
  }
}

void round_to(DType t, std::span<double> values) {
  if (t == DType::kF64) return;
  for (double& v : values) v = decode(encode(v, t), t);
}

namespace {

// Row-major slices along the first dimension all hold the same values.
bool equal_slices(const TensorSpec& spec, std::span<const double> values) {
  if (spec.shape.empty() || spec.shape[0] < 2 || values.empty()) return false;
  const std::size_t slice = values.size() / static_cast<std::size_t>(spec.shape[0]);
  for (std::size_t i = slice; i < values.size(); ++i) {
    if (std::bit_cast<std::uint64_t>(values[i]) !=
        std::bit_cast<std::uint64_t>(values[i % slice])) {
      return false;
    }
  }
  return true;
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
                       std::span<const double> values)
    : spec_(spec), device_(device), input_(true) {
  lay_out(layout, values);
  fill_and_upload(values);
}

TestTensor::TestTensor(const TensorSpec& spec, Layout layout, Device device)
    : spec_(spec), device_(device) {
  lay_out(layout, {});
  fill_and_upload({});
}

void TestTensor::lay_out(Layout layout, std::span<const double> values) {
  const std::size_t rank = spec_.shape.size();
  const std::int64_t count = numel_of(spec_);
  null_ = count == 0 && layout == Layout::kContiguous;

  // The order of the dimensions in memory, outermost first.
  std::array<std::size_t, kMaxRank> order{};
  for (std::size_t i = 0; i < rank; ++i) order[i] = i;
  if (layout == Layout::kTransposed && rank >= 3) std::swap(order[rank - 3], order[rank - 2]);
  if (layout == Layout::kTransposed && rank == 2) std::swap(order[0], order[1]);

  std::int64_t lead = 0;  // elements before element (0, ..., 0)
  std::int64_t step = 1;
  const bool reversed = layout == Layout::kExpanded && !equal_slices(spec_, values);
  if (reversed) step = 2;
  for (std::size_t i = rank; i-- > 0;) {
    const std::size_t dim = order[i];
    stride_[dim] = step;
    step *= std::max<std::int64_t>(spec_.shape[dim], 1);
    if (i + 1 == rank) {  // the innermost: what follows it is a whole row
      if (layout == Layout::kPaddedRows) step += 3;
      if (layout == Layout::kPacked && rank == 1) stride_[dim] = 3, lead = 1, step *= 3;
      if (layout == Layout::kPacked && rank > 1) lead = step, step *= 3;
    }
  }
  if (rank > 0 && layout == Layout::kExpanded && spec_.shape[0] > 0) {
    if (reversed) {
      lead = (spec_.shape[0] - 1) * stride_[0];
      stride_[0] = -stride_[0];
    } else {
      stride_[0] = 0;
    }
  }
  if (layout == Layout::kOddOffset) lead = 1;
  first_ = kCanaryElements + lead;
  elements_ = 2 * kCanaryElements + lead + std::max<std::int64_t>(step, 1);

  offset_.resize(static_cast<std::size_t>(count));
  std::array<std::int64_t, kMaxRank> index{};
  std::int64_t at = first_;
  for (std::int64_t& o : offset_) {
    o = at;
    for (std::size_t d = rank; d-- > 0;) {
      at += stride_[d];
      if (++index[d] < spec_.shape[d]) break;
      at -= stride_[d] * spec_.shape[d];
      index[d] = 0;
    }
  }
}

void TestTensor::fill_and_upload(std::span<const double> values) {
  const auto size = static_cast<std::size_t>(size_of(spec_.dtype));
  const std::uint64_t poison =
      poison_bits(spec_.dtype);  // little-endian on every machine we run on
  before_.resize(static_cast<std::size_t>(elements_) * size);
  fill_pattern(before_.data(), before_.size(), &poison, size);
  visit_word(spec_.dtype, [&]<class Word>() {
    auto* elements = reinterpret_cast<Word*>(before_.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      elements[offset_[i]] = static_cast<Word>(encode(values[i], spec_.dtype));
    }
  });
  buffer_ = Buffer(device_, before_.size());
  copy_bytes(buffer_.data(), device_, before_.data(), kCPU, before_.size());
}

TensorView TestTensor::view() const {
  TensorView v;
  v.dtype = spec_.dtype;
  v.device = device_;
  v.rank = static_cast<int>(spec_.shape.size());
  for (std::size_t i = 0; i < spec_.shape.size(); ++i) {
    v.shape[i] = spec_.shape[i];
    v.stride[i] = stride_[i];
  }
  if (!null_) {
    v.data = static_cast<std::byte*>(buffer_.data()) + first_ * size_of(spec_.dtype);
  }
  return v;
}

std::string TestTensor::collect(std::vector<std::uint64_t>* bits) {
  const auto size = static_cast<std::size_t>(size_of(spec_.dtype));
  std::vector<std::byte> after(before_.size());
  copy_bytes(after.data(), kCPU, buffer_.data(), device_, after.size());
  visit_word(spec_.dtype, [&]<class Word>() {
    auto* elements = reinterpret_cast<Word*>(after.data());
    if (bits != nullptr) {
      bits->resize(offset_.size());
      for (std::size_t i = 0; i < offset_.size(); ++i) (*bits)[i] = elements[offset_[i]];
    }
    if (input_) return;  // an output's elements may change; everything around them may not
    const auto poison = static_cast<Word>(poison_bits(spec_.dtype));
    for (const std::int64_t o : offset_) elements[o] = poison;
  });
  if (std::memcmp(after.data(), before_.data(), after.size()) == 0) return {};
  std::size_t at = 0;
  while (after[at] == before_[at]) ++at;
  const std::int64_t element = static_cast<std::int64_t>(at / size) - first_;
  const bool canary = static_cast<std::int64_t>(at / size) < kCanaryElements ||
                      static_cast<std::int64_t>(at / size) >= elements_ - kCanaryElements;
  return (canary   ? "canary of "
          : input_ ? "input "
                   : "gap in ") +
         spec_.name + " was overwritten, first at element " + std::to_string(element) +
         " from its start";
}

std::string TestTensor::settle() {
  const std::string fault = collect(nullptr);
  copy_bytes(before_.data(), kCPU, buffer_.data(), device_, before_.size());
  input_ = true;
  return fault;
}

}  // namespace annulus::testing
