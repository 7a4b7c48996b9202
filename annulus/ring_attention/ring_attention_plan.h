// What a ring costs, before there is one: bytes, work, time and memory of a rank, beside those of gathering all keys and values.
//
//   const annulus::RingPlan plan = annulus::plan_ring({.tokens = 1'000'000, .heads = 32, .kv_heads = 8, .head_dim = 128,
//                                                      .ranks = 8, .link_bytes_per_s = 50e9, .flops_per_s = 400e12});
//
// Bytes are those that Communicator::traffic().bytes will say, exactly, of the dense forms; ring_attention_traffic has the rest.
// Time is a model, with what the caller says a rank computes and its link carries each way: rows of one hop come while those
// before them are computed, so a hop takes the longer of the two, and beside them a rank has its own rows to compute. Nothing is
// said of latency: a message is a slice of thousands of rows, which takes far longer than it takes to begin.
#pragma once

#include <cstdint>
#include <optional>

#include "annulus/attention/attention.h"
#include "annulus/core/dtype.h"
#include "annulus/core/macros.h"
#include "annulus/core/tensor.h"
#include "annulus/ring_attention/ring_attention.h"

namespace annulus {

// q (batch, tokens, heads, head_dim), k and v (batch, tokens, kv_heads, head_dim), over ranks; RingOptions::deterministic is not
// planned: it computes 1.4 times as much in the backward, which sends both sides.
struct RingPlanProblem {
  std::int64_t tokens = 0;  // at most 1 000 000 000
  std::int64_t heads = 1, kv_heads = 1, head_dim = 64;
  int ranks = 1;  // at most 4096
  double link_bytes_per_s = 50e9, flops_per_s = 100e12;
  std::int64_t batch = 1;
  DType dtype = DType::kBF16;
  bool causal = false;
  std::int64_t window_left = -1, window_right = -1;  // as in AttentionOptions
  Balance balance = Balance::kZigzag;
  std::int64_t slice =
      8192;  // rows of a message, at most: RingOptions' on GPUs; on the CPU it has 1536
  double memory_bytes = 0;  // that a rank has; 0: not asked
};

// Over the ranks.
struct RingSpread {
  double max = 0, mean = 0;
};

// Bytes of the rank that has most: of its own tensors (inputs and outputs, with lse), of what it carries in fp32 for all of its
// rows, and of rows of others: a slice that goes, one that comes and one that is computed. Not counted: tiles of the kernels, some
// MiB whatever the sequence; sums of dk and dv that a CPU has twice in the backward where batch x kv_heads is at most 8; and what a transport keeps of messages under way. ring_attention_*_workspace has all but the last.
struct RingMemory {
  std::int64_t tensors = 0, carried = 0, messages = 0;

  std::int64_t total() const { return tensors + carried + messages; }
};

// A forward, or a backward.
struct RingPassPlan {
  RingSpread bytes;  // that a rank sends
  RingSpread flops;  // 4 D a pair of a query and a key it sees, and 10 D in the backward
  RingSpread compute_s, transfer_s;
  double hop_bytes = 0;  // that come to a rank in a hop, at most
  double time_s = 0;     // of the slowest rank
  int hops = 0;          // ranks - 1
  int hidden_hops =
      0;  // of them, those in which no rank waits: what comes takes no longer than computing with it
  // Tokens of a shard from which on every hop would be hidden: bytes grow with a shard and work with its square. None where
  // a window makes work grow as bytes do, or where a rank has nothing to compute while something comes.
  std::optional<std::int64_t> hides_from = {};
  RingMemory memory;

  bool hides() const { return hidden_hops == hops; }
  double work_balance() const { return flops.mean > 0 ? flops.max / flops.mean : 1; }
};

// Every rank has all keys and values at once (and sums of all their gradients): what comes is not hidden behind anything.
// Messages are those of Communicator::all_gather, as long as the longest shard; gradients return in fp32.
struct GatherPlan {
  double bytes = 0, time_s = 0;
  RingMemory memory;
};

struct RingPlan {
  RingPassPlan forward, backward;
  GatherPlan gather_forward, gather_backward;
  bool queries_travel = false;  // in the backward, being fewer bytes than keys and values
  bool fits = true;  // forward and backward in memory_bytes; true where that was not asked
  bool gather_fits = true;
};

// Throws InvalidArgument, which names the field and its rule.
ANNULUS_API RingPlan plan_ring(const RingPlanProblem& problem);

// Bytes that a rank's calls send, exactly, of every form: what Communicator::traffic().bytes grows by. q, k and v are the rank's
// shards, of which only shapes, dtype and device are read; block lists are read, and so must lie on the host: those of deterministic
// calls on CUDA, which send larger cells, are not to be had.
struct RingTraffic {
  std::uint64_t forward = 0, backward = 0;

  friend bool operator==(const RingTraffic&, const RingTraffic&) = default;
};
ANNULUS_API RingTraffic ring_attention_traffic(const TensorView& q, const TensorView& k,
                                               const TensorView& v, const AttentionOptions& options,
                                               const RingOptions& ring, int ranks, int rank);
ANNULUS_API RingTraffic ring_attention_traffic(const TensorView& q, const TensorView& k,
                                               const TensorView& v,
                                               const DilatedAttentionOptions& options,
                                               const RingOptions& ring, int ranks, int rank);
ANNULUS_API RingTraffic ring_attention_traffic(const TensorView& q, const TensorView& k,
                                               const TensorView& v,
                                               const BlockSparseAttentionOptions& options,
                                               const RingOptions& ring, int ranks, int rank);

}  // namespace annulus
