#include <algorithm>
#include <cmath>

#include "annulus/ring_attention/cpu/ring.h"
#include "annulus/ring_attention/views.h"

namespace annulus::ring::cpu {

namespace {

std::array<Traveller, 2> keys_of(const Plan& plan, const Shards& shards, int rank) {
  std::array<Traveller, 2> own;
  std::int64_t at = 0;
  for (std::size_t c = 0; c < 2; ++c) {
    const std::int64_t count = shards.of(rank)[c].count();
    own[c].rows = {narrow(plan.k, 1, at, count), narrow(plan.v, 1, at, count)};
    at += count;
  }
  return own;
}

}  // namespace

Forward::Forward(const Plan& plan, const Shards& shards, int rank, bool deterministic)
    : plan_(plan),
      hop_(largest_part(plan, shards.longest_chunk(), deterministic)),
      by_layer_(deterministic && plan.layers > 1),
      engine_(hop_),
      pass_(hop_, shards, rank, Side::kKeys, deterministic ? attention::cpu::kForwardKeys : 0,
            keys_of(plan, shards, rank), {}) {
  std::int64_t at = 0;
  for (std::size_t c = 0; c < 2; ++c) {
    chunks_[c] = {shards.of(rank)[c], at, nullptr, nullptr, nullptr, nullptr};
    at += chunks_[c].rows.count();
  }
}

void Forward::lay_out(ScratchLayout& scratch) {
  engine_.lay_out(scratch);
  for (Chunk& c : chunks_) {
    const std::int64_t rows = plan_.B * plan_.H * c.rows.count();
    scratch(c.state, rows);
    scratch(c.acc, rows * plan_.Dv);
    scratch(c.one, by_layer_ ? rows : 0);
    scratch(c.one_acc, by_layer_ ? rows * plan_.Dv : 0);
  }
  pass_.lay_out(scratch);
}

void Forward::use(const Chunk& chunk, bool one) {
  const std::int64_t count = chunk.rows.count();
  hop_.Tq = count;
  hop_.q = narrow(plan_.q, 1, chunk.at, count);
  hop_.o = narrow(plan_.o, 1, chunk.at, count);
  if (plan_.lse.defined()) hop_.lse = narrow(plan_.lse, 2, chunk.at, count);
  hop_.part->first_query = chunk.rows.first;
  hop_.part->state = one ? chunk.one : chunk.state;
  hop_.part->acc = one ? chunk.one_acc : chunk.acc;
}

// m counts powers of two.
void Forward::merge_layer(const Chunk& chunk) const {
  const std::int64_t rows = plan_.B * plan_.H * chunk.rows.count();
  for (std::int64_t r = 0; r < rows; ++r) {
    RowState& all = chunk.state[r];
    const RowState& one = chunk.one[r];
    if (one.m == attention::kNoScore) continue;
    const float m = attention::larger_score(all.m, one.m);
    const float a = all.m == attention::kNoScore ? 0.0f : std::exp2(all.m - m),
                b = std::exp2(one.m - m);
    float* sums = chunk.acc + r * plan_.Dv;
    const float* more = chunk.one_acc + r * plan_.Dv;
    for (std::int64_t d = 0; d < plan_.Dv; ++d) sums[d] = sums[d] * a + more[d] * b;
    all = {m, all.l * a + one.l * b};
  }
}

void Forward::run(Communicator& group, Context& context, std::optional<int> layer) {
  for (const Chunk& c : chunks_) {
    use(c, false);
    engine_.begin();
  }
  const int first = layer.value_or(0), end = layer ? first + 1 : plan_.layers;
  const bool alone = by_layer_ && !layer;
  for (int i = first; i < end; ++i) {
    for (const Chunk& c : chunks_) {
      if (!alone) break;
      use(c, true);
      engine_.begin();
    }
    hop_.part->layer = i;
    pass_.run(i, "ring_attention", group,
              [&](Range rows, std::span<const TensorView> tensors, std::span<float* const>) {
                hop_.k = tensors[0];
                hop_.v = tensors[1];
                hop_.Tk = rows.count();
                hop_.part->first_key = rows.first;
                for (const Chunk& c : chunks_) {
                  use(c, alone);
                  engine_.run(context);
                }
              });
    for (const Chunk& c : chunks_) {
      if (alone) merge_layer(c);
    }
  }
  for (const Chunk& c : chunks_) {
    use(c, false);
    engine_.end(context);
  }
}

}  // namespace annulus::ring::cpu
