// One way around: rows of every rank (keys and values, or queries and what belongs to them) come to all ranks that need them,
// a slice at a time, the next one under way while one is computed; and sums over them may go back to their owners.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "annulus/core/scratch.h"
#include "annulus/core/tensor.h"
#include "annulus/dist/communicator.h"
#include "annulus/ring_attention/engine.h"
#include "annulus/ring_attention/rows.h"

namespace annulus::ring {

// What one rank does at one time. All ranks have as many steps, and what one sends in a step another receives in the same.
struct Step {
  int to = Hop::kNobody, from = Hop::kNobody;
  bool own = false;     // it computes rows of its own
  Range send, receive;  // of one chunk each; or the rows of its own
};
// Every rank begins with its own rows and goes on with those of the ranks before it; or ascending: every rank takes all rows
// of the sequence from first to last, rank p beginning p chunks later than rank 0, so that each is asked by one at a time.
std::vector<Step> steps_of(const Shards& shards, int rank, bool ascending);

// What travels, of one chunk of this rank: (B, rows, heads, columns) each. Of sums that come back: see Engine::sums().
struct Traveller {
  std::vector<TensorView> rows;
  std::vector<float*> sums;
};

class Pass {
 public:
  // Sums have these columns each; none come back where there are none. `plan` gives heads and patterns, in host memory.
  // cell: all rows are taken from first to last, and in whole cells (0: in any order).
  Pass(Engine& engine, const Plan& plan, const Shards& shards, int rank, Side side,
       std::int64_t cell, std::array<Traveller, 2> own, std::vector<std::int64_t> sum_columns);

  // Rows that compute() is given at once, at most.
  std::int64_t most_rows() const;
  void lay_out(ScratchLayout& scratch);

  // compute(rows, tensors, sums): the rows of the sequence, the tensors of which row 0 is the first of them, and where to add.
  using Compute = std::function<void(Range rows, std::span<const TensorView> tensors,
                                     std::span<float* const> sums)>;
  void run(int layer, std::string_view op, Communicator& group, const Compute& compute);

 private:
  struct Returning {
    std::unique_ptr<Transfer> transfer;
    Rows rows;
    Range piece;
  };
  std::int64_t heads() const { return side_ == Side::kKeys ? plan_.Hkv : plan_.H; }
  std::int64_t row_bytes(std::size_t i) const;
  int chunk_with(Range piece) const;
  std::vector<TensorView> here(Range rows) const;
  void pack(const Rows& rows, Range piece, std::span<const Message> to, Origin origin);
  void unpack(const Rows& rows, Range piece, bool stayed);
  std::unique_ptr<Transfer> begin(const Step& step, int hop, std::string_view op,
                                  Communicator& group);
  void take(const Step& step, const Compute& compute);
  void compute_rows(Range rows, const Compute& compute);
  void flush(const Compute& compute);
  void send_back(const Step& step, int hop, Communicator& group);
  void accept();
  bool returns() const { return !sum_columns_.empty(); }

  Engine& engine_;
  Plan plan_;
  Shards shards_;
  int rank_;
  Side side_;
  std::int64_t cell_;
  std::array<Traveller, 2> own_;
  std::vector<std::int64_t> sum_columns_;
  std::int64_t most_;  // rows of a slice of anybody
  int layer_ = 0;

  // A message of each tensor that goes, one that comes, and rows as they are computed, (B, heads, most_rows(), columns).
  std::vector<Message> sending_, coming_, sums_sending_, sums_coming_;
  std::vector<std::byte*> here_;
  std::vector<float*> sums_;
  Rows going_rows_, coming_rows_, here_rows_;
  Range have_;  // rows of the sequence in here_
  Rows sent_rows_;
  Returning returning_;
};

}  // namespace annulus::ring
