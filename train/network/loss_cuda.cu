// One warp a row: a fixed tree of partial sums, so that a row's bits depend on nothing else.
#include "annulus/cuda/check.h"
#include "train/network/loss.h"

namespace annulus::train::cuda {
namespace {

constexpr int kWarps = 8;  // rows a block
constexpr int kWarp = 32;

__global__ void sums_kernel(const float* states, const float* ring, float* sums, std::int64_t rows,
                            std::int64_t N) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.y;
  if (row >= rows) return;  // whole warps leave together
  const float* r = states + row * N;
  float x = 0, y = 0, s = 0;
  for (std::int64_t i = threadIdx.x; i < N; i += kWarp) {
    x += r[i] * ring[i];
    y += r[i] * ring[N + i];
    s += fabsf(r[i]);
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
    y += __shfl_xor_sync(0xffffffffu, y, step);
    s += __shfl_xor_sync(0xffffffffu, s, step);
  }
  if (threadIdx.x == 0) {
    sums[3 * row] = x;
    sums[3 * row + 1] = y;
    sums[3 * row + 2] = s;
  }
}

__global__ void gradients_kernel(const float* states, const float* ring, const float* dsums,
                                 float* dstates, std::int64_t rows, std::int64_t N) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.y;
  if (row >= rows) return;
  const float dX = dsums[3 * row], dY = dsums[3 * row + 1], dS = dsums[3 * row + 2];
  for (std::int64_t i = threadIdx.x; i < N; i += kWarp) {
    const float r = states[row * N + i];
    const float sign = static_cast<float>(r > 0) - static_cast<float>(r < 0);
    dstates[row * N + i] = dX * ring[i] + dY * ring[N + i] + dS * sign;
  }
}

// Starts `kernel` with the tensors, the number of rows and the neurons.
template <class... K, class... V>
void launch(const char* name, void (*kernel)(K...), const TensorView& states, Context& context,
            const V&... tensors) {
  const std::int64_t rows = states.shape[0] * states.shape[1];
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
  kernel<<<blocks, dim3(kWarp, kWarps), 0, static_cast<cudaStream_t>(context.stream)>>>(
      static_cast<float*>(states.data), static_cast<float*>(tensors.data)..., rows,
      states.shape[2]);
  annulus::cuda::check_launch("train", name);
}

}  // namespace

void population_sums(const TensorView& states, const TensorView& ring, const TensorView& sums,
                     Context& context) {
  launch("sums_kernel", sums_kernel, states, context, ring, sums);
}

void population_gradients(const TensorView& states, const TensorView& ring, const TensorView& dsums,
                          const TensorView& dstates, Context& context) {
  launch("gradients_kernel", gradients_kernel, states, context, ring, dsums, dstates);
}

}  // namespace annulus::train::cuda
