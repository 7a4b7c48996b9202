// The launches of a call.

#include <string>

#include "annulus/attention/cuda/launch.h"
#include "annulus/attention/cuda/scratch.h"
#include "annulus/attention/cuda/sm90/launch.h"
#include "annulus/core/errors.h"
#include "annulus/cuda/check.h"
#include "annulus/cuda/memory.h"

namespace annulus::attention::cuda {

namespace {

using namespace annulus::cuda;

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

template <class F>
void visit_16_bits(DType dtype, F&& f) {
  if (dtype == DType::kBF16) return f.template operator()<bfloat16>();
  f.template operator()<float16>();
}

void run_forward(const Plan& plan, const ForwardScratch& scratch, cudaStream_t stream) {
  ForwardArgs a;
  a.p = problem_of(plan);
  a.o = operand_of(plan.o);
  a.states = scratch.states;
  a.parts = scratch.parts;
  a.carries = plan.part.has_value();
  if (a.parts == 1 && !plan.portable && sm90::takes_forward(plan.op, plan.dtype, a.p)) {
    return visit_16_bits(plan.dtype, [&]<class T>() { sm90::forward_of<T>(plan.op, a, stream); });
  }
  visit_type(plan.dtype, [&]<class T>() { forward_of<T>(plan.op, a, stream); });
}

// `clear`: rows of dq that are cleared on the way, or null.
void run_delta(const Plan& plan, float* delta, float* clear, cudaStream_t stream) {
  DeltaArgs a;
  a.B = plan.B;
  a.H = plan.H;
  a.Tq = plan.Tq;
  a.Dv = static_cast<int>(plan.Dv);
  a.dtype = plan.dtype;
  a.o = operand_of(plan.o);
  a.do_ = operand_of(plan.do_);
  a.dlse = operand_of(plan.dlse);
  a.delta = delta;
  a.clear = clear;
  a.clear_width = LayerRows::pitch(plan.D);
  launch_delta(plan.op, a, stream);
}
void run_layer_delta(const Plan& plan, const States& states, float* delta, cudaStream_t stream) {
  LayerDeltaArgs a;
  a.pattern = std::get<Dilated>(plan.pattern);
  a.rows = layer_rows(plan);
  a.divisors = LayerDivisors(a.pattern);
  a.B = plan.B;
  a.H = plan.H;
  a.Tq = plan.Tq;
  a.Dv = static_cast<int>(plan.Dv);
  a.dtype = plan.dtype;
  a.do_ = operand_of(plan.do_);
  a.dlse = operand_of(plan.dlse);
  a.states = states;
  a.delta = delta;
  launch_layer_delta(plan.op, a, stream);
}

MergeArgs merge_of(const Plan& plan, const States& from, const TensorView& to) {
  MergeArgs a;
  if (plan.layers > 1) {
    a.pattern = std::get<Dilated>(plan.pattern);
    a.rows = layer_rows(plan);
    a.divisors = LayerDivisors(a.pattern);
  }
  a.B = to.shape[0];
  a.tokens = to.shape[1];
  a.heads = to.shape[2];
  a.columns = static_cast<int>(to.shape[3]);
  a.dtype = plan.dtype;
  a.from = from;
  a.to = operand_of(to);
  return a;
}

// `pitch`: between rows of `from`; 0: they are dense.
void round_to(const Plan& plan, const float* from, const TensorView& to, cudaStream_t stream,
              std::int64_t pitch = 0) {
  RoundArgs a;
  a.B = to.shape[0];
  a.rows = to.shape[1];
  a.heads = to.shape[2];
  a.columns = static_cast<int>(to.shape[3]);
  a.dtype = plan.dtype;
  a.from = from;
  a.pitch = pitch > 0 ? pitch : a.columns;
  a.to = operand_of(to);
  launch_round(plan.op, a, stream);
}

void run_query_gradient(const Plan& plan, const BackwardScratch& s, cudaStream_t stream) {
  QueryGradientArgs a;
  a.p = problem_of(plan);
  a.do_ = operand_of(plan.do_);
  a.dq = {s.of_layers, plan.part ? s.dq : nullptr, operand_of(plan.dq)};
  a.delta = s.deltas(plan);
  visit_type(plan.dtype, [&]<class T>() { query_gradient_of<T>(plan.op, a, stream); });
  if (s.of_layers != nullptr) {
    launch_merge(plan.op, merge_of(plan, {s.of_layers}, plan.dq), stream);
  }
}

// Of head `head` among those that share keys: what the layers have is added to that of the heads before, and rounded
// behind the last.
void merge_keys(const Plan& plan, int head, float* from, float* sum, const TensorView& to,
                cudaStream_t stream) {
  MergeArgs a = merge_of(plan, {from}, to);
  a.group = plan.heads_per_key();
  a.first_head = head;
  if (head > 0) a.before = sum;
  if (head + 1 < a.group) {
    a.dtype = DType::kF32;
    a.to = {
        sum, a.tokens * a.heads * a.columns, a.heads * a.columns, a.columns, 1, a.columns % 8 == 0};
  }
  launch_merge(plan.op, a, stream);
}

// launch(args) makes dk and dv of the heads that args say.
template <class Launch>
void run_key_gradient(const Plan& plan, const BackwardScratch& s, cudaStream_t stream,
                      Launch&& launch) {
  KeyGradientArgs a;
  a.p = problem_of(plan);
  a.do_ = operand_of(plan.do_);
  a.dk = {s.of_layers, s.dk, operand_of(plan.dk)};
  a.dv = {s.dv_of_layers, s.dv, operand_of(plan.dv)};
  a.delta = s.deltas(plan);
  // Heads that see different keys of one key head take turns, so that no two blocks of a launch add to one row.
  const auto heads = static_cast<int>(plan.heads_per_key());
  a.heads = is_dilated(plan) ? 1 : heads;
  for (a.first_head = 0; a.first_head < heads; a.first_head += a.heads) {
    launch(a);
    if (s.of_layers != nullptr) {
      merge_keys(plan, a.first_head, s.of_layers, s.dk, plan.dk, stream);
      merge_keys(plan, a.first_head, s.dv_of_layers, s.dv, plan.dv, stream);
    }
  }
}

void run_key_gradient(const Plan& plan, const BackwardScratch& s, cudaStream_t stream) {
  run_key_gradient(plan, s, stream, [&](const KeyGradientArgs& a) {
    visit_type(plan.dtype, [&]<class T>() { key_gradient_of<T>(plan.op, a, stream); });
  });
}
// Says on the device whether q, k and do are finite.
void find_not_finite(const Plan& plan, const KeyGradientArgs& of_keys, int* found,
                     cudaStream_t stream) {
  FiniteArgs a;
  a.B = plan.B;
  a.dtype = plan.dtype;
  const auto one = [](const Operand& t, const TensorView& v) -> FiniteArgs::One {
    const std::int64_t row = v.shape[2] * v.shape[3];
    const bool flat =
        t.head == v.shape[3] && t.row == row && (v.shape[0] <= 1 || t.batch == v.shape[1] * row);
    return {t, v.shape[1], v.shape[2], static_cast<int>(v.shape[3]), flat};
  };
  a.of[0] = one(of_keys.p.q, plan.q);
  a.of[1] = one(of_keys.p.k, plan.k);
  a.of[2] = one(of_keys.do_, plan.do_);
  a.found = found;
  ANNULUS_CUDA_CHECK(plan.op, cudaMemsetAsync(found, 0, sizeof(int), stream));
  launch_find_not_finite(plan.op, a, stream);
}
// dq along with them, which is all zero before.
void run_gradient(const Plan& plan, const BackwardScratch& s, cudaStream_t stream) {
  const bool of_layers = plan.layers > 1;
  run_key_gradient(plan, s, stream, [&](const KeyGradientArgs& of_keys) {
    GradientArgs a{of_keys, {of_layers ? s.dq : nullptr, s.dq, {}}};
    if (!plan.portable && sm90::takes_gradient(plan.op, plan.dtype, a)) {
      // Where all see all, numbers that are not finite reach nobody else.
      const bool whole = a.p.pattern.has_only_whole_tiles(128);
      if (!whole) {
        a.not_finite = s.not_finite;
        if (a.first_head == 0) find_not_finite(plan, a, s.not_finite, stream);
      }
      visit_16_bits(plan.dtype, [&]<class T>() { sm90::gradient_of<T>(plan.op, a, stream); });
      if (whole) return;
    }
    visit_16_bits(plan.dtype, [&]<class T>() {
      if (plan.D <= 64 && plan.Dv <= 64) return gradient_of<T, 64>(plan.op, a, stream);
      gradient_of<T, 128>(plan.op, a, stream);
    });
  });
  if (of_layers) {
    launch_merge(plan.op, merge_of(plan, {s.dq}, plan.dq), stream);
  } else if (!plan.part) {
    round_to(plan, s.dq, plan.dq, stream, LayerRows::pitch(plan.D));
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
  run_forward(plan, scratch, stream);
  if (scratch.states.acc == nullptr) return;
  MergeArgs a = merge_of(plan, scratch.states, plan.o);
  if (plan.layers == 1) a.parts = scratch.parts;
  a.lse = operand_of(plan.lse);
  launch_merge(plan.op, a, stream);
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
  const auto clear = [&](float* sums, std::int64_t count) {
    ANNULUS_CUDA_CHECK(
        plan.op, cudaMemsetAsync(sums, 0, static_cast<std::size_t>(count) * sizeof(float), stream));
  };
  const bool sums_keys = for_keys && plan.layers == 1 && s.dk != nullptr;
  if (sums_keys) {
    clear(s.dk, key_rows(plan) * LayerRows::pitch(plan.D));
    clear(s.dv, key_rows(plan) * LayerRows::pitch(plan.Dv));
  } else if (for_keys && has_key_lengths(plan)) {  // keys that do not exist are in no tile
    round_to(plan, nullptr, plan.dk, stream);
    round_to(plan, nullptr, plan.dv, stream);
  }
  const bool in_one = in_one_pass(plan) && for_q && for_keys;
  const bool of_rows = in_one && plan.layers == 1;
  if (in_one && !of_rows) clear(s.dq, BackwardScratch::dq_count(plan));
  if (s.forward.states.acc != nullptr) {
    run_forward(plan, s.forward, stream);
    run_layer_delta(plan, s.forward.states, s.delta, stream);
  } else {
    run_delta(plan, s.delta, of_rows ? s.dq : nullptr, stream);
  }
  if (in_one) {
    run_gradient(plan, s, stream);
  } else {
    if (for_q) run_query_gradient(plan, s, stream);
    if (for_keys) run_key_gradient(plan, s, stream);
  }
  if (sums_keys) {
    round_to(plan, s.dk, plan.dk, stream, LayerRows::pitch(plan.D));
    round_to(plan, s.dv, plan.dv, stream, LayerRows::pitch(plan.Dv));
  }
}

// ---- Parts

namespace {

// One layer of a plan; in fixed tiles only what has no others, and no atomics.
Plan one_layer(const Plan& plan) {
  Plan one = plan;
  one.layers = 1;
  one.deterministic |= plan.part->fixed;
  one.portable |= plan.part->fixed;
  return one;
}
// All m, then all l.
States states_of(const Plan& plan) {
  auto* const m = reinterpret_cast<float*>(plan.part->state);
  return {plan.part->acc, m, m + query_rows(plan)};
}

// Whether Hopper's kernels run for a call. (Of a backward whose inputs are not finite only the device knows that others do.)
bool on_hopper(const Plan& plan) {
  KeyGradientArgs a;
  a.p = problem_of(plan);
  if (!plan.do_.defined()) {
    return parts_of(plan) == 1 && sm90::takes_forward(plan.op, plan.dtype, a.p);
  }
  a.do_ = operand_of(plan.do_);
  return in_one_pass(plan) && plan.dq.defined() && plan.dk.defined() && !no_queries(plan) &&
         !no_keys(plan) && sm90::takes_gradient(plan.op, plan.dtype, a);
}

}  // namespace

void forward_part(const Plan& plan, Context& context) {
  if (no_queries(plan) || no_keys(plan)) return;
  const DeviceGuard guard(plan.device.index);
  run_forward(one_layer(plan), {states_of(plan), 1}, static_cast<cudaStream_t>(context.stream));
}

void end_parts(const Plan& plan, Context& context) {
  if (no_queries(plan)) return;
  const DeviceGuard guard(plan.device.index);
  MergeArgs a = merge_of(one_layer(plan), states_of(plan), plan.o);
  a.parts = 1;
  a.lse = operand_of(plan.lse);
  launch_merge(plan.op, a, static_cast<cudaStream_t>(context.stream));
}

void delta_of_part(const Plan& plan, Context& context) {
  if (no_queries(plan)) return;
  const DeviceGuard guard(plan.device.index);
  run_delta(plan, plan.part->delta, nullptr, static_cast<cudaStream_t>(context.stream));
}

void backward_part(const Plan& plan, Context& context) {
  if (no_queries(plan) || no_keys(plan)) return;
  const DeviceGuard guard(plan.device.index);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  const Part& part = *plan.part;
  const Plan one = one_layer(plan);
  BackwardScratch s;
  s.delta = part.delta;
  s.dq = part.dq;
  s.dk = part.dk;
  s.dv = part.dv;
  s.not_finite = part.flag;
  if (in_one_pass(one) && s.dq != nullptr && s.dk != nullptr) return run_gradient(one, s, stream);
  if (s.dq != nullptr) run_query_gradient(one, s, stream);
  if (s.dk != nullptr) run_key_gradient(one, s, stream);
}

void sums_to(const Plan& plan, const float* sums, const TensorView& to, Context& context) {
  if (to.numel() == 0) return;
  const DeviceGuard guard(plan.device.index);
  round_to(plan, sums, to, static_cast<cudaStream_t>(context.stream),
           LayerRows::pitch(to.shape[3]));
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

const char* how(const Plan& call) {
  const DeviceGuard guard(call.device.index);
  const Plan plan = call.part ? one_layer(call) : call;
  if (!plan.portable && on_hopper(plan)) {
    const bool narrow = plan.D <= 64 && plan.Dv <= 64;
    if (plan.dtype == DType::kBF16) {
      return narrow ? "Hopper's tensor cores, bf16, 64 columns"
                    : "Hopper's tensor cores, bf16, 128 columns";
    }
    return narrow ? "Hopper's tensor cores, f16, 64 columns"
                  : "Hopper's tensor cores, f16, 128 columns";
  }
  static constexpr const char* kTexts[3][3] = {
      {"tensor cores, bf16, 64 columns", "tensor cores, bf16, 128 columns",
       "tensor cores, bf16, 256 columns"},
      {"tensor cores, f16, 64 columns", "tensor cores, f16, 128 columns",
       "tensor cores, f16, 256 columns"},
      {"tensor cores, bf16x3, 64 columns", "tensor cores, bf16x3, 128 columns",
       "tensor cores, bf16x3, 256 columns"}};
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
