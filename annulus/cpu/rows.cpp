// f32 by Highway; f64, and f32 where there are no vectors, in plain loops.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "annulus/cpu/rows.cpp"
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#include <hwy/foreach_target.h>  // compiles this file once per instruction set
#endif

#include "annulus/cpu/rows.h"

#include <algorithm>
#include <type_traits>

#include "annulus/cpu/features.h"
#include "annulus/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu::HWY_NAMESPACE {

template <class Real>
void load_plain(const Row& from, std::int64_t n, Real* to) {
  visit_floating(from.dtype, [&]<class T>() {
    const T* p = static_cast<const T*>(from.data);
    for (std::int64_t i = 0; i < n; ++i) {
      to[i] = static_cast<Real>(static_cast<compute_t<T>>(p[i * from.stride]));
    }
  });
}
template <class Real>
void store_plain(const Real* from, std::int64_t n, const Row& to) {
  visit_floating(to.dtype, [&]<class T>() {
    T* p = static_cast<T*>(to.data);
    for (std::int64_t i = 0; i < n; ++i) {
      p[i * to.stride] = T(static_cast<compute_t<T>>(from[i]));
    }
  });
}
template <class Real>
Real sum_plain(const Real* x, std::int64_t n) {
  Real total[4] = {};
  for (std::int64_t i = 0; i < n; ++i) total[i % 4] += x[i];
  return (total[0] + total[1]) + (total[2] + total[3]);
}
#if ANNULUS_SIMD

void load_float(const Row& from, std::int64_t n, float* to) {
  if (from.stride != 1 || from.dtype == DType::kF64) return load_plain(from, n, to);
  if (from.dtype == DType::kF32) {
    std::copy_n(static_cast<const float*>(from.data), n, to);
    return;
  }
  const auto step = static_cast<std::int64_t>(lanes());
  visit_floating(from.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      const T* p = static_cast<const T*>(from.data);
      std::int64_t i = 0;
      for (; i + 4 * step <= n; i += 4 * step) {
        ANNULUS_UNROLL
        for (int u = 0; u < 4; ++u) store(load(p + i + u * step), to + i + u * step);
      }
      for (; i < n; ++i) to[i] = static_cast<float>(p[i]);
    }
  });
}
// Rounds to bfloat16 with Arm's instruction for it where there is one (a quarter of the time);
// returns how many elements were stored. Assembly, because the file is compiled for CPUs without it.
std::int64_t store_by_bfcvt([[maybe_unused]] const float* from, [[maybe_unused]] std::int64_t n,
                            [[maybe_unused]] void* to) {
  std::int64_t i = 0;
#if HWY_TARGET == HWY_NEON && defined(__aarch64__) && !defined(__clang__)
  static const bool present = has_arm_bf16();
  for (; present && i + 8 <= n; i += 8) {
    uint16x8_t rounded;
    asm(".arch_extension bf16\n\tbfcvtn %0.4h, %1.4s\n\tbfcvtn2 %0.8h, %2.4s"
        : "=&w"(rounded)
        : "w"(vld1q_f32(from + i)), "w"(vld1q_f32(from + i + 4)));
    vst1q_u16(static_cast<std::uint16_t*>(to) + i, rounded);
  }
#endif
  return i;
}
void store_float(const float* from, std::int64_t n, const Row& to) {
  if (to.stride != 1 || to.dtype == DType::kF64) return store_plain(from, n, to);
  if (to.dtype == DType::kF32) {
    std::copy_n(from, n, static_cast<float*>(to.data));
    return;
  }
  const auto step = static_cast<std::int64_t>(lanes());
  visit_floating(to.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>) {
      T* p = static_cast<T*>(to.data);
      std::int64_t i = std::is_same_v<T, bfloat16> ? store_by_bfcvt(from, n, p) : 0;
      for (; i + step <= n; i += step) store(load(from + i), p + i);
      for (; i < n; ++i) p[i] = T(from[i]);
    }
  });
}

float sum_float(const float* x, std::int64_t n) {
  const F32 d;
  const auto step = static_cast<std::int64_t>(lanes());
  VF total = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + step <= n; i += step) total = hn::Add(total, hn::LoadU(d, x + i));
  float sum = hn::GetLane(hn::SumOfLanes(d, total));
  for (; i < n; ++i) sum += x[i];
  return sum;
}

#endif

const Rows<float>* float_rows() {
#if ANNULUS_SIMD
  static const Rows<float> rows = {load_float, store_float, sum_float};
#else
  static const Rows<float> rows = {load_plain<float>, store_plain<float>, sum_plain<float>};
#endif
  return &rows;
}
const Rows<double>* double_rows() {
  static const Rows<double> rows = {load_plain<double>, store_plain<double>, sum_plain<double>};
  return &rows;
}

}  // namespace annulus::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus::cpu {

ANNULUS_CPU_EXPORT(float_rows);
ANNULUS_CPU_EXPORT(double_rows);

template <>
const Rows<float>& rows<float>() {
  return *ANNULUS_CPU_CALL(float_rows)();
}
template <>
const Rows<double>& rows<double>() {
  return *ANNULUS_CPU_CALL(double_rows)();
}

}  // namespace annulus::cpu
#endif
