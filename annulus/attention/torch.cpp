// The attention ops of torch. Autograd and fake kernels are in python/annulus/attention.py.
//
// lse comes back as a tensor of shape (0,) where neither the caller (return_lse) nor a backward (keep) wants it.
#include <cstddef>
#include <string_view>
#include <tuple>
#include <vector>

#include "annulus/attention/attention.h"
#include "annulus/attention/torch_options.h"
#include "python/csrc/torch_op.h"

namespace annulus::torch_glue {
namespace {

// After q, k, v, which have gradients. A seed's 64 bits travel as an int.
#define ANNULUS_ATTENTION_OPTIONS                                                        \
  "bool causal, float? softmax_scale, SymInt window_left, SymInt window_right, Tensor? " \
  "order, Tensor? key_lengths, float dropout_p, SymInt dropout_seed, bool deterministic"
#define ANNULUS_ATTENTION_VARLEN_OPTIONS                                                \
  "bool causal, float? softmax_scale, SymInt window_left, SymInt window_right, Tensor " \
  "cu_seqlens_q, Tensor cu_seqlens_k, float dropout_p, SymInt dropout_seed, bool deterministic"
#define ANNULUS_DILATED_ATTENTION_OPTIONS                                          \
  "SymInt[] segment_lengths, SymInt[] dilation_rates, bool causal, str mode, str " \
  "offset_map, str multiplicity, str alpha_grad, str group_remainder, float? "     \
  "softmax_scale, float dropout_p, SymInt dropout_seed, bool deterministic"
#define ANNULUS_BLOCK_SPARSE_ATTENTION_OPTIONS                                             \
  "Tensor row_ptr, Tensor col_idx, SymInt block_size, bool causal, float? softmax_scale, " \
  "Tensor? order, float dropout_p, SymInt dropout_seed, bool deterministic"
#define ANNULUS_ATTENTION_FORWARD(name, options) \
  name "(Tensor q, Tensor k, Tensor v, " options \
       ", bool return_lse, bool keep) -> (Tensor o, Tensor lse)"
#define ANNULUS_ATTENTION_BACKWARD(name, options)                                           \
  name "_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor " \
       "lse, " options ", int needed) -> Tensor[]"

// What the functions of a form take beside tensors: made of the arguments of its ops, which live as long.
struct Dense {
  static constexpr const char* op = "attention";
  static constexpr auto forward = attention_forward;
  static constexpr auto forward_workspace = attention_forward_workspace;
  static constexpr auto backward = attention_backward;
  static constexpr auto backward_workspace = attention_backward_workspace;

  template <class Op>
  static AttentionOptions options_of(const Arguments<Op>& a) {
    AttentionOptions options = attention_options_of(a);
    options.order = a.template view<"order">();
    options.key_lengths = a.template view<"key_lengths">();
    return options;
  }
};

struct Packed {
  static constexpr const char* op = "attention_varlen";

  struct Options {
    AttentionOptions options;
    TensorView cu_seqlens_q, cu_seqlens_k;
  };
  template <class Op>
  static Options options_of(const Arguments<Op>& a) {
    return {attention_options_of(a), a.template view<"cu_seqlens_q">(),
            a.template view<"cu_seqlens_k">()};
  }
  static void forward(const TensorView& q, const TensorView& k, const TensorView& v,
                      const TensorView& o, const TensorView& lse, const Options& at,
                      Context& context) {
    attention_varlen_forward(q, k, v, at.cu_seqlens_q, at.cu_seqlens_k, o, lse, at.options,
                             context);
  }
  static void backward(const TensorView& do_, const TensorView& dlse, const TensorView& q,
                       const TensorView& k, const TensorView& v, const TensorView& o,
                       const TensorView& lse, const TensorView& dq, const TensorView& dk,
                       const TensorView& dv, const Options& at, Context& context) {
    attention_varlen_backward(do_, dlse, q, k, v, at.cu_seqlens_q, at.cu_seqlens_k, o, lse, dq, dk,
                              dv, at.options, context);
  }
  static std::size_t forward_workspace(const TensorView& q, const TensorView& k,
                                       const TensorView& v, const Options& at) {
    return attention_varlen_forward_workspace(q, k, v, at.cu_seqlens_q, at.cu_seqlens_k,
                                              at.options);
  }
  static std::size_t backward_workspace(const TensorView& q, const TensorView& k,
                                        const TensorView& v, const Options& at,
                                        bool deterministic) {
    return attention_varlen_backward_workspace(q, k, v, at.cu_seqlens_q, at.cu_seqlens_k,
                                               at.options, deterministic);
  }
};

struct Dilated {
  static constexpr const char* op = "dilated_attention";
  static constexpr auto forward = dilated_attention_forward;
  static constexpr auto forward_workspace = dilated_attention_forward_workspace;
  static constexpr auto backward = dilated_attention_backward;
  static constexpr auto backward_workspace = dilated_attention_backward_workspace;

  template <class Op>
  static DilatedAttentionOptions options_of(const Arguments<Op>& a) {
    return dilated_options_of(a);
  }
};

struct Blocks {
  static constexpr const char* op = "block_sparse_attention";
  static constexpr auto forward = block_sparse_attention_forward;
  static constexpr auto forward_workspace = block_sparse_attention_forward_workspace;
  static constexpr auto backward = block_sparse_attention_backward;
  static constexpr auto backward_workspace = block_sparse_attention_backward_workspace;

  template <class Op>
  static BlockSparseAttentionOptions options_of(const Arguments<Op>& a) {
    BlockSparseAttentionOptions options = block_sparse_options_of(a);
    options.order = a.template view<"order">();
    return options;
  }
};

// o (B, Tq, H, Dv) and lse (B, H, Tq), or of packed sequences (total, H, Dv) and (H, total). The library refuses tensors of
// another rank; until then they only have to be described.
template <class Form, class Op>
std::tuple<Tensor, Tensor> attend(const Arguments<Op>& a) {
  const char* op = Form::op;
  const auto options = Form::options_of(a);
  const TensorView q = a.template view<"q">(), k = a.template view<"k">(),
                   v = a.template view<"v">();
  Call call(op, q.device, Form::forward_workspace(q, k, v, options));
  const bool packed = q.rank == 3;
  TensorView o =
      packed ? dense(op, {q.shape[0], q.shape[1], v.shape[2]}, q.dtype, q.device)
             : dense(op, {q.shape[0], q.shape[1], q.shape[2], v.shape[3]}, q.dtype, q.device);
  TensorView lse = absent(DType::kF32, q.device);
  if (a.template get<"return_lse">() || a.template get<"keep">()) {
    lse = packed ? dense(op, {q.shape[1], q.shape[0]}, DType::kF32, q.device)
                 : dense(op, {q.shape[0], q.shape[2], q.shape[1]}, DType::kF32, q.device);
  }
  std::tuple result{allocate(op, "o", o), allocate(op, "lse", lse)};
  Form::forward(q, k, v, o, lse, options, call.context);
  return result;
}

// dk and dv are made together: where one alone is asked for, the other is scratch.
template <class Form, class Op>
std::vector<Tensor> gradients_of(const Arguments<Op>& a) {
  const char* op = Form::op;
  const auto options = Form::options_of(a);
  const TensorView q = a.template view<"q">(), k = a.template view<"k">(),
                   v = a.template view<"v">();
  const bool deterministic = a.template get<"deterministic">();
  Call call(op, q.device, Form::backward_workspace(q, k, v, options, deterministic));
  call.context.deterministic = deterministic;
  TensorView dq, dk, dv;
  Gradients wanted(op, a.template get<"needed">());
  wanted.add("dq", dq, dense_like(op, q));
  wanted.add("dk", dk, dense_like(op, k));
  wanted.add("dv", dv, dense_like(op, v));
  std::vector<Tensor> result = wanted.allocate();
  std::vector<Tensor> scratch;
  if (dk.defined() != dv.defined()) {
    TensorView& other = dk.defined() ? dv : dk;
    other = dense_like(op, dk.defined() ? v : k);
    scratch.push_back(allocate(op, "the other of dk and dv", other));
  }
  if (dq.defined() || dk.defined()) {
    Form::backward(a.template view<"do">(), a.template view<"dlse">(), q, k, v,
                   a.template view<"o">(), a.template view<"lse">(), dq, dk, dv, options,
                   call.context);
  }
  return result;
}

template <class Form>
struct Forward;
template <class Form>
struct Backward;

#define ANNULUS_ATTENTION_OPS(Form, name, options)                                        \
  template <>                                                                             \
  struct Forward<Form> {                                                                  \
    static constexpr const char* op = name;                                               \
    static constexpr std::string_view schema = ANNULUS_ATTENTION_FORWARD(name, options);  \
    static auto run(const Arguments<Forward>& a) { return attend<Form>(a); }              \
  };                                                                                      \
  template <>                                                                             \
  struct Backward<Form> {                                                                 \
    static constexpr const char* op = name;                                               \
    static constexpr std::string_view schema = ANNULUS_ATTENTION_BACKWARD(name, options); \
    static auto run(const Arguments<Backward>& a) { return gradients_of<Form>(a); }       \
  };

ANNULUS_ATTENTION_OPS(Dense, "attention", ANNULUS_ATTENTION_OPTIONS)
ANNULUS_ATTENTION_OPS(Packed, "attention_varlen", ANNULUS_ATTENTION_VARLEN_OPTIONS)
ANNULUS_ATTENTION_OPS(Dilated, "dilated_attention", ANNULUS_DILATED_ATTENTION_OPTIONS)
ANNULUS_ATTENTION_OPS(Blocks, "block_sparse_attention", ANNULUS_BLOCK_SPARSE_ATTENTION_OPTIONS)

// Into (numel,) i64 of the caller's on the CPU: an op without a tensor would belong to no device.
struct HilbertOrder {
  static constexpr const char* op = "hilbert_order";
  static constexpr std::string_view schema = "_hilbert_order(int[] shape, Tensor(a!) order) -> ()";

  static void run(const Arguments<HilbertOrder>& a) {
    hilbert_order(a.get<"shape">(), a.view<"order">());
  }
};

ANNULUS_TORCH_OPS(Forward<Dense>, Backward<Dense>, Forward<Packed>, Backward<Packed>,
                  Forward<Dilated>, Backward<Dilated>, Forward<Blocks>, Backward<Blocks>,
                  HilbertOrder)

}  // namespace
}  // namespace annulus::torch_glue
