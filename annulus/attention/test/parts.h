// Of an attention problem, what follows from it without a draw: its integers and its options.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "annulus/attention/test/cases.h"

namespace annulus::testing {

inline std::vector<std::int64_t> order_of(const AttentionProblem& p) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(p.Tq));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(p.seed ^ 0x04de4);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
  }
  return order;
}

inline std::vector<std::int64_t> ends_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> ends = {0};
  for (const std::int64_t n : lengths) ends.push_back(ends.back() + n);
  return ends;
}

struct NamedIntegers {
  const char* name;
  DType dtype;
  std::vector<std::int64_t> shape, values;
};

// In the order of the call's inputs, behind q, k and v.
inline std::vector<NamedIntegers> integers_of(const AttentionProblem& p) {
  const DType t = p.wide_integers ? DType::kI64 : DType::kI32;
  std::vector<NamedIntegers> all;
  const auto add = [&](const char* name, std::vector<std::int64_t> values) {
    all.push_back({name, t, {static_cast<std::int64_t>(values.size())}, std::move(values)});
  };
  if (p.form == AttentionProblem::Form::kVarlen) {
    add("cu_seqlens_q", ends_of(p.query_lengths));
    add("cu_seqlens_k", ends_of(p.packed_key_lengths));
  }
  if (p.form == AttentionProblem::Form::kBlocks) {
    Rng rng(p.seed ^ 0xb10c);
    const std::int64_t lists = p.shared_list ? 1 : p.H;
    const std::int64_t rows = (p.Tq + p.block_size - 1) / p.block_size;
    const std::int64_t columns = (p.Tk + p.block_size - 1) / p.block_size;
    std::vector<std::int64_t> row_ptr, col_idx;
    for (std::int64_t h = 0; h < lists; ++h) {
      for (std::int64_t x = 0; x < rows; ++x) {
        row_ptr.push_back(static_cast<std::int64_t>(col_idx.size()));
        for (std::int64_t c = 0; c < columns; ++c) {
          if (rng.uniform() < p.density) col_idx.push_back(c);
        }
      }
      row_ptr.push_back(static_cast<std::int64_t>(col_idx.size()));
    }
    all.push_back({"row_ptr", t, {lists, rows + 1}, row_ptr});
    const auto count = static_cast<std::int64_t>(col_idx.size());
    all.push_back({"col_idx", DType::kI32, {count}, std::move(col_idx)});
  }
  if (p.order) add("order", order_of(p));
  if (!p.key_lengths.empty()) add("key_lengths", p.key_lengths);
  return all;
}

template <class Options>
void set_common(Options& o, const AttentionProblem& p) {
  o.causal = p.causal;
  o.softmax_scale = p.scale;
  o.dropout = p.dropout;
  o.dropout_seed = p.seed;
}
inline AttentionOptions dense_options(const AttentionProblem& p, const TensorView& order,
                                      const TensorView& key_lengths) {
  AttentionOptions o;
  set_common(o, p);
  o.window_left = p.window_left;
  o.window_right = p.window_right;
  o.order = order;
  o.key_lengths = key_lengths;
  return o;
}
// Its spans are those of p.
inline DilatedAttentionOptions dilated_options(const AttentionProblem& p) {
  DilatedAttentionOptions o;
  set_common(o, p);
  o.segment_lengths = p.segments;
  o.dilation_rates = p.rates;
  o.mode = p.mode;
  o.offsets = p.offsets;
  o.unite = p.unite;
  o.stop_alpha_gradient = p.stop_alpha_gradient;
  o.remainder_last = p.remainder_last;
  return o;
}
inline BlockSparseAttentionOptions block_options(const AttentionProblem& p,
                                                 const TensorView& row_ptr,
                                                 const TensorView& col_idx,
                                                 const TensorView& order) {
  BlockSparseAttentionOptions o;
  set_common(o, p);
  o.block_size = p.block_size;
  o.row_ptr = row_ptr;
  o.col_idx = col_idx;
  o.order = order;
  return o;
}

}  // namespace annulus::testing
