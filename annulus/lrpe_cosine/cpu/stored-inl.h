// How a turned value is stored: as the nearest float or float16, but as a bfloat16 by cutting it off.
//
// Cutting off is one operation for two vectors where rounding to nearest takes two conversions, of which the
// Arm cores measured make one a cycle, or seven operations each. To keep it as good as rounding, every phase for
// a bfloat16 tensor is 1 + ln 2 / 256 times too long: a value of mantissa 1 <= m < 2 is then raised by 0.35 m units
// in the last place before the cut takes off 0 to 1. The result is one of the two neighbours of the fp32
// value, at most 0.7 ulp away (1 below the normal numbers), 0.305 ulp rms (rounding to nearest: 0.5 and 0.289) and
// right on average: the mean of m over all scales is 1 / ln 2. What bfloat16 holds exactly (a token at position 0)
// stays exact, and values up to the largest finite one stay finite (the next half ulp, which rounding to nearest
// would bring down to it, becomes infinite).
#if defined(ANNULUS_LRPE_COSINE_STORED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_STORED_INL_H_
#undef ANNULUS_LRPE_COSINE_STORED_INL_H_
#else
#define ANNULUS_LRPE_COSINE_STORED_INL_H_
#endif

#include <bit>
#include <cstdint>
#include <type_traits>

#include "annulus/core/dtype.h"
#include "annulus/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {

namespace simd = annulus::cpu::HWY_NAMESPACE;
using simd_t = decltype(simd::load(static_cast<const float*>(nullptr)));

// What the phases for tensors of a type know of it.
struct Rounding {
  float scale = 1.0f;  // they are multiplied by it
  // Below this |value| the product's error e may cost more than is left of the one ulp that is promised: 0.307 of
  // bfloat16's (the cut above uses the rest), e = 2.5e-7 / (0.307 2^-8); half of float16's,
  // e = 2.1e-7 / (0.5 2^-11) and a little. Such values are made from the exact phase.
  float near_zero = 0.0f;
};
inline Rounding rounding_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return {1.0f + 0.69314718f / 256, 2.1e-4f};
    case DType::kF16:
      return {1.0f, 9.0e-4f};
    default:
      return {};
  }
}

// One value; its phase has the scale above.
template <class T, class Real>
HWY_INLINE T stored(Real v) {
  return T(v);
}
template <>
HWY_INLINE bfloat16 stored<bfloat16, float>(float v) {
  // A NaN from arithmetic is quiet, so that its upper half is one too.
  return std::bit_cast<bfloat16>(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(v) >> 16));
}

#if ANNULUS_SIMD

// The compiler must have the vector in a register here.
template <class V>
HWY_INLINE void in_register([[maybe_unused]] V& v) {
#if HWY_ARCH_ARM_A64
  asm volatile("" : "+w"(v.raw));
#endif
}

// Two vectors as they will lie in memory, to be held until a whole line of them is there. Constructors are
// written out: one made by the compiler would not be of this instruction set.
template <class T>
struct Two {
  simd_t v0, v1;
  HWY_INLINE Two() {}
  HWY_INLINE void set(simd_t a, simd_t b) {
    v0 = a;
    v1 = b;
  }
  HWY_INLINE void finish() {}
  HWY_INLINE void store(T* p) const {
    simd::store(v0, p);
    simd::store(v1, p + simd::lanes());
  }
};

// Of 16 bits two vectors become one.
template <class T>
requires(sizeof(T) == 2) struct Two<T> {
  using D = hwy::HWY_NAMESPACE::Repartition<std::uint16_t, simd::F32>;
  hwy::HWY_NAMESPACE::Vec<D> v;
  HWY_INLINE Two() {}
  HWY_INLINE void set(simd_t a, simd_t b) {
    namespace hn = hwy::HWY_NAMESPACE;
    if constexpr (std::is_same_v<T, bfloat16>) {
      v = hn::ConcatOdd(D(), hn::BitCast(D(), b), hn::BitCast(D(), a));
    } else {
      const hn::Rebind<hwy::float16_t, simd::F32> half;
      const hn::Half<D> bits;
      v = hn::Combine(D(), hn::BitCast(bits, hn::DemoteTo(half, b)),
                      hn::BitCast(bits, hn::DemoteTo(half, a)));
    }
  }
  HWY_INLINE void finish() { in_register(v); }
  HWY_INLINE void store(T* p) const {
    hwy::HWY_NAMESPACE::StoreU(v, D(), reinterpret_cast<std::uint16_t*>(p));
  }
};

#endif  // ANNULUS_SIMD

}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
