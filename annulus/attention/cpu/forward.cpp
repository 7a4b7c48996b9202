// A work item is a chunk of a sweep's queries of one head. It goes through the sweep's keys a tile at a
// time: they are packed once for the chunk, and each tile of queries multiplies (turned: keys are rows), weighs and
// multiplies again. With several layers the softmax state of every row waits in scratch between them.

#include "annulus/attention/cpu/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "annulus/cpu/rows.h"

namespace annulus::attention::cpu {

Forward::Forward(const Plan& p)
    : plan_(p),
      tiles_(tiles_for(p.dtype)),
      keys_(forward_keys(tiles_)),
      chunk_(chunk_of(p, kForwardItems, kForwardMost)),
      value_rows_(round_up(p.Dv, tiles_.rows)),
      slots_(static_cast<std::size_t>(slots_for(p.B * p.H * ceil_div(p.Tq, chunk_)))) {}

void Forward::lay_out(ScratchLayout& scratch) {
  if (empty()) return;
  const std::int64_t lanes = tiles_.cols;
  const std::int64_t drops = plan_.dropout.any() ? keys_ * lanes : 0;
  for (Slot& s : slots_) {
    scratch(s.queries, Panels::bytes(tiles_, Side::kRight, chunk_, plan_.D));
    scratch(s.keys, Panels::bytes(tiles_, Side::kLeft, keys_, plan_.D));
    scratch(s.values, Panels::bytes(tiles_, Side::kLeft, plan_.Dv, keys_));
    scratch(s.weights, tiles_.panel_bytes(Side::kRight, keys_));
    scratch(s.stage, std::max(chunk_, keys_) * std::max(plan_.D, plan_.Dv) * size_of(plan_.dtype));
    scratch(s.scores, (keys_ + annulus::cpu::kMaxTileRows) * lanes);
    scratch(s.acc, chunk_ * value_rows_);
    scratch(s.m, chunk_);
    scratch(s.l, chunk_);
    scratch(s.norm, chunk_);
    scratch(s.factor, lanes);
    scratch(s.row, plan_.Dv * lanes);
    scratch(s.lo, lanes);
    scratch(s.hi, lanes);
    scratch(s.z, drops);
    scratch(s.keep, unites(plan_) ? keys_ * lanes : 0);
  }
  if (plan_.layers > 1 && !plan_.part) {
    scratch(state_, plan_.B * plan_.H * plan_.Tq);
    scratch(acc_, plan_.B * plan_.H * plan_.Tq * plan_.Dv);
  }
}

void Forward::close(std::int64_t b, std::int64_t h, std::int64_t token, RowState s,
                    const float* sums, float* row) const {
  const float factor = reciprocal_of(s);
  for (std::int64_t d = 0; d < plan_.Dv; ++d) row[d] = s.l == 0 ? 0.0f : sums[d] * factor;
  annulus::cpu::rows<float>().store(row, plan_.Dv, annulus::cpu::row_at(plan_.o, b, token, h));
  if (plan_.lse.defined()) {
    const TensorView& v = plan_.lse;
    const double lse = s.l == 0 ? kNoScore : s.m * std::numbers::ln2 + std::log(double{s.l});
    static_cast<float*>(v.data)[b * v.stride[0] + h * v.stride[1] + token * v.stride[2]] =
        static_cast<float>(lse);
  }
}

template <class P>
void Forward::chunk(const P& pattern, std::int64_t b, std::int64_t h, const Sweep& sweep,
                    Range queries, const Slot& s) const {
  const Range seen_keys = sweep.seen_by_any(queries);
  if (plan_.part && seen_keys.empty()) return;  // rows stay as they are
  const Softmax& vector = softmax();
  const int lanes = tiles_.cols;
  const std::int64_t count = queries.end - queries.first;
  const std::int64_t hk = h / plan_.heads_per_key();
  const HeadRows q(plan_.q, b, h, plan_.order, first_query(plan_)),
      k(plan_.k, b, hk, plan_.order, first_key(plan_)),
      v(plan_.v, b, hk, plan_.order, first_key(plan_));
  Panels query_panels(tiles_, Side::kRight, s.queries), key_panels(tiles_, Side::kLeft, s.keys),
      value_panels(tiles_, Side::kLeft, s.values);
  const bool chained = chains(tiles_), panels = writes_panels(tiles_);
  // A log-sum-exp is of fp32 and has to be exact; o is of bf16.
  const bool coarse = plan_.dtype == DType::kBF16 && !plan_.lse.defined();
  const auto scale = static_cast<float>(plan_.scale);

  // acc of a tile of queries is turned, too: [value column][lane].
  const std::int64_t tile_floats = value_rows_ * lanes;
  const auto token_of = [&](std::int64_t i) {
    return q.token(sweep.queries.at(queries.first + i));
  };
  for (std::int64_t at = 0; at < count; at += lanes) {
    float* const sums = s.acc + at / lanes * tile_floats;
    std::fill_n(sums, tile_floats, 0.0f);
    const std::int64_t valid = std::min<std::int64_t>(lanes, count - at);
    for (std::int64_t i = 0; i < lanes; ++i) {
      const bool carried = carries() && i < valid;
      const std::int64_t row = carried ? state_row(b, h, token_of(at + i)) : 0;
      const RowState r = carried ? state_[row] : RowState{};
      s.m[at + i] = r.m;
      s.l[at + i] = r.l;
      if (carried) std::copy_n(acc_ + row * plan_.Dv, plan_.Dv, s.row + i * plan_.Dv);
    }
    if (carries()) vector.turn(s.row, plan_.Dv, valid, plan_.Dv, sums, lanes);
  }

  bool packed = false, tame_queries = true;
  for_each_key_tile(plan_, sweep, seen_keys, keys_, [&](Range tile) {
    if (!packed) {  // not where nothing is seen
      const Matrix rows = q.matrix(sweep.queries, queries, s.stage);
      query_panels.pack_rows(rows, count, plan_.D);
      tame_queries = vector.tame(rows, count, plan_.D);
      std::fill_n(s.norm, round_up(count, lanes), 0.0f);
      vector.norms(rows, count, plan_.D, s.norm);
      packed = true;
    }
    const std::int64_t keys = tile.end - tile.first;
    const Matrix key_rows = k.matrix(sweep.keys, tile, s.stage);
    key_panels.pack_rows(key_rows, keys, plan_.D);
    const float far = vector.norms(key_rows, keys, plan_.D, nullptr);
    bool tame = tame_queries && (far < kTame || vector.tame(key_rows, keys, plan_.D));
    const Matrix values = v.matrix(sweep.keys, tile, s.stage);
    value_panels.pack_columns(values, plan_.Dv, keys);
    tame = tame && vector.tame(values, keys, plan_.Dv);

    TileMask<P> mask(pattern, plan_, sweep, h);
    const Ahead ahead(tile, seen_keys.end, ceil_div(count, lanes));
    for (std::int64_t at = 0; at < count; at += lanes) {
      k.ask_for(sweep.keys, ahead.part(at / lanes));
      v.ask_for(sweep.keys, ahead.part(at / lanes));
      const int valid = static_cast<int>(std::min<std::int64_t>(lanes, count - at));
      const Range seen =
          mask.look(tile, queries.first + at, valid, lanes, lanes, s.lo, s.hi, s.keep);
      if (seen.empty()) continue;
      const std::int64_t i = at / lanes;
      const std::int64_t begin = seen.first / tiles_.rows * tiles_.rows;
      tiles_.multiply_panels(key_panels.panel(begin / tiles_.rows), key_panels.step(),
                             query_panels.panel(i), plan_.D, seen.end - begin,
                             s.scores + begin * lanes, lanes, false);
      Tile scores{s.scores, lanes, seen.first, seen.end, lanes, mask.mask(), tame, coarse};
      // A key that a query does not see must not change its bits, not even where its exponents are counted from.
      scores.fixed = fixed_tiles(plan_);
      scores.reach = mask.masked() || scores.fixed ? nullptr : s.norm + at;
      scores.far = far;
      float* sums = s.acc + i * tile_floats;
      const bool to_panel = tame && panels && !plan_.dropout.any();
      auto* panel = to_panel ? reinterpret_cast<std::uint16_t*>(s.weights) : nullptr;
      if (vector.weigh(scores, scale, s.m + at, s.l + at, s.factor, panel)) {
        vector.rescale(sums, value_rows_, lanes, s.factor);
      }
      // What the product reads before the first key that is seen, and of the last's unit.
      if (to_panel) {
        std::fill_n(panel, seen.first / kPanelRows * kPanelRows * lanes, std::uint16_t{0});
        const std::int64_t written = round_up(seen.end, kPanelRows);
        const std::int64_t read = std::max(written, round_up(seen.end, tiles_.unit));
        std::fill(panel + written * lanes, panel + read * lanes, std::uint16_t{0});
      } else {
        std::fill_n(s.scores, seen.first * lanes, 0.0f);
      }
      if (plan_.dropout.any()) {
        mask.drop(tile, seen, queries.first + at, valid, lanes, lanes, q, k, s.z);
        for (std::int64_t e = seen.first * lanes; e < seen.end * lanes; ++e) s.scores[e] *= s.z[e];
      }
      if (!tame && (mask.masked() || plan_.dropout.any())) {
        // 0 times a value that is not finite would reach queries that do not see it.
        for (std::int64_t r = seen.first; r < seen.end; ++r) {
          annulus::cpu::rows<float>().load(v.row(sweep.keys.at(tile.first + r)), plan_.Dv, s.row);
          for (int c = 0; c < valid; ++c) {
            if (!mask.sees(queries.first + at + c, tile.first + r)) continue;
            const float p = s.scores[r * lanes + c];
            if (plan_.dropout.any() && s.z[r * lanes + c] == 0) continue;
            for (std::int64_t d = 0; d < plan_.Dv; ++d) sums[d * lanes + c] += p * s.row[d];
          }
        }
        continue;
      }
      const void* weights = to_panel ? static_cast<const void*>(panel) : s.scores;
      if (!chained && !to_panel) {
        tiles_.pack_columns(Side::kRight, Matrix(s.scores, lanes), nullptr, nullptr, lanes,
                            seen.end, s.weights);
        weights = s.weights;
      }
      tiles_.multiply_panels(value_panels.panel(0), value_panels.step(), weights, seen.end,
                             plan_.Dv, sums, lanes, true);
    }
  });

  for (std::int64_t at = 0; at < count; at += lanes) {
    const std::int64_t valid = std::min<std::int64_t>(lanes, count - at);
    for (std::int64_t i = 0; i < valid && !carries(); ++i)
      bring_to_write(annulus::cpu::row_at(plan_.o, b, token_of(at + i), h), plan_.Dv);
    vector.turn(s.acc + at / lanes * tile_floats, lanes, plan_.Dv, valid, s.row, plan_.Dv);
    for (std::int64_t i = 0; i < valid; ++i) {
      const std::int64_t token = token_of(at + i);
      const RowState r{s.m[at + i], s.l[at + i]};
      float* const row = s.row + i * plan_.Dv;
      if (carries()) {
        std::copy_n(row, plan_.Dv, acc_ + state_row(b, h, token) * plan_.Dv);
        state_[state_row(b, h, token)] = r;
      } else {
        close(b, h, token, r, row, row);
      }
    }
  }
}

template <class P>
void Forward::layer(const P& pattern, int threads) const {
  // A head's chunks last to first, which with causality is the longest first.
  const std::int64_t sweeps = pattern.sweeps(),
                     most = ceil_div(std::min(pattern.longest(), plan_.Tq), chunk_);
  for_each_item(
      plan_.B * plan_.H * most * sweeps, static_cast<int>(slots_.size()), threads,
      [&](int slot_number, std::int64_t item) {
        const std::int64_t chunk_number = most - 1 - item / sweeps % most;
        const std::int64_t h = item / sweeps / most % plan_.H, b = item / sweeps / most / plan_.H;
        const Sweep sweep = sweep_of(plan_, pattern, b, h, item % sweeps);
        const Range queries{chunk_number * chunk_,
                            std::min((chunk_number + 1) * chunk_, sweep.queries.count)};
        if (!queries.empty())
          chunk(pattern, b, h, sweep, queries, slots_[static_cast<std::size_t>(slot_number)]);
      });
}

void Forward::run(Context& context) {
  if (empty()) return;
  take_part();
  if (carries() && !plan_.part) begin();
  for_each_layer(plan_, [&](int i) {
    visit_layer(plan_, i, [&](const auto& pattern) { layer(pattern, context.threads); });
  });
  if (carries() && !plan_.part) end(context);
}

void Forward::take_part() {
  if (!plan_.part) return;
  state_ = plan_.part->state;
  acc_ = plan_.part->acc;
}

void Forward::begin() {
  take_part();
  const std::int64_t rows = plan_.B * plan_.H * plan_.Tq;
  std::fill_n(state_, rows, RowState{});
  std::fill_n(acc_, rows * plan_.Dv, 0.0f);
}

void Forward::end(Context& context) {
  take_part();
  const std::int64_t rows = plan_.B * plan_.H * plan_.Tq;
  for_each_item(ceil_div(rows, chunk_), static_cast<int>(slots_.size()), context.threads,
                [&](int slot_number, std::int64_t item) {
                  for (std::int64_t i = item * chunk_; i < std::min((item + 1) * chunk_, rows);
                       ++i) {
                    close(i / plan_.Tq / plan_.H, i / plan_.Tq % plan_.H, i % plan_.Tq, state_[i],
                          acc_ + i * plan_.Dv, slots_[static_cast<std::size_t>(slot_number)].row);
                  }
                });
}

void forward(const Plan& plan, Context& context) {
  Forward f(plan);
  const Workspace block(context, plan.op, plan.device, [&](ScratchLayout& s) { f.lay_out(s); });
  f.run(context);
}

std::size_t forward_workspace(const Plan& plan) {
  Forward f(plan);
  return scratch_bytes([&](ScratchLayout& s) { f.lay_out(s); });
}

const char* how(const Plan& plan) { return tiles_for(plan.dtype).name; }

}  // namespace annulus::attention::cpu
