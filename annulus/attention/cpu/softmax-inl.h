// What a softmax does with rows beside weighing them. Included by softmax.cpp, once per instruction set.
#if defined(ANNULUS_ATTENTION_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_ATTENTION_CPU_SOFTMAX_INL_H_
#undef ANNULUS_ATTENTION_CPU_SOFTMAX_INL_H_
#else
#define ANNULUS_ATTENTION_CPU_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "annulus/attention/cpu/softmax.h"
#include "annulus/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::attention::cpu::HWY_NAMESPACE {

namespace simd = annulus::cpu::HWY_NAMESPACE;

#if ANNULUS_SIMD

namespace hn = hwy::HWY_NAMESPACE;
using simd::F32;
using simd::VF;

inline void rescale(float* x, std::int64_t rows, int lanes, const float* factor) {
  const F32 d;
  for (int c = 0; c < lanes; c += static_cast<int>(simd::lanes())) {
    const VF f = hn::LoadU(d, factor + c);
    for (std::int64_t r = 0; r < rows; ++r) {
      hn::StoreU(hn::Mul(f, hn::LoadU(d, x + r * lanes + c)), d, x + r * lanes + c);
    }
  }
}

inline float dot(const float* x, const float* y, std::int64_t n) {
  const hn::CappedTag<float, 1> d;
  auto sum = hn::Zero(d);
  for (std::int64_t i = 0; i < n; ++i)
    sum = hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, y + i), sum);
  return hn::GetLane(sum);
}

// By blocks of 4 x 4, whose rows are read together.
inline void turn(const float* x, std::int64_t ldx, std::int64_t rows, std::int64_t columns,
                 float* y, std::int64_t ldy) {
  const hn::CappedTag<float, 4> d;
  std::int64_t r = 0;
  for (; r + 4 <= rows && hn::Lanes(d) == 4; r += 4) {
    const float* from = x + r * ldx;
    std::int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      const auto a0 = hn::LoadU(d, from + c), a1 = hn::LoadU(d, from + ldx + c);
      const auto a2 = hn::LoadU(d, from + 2 * ldx + c), a3 = hn::LoadU(d, from + 3 * ldx + c);
      const auto low01 = hn::InterleaveLower(d, a0, a1), low23 = hn::InterleaveLower(d, a2, a3);
      const auto high01 = hn::InterleaveUpper(d, a0, a1), high23 = hn::InterleaveUpper(d, a2, a3);
      float* to = y + c * ldy + r;
      hn::StoreU(hn::ConcatLowerLower(d, low23, low01), d, to);
      hn::StoreU(hn::ConcatUpperUpper(d, low23, low01), d, to + ldy);
      hn::StoreU(hn::ConcatLowerLower(d, high23, high01), d, to + 2 * ldy);
      hn::StoreU(hn::ConcatUpperUpper(d, high23, high01), d, to + 3 * ldy);
    }
    for (; c < columns; ++c) {
      for (int k = 0; k < 4; ++k) y[c * ldy + r + k] = from[k * ldx + c];
    }
  }
  for (; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) y[c * ldy + r] = x[r * ldx + c];
  }
}

// Of numbers without their sign the bits are in the order of the numbers, infinity and NaN last.
template <class T>
bool tame_rows(const T* x, std::int64_t ld, std::int64_t rows, std::int64_t columns) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>;
  const hn::ScalableTag<Bits> d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  const Bits number = static_cast<Bits>(Bits(~Bits(0)) >> 1);
  const T limit(std::is_same_v<T, float16> ? 65504.0f : kTame);
  const Bits most = std::bit_cast<Bits>(limit);
  const auto numbers = hn::Set(d, number);
  auto seen = hn::Zero(d), also = seen;
  Bits last = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto* row = reinterpret_cast<const Bits*>(x + r * ld);
    std::int64_t i = 0;
    for (; i + 2 * n <= columns; i += 2 * n) {
      seen = hn::Max(seen, hn::And(hn::LoadU(d, row + i), numbers));
      also = hn::Max(also, hn::And(hn::LoadU(d, row + i + n), numbers));
    }
    for (; i < columns; ++i) {
      Bits bits;
      std::memcpy(&bits, row + i, sizeof(bits));
      last = std::max(last, static_cast<Bits>(bits & number));
    }
  }
  return last <= most && hn::AllFalse(d, hn::Gt(hn::Max(seen, also), hn::Set(d, most)));
}

template <class T>
float norms_of(const T* x, std::int64_t ld, std::int64_t rows, std::int64_t columns, float* norm) {
  const F32 d;
  const auto n = static_cast<std::int64_t>(simd::lanes());
  float most = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * ld;
    VF sum = hn::Zero(d), also = sum;
    std::int64_t i = 0;
    for (; i + 2 * n <= columns; i += 2 * n) {
      VF a, b;
      simd::load2(row + i, a, b);
      sum = hn::MulAdd(a, a, sum);
      also = hn::MulAdd(b, b, also);
    }
    float square = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, also)));
    for (; i < columns; ++i) square += static_cast<float>(row[i]) * static_cast<float>(row[i]);
    most = square <= most ? most : square;  // a NaN stays
    if (norm != nullptr) norm[r] = std::sqrt(square);
    if (most != most) return most;
  }
  return std::sqrt(most);
}

inline void add(const float* x, std::int64_t n, float* y) {
  const F32 d;
  const auto step = static_cast<std::int64_t>(simd::lanes());
  std::int64_t i = 0;
  for (; i + step <= n; i += step)
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, y + i);
  for (; i < n; ++i) y[i] += x[i];
}

#else  // one lane

inline void rescale(float* x, std::int64_t rows, int lanes, const float* factor) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < lanes; ++c) x[r * lanes + c] *= factor[c];
  }
}

inline void turn(const float* x, std::int64_t ldx, std::int64_t rows, std::int64_t columns,
                 float* y, std::int64_t ldy) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) y[c * ldy + r] = x[r * ldx + c];
  }
}

template <class T>
bool tame_rows(const T* x, std::int64_t ld, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const float v = static_cast<float>(x[r * ld + i]);
      if (!(v <= kTame && v >= -kTame)) return false;
    }
  }
  return true;
}

template <class T>
float norms_of(const T*, std::int64_t, std::int64_t, std::int64_t, float*) {
  return __builtin_huge_valf();  // nobody asks
}

inline float dot(const float* x, const float* y, std::int64_t n) {
  float sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

inline void add(const float* x, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += x[i];
}

#endif

}  // namespace annulus::attention::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
