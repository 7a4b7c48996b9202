// LRPE-cosine: multi-dimensional linearized relative positional encoding, and its rotating sibling
// (RoPE) from the same kernel.
//
//   Inputs   x     (B, H, L, D)  activations; L = prefix + n1 * ... * nm
//            theta (H or 1, E)   frequencies, radians per unit of position; the m axes share a row, and where
//                                there is one row so do all heads. (One vector of E is a view of (1, E);
//                                torch's functions take it as it is.)
//   Position Token t >= prefix has s = t - prefix, unravelled row-major over (n1..nm): s_m is
//            fastest. Tokens t < prefix have no position: their phase is 0. Or every token says
//            where it is: s_j = position_ids[b, t, j] (packed sequences, images inside text).
//   Phase    The D columns are cut in m blocks of E, the last one truncated (E <= D; cosine: m * E >= D):
//              phi[h,t,c] = s_{1 + c div E} * theta[h, c mod E]
//            It is exact modular arithmetic (see phase.h): as right at position 2^31 as at 10.
//   Cosine   xb = f(x);   y[..., c] = xb cos(phi),   y[..., D + c] = xb sin(phi)
//            y is (B, H, L, 2D)
//   Rotate   pairs (x1, x2) of columns;   y1 = x1 cos(phi) - x2 sin(phi),
//                                         y2 = x1 sin(phi) + x2 cos(phi)
//            y is (B, H, L, D). R = min(m * E, D / 2) pairs turn (E <= D / 2), made of the first 2R columns. The others pass
//            through bit for bit (partial rotary, GPT-NeoX's rotary_pct): they meet no other column, not even
//            as a rotation by 0, and in place they are not touched.
//   f        none, relu, sigmoid, silu, softmax over the D features of a token, softmax over the L
//            tokens of a (b, h, c) column (prefix tokens included)
//
//   Backward g = dy_cos cos(phi) + dy_sin sin(phi);   dx = f'(x) g,
//            softmax: dx = p (g - sum(p g)) over the softmax axis
//            dtheta[h,k] = sum over b, t >= prefix, and the axes j that own column k, of
//                          s_j xb (dy_sin cos(phi) - dy_cos sin(phi)),  c = (j-1) E + k
//            and over the heads that share a row, in a fixed order; dtheta has theta's shape
//
// Why it is useful: <y_q(s), y_k(t)> = sum_c q_c k_c cos((s - t) theta_c) depends on the difference
// of positions only, and being a plain dot product it survives linear attention.
//
// Every tensor may have any strides (a transposed (B, L, H, D) view costs nothing) and any size,
// zero included. dtypes of x: f64, f32, f16, bf16; y, dy, dx have x's dtype. theta is f32, or x's
// dtype; dtheta has theta's dtype. The caller owns every tensor; outputs must not overlap inputs
// except where a function says so. Arithmetic is in fp32 (fp64 for f64), whose result becomes bf16
// by rounding to nearest on CUDA and by cutting off on the CPU (at most 0.7 ulp, right on average);
// lrpe_cosine's y is within 1 ulp of the exact value in 16 bits. A phase is exact for f64; else it
// is off by at most 1.7e-19 |position| radians, which is beyond fp32 up to 2^38 or so; closer to a
// zero than 1.4e-16 |position| (3e-7 at position 2^31) that is what bounds the error. Deterministic on every device,
// bit-equal for every number of threads; no atomics; no host-device synchronisation, so every call
// can be captured in a CUDA graph.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "annulus/core/context.h"
#include "annulus/core/macros.h"
#include "annulus/core/tensor.h"

namespace annulus {

// The extents (n1..nm) of the token grid, 1 <= m <= 4.
struct LrpeGrid {
  static constexpr int kMaxAxes = 4;
  int axes = 0;
  std::array<std::int64_t, kMaxAxes> extent{};

  LrpeGrid() = default;
  LrpeGrid(std::initializer_list<std::int64_t> e) : LrpeGrid(std::span(e.begin(), e.size())) {}
  explicit LrpeGrid(std::span<const std::int64_t> e) : axes(static_cast<int>(e.size())) {
    for (std::size_t i = 0; i < e.size() && i < kMaxAxes; ++i) extent[i] = e[i];
  }
  std::span<const std::int64_t> extents() const {
    return {extent.data(), static_cast<std::size_t>(std::clamp(axes, 0, kMaxAxes))};
  }
};

enum class LrpeActivation : std::uint8_t {
  kNone,
  kRelu,  // derivative 0 at exactly 0
  kSigmoid,
  kSilu,
  kSoftmaxFeatures,  // over the D columns of a token
  kSoftmaxTokens,    // over the L tokens of a column
};

struct LrpeCosineOptions {
  LrpeGrid shape = {};      // required, unless position_ids is given
  std::int64_t prefix = 0;  // leading tokens without a position
  // 1-D shapes only: token t >= prefix has position offset + offsets[b] + t - prefix. `offsets` is
  // a (B,) i32 or i64 tensor on x's device, read when the kernel runs (so a CUDA graph can replay
  // it with new values), or left out.
  std::int64_t offset = 0;
  TensorView offsets = {};
  // In place of all the above: a (B or 1, L, m) i32 or i64 tensor on x's device, 1 <= m <= 4, read when the kernel
  // runs. Its numbers are less than 2^62 in size, of either sign (beyond 2^38 in fp32 and narrower see the phase's
  // error above: count from a near origin where ids are times). Where sequences are alike give one row: their phases
  // are then made once. One row that goes up by 1 gives the bits of the 1-D shape and offset that say the same.
  TensorView position_ids = {};
  LrpeActivation activation = LrpeActivation::kNone;
};

struct LrpeRotateOptions {
  // As above.
  LrpeGrid shape = {};
  std::int64_t prefix = 0;
  std::int64_t offset = 0;
  TensorView offsets = {};
  TensorView position_ids = {};
  // Which columns pair up, 0 <= c < R: (c, c + R) as GPT-NeoX and Llama in Hugging Face's layout, or
  // (2c, 2c + 1) as GPT-J. Pair c has the phase of column c above.
  bool interleaved = false;
};

// x, theta -> y.
ANNULUS_API void lrpe_cosine_forward(const TensorView& x, const TensorView& theta,
                                     const TensorView& y, const LrpeCosineOptions& options,
                                     Context& context);

// dy, x, theta -> dx, dtheta. Leave out dx or dtheta (an undefined TensorView) where it is not
// needed. x may be left out when the activation is none and dtheta is not asked for: the forward
// then has nothing to save.
ANNULUS_API void lrpe_cosine_backward(const TensorView& dy, const TensorView& x,
                                      const TensorView& theta, const TensorView& dx,
                                      const TensorView& dtheta, const LrpeCosineOptions& options,
                                      Context& context);

// Queries q (B, Hq, L, D) and keys k (B, Hk, L, D) in one launch. theta has a row per head of the
// smaller count, which divides the larger, and the heads of one group share its row; or one row in all.
ANNULUS_API void lrpe_cosine_qk_forward(const TensorView& q, const TensorView& k,
                                        const TensorView& theta, const TensorView& yq,
                                        const TensorView& yk, const LrpeCosineOptions& options,
                                        Context& context);
ANNULUS_API void lrpe_cosine_qk_backward(const TensorView& dyq, const TensorView& dyk,
                                         const TensorView& q, const TensorView& k,
                                         const TensorView& theta, const TensorView& dq,
                                         const TensorView& dk, const TensorView& dtheta,
                                         const LrpeCosineOptions& options, Context& context);

// The rotating form; D is even and E >= 1. y may be x itself (same data and strides). On CUDA, columns that pass
// through take a second launch, unless in place.
ANNULUS_API void lrpe_rotate_forward(const TensorView& x, const TensorView& theta,
                                     const TensorView& y, const LrpeRotateOptions& options,
                                     Context& context);
// dx may be dy itself when dtheta is not asked for. x may be left out when dtheta is not asked for.
ANNULUS_API void lrpe_rotate_backward(const TensorView& dy, const TensorView& x,
                                      const TensorView& theta, const TensorView& dx,
                                      const TensorView& dtheta, const LrpeRotateOptions& options,
                                      Context& context);

// Queries and keys, as lrpe_cosine_qk and in place as lrpe_rotate: yq may be q, yk may be k, dq may be dyq and dk dyk.
ANNULUS_API void lrpe_rotate_qk_forward(const TensorView& q, const TensorView& k,
                                        const TensorView& theta, const TensorView& yq,
                                        const TensorView& yk, const LrpeRotateOptions& options,
                                        Context& context);
ANNULUS_API void lrpe_rotate_qk_backward(const TensorView& dyq, const TensorView& dyk,
                                         const TensorView& q, const TensorView& k,
                                         const TensorView& theta, const TensorView& dq,
                                         const TensorView& dk, const TensorView& dtheta,
                                         const LrpeRotateOptions& options, Context& context);

// The exact number of scratch bytes the call with these arguments takes from the Context: give it a
// BorrowedWorkspace of that size and it allocates nothing. Only device, dtypes and shapes are read.
ANNULUS_API std::size_t lrpe_cosine_forward_workspace(const TensorView& x, const TensorView& theta,
                                                      const LrpeCosineOptions& options);
ANNULUS_API std::size_t lrpe_cosine_backward_workspace(const TensorView& x, const TensorView& theta,
                                                       bool need_dtheta,
                                                       const LrpeCosineOptions& options);
ANNULUS_API std::size_t lrpe_cosine_qk_forward_workspace(const TensorView& q, const TensorView& k,
                                                         const TensorView& theta,
                                                         const LrpeCosineOptions& options);
ANNULUS_API std::size_t lrpe_cosine_qk_backward_workspace(const TensorView& q, const TensorView& k,
                                                          const TensorView& theta, bool need_dtheta,
                                                          const LrpeCosineOptions& options);
ANNULUS_API std::size_t lrpe_rotate_forward_workspace(const TensorView& x, const TensorView& theta,
                                                      const LrpeRotateOptions& options);
ANNULUS_API std::size_t lrpe_rotate_backward_workspace(const TensorView& x, const TensorView& theta,
                                                       bool need_dtheta,
                                                       const LrpeRotateOptions& options);
ANNULUS_API std::size_t lrpe_rotate_qk_forward_workspace(const TensorView& q, const TensorView& k,
                                                         const TensorView& theta,
                                                         const LrpeRotateOptions& options);
ANNULUS_API std::size_t lrpe_rotate_qk_backward_workspace(const TensorView& q, const TensorView& k,
                                                          const TensorView& theta, bool need_dtheta,
                                                          const LrpeRotateOptions& options);

// The definition: plain loops in double over f64 tensors on the CPU, same arguments, same meaning.
// Slow, readable, and what everything else is compared with. Queries and keys are a call each, whose theta may have
// a row per group of heads, and the sum of their dthetas.
namespace reference {
ANNULUS_API void lrpe_cosine_forward(const TensorView& x, const TensorView& theta,
                                     const TensorView& y, const LrpeCosineOptions& options);
ANNULUS_API void lrpe_cosine_backward(const TensorView& dy, const TensorView& x,
                                      const TensorView& theta, const TensorView& dx,
                                      const TensorView& dtheta, const LrpeCosineOptions& options);
ANNULUS_API void lrpe_rotate_forward(const TensorView& x, const TensorView& theta,
                                     const TensorView& y, const LrpeRotateOptions& options);
ANNULUS_API void lrpe_rotate_backward(const TensorView& dy, const TensorView& x,
                                      const TensorView& theta, const TensorView& dx,
                                      const TensorView& dtheta, const LrpeRotateOptions& options);
}  // namespace reference

}  // namespace annulus
