// The LRPE ops of torch: schemas, and one function that serves the CPU and the CUDA key alike,
// since the library picks the backend by the tensors' device. Autograd and fake kernels are in
// python/annulus/lrpe_cosine.py.
//
// Outputs keep x's order of heads and tokens: for a transposed (B, L, H, D) view they are
// transposed (B, L, H, *) views too, so no layout change is ever paid for. A gradient that was not
// asked for comes back as a tensor of shape (0,).
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "python/csrc/torch_glue.h"

namespace annulus::torch_glue {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<std::int64_t>;

bool is_token_major(const TensorView& x) { return x.rank == 4 && x.stride[1] < x.stride[2]; }

// An output shaped like x but `width` columns wide, dense, in head-major or token-major order.
// The library refuses an x of another rank; until then the output only has to exist.
Tensor new_like(const char* op, const char* name, const TensorView& x, std::int64_t width,
                bool token_major) {
  if (x.rank != 4) return nothing(op, name, x.dtype, x.device);
  const auto [B, H, L, D] = std::array{x.shape[0], x.shape[1], x.shape[2], width};
  std::array<std::int64_t, 4> size{B, H, L, D};
  // Extents of 0 count as 1, as torch's own dense strides do.
  const auto at_least_1 = [](std::int64_t n) { return std::max<std::int64_t>(n, 1); };
  const std::int64_t row = at_least_1(D);
  const std::int64_t inner = checked_mul(row, at_least_1(token_major ? H : L), op);
  const std::int64_t sample = checked_mul(inner, at_least_1(token_major ? L : H), op);
  const std::array<std::int64_t, 4> stride = token_major
                                                 ? std::array{sample, row, inner, std::int64_t{1}}
                                                 : std::array{sample, inner, row, std::int64_t{1}};
  return new_strided(op, name, size, stride, dtype_to_torch(x.dtype), x.device);
}

Tensor new_like_theta(const char* op, const TensorView& theta) {
  if (theta.rank != 2) return nothing(op, "dtheta", theta.dtype, theta.device);
  const std::array<std::int64_t, 2> size{theta.shape[0], theta.shape[1]};
  const std::array<std::int64_t, 2> stride{std::max<std::int64_t>(size[1], 1), 1};
  return new_strided(op, "dtheta", size, stride, dtype_to_torch(theta.dtype), theta.device);
}

LrpeActivation activation_of(const char* op, const std::string& name, std::int64_t softmax_dim) {
  if (softmax_dim != -1 && softmax_dim != -2) {
    throw InvalidArgument(argument(op, "softmax_dim") +
                          " must be -1 (features) or -2 (tokens) but is " +
                          std::to_string(softmax_dim));
  }
  if (name == "none") return LrpeActivation::kNone;
  if (name == "relu") return LrpeActivation::kRelu;
  if (name == "sigmoid") return LrpeActivation::kSigmoid;
  if (name == "silu") return LrpeActivation::kSilu;
  if (name == "softmax") {
    return softmax_dim == -1 ? LrpeActivation::kSoftmaxFeatures : LrpeActivation::kSoftmaxTokens;
  }
  throw InvalidArgument(argument(op, "activation") +
                        " must be none, relu, sigmoid, silu or softmax but is '" + name + "'");
}

template <class Options>
Options positions_of(const char* op, const Sizes& shape, std::int64_t prefix, std::int64_t offset,
                     const OptionalTensor& offsets) {
  Options o;
  o.shape = LrpeGrid(std::span<const std::int64_t>(shape));
  o.prefix = prefix;
  o.offset = offset;
  o.offsets = view_of(op, "offset", offsets);
  return o;
}

LrpeCosineOptions cosine_options(const char* op, const Sizes& shape, std::int64_t prefix,
                                 const std::string& activation, std::int64_t softmax_dim,
                                 std::int64_t offset, const OptionalTensor& offsets) {
  auto o = positions_of<LrpeCosineOptions>(op, shape, prefix, offset, offsets);
  o.activation = activation_of(op, activation, softmax_dim);
  return o;
}

LrpeRotateOptions rotate_options(const char* op, const Sizes& shape, std::int64_t prefix,
                                 bool interleaved, std::int64_t offset,
                                 const OptionalTensor& offsets) {
  auto o = positions_of<LrpeRotateOptions>(op, shape, prefix, offset, offsets);
  o.interleaved = interleaved;
  return o;
}

// The x that a backward's workspace is computed from, when x itself was not saved: dy's shape, with
// the columns of x.
TensorView shaped_like_x(const TensorView& x, const TensorView& dy, bool doubled) {
  if (x.defined()) return x;
  TensorView like = dy;
  if (doubled && like.rank == 4) like.shape[3] /= 2;
  return like;
}

constexpr const char* kCosine = "lrpe_cosine";
constexpr const char* kCosineQk = "lrpe_cosine_qk";
constexpr const char* kRotate = "lrpe_rotate";

Tensor lrpe_cosine(const Tensor& x, const Tensor& theta, const Sizes& shape, std::int64_t prefix,
                   const std::string& activation, std::int64_t softmax_dim, std::int64_t offset,
                   const OptionalTensor& offsets) {
  return typed_errors([&] {
    const auto options =
        cosine_options(kCosine, shape, prefix, activation, softmax_dim, offset, offsets);
    const TensorView vx = view_of(kCosine, "x", x), vtheta = view_of(kCosine, "theta", theta);
    Call call(kCosine, vx.device, lrpe_cosine_forward_workspace(vx, vtheta, options));
    Tensor y = new_like(kCosine, "y", vx, checked_mul(2, vx.shape[3], kCosine), is_token_major(vx));
    lrpe_cosine_forward(vx, vtheta, view_of(kCosine, "y", y), options, call.context);
    return y;
  });
}

std::tuple<Tensor, Tensor> lrpe_cosine_backward(const Tensor& dy, const OptionalTensor& x,
                                                const Tensor& theta, const Sizes& shape,
                                                std::int64_t prefix, const std::string& activation,
                                                std::int64_t softmax_dim, std::int64_t offset,
                                                const OptionalTensor& offsets, bool token_major,
                                                bool need_dx, bool need_dtheta) {
  return typed_errors([&] {
    const auto options =
        cosine_options(kCosine, shape, prefix, activation, softmax_dim, offset, offsets);
    const TensorView vdy = view_of(kCosine, "dy", dy), vx = view_of(kCosine, "x", x),
                     vtheta = view_of(kCosine, "theta", theta);
    const TensorView like = shaped_like_x(vx, vdy, /*doubled=*/true);
    Call call(kCosine, vdy.device,
              lrpe_cosine_backward_workspace(like, vtheta, need_dtheta, options));
    Tensor dx = need_dx ? new_like(kCosine, "dx", like, like.shape[3], token_major)
                        : nothing(kCosine, "dx", vdy.dtype, vdy.device);
    Tensor dtheta = need_dtheta ? new_like_theta(kCosine, vtheta)
                                : nothing(kCosine, "dtheta", vtheta.dtype, vtheta.device);
    annulus::lrpe_cosine_backward(
        vdy, vx, vtheta, need_dx ? view_of(kCosine, "dx", dx) : TensorView{},
        need_dtheta ? view_of(kCosine, "dtheta", dtheta) : TensorView{}, options, call.context);
    return std::make_tuple(dx, dtheta);
  });
}

std::tuple<Tensor, Tensor> lrpe_cosine_qk(const Tensor& q, const Tensor& k, const Tensor& theta,
                                          const Sizes& shape, std::int64_t prefix,
                                          const std::string& activation, std::int64_t softmax_dim,
                                          std::int64_t offset, const OptionalTensor& offsets) {
  return typed_errors([&] {
    const auto options =
        cosine_options(kCosineQk, shape, prefix, activation, softmax_dim, offset, offsets);
    const TensorView vq = view_of(kCosineQk, "q", q), vk = view_of(kCosineQk, "k", k),
                     vtheta = view_of(kCosineQk, "theta", theta);
    Call call(kCosineQk, vq.device, lrpe_cosine_qk_forward_workspace(vq, vk, vtheta, options));
    Tensor yq =
        new_like(kCosineQk, "yq", vq, checked_mul(2, vq.shape[3], kCosineQk), is_token_major(vq));
    Tensor yk =
        new_like(kCosineQk, "yk", vk, checked_mul(2, vk.shape[3], kCosineQk), is_token_major(vk));
    lrpe_cosine_qk_forward(vq, vk, vtheta, view_of(kCosineQk, "yq", yq),
                           view_of(kCosineQk, "yk", yk), options, call.context);
    return std::make_tuple(yq, yk);
  });
}

std::tuple<Tensor, Tensor, Tensor> lrpe_cosine_qk_backward(
    const Tensor& dyq, const Tensor& dyk, const OptionalTensor& q, const OptionalTensor& k,
    const Tensor& theta, const Sizes& shape, std::int64_t prefix, const std::string& activation,
    std::int64_t softmax_dim, std::int64_t offset, const OptionalTensor& offsets,
    bool q_token_major, bool k_token_major, bool need_dq, bool need_dk, bool need_dtheta) {
  return typed_errors([&] {
    const auto options =
        cosine_options(kCosineQk, shape, prefix, activation, softmax_dim, offset, offsets);
    const TensorView vdyq = view_of(kCosineQk, "dyq", dyq), vdyk = view_of(kCosineQk, "dyk", dyk),
                     vq = view_of(kCosineQk, "q", q), vk = view_of(kCosineQk, "k", k),
                     vtheta = view_of(kCosineQk, "theta", theta);
    const TensorView like_q = shaped_like_x(vq, vdyq, /*doubled=*/true),
                     like_k = shaped_like_x(vk, vdyk, /*doubled=*/true);
    Call call(kCosineQk, vdyq.device,
              lrpe_cosine_qk_backward_workspace(like_q, like_k, vtheta, need_dtheta, options));
    Tensor dq = need_dq ? new_like(kCosineQk, "dq", like_q, like_q.shape[3], q_token_major)
                        : nothing(kCosineQk, "dq", vdyq.dtype, vdyq.device);
    Tensor dk = need_dk ? new_like(kCosineQk, "dk", like_k, like_k.shape[3], k_token_major)
                        : nothing(kCosineQk, "dk", vdyk.dtype, vdyk.device);
    Tensor dtheta = need_dtheta ? new_like_theta(kCosineQk, vtheta)
                                : nothing(kCosineQk, "dtheta", vtheta.dtype, vtheta.device);
    annulus::lrpe_cosine_qk_backward(
        vdyq, vdyk, vq, vk, vtheta, need_dq ? view_of(kCosineQk, "dq", dq) : TensorView{},
        need_dk ? view_of(kCosineQk, "dk", dk) : TensorView{},
        need_dtheta ? view_of(kCosineQk, "dtheta", dtheta) : TensorView{}, options, call.context);
    return std::make_tuple(dq, dk, dtheta);
  });
}

// Into a fresh tensor, or over x itself.
Tensor rotate(const Tensor& x, const Tensor& theta, const Sizes& shape, std::int64_t prefix,
              bool interleaved, std::int64_t offset, const OptionalTensor& offsets, bool in_place) {
  return typed_errors([&] {
    const auto options = rotate_options(kRotate, shape, prefix, interleaved, offset, offsets);
    const TensorView vx = view_of(kRotate, "x", x), vtheta = view_of(kRotate, "theta", theta);
    Call call(kRotate, vx.device, lrpe_rotate_forward_workspace(vx, vtheta, options));
    Tensor y = in_place ? x : new_like(kRotate, "y", vx, vx.shape[3], is_token_major(vx));
    lrpe_rotate_forward(vx, vtheta, view_of(kRotate, "y", y), options, call.context);
    return y;
  });
}

Tensor lrpe_rotate(const Tensor& x, const Tensor& theta, const Sizes& shape, std::int64_t prefix,
                   bool interleaved, std::int64_t offset, const OptionalTensor& offsets) {
  return rotate(x, theta, shape, prefix, interleaved, offset, offsets, /*in_place=*/false);
}

void lrpe_rotate_in_place(const Tensor& x, const Tensor& theta, const Sizes& shape,
                          std::int64_t prefix, bool interleaved, std::int64_t offset,
                          const OptionalTensor& offsets) {
  rotate(x, theta, shape, prefix, interleaved, offset, offsets, /*in_place=*/true);
}

std::tuple<Tensor, Tensor> lrpe_rotate_backward(const Tensor& dy, const OptionalTensor& x,
                                                const Tensor& theta, const Sizes& shape,
                                                std::int64_t prefix, bool interleaved,
                                                std::int64_t offset, const OptionalTensor& offsets,
                                                bool token_major, bool need_dx, bool need_dtheta) {
  return typed_errors([&] {
    const auto options = rotate_options(kRotate, shape, prefix, interleaved, offset, offsets);
    const TensorView vdy = view_of(kRotate, "dy", dy), vx = view_of(kRotate, "x", x),
                     vtheta = view_of(kRotate, "theta", theta);
    const TensorView like = shaped_like_x(vx, vdy, /*doubled=*/false);
    Call call(kRotate, vdy.device,
              lrpe_rotate_backward_workspace(like, vtheta, need_dtheta, options));
    Tensor dx = need_dx ? new_like(kRotate, "dx", like, like.shape[3], token_major)
                        : nothing(kRotate, "dx", vdy.dtype, vdy.device);
    Tensor dtheta = need_dtheta ? new_like_theta(kRotate, vtheta)
                                : nothing(kRotate, "dtheta", vtheta.dtype, vtheta.device);
    annulus::lrpe_rotate_backward(
        vdy, vx, vtheta, need_dx ? view_of(kRotate, "dx", dx) : TensorView{},
        need_dtheta ? view_of(kRotate, "dtheta", dtheta) : TensorView{}, options, call.context);
    return std::make_tuple(dx, dtheta);
  });
}

// The gradient of x alone, in the plain calls: no activation, no gradient of theta, one offset. A
// node of autograd in eager mode is mostly the passing of arguments, so they are as few as can be:
//     call = (form, token_major, prefix, offset, n1..nm)    form 0: cosine, 1: rotate, 2: interleaved
Tensor lrpe_dx(const Tensor& dy, const Tensor& theta, const Sizes& call) {
  return typed_errors([&] {
    constexpr std::size_t kHead = 4;
    if (call.size() < kHead || call[0] < 0 || call[0] > 2) {
      throw InvalidArgument(
          "[_lrpe_dx] call must be (form, token_major, prefix, offset, n1..nm) with form 0, 1 or 2 "
          "but is " +
          shape_string(call));
    }
    const Sizes shape(call.begin() + kHead, call.end());
    const auto run = [&](const char* op, const auto& options, bool doubled, auto workspace,
                         auto backward) {
      const TensorView vdy = view_of(op, "dy", dy), vtheta = view_of(op, "theta", theta);
      const TensorView like = shaped_like_x({}, vdy, doubled);
      Call scope(op, vdy.device, workspace(like, vtheta, false, options));
      Tensor dx = new_like(op, "dx", like, like.shape[3], call[1] != 0);
      backward(vdy, {}, vtheta, view_of(op, "dx", dx), {}, options, scope.context);
      return dx;
    };
    if (call[0] == 0) {
      return run(kCosine,
                 positions_of<LrpeCosineOptions>(kCosine, shape, call[2], call[3], std::nullopt),
                 /*doubled=*/true, lrpe_cosine_backward_workspace, annulus::lrpe_cosine_backward);
    }
    return run(kRotate,
               rotate_options(kRotate, shape, call[2], call[0] == 2, call[3], std::nullopt),
               /*doubled=*/false, lrpe_rotate_backward_workspace, annulus::lrpe_rotate_backward);
  });
}

}  // namespace
}  // namespace annulus::torch_glue

#define ANNULUS_LRPE_COSINE_POSITIONS                                               \
  "SymInt[] shape, SymInt prefix, str activation, int softmax_dim, SymInt offset, " \
  "Tensor? offsets"
#define ANNULUS_LRPE_ROTATE_POSITIONS \
  "SymInt[] shape, SymInt prefix, bool interleaved, SymInt offset, Tensor? offsets"

STABLE_TORCH_LIBRARY_FRAGMENT(annulus, m) {
  m.def("lrpe_cosine(Tensor x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS ") -> Tensor");
  m.def("lrpe_cosine_backward(Tensor dy, Tensor? x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
        ", bool token_major, bool need_dx, bool need_dtheta) -> (Tensor, Tensor)");
  m.def("lrpe_cosine_qk(Tensor q, Tensor k, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
        ") -> (Tensor, Tensor)");
  m.def(
      "lrpe_cosine_qk_backward(Tensor dyq, Tensor dyk, Tensor? q, Tensor? k, Tensor "
      "theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", bool q_token_major, bool k_token_major, bool need_dq, "
      "bool need_dk, bool need_dtheta) -> (Tensor, Tensor, Tensor)");
  m.def("lrpe_rotate(Tensor x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS ") -> Tensor");
  m.def("lrpe_rotate_(Tensor(a!) x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS ") -> ()");
  m.def("lrpe_rotate_backward(Tensor dy, Tensor? x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
        ", bool token_major, bool need_dx, bool need_dtheta) -> (Tensor, Tensor)");
  m.def("_lrpe_dx(Tensor dy, Tensor theta, int[] call) -> Tensor");
}

#define ANNULUS_LRPE_IMPLEMENTATIONS(m)                                                        \
  m.impl("lrpe_cosine", TORCH_BOX(&annulus::torch_glue::lrpe_cosine));                         \
  m.impl("lrpe_cosine_backward", TORCH_BOX(&annulus::torch_glue::lrpe_cosine_backward));       \
  m.impl("lrpe_cosine_qk", TORCH_BOX(&annulus::torch_glue::lrpe_cosine_qk));                   \
  m.impl("lrpe_cosine_qk_backward", TORCH_BOX(&annulus::torch_glue::lrpe_cosine_qk_backward)); \
  m.impl("lrpe_rotate", TORCH_BOX(&annulus::torch_glue::lrpe_rotate));                         \
  m.impl("lrpe_rotate_", TORCH_BOX(&annulus::torch_glue::lrpe_rotate_in_place));               \
  m.impl("lrpe_rotate_backward", TORCH_BOX(&annulus::torch_glue::lrpe_rotate_backward));       \
  m.impl("_lrpe_dx", TORCH_BOX(&annulus::torch_glue::lrpe_dx))

STABLE_TORCH_LIBRARY_IMPL(annulus, CPU, m) { ANNULUS_LRPE_IMPLEMENTATIONS(m); }
STABLE_TORCH_LIBRARY_IMPL(annulus, CUDA, m) { ANNULUS_LRPE_IMPLEMENTATIONS(m); }
