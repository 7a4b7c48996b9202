// The product on the ordinary cores: odd sizes, both layouts of each operand, against plain sums.
#include "annulus/cuda/simt_gemm.cuh"

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda::simt;

struct Size {
  int M, N, K;
};

// c[m, n] = sum over k of a[m, k] b[k, n]. A transposed operand lies the other way round in memory.
template <class T, class TileT, bool kATransposed, bool kBTransposed>
__global__ void __launch_bounds__(kTileThreads)
    product_kernel(const T* a, const T* b, typename TileT::Real* c, Size s, bool whole) {
  using Real = typename TileT::Real;
  __shared__ TileShared<TileT> shared;
  const Place<TileT> at;
  const int m0 = static_cast<int>(blockIdx.y) * TileT::kRows;
  const int n0 = static_cast<int>(blockIdx.x) * TileT::kColumns;
  int k0 = -TileT::kRound;
  const auto panel = [&](const T* v, int line, int lines, int depth, bool along_depth, int pitch) {
    const int k = k0 + at.slice * TileT::kDepth + depth;
    if (line >= lines || k >= s.K) return Four<Real>{};
    return along_depth
               ? load_four(v + static_cast<std::int64_t>(line) * pitch + k, 1, s.K - k, whole)
               : load_four(v + static_cast<std::int64_t>(k) * pitch + line, 1, lines - line, whole);
  };
  Sums<TileT> sum = {};
  multiply<TileT, !kATransposed, kBTransposed>(
      shared.panel, (s.K + TileT::kRound - 1) / TileT::kRound, [&] { k0 += TileT::kRound; },
      [&](int line, int depth) {
        return panel(a, m0 + line, s.M, depth, !kATransposed, kATransposed ? s.M : s.K);
      },
      [&](int line, int depth) {
        return panel(b, n0 + line, s.N, depth, kBTransposed, kBTransposed ? s.K : s.N);
      },
      [](Sums<TileT>&) {}, sum);
  spread<TileT>(shared, sum);
  for_each_element<TileT>([&](int row, int column) { return total<TileT>(shared, row, column); },
                          [&](int row, int column, Real v) {
                            if (m0 + row < s.M && n0 + column < s.N) {
                              c[static_cast<std::int64_t>(m0 + row) * s.N + n0 + column] = v;
                            }
                          });
}

class CudaSimtGemm : public DeviceTest {
 protected:
  template <class T, class TileT, bool kATransposed, bool kBTransposed>
  void check(const Size& s, bool small_integers) {
    using Real = typename TileT::Real;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> small(-4, 4);
    std::vector<T> a(s.M * s.K), b(s.K * s.N);
    const auto draw = [&] {
      return T(small_integers ? static_cast<float>(small(random)) : normal(random));
    };
    for (T& v : a) v = draw();
    for (T& v : b) v = draw();
    const DeviceArray<T> da(a), db(b);
    const DeviceArray<Real> dc(s.M * s.N);
    const bool whole = s.M % 4 == 0 && s.N % 4 == 0 && s.K % 4 == 0;
    const dim3 grid(static_cast<unsigned>((s.N + TileT::kColumns - 1) / TileT::kColumns),
                    static_cast<unsigned>((s.M + TileT::kRows - 1) / TileT::kRows));
    product_kernel<T, TileT, kATransposed, kBTransposed>
        <<<grid, kTileThreads>>>(da.get(), db.get(), dc.get(), s, whole);
    finish();
    const std::vector<Real> c = dc.values();
    const double unit = sizeof(Real) == 8 ? 0x1p-52 : 0x1p-23;
    const auto value = [&](const std::vector<T>& v, int i) {
      return static_cast<double>(static_cast<Real>(v[i]));
    };
    for (int m = 0; m < s.M; ++m) {
      for (int n = 0; n < s.N; ++n) {
        double sum = 0, size = 0;
        for (int k = 0; k < s.K; ++k) {
          const double x = value(a, kATransposed ? k * s.M + m : m * s.K + k);
          const double y = value(b, kBTransposed ? n * s.K + k : k * s.N + n);
          sum = std::fma(x, y, sum);
          size += std::abs(x * y);
        }
        ASSERT_NEAR(c[m * s.N + n], sum, small_integers ? 0 : s.K * unit * size)
            << "m " << m << " n " << n;
      }
    }
  }
  template <class T>
  void check_all() {
    using Real = compute_t<T>;
    for (const Size& s :
         {Size{1, 1, 1}, Size{33, 65, 17}, Size{64, 64, 64}, Size{67, 31, 130}, Size{32, 100, 0}}) {
      for (const bool small_integers : {true, false}) {
        check<T, LargeTile<Real>, false, false>(s, small_integers);
        check<T, LargeTile<Real>, true, true>(s, small_integers);
        check<T, SmallTile<Real>, false, true>(s, small_integers);
        check<T, SmallTile<Real>, true, false>(s, small_integers);
      }
    }
  }
};

TEST_F(CudaSimtGemm, Float) { check_all<float>(); }
TEST_F(CudaSimtGemm, Double) { check_all<double>(); }
TEST_F(CudaSimtGemm, NarrowOperands) { check_all<bfloat16>(); }

}  // namespace
}  // namespace annulus::testing
