// The calls of a rank: what it keeps of its own rows, and what is done with those that come.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "annulus/ring_attention/engine.h"
#include "annulus/ring_attention/pass.h"

namespace annulus::ring {

// What both calls are made of.
struct CallSizes {
  Shards shards;
  int rank = 0;
  bool deterministic = false;  // see ring_attention.h
  // The pattern, with lists in host memory: which rows travel is found there.
  attention::Pattern pattern;
};

// A plan for parts of at most so many rows, whose scratch does for all of them.
inline Plan largest_part(const Plan& plan, std::int64_t rows, bool fixed) {
  Plan part = plan;
  part.part.emplace();
  part.part->fixed = fixed;
  part.Tq = part.Tk = rows;
  return part;
}
inline Plan with_pattern(Plan plan, const attention::Pattern& pattern) {
  plan.pattern = pattern;
  return plan;
}

class Forward {
 public:
  // `plan` is that of this rank's shard, with the pattern of the sequence.
  Forward(const Plan& plan, const CallSizes& sizes);
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;
  void lay_out(ScratchLayout& scratch);
  // o, and lse where the plan has it, of all layers; or of one alone.
  void run(Communicator& group, Context& context, std::optional<int> layer = {});
  void set_output(const TensorView& o) { plan_.o = o; }

 private:
  struct Chunk {
    Range rows;       // of the sequence
    std::int64_t at;  // the first of them in the shard
    attention::RowState* state;
    float* acc;
  };
  void use(const Chunk& chunk);

  Plan plan_, hop_;
  std::array<Chunk, 2> chunks_;
  std::unique_ptr<Engine> engine_;
  Pass pass_;
};

class Backward {
 public:
  Backward(const Plan& plan, const CallSizes& sizes);
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  void lay_out(ScratchLayout& scratch);
  void run(Communicator& group, Context& context);

 private:
  struct Chunk {
    Range rows;
    std::int64_t at;
    float *delta, *dq, *dk, *dv;
  };
  std::array<Traveller, 2> travellers(Side side) const;
  void use_queries(const Chunk& chunk);
  void use_keys(const Chunk& chunk);
  void keys_come(int layer, Communicator& group);
  void queries_come(int layer, Communicator& group);

  Plan plan_, hop_;
  CallSizes sizes_;
  std::array<Chunk, 2> chunks_;
  std::unique_ptr<Engine> engine_;
  std::optional<Pass> keys_, queries_;
  float* delta_here_ = nullptr;
  int* flag_ = nullptr;
  // Where layers are weighed as constants: one of them alone.
  std::optional<Forward> layer_;
  std::byte* layer_o_ = nullptr;
};

// What travels in a backward that is not deterministic: the side of fewer bytes a row, there and back.
Side cheaper_side(const Plan& plan);

}  // namespace annulus::ring
