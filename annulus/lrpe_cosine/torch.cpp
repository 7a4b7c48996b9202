// The LRPE ops of torch. Autograd and fake kernels are in python/annulus/lrpe_cosine.py.
//
// Outputs keep x's order of heads and tokens: for a transposed (B, L, H, D) view they are
// transposed (B, L, H, *) views too, so no layout change is ever paid for. A gradient that was not
// asked for comes back as a tensor of shape (0,).
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "python/csrc/torch_glue.h"

namespace annulus::torch_glue {
namespace {

using Sizes = std::vector<std::int64_t>;

bool is_token_major(const TensorView& x) { return x.rank == 4 && x.stride[1] < x.stride[2]; }

// An output shaped like x but `width` columns wide, dense, in head-major or token-major order.
// The library refuses an x of another rank; until then the output only has to be described.
TensorView encoded(const char* op, const TensorView& x, std::int64_t width, bool token_major) {
  if (x.rank != 4) return absent(x.dtype, x.device);
  const auto [B, H, L] = std::array{x.shape[0], x.shape[1], x.shape[2]};
  if (!token_major) return dense(op, {B, H, L, width}, x.dtype, x.device);
  TensorView v = dense(op, {B, L, H, width}, x.dtype, x.device);
  std::swap(v.shape[1], v.shape[2]);
  std::swap(v.stride[1], v.stride[2]);
  return v;
}

TensorView doubled(const char* op, const TensorView& x) {
  return encoded(op, x, checked_mul(2, x.shape[3], op), is_token_major(x));
}

// dx, or nothing where it is not needed; `like` has its shape.
TensorView gradient(const char* op, const TensorView& like, bool token_major, bool needed) {
  return needed ? encoded(op, like, like.shape[3], token_major) : absent(like.dtype, like.device);
}

TensorView theta_gradient(const char* op, const TensorView& theta, bool needed) {
  return needed ? dense_like(op, theta) : absent(theta.dtype, theta.device);
}

constexpr std::array<Choice<LrpeActivation>, 5> kActivations{{
    {"none", LrpeActivation::kNone},
    {"relu", LrpeActivation::kRelu},
    {"sigmoid", LrpeActivation::kSigmoid},
    {"silu", LrpeActivation::kSilu},
    {"softmax", LrpeActivation::kSoftmaxFeatures},
}};

LrpeActivation activation_of(const char* op, const std::string& name, std::int64_t softmax_dim) {
  if (softmax_dim != -1 && softmax_dim != -2) {
    throw InvalidArgument(argument(op, "softmax_dim") +
                          " must be -1 (features) or -2 (tokens) but is " +
                          std::to_string(softmax_dim));
  }
  const LrpeActivation a = chosen(op, "activation", name, kActivations);
  return a == LrpeActivation::kSoftmaxFeatures && softmax_dim == -2 ? LrpeActivation::kSoftmaxTokens
                                                                    : a;
}

template <class Options>
Options positions_of(const char* op, const Sizes& shape, std::int64_t prefix, std::int64_t offset,
                     const OptionalTensor& offsets, const OptionalTensor& position_ids) {
  Options o;
  o.shape = LrpeGrid(std::span<const std::int64_t>(shape));
  o.prefix = prefix;
  o.offset = offset;
  o.offsets = view_of(op, "offset", offsets);
  o.position_ids = view_of(op, "position_ids", position_ids);
  return o;
}

LrpeCosineOptions cosine_options(const char* op, const Sizes& shape, std::int64_t prefix,
                                 const std::string& activation, std::int64_t softmax_dim,
                                 std::int64_t offset, const OptionalTensor& offsets,
                                 const OptionalTensor& position_ids) {
  auto o = positions_of<LrpeCosineOptions>(op, shape, prefix, offset, offsets, position_ids);
  o.activation = activation_of(op, activation, softmax_dim);
  return o;
}

LrpeRotateOptions rotate_options(const char* op, const Sizes& shape, std::int64_t prefix,
                                 bool interleaved, std::int64_t offset,
                                 const OptionalTensor& offsets,
                                 const OptionalTensor& position_ids) {
  auto o = positions_of<LrpeRotateOptions>(op, shape, prefix, offset, offsets, position_ids);
  o.interleaved = interleaved;
  return o;
}

// The x that a backward's workspace is computed from, when x itself was not saved: dy's shape, with
// the columns of x.
TensorView shaped_like_x(const TensorView& x, const TensorView& dy, bool twice) {
  if (x.defined()) return x;
  TensorView like = dy;
  if (twice && like.rank == 4) like.shape[3] /= 2;
  return like;
}

constexpr const char* kCosine = "lrpe_cosine";
constexpr const char* kCosineQk = "lrpe_cosine_qk";
constexpr const char* kRotate = "lrpe_rotate";

Tensor lrpe_cosine(const Tensor& x, const Tensor& theta, const Sizes& shape, std::int64_t prefix,
                   const std::string& activation, std::int64_t softmax_dim, std::int64_t offset,
                   const OptionalTensor& offsets, const OptionalTensor& position_ids) {
  return typed_errors([&] {
    const auto options = cosine_options(kCosine, shape, prefix, activation, softmax_dim, offset,
                                        offsets, position_ids);
    const TensorView vx = view_of(kCosine, "x", x), vtheta = view_of(kCosine, "theta", theta);
    Call call(kCosine, vx.device, lrpe_cosine_forward_workspace(vx, vtheta, options));
    TensorView y = doubled(kCosine, vx);
    Tensor result = allocate(kCosine, "y", y);
    lrpe_cosine_forward(vx, vtheta, y, options, call.context);
    return result;
  });
}

std::tuple<Tensor, Tensor> lrpe_cosine_backward(const Tensor& dy, const OptionalTensor& x,
                                                const Tensor& theta, const Sizes& shape,
                                                std::int64_t prefix, const std::string& activation,
                                                std::int64_t softmax_dim, std::int64_t offset,
                                                const OptionalTensor& offsets,
                                                const OptionalTensor& position_ids,
                                                bool token_major, bool need_dx, bool need_dtheta) {
  return typed_errors([&] {
    const auto options = cosine_options(kCosine, shape, prefix, activation, softmax_dim, offset,
                                        offsets, position_ids);
    const TensorView vdy = view_of(kCosine, "dy", dy), vx = view_of(kCosine, "x", x),
                     vtheta = view_of(kCosine, "theta", theta);
    const TensorView like = shaped_like_x(vx, vdy, /*twice=*/true);
    Call call(kCosine, vdy.device,
              lrpe_cosine_backward_workspace(like, vtheta, need_dtheta, options));
    TensorView dx = gradient(kCosine, like, token_major, need_dx);
    TensorView dtheta = theta_gradient(kCosine, vtheta, need_dtheta);
    auto result = std::make_tuple(allocate(kCosine, "dx", dx), allocate(kCosine, "dtheta", dtheta));
    annulus::lrpe_cosine_backward(vdy, vx, vtheta, dx, dtheta, options, call.context);
    return result;
  });
}

std::tuple<Tensor, Tensor> lrpe_cosine_qk(const Tensor& q, const Tensor& k, const Tensor& theta,
                                          const Sizes& shape, std::int64_t prefix,
                                          const std::string& activation, std::int64_t softmax_dim,
                                          std::int64_t offset, const OptionalTensor& offsets,
                                          const OptionalTensor& position_ids) {
  return typed_errors([&] {
    const auto options = cosine_options(kCosineQk, shape, prefix, activation, softmax_dim, offset,
                                        offsets, position_ids);
    const TensorView vq = view_of(kCosineQk, "q", q), vk = view_of(kCosineQk, "k", k),
                     vtheta = view_of(kCosineQk, "theta", theta);
    Call call(kCosineQk, vq.device, lrpe_cosine_qk_forward_workspace(vq, vk, vtheta, options));
    TensorView yq = doubled(kCosineQk, vq), yk = doubled(kCosineQk, vk);
    auto result = std::make_tuple(allocate(kCosineQk, "yq", yq), allocate(kCosineQk, "yk", yk));
    lrpe_cosine_qk_forward(vq, vk, vtheta, yq, yk, options, call.context);
    return result;
  });
}

std::tuple<Tensor, Tensor, Tensor> lrpe_cosine_qk_backward(
    const Tensor& dyq, const Tensor& dyk, const OptionalTensor& q, const OptionalTensor& k,
    const Tensor& theta, const Sizes& shape, std::int64_t prefix, const std::string& activation,
    std::int64_t softmax_dim, std::int64_t offset, const OptionalTensor& offsets,
    const OptionalTensor& position_ids, bool q_token_major, bool k_token_major, bool need_dq,
    bool need_dk, bool need_dtheta) {
  return typed_errors([&] {
    const auto options = cosine_options(kCosineQk, shape, prefix, activation, softmax_dim, offset,
                                        offsets, position_ids);
    const TensorView vdyq = view_of(kCosineQk, "dyq", dyq), vdyk = view_of(kCosineQk, "dyk", dyk),
                     vq = view_of(kCosineQk, "q", q), vk = view_of(kCosineQk, "k", k),
                     vtheta = view_of(kCosineQk, "theta", theta);
    const TensorView like_q = shaped_like_x(vq, vdyq, /*twice=*/true),
                     like_k = shaped_like_x(vk, vdyk, /*twice=*/true);
    Call call(kCosineQk, vdyq.device,
              lrpe_cosine_qk_backward_workspace(like_q, like_k, vtheta, need_dtheta, options));
    TensorView dq = gradient(kCosineQk, like_q, q_token_major, need_dq),
               dk = gradient(kCosineQk, like_k, k_token_major, need_dk),
               dtheta = theta_gradient(kCosineQk, vtheta, need_dtheta);
    auto result = std::make_tuple(allocate(kCosineQk, "dq", dq), allocate(kCosineQk, "dk", dk),
                                  allocate(kCosineQk, "dtheta", dtheta));
    annulus::lrpe_cosine_qk_backward(vdyq, vdyk, vq, vk, vtheta, dq, dk, dtheta, options,
                                     call.context);
    return result;
  });
}

// Into a fresh tensor, or over x itself.
Tensor rotate(const Tensor& x, const Tensor& theta, const Sizes& shape, std::int64_t prefix,
              bool interleaved, std::int64_t offset, const OptionalTensor& offsets,
              const OptionalTensor& position_ids, bool in_place) {
  return typed_errors([&] {
    const auto options =
        rotate_options(kRotate, shape, prefix, interleaved, offset, offsets, position_ids);
    const TensorView vx = view_of(kRotate, "x", x), vtheta = view_of(kRotate, "theta", theta);
    Call call(kRotate, vx.device, lrpe_rotate_forward_workspace(vx, vtheta, options));
    TensorView y = in_place ? vx : encoded(kRotate, vx, vx.shape[3], is_token_major(vx));
    Tensor result = in_place ? x : allocate(kRotate, "y", y);
    lrpe_rotate_forward(vx, vtheta, y, options, call.context);
    return result;
  });
}

Tensor lrpe_rotate(const Tensor& x, const Tensor& theta, const Sizes& shape, std::int64_t prefix,
                   bool interleaved, std::int64_t offset, const OptionalTensor& offsets,
                   const OptionalTensor& position_ids) {
  return rotate(x, theta, shape, prefix, interleaved, offset, offsets, position_ids,
                /*in_place=*/false);
}

void lrpe_rotate_in_place(const Tensor& x, const Tensor& theta, const Sizes& shape,
                          std::int64_t prefix, bool interleaved, std::int64_t offset,
                          const OptionalTensor& offsets, const OptionalTensor& position_ids) {
  rotate(x, theta, shape, prefix, interleaved, offset, offsets, position_ids, /*in_place=*/true);
}

std::tuple<Tensor, Tensor> lrpe_rotate_backward(const Tensor& dy, const OptionalTensor& x,
                                                const Tensor& theta, const Sizes& shape,
                                                std::int64_t prefix, bool interleaved,
                                                std::int64_t offset, const OptionalTensor& offsets,
                                                const OptionalTensor& position_ids,
                                                bool token_major, bool need_dx, bool need_dtheta) {
  return typed_errors([&] {
    const auto options =
        rotate_options(kRotate, shape, prefix, interleaved, offset, offsets, position_ids);
    const TensorView vdy = view_of(kRotate, "dy", dy), vx = view_of(kRotate, "x", x),
                     vtheta = view_of(kRotate, "theta", theta);
    const TensorView like = shaped_like_x(vx, vdy, /*twice=*/false);
    Call call(kRotate, vdy.device,
              lrpe_rotate_backward_workspace(like, vtheta, need_dtheta, options));
    TensorView dx = gradient(kRotate, like, token_major, need_dx);
    TensorView dtheta = theta_gradient(kRotate, vtheta, need_dtheta);
    auto result = std::make_tuple(allocate(kRotate, "dx", dx), allocate(kRotate, "dtheta", dtheta));
    annulus::lrpe_rotate_backward(vdy, vx, vtheta, dx, dtheta, options, call.context);
    return result;
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
    const auto run = [&](const char* op, const auto& options, bool twice, auto workspace,
                         auto backward) {
      const TensorView vdy = view_of(op, "dy", dy), vtheta = view_of(op, "theta", theta);
      const TensorView like = shaped_like_x({}, vdy, twice);
      Call scope(op, vdy.device, workspace(like, vtheta, false, options));
      TensorView dx = encoded(op, like, like.shape[3], call[1] != 0);
      Tensor result = allocate(op, "dx", dx);
      backward(vdy, {}, vtheta, dx, {}, options, scope.context);
      return result;
    };
    if (call[0] == 0) {
      return run(kCosine,
                 positions_of<LrpeCosineOptions>(kCosine, shape, call[2], call[3], std::nullopt,
                                                 std::nullopt),
                 /*twice=*/true, lrpe_cosine_backward_workspace, annulus::lrpe_cosine_backward);
    }
    return run(
        kRotate,
        rotate_options(kRotate, shape, call[2], call[0] == 2, call[3], std::nullopt, std::nullopt),
        /*twice=*/false, lrpe_rotate_backward_workspace, annulus::lrpe_rotate_backward);
  });
}

template <class Library>
void lrpe_kernels(Library& m) {
  m.impl("lrpe_cosine", TORCH_BOX(&lrpe_cosine));
  m.impl("lrpe_cosine_backward", TORCH_BOX(&lrpe_cosine_backward));
  m.impl("lrpe_cosine_qk", TORCH_BOX(&lrpe_cosine_qk));
  m.impl("lrpe_cosine_qk_backward", TORCH_BOX(&lrpe_cosine_qk_backward));
  m.impl("lrpe_rotate", TORCH_BOX(&lrpe_rotate));
  m.impl("lrpe_rotate_", TORCH_BOX(&lrpe_rotate_in_place));
  m.impl("lrpe_rotate_backward", TORCH_BOX(&lrpe_rotate_backward));
  m.impl("_lrpe_dx", TORCH_BOX(&lrpe_dx));
}

}  // namespace
}  // namespace annulus::torch_glue

#define ANNULUS_LRPE_COSINE_POSITIONS                                               \
  "SymInt[] shape, SymInt prefix, str activation, int softmax_dim, SymInt offset, " \
  "Tensor? offsets, Tensor? position_ids"
#define ANNULUS_LRPE_ROTATE_POSITIONS                                                 \
  "SymInt[] shape, SymInt prefix, bool interleaved, SymInt offset, Tensor? offsets, " \
  "Tensor? position_ids"

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

ANNULUS_TORCH_KERNELS(annulus::torch_glue::lrpe_kernels)
