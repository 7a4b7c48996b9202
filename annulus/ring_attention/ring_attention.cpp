// Checks a call, agrees with the other ranks on it, and sees to it that all of them succeed or none.

#include "annulus/ring_attention/ring_attention.h"

#include <limits>
#include <new>
#include <sstream>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "annulus/attention/check.h"
#include "annulus/attention/cpu/forward.h"
#include "annulus/attention/dropout.h"
#include "annulus/core/check.h"
#include "annulus/core/operator.h"
#include "annulus/cpu/features.h"
#include "annulus/cpu/rows.h"
#include "annulus/dist/callbacks.h"
#include "annulus/ring_attention/call.h"

namespace annulus {

namespace {

using attention::Call;
using attention::Plan;
using attention::Tensors;
using ring::Shards;
using ring::shards_of;

constexpr const char* kForward = "ring_attention";
constexpr const char* kBackward = "ring_attention_backward";

Shards shards_of(const RingOptions& ring, const Communicator& group, Device device) {
  return ring::shards_of(ring, group.size(), device);
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
    << (ring.deterministic ? " deterministic" : "") << " slice "
    << shards_of(ring, 1, p.device).slice << ", B " << p.B << " H " << p.H << " Hkv " << p.Hkv
    << " D " << p.D << " Dv " << p.Dv << " " << name_of(p.dtype) << ", " << text_of(options)
    << ", scale " << p.scale << " dropout " << options.dropout << " seed " << options.dropout_seed;
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
  if (ring.slice < 0) {
    invalid(op, "slice", "be at least 0", "is " + std::to_string(ring.slice));
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
  check_rows(op, t, shards_of(ring, group, plan.device), group.rank());
  for (const auto& [name, v] : {std::pair("dq", &t.dq), {"dk", &t.dk}, {"dv", &t.dv}}) {
    if (call == Call::kBackward && !v->defined()) invalid(op, name, "be given", "is left out");
  }
  ring::check_stream(op, plan.device, context);
  return plan;
}

// Options as the host can read them: lists that lie on a device are copied, and only then known to be right.
struct Lists {
  std::vector<std::byte> row_ptr, col_idx;
};
template <class Options>
Options readable(const char*, const Plan&, const Options& options, Lists&, Context&) {
  return options;
}
BlockSparseAttentionOptions readable(const char* op, const Plan& plan,
                                     BlockSparseAttentionOptions options, Lists& lists,
                                     Context& context) {
  dispatch(
      op, plan.device, [] {},
      [&] {
        options.row_ptr = ring::cuda::on_host(options.row_ptr, lists.row_ptr, context);
        options.col_idx = ring::cuda::on_host(options.col_idx, lists.col_idx, context);
        const auto& blocks = std::get<attention::Blocks>(plan.pattern);
        attention::check_blocks(op, options.row_ptr, options.col_idx,
                                (blocks.keys + blocks.size - 1) / blocks.size);
      });
  return options;
}
template <class Options>
attention::Pattern readable(const Plan& plan, const Options& options) {
  attention::Pattern pattern = plan.pattern;
  if constexpr (std::is_same_v<Options, BlockSparseAttentionOptions>) {
    auto& blocks = std::get<attention::Blocks>(pattern);
    blocks.row_ptr.data = options.row_ptr.data;
    blocks.col_idx = static_cast<const std::int32_t*>(options.col_idx.data);
  }
  return pattern;
}

// --- all or none ---

// What nobody takes for a result.
void poison(const TensorView& v, Context& context) {
  if (!v.defined() || v.numel() == 0) return;
  if (v.device.type != DeviceType::kCPU) {
    return dispatch(
        kForward, v.device, [] {}, [&] { ring::cuda::poison(v, context); });
  }
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

// Worker: ring::Forward or Backward.
template <class Worker, class Options>
void run(const char* op, const Tensors& t, const Options& options, const RingOptions& ring,
         Call call, Communicator& group, Context& context) {
  Plan plan;
  std::string what;
  Lists lists;
  std::optional<Workspace> scratch;
  std::optional<Worker> worker;  // the first to go: it waits for what is under way in scratch
  try {
    plan = checked(op, t, options, ring, call, group, context);
    const Options here = readable(op, plan, options, lists, context);
    what = text_of(plan, here, ring);
    worker.emplace(plan, ring::CallSizes{shards_of(ring, group, plan.device), group.rank(),
                                         ring.deterministic, readable(plan, here)});
    scratch.emplace(context, op, plan.device, [&](ScratchLayout& s) { worker->lay_out(s); });
  } catch (const std::exception& e) {
    ring::refuse(group, op, e);
    throw;
  }
  using Outputs = std::array<TensorView, 3>;
  const Outputs outputs = call == Call::kForward ? Outputs{t.o, t.lse} : Outputs{t.dq, t.dk, t.dv};
  try {
    group.agree(op, what);
    worker->run(group, context);
    group.barrier();  // so that none has a result where another has none
  } catch (const std::exception& e) {
    if (dynamic_cast<const RankLost*>(&e) == nullptr) group.abandon(e.what());
    for (const TensorView& v : outputs) {
      try {
        poison(v, context);
      } catch (const Error&) {  // a device that is lost: what it has nobody will read
      }
    }
    throw;
  }
  context.ran_on(
      op, plan.device.type,
      dispatch(
          op, plan.device, [&] { return attention::cpu::how(plan); },
          [&] {
            return attention::cuda::how(ring::largest_part(plan, plan.Tq, ring.deterministic));
          }));
}

template <class Worker, class Options>
std::size_t workspace(const char* op, const Tensors& t, const Options& options,
                      const RingOptions& ring, Call call, int ranks, int rank) {
  check_ring(op, options, ring);
  ring_shard(ring.tokens, ranks, rank, ring.balance);  // or refuse them
  const Plan plan = attention::plan_of(op, t, options, call, nullptr, ring.tokens);
  const Shards shards = shards_of(ring, ranks, plan.device);
  check_rows(op, t, shards, rank);
  Worker worker(plan, ring::CallSizes{shards, rank, ring.deterministic, plan.pattern});
  return scratch_bytes([&](ScratchLayout& s) { worker.lay_out(s); });
}

}  // namespace

namespace ring {

void refuse(Communicator& group, const char* op, const std::exception& why) {
  if (dynamic_cast<const RankLost*>(&why) != nullptr) return;
  try {
    group.refuse(op, why.what());
  } catch (const RankLost&) {
  } catch (const dist::Interrupted& e) {
    group.abandon(e.what());
    throw;
  } catch (const std::exception& e) {  // it cannot even say so; what counts is why
    group.abandon(e.what());
  }
}

void check_stream(const char* op, Device device, const Context& context) {
  dispatch(
      op, device, [] {}, [&] { cuda::check_stream(op, device, context); });
}

std::unique_ptr<Engine> make_engine(const Plan& hop, bool backward) {
  return dispatch(
      hop.op, hop.device, [&] { return cpu::make_engine(hop, backward); },
      [&] { return cuda::make_engine(hop); });
}

std::int64_t cell_of(const Plan& plan, Side side) {
  if (plan.device.type != DeviceType::kCPU) return attention::cuda::kPartCell;
  return side == Side::kKeys ? attention::cpu::kForwardKeys : attention::cpu::kQueries;
}

}  // namespace ring

#define ANNULUS_RING_ATTENTION(Options)                                                            \
  void ring_attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,       \
                              const TensorView& o, const TensorView& lse, const Options& options,  \
                              const RingOptions& ring, Communicator& group, Context& context) {    \
    run<ring::Forward>(kForward, {q, k, v, o, lse}, options, ring, Call::kForward, group,          \
                       context);                                                                   \
  }                                                                                                \
  void ring_attention_backward(const TensorView& do_, const TensorView& dlse, const TensorView& q, \
                               const TensorView& k, const TensorView& v, const TensorView& o,      \
                               const TensorView& lse, const TensorView& dq, const TensorView& dk,  \
                               const TensorView& dv, const Options& options,                       \
                               const RingOptions& ring, Communicator& group, Context& context) {   \
    run<ring::Backward>(kBackward, {q, k, v, o, lse, do_, dlse, dq, dk, dv}, options, ring,        \
                        Call::kBackward, group, context);                                          \
  }                                                                                                \
  std::size_t ring_attention_forward_workspace(const TensorView& q, const TensorView& k,           \
                                               const TensorView& v, const Options& options,        \
                                               const RingOptions& ring, int ranks, int rank) {     \
    return workspace<ring::Forward>(kForward, {q, k, v, {}, {}}, options, ring,                    \
                                    Call::kForwardSizes, ranks, rank);                             \
  }                                                                                                \
  std::size_t ring_attention_backward_workspace(const TensorView& q, const TensorView& k,          \
                                                const TensorView& v, const Options& options,       \
                                                const RingOptions& ring, int ranks, int rank) {    \
    return workspace<ring::Backward>(kBackward, {q, k, v, {}, {}}, options, ring,                  \
                                     Call::kBackwardSizes, ranks, rank);                           \
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
    .deterministic = false,  // dq on CUDA
    .support = [](DeviceType device) -> Support {
      if (device == DeviceType::kCPU) return {true, cpu::simd_description()};
      return cuda_support([] { return attention::cuda::support(); });
    },
    .in_graphs = false,
});

}  // namespace

}  // namespace annulus
