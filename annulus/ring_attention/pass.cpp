#include "annulus/ring_attention/pass.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "annulus/core/checked.h"
#include "annulus/core/dtype.h"

namespace annulus::ring {

namespace {

Range slice(const Shards& shards, Range chunk, std::int64_t i) {
  return {std::min(chunk.end, chunk.first + i * shards.slice),
          std::min(chunk.end, chunk.first + (i + 1) * shards.slice)};
}

}  // namespace

std::vector<Step> steps_of(const Shards& shards, int rank, bool ascending) {
  const int P = shards.ranks;
  const std::int64_t slices = shards.slices_of_chunk();
  const int halves = shards.chunks() / P;
  std::vector<Step> steps;
  if (!ascending) {
    for (const Range chunk : shards.of(rank)) {
      Step step;
      step.own = true;
      step.receive = chunk;
      steps.push_back(step);
    }
    for (int d = 1; d < P; ++d) {
      const int to = (rank + d) % P, from = (rank + P - d) % P;
      // Of a causal zigzag one half may have all the work here and the other there: in turns, no rank gets far ahead.
      for (std::int64_t i = 0; i < slices; ++i) {
        for (int half = 0; half < halves; ++half) {
          const auto at = static_cast<std::size_t>(half);
          steps.push_back({to, from, false, slice(shards, shards.of(rank)[at], i),
                           slice(shards, shards.of(from)[at], i)});
        }
      }
    }
    return steps;
  }
  for (int time = 0; time < shards.chunks() + P - 1; ++time) {
    for (int half = 0; half < halves; ++half) {
      for (std::int64_t i = 0; i < slices; ++i) {
        Step step;
        const int mine = half == 0 ? rank : 2 * P - 1 - rank;
        const int to = time - mine, c = time - rank;
        if (to >= 0 && to < P && to != rank) {
          step.to = to;
          step.send = slice(shards, shards.chunk(mine), i);
        }
        if (c >= half * P && c < (half + 1) * P) {
          step.own = shards.owner(c) == rank;
          if (!step.own) step.from = shards.owner(c);
          step.receive = slice(shards, shards.chunk(c), i);
        }
        steps.push_back(step);
      }
    }
  }
  return steps;
}

Pass::Pass(Engine& engine, const Plan& plan, const Shards& shards, int rank, Side side,
           std::int64_t cell, std::array<Traveller, 2> own, std::vector<std::int64_t> sum_columns)
    : engine_(engine),
      plan_(plan),
      shards_(shards),
      rank_(rank),
      side_(side),
      cell_(cell),
      own_(std::move(own)),
      sum_columns_(std::move(sum_columns)),
      most_(shards.longest_slice()) {}

std::int64_t Pass::most_rows() const { return most_ + cell_; }

std::int64_t Pass::row_bytes(std::size_t i) const {
  const TensorView& x = own_[0].rows[i];
  return x.shape[3] * size_of(x.dtype);
}

void Pass::lay_out(ScratchLayout& scratch) {
  const std::size_t tensors = own_[0].rows.size();
  sending_.assign(tensors, {});
  coming_ = sending_;
  here_.assign(tensors, nullptr);
  sums_.assign(sum_columns_.size(), nullptr);
  sums_sending_.assign(sum_columns_.size(), {});
  sums_coming_ = sums_sending_;
  if (shards_.ranks == 1 && cell_ == 0) return;
  const std::int64_t rows = plan_.B * heads() * most_;
  for (std::size_t i = 0; i < tensors; ++i) {
    engine_.lay_out(scratch, sending_[i], rows * row_bytes(i));
    engine_.lay_out(scratch, coming_[i], rows * row_bytes(i));
    scratch(here_[i], plan_.B * heads() * most_rows() * row_bytes(i));
  }
  for (std::size_t i = 0; i < sum_columns_.size(); ++i) {
    constexpr std::int64_t kFloat = sizeof(float);
    scratch(sums_[i], engine_.floats_of(rows, sum_columns_[i]));
    engine_.lay_out(scratch, sums_sending_[i], rows * sum_columns_[i] * kFloat);
    engine_.lay_out(scratch, sums_coming_[i], rows * sum_columns_[i] * kFloat);
  }
}

int Pass::chunk_with(Range piece) const {
  const Range first = shards_.of(rank_)[0];
  return piece.first >= first.first && piece.end <= first.end ? 0 : 1;
}

void Pass::pack(const Rows& rows, Range piece, std::span<const Message> to, Origin origin) {
  const auto chunk = static_cast<std::size_t>(chunk_with(piece));
  engine_.pack(own_[chunk].rows, shards_.of(rank_)[chunk].first, rows, to, origin);
}

// Rows of the sequence, of those in here_.
std::vector<TensorView> Pass::here(Range rows) const {
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < here_.size(); ++i) {
    TensorView v = own_[0].rows[i];
    const std::int64_t columns = v.shape[3], capacity = most_rows();
    v.data = here_[i] + (rows.first - have_.first) * row_bytes(i);
    v.shape[0] = plan_.B;
    v.shape[1] = rows.count();
    v.shape[2] = heads();
    v.stride[0] = heads() * capacity * columns;
    v.stride[1] = columns;
    v.stride[2] = capacity * columns;
    v.stride[3] = 1;
    views.push_back(v);
  }
  return views;
}

// To their places in here_, behind the rows that it has. Rows that do not come are zeros: nobody sees them, but what is beside them
// in a tile must not depend on what was there before.
void Pass::unpack(const Rows& rows, Range piece, bool stayed) {
  if (have_.empty()) have_ = {piece.first, piece.first};
  engine_.unpack(coming_, rows, piece, here(piece), piece.first, stayed);
  engine_.settle();
  have_.end = piece.end;
}

std::unique_ptr<Transfer> Pass::begin(const Step& step, int hop, std::string_view op,
                                      Communicator& group) {
  going_rows_ = coming_rows_ = {};
  Hop at{.op = op, .hop = hop, .to = Hop::kNobody, .from = Hop::kNobody};
  if (step.to != Hop::kNobody) {
    going_rows_ = needed(plan_, layer_, side_, shards_.of(step.to), step.send, cell_);
    if (count_of(going_rows_) > 0) at.to = step.to;
  }
  if (step.from != Hop::kNobody || (step.own && cell_ > 0)) {
    coming_rows_ = needed(plan_, layer_, side_, shards_.of(rank_), step.receive, cell_);
    if (!step.own && count_of(coming_rows_) > 0) at.from = step.from;
  }
  if (at.to != Hop::kNobody) {
    pack(going_rows_, step.send, sending_, Origin::kInputs);
    engine_.settle();
  }
  std::vector<Part> parts;
  for (std::size_t i = 0; i < sending_.size(); ++i) {
    const auto bytes = [&](const Rows& rows, int peer) {
      return peer == Hop::kNobody
                 ? std::size_t{0}
                 : static_cast<std::size_t>(plan_.B * count_of(rows) * row_bytes(i));
    };
    parts.push_back({engine_.memory(sending_[i]), bytes(going_rows_, at.to),
                     engine_.memory(coming_[i]), bytes(coming_rows_, at.from)});
  }
  auto transfer = group.shift(at, parts);
  if (step.own && cell_ > 0 && count_of(coming_rows_) > 0) {
    pack(coming_rows_, step.receive, coming_, Origin::kStay);
  }
  return transfer;
}

void Pass::compute_rows(Range rows, const Compute& compute) {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    engine_.clear(sums_[i], engine_.floats_of(plan_.B * heads() * rows.count(), sum_columns_[i]));
  }
  compute(rows, here(rows), sums_);
}

// What is left of rows whose neighbours are not needed.
void Pass::flush(const Compute& compute) {
  if (!have_.empty()) compute_rows(have_, compute);
  have_ = {};
}

// Computes the rows that have come.
void Pass::take(const Step& step, const Compute& compute) {
  if (cell_ == 0) {
    if (step.own) {
      const auto chunk = static_cast<std::size_t>(chunk_with(step.receive));
      if (!step.receive.empty()) compute(step.receive, own_[chunk].rows, own_[chunk].sums);
      return;
    }
    flush(compute);
    return;
  }
  if (have_.empty()) return;
  const Range whole{have_.first,
                    have_.end == shards_.tokens ? have_.end : have_.end / cell_ * cell_};
  if (whole.empty()) return;
  compute_rows(whole, compute);
  const Range rest{whole.end, have_.end};
  if (!rest.empty()) {
    for (const TensorView& x : here(have_)) engine_.move_up(x, whole.count(), rest.count());
  }
  have_ = rest;
}

void Pass::send_back(const Step& step, int hop, Communicator& group) {
  accept();
  Hop at{.op = "ring_gradients", .hop = hop, .to = Hop::kNobody, .from = Hop::kNobody};
  if (count_of(here_rows_) > 0) at.to = step.from;
  if (count_of(sent_rows_) > 0) at.from = step.to;
  std::vector<Part> parts;
  std::vector<TensorView> from;
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    from.push_back(engine_.sums(sums_[i], step.receive.count(), heads(), sum_columns_[i]));
    const auto bytes = [&](const Rows& of) {
      return static_cast<std::size_t>(plan_.B * count_of(of) * sum_columns_[i]) * sizeof(float);
    };
    parts.push_back({engine_.memory(sums_sending_[i]), bytes(here_rows_),
                     engine_.memory(sums_coming_[i]), bytes(sent_rows_)});
  }
  if (at.to != Hop::kNobody) {
    engine_.pack(from, step.receive.first, here_rows_, sums_sending_, Origin::kSums);
    engine_.settle();
  }
  returning_.transfer = group.shift(at, parts);
  returning_.rows = std::move(sent_rows_);
  returning_.piece = step.send;
}

// Adds what has come back to the sums of this rank's own rows.
void Pass::accept() {
  if (!returning_.transfer) return;
  returning_.transfer->receive();
  returning_.transfer.reset();
  if (count_of(returning_.rows) == 0) return;
  const auto chunk = static_cast<std::size_t>(chunk_with(returning_.piece));
  const Range own = shards_.of(rank_)[chunk];
  std::vector<TensorView> to;
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    to.push_back(engine_.sums(own_[chunk].sums[i], own.count(), heads(), sum_columns_[i]));
  }
  engine_.add(sums_coming_, returning_.rows, to, own.first);
  engine_.settle();
}

void Pass::run(int layer, std::string_view op, Communicator& group, const Compute& compute) {
  layer_ = layer;
  have_ = {};
  engine_.start_pass();
  const std::vector<Step> steps = steps_of(shards_, rank_, cell_ > 0);
  const auto hop = [](std::size_t i) { return static_cast<int>(i); };
  // Slices that a rank may be ahead of those it sends to.
  constexpr std::size_t kAhead = 3;
  std::deque<std::unique_ptr<Transfer>> transfers;
  if (!steps.empty()) transfers.push_back(begin(steps[0], 0, op, group));
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    transfers.back()->receive();
    if (transfers.size() > kAhead) {
      transfers.front()->wait();
      transfers.pop_front();
    }
    here_rows_ = std::move(coming_rows_);
    sent_rows_ = std::move(going_rows_);
    // Rows behind which some are missing are not continued, but where a cell would be divided: there nobody sees what is missing,
    // and zeros stand for it.
    const bool next = !have_.empty() && have_.end == step.receive.first;
    const bool came = count_of(here_rows_) > 0,
               within_cell = cell_ > 0 && next && have_.end % cell_ != 0;
    if (!step.receive.empty() && !(came ? next : within_cell)) flush(compute);
    if (came || (within_cell && !step.receive.empty())) {
      unpack(here_rows_, step.receive, step.own);
    }
    if (i + 1 < steps.size()) transfers.push_back(begin(steps[i + 1], hop(i + 1), op, group));
    take(step, compute);
    if (returns()) send_back(step, hop(i), group);
  }
  flush(compute);
  accept();
  for (const auto& transfer : transfers) transfer->wait();
}

}  // namespace annulus::ring
