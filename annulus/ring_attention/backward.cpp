#include <algorithm>

#include "annulus/ring_attention/call.h"
#include "annulus/ring_attention/views.h"

namespace annulus::ring {

Side cheaper_side(const Plan& plan) {
  const std::int64_t element = size_of(plan.dtype), both = plan.D + plan.Dv;
  const std::int64_t keys = plan.Hkv * both * (element + 4);
  const std::int64_t queries = plan.H * (both * element + plan.D * 4 + 8);
  return queries < keys ? Side::kQueries : Side::kKeys;
}

Backward::Backward(const Plan& plan, const CallSizes& sizes)
    : plan_(plan),
      hop_(largest_part(plan,
                        std::max(sizes.shards.longest_chunk(),
                                 sizes.shards.longest_slice() + cell_of(plan, Side::kKeys)),
                        sizes.deterministic)),
      sizes_(sizes),
      engine_(make_engine(hop_, true)) {
  // A query for scratch has no more than q, k and v; what travels has its size all the same.
  const std::int64_t rows[] = {plan.B, plan.Tq, plan.H, plan.Dv},
                     lanes[] = {plan.B, plan.H, plan.Tq};
  if (!plan_.do_.defined()) plan_.do_ = contiguous(nullptr, plan.dtype, rows);
  if (!plan_.lse.defined()) plan_.lse = contiguous(nullptr, DType::kF32, lanes);
  std::int64_t at = 0;
  for (std::size_t c = 0; c < 2; ++c) {
    chunks_[c] = {sizes.shards.of(sizes.rank)[c], at, nullptr, nullptr, nullptr, nullptr};
    at += chunks_[c].rows.count();
  }
  if (plan.stop_alpha_gradient) {
    Plan layer = plan;
    layer.lse = {};  // is read here, and not written
    layer_.emplace(layer, sizes);
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
                     as_rows(contiguous(chunk.delta, DType::kF32, shape, plan_.device))};
      own[c].sums = {chunk.dq};
    }
    if (sizes_.deterministic) own[c].sums.clear();
  }
  return own;
}

void Backward::lay_out(ScratchLayout& scratch) {
  engine_->lay_out(scratch);
  for (Chunk& c : chunks_) {
    const std::int64_t count = c.rows.count(), queries = plan_.B * plan_.H * count,
                       keys = plan_.B * plan_.Hkv * count;
    scratch(c.delta, queries);
    scratch(c.dq, engine_->floats_of(queries, plan_.D));
    scratch(c.dk, engine_->floats_of(keys, plan_.D));
    scratch(c.dv, engine_->floats_of(keys, plan_.Dv));
  }
  scratch(flag_, 1);
  const bool keys = sizes_.deterministic || cheaper_side(plan_) == Side::kKeys;
  const bool queries = sizes_.deterministic || !keys;
  using Columns = std::vector<std::int64_t>;
  const auto start = [&](std::optional<Pass>& pass, Side side, const Columns& columns) {
    const bool fixed = sizes_.deterministic;
    pass.emplace(*engine_, with_pattern(hop_, sizes_.pattern), sizes_.shards, sizes_.rank, side,
                 fixed ? cell_of(plan_, side) : 0, travellers(side), fixed ? Columns{} : columns);
    pass->lay_out(scratch);
  };
  if (keys) start(keys_, Side::kKeys, {plan_.D, plan_.Dv});
  if (queries) {
    start(queries_, Side::kQueries, {plan_.D});
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
void Backward::keys_come(int layer, Communicator& group) {
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
                 engine_->backward();
               }
             });
}

// dk and dv of this rank's keys; and of queries that come what goes back to their rank.
void Backward::queries_come(int layer, Communicator& group) {
  queries_->run(layer, "ring_backward", group,
                [&](Range rows, std::span<const TensorView> tensors, std::span<float* const> sums) {
                  hop_.q = tensors[0];
                  hop_.do_ = tensors[1];
                  hop_.lse = as_lanes(tensors[2]);
                  hop_.Tq = rows.count();
                  hop_.part->first_query = rows.first;
                  // The engine's delta has no strides.
                  const TensorView& delta = tensors[3];
                  hop_.part->delta = static_cast<float*>(delta.data);
                  if (delta.stride[2] != rows.count()) {
                    engine_->copy_lanes(delta, delta_here_);
                    hop_.part->delta = delta_here_;
                  }
                  hop_.part->dq = sums.empty() ? nullptr : sums[0];
                  for (const Chunk& c : chunks_) {
                    use_keys(c);
                    engine_->backward();
                  }
                });
}

void Backward::run(Communicator& group, Context& context) {
  const TensorView merged = plan_.o;
  const std::int64_t shape[] = {plan_.B, plan_.Tq, plan_.H, plan_.Dv};
  engine_->open(context, group);
  hop_.part->flag = flag_;
  for (const Chunk& c : chunks_) {
    const std::int64_t queries = plan_.B * plan_.H * c.rows.count(),
                       keys = plan_.B * plan_.Hkv * c.rows.count();
    engine_->clear(c.dq, engine_->floats_of(queries, plan_.D));
    engine_->clear(c.dk, engine_->floats_of(keys, plan_.D));
    engine_->clear(c.dv, engine_->floats_of(keys, plan_.Dv));
  }
  for (int i = 0; i < plan_.layers; ++i) {
    if (layer_) {
      plan_.o = contiguous(layer_o_, plan_.dtype, shape, plan_.device);
      layer_->set_output(plan_.o);
      layer_->run(group, context, i);
    }
    for (const Chunk& c : chunks_) {
      if (i > 0 && !layer_) break;
      use_queries(c);
      engine_->fill_delta();
    }
    plan_.o = merged;
    hop_.part->layer = i;
    if (keys_) keys_come(i, group);
    if (queries_) queries_come(i, group);
  }
  for (const Chunk& c : chunks_) {
    const std::int64_t count = c.rows.count();
    engine_->store(c.dq, narrow(plan_.dq, 1, c.at, count));
    engine_->store(c.dk, narrow(plan_.dk, 1, c.at, count));
    engine_->store(c.dv, narrow(plan_.dv, 1, c.at, count));
  }
  engine_->close();
}

}  // namespace annulus::ring
