// The ways one call can run on a GPU: all steps in one launch or a launch a part of a step, which
// give the same bits, and the kernels of compute capability 8.0 where the GPU has better ones.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "annulus/core/buffer.h"
#include "annulus/cuda/memory.h"
#include "annulus/ring_rnn/plan.h"
#include "testing/case.h"

#if ANNULUS_HAVE_CUDA
namespace annulus::testing {
namespace {

constexpr Device kGpu = cuda_device(0);

// A tensor of f32 or f16 on the GPU.
class Tensor {
 public:
  Tensor(std::vector<std::int64_t> shape, double scale, std::uint64_t seed,
         DType dtype = DType::kF32)
      : shape_(std::move(shape)), dtype_(dtype) {
    Rng rng(seed);
    std::vector<float> wide(count());
    for (float& v : wide) v = static_cast<float>(scale * rng.normal());
    const std::vector<float16> narrow(wide.begin(), wide.end());
    const bool f32 = dtype == DType::kF32;
    buffer_ = Buffer(kGpu, count() * size_of(dtype));
    copy_bytes(buffer_.data(), kGpu, f32 ? static_cast<const void*>(wide.data()) : narrow.data(),
               kCPU, buffer_.bytes());
  }
  TensorView view() const { return contiguous(buffer_.data(), dtype_, shape_, kGpu); }
  std::vector<float> read() const {
    std::vector<float> wide(count());
    if (dtype_ == DType::kF32) {
      copy_bytes(wide.data(), kCPU, buffer_.data(), kGpu, buffer_.bytes());
      return wide;
    }
    std::vector<float16> narrow(count());
    copy_bytes(narrow.data(), kCPU, buffer_.data(), kGpu, buffer_.bytes());
    for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<float>(narrow[i]);
    return wide;
  }

 private:
  std::size_t count() const {
    std::size_t n = 1;
    for (const std::int64_t s : shape_) n *= static_cast<std::size_t>(s);
    return n;
  }
  std::vector<std::int64_t> shape_;
  DType dtype_;
  Buffer buffer_;
};

struct Way {
  bool stepwise = false, portable = false;
};

// out and gradients of one problem, one after the other.
std::vector<float> run(Precision precision, std::int64_t checkpoint, Way way, std::int64_t N) {
  constexpr std::int64_t B = 70, T = 5, K = 3;
  ring_rnn::Plan plan;
  plan.device = kGpu;
  plan.precision = precision;
  plan.dtype = precision == Precision::kF16 ? DType::kF16 : DType::kF32;
  plan.activation = RingRnnActivation::kGelu;
  plan.checkpoint = checkpoint;
  plan.stepwise = way.stepwise;
  plan.portable = way.portable;
  plan.B = B;
  plan.T = T;
  plan.K = K;
  plan.N = N;
  const double gain = 1 / std::sqrt(static_cast<double>(N));
  const DType own = plan.dtype;
  const Tensor A({B, T, K}, 0.7, 1, own), Wa({K, N, N}, gain, 2, own), Wo({N, N}, gain, 3, own);
  const Tensor r0({B, N}, 1, 4), dout({B, T, N}, 1, 5, own);
  const Tensor out({B, T, N}, 0, 6, own), saved({plan.saved_steps(), B, N}, 0, 7);
  const Tensor dA({B, T, K}, 0, 8, own), dWa({K, N, N}, 0, 9, own), dWo({N, N}, 0, 10, own);
  const Tensor dr0({B, N}, 0, 11);
  plan.in.A = A.view();
  plan.in.Wa = Wa.view();
  plan.in.Wo = Wo.view();
  plan.in.r0 = r0.view();
  plan.out.out = out.view();
  plan.out.saved = saved.view();
  Context context;
  ring_rnn::cuda::forward(plan, context);
  plan.dout = dout.view();
  plan.grad.dA = dA.view();
  plan.grad.dWa = dWa.view();
  plan.grad.dWo = dWo.view();
  plan.grad.dr0 = dr0.view();
  ring_rnn::cuda::backward(plan, context);
  synchronize(kGpu);
  std::vector<float> all;
  for (const Tensor* t : {&out, &dA, &dWa, &dWo, &dr0}) {
    const std::vector<float> v = t->read();
    all.insert(all.end(), v.begin(), v.end());
  }
  return all;
}

double relative(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(error / size);
}

bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

#define ANNULUS_SKIP_WITHOUT_GPU()           \
  if (!cuda::why_unavailable().empty()) {    \
    GTEST_SKIP() << cuda::why_unavailable(); \
  }

TEST(RingRnnPaths, StepByStepGivesTheBitsOfOneLaunch) {
  ANNULUS_SKIP_WITHOUT_GPU();
  for (const Precision p : {Precision::kBf16, Precision::kF16, Precision::kBf16x3,
                            Precision::kBf16x6, Precision::kFp32}) {
    for (const bool portable : {false, true}) {  // 320 neurons: clusters know no single steps
      EXPECT_TRUE(equal_bits(run(p, 0, {.portable = portable}, 320),
                             run(p, 0, {.stepwise = true, .portable = portable}, 320)))
          << "precision " << static_cast<int>(p) << (portable ? " portable" : "");
    }
  }
}

TEST(RingRnnPaths, CheckpointsGiveTheSameBits) {
  ANNULUS_SKIP_WITHOUT_GPU();
  for (const Precision p : {Precision::kBf16, Precision::kF16, Precision::kBf16x6}) {
    for (const std::int64_t N : {100, 320}) {
      for (const bool portable : {false, true}) {
        EXPECT_TRUE(
            equal_bits(run(p, 0, {.portable = portable}, N), run(p, 2, {.portable = portable}, N)))
            << "precision " << static_cast<int>(p) << (portable ? " portable" : "") << ", N " << N;
      }
    }
  }
}

TEST(RingRnnPaths, PortableKernelsAgreeWithTheOthers) {
  ANNULUS_SKIP_WITHOUT_GPU();
  struct Bound {
    Precision precision;
    double limit;  // twice what the mode's own error is, ring_rnn.md
  };
  for (const Bound b : {Bound{Precision::kBf16, 1e-2}, Bound{Precision::kF16, 2e-3},
                        Bound{Precision::kBf16x3, 2e-5}, Bound{Precision::kBf16x6, 4e-6}}) {
    for (const std::int64_t N : {100, 320}) {
      EXPECT_LE(relative(run(b.precision, 0, {.portable = true}, N), run(b.precision, 0, {}, N)),
                b.limit)
          << "precision " << static_cast<int>(b.precision) << ", N " << N;
    }
  }
}

}  // namespace
}  // namespace annulus::testing
#endif  // ANNULUS_HAVE_CUDA
