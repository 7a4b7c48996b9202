// Backward on the CPU. Sums of dk and dv over queries need no atomics: a work item owns the keys it adds to. It is a cell of
// the pattern (sweeps that share keys with no others: a packed sequence, a segment, everything) of one key head, with all query
// heads that read it. A cell that is too much for one thread is split by its queries, each part with sums of its own, added up
// in order at the end; into how many depends on the problem alone, and so do all bits.
//
// Within an item, chunks of queries meet tiles of keys. Weights p and gradients ds are kept as tiles of their products lie (keys
// are rows, some queries columns): in rows of all queries of a chunk they would be a power of two apart, and put each other out
// of the cache. As they lie they are right operands of the product for dq, which is turned, too; turned they are left operands of
// those for dv and dk.

#include "annulus/attention/cpu/backward.h"

#include <algorithm>
#include <cmath>

#include "annulus/cpu/rows.h"

namespace annulus::attention::cpu {

namespace {

// As many parts as keep a machine busy, for problems of few cells.
constexpr std::int64_t kParts = 16;
// Sums of parts beyond the first may take as much memory.
constexpr std::int64_t kPartBytes = std::int64_t{256} << 20;

}  // namespace

Backward::Backward(const Plan& p)
    : plan(p),
      tiles(tiles_for(p.dtype)),
      chunk_queries(fixed_tiles(p) ? kQueries : chunk_of(p, kBackwardItems, kBackwardMost)),
      tile_keys(backward_keys(tiles)),
      tile_floats((tile_keys + annulus::cpu::kMaxTileRows) * tiles.cols),
      dq_floats(round_up(p.D, tiles.rows) * tiles.cols),
      slots(1),
      parts(1) {
  if (empty()) return;
  std::int64_t cells = 0, chunks = 1;
  for (int i = 0; i < plan.layers; ++i) {
    visit_layer(plan, i, [&](const auto& pattern) {
      cells = std::max(cells, plan.B * plan.Hkv * ceil_div(pattern.sweeps(), pattern.per_cell()));
      chunks = std::max(chunks, pattern.per_cell() * ceil_div(pattern.longest(), chunk_queries));
    });
  }
  cells = std::max<std::int64_t>(cells, 1);
  parts = std::clamp<std::int64_t>(kParts / cells, 1, chunks);
  const std::int64_t bytes = std::max<std::int64_t>(1, key_floats() * std::int64_t{sizeof(float)});
  // Of a part of a call, whose sums wait elsewhere, as many as do not depend on how much memory they take: it must fall with the
  // rows.
  parts = fixed_tiles(plan) ? 1
          : plan.part       ? std::min<std::int64_t>(parts, 2)
                            : std::min(parts, 1 + kPartBytes / bytes);
  slots = slots_for(cells * parts);
}

void Backward::lay_out(ScratchLayout& scratch) {
  if (empty()) return;
  of.clear();
  const std::int64_t lanes = tiles.cols;
  for (int i = 0; i < slots; ++i) {
    Slot s{};
    scratch(s.q_rows, Panels::bytes(tiles, Side::kRight, chunk_queries, plan.D));
    scratch(s.q_columns, Panels::bytes(tiles, Side::kRight, plan.D, chunk_queries));
    scratch(s.do_rows, Panels::bytes(tiles, Side::kRight, chunk_queries, plan.Dv));
    scratch(s.do_columns, Panels::bytes(tiles, Side::kRight, plan.Dv, chunk_queries));
    scratch(s.k_rows, Panels::bytes(tiles, Side::kLeft, tile_keys, plan.D));
    scratch(s.v_rows, Panels::bytes(tiles, Side::kLeft, tile_keys, plan.Dv));
    scratch(s.k_columns, Panels::bytes(tiles, Side::kLeft, plan.D, tile_keys));
    scratch(s.panel, std::max(tiles.panel_bytes(Side::kLeft, chunk_queries),
                              tiles.panel_bytes(Side::kRight, tile_keys)));
    scratch(s.stage, chunk_queries * std::max(plan.D, plan.Dv) * size_of(plan.dtype));
    scratch(s.p, chunk_queries / lanes * tile_floats);
    scratch(s.ds, chunk_queries / lanes * tile_floats);
    scratch(s.z, plan.dropout.any() ? chunk_queries / lanes * tile_floats : 0);
    const std::int64_t narrowed = narrows(tiles) ? chunk_queries / lanes * tile_floats : 0;
    scratch(s.narrow_p, narrowed);
    scratch(s.narrow_ds, narrowed);
    scratch(s.narrow_panel, narrowed > 0 ? tile_floats : 0);
    scratch(s.dq, chunk_queries / lanes * dq_floats);
    scratch(s.sums, annulus::cpu::kMaxTileRows * round_up(std::max(plan.D, plan.Dv), lanes));
    scratch(s.lse, chunk_queries);
    scratch(s.delta, chunk_queries);
    scratch(s.row, std::max<std::int64_t>(3 * 256, lanes * plan.D));
    scratch(s.lo, 2 * lanes);
    s.hi = s.lo == nullptr ? nullptr : s.lo + lanes;
    scratch(s.keep, unites(plan) ? tile_keys * lanes : 0);
    of.push_back(s);
  }
  if (!plan.part) scratch(delta, plan.B * plan.H * plan.Tq);
  if (plan.part && parts == 1) return;
  scratch(dk, parts * plan.B * plan.Hkv * plan.Tk * plan.D);
  scratch(dv, parts * plan.B * plan.Hkv * plan.Tk * plan.Dv);
  if (plan.part) return;
  if (plan.layers > 1) scratch(dq, plan.B * plan.H * plan.Tq * plan.D);
  if (plan.stop_alpha_gradient) {
    alone.layers = 1;
    layer_forward.lay_out(scratch);
    scratch(layer_o, plan.B * plan.H * plan.Tq * plan.Dv * size_of(plan.dtype));
  }
}

void Backward::take_part() {
  if (!plan.part) return;
  delta = plan.part->delta;
  dq = plan.part->dq;
  if (parts > 1) return;
  dk = plan.part->dk;
  dv = plan.part->dv;
}

void Backward::fill_delta(Context& context) {
  take_part();
  fill_delta(plan.o, context.threads);
}

void Backward::fill_delta(const TensorView& o, int threads) const {
  const std::int64_t rows = plan.B * plan.H * plan.Tq;
  for_each_item(ceil_div(rows, chunk_queries), slots, threads, [&](int slot, std::int64_t item) {
    const Slot& s = of[static_cast<std::size_t>(slot)];
    float *x = s.row, *y = s.row + 256;
    for (std::int64_t i = item * chunk_queries; i < std::min((item + 1) * chunk_queries, rows);
         ++i) {
      const std::int64_t t = i % plan.Tq, h = i / plan.Tq % plan.H, b = i / plan.Tq / plan.H;
      const auto& row = annulus::cpu::rows<float>();
      row.load(annulus::cpu::row_at(o, b, t, h), plan.Dv, x);
      row.load(annulus::cpu::row_at(plan.do_, b, t, h), plan.Dv, y);
      delta[i] =
          softmax().dot(x, y, plan.Dv) - (plan.dlse.defined() ? lane_of(plan.dlse, b, h, t) : 0.0f);
    }
  });
}

template <class P>
void Backward::chunk(const P& pattern, std::int64_t b, std::int64_t h, std::int64_t part,
                     const Sweep& sweep, Range queries, const Slot& s) const {
  const Range seen_keys = sweep.seen_by_any(queries);
  if (plan.part && seen_keys.empty()) return;
  const Softmax& vector = softmax();
  const int lanes = tiles.cols;
  const std::int64_t rows = tiles.rows;
  const std::int64_t count = queries.end - queries.first, padded = round_up(count, lanes);
  const std::int64_t hk = h / plan.heads_per_key();
  const std::int64_t query0 = first_query(plan), key0 = first_key(plan);
  const HeadRows q(plan.q, b, h, plan.order, query0), k(plan.k, b, hk, plan.order, key0),
      v(plan.v, b, hk, plan.order, key0), dout(plan.do_, b, h, plan.order, query0);
  Panels q_rows(tiles, Side::kRight, s.q_rows), q_columns(tiles, Side::kRight, s.q_columns),
      do_rows(tiles, Side::kRight, s.do_rows), do_columns(tiles, Side::kRight, s.do_columns),
      k_rows(tiles, Side::kLeft, s.k_rows), v_rows(tiles, Side::kLeft, s.v_rows),
      k_columns(tiles, Side::kLeft, s.k_columns);
  const auto scale = static_cast<float>(plan.scale);
  const auto& convert = annulus::cpu::rows<float>();
  const bool chained = chains(tiles);

  const auto dq_sums = [&](std::int64_t i) {  // of query i, carried
    return dq + query_row(b, h, q.token(sweep.queries.at(queries.first + i))) * plan.D;
  };
  const auto turned_dq = [&](std::int64_t i) { return s.dq + i / lanes * dq_floats + i % lanes; };
  std::fill_n(s.dq, padded / lanes * dq_floats, 0.0f);
  for (std::int64_t at = 0; at < count && plan.part && wants_queries(); at += lanes) {
    const std::int64_t valid = std::min<std::int64_t>(lanes, count - at);
    for (std::int64_t i = 0; i < valid; ++i)
      std::copy_n(dq_sums(at + i), plan.D, s.row + i * plan.D);
    vector.turn(s.row, plan.D, valid, plan.D, turned_dq(at), lanes);
  }
  bool packed = false, tame_queries = true;
  for_each_key_tile(plan, sweep, seen_keys, tile_keys, [&](Range tile) {
    if (!packed) {
      const Matrix x = q.matrix(sweep.queries, queries, s.stage);
      q_rows.pack_rows(x, count, plan.D);
      q_columns.pack_columns(x, plan.D, count);
      tame_queries = vector.tame(x, count, plan.D);
      const Matrix y = dout.matrix(sweep.queries, queries, s.stage);
      do_rows.pack_rows(y, count, plan.Dv);
      do_columns.pack_columns(y, plan.Dv, count);
      tame_queries = tame_queries && vector.tame(y, count, plan.Dv);
      for (std::int64_t i = 0; i < padded; ++i) {
        const std::int64_t token = i < count ? q.token(sweep.queries.at(queries.first + i)) : 0;
        s.lse[i] = i < count ? lane_of(plan.lse, b, h, token - query0) : kNoScore;
        s.delta[i] = i < count ? delta[query_row(b, h, token)] : 0;
        // A query that met a NaN, here or in another layer, has one in its sum.
        tame_queries = tame_queries && (s.lse[i] == kNoScore || std::isfinite(s.lse[i])) &&
                       std::isfinite(s.delta[i]);
      }
      packed = true;
    }
    const std::int64_t keys = tile.end - tile.first;
    const Matrix key_rows = k.matrix(sweep.keys, tile, s.stage);
    k_rows.pack_rows(key_rows, keys, plan.D);
    k_columns.pack_columns(key_rows, plan.D, keys);
    bool tame = tame_queries && vector.tame(key_rows, keys, plan.D);
    const Matrix value_rows = v.matrix(sweep.keys, tile, s.stage);
    v_rows.pack_rows(value_rows, keys, plan.Dv);
    tame = tame && vector.tame(value_rows, keys, plan.Dv);

    // p and ds of the tile; of the rows, which every tile of queries sees an interval of, the others are 0.
    TileMask<P> mask(pattern, plan, sweep, h);
    const bool drops = plan.dropout.any();
    // Tame tiles are multiplied as they lie, and rounded before if need be: dq while they are near.
    const bool direct = tame && tiles.multiply_tiles != nullptr && (chained || narrows(tiles));
    const bool narrow = direct && !chained;
    bool careful = false;
    const Ahead ahead(tile, seen_keys.end, padded / lanes);
    // What gradients of keys are summed over at once is then all that is kept of a tile's weights. (Cut where the chunk is: the bits
    // of a key's sums must not depend on which keys lie beside it.)
    const std::int64_t together = direct ? summed_queries(tiles) : padded;
    const auto weigh = [&](std::int64_t at, std::int64_t kept) {
      const std::int64_t i = at / lanes;
      k.ask_for(sweep.keys, ahead.part(i));
      v.ask_for(sweep.keys, ahead.part(i));
      const std::int64_t there = narrow ? 0 : kept * tile_floats;
      float *p = s.p + there, *ds = s.ds + there, *z = drops ? s.z + i * tile_floats : nullptr;
      const NarrowTile rounded{s.narrow_p + kept * tile_floats, s.narrow_ds + kept * tile_floats,
                               s.narrow_panel};
      const int valid = static_cast<int>(std::min<std::int64_t>(lanes, count - at));
      const Range seen =
          mask.look(tile, queries.first + at, valid, lanes, lanes, s.lo, s.hi, s.keep);
      const auto clear = [&](std::int64_t from, std::int64_t to) {
        if (narrow) {
          std::fill(rounded.p + from * lanes, rounded.p + to * lanes, std::uint16_t{0});
          std::fill(rounded.ds + from * lanes, rounded.ds + to * lanes, std::uint16_t{0});
          std::fill(rounded.panel + from * lanes, rounded.panel + to * lanes, std::uint16_t{0});
          return;
        }
        std::fill(p + from * lanes, p + to * lanes, 0.0f);
        std::fill(ds + from * lanes, ds + to * lanes, 0.0f);
      };
      // Rounded ones are written some rows at a time, and read by whole units.
      const std::int64_t written = narrow ? round_up(seen.end, kPanelRows) : seen.end,
                         read = narrow ? round_up(keys, tiles.unit) : keys;
      if (seen.empty()) {
        return clear(0, read);
      }
      const std::int64_t begin = seen.first / rows * rows;
      tiles.multiply_panels(k_rows.panel(begin / rows), k_rows.step(), q_rows.panel(i), plan.D,
                            seen.end - begin, p + begin * lanes, lanes, false);
      tiles.multiply_panels(v_rows.panel(begin / rows), v_rows.step(), do_rows.panel(i), plan.Dv,
                            seen.end - begin, ds + begin * lanes, lanes, false);
      if (drops) mask.drop(tile, seen, queries.first + at, valid, lanes, lanes, q, k, z);
      const Tile scores{p,     lanes,       seen.first, seen.end,
                        lanes, mask.mask(), tame,       plan.dtype == DType::kBF16};
      vector.differentiate(scores, scale, s.lse + at, s.delta + at, z, ds,
                           narrow ? &rounded : nullptr);
      clear(0, narrow ? seen.first / kPanelRows * kPanelRows : seen.first);
      clear(written, std::max(written, read));
      if (direct && wants_queries()) {
        tiles.multiply_panels(k_columns.panel(0), k_columns.step(),
                              narrow ? static_cast<const void*>(rounded.panel) : ds, seen.end,
                              plan.D, s.dq + i * dq_floats, lanes, true);
      }
      careful = careful || (!tame && (mask.masked() || drops));
    };
    for (std::int64_t from = 0; from < padded; from += together) {
      const Range some{from, std::min(from + together, padded)};
      for (std::int64_t at = some.first; at < some.end; at += lanes) weigh(at, (at - from) / lanes);
      if (!direct || !wants_keys()) continue;
      const auto* p = narrow ? reinterpret_cast<const std::byte*>(s.narrow_p)
                             : reinterpret_cast<const std::byte*>(s.p);
      const auto* ds = narrow ? reinterpret_cast<const std::byte*>(s.narrow_ds)
                              : reinterpret_cast<const std::byte*>(s.ds);
      sum_tiles(p, do_columns, plan.Dv, sweep, queries, some, tile, k,
                dv + key_row(part, b, hk, key0) * plan.Dv, s);
      sum_tiles(ds, q_columns, plan.D, sweep, queries, some, tile, k,
                dk + key_row(part, b, hk, key0) * plan.D, s);
    }
    if (direct) return;
    if (careful) {
      // 0 times what is not finite would reach rows that do not see it: entry by entry, which is slow, and rare.
      float *kr = s.row, *qr = s.row + 256, *gr = s.row + 512;
      for (std::int64_t r = 0; r < keys; ++r) {
        const std::int64_t rank = sweep.keys.at(tile.first + r),
                           row = key_row(part, b, hk, k.token(rank));
        convert.load(k.row(rank), plan.D, kr);
        for (std::int64_t i = 0; i < count; ++i) {
          if (!mask.sees(queries.first + i, tile.first + r)) continue;
          const std::int64_t at = i / lanes * tile_floats + r * lanes + i % lanes;
          const float p = s.p[at], ds = s.ds[at];
          convert.load(q.row(sweep.queries.at(queries.first + i)), plan.D, qr);
          convert.load(dout.row(sweep.queries.at(queries.first + i)), plan.Dv, gr);
          const bool dropped = drops && s.z[at] == 0;
          for (std::int64_t d = 0; d < plan.D; ++d) {
            s.dq[i / lanes * dq_floats + d * lanes + i % lanes] += ds * kr[d];
          }
          if (!wants_keys()) continue;
          for (std::int64_t d = 0; d < plan.D; ++d) dk[row * plan.D + d] += ds * qr[d];
          for (std::int64_t d = 0; d < plan.Dv && !dropped; ++d) dv[row * plan.Dv + d] += p * gr[d];
        }
      }
      return;
    }

    // dq[d][query] += k ds
    for (std::int64_t at = 0; at < count && wants_queries(); at += lanes) {
      const std::int64_t last = std::min<std::int64_t>(at + lanes, count);
      const Range seen = mask.rows_of(tile, {queries.first + at, queries.first + last});
      if (seen.empty()) continue;
      const void* right = s.ds + at / lanes * tile_floats;
      if (!chained) {
        tiles.pack_columns(Side::kRight, Matrix(static_cast<const float*>(right), lanes), nullptr,
                           nullptr, lanes, seen.end, s.panel);
        right = s.panel;
      }
      tiles.multiply_panels(k_columns.panel(0), k_columns.step(), right, seen.end, plan.D,
                            s.dq + at / lanes * dq_floats, lanes, true);
    }
    // dv[key][d] += p^T do, dk[key][d] += ds^T q, over the queries that see any of the keys of a panel. (Fewer queries at a time,
    // so that their panels stay in the nearest cache for all keys, were slower by 4 %.)
    for (const bool values : {true, false}) {
      if (!wants_keys()) break;
      const std::int64_t columns = values ? plan.Dv : plan.D;
      const Panels& right_panels = values ? do_columns : q_columns;
      // Rows of the sums that are a constant distance apart are added to where they are.
      const bool in_place = !plan.order.defined() && columns % lanes == 0;
      for (std::int64_t r = 0; r < keys; r += rows) {
        const int some = static_cast<int>(std::min<std::int64_t>(rows, keys - r));
        const Range seeing = sweep.seeing_any({tile.first + r, tile.first + r + some});
        const std::int64_t from =
            std::max<std::int64_t>(0, seeing.first - queries.first) / lanes * lanes;
        const std::int64_t to = std::min(count, seeing.end - queries.first);
        if (from >= to) continue;
        tiles.pack_tiles((values ? s.p : s.ds) + from / lanes * tile_floats + r * lanes,
                         tile_floats, some, to - from, s.panel);
        const auto row_of = [&](std::int64_t i) {
          const std::int64_t row = key_row(part, b, hk, k.token(sweep.keys.at(tile.first + r + i)));
          return (values ? dv : dk) + row * columns;
        };
        const bool direct = in_place && some == rows;
        float* y = direct ? row_of(0) : s.sums;
        const std::int64_t ldy = direct ? sweep.keys.step * columns : round_up(columns, lanes);
        for (std::int64_t d = 0; d < columns; d += lanes) {
          const Factor<float> right{right_panels.panel(d / lanes, from), nullptr};
          tiles.multiply(s.panel, &right, 1, to - from, some, y + d, ldy, direct, nullptr);
        }
        for (int i = 0; i < some && !direct; ++i) vector.add(y + i * ldy, columns, row_of(i));
      }
    }
  });

  for (std::int64_t at = 0; at < count && wants_queries(); at += lanes) {
    const std::int64_t valid = std::min<std::int64_t>(lanes, count - at);
    const auto token_of = [&](std::int64_t i) {
      return q.token(sweep.queries.at(queries.first + at + i));
    };
    for (std::int64_t i = 0; i < valid && !plan.part && plan.layers == 1; ++i)
      bring_to_write(annulus::cpu::row_at(plan.dq, b, token_of(i), h), plan.D);
    vector.turn(turned_dq(at), lanes, plan.D, valid, s.row, plan.D);
    for (std::int64_t i = 0; i < valid; ++i) {
      const float* row = s.row + i * plan.D;
      if (plan.part) {
        std::copy_n(row, plan.D, dq_sums(at + i));
      } else if (plan.layers > 1) {
        vector.add(row, plan.D, dq_sums(at + i));
      } else {
        convert.store(row, plan.D, annulus::cpu::row_at(plan.dq, b, token_of(i), h));
      }
    }
  }
}

// Keys whose queries are the same go together: what is packed of these is then read from the nearest cache for all of them.
void Backward::sum_tiles(const std::byte* tiles_of_keys, const Panels& columns_of_queries,
                         std::int64_t columns, const Sweep& sweep, Range queries, Range some,
                         Range tile, const HeadRows& k, float* sums, const Slot& s) const {
  const std::int64_t lanes = tiles.cols, keys = tile.end - tile.first,
                     last = std::min(some.end, queries.end - queries.first),
                     group = annulus::cpu::kMaxTileRows / tiles.rows * tiles.rows;
  const auto element = static_cast<std::int64_t>(tiles.element);
  const auto row_of = [&](std::int64_t key) {
    return sums + (k.token(sweep.keys.at(tile.first + key)) - first_key(plan)) * columns;
  };
  // Of the chunk, queries that see any of some keys; from the first of a tile on.
  const auto seeing = [&](std::int64_t key) {
    const Range any =
        sweep.seeing_any({tile.first + key, tile.first + std::min(keys, key + group)});
    return Range{std::max(some.first, (any.first - queries.first) / lanes * lanes),
                 std::min(last, any.end - queries.first)};
  };
  // Rows of the sums that are a constant distance apart are added to where they are.
  const bool in_place = !plan.order.defined() && columns % lanes == 0;
  for (std::int64_t key = 0, end = 0; key < keys; key = end) {
    const Range by = seeing(key);
    end = std::min(keys, key + group);
    if (by.empty()) continue;
    while (in_place && end < keys && seeing(end).first == by.first && seeing(end).end == by.end)
      end = std::min(keys, end + group);
    float* const to = in_place ? row_of(key) : s.sums;
    const std::int64_t ld = in_place ? sweep.keys.step * columns : round_up(columns, lanes);
    const std::byte* left =
        tiles_of_keys + ((by.first - some.first) / lanes * tile_floats + key * lanes) * element;
    for (std::int64_t d = 0; d < columns; d += lanes) {
      tiles.multiply_tiles(left, tile_floats, columns_of_queries.panel(d / lanes, by.first),
                           by.count(), end - key, to + d, ld, in_place);
    }
    for (std::int64_t i = key; i < end && !in_place; ++i)
      softmax().add(to + (i - key) * ld, columns, row_of(i));
  }
}

template <class P>
void Backward::layer(const P& pattern, int threads) const {
  const std::int64_t per_cell = pattern.per_cell(), sweeps = pattern.sweeps(),
                     cells = ceil_div(sweeps, per_cell), group = plan.heads_per_key();
  const std::int64_t chunks =
      per_cell * ceil_div(std::min(pattern.longest(), plan.Tq), chunk_queries);
  for_each_item(
      plan.B * plan.Hkv * cells * parts, slots, threads, [&](int slot, std::int64_t item) {
        const std::int64_t part = item % parts, cell = item / parts % cells;
        const std::int64_t hk = item / parts / cells % plan.Hkv,
                           b = item / parts / cells / plan.Hkv;
        const Slot& s = of[static_cast<std::size_t>(slot)];
        if (fixed_tiles(plan)) {
          fixed_cell(pattern, b, hk, {cell * per_cell, std::min((cell + 1) * per_cell, sweeps)}, s);
          return;
        }
        for (std::int64_t h = hk * group; h < (hk + 1) * group; ++h) {
          // Every parts-th chunk, so that with causality all parts have as much to do.
          for (std::int64_t i = part; i < chunks; i += parts) {
            const std::int64_t number = cell * per_cell + i % per_cell, c = i / per_cell;
            if (number >= sweeps) continue;
            const Sweep sweep = sweep_of(plan, pattern, b, h, number);
            const Range queries{c * chunk_queries,
                                std::min((c + 1) * chunk_queries, sweep.queries.count)};
            if (!queries.empty()) chunk(pattern, b, h, part, sweep, queries, s);
          }
        }
      });
}

// Some sweeps with chunks at fixed rows, and these from first to last for all heads together: a key's sums are then the same
// wherever the queries are cut. The sweeps of a head lie in order.
template <class P>
void Backward::fixed_cell(const P& pattern, std::int64_t b, std::int64_t hk, Range sweeps,
                          const Slot& s) const {
  const std::int64_t group = plan.heads_per_key(), begin = first_query(plan);
  std::vector<std::int64_t> next(static_cast<std::size_t>(group), sweeps.first);
  for (std::int64_t from = begin / chunk_queries * chunk_queries; from < begin + plan.Tq;
       from += chunk_queries) {
    for (std::int64_t g = 0; g < group; ++g) {
      const std::int64_t h = hk * group + g;
      for (std::int64_t i = next[static_cast<std::size_t>(g)]; i < sweeps.end; ++i) {
        const Line rows = pattern.sweep(b, h, i).queries;
        if (rows.count == 0) continue;
        if (rows.first >= from + chunk_queries) break;
        if (rows.at(rows.count - 1) < from) {
          next[static_cast<std::size_t>(g)] = i + 1;
          continue;
        }
        const Sweep sweep = sweep_of(plan, pattern, b, h, i);
        const Range queries{sweep.queries.before(from), sweep.queries.before(from + chunk_queries)};
        if (!queries.empty()) chunk(pattern, b, h, 0, sweep, queries, s);
      }
    }
  }
}

void Backward::run(Context& context) {
  if (empty()) return;
  // By all threads: memory that is new costs most when it is first touched.
  const auto clear = [&](float* p, std::int64_t n) {
    constexpr std::int64_t kBlock = std::int64_t{1} << 14;
    for_each_item(ceil_div(n, kBlock), slots, context.threads, [&](int, std::int64_t i) {
      std::fill(p + i * kBlock, p + std::min(n, (i + 1) * kBlock), 0.0f);
    });
  };
  const std::int64_t key_rows = plan.B * plan.Hkv * plan.Tk;
  take_part();
  if (!plan.part || (parts > 1 && wants_keys())) {
    clear(dk, parts * key_rows * plan.D);
    clear(dv, parts * key_rows * plan.Dv);
  }
  if (plan.part) {
    visit_layer(plan, plan.part->layer,
                [&](const auto& pattern) { layer(pattern, context.threads); });
    if (parts == 1 || !wants_keys()) return;
    const std::int64_t k_floats = key_rows * plan.D, v_floats = key_rows * plan.Dv;
    for (std::int64_t c = 0; c < parts; ++c) {
      softmax().add(dk + c * k_floats, k_floats, plan.part->dk);
      softmax().add(dv + c * v_floats, v_floats, plan.part->dv);
    }
    return;
  }
  if (plan.layers > 1) clear(dq, plan.B * plan.H * plan.Tq * plan.D);
  if (!plan.stop_alpha_gradient) fill_delta(plan.o, context.threads);
  for (int i = 0; i < plan.layers; ++i) {
    if (plan.stop_alpha_gradient) {
      // The layer's own o takes the place of the merged one.
      Dilated& d = std::get<Dilated>(alone.pattern) = std::get<Dilated>(plan.pattern);
      d.length[0] = d.length[i];
      d.rate[0] = d.rate[i];
      d.branches = 1;
      const std::int64_t shape[] = {plan.B, plan.Tq, plan.H, plan.Dv};
      alone.o = contiguous(layer_o, plan.dtype, shape);
      alone.lse = {};
      layer_forward.run(context);
      fill_delta(alone.o, context.threads);
    }
    visit_layer(plan, i, [&](const auto& pattern) { layer(pattern, context.threads); });
  }
  const auto& convert = annulus::cpu::rows<float>();
  const auto close = [&](const TensorView& to, float* sums, std::int64_t heads, std::int64_t T,
                         std::int64_t columns, std::int64_t copies) {
    if (!to.defined()) return;
    const std::int64_t rows = plan.B * heads * T;
    for_each_item(ceil_div(rows, chunk_queries), slots, context.threads,
                  [&](int, std::int64_t item) {
                    for (std::int64_t i = item * chunk_queries;
                         i < std::min((item + 1) * chunk_queries, rows); ++i) {
                      for (std::int64_t c = 1; c < copies; ++c)
                        softmax().add(sums + (c * rows + i) * columns, columns, sums + i * columns);
                      convert.store(sums + i * columns, columns,
                                    annulus::cpu::row_at(to, i / T / heads, i % T, i / T % heads));
                    }
                  });
  };
  close(plan.dk, dk, plan.Hkv, plan.Tk, plan.D, parts);
  close(plan.dv, dv, plan.Hkv, plan.Tk, plan.Dv, parts);
  if (plan.layers > 1) close(plan.dq, dq, plan.H, plan.Tq, plan.D, 1);
}

void backward(const Plan& plan, Context& context) {
  Backward f(plan);
  const Workspace block(context, plan.op, plan.device, [&](ScratchLayout& s) { f.lay_out(s); });
  f.run(context);
}

std::size_t backward_workspace(const Plan& plan) {
  Backward f(plan);
  return scratch_bytes([&](ScratchLayout& s) { f.lay_out(s); });
}

}  // namespace annulus::attention::cpu
