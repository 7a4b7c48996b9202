// The launches of a call, and its scratch.

#include <cmath>
#include <string>
#include <type_traits>

#include "annulus/attention/cuda/launch.h"
#include "annulus/core/errors.h"
#include "annulus/core/scratch.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/memory.h"

namespace annulus::attention::cuda {

namespace {

using namespace annulus::cuda;

Operand operand_of(const TensorView& v) {
  if (!v.defined()) return {};
  Operand o;
  o.data = v.data;
  o.batch = v.stride[0];
  if (v.rank == 3) {  // (batch, heads, rows)
    o.head = v.stride[1];
    o.row = v.stride[2];
    return o;
  }
  o.row = v.stride[1];
  o.head = v.stride[2];
  o.column = v.stride[3];
  const std::int64_t width = 16 / size_of(v.dtype);
  // A stride of an axis of size 1 may be anything, and is only ever multiplied by 0.
  const auto aligned = [&](int axis) {
    const auto i = static_cast<std::size_t>(axis);
    return v.shape[i] <= 1 || v.stride[i] % width == 0;
  };
  o.whole = (v.stride[3] == 1 || v.shape[3] <= 1) && v.shape[3] % 8 == 0 && aligned(0) &&
            aligned(1) && aligned(2) && reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0;
  return o;
}

AnyPattern pattern_of(const Plan& plan, int layer) {
  AnyPattern any;
  visit_layer(plan, layer, [&](const auto& pattern) {
    using P = std::remove_cvref_t<decltype(pattern)>;
    if constexpr (std::is_same_v<P, Dense>) {
      any.kind = Kind::kDense;
      any.dense = pattern;
    } else if constexpr (std::is_same_v<P, Dilated>) {
      any.kind = Kind::kDilated;
      any.dilated = pattern;
    } else {
      any.kind = Kind::kBlocks;
      any.blocks = pattern;
    }
  });
  return any;
}

Problem problem_of(const Plan& plan, int layer) {
  Problem p;
  p.pattern = pattern_of(plan, layer);
  p.B = plan.B;
  p.H = plan.H;
  p.Hkv = plan.Hkv;
  p.group = plan.heads_per_key();
  p.Tq = plan.Tq;
  p.Tk = plan.Tk;
  p.D = static_cast<int>(plan.D);
  p.Dv = static_cast<int>(plan.Dv);
  p.q = operand_of(plan.q);
  p.k = operand_of(plan.k);
  p.v = operand_of(plan.v);
  p.lse = operand_of(plan.lse);
  if (plan.order.defined()) {
    p.order = {plan.order.data, plan.order.dtype == DType::kI64, plan.order.stride[0]};
  }
  p.dropout = plan.dropout;
  p.scale = static_cast<float>(plan.scale);
  const auto exponent = static_cast<float>(plan.scale * 1.4426950408889634);
  p.scale_first = !(exponent > 0);
  p.score_scale = p.scale_first ? exponent : 1;
  p.exponent_scale = p.scale_first ? 1 : exponent;
  return p;
}

bool no_queries(const Plan& plan) { return plan.B == 0 || plan.Tq == 0 || plan.H == 0; }
bool no_keys(const Plan& plan) { return plan.B == 0 || plan.Tk == 0 || plan.Hkv == 0; }
// Packed rows, but no sequence that has them: the integers do not say what they should, and there is no one to read.
bool no_sequences(const Plan& plan) {
  const auto* dense = std::get_if<Dense>(&plan.pattern);
  return dense != nullptr && dense->sequences < 1;
}
bool is_dilated(const Plan& plan) { return std::holds_alternative<Dilated>(plan.pattern); }
bool has_key_lengths(const Plan& plan) {
  const auto* dense = std::get_if<Dense>(&plan.pattern);
  return dense != nullptr && dense->key_lengths.defined();
}

// f.operator()<T>()
template <class F>
void visit_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF16:
      return f.template operator()<float16>();
    case DType::kBF16:
      return f.template operator()<bfloat16>();
    default:
      return f.template operator()<float>();
  }
}

std::int64_t query_rows(const Plan& plan) { return plan.B * plan.Tq * plan.H; }
std::int64_t key_rows(const Plan& plan) { return plan.B * plan.Tk * plan.Hkv; }

void lay_out(const Plan& plan, States& s, ScratchLayout& scratch) {
  scratch(s.acc, query_rows(plan) * plan.Dv);
  scratch(s.m, query_rows(plan));
  scratch(s.l, query_rows(plan));
}
void clear(const Plan& plan, const States& s, cudaStream_t stream) {
  const auto rows = static_cast<std::size_t>(query_rows(plan));
  ANNULUS_CUDA_CHECK(plan.op, cudaMemsetAsync(s.acc, 0, rows * static_cast<std::size_t>(plan.Dv) * sizeof(float), stream));
  ANNULUS_CUDA_CHECK(plan.op, cudaMemsetAsync(s.l, 0, rows * sizeof(float), stream));
}

struct ForwardScratch {
  States states;

  void lay_out(const Plan& plan, ScratchLayout& scratch) {
    if (plan.layers > 1 && !no_queries(plan)) cuda::lay_out(plan, states, scratch);
  }
};

// Layers accumulate in fp32; so do keys of several heads, where they are not the same keys.
struct BackwardScratch {
  float* delta = nullptr;
  States states;  // of a layer by itself
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;

  void lay_out(const Plan& plan, ScratchLayout& scratch) {
    if (no_queries(plan)) return;
    scratch(delta, query_rows(plan));
    if (plan.layers > 1) scratch(dq, query_rows(plan) * plan.D);
    if (plan.stop_alpha_gradient && plan.layers > 1) cuda::lay_out(plan, states, scratch);
    if (is_dilated(plan) && !no_keys(plan)) {
      scratch(dk, key_rows(plan) * plan.D);
      scratch(dv, key_rows(plan) * plan.Dv);
    }
  }
};

void run_forward(const Plan& plan, int layer, const States& states, cudaStream_t stream) {
  ForwardArgs a;
  a.p = problem_of(plan, layer);
  a.o = operand_of(plan.o);
  a.states = states;
  visit_type(plan.dtype, [&]<class T>() { forward_of<T>(plan.op, a, stream); });
}

void run_delta(const Plan& plan, const States& states, float* delta, cudaStream_t stream) {
  DeltaArgs a;
  a.B = plan.B;
  a.H = plan.H;
  a.Tq = plan.Tq;
  a.Dv = static_cast<int>(plan.Dv);
  a.dtype = plan.dtype;
  a.o = operand_of(plan.o);
  a.do_ = operand_of(plan.do_);
  a.dlse = operand_of(plan.dlse);
  a.states = states;
  a.delta = delta;
  launch_delta(plan.op, a, stream);
}

void round_to(const Plan& plan, const float* from, const TensorView& to, cudaStream_t stream) {
  RoundArgs a;
  a.B = to.shape[0];
  a.rows = to.shape[1];
  a.heads = to.shape[2];
  a.columns = static_cast<int>(to.shape[3]);
  a.dtype = plan.dtype;
  a.from = from;
  a.to = operand_of(to);
  launch_round(plan.op, a, stream);
}

void run_query_gradient(const Plan& plan, int layer, const BackwardScratch& s, cudaStream_t stream) {
  QueryGradientArgs a;
  a.p = problem_of(plan, layer);
  a.do_ = operand_of(plan.do_);
  a.dq = operand_of(plan.dq);
  a.delta = s.delta;
  a.sum = s.dq;
  visit_type(plan.dtype, [&]<class T>() { query_gradient_of<T>(plan.op, a, stream); });
}

void run_key_gradient(const Plan& plan, int layer, const BackwardScratch& s, cudaStream_t stream) {
  KeyGradientArgs a;
  a.p = problem_of(plan, layer);
  a.do_ = operand_of(plan.do_);
  a.dk = operand_of(plan.dk);
  a.dv = operand_of(plan.dv);
  a.delta = s.delta;
  a.dk_sum = s.dk;
  a.dv_sum = s.dv;
  // Heads that see different keys of one key head take turns, so that no two blocks of a launch add to one row.
  const auto heads = static_cast<int>(plan.heads_per_key());
  a.heads = s.dk != nullptr ? 1 : heads;
  for (a.first_head = 0; a.first_head < heads; a.first_head += a.heads) {
    visit_type(plan.dtype, [&]<class T>() { key_gradient_of<T>(plan.op, a, stream); });
  }
}

}  // namespace

void forward(const Plan& plan, Context& context) {
  if (no_queries(plan) || no_sequences(plan)) return;
  const DeviceGuard guard(plan.device.index);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  ForwardScratch scratch;
  const Workspace workspace(context, plan.op, plan.device,
                            [&](ScratchLayout& layout) { scratch.lay_out(plan, layout); });
  if (plan.layers == 1) return run_forward(plan, 0, {}, stream);
  clear(plan, scratch.states, stream);
  for (int i = 0; i < plan.layers; ++i) run_forward(plan, i, scratch.states, stream);
  FinishArgs a;
  a.B = plan.B;
  a.H = plan.H;
  a.Tq = plan.Tq;
  a.Dv = static_cast<int>(plan.Dv);
  a.dtype = plan.dtype;
  a.states = scratch.states;
  a.o = operand_of(plan.o);
  a.lse = operand_of(plan.lse);
  launch_finish(plan.op, a, stream);
}

void backward(const Plan& plan, Context& context) {
  const DeviceGuard guard(plan.device.index);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  const bool for_q = plan.dq.defined() && !no_queries(plan);
  const bool for_keys = plan.dk.defined() && !no_keys(plan);
  if (no_queries(plan) || no_sequences(plan)) {
    if (for_keys) {
      round_to(plan, nullptr, plan.dk, stream);
      round_to(plan, nullptr, plan.dv, stream);
    }
    return;
  }
  BackwardScratch s;
  const Workspace workspace(context, plan.op, plan.device,
                            [&](ScratchLayout& layout) { s.lay_out(plan, layout); });
  const auto clear_sums = [&](float* sums, std::int64_t count) {
    ANNULUS_CUDA_CHECK(plan.op, cudaMemsetAsync(sums, 0, static_cast<std::size_t>(count) * sizeof(float), stream));
  };
  if (for_q && s.dq != nullptr) clear_sums(s.dq, query_rows(plan) * plan.D);
  if (for_keys && s.dk != nullptr) {
    clear_sums(s.dk, key_rows(plan) * plan.D);
    clear_sums(s.dv, key_rows(plan) * plan.Dv);
  } else if (for_keys && has_key_lengths(plan)) {  // keys that do not exist are in no tile
    round_to(plan, nullptr, plan.dk, stream);
    round_to(plan, nullptr, plan.dv, stream);
  }
  const bool own_deltas = s.states.acc != nullptr;
  if (!own_deltas) run_delta(plan, {}, s.delta, stream);
  for (int i = 0; i < plan.layers; ++i) {
    if (own_deltas) {
      clear(plan, s.states, stream);
      run_forward(plan, i, s.states, stream);
      run_delta(plan, s.states, s.delta, stream);
    }
    if (for_q) run_query_gradient(plan, i, s, stream);
    if (for_keys) run_key_gradient(plan, i, s, stream);
  }
  if (for_q && s.dq != nullptr) round_to(plan, s.dq, plan.dq, stream);
  if (for_keys && s.dk != nullptr) {
    round_to(plan, s.dk, plan.dk, stream);
    round_to(plan, s.dv, plan.dv, stream);
  }
}

std::size_t forward_workspace(const Plan& plan) {
  if (no_queries(plan) || no_sequences(plan)) return 0;
  ForwardScratch scratch;
  return scratch_bytes([&](ScratchLayout& layout) { scratch.lay_out(plan, layout); });
}
std::size_t backward_workspace(const Plan& plan) {
  if (no_queries(plan) || no_sequences(plan)) return 0;
  BackwardScratch scratch;
  return scratch_bytes([&](ScratchLayout& layout) { scratch.lay_out(plan, layout); });
}

const char* how(const Plan& plan) {
  static constexpr const char* kTexts[3][3] = {
      {"tensor cores, bf16, 64 columns", "tensor cores, bf16, 128 columns", "tensor cores, bf16, 256 columns"},
      {"tensor cores, f16, 64 columns", "tensor cores, f16, 128 columns", "tensor cores, f16, 256 columns"},
      {"tensor cores, bf16x3, 64 columns", "tensor cores, bf16x3, 128 columns", "tensor cores, bf16x3, 256 columns"}};
  const int type = plan.dtype == DType::kBF16 ? 0 : plan.dtype == DType::kF16 ? 1 : 2;
  const std::int64_t columns = plan.D > plan.Dv ? plan.D : plan.Dv;
  return kTexts[type][columns <= 64 ? 0 : columns <= 128 ? 1 : 2];
}

Support support() {
  const std::string why = why_unavailable();
  if (!why.empty()) return {false, why};
  return kernels_support();
}

}  // namespace annulus::attention::cuda
