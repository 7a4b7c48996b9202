// What a CUDA device can do at most: copy, matrix products, an empty launch, barriers.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "annulus/core/buffer.h"
#include "annulus/core/errors.h"
#include "annulus/cuda/cluster.cuh"
#include "annulus/cuda/memory.h"
#include "bench/gpu.h"
#include "bench/statistics.h"
#if ANNULUS_BENCH_CUBLAS
#include <cublas_v2.h>
#endif

namespace annulus::bench::gpu {
namespace {

constexpr int kBarrierThreads = 256;
constexpr int kBarrierRounds = 1000;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw DeviceError(std::string("[bench] ") + what + ": " + cudaGetErrorString(status));
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, 0), "cudaDeviceGetAttribute");
  return value;
}

__global__ void empty_kernel() {}

// One thread of each block counts the block in and waits until the counter says that all are: the
// release of the add and the acquire of the load carry everything written before.
__global__ void __launch_bounds__(kBarrierThreads) grid_barriers(unsigned* counter) {
  for (unsigned round = 1; round <= kBarrierRounds; ++round) {
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
      unsigned seen = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
      } while (seen < round * gridDim.x);
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kBarrierThreads) cluster_barriers() {
#if __CUDA_ARCH__ >= 900
  for (int round = 0; round < kBarrierRounds; ++round) {
    cuda::cluster_arrive();
    cuda::cluster_wait();
  }
#endif
}

double median_ms(const std::function<void()>& run, int repetitions) {
  ColdTimer timer;
  timer.time({run}, 3);
  return summarize(timer.time({run}, repetitions)[0]).median;
}

}  // namespace

double copy_gbs() {
  const std::size_t bytes = std::min(std::size_t{1} << 30, cuda::free_bytes(0) / 4) / 256 * 256;
  const Buffer from(cuda_device(), bytes), to(cuda_device(), bytes);
  check(cudaMemset(from.data(), 1, bytes), "cudaMemset");
  const double ms = median_ms([&] { move({from.data()}, {to.data()}, bytes); }, 20);
  return 2e-6 * static_cast<double>(bytes) / ms;
}

double launch_ms() {
  return median_ms([] { empty_kernel<<<1, 32>>>(); }, 50);
}

double grid_barrier_ms() {
  const Buffer counter(cuda_device(), sizeof(unsigned));
  const auto blocks = static_cast<unsigned>(attribute(cudaDevAttrMultiProcessorCount));
  void* pointer = counter.data();
  void* arguments[] = {&pointer};
  const double ms = median_ms(
      [&] {
        check(cudaMemsetAsync(pointer, 0, sizeof(unsigned), nullptr), "cudaMemsetAsync");
        // Cooperative: refused, instead of a spin for ever, where the blocks cannot all be resident.
        check(cudaLaunchCooperativeKernel(grid_barriers, dim3(blocks), dim3(kBarrierThreads),
                                          arguments, 0, nullptr),
              "cudaLaunchCooperativeKernel");
      },
      10);
  return ms / kBarrierRounds;
}

double cluster_barrier_ms() {
  if (attribute(cudaDevAttrComputeCapabilityMajor) < 9) return 0;
  cudaLaunchAttribute in_clusters;
  const cudaLaunchConfig_t config = cuda::cluster_launch(kClusterBlocks, kBarrierThreads,
                                                         kClusterBlocks, 0, nullptr, in_clusters);
  const double ms = median_ms(
      [&] { check(cudaLaunchKernelEx(&config, cluster_barriers), "cudaLaunchKernelEx"); }, 10);
  return ms / kBarrierRounds;
}

double cluster_bytes() {
  return static_cast<double>(kClusterBlocks) *
         attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
}

double on_chip_bytes() {
  const double each = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) +
                      4.0 * attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  return each * attribute(cudaDevAttrMultiProcessorCount) + attribute(cudaDevAttrL2CacheSize);
}

#if ANNULUS_BENCH_CUBLAS
double gemm_gflops(Precision products) {
  const bool half = products == Precision::kBf16;
  const std::size_t width = half ? 2 : 4;
  // 8192^3 fills any GPU; fp32 is slow enough to be done with less, and a small GPU gets less so
  // that three matrices fit easily.
  int n = products == Precision::kFp32 ? 4096 : 8192;
  const auto matrix = [&] { return static_cast<std::size_t>(n) * static_cast<std::size_t>(n); };
  while (n > 1024 && matrix() * 3 * width > cuda::free_bytes(0) / 4) n /= 2;
  const std::size_t bytes = matrix() * width;
  const Buffer a(cuda_device(), bytes), b(cuda_device(), bytes), c(cuda_device(), bytes);
  // Small normal numbers: zeros would let the chip clock higher than real data does.
  check(cudaMemset(a.data(), 0x3d, bytes), "cudaMemset");
  check(cudaMemset(b.data(), 0x3c, bytes), "cudaMemset");
  cublasHandle_t handle;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) {
    throw DeviceError("[bench] cublasCreate failed");
  }
  const float one = 1, zero = 0;
  const cudaDataType_t type = half ? CUDA_R_16BF : CUDA_R_32F;
  const cublasComputeType_t compute = half                           ? CUBLAS_COMPUTE_32F
                                      : products == Precision::kTf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                     : CUBLAS_COMPUTE_32F_PEDANTIC;
  bool ok = true;
  const double ms = median_ms(
      [&] {
        ok = ok && cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a.data(), type, n,
                                b.data(), type, n, &zero, c.data(), type, n, compute,
                                CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS;
      },
      10);
  cublasDestroy(handle);
  if (!ok) throw DeviceError("[bench] cublasGemmEx failed");
  const double size = n;
  return 2e-6 * size * size * size / ms;
}
#else
double gemm_gflops(Precision) { return 0; }
#endif

}  // namespace annulus::bench::gpu
