// Ring attention on the CPU: the engine of attention, in parts, on what a pass brings.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "annulus/attention/cpu/backward.h"
#include "annulus/attention/cpu/forward.h"
#include "annulus/ring_attention/pass.h"

namespace annulus::ring::cpu {

// A plan for parts of at most so many rows, whose scratch does for all of them.
inline Plan largest_part(const Plan& plan, std::int64_t rows, bool fixed) {
  Plan part = plan;
  part.part.emplace();
  part.part->fixed = fixed;
  part.Tq = part.Tk = rows;
  return part;
}

class Forward {
 public:
  // `plan` is that of this rank's shard, with the pattern of the sequence. deterministic: see ring_attention.h.
  Forward(const Plan& plan, const Shards& shards, int rank, bool deterministic);
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;
  void lay_out(ScratchLayout& scratch);
  // o, and lse where the plan has it, of all layers; or of one alone.
  void run(Communicator& group, Context& context, std::optional<int> layer = {});
  void set_output(const TensorView& o) { plan_.o = o; }

 private:
  using RowState = attention::RowState;
  struct Chunk {
    Range rows;             // of the sequence
    std::int64_t at;        // the first of them in the shard
    RowState *state, *one;  // of all layers, and of one where they are merged in order
    float *acc, *one_acc;
  };
  void use(const Chunk& chunk, bool one);
  void merge_layer(const Chunk& chunk) const;

  Plan plan_, hop_;
  bool
      by_layer_;  // layers have sums of their own, or their order would be that of what comes first
  std::array<Chunk, 2> chunks_;
  attention::cpu::Forward engine_;
  Pass pass_;
};

class Backward {
 public:
  Backward(const Plan& plan, const Shards& shards, int rank, bool deterministic);
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
  void keys_come(int layer, Communicator& group, Context& context);
  void queries_come(int layer, Communicator& group, Context& context);
  void store(const float* sums, const Chunk& chunk, const TensorView& to) const;

  Plan plan_, hop_;
  bool deterministic_;
  std::array<Chunk, 2> chunks_;
  attention::cpu::Backward engine_;
  std::optional<Pass> keys_, queries_;
  Shards shards_;
  int rank_;
  float* delta_here_ = nullptr;
  // Where layers are weighed as constants: one of them alone.
  std::optional<Forward> layer_;
  std::byte* layer_o_ = nullptr;
};

// What travels in a backward that is not deterministic: the side of fewer bytes a row, there and back.
Side cheaper_side(const Plan& plan);

}  // namespace annulus::ring::cpu
