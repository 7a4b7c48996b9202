// The benchmark on CUDA: kernels that only move bytes, event timing, and what a device can do at most.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "annulus/core/buffer.h"
#include "annulus/core/checked.h"
#include "annulus/core/errors.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/cluster.cuh"
#include "annulus/cuda/memory.h"
#include "bench/gpu.h"
#include "bench/statistics.h"
#if ANNULUS_BENCH_CUBLAS
#include <cublas_v2.h>
#endif

namespace annulus::bench::gpu {
namespace {

void check(cudaError_t status, const char* what) { cuda::throw_on_error(status, "bench", what); }

// --- moving ---------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr std::size_t kFlushBytes = std::size_t{256} << 20;

// As many pointers as the kernel uses: parameters are part of what a short launch costs.
template <int In, int Out>
struct Streams {
  const uint4* in[In];
  uint4* out[Out];
};

// Thread i owns vector i of every stream. All loads are issued before the first use. Plain loads
// and stores: the streaming hints (__ldcs, __stcs) cost 1 % forward and 7 % backward at 3.6 GB on
// an H200.
template <int In, int Out>
__global__ void __launch_bounds__(kThreads) move_kernel(Streams<In, Out> s, std::int64_t vectors) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  uint4 v[In];
#pragma unroll
  for (int k = 0; k < In; ++k) v[k] = s.in[k][i];
  uint4 r = v[0];
#pragma unroll
  for (int k = 1; k < In; ++k) {
    r.x ^= v[k].x;
    r.y ^= v[k].y;
    r.z ^= v[k].z;
    r.w ^= v[k].w;
  }
#pragma unroll
  for (int k = 0; k < Out; ++k) s.out[k][i] = r;
}

template <int In, int Out>
void launch(const std::vector<const void*>& in, const std::vector<void*>& out,
            std::int64_t vectors) {
  Streams<In, Out> s;
  for (std::size_t k = 0; k < In; ++k) s.in[k] = static_cast<const uint4*>(in[k]);
  for (std::size_t k = 0; k < Out; ++k) s.out[k] = static_cast<uint4*>(out[k]);
  const auto blocks = static_cast<unsigned>(ceil_div(vectors, kThreads));
  move_kernel<In, Out><<<blocks, kThreads>>>(s, vectors);
}

using Launch = void (*)(const std::vector<const void*>&, const std::vector<void*>&, std::int64_t);

Launch launch_for(std::size_t in, std::size_t out) {
  if (in == 1 && out == 1) return launch<1, 1>;
  if (in == 1 && out == 2) return launch<1, 2>;
  if (in == 2 && out == 1) return launch<2, 1>;
  if (in == 2 && out == 4) return launch<2, 4>;
  if (in == 3 && out == 1) return launch<3, 1>;
  return nullptr;
}

}  // namespace

struct ColdTimer::State {
  Buffer flush{cuda_device(), kFlushBytes};
  std::vector<cudaEvent_t> events;

  void reserve(std::size_t n) {
    while (events.size() < n) {
      cudaEvent_t e;
      check(cudaEventCreate(&e), "cudaEventCreate");
      events.push_back(e);
    }
  }
  ~State() {
    for (cudaEvent_t e : events) cudaEventDestroy(e);
  }
};

ColdTimer::ColdTimer() : state_(std::make_unique<State>()) {}
ColdTimer::~ColdTimer() = default;

std::vector<std::vector<double>> ColdTimer::time(
    const std::vector<std::function<void()>>& implementations, int repetitions) {
  const std::size_t count = implementations.size() * static_cast<std::size_t>(repetitions);
  state_->reserve(2 * count);
  std::size_t next = 0;
  for (int r = 0; r < repetitions; ++r) {
    for (const auto& run : implementations) {
      check(cudaMemsetAsync(state_->flush.data(), r & 1, kFlushBytes, nullptr), "cudaMemsetAsync");
      check(cudaEventRecord(state_->events[next++], nullptr), "cudaEventRecord");
      run();
      check(cudaEventRecord(state_->events[next++], nullptr), "cudaEventRecord");
    }
  }
  check(cudaDeviceSynchronize(), "a timed call");
  std::vector<std::vector<double>> times(implementations.size());
  for (std::size_t i = 0; i < count; ++i) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, state_->events[2 * i], state_->events[2 * i + 1]),
          "cudaEventElapsedTime");
    times[i % implementations.size()].push_back(static_cast<double>(ms));
  }
  return times;
}

bool can_move(std::size_t in, std::size_t out) { return launch_for(in, out) != nullptr; }

void move(const std::vector<const void*>& in, const std::vector<void*>& out, std::size_t bytes) {
  const Launch launch_streams = launch_for(in.size(), out.size());
  if (launch_streams == nullptr) throw NotSupported("[bench] no kernel moves that many streams");
  const auto vectors = static_cast<std::int64_t>(bytes / sizeof(uint4));
  if (vectors == 0) return;
  launch_streams(in, out, vectors);
  check(cudaGetLastError(), "move_kernel");
}

// --- ceilings --------------------------------------------------------------------------------------

namespace {

constexpr int kBarrierThreads = 256;
constexpr int kBarrierRounds = 1000;
constexpr unsigned kClusterBlocks = 8;

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

// The shortest of some bursts, with pauses between them: what power allows is less for a while after minutes of load (an H200: 627 TFLOP/s
// of bf16 where it makes 885), and floors of such a rate can be beaten.
double best_ms(const std::function<void()>& run) {
  ColdTimer timer;
  timer.time({run}, 3);
  double best = summarize(timer.time({run}, 4)[0]).min;
  for (int burst = 0; burst < 5; ++burst) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    best = std::min(best, summarize(timer.time({run}, 4)[0]).min);
  }
  return best;
}

// One stream in, one out, 1 GiB each (less on a small device).
double copy_gbs() {
  const std::size_t bytes = std::min(std::size_t{1} << 30, cuda::free_bytes(0) / 4) / 256 * 256;
  const Buffer from(cuda_device(), bytes), to(cuda_device(), bytes);
  check(cudaMemset(from.data(), 1, bytes), "cudaMemset");
  const double ms = median_ms([&] { move({from.data()}, {to.data()}, bytes); }, 20);
  return 2e-6 * static_cast<double>(bytes) / ms;
}

// One barrier among blocks of 256 threads: across a grid with a block on every multiprocessor (an
// atomic counter), and across a cluster of eight blocks (0 before compute capability 9). The steps
// of a recurrence that is spread over such blocks cannot do without one each.
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

// fp32 sums; 0 in a build without cuBLAS.
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
  const double ms = best_ms([&] {
    ok = ok && cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a.data(), type, n,
                            b.data(), type, n, &zero, c.data(), type, n, compute,
                            CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS;
  });
  cublasDestroy(handle);
  if (!ok) throw DeviceError("[bench] cublasGemmEx failed");
  const double size = n;
  return 2e-6 * size * size * size / ms;
}
#else
double gemm_gflops(Precision) { return 0; }
#endif

}  // namespace

Ceilings ceilings() {
  Ceilings c;
  c.copy_gbs = copy_gbs();
  for (const Precision p : kAllProducts) c.rate(p) = gemm_gflops(p);
  c.launch_ms = median_ms([] { empty_kernel<<<1, 32>>>(); }, 50);
  c.barrier_ms = grid_barrier_ms();
  c.small_barrier_ms = cluster_barrier_ms();
  const double shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  c.small_bytes = kClusterBlocks * shared;
  c.on_chip_bytes = (shared + 4.0 * attribute(cudaDevAttrMaxRegistersPerMultiprocessor)) *
                        attribute(cudaDevAttrMultiProcessorCount) +
                    attribute(cudaDevAttrL2CacheSize);
  return c;
}

}  // namespace annulus::bench::gpu
