// Checks a call, agrees with the other ranks on it, and sees to it that all of them succeed or none.

#include "annulus/ring_attention/ring_attention.h"

#include <limits>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "annulus/attention/check.h"
#include "annulus/attention/dropout.h"
#include "annulus/core/check.h"
#include "annulus/core/operator.h"
#include "annulus/cpu/features.h"
#include "annulus/cpu/rows.h"
#include "annulus/ring_attention/cpu/ring.h"

namespace annulus {

namespace {

using attention::Call;
using attention::Plan;
using attention::Tensors;
using ring::Shards;
using ring::shards_of;

constexpr const char* kForward = "ring_attention";
constexpr const char* kBackward = "ring_attention_backward";
// What a rank agrees to whose own call breaks a rule: the others read it.
constexpr const char* kRefused = "a call that its own rank refuses";

Shards shards_of(const RingOptions& ring, const Communicator& group) {
  return ring::shards_of(ring, group.size());
}

// --- what all ranks must have in common, as text ---

std::string text_of(const AttentionOptions& o) {
  std::ostringstream s;
  s << "causal " << o.causal << " window " << o.window_left << " " << o.window_right;
  return s.str();
}
std::string text_of(const DilatedAttentionOptions& o) {
  std::ostringstream s;
  s << "causal " << o.causal << " mode " << static_cast<int>(o.mode) << " offsets "
    << static_cast<int>(o.offsets) << " unite " << o.unite << " stop " << o.stop_alpha_gradient
    << " last " << o.remainder_last << " segments";
  for (const std::int64_t w : o.segment_lengths) s << " " << w;
  s << " rates";
  for (const std::int64_t r : o.dilation_rates) s << " " << r;
  return s.str();
}
std::string text_of(const BlockSparseAttentionOptions& o) {
  // A list may be of millions of blocks, and all ranks have it: it is not copied.
  std::uint64_t digest = 0;
  const auto add = [&](std::int64_t number) {
    digest = attention::mix64(digest ^ static_cast<std::uint64_t>(number)) + 1;
  };
  const TensorView& ptr = o.row_ptr;
  for (std::int64_t h = 0; h < ptr.shape[0]; ++h) {
    for (std::int64_t x = 0; x < ptr.shape[1]; ++x) {
      add(integer_at(ptr, h * ptr.stride[0] + x * ptr.stride[1]));
    }
  }
  for (std::int64_t i = 0; i < o.col_idx.shape[0]; ++i) {
    add(integer_at(o.col_idx, i * o.col_idx.stride[0]));
  }
  std::ostringstream s;
  s << "causal " << o.causal << " blocks of " << o.block_size << ", list " << std::hex << digest;
  return s.str();
}

template <class Options>
std::string text_of(const Plan& p, const Options& options, const RingOptions& ring) {
  std::ostringstream s;
  s.precision(17);
  s << "tokens " << ring.tokens << (ring.balance == Balance::kZigzag ? " zigzag" : " contiguous")
    << (ring.deterministic ? " deterministic" : "") << " slice " << ring.slice << ", B " << p.B
    << " H " << p.H << " Hkv " << p.Hkv << " D " << p.D << " Dv " << p.Dv << " " << name_of(p.dtype)
    << ", " << text_of(options) << ", scale " << p.scale << " dropout " << options.dropout
    << " seed " << options.dropout_seed;
  return s.str();
}

// --- the rules of a call on this rank alone ---

void check_options(const char* op, const AttentionOptions& options) {
  const char* how = "be left out: order the sequence before it is cut";
  if (options.order.defined()) invalid(op, "order", how, "is given");
  if (options.key_lengths.defined()) invalid(op, "key_lengths", "be left out", "is given");
}
void check_options(const char*, const DilatedAttentionOptions&) {}
void check_options(const char* op, const BlockSparseAttentionOptions& options) {
  const char* how = "be left out: order the sequence before it is cut";
  if (options.order.defined()) invalid(op, "order", how, "is given");
}

template <class Options>
void check_ring(const char* op, const Options& options, const RingOptions& ring) {
  check_options(op, options);
  if (ring.tokens < 0 || ring.tokens > ring::kMostTokens) {
    invalid(op, "tokens", "be at least 0 and at most 2^40", "is " + std::to_string(ring.tokens));
  }
  if (ring.slice < 1) {
    invalid(op, "slice", "be at least 1", "is " + std::to_string(ring.slice));
  }
  if (ring.balance > Balance::kContiguous) {
    invalid(op, "balance", "be one of Balance",
            "is " + std::to_string(static_cast<int>(ring.balance)));
  }
}

void check_rows(const char* op, const Tensors& t, const Shards& shards, int rank) {
  const auto check = [&](const char* name, const TensorView& v) {
    if (v.shape[1] == shards.rows_of(rank)) return;
    invalid(op, name,
            "have the " + std::to_string(shards.rows_of(rank)) + " rows of rank " +
                std::to_string(rank) + " of " + std::to_string(shards.ranks) + ", of " +
                std::to_string(shards.tokens) + " tokens,",
            "has shape " + shape_string(v.sizes()));
  };
  check("q", t.q);
  check("k", t.k);
}

template <class Options>
Plan checked(const char* op, const Tensors& t, const Options& options, const RingOptions& ring,
             Call call, const Communicator& group, const Context& context) {
  check_ring(op, options, ring);
  const Plan plan = attention::plan_of(op, t, options, call, &context, ring.tokens);
  check_rows(op, t, shards_of(ring, group), group.rank());
  for (const auto& [name, v] : {std::pair("dq", &t.dq), {"dk", &t.dk}, {"dv", &t.dv}}) {
    if (call == Call::kBackward && !v->defined()) invalid(op, name, "be given", "is left out");
  }
  if (plan.device.type != DeviceType::kCPU) {
    throw NotSupported(std::string("[") + op +
                       "] q is on CUDA: ring attention runs on CPU tensors so far");
  }
  return plan;
}

// --- all or none ---

// What nobody takes for a result.
void poison(const TensorView& v) {
  if (!v.defined() || v.numel() == 0) return;
  std::array<std::int64_t, kMaxRank> at = {};
  for (;;) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < v.sizes().size(); ++i) offset += at[i] * v.stride[i];
    cpu::write_element<float>(v, offset, std::numeric_limits<float>::quiet_NaN());
    std::size_t axis = v.sizes().size();
    while (axis > 0 && ++at[axis - 1] == v.shape[axis - 1]) at[--axis] = 0;
    if (axis == 0) return;
  }
}

// Worker: ring::cpu::Forward or Backward.
template <class Worker, class Options>
void run(const char* op, const Tensors& t, const Options& options, const RingOptions& ring,
         Call call, Communicator& group, Context& context) {
  std::optional<Worker> worker;
  std::optional<Workspace> scratch;
  std::string what;
  Plan plan;
  try {
    plan = checked(op, t, options, ring, call, group, context);
    what = text_of(plan, options, ring);
    worker.emplace(plan, shards_of(ring, group), group.rank(), ring.deterministic);
    scratch.emplace(context, op, plan.device, [&](ScratchLayout& s) { worker->lay_out(s); });
  } catch (const std::bad_alloc&) {
    group.abandon("out of memory");
    throw;
  } catch (const Error&) {
    // The others have to know that nothing comes. Where all ranks refuse, each for its own reason, nothing is lost.
    try {
      group.agree(op, kRefused);
    } catch (const RankLost&) {
    }
    throw;
  }
  const std::vector<TensorView> outputs = call == Call::kForward
                                              ? std::vector<TensorView>{t.o, t.lse}
                                              : std::vector<TensorView>{t.dq, t.dk, t.dv};
  try {
    group.agree(op, what);
    worker->run(group, context);
    group.barrier();  // so that none has a result where another has none
  } catch (const std::exception& e) {
    for (const TensorView& v : outputs) poison(v);
    if (dynamic_cast<const RankLost*>(&e) == nullptr) group.abandon(e.what());
    throw;
  }
  context.ran_on(op, plan.device.type, attention::cpu::how(plan));
}

template <class Worker, class Options>
std::size_t workspace(const char* op, const Tensors& t, const Options& options,
                      const RingOptions& ring, Call call, int ranks, int rank) {
  check_ring(op, options, ring);
  ring_shard(ring.tokens, ranks, rank, ring.balance);  // or refuse them
  const Plan plan = attention::plan_of(op, t, options, call, nullptr, ring.tokens);
  check_rows(op, t, shards_of(ring, ranks), rank);
  Worker worker(plan, shards_of(ring, ranks), rank, ring.deterministic);
  return scratch_bytes([&](ScratchLayout& s) { worker.lay_out(s); });
}

}  // namespace

#define ANNULUS_RING_ATTENTION(Options)                                                            \
  void ring_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,       \
                              const TensorView& o, const TensorView& lse, const Options& options,  \
                              const RingOptions& ring, Communicator& group, Context& context) {    \
    run<ring::cpu::Forward>(kForward, {q, k, v, o, lse}, options, ring, Call::kForward, group,     \
                            context);                                                              \
  }                                                                                                \
  void ring_attention_backward(const TensorView& do_, const TensorView& dlse, const TensorView& q, \
                               const TensorView& k, const TensorView& v, const TensorView& o,      \
                               const TensorView& lse, const TensorView& dq, const TensorView& dk,  \
                               const TensorView& dv, const Options& options,                       \
                               const RingOptions& ring, Communicator& group, Context& context) {   \
    run<ring::cpu::Backward>(kBackward, {q, k, v, o, lse, do_, dlse, dq, dk, dv}, options, ring,   \
                             Call::kBackward, group, context);                                     \
  }                                                                                                \
  std::size_t ring_attention_forward_workspace(const TensorView& q, const TensorView& k,           \
                                               const TensorView& v, const Options& options,        \
                                               const RingOptions& ring, int ranks, int rank) {     \
    return workspace<ring::cpu::Forward>(kForward, {q, k, v, {}, {}}, options, ring,               \
                                         Call::kForwardSizes, ranks, rank);                        \
  }                                                                                                \
  std::size_t ring_attention_backward_workspace(const TensorView& q, const TensorView& k,          \
                                                const TensorView& v, const Options& options,       \
                                                const RingOptions& ring, int ranks, int rank) {    \
    return workspace<ring::cpu::Backward>(kBackward, {q, k, v, {}, {}}, options, ring,             \
                                          Call::kBackwardSizes, ranks, rank);                      \
  }
ANNULUS_RING_ATTENTION(AttentionOptions)
ANNULUS_RING_ATTENTION(DilatedAttentionOptions)
ANNULUS_RING_ATTENTION(BlockSparseAttentionOptions)
#undef ANNULUS_RING_ATTENTION

namespace {

const OperatorRegistration kOperator({
    .name = "ring_attention",
    .summary = "attention of every form over the ranks of a communicator",
    .dtypes = {DType::kF32, DType::kF16, DType::kBF16},
    .gradients = {"q", "k", "v"},
    .deterministic = true,
    .support = [](DeviceType device) -> Support {
      if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
      return {false, "ring attention runs on CPU tensors so far"};
    },
    .on_cuda = false,
});

}  // namespace

}  // namespace annulus
