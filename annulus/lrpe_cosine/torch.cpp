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
#include <type_traits>
#include <utility>
#include <vector>

#include "annulus/lrpe_cosine/positions.h"
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

// The functions of a form; y has kWidth columns for one of x.
struct CosineForm {
  using Options = LrpeCosineOptions;
  static constexpr std::int64_t kWidth = 2;
  static constexpr auto forward = lrpe_cosine_forward;
  static constexpr auto forward_workspace = lrpe_cosine_forward_workspace;
  static constexpr auto backward = lrpe_cosine_backward;
  static constexpr auto backward_workspace = lrpe_cosine_backward_workspace;
  static constexpr auto qk_forward = lrpe_cosine_qk_forward;
  static constexpr auto qk_forward_workspace = lrpe_cosine_qk_forward_workspace;
  static constexpr auto qk_backward = lrpe_cosine_qk_backward;
  static constexpr auto qk_backward_workspace = lrpe_cosine_qk_backward_workspace;
};
struct RotateForm {
  using Options = LrpeRotateOptions;
  static constexpr std::int64_t kWidth = 1;
  static constexpr auto forward = lrpe_rotate_forward;
  static constexpr auto forward_workspace = lrpe_rotate_forward_workspace;
  static constexpr auto backward = lrpe_rotate_backward;
  static constexpr auto backward_workspace = lrpe_rotate_backward_workspace;
  static constexpr auto qk_forward = lrpe_rotate_qk_forward;
  static constexpr auto qk_forward_workspace = lrpe_rotate_qk_forward_workspace;
  static constexpr auto qk_backward = lrpe_rotate_qk_backward;
  static constexpr auto qk_backward_workspace = lrpe_rotate_qk_backward_workspace;
};

template <class Form>
TensorView y_of(const char* op, const TensorView& x) {
  return encoded(op, x, checked_mul(Form::kWidth, x.shape[3], op), is_token_major(x));
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

// theta, or its gradient, of (E,) as the one row it is.
TensorView as_rows(TensorView theta) {
  if (theta.rank != 1) return theta;
  theta.rank = 2;
  theta.shape[1] = theta.shape[0];
  theta.stride[1] = theta.stride[0];
  theta.shape[0] = 1;
  return theta;
}

LrpePositions positions_of(std::span<const std::int64_t> shape, std::int64_t prefix,
                           std::int64_t offset) {
  return {.shape = LrpeGrid(shape), .prefix = prefix, .offset = offset};
}

template <class Options, class Op>
Options options_of(const Arguments<Op>& a) {
  LrpePositions at = positions_of(a.template get<"shape">(), a.template get<"prefix">(),
                                  a.template get<"offset">());
  at.offsets = a.template view<"offsets">();
  at.position_ids = a.template view<"position_ids">();
  if constexpr (std::is_same_v<Options, LrpeCosineOptions>) {
    return cosine_options(
        at, activation_of(Op::op, a.template get<"activation">(), a.template get<"softmax_dim">()));
  } else {
    return rotate_options(at, a.template get<"interleaved">());
  }
}

// The x that a backward's workspace is computed from, when x itself was not saved: dy's shape, with
// the columns of x.
template <class Form>
TensorView shaped_like_x(const TensorView& x, const TensorView& dy) {
  if (x.defined()) return x;
  TensorView like = dy;
  if (like.rank == 4) like.shape[3] /= Form::kWidth;
  return like;
}

// Into a fresh tensor, into one that an op with `y` among its arguments is given, or over x itself.
template <class Form, class Op>
Tensor encode(const Arguments<Op>& a, bool in_place = false) {
  const auto options = options_of<typename Form::Options>(a);
  const TensorView x = a.template view<"x">(), theta = as_rows(a.template view<"theta">());
  Call call(Op::op, x.device, Form::forward_workspace(x, theta, options));
  TensorView y = in_place ? x : y_of<Form>(Op::op, x);
  Tensor result = in_place ? a.template get<"x">() : output<"y">(a, y);
  Form::forward(x, theta, y, options, call.context);
  return result;
}

// dx and dtheta, as far as they are asked for.
template <class Form>
std::vector<Tensor> gradients_of(const char* op, const TensorView& dy, const TensorView& x,
                                 const TensorView& theta_view,
                                 const typename Form::Options& options, bool token_major,
                                 std::int64_t needed) {
  Gradients wanted(op, needed);
  const TensorView theta = as_rows(theta_view);
  const TensorView like = shaped_like_x<Form>(x, dy);
  Call call(op, dy.device, Form::backward_workspace(like, theta, wanted.needs(1), options));
  TensorView dx, dtheta;
  wanted.add("dx", dx, encoded(op, like, like.shape[3], token_major));
  wanted.add("dtheta", dtheta, dense_like(op, theta_view));
  std::vector<Tensor> result = wanted.allocate();
  Form::backward(dy, x, theta, dx, as_rows(dtheta), options, call.context);
  return result;
}
template <class Form, class Op>
std::vector<Tensor> gradients_of(const Arguments<Op>& a) {
  return gradients_of<Form>(Op::op, a.template view<"dy">(), a.template view<"x">(),
                            a.template view<"theta">(), options_of<typename Form::Options>(a),
                            a.template get<"token_major">(), a.template get<"needed">());
}

// The same of queries and keys.
template <class Form, class Op>
std::tuple<Tensor, Tensor> encode_qk(const Arguments<Op>& a, bool in_place = false) {
  const auto options = options_of<typename Form::Options>(a);
  const TensorView q = a.template view<"q">(), k = a.template view<"k">(),
                   theta = as_rows(a.template view<"theta">());
  Call call(Op::op, q.device, Form::qk_forward_workspace(q, k, theta, options));
  TensorView yq = in_place ? q : y_of<Form>(Op::op, q), yk = in_place ? k : y_of<Form>(Op::op, k);
  std::tuple result{in_place ? a.template get<"q">() : output<"yq">(a, yq),
                    in_place ? a.template get<"k">() : output<"yk">(a, yk)};
  Form::qk_forward(q, k, theta, yq, yk, options, call.context);
  return result;
}

template <class Form, class Op>
std::vector<Tensor> gradients_of_qk(const Arguments<Op>& a) {
  const auto options = options_of<typename Form::Options>(a);
  const TensorView dyq = a.template view<"dyq">(), dyk = a.template view<"dyk">(),
                   q = a.template view<"q">(), k = a.template view<"k">(),
                   theta_view = a.template view<"theta">(), theta = as_rows(theta_view);
  Gradients wanted(Op::op, a.template get<"needed">());
  const TensorView like_q = shaped_like_x<Form>(q, dyq), like_k = shaped_like_x<Form>(k, dyk);
  Call call(Op::op, dyq.device,
            Form::qk_backward_workspace(like_q, like_k, theta, wanted.needs(2), options));
  TensorView dq, dk, dtheta;
  wanted.add("dq", dq, encoded(Op::op, like_q, like_q.shape[3], a.template get<"q_token_major">()));
  wanted.add("dk", dk, encoded(Op::op, like_k, like_k.shape[3], a.template get<"k_token_major">()));
  wanted.add("dtheta", dtheta, dense_like(Op::op, theta_view));
  std::vector<Tensor> result = wanted.allocate();
  Form::qk_backward(dyq, dyk, q, k, theta, dq, dk, as_rows(dtheta), options, call.context);
  return result;
}

struct Cosine {
  static constexpr const char* op = "lrpe_cosine";
  static constexpr std::string_view schema =
      "lrpe_cosine(Tensor x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS ") -> Tensor y";
  static Tensor run(const Arguments<Cosine>& a) { return encode<CosineForm>(a); }
};

struct CosineOut {
  static constexpr const char* op = Cosine::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_out(Tensor x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", Tensor(a!) y) -> ()";
  static void run(const Arguments<CosineOut>& a) { encode<CosineForm>(a); }
};

struct CosineBackward {
  static constexpr const char* op = Cosine::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_backward(Tensor dy, Tensor? x, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", bool token_major, int needed) -> Tensor[]";
  static auto run(const Arguments<CosineBackward>& a) { return gradients_of<CosineForm>(a); }
};

struct CosineQk {
  static constexpr const char* op = "lrpe_cosine_qk";
  static constexpr std::string_view schema =
      "lrpe_cosine_qk(Tensor q, Tensor k, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ") -> (Tensor yq, Tensor yk)";
  static auto run(const Arguments<CosineQk>& a) { return encode_qk<CosineForm>(a); }
};

struct CosineQkOut {
  static constexpr const char* op = CosineQk::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_qk_out(Tensor q, Tensor k, Tensor theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", Tensor(a!) yq, Tensor(b!) yk) -> ()";
  static void run(const Arguments<CosineQkOut>& a) { encode_qk<CosineForm>(a); }
};

struct CosineQkBackward {
  static constexpr const char* op = CosineQk::op;
  static constexpr std::string_view schema =
      "lrpe_cosine_qk_backward(Tensor dyq, Tensor dyk, Tensor? q, Tensor? k, Tensor "
      "theta, " ANNULUS_LRPE_COSINE_POSITIONS
      ", bool q_token_major, bool k_token_major, int needed) -> Tensor[]";
  static auto run(const Arguments<CosineQkBackward>& a) { return gradients_of_qk<CosineForm>(a); }
};

struct Rotate {
  static constexpr const char* op = "lrpe_rotate";
  static constexpr std::string_view schema =
      "lrpe_rotate(Tensor x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS ") -> Tensor y";
  static Tensor run(const Arguments<Rotate>& a) { return encode<RotateForm>(a); }
};

struct RotateOut {
  static constexpr const char* op = Rotate::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_out(Tensor x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ", Tensor(a!) y) -> ()";
  static void run(const Arguments<RotateOut>& a) { encode<RotateForm>(a); }
};

struct RotateInPlace {
  static constexpr const char* op = Rotate::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_(Tensor(a!) x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS ") -> ()";
  static void run(const Arguments<RotateInPlace>& a) { encode<RotateForm>(a, /*in_place=*/true); }
};

struct RotateBackward {
  static constexpr const char* op = Rotate::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_backward(Tensor dy, Tensor? x, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ", bool token_major, int needed) -> Tensor[]";
  static auto run(const Arguments<RotateBackward>& a) { return gradients_of<RotateForm>(a); }
};

struct RotateQk {
  static constexpr const char* op = "lrpe_rotate_qk";
  static constexpr std::string_view schema =
      "lrpe_rotate_qk(Tensor q, Tensor k, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ") -> (Tensor yq, Tensor yk)";
  static auto run(const Arguments<RotateQk>& a) { return encode_qk<RotateForm>(a); }
};

struct RotateQkOut {
  static constexpr const char* op = RotateQk::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_qk_out(Tensor q, Tensor k, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ", Tensor(a!) yq, Tensor(b!) yk) -> ()";
  static void run(const Arguments<RotateQkOut>& a) { encode_qk<RotateForm>(a); }
};

struct RotateQkInPlace {
  static constexpr const char* op = RotateQk::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_qk_(Tensor(a!) q, Tensor(b!) k, Tensor theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ") -> ()";
  static void run(const Arguments<RotateQkInPlace>& a) {
    encode_qk<RotateForm>(a, /*in_place=*/true);
  }
};

struct RotateQkBackward {
  static constexpr const char* op = RotateQk::op;
  static constexpr std::string_view schema =
      "lrpe_rotate_qk_backward(Tensor dyq, Tensor dyk, Tensor? q, Tensor? k, Tensor "
      "theta, " ANNULUS_LRPE_ROTATE_POSITIONS
      ", bool q_token_major, bool k_token_major, int needed) -> Tensor[]";
  static auto run(const Arguments<RotateQkBackward>& a) { return gradients_of_qk<RotateForm>(a); }
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
    const LrpePositions at = positions_of(std::span(call).subspan(4), prefix, offset);
    const auto run_as = [&]<class Form>(const char* name, const typename Form::Options& options) {
      return gradients_of<Form>(name, view_of(name, "dy", a.get<"dy">()), {},
                                view_of(name, "theta", a.get<"theta">()), options, token_major != 0,
                                1)[0];
    };
    return form == 0 ? run_as.operator()<CosineForm>(Cosine::op, cosine_options(at))
                     : run_as.operator()<RotateForm>(Rotate::op, rotate_options(at, form == 2));
  }
};

ANNULUS_TORCH_OPS(Cosine, CosineOut, CosineBackward, CosineQk, CosineQkOut, CosineQkBackward,
                  Rotate, RotateOut, RotateInPlace, RotateBackward, RotateQk, RotateQkOut,
                  RotateQkInPlace, RotateQkBackward, PlainGradient)

}  // namespace
}  // namespace annulus::torch_glue
