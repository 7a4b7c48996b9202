// Checks every argument once, then hands a Plan to the backend of the tensors' device.

#include "annulus/attention/attention.h"

#include "annulus/attention/check.h"
#include "annulus/attention/plan.h"
#include "annulus/core/info.h"
#include "annulus/core/operator.h"
#include "annulus/cpu/features.h"

namespace annulus {

namespace {

using attention::Call;
using attention::Plan;
using attention::plan_of;
using attention::Tensors;

void run(const Plan& plan, bool backward, Context& context) {
  const char* how = dispatch(
      plan.op, plan.device,
      [&] {
        backward ? attention::cpu::backward(plan, context) : attention::cpu::forward(plan, context);
        return attention::cpu::how(plan);
      },
      [&] {
        backward ? attention::cuda::backward(plan, context)
                 : attention::cuda::forward(plan, context);
        return attention::cuda::how(plan);
      });
  context.ran_on(plan.op, plan.device.type, how);
}

Tensors packed(Tensors t, const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k) {
  t.cu_seqlens_q = cu_seqlens_q;
  t.cu_seqlens_k = cu_seqlens_k;
  return t;
}

std::size_t scratch(Plan plan, bool backward = false, bool deterministic = false) {
  plan.deterministic = deterministic;
  return dispatch(
      plan.op, plan.device,
      [&] {
        return backward ? attention::cpu::backward_workspace(plan)
                        : attention::cpu::forward_workspace(plan);
      },
      [&] {
        return backward ? attention::cuda::backward_workspace(plan)
                        : attention::cuda::forward_workspace(plan);
      });
}

}  // namespace

void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                       const TensorView& o, const TensorView& lse, const AttentionOptions& options,
                       Context& context) {
  run(plan_of("attention", {q, k, v, o, lse}, options, Call::kForward, &context), false, context);
}
void attention_backward(const TensorView& do_, const TensorView& dlse, const TensorView& q,
                        const TensorView& k, const TensorView& v, const TensorView& o,
                        const TensorView& lse, const TensorView& dq, const TensorView& dk,
                        const TensorView& dv, const AttentionOptions& options, Context& context) {
  run(plan_of("attention_backward", {q, k, v, o, lse, do_, dlse, dq, dk, dv}, options,
              Call::kBackward, &context),
      true, context);
}

void attention_varlen_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                              const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k,
                              const TensorView& o, const TensorView& lse,
                              const AttentionOptions& options, Context& context) {
  const Tensors t = packed({q, k, v, o, lse}, cu_seqlens_q, cu_seqlens_k);
  run(plan_of("attention_varlen", t, options, Call::kForward, &context), false, context);
}
void attention_varlen_backward(const TensorView& do_, const TensorView& dlse, const TensorView& q,
                               const TensorView& k, const TensorView& v,
                               const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k,
                               const TensorView& o, const TensorView& lse, const TensorView& dq,
                               const TensorView& dk, const TensorView& dv,
                               const AttentionOptions& options, Context& context) {
  run(plan_of("attention_varlen_backward",
              {q, k, v, o, lse, do_, dlse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k}, options,
              Call::kBackward, &context),
      true, context);
}

void dilated_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                               const TensorView& o, const TensorView& lse,
                               const DilatedAttentionOptions& options, Context& context) {
  run(plan_of("dilated_attention", {q, k, v, o, lse}, options, Call::kForward, &context), false,
      context);
}
void dilated_attention_backward(const TensorView& do_, const TensorView& dlse, const TensorView& q,
                                const TensorView& k, const TensorView& v, const TensorView& o,
                                const TensorView& lse, const TensorView& dq, const TensorView& dk,
                                const TensorView& dv, const DilatedAttentionOptions& options,
                                Context& context) {
  run(plan_of("dilated_attention_backward", {q, k, v, o, lse, do_, dlse, dq, dk, dv}, options,
              Call::kBackward, &context),
      true, context);
}

void block_sparse_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                                    const TensorView& o, const TensorView& lse,
                                    const BlockSparseAttentionOptions& options, Context& context) {
  run(plan_of("block_sparse_attention", {q, k, v, o, lse}, options, Call::kForward, &context),
      false, context);
}
void block_sparse_attention_backward(const TensorView& do_, const TensorView& dlse,
                                     const TensorView& q, const TensorView& k, const TensorView& v,
                                     const TensorView& o, const TensorView& lse,
                                     const TensorView& dq, const TensorView& dk,
                                     const TensorView& dv,
                                     const BlockSparseAttentionOptions& options, Context& context) {
  run(plan_of("block_sparse_attention_backward", {q, k, v, o, lse, do_, dlse, dq, dk, dv}, options,
              Call::kBackward, &context),
      true, context);
}

std::size_t attention_forward_workspace(const TensorView& q, const TensorView& k,
                                        const TensorView& v, const AttentionOptions& options) {
  return scratch(plan_of("attention", {q, k, v, {}, {}}, options, Call::kForwardSizes, nullptr));
}
std::size_t attention_backward_workspace(const TensorView& q, const TensorView& k,
                                         const TensorView& v, const AttentionOptions& options,
                                         bool deterministic) {
  return scratch(
      plan_of("attention_backward", {q, k, v, {}, {}}, options, Call::kBackwardSizes, nullptr),
      true, deterministic);
}
std::size_t attention_varlen_forward_workspace(const TensorView& q, const TensorView& k,
                                               const TensorView& v, const TensorView& cu_seqlens_q,
                                               const TensorView& cu_seqlens_k,
                                               const AttentionOptions& options) {
  const Tensors t = packed({q, k, v, {}, {}}, cu_seqlens_q, cu_seqlens_k);
  return scratch(plan_of("attention_varlen", t, options, Call::kForwardSizes, nullptr));
}
std::size_t attention_varlen_backward_workspace(const TensorView& q, const TensorView& k,
                                                const TensorView& v, const TensorView& cu_seqlens_q,
                                                const TensorView& cu_seqlens_k,
                                                const AttentionOptions& options,
                                                bool deterministic) {
  const Tensors t = packed({q, k, v, {}, {}}, cu_seqlens_q, cu_seqlens_k);
  return scratch(plan_of("attention_varlen_backward", t, options, Call::kBackwardSizes, nullptr),
                 true, deterministic);
}
std::size_t dilated_attention_forward_workspace(const TensorView& q, const TensorView& k,
                                                const TensorView& v,
                                                const DilatedAttentionOptions& options) {
  return scratch(
      plan_of("dilated_attention", {q, k, v, {}, {}}, options, Call::kForwardSizes, nullptr));
}
std::size_t dilated_attention_backward_workspace(const TensorView& q, const TensorView& k,
                                                 const TensorView& v,
                                                 const DilatedAttentionOptions& options,
                                                 bool deterministic) {
  return scratch(plan_of("dilated_attention_backward", {q, k, v, {}, {}}, options,
                         Call::kBackwardSizes, nullptr),
                 true, deterministic);
}
std::size_t block_sparse_attention_forward_workspace(const TensorView& q, const TensorView& k,
                                                     const TensorView& v,
                                                     const BlockSparseAttentionOptions& options) {
  return scratch(
      plan_of("block_sparse_attention", {q, k, v, {}, {}}, options, Call::kForwardSizes, nullptr));
}
std::size_t block_sparse_attention_backward_workspace(const TensorView& q, const TensorView& k,
                                                      const TensorView& v,
                                                      const BlockSparseAttentionOptions& options,
                                                      bool deterministic) {
  return scratch(plan_of("block_sparse_attention_backward", {q, k, v, {}, {}}, options,
                         Call::kBackwardSizes, nullptr),
                 true, deterministic);
}

namespace {

Support support(DeviceType device) {
  if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
  return cuda_support([] { return attention::cuda::support(); });
}

OperatorInfo info(const char* name, const char* summary) {
  return {.name = name,
          .summary = summary,
          .dtypes = {DType::kF32, DType::kF16, DType::kBF16},
          .gradients = {"q", "k", "v"},
          .deterministic = false,  // CUDA's backward, unless asked for
          .support = support};
}
const OperatorRegistration kDense(info(
    "attention", "softmax attention: causal, windows, GQA, packed sequences, any token order"));
const OperatorRegistration kDilated(
    info("dilated_attention", "LongNet's branches merged exactly, or a branch a group of heads"));
const OperatorRegistration kBlocks(info("block_sparse_attention",
                                        "softmax attention over lists of blocks"));

}  // namespace

}  // namespace annulus
