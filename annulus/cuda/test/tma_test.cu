// Boxes of tensors by the copy engine against the same elements one by one, and what a tensor map
// refuses.
#include "annulus/cuda/tma.cuh"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/cuda/cluster.cuh"
#include "annulus/cuda/wgmma.cuh"
#include "testing/device_test.h"

namespace annulus::testing {
namespace {

using namespace annulus::cuda;

constexpr int kMostBytes = 32 * 1024;

template <int Rank>
struct At {
  int i[Rank];
};

// One box from the tensor to `image`, as it lies in shared memory, or the other way.
template <int Rank>
__global__ void __launch_bounds__(128)
    box_kernel(const __grid_constant__ TensorMap map, At<Rank> at, int bytes, bool store,
               uint4* image) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ __align__(1024) uint4 box[kMostBytes / 16];
  __shared__ SharedBarrier barrier;
  const int thread = static_cast<int>(threadIdx.x);
  if (store) {
    for (int i = thread; i < bytes / 16; i += 128) box[i] = image[i];
    fence_shared_writes();
    __syncthreads();
    if (thread == 0) {
      store_box(map, at.i, box);
      commit_stores();
      wait_stores_read<0>();
      wait_stores<0>();
    }
    return;
  }
  if (thread == 0) {
    prefetch_map(map);
    prefetch_box(map, at.i);
    barrier.init(1);
    fence_barriers();
  }
  __syncthreads();
  if (thread == 0) {
    barrier.arrive_expecting(static_cast<unsigned>(bytes));
    load_box(box, map, at.i, &barrier);
  }
  barrier.wait(0);
  for (int i = thread; i < bytes / 16; i += 128) image[i] = box[i];
#else
  __trap();
#endif
}

// The first block of a cluster of two loads for both.
__global__ void multicast_kernel(const __grid_constant__ TensorMap map, int bytes, uint4* images) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ __align__(1024) uint4 box[kMostBytes / 16];
  __shared__ SharedBarrier barrier;
  if (threadIdx.x == 0) {
    barrier.init(1);
    fence_barriers();
    barrier.arrive_expecting(static_cast<unsigned>(bytes));
  }
  cluster_arrive();
  cluster_wait();
  if (cluster_rank() == 0 && threadIdx.x == 0) load_box(box, map, {0, 0}, &barrier, 3);
  barrier.wait(0);
  for (int i = static_cast<int>(threadIdx.x); i < bytes / 16; i += static_cast<int>(blockDim.x)) {
    images[cluster_rank() * (bytes / 16) + i] = box[i];
  }
  cluster_arrive();  // nobody leaves while the other may still receive
  cluster_wait();
#else
  __trap();
#endif
}

struct Layout {
  std::vector<std::int64_t> shape, strides;  // strides in numbers, of dimensions 1 ...
  std::vector<int> box;
  int swizzle = 0;
};

class CudaTma : public HopperTest {
 protected:
  template <class T, int Rank>
  void check(const Layout& l, const At<Rank>& at, DType dtype) {
    std::int64_t count = l.shape[0];
    std::vector<std::int64_t> bytes;
    for (int i = 1; i < Rank; ++i) {
      count = std::max(count, l.strides[i - 1] * l.shape[i]);
      bytes.push_back(l.strides[i - 1] * static_cast<std::int64_t>(sizeof(T)));
    }
    std::vector<T> values(count);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = T(static_cast<float>(i % 251) + 1);
    const DeviceArray<T> tensor(values);
    const int numbers = std::accumulate(l.box.begin(), l.box.end(), 1, std::multiplies<>());
    const int box_bytes = numbers * static_cast<int>(sizeof(T));
    ASSERT_LE(box_bytes, kMostBytes);
    const TensorMap map =
        make_tensor_map("test", {dtype, tensor.get(), l.shape, bytes, l.box, l.swizzle});

    const DeviceArray<T> image(std::vector<T>(numbers, T(-1.0f)));
    auto* const words = reinterpret_cast<uint4*>(image.get());
    box_kernel<Rank><<<1, 128>>>(map, at, box_bytes, false, words);
    finish();
    const std::vector<T> loaded = image.values();
    // f(number of the box in shared memory, number of the tensor or -1)
    const auto each = [&](auto&& f) {
      for (int n = 0; n < numbers; ++n) {
        std::int64_t from = 0;
        bool inside = true;
        for (int i = 0, rest = n; i < Rank; ++i) {
          const std::int64_t index = at.i[i] + rest % l.box[i];
          rest /= l.box[i];
          inside = inside && index >= 0 && index < l.shape[i];
          from += index * (i == 0 ? 1 : l.strides[i - 1]);
        }
        const auto byte = static_cast<std::uint32_t>(n * sizeof(T));
        f((l.swizzle == 0 ? byte : swizzled_byte(l.swizzle, byte)) / sizeof(T), inside ? from : -1);
      }
    };
    each([&](std::size_t to, std::int64_t from) {
      const float expected = from < 0 ? 0 : static_cast<float>(values[from]);
      ASSERT_EQ(static_cast<float>(loaded[to]), expected)
          << "number " << to << " of " << Rank << "-D box";
    });

    if (std::any_of(at.i, at.i + Rank, [](int i) { return i < 0; }))
      return;  // no store begins there
    // Back again, as other numbers: those of the box change, the others stay.
    std::vector<T> changed(numbers);
    for (std::size_t i = 0; i < changed.size(); ++i)
      changed[i] = T(-static_cast<float>(i % 241) - 1);
    const DeviceArray<T> source(changed);
    box_kernel<Rank><<<1, 128>>>(map, at, box_bytes, true, reinterpret_cast<uint4*>(source.get()));
    finish();
    each([&](std::size_t to, std::int64_t from) {
      if (from >= 0) values[from] = changed[to];
    });
    const std::vector<T> stored = tensor.values();
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(static_cast<float>(stored[i]), static_cast<float>(values[i])) << "element " << i;
    }
  }
};

TEST_F(CudaTma, BoxesOfOneToFiveDimensions) {
  check<float, 1>({{100}, {}, {64}}, {{40}}, DType::kF32);
  for (const int row : {0, 30, -3}) {  // inside, over the end, before the beginning
    check<float, 2>({{40, 33}, {44}, {16, 8}}, {{8, row}}, DType::kF32);
    check<bfloat16, 2>({{64, 33}, {72}, {64, 16}, 128}, {{0, row}}, DType::kBF16);
    check<float16, 2>({{96, 33}, {96}, {32, 16}, 64}, {{32, row}}, DType::kF16);
    check<float16, 2>({{96, 33}, {96}, {16, 16}, 32}, {{88, row}}, DType::kF16);
    check<bfloat16, 3>({{64, 20, 5}, {64, 64 * 20}, {64, 16, 2}, 128}, {{0, row, 3}}, DType::kBF16);
  }
  check<double, 3>({{10, 7, 3}, {12, 100}, {4, 4, 2}}, {{2, 5, -1}}, DType::kF64);
  check<float16, 4>({{64, 9, 4, 2}, {256, 64, 256 * 9}, {64, 8, 1, 1}, 128}, {{0, 4, 2, 1}},
                    DType::kF16);
  // Every third token of a head: dimensions D, residue, token / 3, head, sequence.
  check<bfloat16, 5>({{64, 3, 10, 2, 2}, {128, 384, 64, 128 * 30}, {64, 1, 8, 1, 1}, 128},
                     {{0, 1, 4, 1, 1}}, DType::kBF16);
}

TEST_F(CudaTma, OneBlockLoadsForItsCluster) {
  std::vector<float> values(64 * 16);
  std::iota(values.begin(), values.end(), 1.0f);
  const DeviceArray<float> tensor(values), images(2 * values.size());
  const std::int64_t shape[] = {64, 16}, strides[] = {256};
  const int box[] = {64, 16};
  const TensorMap map = make_tensor_map("test", {DType::kF32, tensor.get(), shape, strides, box});
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = cluster_launch(2, 128, 2, 0, nullptr, attribute);
  ASSERT_EQ(cudaLaunchKernelEx(&config, multicast_kernel, map, 64 * 16 * 4,
                               reinterpret_cast<uint4*>(images.get())),
            cudaSuccess);
  finish();
  const std::vector<float> both = images.values();
  for (std::size_t i = 0; i < both.size(); ++i) ASSERT_EQ(both[i], values[i % values.size()]);
}

TEST(TensorMap, RefusesWhatTheHardwareDoesNotHave) {
  const std::int64_t shape[] = {64, 8, 4, 4, 4, 4}, strides[] = {128, 1024, 4096, 16384, 65536};
  const int box[] = {64, 8, 1, 1, 1, 1};
  alignas(64) static char memory[64];
  const auto refuses = [&](const char* why, std::size_t rank, auto&& change) {
    TensorBox t{DType::kBF16, memory, {shape, rank}, {strides, rank - 1}, {box, rank}};
    change(t);
    try {
      (void)make_tensor_map("test", t);
      ADD_FAILURE() << "accepted: " << why;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
    }
  };
  const std::int64_t odd[] = {136};
  const int narrow[] = {4, 8}, tall[] = {64, 257};
  refuses("1 to 5 dimensions", 6, [](TensorBox&) {});
  refuses("aligned to 16", 2, [&](TensorBox& t) { t.data = memory + 8; });
  refuses("one stride less", 2, [&](TensorBox& t) { t.strides = {strides, 2}; });
  refuses("multiple of 16 bytes", 2, [&](TensorBox& t) { t.strides = odd; });
  refuses("multiples of 16 bytes", 2, [&](TensorBox& t) { t.box = narrow; });
  refuses("1 to 256", 2, [&](TensorBox& t) { t.box = tall; });
  refuses("wider than the swizzle", 2, [](TensorBox& t) { t.swizzle = 64; });
  refuses("0, 32, 64 or 128", 2, [](TensorBox& t) { t.swizzle = 256; });
}

}  // namespace
}  // namespace annulus::testing
