// Problems of ring attention: those of attention, over ranks that are threads. A case has the whole sequence; its call cuts it, runs
// every rank, and puts the shards of the results together.
#pragma once

#include <cstdint>
#include <functional>

#include "annulus/attention/test/cases.h"
#include "annulus/dist/communicator.h"
#include "annulus/ring_attention/ring_attention.h"

namespace annulus::testing {

struct RingProblem {
  AttentionProblem attention;  // Tq == Tk; no order, no key_lengths, not packed
  int ranks = 1;
  Balance balance = Balance::kZigzag;
  bool deterministic = false;
  std::int64_t slice = 0;

  RingOptions options() const {
    return {
        .tokens = attention.Tq, .balance = balance, .deterministic = deterministic, .slice = slice};
  }
};

// The tensors of a call, of the whole sequence or of a shard.
struct RingTensors {
  TensorView q, k, v, o, lse, do_, dlse, dq, dk, dv;
  TensorView row_ptr, col_idx;  // of the whole sequence, always
};

// One rank's call, on its shard.
void ring_forward(const RingProblem& p, const RingTensors& t, Communicator& group,
                  Context& context);
void ring_backward(const RingProblem& p, const RingTensors& t, Communicator& group,
                   Context& context);

// f(rank) on a thread each; throws what a rank threw, RankLost only where that is all.
void on_ranks(int ranks, const std::function<void(int rank)>& f);

// f(rank, shard): the shards of a rank, whose outputs are then put together.
using RankCall = std::function<void(int rank, const RingTensors& shard)>;
// All ranks as threads, inputs cut before and outputs joined after. Throws what a rank threw, RankLost only where that is all.
void run_ranks(const RingProblem& p, const RingTensors& whole, bool backward, const RankCall& f);
// The same with communicators of its own, and contexts but for rank 0's where that is given.
void run_ranks(const RingProblem& p, const RingTensors& whole, bool backward,
               Context* first = nullptr);

Case ring_attention_case(const RingProblem& problem);

// A case of attention over contiguous shards, which are views of its tensors: nothing is copied but what travels. For benchmarks.
Case over_local_ranks(const AttentionProblem& p, Case c, int ranks, bool deterministic);

// The same with this process as one rank of the group, all of whom make the call. Its tensors are the rank's own shards; or `whole`,
// where every rank computes its rows and all of them then get all rows, so that a result can be compared.
Case over_processes(const AttentionProblem& p, Case c, Communicator& group, bool deterministic,
                    bool whole);

// A case of dense attention on CUDA whose calls are one hop of a ring each: what is computed of the rows of another rank, without
// their way here. Its outputs are not written. For benchmarks.
Case one_hop(const AttentionProblem& p, Case c);

}  // namespace annulus::testing
