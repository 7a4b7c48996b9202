// The LRPE ops of torch. Autograd and fake kernels are in python/annulus/lrpe_cosine.py.
//
// Outputs keep x's order of heads and tokens: for a transposed (B, L, H, D) view they are
// transposed (B, L, H, *) views too, so no layout change is ever paid for.
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/lrpe_cosine/lrpe_cosine.h"
#include "python/csrc/torch_op.h"

namespace annulus::torch_glue {
namespace {

#define ANNULUS_LRPE_COSINE_POSITIONS                                               \
  "SymInt[] shape, SymInt prefix, str activation, int softmax_dim, SymInt offset, " \
  "Tensor? offsets, Tensor? position_ids"
#define ANNULUS_LRPE_ROTATE_POSITIONS                                                 \
  "SymInt[] shape, SymInt prefix, bool interleaved, SymInt offset, Tensor? offsets, " \
  "Tensor? position_ids"

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

// A frequency that no column has would be a mistake about E that nothing else shows.
void check_used(const char* op, const TensorView& theta, std::int64_t columns) {
  if (columns > 0 && theta.shape[1] > columns) {
    throw InvalidArgument(argument(op, "theta") + " must have at most " + std::to_string(columns) +
                          " columns, so that every frequency is used, but has shape " +
                          shape_string(theta.sizes()));
  }
}

template <class Options>
Options positions_of(std::span<const std::int64_t> shape, std::int64_t prefix,
                     std::int64_t offset) {
  Options o;
  o.shape = LrpeGrid(shape);
  o.prefix = prefix;
  o.offset = offset;
  return o;
}

template <class Options, class Op>
Options options_of(const Arguments<Op>& a) {
  auto o = positions_of<Options>(a.template get<"shape">(), a.template get<"prefix">(),
                                 a.template get<"offset">());
  o.offsets = a.template view<"offsets">();
  o.position_ids = a.template view<"position_ids">();
  if constexpr (requires { o.activation; }) {
    o.activation =
        activation_of(Op::op, a.template get<"activation">(), a.template get<"softmax_dim">());
  } else {
    o.interleaved = a.template get<"interleaved">();
  }
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

// dx and dtheta, as far as they are asked for, of either form.
template <class Options>
std::vector<Tensor> gradients_of(const char* op, const TensorView& dy, const TensorView& x,
                                 const TensorView& theta, const Options& options, bool token_major,
                                 std::int64_t needed) {
  constexpr bool kCosine = requires { options.activation; };
  const auto [workspace, backward] = [] {
    if constexpr (kCosine) {
      return std::make_pair(lrpe_cosine_backward_workspace, lrpe_cosine_backward);
    } else {
      return std::make_pair(lrpe_rotate_backward_workspace, lrpe_rotate_backward);
    }
  }();
  Gradients wanted(op, needed);
  const TensorView like = shaped_like_x(x, dy, /*twice=*/kCosine);
  Call call(op, dy.device, workspace(like, theta, wanted.needs(1), options));
  TensorView dx, dtheta;
  wanted.add("dx", dx, encoded(op, like, like.shape[3], token_major));
  wanted.add("dtheta", dtheta, dense_like(op, theta));
  std::vector<Tensor> result = wanted.allocate();
  backward(dy, x, theta, dx, dtheta, options, call.context);
  return result;
}

// Into a fresh tensor, or into one that an op with `y` among its arguments is given.
template <class Op>
Tensor cosine(const Arguments<Op>& a) {
  const auto options = options_of<LrpeCosineOptions>(a);
  const TensorView x = a.template view<"x">(), theta = a.template view<"theta">();
  Call call(Op::op, x.device, lrpe_cosine_forward_workspace(x, theta, options));
  check_used(Op::op, theta, x.shape[3]);
  TensorView y = doubled(Op::op, x);
  Tensor result = output<"y">(a, y);
  lrpe_cosine_forward(x, theta, y, options, call.context);
  return result;
}

struct Cosine {
  static constexpr const char* op = "lrpe_cosine";
  static constexpr std::string_view schema =
      "lrpe_cosine(Tensor x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS ") -> Tensor y";
  static Tensor run(const Arguments<Cosine>& a) { return cosine(a); }
};

struct CosineOut {
  static constexpr const char* op = Cosine::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_out(Tensor x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", Tensor(a!) y) -> ()";
  static void run(const Arguments<CosineOut>& a) { cosine(a); }
};

struct CosineBackward {
  static constexpr const char* op = Cosine::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_backward(Tensor dy, Tensor? x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", bool token_major, int needed) -> Tensor[]";

  static std::vector<Tensor> run(const Arguments<CosineBackward>& a) {
    return gradients_of(op, a.view<"dy">(), a.view<"x">(), a.view<"theta">(),
                        options_of<LrpeCosineOptions>(a), a.get<"token_major">(),
                        a.get<"needed">());
  }
};

template <class Op>
auto cosine_qk(const Arguments<Op>& a) {
  const auto options = options_of<LrpeCosineOptions>(a);
  const TensorView q = a.template view<"q">(), k = a.template view<"k">(),
                   theta = a.template view<"theta">();
  Call call(Op::op, q.device, lrpe_cosine_qk_forward_workspace(q, k, theta, options));
  check_used(Op::op, theta, q.shape[3]);
  TensorView yq = doubled(Op::op, q), yk = doubled(Op::op, k);
  std::tuple result{output<"yq">(a, yq), output<"yk">(a, yk)};
  lrpe_cosine_qk_forward(q, k, theta, yq, yk, options, call.context);
  return result;
}

struct CosineQk {
  static constexpr const char* op = "lrpe_cosine_qk";
  static constexpr std::string_view schema =
      "lrpe_cosine_qk(Tensor q, Tensor k, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ") -> (Tensor yq, Tensor yk)";
  static auto run(const Arguments<CosineQk>& a) { return cosine_qk(a); }
};

struct CosineQkOut {
  static constexpr const char* op = CosineQk::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_qk_out(Tensor q, Tensor k, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", Tensor(a!) yq, Tensor(b!) yk) -> ()";
  static void run(const Arguments<CosineQkOut>& a) { cosine_qk(a); }
};

struct CosineQkBackward {
  static constexpr const char* op = CosineQk::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_qk_backward(Tensor dyq, Tensor dyk, Tensor? q, Tensor? k, Tensor "
      "theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", bool q_token_major, bool k_token_major, int needed) -> Tensor[]";

  static std::vector<Tensor> run(const Arguments<CosineQkBackward>& a) {
    const auto options = options_of<LrpeCosineOptions>(a);
    const TensorView dyq = a.view<"dyq">(), dyk = a.view<"dyk">(), q = a.view<"q">(),
                     k = a.view<"k">(), theta = a.view<"theta">();
    Gradients wanted(op, a.get<"needed">());
    const TensorView like_q = shaped_like_x(q, dyq, /*twice=*/true),
                     like_k = shaped_like_x(k, dyk, /*twice=*/true);
    Call call(op, dyq.device,
              lrpe_cosine_qk_backward_workspace(like_q, like_k, theta, wanted.needs(2), options));
    TensorView dq, dk, dtheta;
    wanted.add("dq", dq, encoded(op, like_q, like_q.shape[3], a.get<"q_token_major">()));
    wanted.add("dk", dk, encoded(op, like_k, like_k.shape[3], a.get<"k_token_major">()));
    wanted.add("dtheta", dtheta, dense_like(op, theta));
    std::vector<Tensor> result = wanted.allocate();
    lrpe_cosine_qk_backward(dyq, dyk, q, k, theta, dq, dk, dtheta, options, call.context);
    return result;
  }
};

// Into a fresh tensor, or over x itself.
template <class Op>
Tensor rotate(const Arguments<Op>& a, bool in_place) {
  const auto options = options_of<LrpeRotateOptions>(a);
  const TensorView x = a.template view<"x">(), theta = a.template view<"theta">();
  Call call(Op::op, x.device, lrpe_rotate_forward_workspace(x, theta, options));
  check_used(Op::op, theta, x.shape[3] / 2);
  TensorView y = in_place ? x : encoded(Op::op, x, x.shape[3], is_token_major(x));
  Tensor result = in_place ? a.template get<"x">() : output<"y">(a, y);
  lrpe_rotate_forward(x, theta, y, options, call.context);
  return result;
}

struct Rotate {
  static constexpr const char* op = "lrpe_rotate";
  static constexpr std::string_view schema =
      "lrpe_rotate(Tensor x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS ") -> Tensor y";
  static Tensor run(const Arguments<Rotate>& a) { return rotate(a, /*in_place=*/false); }
};

struct RotateOut {
  static constexpr const char* op = Rotate::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_out(Tensor x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ", Tensor(a!) y) -> ()";
  static void run(const Arguments<RotateOut>& a) { rotate(a, /*in_place=*/false); }
};

struct RotateInPlace {
  static constexpr const char* op = Rotate::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_(Tensor(a!) x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS ") -> ()";
  static void run(const Arguments<RotateInPlace>& a) { rotate(a, /*in_place=*/true); }
};

struct RotateBackward {
  static constexpr const char* op = Rotate::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_backward(Tensor dy, Tensor? x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ", bool token_major, int needed) -> Tensor[]";

  static std::vector<Tensor> run(const Arguments<RotateBackward>& a) {
    return gradients_of(op, a.view<"dy">(), a.view<"x">(), a.view<"theta">(),
                        options_of<LrpeRotateOptions>(a), a.get<"token_major">(),
                        a.get<"needed">());
  }
};

// The gradient of x alone, in the plain calls: no activation, no gradient of theta, one offset. A
// node of autograd in eager mode is mostly the passing of arguments, so they are as few as can be:
//     call = (form, token_major, prefix, offset, n1..nm)    form 0: cosine, 1: rotate, 2: interleaved
struct PlainGradient {
  static constexpr const char* op = "_lrpe_dx";
  static constexpr std::string_view schema =
      "_lrpe_dx(Tensor dy, Tensor theta, int[] call) -> Tensor dx";

  static Tensor run(const Arguments<PlainGradient>& a) {
    const Sizes& call = a.get<"call">();
    if (call.size() < 4 || call[0] < 0 || call[0] > 2) {
      throw InvalidArgument(
          "[_lrpe_dx] call must be (form, token_major, prefix, offset, n1..nm) with form 0, 1 or 2 "
          "but is " +
          shape_string(call));
    }
    const auto [form, token_major, prefix, offset] = std::array{call[0], call[1], call[2], call[3]};
    const auto shape = std::span(call).subspan(4);
    const auto run_as = [&](const char* name, const auto& options) {
      return gradients_of(name, view_of(name, "dy", a.get<"dy">()), {},
                          view_of(name, "theta", a.get<"theta">()), options, token_major != 0,
                          1)[0];
    };
    if (form == 0) {
      return run_as(Cosine::op, positions_of<LrpeCosineOptions>(shape, prefix, offset));
    }
    auto options = positions_of<LrpeRotateOptions>(shape, prefix, offset);
    options.interleaved = form == 2;
    return run_as(Rotate::op, options);
  }
};

ANNULUS_TORCH_OPS(Cosine, CosineOut, CosineBackward, CosineQk, CosineQkOut, CosineQkBackward,
                  Rotate, RotateOut, RotateInPlace, RotateBackward, PlainGradient)

}  // namespace
}  // namespace annulus::torch_glue
