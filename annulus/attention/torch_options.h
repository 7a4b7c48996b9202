// The options of attention made of an op's arguments, of whatever op has them. Views and lists live as long as the arguments.
#pragma once

#include <array>
#include <cstdint>

#include "annulus/attention/attention.h"
#include "python/csrc/torch_op.h"

namespace annulus::torch_glue {

// Without order and key_lengths.
template <class Op>
AttentionOptions attention_options_of(const Arguments<Op>& a) {
  return {.causal = a.template get<"causal">(),
          .softmax_scale = a.template get<"softmax_scale">(),
          .window_left = a.template get<"window_left">(),
          .window_right = a.template get<"window_right">(),
          .dropout = a.template get<"dropout_p">(),
          .dropout_seed = static_cast<std::uint64_t>(a.template get<"dropout_seed">())};
}

constexpr std::array<Choice<DilatedMode>, 3> kModes{{{"longnet", DilatedMode::kLongNet},
                                                     {"grouped", DilatedMode::kGrouped},
                                                     {"grouped_kv", DilatedMode::kGroupedKv}}};
constexpr std::array<Choice<DilatedOffsets>, 2> kOffsets{
    {{"mod", DilatedOffsets::kMod}, {"block", DilatedOffsets::kBlock}}};
constexpr std::array<Choice<bool>, 2> kUnite{{{"multiset", false}, {"union", true}}};
constexpr std::array<Choice<bool>, 2> kStop{{{"exact", false}, {"stop", true}}};
constexpr std::array<Choice<bool>, 2> kRemainderLast{{{"first", false}, {"last", true}}};

template <class Op>
DilatedAttentionOptions dilated_options_of(const Arguments<Op>& a) {
  const char* op = Op::op;
  DilatedAttentionOptions options{
      .segment_lengths = a.template get<"segment_lengths">(),
      .dilation_rates = a.template get<"dilation_rates">(),
      .causal = a.template get<"causal">(),
      .mode = chosen(op, "mode", a.template get<"mode">(), kModes),
      .offsets = chosen(op, "offset_map", a.template get<"offset_map">(), kOffsets),
      .unite = chosen(op, "multiplicity", a.template get<"multiplicity">(), kUnite),
      .stop_alpha_gradient = chosen(op, "alpha_grad", a.template get<"alpha_grad">(), kStop),
      .remainder_last =
          chosen(op, "group_remainder", a.template get<"group_remainder">(), kRemainderLast),
      .softmax_scale = a.template get<"softmax_scale">(),
      .dropout = a.template get<"dropout_p">(),
      .dropout_seed = static_cast<std::uint64_t>(a.template get<"dropout_seed">())};
  // In the words of Python, which has names where C++ has switches.
  const auto refuse = [op](bool wrong, const char* name, const char* rule) {
    if (wrong) throw InvalidArgument(argument(op, name) + " must " + rule);
  };
  const bool longnet = options.mode == DilatedMode::kLongNet;
  refuse(!longnet && options.offsets != DilatedOffsets::kMod, "offset_map",
         "be 'mod' where heads are grouped: a group has its own offset, but is 'block'");
  refuse(!longnet && options.unite, "multiplicity",
         "be 'multiset' where heads are grouped: each has one branch, but is 'union'");
  refuse(!longnet && options.stop_alpha_gradient, "alpha_grad",
         "be 'exact' where heads are grouped: nothing is merged, but is 'stop'");
  refuse(options.unite && options.stop_alpha_gradient, "alpha_grad",
         "be 'exact' with multiplicity 'union': branches that share keys have no weights, but is "
         "'stop'");
  refuse(longnet && options.remainder_last, "group_remainder",
         "be 'first' in mode 'longnet', which has no groups, but is 'last'");
  return options;
}

// Without order.
template <class Op>
BlockSparseAttentionOptions block_sparse_options_of(const Arguments<Op>& a) {
  return {.block_size = a.template get<"block_size">(),
          .row_ptr = a.template view<"row_ptr">(),
          .col_idx = a.template view<"col_idx">(),
          .causal = a.template get<"causal">(),
          .softmax_scale = a.template get<"softmax_scale">(),
          .dropout = a.template get<"dropout_p">(),
          .dropout_seed = static_cast<std::uint64_t>(a.template get<"dropout_seed">())};
}

}  // namespace annulus::torch_glue
