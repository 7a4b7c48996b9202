// A plan as kernels know it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <variant>

#include "annulus/attention/cuda/arguments.cuh"
#include "annulus/attention/plan.h"

namespace annulus::attention::cuda {

inline Operand operand_of(const TensorView& v) {
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

inline AnyPattern pattern_of(const Plan& plan) {
  AnyPattern any;
  if (plan.part) {
    any.window = {true, plan.part->first_query, plan.Tq, plan.part->first_key, plan.Tk};
  }
  visit_layer(plan, plan.part ? plan.part->layer : 0, [&](const auto& pattern) {
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
  any.finish();
  return any;
}

inline LayerRows layer_rows(const Plan& plan) {
  return plan.layers > 1 ? LayerRows(std::get<Dilated>(plan.pattern), plan.layers) : LayerRows();
}

inline Problem problem_of(const Plan& plan) {
  Problem p;
  p.pattern = pattern_of(plan);
  if (plan.part) {  // one layer, which has no rows of its own
    p.order_of_layers[0] = static_cast<std::uint8_t>(plan.part->layer);
    p.fixed = plan.part->fixed;
  } else {
    p.layers = plan.layers;
    p.rows = layer_rows(plan);
    for (int i = 0; i < p.layers; ++i) p.order_of_layers[i] = static_cast<std::uint8_t>(i);
  }
  std::stable_sort(p.order_of_layers, p.order_of_layers + p.layers, [&](int i, int j) {
    return p.pattern.longest_sweep(i, false) > p.pattern.longest_sweep(j, false);
  });
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

inline bool no_queries(const Plan& plan) { return plan.B == 0 || plan.Tq == 0 || plan.H == 0; }
inline bool no_keys(const Plan& plan) { return plan.B == 0 || plan.Tk == 0 || plan.Hkv == 0; }
// Packed rows, but no sequence that has them: the integers do not say what they should, and there is no one to read.
inline bool no_sequences(const Plan& plan) {
  const auto* dense = std::get_if<Dense>(&plan.pattern);
  return dense != nullptr && dense->sequences < 1;
}
inline bool is_dilated(const Plan& plan) { return std::holds_alternative<Dilated>(plan.pattern); }
inline bool has_key_lengths(const Plan& plan) {
  const auto* dense = std::get_if<Dense>(&plan.pattern);
  return dense != nullptr && dense->key_lengths.defined();
}

inline std::int64_t query_rows(const Plan& plan) { return plan.B * plan.Tq * plan.H; }
inline std::int64_t key_rows(const Plan& plan) { return plan.B * plan.Tk * plan.Hkv; }

}  // namespace annulus::attention::cuda
