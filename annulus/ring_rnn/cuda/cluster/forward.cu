// The forward loop in clusters: an element is the state of one neuron of one sample.
#include <atomic>

#include "annulus/ring_rnn/cuda/cluster/loop.cuh"
#include "annulus/ring_rnn/cuda/forward_epilogue.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

class ForwardElement {
 public:
  using Pass = ForwardPass;

  __device__ ForwardElement(const ForwardPass& loop, std::int64_t row, int col, int rank)
      : row_(row), col_(col), rank_(rank), inside_(row < loop.args.B && col < loop.args.N) {}

  // Each gives X of the step that comes next.
  __device__ float begin(const ForwardPass& loop) {
    if (loop.vectors != nullptr) {
      sincospif(2.0f * (static_cast<float>(col_) / static_cast<float>(loop.args.N)), &sine_,
                &cosine_);
    }
    if (inside_) {
      visit_narrow(loop.dtype, [&]<class T>() { s_[0] = first_of_loop<T>(loop, row_, col_); });
    }
    step_.begin(loop, row_, col_);
    return s_[0];
  }
  // What a step is made of besides the product, loaded while that is made.
  __device__ void load(const ForwardPass& loop, std::int64_t t) { step_.load(loop, t, row_, col_); }
  __device__ float finish(const ForwardPass& loop, std::int64_t t, float sum, float row_sum) {
    float r[1];
    step_.in[0].s = s_[0];
    step_.finish(loop, t, row_, col_, {sum}, row_sum, r, s_);
    if (loop.vectors != nullptr) {
      const float x = warp_sum(r[0] * cosine_);
      const float y = warp_sum(r[0] * sine_);
      if ((threadIdx.x & 31) == 0) {
        const Layout& s = loop.layout;
        *reinterpret_cast<float2*>(loop.vectors + ((t * s.row_parts + rank_) * s.padded_b + row_) *
                                                      2) = make_float2(x, y);
      }
    }
    return s_[0];
  }
  __device__ void end(const ForwardPass&) {}

 private:
  std::int64_t row_;
  int col_, rank_;
  bool inside_;
  float s_[1] = {};
  ForwardStep<1> step_ = {};
  float sine_ = 0, cosine_ = 0;
};

}  // namespace

void run_forward(const ForwardPass& pass, const ClusterTiling& tiling, const Launch& launch) {
  launch_cluster<ForwardElement>({pass, tiling}, launch);
}

int clusters_at_once(int blocks, std::size_t shared, const char* op) {
  // Asked once for every device and size: the answer takes longer than a small call.
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kMostBlocks + 1];  // 0: not asked yet
  int device = 0;
  ANNULUS_CUDA_CHECK(op, cudaGetDevice(&device));
  std::atomic<int>* const cached = device < kDevices ? &known[device][blocks] : nullptr;
  if (cached != nullptr && cached->load(std::memory_order_relaxed) > 0) return cached->load();
  auto* const kernel = cluster_kernel<1, 16, ForwardElement>;
  allow_shared(op, "shared memory of the ring loop in clusters", kernel, shared);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config =
      cluster_launch(static_cast<unsigned>(blocks), kClusterThreads, static_cast<unsigned>(blocks),
                     shared, nullptr, attribute);
  int count = 0;
  throw_on_error(cudaOccupancyMaxActiveClusters(&count, kernel, &config), op,
                 "clusters of the ring loop");
  if (cached != nullptr) cached->store(count, std::memory_order_relaxed);
  return count;
}

}  // namespace annulus::ring_rnn::cuda::tensor
