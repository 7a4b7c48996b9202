// Rows of every type, stride, alignment and length: loads, stores and single numbers.
#include "annulus/cuda/rows.cuh"

#include <vector>

#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

constexpr int kN = 4, kRow = 32;

struct Row {
  int first, stride, count;
};

// Loads a row in three ways, stores it in two, and reads its numbers by a type known at run time.
template <class T>
__global__ void row_kernel(const T* from, Row r, DType dtype, compute_t<T>* loaded, T* stored) {
  using Real = compute_t<T>;
  const T* const p = from + r.first;
  prefetch_row(p, r.stride);
  Real v[kN], packed[kN];
  load_row(p, r.stride, r.count, v);
  unpack(fetch_row<kN, false>(p, r.stride, r.count, Real(-7)), packed);
  for (int i = 0; i < kN; ++i) loaded[i] = v[i], loaded[kN + i] = packed[i];
  for (int i = 0; i < r.count; ++i) {
    loaded[2 * kN + i] = load_number<Real>(dtype, p, i * r.stride);
    if constexpr (sizeof(T) < 8) {
      loaded[3 * kN + i] = number_of(dtype, load_bits(p, i * r.stride, dtype == DType::kF32));
      visit_narrow(dtype, [&]<class U>() {
        loaded[4 * kN + i] = static_cast<float>(reinterpret_cast<const U*>(p)[i * r.stride]);
      });
    }
  }
  store_row(stored + r.first, r.stride, r.count, v);
  put_row<kN, false>(packed, stored + kRow + r.first, r.stride, r.count);
}

// Whole vectors, of a width that is known when compiling.
template <class T, int V>
__global__ void vector_kernel(const T* from, int count, T* to) {
  using Real = compute_t<T>;
  Real v[V];
  unpack(fetch_row<V, true>(from, 1, count, Real(3)), v);
  put_row<V, true>(v, to, 1, count);
  load_row(from, 1, count, true, v);
  store<V>(v, to + V);
}

class CudaRows : public DeviceTest {
 protected:
  template <class T>
  void check(DType dtype) {
    using Real = compute_t<T>;
    std::vector<T> values(kRow);
    for (std::size_t i = 0; i < kRow; ++i) values[i] = T(1.25f + static_cast<float>(i));
    const DeviceArray<T> from(values);
    for (const int first : {0, 1, 4}) {
      for (const int stride : {1, 3, -1}) {
        for (int count = 0; count <= kN; ++count) {
          const Row r{stride < 0 ? first + kN : first, stride, count};
          const DeviceArray<Real> loaded(5 * kN);
          const DeviceArray<T> stored(2 * kRow);
          row_kernel<T><<<1, 1>>>(from.get(), r, dtype, loaded.get(), stored.get());
          finish();
          const std::vector<Real> v = loaded.values();
          const std::vector<T> s = stored.values();
          const auto bits = [](T t) { return static_cast<double>(static_cast<Real>(t)); };
          std::vector<double> expected(2 * kRow);
          for (int i = 0; i < kN; ++i) {
            const int at = r.first + i * stride;
            const bool there = i < count;
            const double value = there ? bits(values[at]) : 0;
            EXPECT_EQ(v[i], value);
            EXPECT_EQ(v[kN + i], there ? value : -7.0);
            EXPECT_EQ(v[2 * kN + i], value);
            EXPECT_EQ(v[3 * kN + i], sizeof(T) < 8 ? value : 0);
            EXPECT_EQ(v[4 * kN + i], sizeof(T) < 8 ? value : 0);
            if (there) expected[at] = expected[kRow + at] = value;
          }
          for (std::size_t i = 0; i < s.size(); ++i) EXPECT_EQ(bits(s[i]), expected[i]);
        }
      }
    }
    constexpr int V = kVectorWidth<T>;
    for (const int count : {0, V}) {
      const DeviceArray<T> to(2 * V);
      vector_kernel<T, V><<<1, 1>>>(from.get(), count, to.get());
      finish();
      const std::vector<T> out = to.values();
      for (std::size_t i = 0; i < 2 * V; ++i) {
        const double value = count == 0 ? 0 : static_cast<double>(static_cast<Real>(values[i % V]));
        EXPECT_EQ(static_cast<double>(static_cast<Real>(out[i])), value);
      }
    }
  }
};

TEST_F(CudaRows, EveryTypeStrideAndLength) {
  check<double>(DType::kF64);
  check<float>(DType::kF32);
  check<float16>(DType::kF16);
  check<bfloat16>(DType::kBF16);
}

}  // namespace
}  // namespace annulus::testing
