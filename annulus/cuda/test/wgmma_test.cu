// Every kind of operand of wgmma against plain sums: exact for small whole numbers.
#include "annulus/cuda/wgmma.cuh"

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "annulus/cuda/pipeline.cuh"
#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

constexpr int kM = 64, kDepth = 64;

// Where element (i, k) of an operand of `lines` x kDepth lies: i is m or n.
std::uint32_t place(Major major, int W, int lines, int i, int k) {
  const int each = W / 2;  // numbers of a row
  const auto at = [&](int block, int block_bytes, int row, int column) {
    const auto byte = static_cast<std::uint32_t>(row * W + column * 2);
    return block * block_bytes + swizzled_byte(W, byte);
  };
  return major == Major::kK ? at(k / each, lines * W, i, k % each)
                            : at(i / each, kDepth * W, k, i % each);
}
// Whole swizzled blocks of it.
ANNULUS_HD constexpr int operand_bytes(Major major, int W, int lines) {
  const int each = W / 2;
  return major == Major::kK ? kDepth / each * lines * W : (lines + each - 1) / each * kDepth * W;
}

struct Operands {
  const std::uint16_t* a_rows;  // [m][k]
  const uint4 *a, *b;           // as they lie in shared memory
  bool a_in_registers, add;
  Major a_major, b_major;
};

template <class T, int N, int W>
__global__ void __launch_bounds__(128) product_kernel(Operands in, float* out) {
#if ANNULUS_DEVICE_HOPPER
  __shared__ __align__(1024) std::byte shared_a[kM * kDepth * 2];
  __shared__ __align__(1024) std::byte shared_b[(N + W / 2 - 1) / (W / 2) * (W / 2) * kDepth * 2];
  const int thread = static_cast<int>(threadIdx.x);
  const auto copy = [&](const uint4* from, Major major, int lines, std::byte* to) {
    for (int i = thread; i < operand_bytes(major, W, lines) / 16; i += 128) {
      reinterpret_cast<uint4*>(to)[i] = from[i];
    }
  };
  copy(in.a, in.a_major, kM, shared_a);
  copy(in.b, in.b_major, N, shared_b);
  fence_shared_writes();
  __syncthreads();
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) {
    d[i] = out[(row + (i & 2) * 4) * N + i / 4 * 8 + column + (i & 1)];
  }
  uint4 x[kDepth / 16];
  for (int step = 0; step < kDepth / 16; ++step) {
    const auto pair = [&](int r, int k) {
      return *reinterpret_cast<const std::uint32_t*>(in.a_rows + r * kDepth + step * 16 + k);
    };
    x[step] = make_uint4(pair(row, column), pair(row + 8, column), pair(row, column + 8),
                         pair(row + 8, column + 8));
  }
  const auto low = [](Major major, const std::byte* at) {
    return major == Major::kK ? k_major_low(at) : mn_major_low(at, kDepth * W);
  };
  // A row of a K-major operand holds W / 32 steps; the next ones are a panel of `lines` rows on.
  const auto descriptor = [](Major major, std::uint32_t at, int step, int lines) {
    constexpr int kSteps = W / 32;
    return major == Major::kMN
               ? mn_major<W>(at, step)
               : k_major<W>(at + static_cast<std::uint32_t>(step / kSteps * lines * W / 16),
                            step % kSteps);
  };
  const auto multiply = [&]<Major kB>() {
    const std::uint32_t b = low(kB, shared_b);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      const bool add = in.add || step > 0;
      const std::uint64_t right = descriptor(kB, b, step, N);
      if (in.a_in_registers) {
        wgmma<T, kB>(d, x[step], right, add);
      } else if (in.a_major == Major::kK) {
        wgmma<T, kB>(d, descriptor(Major::kK, low(Major::kK, shared_a), step, kM), right, add);
      } else {
        wgmma<T, kB, Major::kMN>(d, descriptor(Major::kMN, low(Major::kMN, shared_a), step, kM),
                                 right, add);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  };
  if (in.b_major == Major::kK) {
    multiply.template operator()<Major::kK>();
  } else {
    multiply.template operator()<Major::kMN>();
  }
  for (int i = 0; i < N / 2; ++i) {
    out[(row + (i & 2) * 4) * N + i / 4 * 8 + column + (i & 1)] = d[i];
  }
#else
  __trap();
#endif
}

using Widths = std::integer_sequence<int, 8, 16, 24, 32, 40, 64, 96, 128, 192, 256>;

class CudaWgmma : public HopperTest {
 protected:
  template <class T, int... N>
  void check_widths(std::integer_sequence<int, N...>) {
    (check<T, N>(), ...);
  }
  template <class T, int N, int W = 128>
  void check() {
    for (const bool whole : {true, false}) {
      for (const bool add : {false, true}) {
        for (const Major b : {Major::kK, Major::kMN}) {
          check<T, N, W>(whole, add, true, Major::kK, b);
          check<T, N, W>(whole, add, false, Major::kK, b);
          check<T, N, W>(whole, add, false, Major::kMN, b);
        }
      }
    }
  }

 private:
  template <class T, int N, int W>
  void check(bool whole, bool add, bool a_in_registers, Major a_major, Major b_major) {
    std::mt19937 random(static_cast<unsigned>(N * W));
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> small(-4, 4);
    const auto draw = [&] { return T(whole ? static_cast<float>(small(random)) : normal(random)); };
    std::vector<T> a(kM * kDepth), b(N * kDepth);  // [m][k], [n][k]
    for (T& v : a) v = draw();
    for (T& v : b) v = draw();
    const auto image = [&](Major major, int lines, const std::vector<T>& v) {
      std::vector<uint4> bytes(operand_bytes(major, W, lines) / 16, make_uint4(~0u, ~0u, ~0u, ~0u));
      for (int i = 0; i < lines; ++i) {
        for (int k = 0; k < kDepth; ++k) {
          reinterpret_cast<T*>(bytes.data())[place(major, W, lines, i, k) / 2] = v[i * kDepth + k];
        }
      }
      return bytes;
    };
    const DeviceArray<T> a_rows(a);
    const DeviceArray<uint4> a_shared(image(a_major, kM, a)), b_shared(image(b_major, N, b));
    const DeviceArray<float> out(std::vector<float>(kM * N, 3.0f));
    const auto* const rows = reinterpret_cast<const std::uint16_t*>(a_rows.get());
    const Operands in{rows, a_shared.get(), b_shared.get(), a_in_registers, add, a_major, b_major};
    product_kernel<T, N, W><<<1, 128>>>(in, out.get());
    finish();
    const std::vector<float> ours = out.values();
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < N; ++n) {
        double sum = add ? 3 : 0, size = 3;
        for (int k = 0; k < kDepth; ++k) {
          const double p =
              double{static_cast<float>(a[m * kDepth + k])} * static_cast<float>(b[n * kDepth + k]);
          sum += p;
          size += std::abs(p);
        }
        // The tensor cores cut sums off where they should round them.
        ASSERT_NEAR(ours[m * N + n], sum, whole ? 0 : 4e-6 * size)
            << "m " << m << " n " << n << " of " << N << ", swizzle " << W << ", a "
            << (a_in_registers         ? "in registers"
                : a_major == Major::kK ? "K-major"
                                       : "MN-major")
            << ", b " << (b_major == Major::kK ? "K-major" : "MN-major") << (add ? ", added" : "");
      }
    }
  }
};

TEST_F(CudaWgmma, BFloat16OfEveryOperand) { check_widths<bfloat16>(Widths()); }
TEST_F(CudaWgmma, Float16OfEveryOperand) { check_widths<float16>(Widths()); }
TEST_F(CudaWgmma, NarrowSwizzles) {
  check<bfloat16, 64, 64>();
  check<float16, 96, 64>();
  check<bfloat16, 64, 32>();
  check<float16, 48, 32>();
}

}  // namespace
}  // namespace annulus::testing
