#include "testing/perfect_run.h"

#include <array>
#include <cstring>

#include "testing/reference.h"
#include "testing/tensors.h"

namespace annulus::testing {

namespace {

template <class F>
void for_each_element(const TensorView& v, F&& f) {
  std::array<std::int64_t, kMaxRank> index{};
  std::int64_t offset = 0;
  const std::int64_t count = v.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    f(static_cast<std::size_t>(i), static_cast<std::byte*>(v.data) + offset * size_of(v.dtype));
    for (auto d = static_cast<std::size_t>(v.rank); d-- > 0;) {
      offset += v.stride[d];
      if (++index[d] < v.shape[d]) break;
      offset -= v.stride[d] * v.shape[d];
      index[d] = 0;
    }
  }
}

}  // namespace

std::vector<double> read_elements(const TensorView& v) {
  std::vector<double> values(static_cast<std::size_t>(v.numel()));
  for_each_element(v, [&](std::size_t i, const std::byte* p) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, p, static_cast<std::size_t>(size_of(v.dtype)));
    values[i] = decode(bits, v.dtype);
  });
  return values;
}

void write_elements(const TensorView& v, std::span<const double> values) {
  for_each_element(v, [&](std::size_t i, std::byte* p) {
    const std::uint64_t bits = encode(values[i], v.dtype);
    std::memcpy(p, &bits, static_cast<std::size_t>(size_of(v.dtype)));
  });
}

std::function<void(Views, Views, Context&)> perfect_run(const Call& call) {
  return [call](Views in, Views out, Context&) {
    Values inputs;
    for (const TensorView& v : in) inputs.push_back(read_elements(v));
    const Values outputs = run_reference(call, inputs);
    for (std::size_t o = 0; o < outputs.size(); ++o) write_elements(out[o], outputs[o]);
  };
}

}  // namespace annulus::testing
