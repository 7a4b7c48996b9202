// Exact phases: a "numerically controlled oscillator".
//
// A phase is kept as a fraction of a turn in fixed point, where arithmetic modulo one turn is the
// machine's own arithmetic modulo 2^64. theta becomes, once, the step
//     step = theta / 2pi  mod 1      (an exact multi-word product with the bits of 1 / 2pi)
// and the phase of position s is s * step, an integer product that wraps where the circle does. No
// argument reduction, no slow path, the same cost and the same error at position 10 and at 10^9.
// The usual float(position) * theta is off by 4e-3 radians at position 32 767 and by 0.1 at 10^6.
//
// 64 bits of step leave 2^-65 of a turn per unit of position: 4e-10 radians at position 2^31, far
// below fp32. fp64 outputs use 128 bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "annulus/core/macros.h"

namespace annulus::lrpe_cosine {

// The first 1280 bits of 1 / 2pi after the binary point: enough for every double.
#define ANNULUS_INV_TWO_PI_WORDS                                                                  \
  0x28be60db9391054aull, 0x7f09d5f47d4d3770ull, 0x36d8a5664f10e410ull, 0x7f9458eaf7aef158ull,     \
      0x6dc91b8e909374b8ull, 0x01924bba82746487ull, 0x3f877ac72c4a69cfull, 0xba208d7d4baed121ull, \
      0x3a671c09ad17df90ull, 0x4e64758e60d4ce7dull, 0x272117e2ef7e4a0eull, 0xc7fe25fff7816603ull, \
      0xfbcbc462d6829b47ull, 0xdb4d9fb3c9f2c26dull, 0xd3d18fd9a797fa8bull, 0x5d49eeb1faf97c5eull, \
      0xcf41ce7de294a4baull, 0x9afed7ec47e35742ull, 0x1580cc11bf1edaeaull, 0xfc33ef0826bd0d87ull
inline constexpr int kInvTwoPiWords = 20;
inline constexpr std::uint64_t kInvTwoPi[kInvTwoPiWords] = {ANNULUS_INV_TWO_PI_WORDS};
#if defined(__CUDACC__)
// Device code indexes the table at run time, which a host constexpr array does not allow.
static __device__ __constant__ std::uint64_t kInvTwoPiDevice[kInvTwoPiWords] = {
    ANNULUS_INV_TWO_PI_WORDS};
#endif
#undef ANNULUS_INV_TWO_PI_WORDS

// Word i of 1 / 2pi; the words before the binary point are zero.
ANNULUS_HD inline std::uint64_t inv_two_pi_word(int i) {
  if (i < 0 || i >= kInvTwoPiWords) return 0;
#if defined(__CUDA_ARCH__)
  return kInvTwoPiDevice[i];
#else
  return kInvTwoPi[i];
#endif
}

ANNULUS_HD inline std::uint64_t mul_high(std::uint64_t a, std::uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// Positions wrap like everything else here: an offset near 2^63 is odd, not undefined.
ANNULUS_HD inline std::int64_t wrapping_add(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

// A fraction of a turn: (hi + lo / 2^64) / 2^64, modulo 1.
struct Turn {
  std::uint64_t hi = 0;
  std::uint64_t lo = 0;
};

// theta / 2pi mod 1 to 128 bits; finite theta only.
//   theta = +- M 2^e with an integer M < 2^53, so theta / 2pi = M * (2^e / 2pi), and modulo 1 only
//   the fraction of 2^e / 2pi counts: the bits of 1 / 2pi from place e on. 192 of them times 53
//   bits of M are right to 2^-139.
ANNULUS_HD inline Turn turn_step(double theta) {
#if defined(__CUDA_ARCH__)
  const std::uint64_t bits = static_cast<std::uint64_t>(__double_as_longlong(theta));
#else
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(theta);
#endif
  const int field = static_cast<int>((bits >> 52) & 0x7ff);
  const std::uint64_t fraction = bits & ((1ull << 52) - 1);
  const std::uint64_t m = field == 0 ? fraction : fraction | (1ull << 52);
  const int e = field == 0 ? -1074 : field - 1075;

  const int word = (e - (e & 63)) / 64;  // e & 63 is e mod 64 for negative e too
  const int shift = e & 63;
  std::uint64_t w[3];
  for (int k = 0; k < 3; ++k) {
    const std::uint64_t high = inv_two_pi_word(word + k) << shift;
    const std::uint64_t low = shift == 0 ? 0 : inv_two_pi_word(word + k + 1) >> (64 - shift);
    w[k] = high | low;
  }
  // (w0, w1, w2) * m modulo 2^192, of which the upper two words are kept.
  const std::uint64_t mid = m * w[1];
  Turn t;
  t.lo = mid + mul_high(m, w[2]);
  t.hi = m * w[0] + mul_high(m, w[1]) + (t.lo < mid ? 1 : 0);
  if (bits >> 63) {
    t.lo = ~t.lo + 1;
    t.hi = ~t.hi + (t.lo == 0 ? 1 : 0);
  }
  return t;
}

// The same, rounded to the 64 bits that all outputs but fp64 use.
ANNULUS_HD inline std::uint64_t turn_step64(double theta) {
  const Turn t = turn_step(theta);
  return t.hi + (t.lo >> 63);
}

// A 32-bit word of 1 / 2pi.
ANNULUS_HD inline std::uint32_t inv_two_pi_half_word(int i) {
  const std::uint64_t w = inv_two_pi_word(i < 0 ? -1 : i / 2);
  return static_cast<std::uint32_t>(i & 1 ? w : w >> 32);
}

// The same for a float, in 32-bit arithmetic: a quarter of the instructions on a GPU. 128 bits of 1
// / 2pi times 24 bits of theta.
ANNULUS_HD inline std::uint64_t turn_step64(float theta) {
#if defined(__CUDA_ARCH__)
  const std::uint32_t bits = __float_as_uint(theta);
#else
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(theta);
#endif
  const int field = static_cast<int>((bits >> 23) & 0xff);
  const std::uint32_t fraction = bits & ((1u << 23) - 1);
  const std::uint64_t m = field == 0 ? fraction : fraction | (1u << 23);
  const int e = field == 0 ? -149 : field - 150;

  // Five words of 1 / 2pi from place e on. Frequencies from 2^-41 to 2^23, nearly all there are, find them
  // as constants; the table in memory costs a cold cache miss (half a microsecond on a GPU).
  const int word = (e - (e & 31)) / 32;
  const int shift = e & 31;
  const bool low = word == -2;
  std::uint32_t w[5] = {0, low ? 0 : 0x28be60dbu, low ? 0x28be60dbu : 0x9391054au,
                        low ? 0x9391054au : 0x7f09d5f4u, low ? 0x7f09d5f4u : 0x7d4d3770u};
  if (word != -1 && !low && m != 0) {
    for (int k = 0; k < 5; ++k) w[k] = inv_two_pi_half_word(word + k);
  }
  std::uint64_t carry = 0;
  std::uint32_t product[4] = {};
  for (int k = 3; k >= 0; --k) {
    // Two neighbouring words as one 64-bit number, shifted: its upper half is the window's word.
    const std::uint64_t pair = static_cast<std::uint64_t>(w[k]) << 32 | w[k + 1];
    carry += m * static_cast<std::uint32_t>((pair << shift) >> 32);
    product[k] = static_cast<std::uint32_t>(carry);
    carry >>= 32;
  }
  const std::uint64_t step =
      (static_cast<std::uint64_t>(product[0]) << 32 | product[1]) + (product[2] >> 31);
  return bits >> 31 ? ~step + 1 : step;
}

ANNULUS_HD inline Turn turn_at(Turn step, std::int64_t position) {
  const auto s = static_cast<std::uint64_t>(position);
  Turn t;
  t.lo = step.lo * s;
  t.hi = step.hi * s + mul_high(step.lo, s);
  if (position < 0) t.hi -= step.lo;  // the upper word of a sign-extended position is -1
  return t;
}

ANNULUS_HD inline std::uint64_t turn_at(std::uint64_t step, std::int64_t position) {
  return step * static_cast<std::uint64_t>(position);
}

// fp64: the reference's and the f64 kernels' sine and cosine. Exactly (0, 1) at phase 0. The nearest quarter turn k is
// taken off, which leaves a signed 64-bit fraction of at most 1/8 turn either way.
ANNULUS_HD inline void sincos_turn(Turn t, double& s, double& c) {
  const std::uint64_t k = (t.hi + (1ull << 61)) >> 62;
  const auto rest = static_cast<std::int64_t>(t.hi - (k << 62));
  const double turns = (static_cast<double>(rest) + static_cast<double>(t.lo) * 0x1p-64) * 0x1p-64;
#if defined(__CUDA_ARCH__)
  double s0, c0;
  sincospi(2.0 * turns, &s0, &c0);
#else
  const double angle = 6.283185307179586476925 * turns;
  const double s0 = std::sin(angle), c0 = std::cos(angle);
#endif
  s = (k & 1) ? c0 : s0;
  c = (k & 1) ? s0 : c0;
  if (k & 2) s = -s;
  if ((k + 1) & 2) c = -c;
}

// Minimax polynomials for sin(pi/4 u) and cos(pi/4 u), |u| <= 1, with cos(0) = 1 exactly. Because
// the argument is reduced to the nearest quarter turn first, the error is relative to the value
// itself, near the zeros too.
struct SinCosF32 {  // relative error 3e-8 (sin), 5e-10 (cos): fp32 outputs
  // Scalars, not arrays: device code may read a constexpr scalar of the host.
  static constexpr float kSin0 = 0.785398185f, kSin1 = -0.0807458311f, kSin2 = 0.00249101641f,
                         kSin3 = -3.66091517e-05f;
  static constexpr float kCos0 = -0.308425128f, kCos1 = 0.0158542842f, kCos2 = -0.000325868634f,
                         kCos3 = 3.49398692e-06f;
};

ANNULUS_HD inline float flip_sign(float x, std::uint32_t sign_bit) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(__float_as_uint(x) ^ sign_bit);
#else
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) ^ sign_bit);
#endif
}

// All 64 bits of the turn count, in 32-bit arithmetic: about 25 instructions on a GPU. The
// remainder is made positive before it is converted, since -1 + (1 - tiny) in two words would lose
// all of it.
ANNULUS_HD inline void sincos_turn(std::uint64_t t, float& s, float& c) {
  using P = SinCosF32;
  const auto high = static_cast<std::uint32_t>(t >> 32);
  const std::uint32_t quadrant = high + (1u << 29);  // its number is in the top two bits
  const std::uint32_t rest_high = high - (quadrant & (3u << 30));
  const std::uint32_t minus =
      static_cast<std::uint32_t>(static_cast<std::int32_t>(rest_high) >> 31);
  const auto u = static_cast<float>(rest_high ^ minus) * 0x1p-29f +
                 static_cast<float>(static_cast<std::uint32_t>(t) ^ minus) * 0x1p-61f;  // 0 .. 1
  const float u2 = u * u;
  const float ps = u * (P::kSin0 + u2 * (P::kSin1 + u2 * (P::kSin2 + u2 * P::kSin3)));
  const float pc = 1.0f + u2 * (P::kCos0 + u2 * (P::kCos1 + u2 * (P::kCos2 + u2 * P::kCos3)));
  const float odd = flip_sign(ps, minus & (1u << 31));
  const bool swap = (quadrant & (1u << 30)) != 0;
  s = flip_sign(swap ? pc : odd, quadrant & (1u << 31));
  c = flip_sign(swap ? odd : pc, (quadrant + (1u << 30)) & (1u << 31));
}

}  // namespace annulus::lrpe_cosine
