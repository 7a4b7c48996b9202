// What of an attention problem there is to do: pairs of a query and a key, and how many have none.
#include <algorithm>
#include <numeric>
#include <string_view>

#include "annulus/attention/ref.h"
#include "annulus/attention/test/parts.h"

namespace annulus::testing {

using Form = AttentionProblem::Form;

namespace {

// f(sight) of a problem that has no tensors yet.
template <class F>
void with_sight(const AttentionProblem& p, F&& f) {
  std::vector<NamedIntegers> integers = integers_of(p);
  const auto view = [&](std::string_view name) {
    for (NamedIntegers& i : integers) {
      if (i.name == name) return contiguous(i.values.data(), DType::kI64, i.shape);
    }
    return TensorView{};
  };
  if (p.form == Form::kDilated) return f(attention::DilatedSight(p.Tq, p.H, dilated_options(p)));
  if (p.form == Form::kBlocks) {
    return f(attention::BlockSight(
        p.Tq, p.Tk, block_options(p, view("row_ptr"), view("col_idx"), view("order"))));
  }
  f(attention::DenseSight(p.Tq, p.Tk, dense_options(p, view("order"), view("key_lengths")),
                          view("cu_seqlens_q"), view("cu_seqlens_k")));
}

// Pairs of one sequence of this many queries and keys, of one head.
double band_pairs(const AttentionProblem& p, std::int64_t queries, std::int64_t keys) {
  double pairs = 0;
  for (std::int64_t i = 0; i < queries; ++i) {
    const std::int64_t at = i + keys - queries;
    const std::int64_t right = p.causal ? 0 : p.window_right;
    const std::int64_t first =
        p.window_left < 0 || p.window_left > at ? 0 : std::max<std::int64_t>(0, at - p.window_left);
    const std::int64_t last =
        right < 0 || right > keys - at ? keys - 1 : std::min(keys - 1, at + right);
    pairs += static_cast<double>(std::max<std::int64_t>(0, last - first + 1));
  }
  return pairs;
}

double block_pairs(const AttentionProblem& p) {
  const std::vector<NamedIntegers> lists = integers_of(p);
  const std::vector<std::int64_t>&row_ptr = lists[0].values, &col_idx = lists[1].values;
  const std::int64_t rows = lists[0].shape[1] - 1, size = p.block_size;
  double pairs = 0;
  for (std::int64_t list = 0; list < lists[0].shape[0]; ++list) {
    for (std::int64_t x = 0; x < rows; ++x) {
      const auto ptr = static_cast<std::size_t>(list * (rows + 1) + x);
      for (std::int64_t c = row_ptr[ptr]; c < row_ptr[ptr + 1]; ++c) {
        const std::int64_t first = col_idx[static_cast<std::size_t>(c)] * size;
        const std::int64_t end = std::min(first + size, p.Tk);
        for (std::int64_t i = x * size; i < std::min((x + 1) * size, p.Tq); ++i) {
          const std::int64_t seen = p.causal ? std::min(end, i + p.Tk - p.Tq + 1) : end;
          pairs += static_cast<double>(std::max<std::int64_t>(0, seen - first));
        }
      }
    }
  }
  return pairs * static_cast<double>(p.shared_list ? p.H : 1);
}

// Of a segment of so many tokens.
double segment_pairs(const AttentionProblem& p, const attention::DilatedSight::Branch& b,
                     std::int64_t tokens) {
  const double keys =
      b.offset < tokens ? static_cast<double>((tokens - b.offset - 1) / b.rate + 1) : 0.0;
  if (p.mode != DilatedMode::kGroupedKv) return p.causal ? keys * (keys + 1) / 2 : keys * keys;
  if (!p.causal) return keys * static_cast<double>(tokens);
  // A key is seen from itself to the end.
  return keys * static_cast<double>(tokens - b.offset) -
         static_cast<double>(b.rate) * keys * (keys - 1) / 2;
}

double dilated_pairs(const AttentionProblem& p) {
  const attention::DilatedSight sight(p.Tq, p.H, dilated_options(p));
  double pairs = 0;
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (int i = 0; i < sight.branches(); ++i) {
      const auto branch = sight.branch(i, h);
      const std::int64_t w = branch.length;
      pairs += static_cast<double>(p.Tq / w) * segment_pairs(p, branch, w) +
               segment_pairs(p, branch, p.Tq % w);
    }
  }
  return pairs;
}

// A union has no closed form: counted, at so many queries that it takes no second.
double united_pairs(const AttentionProblem& p) {
  const attention::DilatedSight sight(p.Tq, p.H, dilated_options(p));
  const double work = static_cast<double>(p.Tq) * static_cast<double>(p.Tq) *
                      static_cast<double>(p.H * sight.branches());
  const auto step = std::max<std::int64_t>(1, static_cast<std::int64_t>(work / 3e7));
  std::int64_t pairs = 0, counted = 0;
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t i = h % step; i < p.Tq; i += step, ++counted) {
      for (std::int64_t j = 0; j < p.Tq; ++j) {
        bool seen = false;
        for (int part = 0; part < sight.branches() && !seen; ++part) {
          seen = sight.sees(part, 0, h, i, j);
        }
        pairs += seen;
      }
    }
  }
  if (counted == 0) return 0;
  return static_cast<double>(pairs) * static_cast<double>(p.H * p.Tq) /
         static_cast<double>(counted);
}

}  // namespace

double attention_pairs(const AttentionProblem& p) {
  const auto heads = static_cast<double>(p.H), batch = static_cast<double>(p.B);
  double pairs = 0;
  switch (p.form) {
    case Form::kDense:
      if (p.key_lengths.empty()) return batch * heads * band_pairs(p, p.Tq, p.Tk);
      for (const std::int64_t keys : p.key_lengths) pairs += heads * band_pairs(p, p.Tq, keys);
      return pairs;
    case Form::kVarlen:
      for (std::size_t s = 0; s < p.query_lengths.size(); ++s) {
        pairs += heads * band_pairs(p, p.query_lengths[s], p.packed_key_lengths[s]);
      }
      return pairs;
    case Form::kDilated:
      return batch * (p.unite ? united_pairs(p) : dilated_pairs(p));
    case Form::kBlocks:
      return batch * block_pairs(p);
  }
  return 0;
}

AttentionCensus attention_census(const AttentionProblem& p) {
  AttentionCensus census;
  if (p.H == 0) return census;
  const std::int64_t B = p.form == Form::kVarlen ? 1 : p.B;
  std::vector<bool> seen(static_cast<std::size_t>(B * p.Hkv * p.Tk));
  with_sight(p, [&](const auto& sight) {
    for (std::int64_t b = 0; b < B; ++b) {
      for (std::int64_t h = 0; h < p.H; ++h) {
        const std::int64_t first = (b * p.Hkv + h / (p.H / p.Hkv)) * p.Tk;
        for (std::int64_t i = 0; i < p.Tq; ++i) {
          std::int64_t distinct = 0;
          for (std::int64_t j = 0; j < p.Tk; ++j) {
            int times = 0;
            for (int part = 0; part < sight.branches(); ++part) {
              times += sight.sees(part, b, h, i, j);
            }
            if (times == 0) continue;
            ++distinct;
            census.pairs += sight.unite() ? 1 : times;
            seen[static_cast<std::size_t>(first + j)] = true;
          }
          ++census.queries;
          census.empty_queries += distinct == 0;
          census.single_queries += distinct == 1;
        }
      }
    }
  });
  census.keys = static_cast<std::int64_t>(seen.size());
  census.unseen_keys = std::count(seen.begin(), seen.end(), false);
  return census;
}

}  // namespace annulus::testing
