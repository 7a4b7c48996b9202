// Kernels that only move bytes, and event timing.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "annulus/core/buffer.h"
#include "annulus/core/errors.h"
#include "bench/gpu.h"

namespace annulus::bench::gpu {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw DeviceError(std::string("[bench] ") + what + ": " + cudaGetErrorString(status));
}

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
  const auto blocks = static_cast<unsigned>((vectors + kThreads - 1) / kThreads);
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

}  // namespace annulus::bench::gpu
