// Bytes of every form: the steps of its passes, and the rows that each of them sends.

#include <array>

#include "annulus/attention/check.h"
#include "annulus/ring_attention/call.h"
#include "annulus/ring_attention/pass.h"
#include "annulus/ring_attention/ring_attention_plan.h"

namespace annulus {

namespace {

using attention::Call;
using attention::Plan;
using ring::Shards;
using ring::Side;

struct Row {
  std::int64_t there = 0, back = 0;  // bytes of one head's
};

std::uint64_t sent(const Plan& plan, int layer, const Shards& shards, int rank, Side side,
                   std::int64_t cell, const Row& row) {
  std::int64_t bytes = 0;
  for (const ring::Step& step : ring::steps_of(shards, rank, cell > 0)) {
    if (step.to != Hop::kNobody) {
      bytes += row.there *
               ring::count_of(ring::needed(plan, layer, side, shards.of(step.to), step.send, cell));
    }
    if (step.from != Hop::kNobody && row.back > 0) {
      bytes += row.back *
               ring::count_of(ring::needed(plan, layer, side, shards.of(rank), step.receive, cell));
    }
  }
  return static_cast<std::uint64_t>(plan.B * bytes);
}

RingTraffic traffic(Plan plan, const Shards& shards, int rank, bool deterministic) {
  plan.part.emplace();  // a call's passes see the pattern as parts do
  const std::int64_t element = size_of(plan.dtype), both = plan.D + plan.Dv;
  const Row keys{both * element, 0}, keys_back{both * element, both * 4},
      queries{both * element + 8, 0}, queries_back{both * element + 8, plan.D * 4};
  const std::int64_t key_cell = deterministic ? ring::cell_of(plan, Side::kKeys) : 0;
  RingTraffic sum;
  for (int i = 0; i < plan.layers; ++i) {
    const std::uint64_t forward = sent(plan, i, shards, rank, Side::kKeys, key_cell, keys);
    sum.forward += forward;
    if (plan.stop_alpha_gradient) sum.backward += forward;  // a layer's own output is made again
    if (deterministic) {
      sum.backward += forward + sent(plan, i, shards, rank, Side::kQueries,
                                     ring::cell_of(plan, Side::kQueries), queries);
    } else if (ring::cheaper_side(plan) == Side::kKeys) {
      sum.backward += sent(plan, i, shards, rank, Side::kKeys, 0, keys_back);
    } else {
      sum.backward += sent(plan, i, shards, rank, Side::kQueries, 0, queries_back);
    }
  }
  return sum;
}

template <class Options>
RingTraffic checked(const TensorView& q, const TensorView& k, const TensorView& v,
                    const Options& options, const RingOptions& ring, int ranks, int rank) {
  ring_shard(ring.tokens, ranks, rank, ring.balance);
  if constexpr (std::is_same_v<Options, BlockSparseAttentionOptions>) {
    if (options.row_ptr.device != kCPU) {
      throw NotSupported(
          "[ring_attention_traffic] row_ptr is on a device: what travels is found on the host");
    }
  }
  ring_attention_forward_workspace(q, k, v, options, ring, ranks, rank);  // has all other rules
  return traffic(attention::plan_of("ring_attention_traffic", {q, k, v, {}, {}}, options,
                                    Call::kForwardSizes, nullptr, ring.tokens),
                 ring::shards_of(ring, ranks, q.device), rank, ring.deterministic);
}

}  // namespace

RingTraffic ring_attention_traffic(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const AttentionOptions& options, const RingOptions& ring,
                                   int ranks, int rank) {
  return checked(q, k, v, options, ring, ranks, rank);
}
RingTraffic ring_attention_traffic(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const DilatedAttentionOptions& options, const RingOptions& ring,
                                   int ranks, int rank) {
  return checked(q, k, v, options, ring, ranks, rank);
}
RingTraffic ring_attention_traffic(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const BlockSparseAttentionOptions& options,
                                   const RingOptions& ring, int ranks, int rank) {
  return checked(q, k, v, options, ring, ranks, rank);
}

}  // namespace annulus
