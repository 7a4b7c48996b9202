// Fragments from shared memory, both ways round, against products in plain loops; copies that are zeros.
#include "annulus/cuda/mma.cuh"

#include <cstdint>
#include <vector>

#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

// One warp: c (16 x 16) = a b^T and d = a b of 16 x 16 tiles. Rows of `b` from `rows` on are zeros instead of copies.
__global__ void products_kernel(const bfloat16* a, const bfloat16* b, int rows, float* c,
                                float* d) {
  __shared__ __align__(16) bfloat16 tile_a[16][16], tile_b[16][16];
  const int lane = static_cast<int>(threadIdx.x), row = lane / 2, column = lane % 2 * 8;
  copy_async_16_or_zeros(shared_address(&tile_a[row][column]), a + row * 16 + column, true);
  copy_async_16_or_zeros(shared_address(&tile_b[row][column]), b + row * 16 + column, row < rows);
  copy_async_commit();
  copy_async_wait<0>();
  __syncwarp();
  const uint4 fa = ldmatrix(shared_address(&tile_a[lane % 16][lane / 16 * 8]));
  const uint4 fb = ldmatrix(shared_address(&tile_b[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]));
  const uint4 ft = ldmatrix_transposed(shared_address(&tile_b[lane % 16][lane / 16 * 8]));
  float product[4][4] = {};
  mma<bfloat16>(product[0], fa, fb.x, fb.y);
  mma<bfloat16>(product[1], fa, fb.z, fb.w);
  mma<bfloat16>(product[2], fa, ft.x, ft.y);
  mma<bfloat16>(product[3], fa, ft.z, ft.w);
  for (int n = 0; n < 4; ++n) {
    for (int e = 0; e < 4; ++e) {
      float* to = n < 2 ? c : d;
      to[(lane / 4 + e / 2 * 8) * 16 + n % 2 * 8 + lane % 4 * 2 + e % 2] = product[n][e];
    }
  }
}

using CudaMma = DeviceTest;

TEST_F(CudaMma, FragmentsBothWaysRound) {
  std::vector<bfloat16> a, b;
  for (int i = 0; i < 256; ++i) {
    a.push_back(bfloat16(static_cast<float>(i * 7 % 13 - 6)));
    b.push_back(bfloat16(static_cast<float>(i * 5 % 11 - 5)));
  }
  for (const int rows : {16, 5}) {
    const DeviceArray<bfloat16> on_a(a), on_b(b);
    const DeviceArray<float> c(256), d(256);
    products_kernel<<<1, 32>>>(on_a.get(), on_b.get(), rows, c.get(), d.get());
    finish();
    const std::vector<float> got_c = c.values(), got_d = d.values();
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) {
        float by_rows = 0, by_columns = 0;
        for (int k = 0; k < 16; ++k) {
          const auto at = static_cast<float>(a[static_cast<std::size_t>(i * 16 + k)]);
          if (j < rows) by_rows += at * static_cast<float>(b[static_cast<std::size_t>(j * 16 + k)]);
          if (k < rows)
            by_columns += at * static_cast<float>(b[static_cast<std::size_t>(k * 16 + j)]);
        }
        EXPECT_EQ(got_c[static_cast<std::size_t>(i * 16 + j)], by_rows) << i << " " << j;
        EXPECT_EQ(got_d[static_cast<std::size_t>(i * 16 + j)], by_columns) << i << " " << j;
      }
    }
  }
}

}  // namespace
}  // namespace annulus::testing
