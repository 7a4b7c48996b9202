// The definition of attention: plain loops over explicit sets of keys, forward and backward, in the order of the header's
// equations. Nothing here is fast, and nothing is shared with pattern.h, which says the same sets as intervals: everything
// else is compared with this.
//
// It is a template over who sees whom and over the arithmetic. A Sight says
//   branches()                  parts of a query's set that are counted by themselves: LongNet's, 1 for all else
//   sees(branch, b, h, i, j)    whether the part has key j; b, i and j are rows of the tensors
//   unite()                     whether a key of several parts counts once
//   sequence(b, i)              the sequence of a query and where that begins, for dropout
// and an Arithmetic
//   Number                      what values and sums are in
//   stored(x)                   what is left of a number that the program writes in the call's dtype: P, dS, o
//   row_sum(a, b, n)            <a, b> where it is no part of a matrix product
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "annulus/attention/attention.h"
#include "annulus/attention/dropout.h"
#include "annulus/core/tensor.h"
#include "annulus/core/values.h"

namespace annulus::attention {

struct Exact {
  using Number = double;
  static double stored(double x) { return x; }
  static double row_sum(const double* a, const double* b, std::int64_t n) {
    double sum = 0;
    for (std::int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
    return sum;
  }
};

// --- who sees whom ---------------------------------------------------------------------------------------------

struct Sequence {
  std::int64_t number = 0, first_query = 0, queries = 0, first_key = 0, keys = 0;
};

// rank[token].
inline std::vector<std::int64_t> ranks_of(const TensorView& order) {
  const auto tokens = load_values<std::int64_t>(order);
  std::vector<std::int64_t> rank(tokens.size());
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    rank[static_cast<std::size_t>(tokens[r])] = static_cast<std::int64_t>(r);
  }
  return rank;
}

class DenseSight {
 public:
  // A batch of equal sequences, or packed ones where their ends are given.
  DenseSight(std::int64_t queries, std::int64_t keys, const AttentionOptions& options,
             const TensorView& cu_queries = {}, const TensorView& cu_keys = {})
      : options_(options),
        queries_(queries),
        keys_(keys),
        key_lengths_(load_values<std::int64_t>(options.key_lengths)),
        rank_(ranks_of(options.order)),
        cu_queries_(load_values<std::int64_t>(cu_queries)),
        cu_keys_(load_values<std::int64_t>(cu_keys)) {}

  int branches() const { return 1; }
  bool unite() const { return false; }
  Sequence sequence(std::int64_t b, std::int64_t i) const {
    if (cu_queries_.empty()) {
      return {b, 0, queries_, 0, key_lengths_.empty() ? keys_ : key_lengths_[at(b)]};
    }
    // The last that begins no later: those before it at the same row have no queries.
    std::size_t s = cu_queries_.size() - 2;
    while (cu_queries_[s] > i) --s;
    return {static_cast<std::int64_t>(s), cu_queries_[s], cu_queries_[s + 1] - cu_queries_[s],
            cu_keys_[s], cu_keys_[s + 1] - cu_keys_[s]};
  }
  bool sees(int, std::int64_t b, std::int64_t, std::int64_t i, std::int64_t j) const {
    const Sequence s = sequence(b, i);
    const std::int64_t key = rank(j) - s.first_key;
    if (key < 0 || key >= s.keys) return false;
    // How far the key stands behind the query, which the last of both make 0.
    const std::int64_t behind = rank(i) - s.first_query + s.keys - s.queries - key;
    if (options_.causal && behind < 0) return false;
    if (options_.window_left >= 0 && behind > options_.window_left) return false;
    return options_.window_right < 0 || -behind <= options_.window_right;
  }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  std::int64_t rank(std::int64_t row) const { return rank_.empty() ? row : rank_[at(row)]; }

  AttentionOptions options_;
  std::int64_t queries_, keys_;
  std::vector<std::int64_t> key_lengths_, rank_, cu_queries_, cu_keys_;
};

class DilatedSight {
 public:
  DilatedSight(std::int64_t tokens, std::int64_t heads, const DilatedAttentionOptions& options)
      : options_(options), tokens_(tokens), heads_(heads) {
    if (is_longnet()) return;
    // The group of every head: as many heads in each, and the remainder one each to the first or to the last.
    const auto groups = static_cast<std::int64_t>(options.segment_lengths.size());
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t from_its_end = options.remainder_last ? groups - 1 - g : g;
      const std::int64_t size = heads / groups + (from_its_end < heads % groups ? 1 : 0);
      group_.insert(group_.end(), static_cast<std::size_t>(size), static_cast<int>(g));
    }
  }

  int branches() const {
    return is_longnet() ? static_cast<int>(options_.segment_lengths.size()) : 1;
  }
  bool unite() const { return options_.unite; }
  Sequence sequence(std::int64_t b, std::int64_t) const { return {b, 0, tokens_, 0, tokens_}; }
  // What the i-th branch of a head is.
  struct Branch {
    std::int64_t length, rate, offset;
    bool has(std::int64_t t) const { return t % length % rate == offset; }
  };
  Branch branch(int i, std::int64_t h) const {
    const int at = is_longnet() ? i : group_[static_cast<std::size_t>(h)];
    const std::int64_t r = options_.dilation_rates[static_cast<std::size_t>(at)];
    return {options_.segment_lengths[static_cast<std::size_t>(at)], r,
            is_longnet() ? offset_of(h, r) : at % r};
  }
  bool sees(int number, std::int64_t, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const Branch b = branch(number, h);
    if (i / b.length != j / b.length || !b.has(j)) return false;
    if (options_.mode != DilatedMode::kGroupedKv && !b.has(i)) return false;
    return !options_.causal || j <= i;
  }

 private:
  bool is_longnet() const { return options_.mode == DilatedMode::kLongNet; }
  std::int64_t offset_of(std::int64_t h, std::int64_t r) const {
    if (options_.offsets == DilatedOffsets::kMod) return h % r;
    const std::int64_t rounded_up = heads_ % r == 0 ? heads_ : heads_ + r - heads_ % r;
    return h / (rounded_up / r);
  }

  DilatedAttentionOptions options_;  // its spans outlive the call that this is made for
  std::int64_t tokens_, heads_;
  std::vector<int> group_;
};

class BlockSight {
 public:
  BlockSight(std::int64_t queries, std::int64_t keys, const BlockSparseAttentionOptions& options)
      : options_(options),
        queries_(queries),
        keys_(keys),
        columns_((keys + options.block_size - 1) / options.block_size),
        rank_(ranks_of(options.order)) {
    const auto row_ptr = load_values<std::int64_t>(options.row_ptr);
    const auto col_idx = load_values<std::int64_t>(options.col_idx);
    rows_ = options.row_ptr.shape[1] - 1;
    lists_ = options.row_ptr.shape[0];
    there_.resize(static_cast<std::size_t>(lists_ * rows_ * columns_));
    for (std::int64_t h = 0; h < lists_; ++h) {
      for (std::int64_t x = 0; x < rows_; ++x) {
        const auto ptr = static_cast<std::size_t>(h * (rows_ + 1) + x);
        for (std::int64_t c = row_ptr[ptr]; c < row_ptr[ptr + 1]; ++c) {
          there_[block(h, x, col_idx[static_cast<std::size_t>(c)])] = true;
        }
      }
    }
  }

  int branches() const { return 1; }
  bool unite() const { return false; }
  Sequence sequence(std::int64_t b, std::int64_t) const { return {b, 0, queries_, 0, keys_}; }
  bool sees(int, std::int64_t, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t query = rank(i), key = rank(j), size = options_.block_size;
    if (options_.causal && key > query + keys_ - queries_) return false;
    return there_[block(lists_ == 1 ? 0 : h, query / size, key / size)];
  }

 private:
  std::int64_t rank(std::int64_t row) const {
    return rank_.empty() ? row : rank_[static_cast<std::size_t>(row)];
  }
  std::size_t block(std::int64_t h, std::int64_t x, std::int64_t column) const {
    return static_cast<std::size_t>((h * rows_ + x) * columns_ + column);
  }

  BlockSparseAttentionOptions options_;
  std::int64_t queries_, keys_, columns_, rows_ = 0, lists_ = 1;
  std::vector<std::int64_t> rank_;
  std::vector<bool> there_;
};

// --- the definition --------------------------------------------------------------------------------------------

template <class Arithmetic, class Sight>
class Definition {
 public:
  using C = typename Arithmetic::Number;
  using Vector = std::vector<C>;

  // Tensors of rank 4, or of rank 3 where sequences are packed: then one batch.
  Definition(const TensorView& q, const TensorView& k, const TensorView& v, const Sight& sight,
             std::optional<double> scale, double dropout, std::uint64_t seed,
             bool stop_alpha_gradient = false)
      : sight_(sight),
        stop_(stop_alpha_gradient),
        dropout_(dropout, seed),
        kept_(static_cast<C>(1 / (1 - dropout))),
        q_(load_values<C>(q)),
        k_(load_values<C>(k)),
        v_(load_values<C>(v)) {
    const auto size = [](const TensorView& t, int from_last) {
      return t.shape[static_cast<std::size_t>(t.rank - from_last)];
    };
    B_ = q.rank == 4 ? q.shape[0] : 1;
    Tq_ = size(q, 3), H_ = size(q, 2), D_ = size(q, 1);
    Tk_ = size(k, 3), Hkv_ = size(k, 2), Dv_ = size(v, 1);
    scale_ = static_cast<C>(scale.value_or(1 / std::sqrt(static_cast<double>(D_))));
  }

  // A query's o and lse, by itself.
  struct Row {
    Vector o;
    C lse = 0;
  };
  Row row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    const Weights w = weights(b, h, i);
    return {output(w, b, h, -1), w.lse};
  }

  void forward(const TensorView& o_view, const TensorView& lse_view) const {
    Vector o(at(B_ * Tq_ * H_ * Dv_)), lse(at(B_ * H_ * Tq_));
    for_each_query([&](std::int64_t b, std::int64_t h, std::int64_t i) {
      const Row r = row(b, h, i);
      std::copy(r.o.begin(), r.o.end(), o.begin() + query(b, i, h) * Dv_);
      lse[at((b * H_ + h) * Tq_ + i)] = r.lse;
    });
    store_values(o_view, o);
    store_values(lse_view, lse);
  }

  void backward(const TensorView& do_view, const TensorView& dlse_view, const TensorView& dq_view,
                const TensorView& dk_view, const TensorView& dv_view) const {
    const Vector d_o = load_values<C>(do_view), dlse = load_values<C>(dlse_view);
    Vector dq(q_.size()), dk(k_.size()), dv(v_.size());
    for_each_query([&](std::int64_t b, std::int64_t h, std::int64_t i) {
      Weights w = weights(b, h, i);
      // p again, from lse.
      const bool none = w.lse == -std::numeric_limits<C>::infinity();
      for (Key& key : w.keys) key.p = none ? 0 : std::exp(key.s - w.lse);
      const C* own_do = d_o.data() + query(b, i, h) * Dv_;
      const C own_dlse = dlse.empty() ? 0 : dlse[at((b * H_ + h) * Tq_ + i)];
      // <do, o> - dlse of the whole, or of every branch where alpha is a constant.
      Vector delta;
      for (int part = 0; part < sight_.branches(); ++part) {
        const Vector o = output(w, b, h, stop_ ? part : -1);
        delta.push_back(Arithmetic::row_sum(own_do, o.data(), Dv_) - own_dlse);
        if (!stop_) break;
      }
      C* own_dq = dq.data() + query(b, i, h) * D_;
      const C* own_q = q_.data() + query(b, i, h) * D_;
      for (const Key& key : w.keys) {
        const std::int64_t to = this->key(b, key.row, h);
        const C* v = v_.data() + to * Dv_;
        C dp = 0;
        for (std::int64_t c = 0; c < Dv_; ++c) dp += own_do[c] * v[c];
        C ds = 0;
        if (stop_) {
          for (int part = 0; part < sight_.branches(); ++part) {
            if (key.parts >> part & 1) ds += key.p * (key.z * dp - delta[at(part)]);
          }
        } else {
          ds = key.times * key.p * (key.z * dp - delta[0]);
        }
        ds = Arithmetic::stored(ds);
        const C p = Arithmetic::stored(key.z * key.times * key.p);
        for (std::int64_t c = 0; c < Dv_; ++c) dv[at(to * Dv_ + c)] += p * own_do[c];
        for (std::int64_t c = 0; c < D_; ++c) {
          own_dq[c] += ds * k_[at(to * D_ + c)];
          dk[at(to * D_ + c)] += ds * own_q[c];
        }
      }
    });
    for (C& d : dq) d *= scale_;
    for (C& d : dk) d *= scale_;
    store_values(dq_view, dq);
    store_values(dk_view, dk);
    store_values(dv_view, dv);
  }

 private:
  struct Key {
    std::int64_t row = 0;
    std::uint32_t parts = 0;  // a bit a branch that has it
    C times = 1;
    C s = 0;
    C p = 0;  // exp(s - lse)
    C z = 1;  // what dropout makes of it
  };
  struct Weights {
    std::vector<Key> keys;
    C lse = 0;
  };

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  std::int64_t query(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return (b * Tq_ + i) * H_ + h;
  }
  std::int64_t key(std::int64_t b, std::int64_t j, std::int64_t h) const {
    return (b * Tk_ + j) * Hkv_ + h / (H_ / Hkv_);
  }
  template <class F>
  void for_each_query(F&& f) const {
    for (std::int64_t b = 0; b < B_; ++b) {
      for (std::int64_t h = 0; h < H_; ++h) {
        for (std::int64_t i = 0; i < Tq_; ++i) f(b, h, i);
      }
    }
  }

  // The set of a query, and what its softmax makes of it.
  Weights weights(std::int64_t b, std::int64_t h, std::int64_t i) const {
    Weights w;
    const Sequence s = sight_.sequence(b, i);
    const std::uint64_t drawn = dropout_.row(s.number, h, i - s.first_query);
    const C* q = q_.data() + query(b, i, h) * D_;
    C high = -std::numeric_limits<C>::infinity();
    for (std::int64_t j = 0; j < Tk_; ++j) {
      Key key{.row = j};
      int count = 0;
      for (int part = 0; part < sight_.branches(); ++part) {
        if (!sight_.sees(part, b, h, i, j)) continue;
        key.parts |= 1u << part;
        ++count;
      }
      if (count == 0) continue;
      key.times = sight_.unite() ? 1 : static_cast<C>(count);
      const C* k = k_.data() + this->key(b, j, h) * D_;
      for (std::int64_t c = 0; c < D_; ++c) key.s += q[c] * k[c];
      key.s *= scale_;
      high = std::max(high, key.s);  // whatever it makes of a NaN, the sum below is one
      if (dropout_.any()) key.z = dropout_.keeps(drawn, j - s.first_key) ? kept_ : 0;
      w.keys.push_back(key);
    }
    // No key, or none with a score above -inf: no weights.
    const C origin = high == -std::numeric_limits<C>::infinity() ? 0 : high;
    C sum = 0;
    for (Key& key : w.keys) sum += key.times * (key.p = std::exp(key.s - origin));
    for (Key& key : w.keys) key.p = sum == 0 ? 0 : key.p / sum;
    w.lse = origin + std::log(sum);
    return w;
  }

  // sum z p v over the keys, or over those of one branch with weights of its own.
  Vector output(const Weights& w, std::int64_t b, std::int64_t h, int part) const {
    const bool whole = part < 0;
    C alpha = 0;
    for (const Key& key : w.keys) alpha += !whole && key.parts >> part & 1 ? key.p : 0;
    Vector o(at(Dv_));
    for (const Key& key : w.keys) {
      if (!whole && !(key.parts >> part & 1)) continue;
      const C own = whole ? key.times * key.p : alpha == 0 ? 0 : key.p / alpha;
      const C p = Arithmetic::stored(key.z * own);
      const C* v = v_.data() + this->key(b, key.row, h) * Dv_;
      for (std::int64_t c = 0; c < Dv_; ++c) o[at(c)] += p * v[c];
    }
    for (C& x : o) x = Arithmetic::stored(x);
    return o;
  }

  Sight sight_;
  bool stop_;
  Dropout dropout_;
  C kept_, scale_ = 1;
  Vector q_, k_, v_;
  std::int64_t B_ = 0, Tq_ = 0, H_ = 0, D_ = 0, Tk_ = 0, Hkv_ = 0, Dv_ = 0;
};

// f(definition) of a call's tensors and options.
template <class Arithmetic, class F>
void with_definition(const TensorView& q, const TensorView& k, const TensorView& v,
                     const AttentionOptions& o, const TensorView& cu_seqlens_q,
                     const TensorView& cu_seqlens_k, F&& f) {
  const auto rows = [](const TensorView& t) {
    return t.shape[static_cast<std::size_t>(t.rank - 3)];
  };
  const DenseSight sight(rows(q), rows(k), o, cu_seqlens_q, cu_seqlens_k);
  f(Definition<Arithmetic, DenseSight>(q, k, v, sight, o.softmax_scale, o.dropout, o.dropout_seed));
}
template <class Arithmetic, class F>
void with_definition(const TensorView& q, const TensorView& k, const TensorView& v,
                     const DilatedAttentionOptions& o, F&& f) {
  const DilatedSight sight(q.shape[1], q.shape[2], o);
  f(Definition<Arithmetic, DilatedSight>(q, k, v, sight, o.softmax_scale, o.dropout, o.dropout_seed,
                                         o.stop_alpha_gradient));
}
template <class Arithmetic, class F>
void with_definition(const TensorView& q, const TensorView& k, const TensorView& v,
                     const BlockSparseAttentionOptions& o, F&& f) {
  const BlockSight sight(q.shape[1], k.shape[1], o);
  f(Definition<Arithmetic, BlockSight>(q, k, v, sight, o.softmax_scale, o.dropout, o.dropout_seed));
}

}  // namespace annulus::attention
