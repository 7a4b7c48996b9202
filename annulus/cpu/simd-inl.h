// Vectors of float in and out of rows of float, float16 or bfloat16: what CPU kernels are written
// with. Included inside a file that Highway compiles once per instruction set, so it has a toggling
// guard, and everything lives in HWY_NAMESPACE.
//
// Instruction sets are chosen (AnnulusDependencies.cmake), since each one multiplies the time to compile:
// AVX2 and AVX-512 on x86_64, NEON on aarch64, all with fused multiply-adds and conversions of float16. An
// x86_64 processor without AVX2, and a build without Highway, get the one-lane version below, which is
// right and slow.
#if defined(ANNULUS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_CPU_SIMD_INL_H_
#undef ANNULUS_CPU_SIMD_INL_H_
#else
#define ANNULUS_CPU_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "annulus/core/dtype.h"

#if ANNULUS_HAVE_HWY
#include <hwy/highway.h>
#else
#define HWY_NAMESPACE N_SCALAR
#define HWY_INLINE inline
#define HWY_NOINLINE __attribute__((noinline))
#define HWY_BEFORE_NAMESPACE() static_assert(true, "")
#define HWY_AFTER_NAMESPACE() static_assert(true, "")
#define HWY_ONCE 1
#endif

// Whether this pass has vectors of several lanes, and Highway's functions of them.
#undef ANNULUS_SIMD
#if ANNULUS_HAVE_HWY && HWY_TARGET != HWY_SCALAR
#define ANNULUS_SIMD 1
#else
#define ANNULUS_SIMD 0
#endif

#if ANNULUS_SIMD

// After highway.h, which decides the target.
#include <hwy/contrib/math/math-inl.h>

#if !HWY_NATIVE_FMA
#error "an instruction set without fused multiply-adds was not chosen"
#endif

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF = hn::Vec<F32>;

HWY_INLINE std::size_t lanes() { return hn::Lanes(F32()); }

HWY_INLINE VF load(const float* p) { return hn::LoadU(F32(), p); }
HWY_INLINE VF load(const float16* p) {
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::PromoteTo(F32(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}
HWY_INLINE VF load(const bfloat16* p) {
  const hn::Rebind<hwy::bfloat16_t, F32> d16;
  return hn::PromoteTo(F32(), hn::LoadU(d16, reinterpret_cast<const hwy::bfloat16_t*>(p)));
}

// Two vectors that lie together.
template <class T>
HWY_INLINE void load2(const T* p, VF& v0, VF& v1) {
  v0 = load(p);
  v1 = load(p + lanes());
}
HWY_INLINE void load2(const bfloat16* p, VF& v0, VF& v1) {
  if constexpr (hn::MaxLanes(F32()) == 4) {  // of one block, so that interleaving keeps the order
    const hn::Repartition<std::uint16_t, F32> d16;
    const auto raw = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p));
    v0 = hn::BitCast(F32(), hn::InterleaveLower(d16, hn::Zero(d16), raw));
    v1 = hn::BitCast(F32(), hn::InterleaveUpper(d16, hn::Zero(d16), raw));
  } else {
    v0 = load(p);
    v1 = load(p + lanes());
  }
}

HWY_INLINE void store(VF v, float* p) { hn::StoreU(v, F32(), p); }
HWY_INLINE void store(VF v, float16* p) {
  const hn::Rebind<hwy::float16_t, F32> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
}
// Highway 1.0 truncates on the way to bfloat16; this rounds to nearest even and keeps NaN a NaN.
HWY_INLINE void store(VF v, bfloat16* p) {
  const hn::RebindToUnsigned<F32> du;
  const hn::Rebind<std::uint16_t, F32> d16;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  const auto is_number = hn::RebindMask(du, hn::Eq(v, v));
  const auto chosen = hn::IfThenElse(is_number, rounded, quiet);
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(chosen)), d16,
             reinterpret_cast<std::uint16_t*>(p));
}

HWY_INLINE VF exp(VF v) {
  // Highway's Exp clamps nothing at the top and turns NaN into 0 on some targets: keep NaN and inf.
  const F32 d;
  const auto e = hn::Exp(d, hn::Min(hn::Max(v, hn::Set(d, -104.0f)), hn::Set(d, 89.0f)));
  return hn::IfThenElse(hn::Eq(v, v), e, v);
}

}  // namespace annulus::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#else  // one lane

#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu::HWY_NAMESPACE {
inline std::size_t lanes() { return 1; }
template <class T>
inline float load(const T* p) {
  return static_cast<float>(*p);
}
template <class T>
inline void store(float v, T* p) {
  *p = static_cast<T>(v);
}
inline float exp(float v) { return std::exp(v); }
}  // namespace annulus::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

// Loops over arrays of vectors must be unrolled before GCC decides what lives in memory.
#undef ANNULUS_UNROLL
#define ANNULUS_UNROLL _Pragma("GCC unroll 16")

// One name for "call the version of f for this CPU": a table filled by Highway, or the only
// version.
#undef ANNULUS_CPU_EXPORT
#undef ANNULUS_CPU_CALL
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#define ANNULUS_CPU_EXPORT(f) HWY_EXPORT(f)
#define ANNULUS_CPU_CALL(f) HWY_DYNAMIC_DISPATCH(f)
#elif ANNULUS_HAVE_HWY
#define ANNULUS_CPU_EXPORT(f) static_assert(true, "")
#define ANNULUS_CPU_CALL(f) HWY_STATIC_DISPATCH(f)
#else
#define ANNULUS_CPU_EXPORT(f) static_assert(true, "")
#define ANNULUS_CPU_CALL(f) HWY_NAMESPACE::f
#endif

#endif  // toggling guard
