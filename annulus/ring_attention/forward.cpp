#include <algorithm>

#include "annulus/ring_attention/call.h"
#include "annulus/ring_attention/views.h"

namespace annulus::ring {

namespace {

std::array<Traveller, 2> keys_of(const Plan& plan, const CallSizes& sizes) {
  std::array<Traveller, 2> own;
  std::int64_t at = 0;
  for (std::size_t c = 0; c < 2; ++c) {
    const std::int64_t count = sizes.shards.of(sizes.rank)[c].count();
    own[c].rows = {narrow(plan.k, 1, at, count), narrow(plan.v, 1, at, count)};
    at += count;
  }
  return own;
}

}  // namespace

Forward::Forward(const Plan& plan, const CallSizes& sizes)
    : plan_(plan),
      hop_(largest_part(plan, sizes.shards.longest_chunk(), sizes.deterministic)),
      engine_(make_engine(hop_, false)),
      pass_(*engine_, with_pattern(hop_, sizes.pattern), sizes.shards, sizes.rank, Side::kKeys,
            sizes.deterministic ? cell_of(plan, Side::kKeys) : 0, keys_of(plan, sizes), {}) {
  std::int64_t at = 0;
  for (std::size_t c = 0; c < 2; ++c) {
    chunks_[c] = {sizes.shards.of(sizes.rank)[c], at, nullptr, nullptr};
    at += chunks_[c].rows.count();
  }
}

void Forward::lay_out(ScratchLayout& scratch) {
  engine_->lay_out(scratch);
  for (Chunk& c : chunks_) {
    const std::int64_t rows = plan_.B * plan_.H * c.rows.count();
    scratch(c.state, rows);
    scratch(c.acc, engine_->floats_of(rows, plan_.Dv));
  }
  pass_.lay_out(scratch);
}

void Forward::use(const Chunk& chunk) {
  const std::int64_t count = chunk.rows.count();
  hop_.Tq = count;
  hop_.q = narrow(plan_.q, 1, chunk.at, count);
  hop_.o = narrow(plan_.o, 1, chunk.at, count);
  if (plan_.lse.defined()) hop_.lse = narrow(plan_.lse, 2, chunk.at, count);
  hop_.part->first_query = chunk.rows.first;
  hop_.part->state = chunk.state;
  hop_.part->acc = chunk.acc;
}

void Forward::run(Communicator& group, Context& context, std::optional<int> layer) {
  engine_->open(context, group);
  for (const Chunk& c : chunks_) {
    use(c);
    engine_->begin();
  }
  const int first = layer.value_or(0), end = layer ? first + 1 : plan_.layers;
  for (int i = first; i < end; ++i) {
    hop_.part->layer = i;
    pass_.run(i, "ring_attention", group,
              [&](Range rows, std::span<const TensorView> tensors, std::span<float* const>) {
                hop_.k = tensors[0];
                hop_.v = tensors[1];
                hop_.Tk = rows.count();
                hop_.part->first_key = rows.first;
                for (const Chunk& c : chunks_) {
                  use(c);
                  engine_->forward();
                }
              });
  }
  for (const Chunk& c : chunks_) {
    use(c);
    engine_->end();
  }
  engine_->close();
}

}  // namespace annulus::ring
