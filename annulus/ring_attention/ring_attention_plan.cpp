// The planner: rows and pairs of every two ranks are counted by intervals, so that a thousand ranks take a fraction of a second.

#include "annulus/ring_attention/ring_attention_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "annulus/attention/plan.h"
#include "annulus/core/check.h"
#include "annulus/core/checked.h"
#include "annulus/ring_attention/call.h"
#include "annulus/ring_attention/rows.h"

namespace annulus {

namespace {

using attention::Sweep;
using ring::Range;
using ring::Shards;
using ring::Side;

constexpr const char* kOp = "plan_ring";
constexpr std::int64_t kMostTokens = 1'000'000'000;  // pairs of them are counted in 63 bits
constexpr int kMostRanks = 4096;

void check(const RingPlanProblem& p) {
  const auto range = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return;
    invalid(kOp, name, "be between " + std::to_string(low) + " and " + std::to_string(high),
            "is " + std::to_string(value));
  };
  const auto positive = [](const char* name, double value) {
    if (value > 0 && std::isfinite(value)) return;
    invalid(kOp, name, "be more than 0 and finite", "is " + std::to_string(value));
  };
  range("tokens", p.tokens, 0, kMostTokens);
  range("ranks", p.ranks, 1, kMostRanks);
  range("batch", p.batch, 1, kMostTokens);
  range("heads", p.heads, 1, kMostTokens);
  range("kv_heads", p.kv_heads, 1, p.heads);
  if (p.heads % p.kv_heads != 0) {
    invalid(kOp, "kv_heads", "divide heads, " + std::to_string(p.heads) + ",",
            "is " + std::to_string(p.kv_heads));
  }
  range("head_dim", p.head_dim, 1, 256);
  range("slice", p.slice, 1, kMostTokens);
  positive("link_bytes_per_s", p.link_bytes_per_s);
  positive("flops_per_s", p.flops_per_s);
  if (!(p.memory_bytes >= 0) || !std::isfinite(p.memory_bytes)) {
    invalid(kOp, "memory_bytes", "be at least 0 and finite",
            "is " + std::to_string(p.memory_bytes));
  }
  if (p.dtype != DType::kF32 && p.dtype != DType::kF16 && p.dtype != DType::kBF16) {
    invalid(kOp, "dtype", "be f32, f16 or bf16", std::string("is ") + name_of(p.dtype));
  }
  if (p.balance > Balance::kContiguous) {
    invalid(kOp, "balance", "be one of Balance",
            "is " + std::to_string(static_cast<int>(p.balance)));
  }
  // The largest figure: all tensors of a backward in fp32, and as much again of messages, on one rank.
  checked_product(kOp, p.batch, std::max(p.tokens, p.slice) + 1, p.heads, p.head_dim, 128);
}

// sum over t <= x of t between 0 and w
std::int64_t clamped_sum(std::int64_t x, std::int64_t w) {
  if (x <= 0) return 0;
  return x <= w ? x * (x + 1) / 2 : w * (w + 1) / 2 + (x - w) * w;
}
// Pairs (i, j) of queries and keys with j - i <= bound.
std::int64_t pairs_up_to(Range queries, Range keys, std::int64_t bound) {
  const std::int64_t first = queries.first + bound + 1 - keys.first;
  return clamped_sum(first + queries.count() - 1, keys.count()) -
         clamped_sum(first - 1, keys.count());
}

// A sequence over ranks, as far as a plan goes by it.
class Ranks {
 public:
  explicit Ranks(const RingPlanProblem& p) : shards_{p.tokens, p.ranks, p.balance, p.slice} {
    pattern_.queries = pattern_.keys = p.tokens;
    // Beyond the sequence a bound bounds nothing.
    const auto bound = [&](std::int64_t w) { return w < 0 || w > p.tokens ? p.tokens : w; };
    left_ = bound(p.window_left);
    right_ = p.causal ? 0 : bound(p.window_right);
    if (left_ < p.tokens) pattern_.left = left_;
    if (right_ < p.tokens) pattern_.right = right_;
    for (const Side side : {Side::kKeys, Side::kQueries}) {
      for (int r = 0; r < p.ranks; ++r) seen_[at(side)].push_back(seen(side, r));
    }
  }
  const Shards& shards() const { return shards_; }
  bool window() const { return left_ < shards_.tokens || (right_ > 0 && right_ < shards_.tokens); }
  std::int64_t longest() const {
    std::int64_t most = 0;
    for (int r = 0; r < shards_.ranks; ++r) most = std::max(most, shards_.rows_of(r));
    return most;
  }
  // Of one rank's rows of a side, those that go to another.
  std::int64_t rows(Side side, int from, int to) const {
    std::int64_t sum = 0;
    for (const Range chunk : shards_.of(from)) {
      for (const Range part : seen_[at(side)][static_cast<std::size_t>(to)]) {
        sum += std::max<std::int64_t>(
            0, std::min(part.end, chunk.end) - std::max(part.first, chunk.first));
      }
    }
    return sum;
  }
  // Of one rank's queries with another's keys.
  std::int64_t pairs(int queries, int keys) const {
    std::int64_t sum = 0;
    for (const Range q : shards_.of(queries)) {
      for (const Range k : shards_.of(keys)) {
        if (q.empty() || k.empty()) continue;
        sum += pairs_up_to(q, k, right_) - pairs_up_to(q, k, -left_ - 1);
      }
    }
    return sum;
  }

 private:
  static std::size_t at(Side side) { return static_cast<std::size_t>(side); }
  // What a rank needs of the whole sequence: two intervals without a row in common.
  std::array<Range, 2> seen(Side side, int rank) const {
    std::array<Range, 2> parts;
    for (std::size_t c = 0; c < 2; ++c) {
      const Range own = shards_.of(rank)[c];
      if (own.empty()) continue;
      Sweep s = pattern_.sweep(0, 0, 0);
      (side == Side::kKeys ? s.queries : s.keys) = attention::Line{own.first, 1, own.count()};
      parts[c] =
          side == Side::kKeys ? s.seen_by_any({0, own.count()}) : s.seeing_any({0, own.count()});
    }
    if (parts[0].empty() || parts[1].empty()) return parts;
    if (parts[1].first < parts[0].first) std::swap(parts[0], parts[1]);
    if (parts[1].first < parts[0].end) {
      parts = {Range{parts[0].first, std::max(parts[0].end, parts[1].end)}, Range{}};
    }
    return parts;
  }

  Shards shards_;
  attention::Dense pattern_;
  std::int64_t left_ = 0, right_ = 0;
  std::array<std::vector<std::array<Range, 2>>, 2> seen_;
};

// What travels, of a row of all heads.
struct Travel {
  Side side = Side::kKeys;
  double there = 0, back = 0;  // bytes
  double pair_flops = 0;
};

RingPassPlan pass_of(const RingPlanProblem& p, const Ranks& ranks, const Travel& travel) {
  RingPassPlan plan;
  const int P = p.ranks;
  const double link = p.link_bytes_per_s, speed = p.flops_per_s;
  plan.hops = P - 1;
  std::vector<char> waits(static_cast<std::size_t>(P), 0);
  double worst = 0;  // transfer over compute
  const auto add = [&](RingSpread& s, double value) {
    s.max = std::max(s.max, value);
    s.mean += value / P;
  };
  const auto pairs = [&](int own, int other) {
    return travel.side == Side::kKeys ? ranks.pairs(own, other) : ranks.pairs(other, own);
  };
  for (int r = 0; r < P; ++r) {
    double bytes = 0, received = 0;
    double flops = static_cast<double>(pairs(r, r)) * travel.pair_flops;
    double time = flops / speed;
    for (int d = 1; d < P; ++d) {
      const int to = (r + d) % P, from = (r + P - d) % P;
      const auto out = static_cast<double>(ranks.rows(travel.side, r, to)),
                 in = static_cast<double>(ranks.rows(travel.side, from, r));
      bytes += out * travel.there + in * travel.back;
      const double comes = in * travel.there + out * travel.back,
                   work = static_cast<double>(pairs(r, from)) * travel.pair_flops;
      received += comes;
      flops += work;
      plan.hop_bytes = std::max(plan.hop_bytes, comes);
      time += std::max(work / speed, comes / link);
      if (comes / link > work / speed) waits[static_cast<std::size_t>(d)] = 1;
      if (comes > 0) worst = std::max(worst, comes / link / (work / speed));
      // Of the last rows the sums come when nothing is left to compute.
      if (d == P - 1) {
        const auto last = static_cast<double>(ranks.shards().longest_slice());
        time += std::min(out, last) * travel.back / link;
      }
    }
    add(plan.bytes, bytes);
    add(plan.flops, flops);
    add(plan.compute_s, flops / speed);
    add(plan.transfer_s, received / link);
    plan.time_s = std::max(plan.time_s, time);
  }
  plan.hidden_hops = plan.hops - static_cast<int>(std::count(waits.begin(), waits.end(), 1));
  const double length = std::ceil(worst * static_cast<double>(p.tokens) / P);
  if (!ranks.window() && length < static_cast<double>(kMostTokens)) {
    plan.hides_from = static_cast<std::int64_t>(length);
  }
  return plan;
}

// Bytes of a rank that has so many rows of its own, of which it may get `slice` of others at once.
struct Sizes {
  explicit Sizes(const RingPlanProblem& p)
      : element(size_of(p.dtype)),
        queries(p.batch * p.heads),
        keys(p.batch * p.kv_heads),
        D(p.head_dim) {}
  std::int64_t element, queries, keys, D;

  std::int64_t forward_tensors(std::int64_t rows) const {
    return rows * ((2 * queries + 2 * keys) * D * element + queries * 4);
  }
  std::int64_t backward_tensors(std::int64_t rows) const {
    return rows * ((4 * queries + 4 * keys) * D * element + queries * 4);
  }
  std::int64_t state(std::int64_t rows) const { return rows * queries * (D * 4 + 8); }
  std::int64_t gradients(std::int64_t rows) const {
    return rows * ((queries + 2 * keys) * D * 4 + queries * 4);
  }
  std::int64_t keys_and_values(std::int64_t rows) const { return rows * keys * 2 * D * element; }
  std::int64_t key_sums(std::int64_t rows) const { return rows * keys * 2 * D * 4; }
  std::int64_t queries_and_more(std::int64_t rows) const {
    return rows * queries * (2 * D * element + 8);
  }
  std::int64_t query_sums(std::int64_t rows) const { return rows * queries * D * 4; }
};

}  // namespace

RingPlan plan_ring(const RingPlanProblem& p) {
  check(p);
  const Ranks ranks(p);
  const Sizes sizes(p);
  attention::Plan call;
  call.dtype = p.dtype;
  call.H = p.heads;
  call.Hkv = p.kv_heads;
  call.D = call.Dv = p.head_dim;
  const Side side = ring::cheaper_side(call);
  const bool queries = side == Side::kQueries;
  const auto each = static_cast<double>(p.batch * p.heads * p.head_dim);

  RingPlan plan;
  plan.queries_travel = queries;
  plan.forward = pass_of(
      p, ranks,
      {.there = static_cast<double>(sizes.keys_and_values(1)), .back = 0, .pair_flops = 4 * each});
  const std::int64_t there = queries ? sizes.queries_and_more(1) : sizes.keys_and_values(1),
                     back = queries ? sizes.query_sums(1) : sizes.key_sums(1);
  plan.backward = pass_of(p, ranks,
                          {.side = side,
                           .there = static_cast<double>(there),
                           .back = static_cast<double>(back),
                           .pair_flops = 10 * each});

  const std::int64_t rows = ranks.longest(),
                     slice = p.ranks > 1 ? ranks.shards().longest_slice() : 0;
  // A message that goes, one that comes, and rows as they are computed.
  plan.forward.memory = {sizes.forward_tensors(rows), sizes.state(rows),
                         3 * sizes.keys_and_values(slice)};
  plan.backward.memory = {sizes.backward_tensors(rows), sizes.gradients(rows),
                          3 * slice * (there + back)};

  const auto others = static_cast<double>(p.ranks - 1);
  GatherPlan& all = plan.gather_forward;
  all.bytes = others * static_cast<double>(sizes.keys_and_values(rows));
  all.time_s = all.bytes / p.link_bytes_per_s + plan.forward.compute_s.max;
  const std::int64_t copies = p.ranks > 1 ? sizes.keys_and_values(p.tokens) : 0;
  all.memory = {sizes.forward_tensors(rows), 0, copies};
  GatherPlan& back_too = plan.gather_backward;
  back_too.bytes = others * static_cast<double>(sizes.keys_and_values(rows) + sizes.key_sums(rows));
  back_too.time_s = back_too.bytes / p.link_bytes_per_s + plan.backward.compute_s.max;
  back_too.memory = {sizes.backward_tensors(rows), sizes.query_sums(rows),
                     copies + sizes.key_sums(p.tokens)};

  if (p.memory_bytes > 0) {
    const auto fit = [&](const RingMemory& a, const RingMemory& b) {
      return static_cast<double>(std::max(a.total(), b.total())) <= p.memory_bytes;
    };
    plan.fits = fit(plan.forward.memory, plan.backward.memory);
    plan.gather_fits = fit(all.memory, back_too.memory);
  }
  return plan;
}

}  // namespace annulus
