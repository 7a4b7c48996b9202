// A problem of attention as a row of a benchmark: its lists and orders, its work in whole tiles, a smaller one for its error.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "annulus/attention/cpu/work.h"
#include "annulus/attention/ref.h"
#include "annulus/attention/test/cases.h"
#include "annulus/core/checked.h"
#include "bench/problem.h"
#include "bench/suite.h"

namespace annulus::bench {

using testing::AttentionProblem;
using Form = AttentionProblem::Form;

inline std::string joined(const std::vector<std::int64_t>& values) {
  return fmt::format("{}", fmt::join(values, ","));
}

// Tokens of a picture, as square as a power of two gets.
inline std::vector<std::int64_t> grid_of(std::int64_t n) {
  std::int64_t rows = 1;
  while (4 * rows * rows <= n) rows *= 2;
  return {rows, n / rows};
}

// Of as many blocks as the problem drew: the diagonal, and others at random, as many in every row to within one.
inline void spread_blocks(const AttentionProblem& p, std::vector<double>& row_ptr,
                          std::vector<double>& col_idx) {
  const std::int64_t columns = ceil_div(p.Tk, p.block_size), rows = ceil_div(p.Tq, p.block_size);
  const auto count = static_cast<std::int64_t>(col_idx.size());
  const std::int64_t lists = p.shared_list ? 1 : p.H, all = lists * rows;
  testing::Rng rng(p.seed);
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < all; ++i) {
    const std::int64_t h = i / rows, x = i % rows;
    row_ptr[static_cast<std::size_t>(h * (rows + 1) + x)] = static_cast<double>(at);
    const std::int64_t own = std::min(columns, count / all + (i < count % all ? 1 : 0));
    std::vector<bool> there(static_cast<std::size_t>(columns));
    std::int64_t column = std::min(x, columns - 1);
    for (std::int64_t n = 0; n < own; ++n) {
      while (there[static_cast<std::size_t>(column)]) column = rng.below(columns);
      there[static_cast<std::size_t>(column)] = true;
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      if (!there[static_cast<std::size_t>(c)]) continue;
      col_idx[static_cast<std::size_t>(at++)] = static_cast<double>(c);
    }
    row_ptr[static_cast<std::size_t>(h * (rows + 1) + x + 1)] = static_cast<double>(at);
  }
}

// The Case of a problem, with lists and orders that a benchmark can fill (a tensor at a time), an order being Hilbert's.
inline testing::Case bench_case(const AttentionProblem& p) {
  testing::Case c = testing::attention_case(p);
  if (p.order) c.params += " hilbert=" + joined(grid_of(p.Tq));
  const std::vector<testing::TensorSpec> specs = c.calls[0].inputs;
  const auto number_of = [specs](const std::string& name) {
    std::size_t i = 0;
    while (i < specs.size() && specs[i].name != name) ++i;
    return i;
  };
  c.refine = [=, refine = c.refine](std::vector<std::vector<double>>& inputs) {
    refine(inputs);
    if (p.order) {
      std::vector<std::int64_t> order(static_cast<std::size_t>(p.Tq));
      hilbert_order(grid_of(p.Tq), contiguous(order.data(), {p.Tq}));
      inputs[number_of("order")].assign(order.begin(), order.end());
    }
    if (p.form == Form::kBlocks) {
      spread_blocks(p, inputs[number_of("row_ptr")], inputs[number_of("col_idx")]);
    }
  };
  c.draw = [=, draw = c.draw, refine = c.refine](testing::Rng& rng, const testing::TensorSpec& spec,
                                                 std::span<double> values) {
    if (is_floating(spec.dtype)) return draw(rng, spec, values);
    std::vector<std::vector<double>> inputs(specs.size());
    refine(inputs);
    const std::vector<double>& all = inputs[number_of(spec.name)];
    std::copy_n(all.begin(), std::min(all.size(), values.size()), values.begin());
  };
  return c;
}

// What products are made of, as the header says.
inline Precision products_of(DType dtype, DeviceType device) {
  const bool cuda = device == DeviceType::kCUDA;
  if (dtype == DType::kBF16) return Precision::kBf16;
  if (dtype == DType::kF16) return cuda ? Precision::kF16 : Precision::kFp32;
  return cuda ? Precision::kBf16x3 : Precision::kFp32;
}

// --- work in whole tiles ---------------------------------------------------------------------------------------

// Pairs that the CPU's products make of the needed ones: a tile of scores has so many keys and queries.
class TiledPairs {
 public:
  explicit TiledPairs(DType dtype)
      : keys_(attention::cpu::tiles_for(dtype).rows),
        queries_(attention::cpu::tiles_for(dtype).cols) {}

  double of(const AttentionProblem& p) const {
    const auto samples = static_cast<double>(p.B);
    if (p.form == Form::kBlocks) {
      const auto size = static_cast<double>(p.block_size);
      return testing::attention_pairs(p) / (size * size) *
             static_cast<double>(round_up(p.block_size, keys_) * round_up(p.block_size, queries_));
    }
    if (p.form == Form::kDilated) return samples * dilated(p);
    return samples * static_cast<double>(p.H) * sweep(p.Tq, [&](std::int64_t i) {
             const std::int64_t at = i + p.Tk - p.Tq, right = p.causal ? 0 : p.window_right;
             return attention::Range{
                 p.window_left < 0 ? 0 : std::clamp<std::int64_t>(at - p.window_left, 0, p.Tk),
                 right < 0 ? p.Tk : std::clamp<std::int64_t>(at + right + 1, 0, p.Tk)};
           });
  }

 private:
  // seen(i): the keys, by their number in the line, of the i-th query of it.
  template <class F>
  double sweep(std::int64_t queries, F&& seen) const {
    double pairs = 0;
    for (std::int64_t i = 0; i < queries; i += queries_) {
      const std::int64_t last = std::min(i + queries_, queries) - 1;
      const std::int64_t first = seen(i).first, end = seen(last).end;
      if (end > first) pairs += static_cast<double>(queries_ * round_up(end - first, keys_));
    }
    return pairs;
  }
  double segment(const AttentionProblem& p, const attention::DilatedSight::Branch& b,
                 std::int64_t tokens) const {
    const std::int64_t keys = b.offset < tokens ? (tokens - b.offset - 1) / b.rate + 1 : 0;
    if (keys == 0) return 0;
    const bool all = p.mode == DilatedMode::kGroupedKv;
    return sweep(all ? tokens : keys, [&](std::int64_t i) {
      if (!p.causal) return attention::Range{0, keys};
      return attention::Range{0, !all ? i + 1 : i < b.offset ? 0 : (i - b.offset) / b.rate + 1};
    });
  }
  double dilated(const AttentionProblem& p) const {
    DilatedAttentionOptions o;
    o.segment_lengths = p.segments;
    o.dilation_rates = p.rates;
    o.mode = p.mode;
    o.offsets = p.offsets;
    o.remainder_last = p.remainder_last;
    const attention::DilatedSight sight(p.Tq, p.H, o);
    double pairs = 0;
    for (std::int64_t h = 0; h < p.H; ++h) {
      for (int i = 0; i < sight.branches(); ++i) {
        const auto b = sight.branch(i, h);
        pairs += static_cast<double>(p.Tq / b.length) * segment(p, b, b.length) +
                 segment(p, b, p.Tq % b.length);
      }
    }
    return pairs;
  }

  std::int64_t keys_, queries_;
};

// --- problems --------------------------------------------------------------------------------------------------

// H 8, D 64: the originals' heads.
inline AttentionProblem dense(std::int64_t n, DType dtype, bool causal = false) {
  AttentionProblem p;
  p.H = p.Hkv = 8;
  p.D = 64;
  p.Tq = n;
  p.dtype = dtype;
  p.causal = causal;
  p.lse = false;
  return p;
}
inline AttentionProblem dilated(std::int64_t n, DType dtype, DilatedMode mode,
                                std::vector<std::int64_t> segments,
                                std::vector<std::int64_t> rates) {
  AttentionProblem p = dense(n, dtype);
  p.form = Form::kDilated;
  p.mode = mode;
  p.segments = std::move(segments);
  p.rates = std::move(rates);
  return p;
}
inline AttentionProblem blocks(std::int64_t n, DType dtype, double density,
                               std::int64_t size = 64) {
  AttentionProblem p = dense(n, dtype);
  p.form = Form::kBlocks;
  p.density = density;
  p.block_size = size;
  return p;
}

inline std::vector<DType> dtypes_of(const SuiteRequest& request) {
  if (request.device == DeviceType::kCPU && request.size != Size::kFull) {
    return {DType::kF32, DType::kBF16};
  }
  return {DType::kF16, DType::kBF16};  // the originals' is f16
}
inline bool is_16_bits(DType t) { return size_of(t) == 2; }

// --- rows ------------------------------------------------------------------------------------------------------

// The same kind of problem for the fp64 reference in about half a second: fewer heads where all are alike, then half as many
// tokens, and segments with them, until it is small. Rates and columns stay.
inline AttentionProblem error_problem(AttentionProblem p, bool backward) {
  p.B = 1;
  if (p.form != Form::kDilated) {
    p.Hkv = p.Hkv < p.H ? 1 : 2;
    p.H = 2;
  }
  const auto work = [&] {  // of finding the pairs, and of computing them
    return 0.5 * static_cast<double>(p.H * p.Tq * p.Tk) + 2 * testing::attention_pairs(p);
  };
  // A list of blocks has to have some left in every row.
  const std::int64_t least = p.form == Form::kBlocks ? 1024 : 256;
  while (work() > (backward ? 2.5e6 : 6e6) && p.Tq > least) {
    p.Tq /= 2, p.Tk /= 2;
    for (std::int64_t& w : p.segments) w = std::max<std::int64_t>(1, w / 2);
    if (p.window_left > 0) p.window_left /= 2;
    if (p.window_right > 0) p.window_right /= 2;
  }
  return p;
}

inline const char* kind_of(const AttentionProblem& p) {
  if (p.form == Form::kBlocks) return "blocks";
  if (p.form != Form::kDilated) return "dense";
  return p.mode == DilatedMode::kLongNet   ? "longnet"
         : p.mode == DilatedMode::kGrouped ? "grouped"
                                           : "grouped-kv";
}

inline AttentionProblem completed(AttentionProblem p, bool backward) {
  p.Tk = p.Tq;
  p.Dv = p.D;
  p.lse = p.lse || backward;
  p.seed = 1;
  return p;
}

// Forward without lse, as one infers; or forward and backward with all gradients.
inline Row attention_row(std::string name, AttentionProblem p, bool backward, DeviceType device) {
  p = completed(std::move(p), backward);
  Row row;
  row.name = std::move(name);
  row.op = p.form == Form::kDilated  ? "dilated_attention"
           : p.form == Form::kBlocks ? "block_sparse_attention"
                                     : "attention";
  row.dtype = p.dtype;
  row.params = {{"B", p.B},
                {"H", p.H},
                {"Hkv", p.Hkv},
                {"D", p.D},
                {"tokens", p.Tq},
                {"causal", p.causal},
                {"kind", std::string(kind_of(p))},
                {"direction", std::string(backward ? "fwdbwd" : "fwd")}};
  if (p.form == Form::kDilated) {
    row.params["segment_lengths"] = p.segments;
    row.params["dilation_rates"] = p.rates;
  }
  if (p.form == Form::kBlocks) {
    row.params["block_size"] = p.block_size;
    row.params["density"] = p.density;
  }
  if (p.window_left >= 0) row.params["window"] = std::vector{p.window_left, p.window_right};
  if (p.order) row.params["grid"] = grid_of(p.Tq);
  row.problem = [p] { return bench_case(p); };
  const AttentionProblem small = error_problem(p, backward);
  row.error_problem = [small] { return bench_case(small); };
  row.calls = {"forward"};
  if (backward) row.calls.push_back("backward");
  row.same_expected = bench_case(small).params;
  const testing::Case c = row.problem();
  const PrecisionFacts& facts = facts_of(products_of(p.dtype, device));
  row.work = {.products = facts.unit, .passes = static_cast<double>(facts.products)};
  if (device == DeviceType::kCPU) {
    double flops = 0;
    for (const std::string& call : row.calls) flops += find_call(c, call).flops;
    row.flops_executed = flops * TiledPairs(p.dtype).of(p) / testing::attention_pairs(p);
  }
  row.with_move = false;  // bound by arithmetic: moving the bytes says nothing
  return row;
}

// Of size `machine`: what fits, and on a CPU what takes no longer than a few seconds a call.
inline std::vector<Row> fitting(std::vector<Row> rows, const SuiteRequest& request) {
  if (request.size != Size::kMachine) return rows;
  std::erase_if(rows, [&](const Row& row) {
    if (!row.error_problem) return false;  // to be skipped
    const testing::Case problem = row.problem();
    double flops = 0;
    for (const std::string& call : row.calls) flops += find_call(problem, call).flops;
    if (request.device == DeviceType::kCPU && flops > 3e11) return true;
    return peak_bytes_of(problem, row.calls, {request.device, 0}) > request.memory_bytes;
  });
  return rows;
}

}  // namespace annulus::bench
