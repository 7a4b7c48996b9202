// The backward loop in clusters: an element is l = dL/dr of one neuron of one sample, and what is
// summed over its steps.
#include "annulus/ring_rnn/cuda/backward_epilogue.cuh"
#include "annulus/ring_rnn/cuda/cluster/loop.cuh"

namespace annulus::ring_rnn::cuda::tensor {

namespace {

class BackwardElement {
 public:
  using Pass = BackwardPass;

  __device__ BackwardElement(const BackwardPass& loop, std::int64_t row, int col, int rank)
      : row_(row),
        col_(col),
        rank_(rank),
        at_(row * loop.layout.padded_n + col),
        inside_(row < loop.args.B && col < loop.args.N) {
    const Args& a = loop.args;
    if (a.dout) dout_at_ = offset<float>(a.dout, row, 0, col);
    y_at_ = row * loop.y_stride[1] + col * loop.y_stride[2] - loop.y_first * loop.y_stride[0];
    out_at_ = offset<float>(a.out, row, 0, col);
  }

  // g of the last step.
  __device__ float begin(const BackwardPass& loop) {
    const Args& a = loop.args;
    const std::int64_t t = loop.last - 1;
    if (inside_) {
      visit_narrow(loop.dtype, [&]<class T>() {
        J0_ = get<T>(a.J0);
        alpha_ = get<T>(a.alpha, col_);
        if (loop.last < a.T) {  // the launch before left them
          l_ = loop.l[at_];
          if (loop.alpha_sums != nullptr) alpha_sum_ = loop.alpha_sums[at_];
          if (loop.reset_sums != nullptr) taken_ = loop.reset_sums[at_];
        } else {
          if (a.dh_n) l_ = get<float>(a.dh_n, row_, col_);
          if (a.dout) l_ += get<T>(a.dout, row_, t, col_);
        }
      });
    }
    load_opening(loop, t);
    return make_g(loop, t);
  }
  // What the epilogue of step t is made of besides the product, loaded while that is made.
  __device__ void load(const BackwardPass& loop, std::int64_t t) {
    const Args& a = loop.args;
    counts_ = inside_ && live(a, row_, t);
    reset_ = inside_ && resets(a, row_, t);
    dout_ = 0;
    if (inside_ && a.dout && t > 0) {
      dout_ =
          load_bits(a.dout.data, dout_at_ + (t - 1) * a.dout.stride[1], loop.dtype == DType::kF32);
    }
    if (t > loop.leave_at) load_opening(loop, t - 1);
  }
  __device__ float finish(const BackwardPass& loop, std::int64_t t, float sum, float row_sum) {
    const Args& a = loop.args;
    if (counts_) l_ = state_gradient(l_, alpha_, J0_, row_sum, sum);
    if (reset_) {
      taken_ += l_;
      l_ = 0;
    }
    l_ += number_of(loop.dtype, dout_);
    if (t == 0 && inside_) {
      visit_narrow(loop.dtype, [&]<class T>() {
        if (a.dreset_state) put_either<T>(a.dreset_state, taken_, row_, col_);
        if (a.dr0) put_either<T>(a.dr0, loop.own_reset_state ? l_ : l_ + taken_, row_, col_);
      });
    }
    return t > loop.leave_at ? make_g(loop, t - 1) : 0.0f;
  }
  __device__ void end(const BackwardPass& loop) {
    loop.l[at_] = l_;
    if (loop.alpha_sums != nullptr) loop.alpha_sums[at_] = alpha_sum_;
    if (loop.reset_sums != nullptr) loop.reset_sums[at_] = taken_;
  }

 private:
  __device__ void load_opening(const BackwardPass& loop, std::int64_t t) {
    const Args& a = loop.args;
    opens_ = inside_ && live(a, row_, t);
    s_ = 0;
    if (!opens_) return;
    y_ = loop.y[y_at_ + t * loop.y_stride[0]];
    if (loop.alpha_sums == nullptr && loop.s_sums == nullptr) return;
    if (t > 0 && !a.reset) {  // as state_row() would find it
      s_type_ = loop.dtype;
      s_ = load_bits(a.out.data, out_at_ + (t - 1) * a.out.stride[1], s_type_ == DType::kF32);
      return;
    }
    StateRow from;
    visit_narrow(loop.dtype, [&]<class T>() { from = state_row<T>(a, row_, t); });
    s_type_ = from.wide ? DType::kF32 : loop.dtype;
    s_ = load_bits(from.data, col_ * from.step, s_type_ == DType::kF32);
  }
  __device__ float make_g(const BackwardPass& loop, std::int64_t t) {
    const Args& a = loop.args;
    const Layout& layout = loop.layout;
    const float s = number_of(s_type_, s_);
    float g = 0;
    if (opens_) {
      const Opened step = open_step(activate_and_slope(a.activation, y_), alpha_, s, l_);
      g = step.g;
      alpha_sum_ += step.moved;
    }
    if (loop.g != nullptr) store_g<1>(loop, t, row_, col_, {g});
    if (a.ddrive && inside_) {
      visit_narrow(loop.dtype, [&]<class T>() { put<T>(a.ddrive, g, row_, t, col_); });
    }
    if (loop.s_sums != nullptr) {
      const float sum_g = warp_sum(g);
      const float sum_s = warp_sum(s);
      if ((threadIdx.x & 31) == 0) {
        const std::int64_t to = (t * layout.row_parts + rank_) * layout.padded_b + row_;
        loop.g_sums[to] = sum_g;
        loop.s_sums[to] = sum_s;
      }
    }
    return g;
  }

  std::int64_t row_;
  int col_, rank_;
  std::int64_t at_;
  std::int64_t dout_at_ = 0, y_at_, out_at_;  // of this element at time 0
  bool inside_;
  float J0_ = 0, alpha_ = 0;
  float l_ = 0;
  float alpha_sum_ = 0;  // l (F(y) - s) of the steps so far
  float taken_ = 0;      // out of the recurrence by resets so far
  bool counts_ = false, reset_ = false;
  bool opens_ = false;  // the step before counts
  float y_ = 0;
  std::uint32_t dout_ = 0, s_ = 0;  // still bits: what is asked for ahead is not waited for there
  DType s_type_ = DType::kF32;
};

}  // namespace

void run_backward(const BackwardPass& pass, const ClusterTiling& tiling, const Launch& launch) {
  launch_cluster<BackwardElement>({pass, tiling}, launch);
}

}  // namespace annulus::ring_rnn::cuda::tensor
