#include "annulus/ring_attention/rows.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "annulus/core/check.h"
#include "annulus/core/checked.h"

namespace annulus::ring {

namespace {

// Lines of which some may have rows in common, as lines that have none.
std::vector<Line> disjoint(std::vector<Line> lines) {
  if (lines.size() < 2) return lines;
  const auto key = [](const Line& l) { return std::tuple(l.step, l.first % l.step, l.first); };
  std::sort(lines.begin(), lines.end(),
            [&](const Line& a, const Line& b) { return key(a) < key(b); });
  if (lines.front().step != lines.back().step) {
    // Of several rates (heads of different groups that share a key): row by row.
    std::vector<std::int64_t> rows;
    for (const Line& l : lines) {
      for (std::int64_t i = 0; i < l.count; ++i) rows.push_back(l.at(i));
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    lines.clear();
    for (const std::int64_t row : rows) lines.push_back({row, 1, 1});
  }
  std::vector<Line> joined;
  for (const Line& l : lines) {
    Line* last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && last->step == l.step && last->first % l.step == l.first % l.step &&
        l.first <= last->at(last->count)) {
      last->count = std::max(last->count, (l.at(l.count) - last->first) / l.step);
    } else {
      joined.push_back(l);
    }
  }
  return joined;
}

// The parts of `rows` in whole cells, as far as they are in `piece`.
Line within(const Line& line, Range rows, Range piece, std::int64_t cell) {
  if (cell > 0) rows = {rows.first / cell * cell, ceil_div(rows.end, cell) * cell};
  return line.cut(std::max(rows.first, piece.first), std::min(rows.end, piece.end));
}
void add(std::vector<Line>& lines, const Line& line) {
  if (line.count > 0) lines.push_back(line);
}

// f(rows first..end-1) of a line's part, whatever its step.
Range rows_of(const Line& line, Range part) {
  return {line.at(part.first), line.at(part.end - 1) + 1};
}

// f(sweep) for those of a head that have queries among `rows`. They lie in order, and those without any are the last.
template <class P, class F>
void for_each_sweep(const P& pattern, std::int64_t h, Range rows, F&& f) {
  std::int64_t first = 0, end = pattern.sweeps();
  while (first < end) {
    const std::int64_t middle = first + (end - first) / 2;
    const Line own = pattern.sweep(0, h, middle).queries;
    if (own.count > 0 && own.at(own.count - 1) < rows.first) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  for (; first < pattern.sweeps(); ++first) {
    const attention::Sweep s = pattern.sweep(0, h, first);
    if (s.queries.count == 0 || s.queries.first >= rows.end) return;
    f(s);
  }
}

template <class P>
void add_keys(const P& pattern, std::int64_t h, Range queries, Range piece, std::int64_t cell,
              std::vector<Line>& lines) {
  for_each_sweep(pattern, h, queries, [&](attention::Sweep s) {
    s.queries = s.queries.cut(queries.first, queries.end);
    if (s.queries.count == 0) return;
    const Range seen = s.seen_by_any({0, s.queries.count});
    if (seen.empty()) return;
    if (!s.blocks.defined()) {
      add(lines, within(s.keys, rows_of(s.keys, seen), piece, cell));
      return;
    }
    for_each_tile(s, seen, s.blocks.size, [&](Range tile) {
      add(lines, within(s.keys, rows_of(s.keys, tile), piece, cell));
    });
  });
}

template <class P>
void add_queries(const P& pattern, std::int64_t h, Range keys, Range piece, std::int64_t cell,
                 std::vector<Line>& lines) {
  for_each_sweep(pattern, h, piece, [&](attention::Sweep s) {
    s.keys = s.keys.cut(keys.first, keys.end);
    if (s.keys.count == 0) return;
    Range seeing = s.seeing_any({0, s.keys.count});
    if (s.blocks.defined()) {
      // Those that see any key of any of the blocks.
      Range any{0, 0};
      for_each_tile(s, {0, s.keys.count}, s.blocks.size, [&](Range tile) {
        const Range some = s.seeing_any(tile);
        if (some.empty()) return;
        any = any.empty() ? some
                          : Range{std::min(any.first, some.first), std::max(any.end, some.end)};
      });
      seeing = any;
    }
    if (seeing.empty()) return;
    add(lines, within(s.queries, rows_of(s.queries, seeing), piece, cell));
  });
}

}  // namespace

std::int64_t count_of(const std::vector<Line>& lines) {
  std::int64_t sum = 0;
  for (const Line& l : lines) sum += l.count;
  return sum;
}
std::int64_t count_of(const Rows& rows) {
  std::int64_t sum = 0;
  for (const std::vector<Line>& lines : rows) sum += count_of(lines);
  return sum;
}

Rows needed(const Plan& plan, int layer, Side side, std::span<const Range> others, Range piece,
            std::int64_t cell) {
  if (!plan.part) {  // sweeps are then those that have keys alone, and lie in order
    Plan part = plan;
    part.part.emplace();
    return needed(part, layer, side, others, piece, cell);
  }
  const std::int64_t heads = side == Side::kKeys ? plan.Hkv : plan.H;
  const std::int64_t group = side == Side::kKeys ? plan.heads_per_key() : 1;
  Rows rows(static_cast<std::size_t>(heads));
  if (piece.empty()) return rows;
  attention::visit_layer(plan, layer, [&](const auto& pattern) {
    bool same_for_all = std::is_same_v<std::decay_t<decltype(pattern)>, attention::Dense>;
    if constexpr (requires { pattern.head_stride; }) same_for_all = pattern.head_stride == 0;
    for (std::int64_t head = 0; head < heads; ++head) {
      std::vector<Line>& lines = rows[static_cast<std::size_t>(head)];
      if (same_for_all && head > 0) {
        lines = rows.front();
        continue;
      }
      for (std::int64_t h = head * group; h < (same_for_all ? head + 1 : (head + 1) * group); ++h) {
        for (const Range other : others) {
          if (other.empty()) continue;
          if (side == Side::kKeys) {
            add_keys(pattern, h, other, piece, cell, lines);
          } else {
            add_queries(pattern, h, other, piece, cell, lines);
          }
        }
      }
      lines = disjoint(std::move(lines));
    }
  });
  return rows;
}

}  // namespace annulus::ring

namespace annulus {

std::array<TokenRange, 2> ring_shard(std::int64_t tokens, int ranks, int rank, Balance balance) {
  const auto refuse = [](const char* name, const char* rule, std::int64_t came) {
    invalid("ring_shard", name, rule, "is " + std::to_string(came));
  };
  if (tokens < 0 || tokens > ring::kMostTokens) {
    refuse("tokens", "be at least 0 and at most 2^40", tokens);
  }
  if (ranks < 1 || ranks > 1 << 20) refuse("ranks", "be at least 1 and at most 2^20", ranks);
  if (rank < 0 || rank >= ranks) refuse("rank", "be at least 0 and less than ranks", rank);
  const auto chunks = ring::Shards{tokens, ranks, balance}.of(rank);
  const auto range = [](ring::Range r) { return TokenRange{r.first, r.end}; };
  return {range(chunks[0]), range(chunks[1])};
}

}  // namespace annulus
