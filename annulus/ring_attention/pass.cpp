#include "annulus/ring_attention/pass.h"

#include <algorithm>
#include <cstring>
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

// f(head, line, where the line begins among the rows of the message)
template <class F>
void for_each_line(const Rows& rows, F&& f) {
  std::int64_t at = 0;
  for (std::size_t h = 0; h < rows.size(); ++h) {
    for (const Line& line : rows[h]) {
      f(static_cast<std::int64_t>(h), line, at);
      at += line.count;
    }
  }
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

Pass::Pass(const Plan& plan, const Shards& shards, int rank, Side side, std::int64_t cell,
           std::array<Traveller, 2> own, std::vector<std::int64_t> sum_columns)
    : plan_(plan),
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
  sending_.assign(tensors, nullptr);
  coming_ = here_ = sending_;
  sums_.assign(sum_columns_.size(), nullptr);
  sums_sending_ = sums_coming_ = sums_;
  if (shards_.ranks == 1 && cell_ == 0) return;
  const std::int64_t rows = plan_.B * heads() * most_;
  for (std::size_t i = 0; i < tensors; ++i) {
    scratch(sending_[i], rows * row_bytes(i));
    scratch(coming_[i], rows * row_bytes(i));
    scratch(here_[i], plan_.B * heads() * most_rows() * row_bytes(i));
  }
  for (std::size_t i = 0; i < sum_columns_.size(); ++i) {
    scratch(sums_[i], rows * sum_columns_[i]);
    scratch(sums_sending_[i], rows * sum_columns_[i]);
    scratch(sums_coming_[i], rows * sum_columns_[i]);
  }
}

int Pass::chunk_with(Range piece) const {
  const Range first = shards_.of(rank_)[0];
  return piece.first >= first.first && piece.end <= first.end ? 0 : 1;
}

// A message has rows (b, head, row) one behind the other.
void Pass::pack(const Rows& rows, Range piece, std::span<std::byte* const> to) const {
  const auto chunk = static_cast<std::size_t>(chunk_with(piece));
  const std::int64_t first = shards_.of(rank_)[chunk].first, all = count_of(rows);
  for (std::size_t i = 0; i < to.size(); ++i) {
    const TensorView& x = own_[chunk].rows[i];
    const std::int64_t element = size_of(x.dtype), bytes = row_bytes(i);
    const auto* data = static_cast<const std::byte*>(x.data);
    for (std::int64_t b = 0; b < plan_.B; ++b) {
      for_each_line(rows, [&](std::int64_t h, const Line& line, std::int64_t at) {
        std::byte* out = to[i] + (b * all + at) * bytes;
        for (std::int64_t r = 0; r < line.count; ++r, out += bytes) {
          const std::byte* row =
              data +
              (b * x.stride[0] + (line.at(r) - first) * x.stride[1] + h * x.stride[2]) * element;
          if (x.stride[3] == 1 || x.shape[3] == 1) {
            std::memcpy(out, row, static_cast<std::size_t>(bytes));
            continue;
          }
          for (std::int64_t c = 0; c < x.shape[3]; ++c) {
            std::memcpy(out + c * element, row + c * x.stride[3] * element,
                        static_cast<std::size_t>(element));
          }
        }
      });
    }
  }
}

// To their places in here_, behind the rows that it has. Rows that do not come are zeros: nobody sees them, but what is beside them
// in a tile must not depend on what was there before.
void Pass::unpack(const Rows& rows, Range piece, std::span<std::byte* const> from) {
  if (have_.empty()) have_ = {piece.first, piece.first};
  const std::int64_t all = count_of(rows), capacity = most_rows();
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::int64_t bytes = row_bytes(i);
    for (std::int64_t h = 0; h < plan_.B * heads(); ++h) {
      if (count_of(rows[static_cast<std::size_t>(h % heads())]) == piece.count()) continue;
      std::memset(here_[i] + (h * capacity + piece.first - have_.first) * bytes, 0,
                  static_cast<std::size_t>(piece.count() * bytes));
    }
    for (std::int64_t b = 0; b < plan_.B; ++b) {
      for_each_line(rows, [&](std::int64_t h, const Line& line, std::int64_t at) {
        const std::byte* in = from[i] + (b * all + at) * bytes;
        std::byte* out =
            here_[i] + ((b * heads() + h) * capacity + line.first - have_.first) * bytes;
        if (line.step == 1) {
          std::memcpy(out, in, static_cast<std::size_t>(line.count * bytes));
          return;
        }
        for (std::int64_t r = 0; r < line.count; ++r) {
          std::memcpy(out + r * line.step * bytes, in + r * bytes, static_cast<std::size_t>(bytes));
        }
      });
    }
  }
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
  if (at.to != Hop::kNobody) pack(going_rows_, step.send, sending_);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < sending_.size(); ++i) {
    const auto bytes = [&](const Rows& rows, int peer) {
      return peer == Hop::kNobody
                 ? std::size_t{0}
                 : static_cast<std::size_t>(plan_.B * count_of(rows) * row_bytes(i));
    };
    parts.push_back(
        {sending_[i], bytes(going_rows_, at.to), coming_[i], bytes(coming_rows_, at.from)});
  }
  auto transfer = group.shift(at, parts);
  if (step.own && cell_ > 0 && count_of(coming_rows_) > 0) {
    pack(coming_rows_, step.receive, coming_);
  }
  return transfer;
}

void Pass::compute_rows(Range rows, const Compute& compute) {
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < here_.size(); ++i) {
    const TensorView& x = own_[0].rows[i];
    const std::int64_t columns = x.shape[3], capacity = most_rows();
    TensorView v = x;
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
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    std::fill_n(sums_[i], plan_.B * heads() * rows.count() * sum_columns_[i], 0.0f);
  }
  compute(rows, views, sums_);
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
  for (std::size_t i = 0; i < here_.size() && !rest.empty(); ++i) {
    for (std::int64_t h = 0; h < plan_.B * heads(); ++h) {
      std::byte* to = here_[i] + h * most_rows() * row_bytes(i);
      std::memmove(to, to + whole.count() * row_bytes(i),
                   static_cast<std::size_t>(rest.count() * row_bytes(i)));
    }
  }
  have_ = rest;
}

void Pass::send_back(const Step& step, int hop, Communicator& group) {
  accept();
  Hop at{.op = "ring_gradients", .hop = hop, .to = Hop::kNobody, .from = Hop::kNobody};
  if (count_of(here_rows_) > 0) at.to = step.from;
  if (count_of(sent_rows_) > 0) at.from = step.to;
  std::vector<Part> parts;
  const std::int64_t all = count_of(here_rows_);
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const std::int64_t columns = sum_columns_[i], rows = step.receive.count();
    const auto row_size = static_cast<std::size_t>(columns) * sizeof(float);
    for (std::int64_t b = 0; b < plan_.B && at.to != Hop::kNobody; ++b) {
      for_each_line(here_rows_, [&](std::int64_t h, const Line& line, std::int64_t from) {
        for (std::int64_t r = 0; r < line.count; ++r) {
          const std::int64_t row = (b * heads() + h) * rows + line.at(r) - step.receive.first;
          std::memcpy(sums_sending_[i] + (b * all + from + r) * columns, sums_[i] + row * columns,
                      row_size);
        }
      });
    }
    const auto bytes = [&](const Rows& of) {
      return static_cast<std::size_t>(plan_.B * count_of(of)) * row_size;
    };
    parts.push_back({sums_sending_[i], bytes(here_rows_), sums_coming_[i], bytes(sent_rows_)});
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
  const std::int64_t all = count_of(returning_.rows);
  if (all == 0) return;
  const auto chunk = static_cast<std::size_t>(chunk_with(returning_.piece));
  const Range own = shards_.of(rank_)[chunk];
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const std::int64_t columns = sum_columns_[i];
    for (std::int64_t b = 0; b < plan_.B; ++b) {
      for_each_line(returning_.rows, [&](std::int64_t h, const Line& line, std::int64_t at) {
        for (std::int64_t r = 0; r < line.count; ++r) {
          const float* from = sums_coming_[i] + (b * all + at + r) * columns;
          float* to = own_[chunk].sums[i] +
                      ((b * heads() + h) * own.count() + line.at(r) - own.first) * columns;
          for (std::int64_t c = 0; c < columns; ++c) to[c] += from[c];
        }
      });
    }
  }
}

void Pass::run(int layer, std::string_view op, Communicator& group, const Compute& compute) {
  layer_ = layer;
  have_ = {};
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
    const bool came = count_of(here_rows_) > 0;
    // Rows behind which some are missing are not continued.
    if (!step.receive.empty() && (!came || have_.end != step.receive.first)) flush(compute);
    if (came) unpack(here_rows_, step.receive, coming_);
    if (i + 1 < steps.size()) transfers.push_back(begin(steps[i + 1], hop(i + 1), op, group));
    take(step, compute);
    if (returns()) send_back(step, hop(i), group);
  }
  flush(compute);
  accept();
  for (const auto& transfer : transfers) transfer->wait();
}

}  // namespace annulus::ring
