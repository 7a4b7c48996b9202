#include <algorithm>
#include <cstring>

#include "annulus/cpu/rows.h"
#include "annulus/ring_attention/cpu/ring.h"
#include "annulus/ring_attention/views.h"

namespace annulus::ring::cpu {

Side cheaper_side(const Plan& plan) {
  const std::int64_t element = size_of(plan.dtype), both = plan.D + plan.Dv;
  const std::int64_t keys = plan.Hkv * both * (element + 4);
  const std::int64_t queries = plan.H * (both * element + plan.D * 4 + 8);
  return queries < keys ? Side::kQueries : Side::kKeys;
}

Backward::Backward(const Plan& plan, const Shards& shards, int rank, bool deterministic)
    : plan_(plan),
      hop_(largest_part(
          plan,
          std::max(shards.longest_chunk(), shards.longest_slice() + attention::cpu::kForwardKeys),
          deterministic)),
      deterministic_(deterministic),
      engine_(hop_),
      shards_(shards),
      rank_(rank) {
  // A query for scratch has no more than q, k and v; what travels has its size all the same.
  const std::int64_t rows[] = {plan.B, plan.Tq, plan.H, plan.Dv},
                     lanes[] = {plan.B, plan.H, plan.Tq};
  if (!plan_.do_.defined()) plan_.do_ = contiguous(nullptr, plan.dtype, rows);
  if (!plan_.lse.defined()) plan_.lse = contiguous(nullptr, DType::kF32, lanes);
  std::int64_t at = 0;
  for (std::size_t c = 0; c < 2; ++c) {
    chunks_[c] = {shards.of(rank)[c], at, nullptr, nullptr, nullptr, nullptr};
    at += chunks_[c].rows.count();
  }
  if (plan.stop_alpha_gradient) {
    Plan layer = plan;
    layer.lse = {};  // is read here, and not written
    layer_.emplace(layer, shards, rank, deterministic);
  }
}

// Of this rank: what travels, and what comes back to it.
std::array<Traveller, 2> Backward::travellers(Side side) const {
  std::array<Traveller, 2> own;
  for (std::size_t c = 0; c < 2; ++c) {
    const Chunk& chunk = chunks_[c];
    const std::int64_t count = chunk.rows.count();
    if (side == Side::kKeys) {
      own[c].rows = {narrow(plan_.k, 1, chunk.at, count), narrow(plan_.v, 1, chunk.at, count)};
      own[c].sums = {chunk.dk, chunk.dv};
    } else {
      const std::int64_t shape[] = {plan_.B, plan_.H, count};
      own[c].rows = {narrow(plan_.q, 1, chunk.at, count), narrow(plan_.do_, 1, chunk.at, count),
                     as_rows(narrow(plan_.lse, 2, chunk.at, count)),
                     as_rows(contiguous(chunk.delta, DType::kF32, shape))};
      own[c].sums = {chunk.dq};
    }
    if (deterministic_) own[c].sums.clear();
  }
  return own;
}

void Backward::lay_out(ScratchLayout& scratch) {
  engine_.lay_out(scratch);
  for (Chunk& c : chunks_) {
    const std::int64_t count = c.rows.count(), queries = plan_.B * plan_.H * count,
                       keys = plan_.B * plan_.Hkv * count;
    scratch(c.delta, queries);
    scratch(c.dq, queries * plan_.D);
    scratch(c.dk, keys * plan_.D);
    scratch(c.dv, keys * plan_.Dv);
  }
  const bool keys = deterministic_ || cheaper_side(plan_) == Side::kKeys;
  const bool queries = deterministic_ || !keys;
  using Columns = std::vector<std::int64_t>;
  if (keys) {
    keys_.emplace(hop_, shards_, rank_, Side::kKeys,
                  deterministic_ ? attention::cpu::kForwardKeys : 0, travellers(Side::kKeys),
                  deterministic_ ? Columns{} : Columns{plan_.D, plan_.Dv});
    keys_->lay_out(scratch);
  }
  if (queries) {
    queries_.emplace(hop_, shards_, rank_, Side::kQueries,
                     deterministic_ ? attention::cpu::kQueries : 0, travellers(Side::kQueries),
                     deterministic_ ? Columns{} : Columns{plan_.D});
    queries_->lay_out(scratch);
    scratch(delta_here_, plan_.B * plan_.H * queries_->most_rows());
  }
  if (layer_) {
    layer_->lay_out(scratch);
    scratch(layer_o_, plan_.B * plan_.H * plan_.Tq * plan_.Dv * size_of(plan_.dtype));
  }
}

void Backward::use_queries(const Chunk& chunk) {
  const std::int64_t count = chunk.rows.count();
  hop_.Tq = count;
  hop_.q = narrow(plan_.q, 1, chunk.at, count);
  hop_.o = narrow(plan_.o, 1, chunk.at, count);
  hop_.do_ = narrow(plan_.do_, 1, chunk.at, count);
  hop_.lse = narrow(plan_.lse, 2, chunk.at, count);
  if (plan_.dlse.defined()) hop_.dlse = narrow(plan_.dlse, 2, chunk.at, count);
  hop_.part->first_query = chunk.rows.first;
  hop_.part->delta = chunk.delta;
}
void Backward::use_keys(const Chunk& chunk) {
  const std::int64_t count = chunk.rows.count();
  hop_.Tk = count;
  hop_.k = narrow(plan_.k, 1, chunk.at, count);
  hop_.v = narrow(plan_.v, 1, chunk.at, count);
  hop_.part->first_key = chunk.rows.first;
  hop_.part->dk = chunk.dk;
  hop_.part->dv = chunk.dv;
}

// dq of this rank's queries; and of keys that come what goes back to their rank.
void Backward::keys_come(int layer, Communicator& group, Context& context) {
  keys_->run(layer, "ring_backward", group,
             [&](Range rows, std::span<const TensorView> tensors, std::span<float* const> sums) {
               hop_.k = tensors[0];
               hop_.v = tensors[1];
               hop_.Tk = rows.count();
               hop_.part->first_key = rows.first;
               hop_.part->dk = sums.empty() ? nullptr : sums[0];
               hop_.part->dv = sums.empty() ? nullptr : sums[1];
               for (const Chunk& c : chunks_) {
                 use_queries(c);
                 hop_.part->dq = c.dq;
                 engine_.run(context);
               }
             });
}

// dk and dv of this rank's keys; and of queries that come what goes back to their rank.
void Backward::queries_come(int layer, Communicator& group, Context& context) {
  queries_->run(layer, "ring_backward", group,
                [&](Range rows, std::span<const TensorView> tensors, std::span<float* const> sums) {
                  hop_.q = tensors[0];
                  hop_.do_ = tensors[1];
                  hop_.lse = as_lanes(tensors[2]);
                  hop_.Tq = rows.count();
                  hop_.part->first_query = rows.first;
                  // The engine's delta has no strides.
                  const TensorView& delta = tensors[3];
                  const auto* from = static_cast<float*>(delta.data);
                  hop_.part->delta = static_cast<float*>(delta.data);
                  if (delta.stride[2] != rows.count()) {
                    for (std::int64_t b = 0; b < plan_.B; ++b) {
                      for (std::int64_t h = 0; h < plan_.H; ++h) {
                        std::copy_n(from + b * delta.stride[0] + h * delta.stride[2], rows.count(),
                                    delta_here_ + (b * plan_.H + h) * rows.count());
                      }
                    }
                    hop_.part->delta = delta_here_;
                  }
                  hop_.part->dq = sums.empty() ? nullptr : sums[0];
                  for (const Chunk& c : chunks_) {
                    use_keys(c);
                    engine_.run(context);
                  }
                });
}

void Backward::store(const float* sums, const Chunk& chunk, const TensorView& to) const {
  const std::int64_t count = chunk.rows.count(), heads = to.shape[2], columns = to.shape[3];
  for (std::int64_t b = 0; b < plan_.B; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t t = 0; t < count; ++t) {
        annulus::cpu::rows<float>().store(sums + ((b * heads + h) * count + t) * columns, columns,
                                          annulus::cpu::row_at(to, b, chunk.at + t, h));
      }
    }
  }
}

void Backward::run(Communicator& group, Context& context) {
  const TensorView merged = plan_.o;
  const std::int64_t shape[] = {plan_.B, plan_.Tq, plan_.H, plan_.Dv};
  for (const Chunk& c : chunks_) {
    const std::int64_t count = c.rows.count();
    std::fill_n(c.dq, plan_.B * plan_.H * count * plan_.D, 0.0f);
    std::fill_n(c.dk, plan_.B * plan_.Hkv * count * plan_.D, 0.0f);
    std::fill_n(c.dv, plan_.B * plan_.Hkv * count * plan_.Dv, 0.0f);
  }
  for (int i = 0; i < plan_.layers; ++i) {
    if (layer_) {
      plan_.o = contiguous(layer_o_, plan_.dtype, shape);
      layer_->set_output(plan_.o);
      layer_->run(group, context, i);
    }
    for (const Chunk& c : chunks_) {
      if (i > 0 && !layer_) break;
      use_queries(c);
      engine_.fill_delta(context);
    }
    plan_.o = merged;
    hop_.part->layer = i;
    if (keys_) keys_come(i, group, context);
    if (queries_) queries_come(i, group, context);
  }
  for (const Chunk& c : chunks_) {
    store(c.dq, c, plan_.dq);
    store(c.dk, c, plan_.dk);
    store(c.dv, c, plan_.dv);
  }
}

}  // namespace annulus::ring::cpu
