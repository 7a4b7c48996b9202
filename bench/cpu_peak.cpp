// Loops of one instruction each, over more accumulators than the units have latency to hide. The
// empty asm statements hide the values from the compiler, which would else merge equal sums and
// compute the loops away.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "annulus/cpu/features.h"
#include "annulus/cpu/parallel.h"
#include "bench/ceilings.h"
#include "bench/statistics.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

namespace annulus::bench {
namespace {

constexpr std::int64_t kRounds = 100'000;

struct Loop {
  void (*run)(std::int64_t rounds) = nullptr;
  double flops = 0;  // a round
};

// --- portable: the compiler's own vectors --------------------------------------------------------

void plain_loop(std::int64_t rounds) {
  float sum[32] = {};
  float x = 1e-3f, y = 0.5f;
  for (std::int64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+g"(x), "+g"(y));
    for (float& s : sum) s += x * y;
  }
  asm volatile("" ::"g"(&sum) : "memory");
}

// --- vectors of one instruction set --------------------------------------------------------------

// A loop for one instruction; a template could carry neither the target nor the asm's letter for a
// vector register. `multiply_add` makes a new sum of s, x and y.
#define ANNULUS_PEAK_LOOP(name, isa, letter, sums, x_first, y_first, zero, multiply_add) \
  __attribute__((target(isa))) void name(std::int64_t rounds) {                          \
    auto x = x_first;                                                                    \
    auto y = y_first;                                                                    \
    decltype(zero) sum[sums];                                                            \
    _Pragma("GCC unroll 24") for (auto& s : sum) {                                       \
      s = zero;                                                                          \
      asm volatile("" : "+" letter(s));                                                  \
    }                                                                                    \
    for (std::int64_t r = 0; r < rounds; ++r) {                                          \
      asm volatile("" : "+" letter(x), "+" letter(y));                                   \
      _Pragma("GCC unroll 24") for (auto& s : sum) s = multiply_add;                     \
    }                                                                                    \
    _Pragma("GCC unroll 24") for (auto& s : sum) asm volatile("" ::letter(s));           \
  }

#if defined(__aarch64__)
constexpr int kNeonSums = 24;  // of 32 registers
ANNULUS_PEAK_LOOP(neon_loop, "arch=armv8-a", "w", kNeonSums, vdupq_n_f32(1e-3f), vdupq_n_f32(0.5f),
                  vdupq_n_f32(0), vfmaq_f32(s, x, y))
// bfmmla: (2 x 4) times (4 x 2), 32 flops.
ANNULUS_PEAK_LOOP(bfmmla_loop, "arch=armv8.2-a+bf16", "w", kNeonSums,
                  vreinterpretq_bf16_u16(vdupq_n_u16(0x3a81)),
                  vreinterpretq_bf16_u16(vdupq_n_u16(0x3f12)), vdupq_n_f32(0),
                  vbfmmlaq_f32(s, x, y))
#elif defined(__x86_64__)
constexpr int kAvx2Sums = 12, kAvx512Sums = 24;  // of 16 and 32 registers
ANNULUS_PEAK_LOOP(avx2_loop, "avx2,fma", "x", kAvx2Sums, _mm256_set1_ps(1e-3f),
                  _mm256_set1_ps(0.5f), _mm256_setzero_ps(), _mm256_fmadd_ps(x, y, s))
ANNULUS_PEAK_LOOP(avx512_loop, "avx512f", "v", kAvx512Sums, _mm512_set1_ps(1e-3f),
                  _mm512_set1_ps(0.5f), _mm512_setzero_ps(), _mm512_fmadd_ps(x, y, s))
// dpbf16ps: two products for each of 16 sums, 64 flops.
ANNULUS_PEAK_LOOP(dpbf16_loop, "avx512f,avx512bf16", "v", kAvx512Sums, _mm512_set1_epi16(0x3a80),
                  _mm512_set1_epi16(0x3f00), _mm512_setzero_ps(),
                  _mm512_dpbf16_ps(s, (__m512bh)x, (__m512bh)y))

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16")
// tdpbf16ps: (16 x 32) times (32 x 16) into a tile, 16384 flops; four tiles in turn.
void amx_loop(std::int64_t rounds) {
  // Static: GCC 12 believes that the instruction reads the first eight bytes alone.
  static constexpr struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  alignas(64) std::uint8_t operand[1024] = {};
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, operand, 64);
  _tile_loadd(5, operand, 64);
  for (std::int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
}
#pragma GCC pop_options

#endif

Loop loop_for(Precision products) {
#if defined(__aarch64__)
  if (products == Precision::kBf16 && cpu::has_arm_bf16()) return {bfmmla_loop, kNeonSums * 32.0};
  return {neon_loop, kNeonSums * 8.0};
#elif defined(__x86_64__)
  if (products == Precision::kBf16) {
    if (cpu::has_amx_bf16()) return {amx_loop, 4 * 16384.0};
    if (__builtin_cpu_supports("avx512bf16")) return {dpbf16_loop, kAvx512Sums * 64.0};
  }
  if (__builtin_cpu_supports("avx512f")) return {avx512_loop, kAvx512Sums * 32.0};
  if (__builtin_cpu_supports("fma")) return {avx2_loop, kAvx2Sums * 16.0};
#endif
  return {plain_loop, 64.0};
}

}  // namespace

double cpu_peak_gflops(Precision products) {
  if (products == Precision::kTf32) return 0;
  const Loop loop = loop_for(products);
  const int threads = cpu::resolve_threads(0);
  // All threads at once, each with its own clock: on a busy machine waking one takes longer than a
  // loop, and many loops are needed for one that nothing disturbs.
  std::vector<double> best_ms(static_cast<std::size_t>(threads), 1e300);
  cpu::parallel_for(threads, threads, [&](std::int64_t thread) {
    double& best = best_ms[static_cast<std::size_t>(thread)];
    for (double all = 0; all < 200;) {
      const double ms = milliseconds([&] { loop.run(kRounds); });
      best = std::min(best, ms);
      all += ms;
    }
  });
  double gflops = 0;
  for (const double ms : best_ms) gflops += 1e-6 * loop.flops * static_cast<double>(kRounds) / ms;
  return gflops;
}

}  // namespace annulus::bench
