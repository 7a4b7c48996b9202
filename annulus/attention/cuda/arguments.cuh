// What the kernels of attention get: the tensors of a Plan, its pattern as a type that is known at run time (a block
// of threads asks it once for its sweep, so that costs nothing and there are a third as many kernels), and the
// numbering of the blocks of threads.
#pragma once

#include <cstdint>

#include "annulus/attention/plan.h"
#include "annulus/attention/state.h"

namespace annulus::attention::cuda {

// A tensor (batch, rows, heads, columns); of a (batch, heads, rows) one the columns are none.
struct Operand {
  void* data = nullptr;
  std::int64_t batch = 0, row = 0, head = 0, column = 1;
  // Rows are dense, begin on 16-byte boundaries, and have a multiple of 8 columns.
  bool whole = false;

  template <class T>
  ANNULUS_HD T* at(std::int64_t b, std::int64_t h) const {
    return static_cast<T*>(data) + b * batch + h * head;
  }
};

enum class Kind : std::uint8_t { kDense, kDilated, kBlocks };

// Tile `tile` of a sweep, and the sweep.
struct Place {
  std::int64_t sweep = 0, tile = 0;
};

ANNULUS_HD inline std::int64_t tiles_of(std::int64_t rows, std::int64_t tile) {
  return (rows + tile - 1) / tile;
}

// The rows of a pattern that a part of a call has: see Part.
struct Window {
  bool any = false;  // not: all of them
  std::int64_t first_query = 0, queries = 0, first_key = 0, keys = 0;

  ANNULUS_HD std::int64_t first(bool of_queries) const {
    return of_queries ? first_query : first_key;
  }
  ANNULUS_HD std::int64_t rows(bool of_queries) const { return of_queries ? queries : keys; }
  ANNULUS_HD std::int64_t end(bool of_queries) const {
    return first(of_queries) + rows(of_queries);
  }
  // What it shows of a sweep, whose rows are then those of the part's tensors.
  ANNULUS_HD void cut(Sweep& s) const {
    if (!any) return;
    s.queries = s.queries.cut(first_query, first_query + queries);
    s.keys = s.keys.cut(first_key, first_key + keys);
    s.queries.first -= first_query;
    s.keys.first -= first_key;
    s.band.lowest += first_query - first_key;
    s.band.highest += first_query - first_key;
    s.first_query -= first_query;
    s.first_key -= first_key;
    s.blocks.first_row = first_key;
  }
};

struct AnyPattern {
  Kind kind = Kind::kDense;
  Dense dense;
  Dilated dilated;
  Blocks blocks;
  Window window;
  // Where all heads of all samples have one sweep and the same, the host makes it: a block of threads that has to begins
  // microseconds later.
  bool has_one = false;
  Sweep one;

  void finish() {
    has_one = kind == Kind::kDense && !dense.cu_queries.defined() && !dense.key_lengths.defined();
    if (!has_one) return;
    one = dense.sweep(0, 0, 0);
    window.cut(one);
  }

  // `layer`: LongNet's branch, which a block of threads finds in its number; of everything else there is one.
  ANNULUS_HD Sweep sweep(int layer, std::int64_t b, std::int64_t h, std::int64_t i) const {
    if (has_one) {
      Sweep s = one;
      s.sample = b;
      return s;
    }
    Sweep s = kind == Kind::kDense     ? dense.sweep(b, h, i)
              : kind == Kind::kDilated ? dilated.sweep_of(branch_of(layer, h), b, h, i)
                                       : blocks.sweep(b, h, i);
    window.cut(s);
    return s;
  }
  // Are there keys in a row's interval that do not count?
  ANNULUS_HD bool has_holes() const { return kind == Kind::kDilated && dilated.unite; }
  ANNULUS_HD bool counts(int layer, std::int64_t h, std::int64_t query, std::int64_t key) const {
    return dilated.counts_in(layer, h, query + window.first_query, key + window.first_key);
  }

  // Do rows differ in how many keys they see, from few to all?
  ANNULUS_HD bool is_causal() const {
    return kind == Kind::kDense     ? dense.right < kFar && dense.left == kFar
           : kind == Kind::kDilated ? dilated.causal
                                    : blocks.causal;
  }

  // Of tiles of that many queries and keys: are all of them whole, and does every query of a tile see all keys of it?
  bool has_only_whole_tiles(int size) const {
    if (kind == Kind::kDense) {
      return !dense.cu_queries.defined() && !dense.key_lengths.defined() && dense.left == kFar &&
             dense.right == kFar && dense_rows(true) % size == 0 && dense_rows(false) % size == 0;
    }
    if (window.any) return false;
    if (kind == Kind::kBlocks) {
      return !blocks.causal && blocks.size % size == 0 && blocks.queries % blocks.size == 0 &&
             blocks.keys % blocks.size == 0;
    }
    bool whole = !dilated.causal && !dilated.unite;
    for (int i = 0; i < dilated.branches; ++i) {
      whole = whole && dilated.tokens % dilated.length[i] == 0 &&
              dilated.length[i] % (size * dilated.rate[i]) == 0;
    }
    return whole;
  }

  // ---- Tiles of the queries (or keys) of a head in a layer, numbered from 0 to slots() - 1. Some numbers may be of no
  // tile.

  // Packed sequences: the tiles of sequence i have the numbers from first / size + i on, first being its first row,
  // which leaves room for all of them and needs no sums over sequences.
  ANNULUS_HD std::int64_t slots(int layer, bool of_queries, int size) const {
    if (kind == Kind::kDense) {
      const std::int64_t rows = dense_rows(of_queries);
      return dense.cu_queries.defined() ? rows / size + dense.sequences : tiles_of(rows, size);
    }
    if (kind == Kind::kBlocks) {
      return cells(blocks.size, of_queries ? blocks.queries : blocks.keys, of_queries).count() *
             tiles_of(blocks.size, size);
    }
    const Dilated& p = dilated;
    std::int64_t most = 0;
    for (int i = 0; i < p.branches; ++i) {
      if (p.mode == DilatedMode::kLongNet && i != layer) continue;
      const std::int64_t n = cells(p.length[i], p.tokens, of_queries).count() *
                             lines(i, of_queries) * tiles_of(longest(i, of_queries), size);
      if (n > most) most = n;
    }
    return most;
  }
  ANNULUS_HD Place place(int layer, std::int64_t h, std::int64_t slot, bool of_queries,
                         int size) const {
    if (has_one) return {0, slot};
    if (kind == Kind::kDense) {
      if (!dense.cu_queries.defined()) return {0, slot};
      const Integers& ends = of_queries ? dense.cu_queries : dense.cu_keys;
      const std::int64_t rows = dense_rows(of_queries);
      std::int64_t low = 0, high = dense.sequences;  // the last whose number is not above the slot
      while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        if (ends.at(middle, rows) / size + middle <= slot) {
          low = middle;
        } else {
          high = middle;
        }
      }
      return {low, slot - ends.at(low, rows) / size - low};
    }
    if (kind == Kind::kBlocks) {
      // Of keys the "sweep" is the column of blocks.
      const std::int64_t tiles = tiles_of(blocks.size, size);
      return {first_cell(blocks.size, of_queries) + slot / tiles, slot % tiles};
    }
    const Dilated& p = dilated;
    const int i = branch_of(layer, h);
    const std::int64_t tiles = tiles_of(longest(i, of_queries), size), own = lines(i, of_queries);
    const std::int64_t line = slot / tiles, all = p.residues();
    // Of keys, one residue has them.
    const std::int64_t residue = of_queries ? line % own : all > 1 ? p.offset_of(i, h) : 0;
    return {(first_cell(p.length[i], of_queries) + line / own) * all + residue, slot % tiles};
  }
  // Rows of the longest sweep; of packed sequences, that of one of mean length.
  ANNULUS_HD std::int64_t longest_sweep(int layer, bool of_queries) const {
    if (kind == Kind::kDense) {
      const std::int64_t rows = dense_rows(of_queries);
      return dense.sequences > 1 ? tiles_of(rows, dense.sequences) : rows;
    }
    if (kind == Kind::kBlocks) return blocks.size;
    std::int64_t most = 0;
    for (int i = 0; i < dilated.branches; ++i) {
      if (dilated.mode == DilatedMode::kLongNet && i != layer) continue;
      if (longest(i, of_queries) > most) most = longest(i, of_queries);
    }
    return most;
  }

 private:
  ANNULUS_HD int branch_of(int layer, std::int64_t h) const {
    return dilated.mode == DilatedMode::kLongNet ? layer : dilated.group_of(h);
  }
  ANNULUS_HD std::int64_t dense_rows(bool of_queries) const {
    if (window.any) return window.rows(of_queries);
    return of_queries ? dense.queries : dense.keys;
  }
  // Of `rows` in cells (segments, or blocks of a list) of so many, those that the part has rows of.
  ANNULUS_HD std::int64_t first_cell(std::int64_t size, bool of_queries) const {
    return window.any ? window.first(of_queries) / size : 0;
  }
  ANNULUS_HD Range cells(std::int64_t size, std::int64_t rows, bool of_queries) const {
    return {first_cell(size, of_queries),
            tiles_of(window.any ? window.end(of_queries) : rows, size)};
  }
  // Sweeps of a segment that have queries (keys), and the rows of the longest.
  ANNULUS_HD std::int64_t lines(int i, bool of_queries) const {
    if (!of_queries || dilated.residues() == 1) return 1;
    return dilated.rate[i] < dilated.length[i] ? dilated.rate[i] : dilated.length[i];
  }
  ANNULUS_HD std::int64_t longest(int i, bool of_queries) const {
    std::int64_t w = dilated.length[i];
    if (window.any && window.rows(of_queries) < w) w = window.rows(of_queries);
    if (of_queries && dilated.mode == DilatedMode::kGroupedKv) return w;
    return tiles_of(w, dilated.rate[i]);
  }
};

// Several layers (LongNet's branches) run in one launch, and each writes what it has to rows of its own in fp32, which
// another pass adds or merges in the order of the layers: nobody waits for anybody, nothing is cleared first, and the result
// is always the same. A head has the rows of layer 0, then those of layer 1 and so on; those of a layer segment by segment,
// with room for a whole one each. A row is a multiple of 16 bytes.
struct LayerRows {
  std::int64_t first[Dilated::kMost] = {}, count = 0;

  LayerRows() = default;
  LayerRows(const Dilated& p, int layers) {
    for (int i = 0; i < layers; ++i) {
      first[i] = count;
      count += tiles_of(p.tokens, p.length[i]) * tiles_of(p.length[i], p.rate[i]);
    }
  }
  // The row of a segment's first token, and of any; negative: the token is not of the layer.
  ANNULUS_HD std::int64_t segment(const Dilated& p, int layer, std::int64_t i) const {
    return first[layer] + i * tiles_of(p.length[layer], p.rate[layer]);
  }
  ANNULUS_HD std::int64_t token(const Dilated& p, int layer, std::int64_t h, std::int64_t t) const {
    const std::int64_t w = p.length[layer], r = p.rate[layer];
    const std::int64_t i = t / w, within = t - i * w, at = within / r;
    return within - at * r == p.offset_of(layer, h) ? segment(p, layer, i) + at : -1;
  }
  ANNULUS_HD static std::int64_t pitch(std::int64_t columns) { return (columns + 3) / 4 * 4; }
};

// What every kernel reads.
struct Problem {
  AnyPattern pattern;
  int layers = 1;
  // The layers, those whose tiles take longest first: short ones fill what they leave of the device.
  std::uint8_t order_of_layers[Dilated::kMost] = {};
  LayerRows rows;  // of several layers
  std::int64_t B = 0, H = 0, Hkv = 0, group = 1, Tq = 0, Tk = 0;
  int D = 0, Dv = 0;
  Operand q, k, v, lse;
  Integers order;
  Dropout dropout;
  float scale = 1;
  // Exponents are (s score_scale) exponent_scale. The latter is positive, as the largest score is looked for before it;
  // where the scale is not, the former is it, and scores are multiplied first.
  bool scale_first = false;
  // Tiles lie at multiples of their size, counted from the first row of the part, and are of one size for all calls.
  bool fixed = false;
  float score_scale = 1, exponent_scale = 1;
  std::int64_t slots[Dilated::kMost] = {};  // of a head in a layer, in this launch

  // Before a launch: how many blocks of threads it has.
  std::int64_t number_blocks(std::int64_t heads, bool of_queries, int size) {
    std::int64_t all = 0;
    for (int i = 0; i < layers; ++i) {
      const int layer = order_of_layers[i];
      slots[layer] = pattern.slots(layer, of_queries, size);
      all += slots[layer];
    }
    return B * heads * all;
  }
  std::int64_t longest_sweep(bool of_queries) const {
    return pattern.longest_sweep(order_of_layers[0], of_queries);
  }
  // Of a sweep's first row, among those of all layers of all heads (`heads` of them).
  ANNULUS_HD std::int64_t layer_row(int layer, std::int64_t b, std::int64_t h, std::int64_t heads,
                                    std::int64_t sweep) const {
    return (b * heads + h) * rows.count + rows.segment(pattern.dilated, layer, sweep);
  }
  // Of a query's state, where keys are divided into parts.
  ANNULUS_HD std::int64_t part_row(std::int64_t part, std::int64_t b, std::int64_t h,
                                   std::int64_t t) const {
    return ((part * B + b) * H + h) * Tq + t;
  }
  // Of a query's row, or a key's: with an order there are as many of both.
  ANNULUS_HD std::int64_t token(std::int64_t row) const {
    return order.defined() ? order.at(row, Tq - 1) : row;
  }
};

// Softmax states of the rows of layers: acc, m in units of log 2, and l.
struct States {
  float *acc = nullptr, *m = nullptr, *l = nullptr;
};

struct ForwardArgs {
  Problem p;
  Operand o;
  States states;  // defined: written, and o and lse are not
  // States are those of (B, H, Tq), of the keys so far, to which these are added; where l is 0 there were none.
  bool carries = false;
  // So many blocks of threads divide the keys of a tile of queries, where tiles are few: each has states of its own, which
  // another pass merges in their order.
  int parts = 1;
};

// (B, H, Tq), heads `rows` apart, or of the rows of layers.
struct Deltas {
  const float* data = nullptr;
  bool of_layers = false;
  std::int64_t rows = 0;
};

// Where a gradient goes: to the rows of layers, added to sums of (B, rows, heads, columns), or to the tensor; the first
// that is defined.
struct Gradient {
  float *layers = nullptr, *sum = nullptr;
  Operand tensor;
};

struct QueryGradientArgs {
  Problem p;
  Operand do_;
  Gradient dq;
  Deltas delta;
};

struct KeyGradientArgs {
  Problem p;
  Operand do_;
  Gradient dk, dv;
  Deltas delta;
  // Of the heads that share a key, those from first_head on.
  int first_head = 0, heads = 1;
};

// All gradients at once. dq is added to with atomics: to the rows of layers, or to sums of (B, Tq, H, D), whose rows are a
// multiple of 16 bytes as well; all zero before.
struct GradientArgs : KeyGradientArgs {
  Gradient dq;
  // Whether q, k or do have numbers that are not finite, as the device knows: then the kernels of any GPU run, which keep
  // them from rows that do not see them, and those of Hopper do not; otherwise the other way round. Null: it does not matter.
  const int* not_finite = nullptr;
};

// The block of threads: (layer, b, h, slot), the last slots first: where causal, they have the most keys. Of kTogether heads
// all last ones come first, so that the device has only short ones left at its end, while what heads read stays near; where
// all are alike a head comes after the other.
struct BlockPlace {
  static constexpr std::int64_t kTogether = 8;
  int layer = 0;
  std::int64_t b, h, slot, slots;

  ANNULUS_HD BlockPlace(const Problem& p, std::int64_t block, std::int64_t heads) {
    const std::int64_t all = p.B * heads;
    for (int i = 0; i < p.layers; ++i) {
      layer = p.order_of_layers[i];
      const std::int64_t blocks = all * p.slots[layer];
      if (block < blocks) break;
      block -= blocks;
    }
    slots = p.slots[layer];
    // (Divisions are what takes time here.)
    std::int64_t head = block / slots;
    if (!p.pattern.is_causal()) {
      slot = slots - 1 - (block - head * slots);
    } else {
      const std::int64_t first = head / kTogether * kTogether;
      const std::int64_t width = all - first < kTogether ? all - first : kTogether;
      block -= first * slots;
      const std::int64_t row = width == kTogether ? block / kTogether : block / width;
      slot = slots - 1 - row;
      head = first + block - row * width;
    }
    b = p.B == 1 ? 0 : head / heads;
    h = head - b * heads;
  }
};

}  // namespace annulus::attention::cuda
