// Ring attention as an op of torch. Autograd and fake kernels are in python/annulus/ring_attention.py.
//
// One op serves the ranks of a group, each with its shards (group, world_size 0), and ranks that are threads of this process, with
// whole tensors that are cut and put together here (world_size P, group 0). Segments, or lists of blocks, say which attention it is.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "annulus/attention/torch_options.h"
#include "annulus/core/check.h"
#include "annulus/dist/callbacks.h"
#include "annulus/ring_attention/engine.h"
#include "annulus/ring_attention/ring_attention.h"
#include "python/csrc/groups.h"
#include "python/csrc/torch_op.h"

namespace annulus::torch_glue {
namespace {

#define ANNULUS_RING_OPTIONS                                                              \
  "int group, int world_size, str balance, float deadline_s, bool causal, float? "        \
  "softmax_scale, SymInt window_left, SymInt window_right, SymInt[] segment_lengths, "    \
  "SymInt[] dilation_rates, str mode, str offset_map, str multiplicity, str alpha_grad, " \
  "str group_remainder, Tensor? row_ptr, Tensor? col_idx, SymInt block_size, float "      \
  "dropout_p, SymInt dropout_seed, bool deterministic"

constexpr std::array<Choice<Balance>, 2> kBalances{
    {{"zigzag", Balance::kZigzag}, {"contiguous", Balance::kContiguous}}};
constexpr std::int64_t kMostThreads = 1024;

// What a call is told beside tensors.
struct Plan {
  std::variant<AttentionOptions, DilatedAttentionOptions, BlockSparseAttentionOptions> options;
  RingOptions ring;
};

template <class Op>
Plan plan_of(const Arguments<Op>& a) {
  const char* op = Op::op;
  check_tensor(op, "q", a.template view<"q">(), 4);
  check_tensor(op, "k", a.template view<"k">(), 4);
  check_tensor(op, "v", a.template view<"v">(), 4);
  Plan plan;
  plan.ring.balance = chosen(op, "balance", a.template get<"balance">(), kBalances);
  plan.ring.deterministic = a.template get<"deterministic">();
  if (!a.template get<"segment_lengths">().empty()) {
    plan.options = dilated_options_of(a);
  } else if (a.template get<"row_ptr">()) {
    plan.options = block_sparse_options_of(a);
  } else {
    plan.options = attention_options_of(a);
  }
  return plan;
}

// A tensor of the call: whole, or this rank's shard.
struct Operand {
  const char* name;
  std::optional<Tensor> tensor;  // none where it is left out
  TensorView view;
  int dim;  // that counts tokens
  bool written = false;
};
Operand read(const char* op, const char* name, const OptionalTensor& t, int dim = 1) {
  return {name, t, view_of(op, name, t), dim};
}
Operand written(const char* op, const char* name, TensorView view, int dim = 1) {
  Tensor t = allocate(op, name, view);
  return {name, std::move(t), view, dim, true};
}

// What forward and backward differ in, as functions of a rank's operands.
struct Work {
  std::function<std::vector<Operand>()> operands;  // outputs with their memory
  std::function<std::size_t(std::span<const TensorView>, const Plan&, const Communicator&)>
      workspace;
  std::function<void(std::span<const TensorView>, const Plan&, Communicator&, Context&)> compute;
};

// The part of one rank. The others hear of a call that it cannot make: from here where it fails before the operator, else from that.
void run_rank(const char* op, std::span<const TensorView> views, const Plan& plan, const Work& work,
              Communicator& rank, int threads) {
  std::optional<Call> call;
  try {
    // Gives this thread torch's number of threads, by which scratch is counted: torch's first call on a thread does, which
    // must not come between.
    (void)torch::stable::get_num_threads();
    std::size_t bytes = 0;
    try {
      bytes = work.workspace(views, plan, rank);
    } catch (const InvalidArgument&) {  // the call will say the same, and to the others
    } catch (const NotSupported&) {
    }
    call.emplace(op, views[0].device, bytes);
  } catch (const std::exception& e) {
    ring::refuse(rank, op, e);
    throw;
  }
  call->context.threads = threads;
  call->context.deterministic = plan.ring.deterministic;
  work.compute(views, plan, rank, call->context);
}

// --- ranks of a group ---

// The tokens of all ranks together. A rank whose call breaks a rule says so instead: where all do nothing is lost, else the
// others know who does not come.
std::int64_t tokens_of_all(const char* op, Communicator& group, std::int64_t mine,
                           const std::exception_ptr& bad) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(group.size()));
  if (bad) mine = -1;
  try {
    group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    if (!bad && std::ranges::count(all, -1) > 0) group.agree(op, "a call that breaks no rule");
  } catch (const RankLost&) {
    throw;
  } catch (const std::exception& e) {
    group.abandon(e.what());
    throw;
  }
  if (bad) {
    try {
      std::rethrow_exception(bad);
    } catch (const std::exception& e) {
      ring::refuse(group, op, e);
      throw;
    }
  }
  std::int64_t sum = 0;
  for (const std::int64_t n : all) sum = checked_add(sum, n, op);
  return sum;
}

template <class Op>
std::vector<Operand> run_on_group(const Arguments<Op>& a, const Work& work) {
  const char* op = Op::op;
  const auto group = group_of(op, a.template get<"group">());
  const std::lock_guard lock(group->mutex);
  Communicator& rank = *group->communicator;
  Plan plan;
  std::vector<Operand> made;
  std::exception_ptr bad;
  std::int64_t mine = 0;
  try {
    rank.set_deadline_s(a.template get<"deadline_s">());
    plan = plan_of(a);
    mine = a.template view<"q">().shape[1];
    made = work.operands();
  } catch (const std::exception&) {
    bad = std::current_exception();
  }
  plan.ring.tokens = tokens_of_all(op, rank, mine, bad);
  std::vector<TensorView> views;
  for (const Operand& x : made) views.push_back(x.view);
  run_rank(op, views, plan, work, rank, call_threads());
  return made;
}

// --- ranks of this process ---

// What one rank holds of the operands: a view where its tokens lie together, else a copy.
class Shard {
 public:
  Shard(const char* op, std::span<Operand> operands, std::array<TokenRange, 2> chunks)
      : chunks_(chunks) {
    if (chunks[0].end == chunks[1].first) chunks_ = {TokenRange{chunks[0].first, chunks[1].end}};
    for (Operand& whole : operands) {
      views.push_back(whole.view);
      copies_.emplace_back();
      if (!whole.view.defined()) continue;
      TensorView& view = views.back();
      const auto dim = static_cast<std::size_t>(whole.dim);
      view.shape[dim] = chunks_[0].count() + chunks_[1].count();
      if (chunks_[1].count() > 0) {
        view = dense_like(op, view);
        copies_.back() = allocate(op, "a shard", view);
        if (!whole.written) move(whole, *copies_.back(), true);
      } else if (view.data != nullptr) {
        view.data = static_cast<std::byte*>(view.data) +
                    chunks_[0].first * view.stride[dim] * size_of(view.dtype);
      }
    }
  }
  void put(std::span<Operand> operands) {
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (operands[i].written && copies_[i]) move(operands[i], *copies_[i], false);
    }
  }

  std::vector<TensorView> views;

 private:
  void move(Operand& whole, Tensor& copy, bool in) const {
    std::int64_t at = 0;
    for (const TokenRange& chunk : chunks_) {
      Tensor there = torch::stable::narrow(*whole.tensor, whole.dim, chunk.first, chunk.count());
      Tensor here = torch::stable::narrow(copy, whole.dim, at, chunk.count());
      torch::stable::copy_(in ? here : there, in ? there : here);
      at += chunk.count();
    }
  }

  std::array<TokenRange, 2> chunks_;
  std::vector<std::optional<Tensor>> copies_;
};

// run(p) on a thread for each; the first error that is not for another's loss is the call's.
void on_threads(const char* op, std::span<const std::unique_ptr<Communicator>> ranks,
                const std::function<void(std::size_t)>& run) {
  std::vector<std::exception_ptr> errors(ranks.size());
  const auto guarded = [&](std::size_t p) {
    try {
      run(p);
    } catch (...) {
      errors[p] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(ranks.size());
  try {
    for (std::size_t p = 1; p < ranks.size(); ++p) threads.emplace_back(guarded, p);
    guarded(0);
  } catch (const std::system_error&) {
    ranks[threads.size() + 1]->abandon("its thread could not be started");
    errors[0] = std::make_exception_ptr(
        DeviceError(argument(op, "world_size") + " threads could not be started"));
  }
  for (std::thread& t : threads) t.join();
  std::exception_ptr lost;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const RankLost&) {
      if (!lost) lost = error;
    }
  }
  if (lost) std::rethrow_exception(lost);
}

template <class Op>
std::vector<Operand> run_locally(const Arguments<Op>& a, const Work& work) {
  const char* op = Op::op;
  const std::int64_t P = a.template get<"world_size">();
  if (P < 1 || P > kMostThreads) {
    throw InvalidArgument(argument(op, "world_size") + " must be 1 to " +
                          std::to_string(kMostThreads) + " but is " + std::to_string(P));
  }
  Plan plan = plan_of(a);
  const std::int64_t tokens = plan.ring.tokens = a.template view<"q">().shape[1];
  const CurrentDevice current(op, a.template view<"q">().device);
  Context context;
  context.stream = current.stream();
  ring::check_stream(op, a.template view<"q">().device, context);
  std::vector<Operand> made = work.operands();
  for (const Operand& x : made) {  // all are cut as q is
    if (!x.view.defined() ||
        (x.view.rank > x.dim && x.view.shape[static_cast<std::size_t>(x.dim)] == tokens)) {
      continue;
    }
    throw InvalidArgument(argument(op, x.name) + " must have q's " + std::to_string(tokens) +
                          " rows but has shape " + shape_string(x.view.sizes()));
  }
  const int size = static_cast<int>(P);
  const auto ranks = local_communicators(size, {.deadline_s = a.template get<"deadline_s">()});
  std::vector<Shard> shards;
  for (int p = 0; p < size; ++p) {
    shards.emplace_back(op, made, ring_shard(tokens, size, p, plan.ring.balance));
  }
  const int threads = std::max(1, call_threads() / size);
  on_threads(op, ranks, [&](std::size_t p) {
    const CurrentStream stream(made[0].view.device, current.stream());
    run_rank(op, shards[p].views, plan, work, *ranks[p], threads);
  });
  for (Shard& shard : shards) shard.put(made);
  return made;
}

template <class Op>
std::vector<Operand> run_ring(const Arguments<Op>& a, const Work& work) {
  return a.template get<"world_size">() != 0 ? run_locally(a, work) : run_on_group(a, work);
}

struct Forward {
  static constexpr const char* op = "ring_attention";
  static constexpr std::string_view schema =
      "ring_attention(Tensor q, Tensor k, Tensor v, " ANNULUS_RING_OPTIONS
      ", bool return_lse, bool keep) -> (Tensor o, Tensor lse)";

  static std::tuple<Tensor, Tensor> run(const Arguments<Forward>& a) {
    using Views = std::span<const TensorView>;
    Work work;
    work.operands = [&a] {
      const TensorView q = a.view<"q">(), v = a.view<"v">();
      const TensorView o =
          dense(op, {q.shape[0], q.shape[1], q.shape[2], v.shape[3]}, q.dtype, q.device);
      const TensorView lse = dense(op, {q.shape[0], q.shape[2], q.shape[1]}, DType::kF32, q.device);
      return std::vector<Operand>{read(op, "q", a.get<"q">()), read(op, "k", a.get<"k">()),
                                  read(op, "v", a.get<"v">()), written(op, "o", o),
                                  written(op, "lse", lse, 2)};
    };
    work.workspace = [](Views x, const Plan& plan, const Communicator& rank) {
      const auto bytes = [&](const auto& options) {
        return ring_attention_forward_workspace(x[0], x[1], x[2], options, plan.ring, rank.size(),
                                                rank.rank());
      };
      return std::visit(bytes, plan.options);
    };
    work.compute = [](Views x, const Plan& plan, Communicator& rank, Context& context) {
      const auto call = [&](const auto& options) {
        ring_attention_forward(x[0], x[1], x[2], x[3], x[4], options, plan.ring, rank, context);
      };
      std::visit(call, plan.options);
    };
    const std::vector<Operand> all = run_ring(a, work);
    const bool wants_lse = a.get<"return_lse">() || a.get<"keep">();
    return {*all[3].tensor,
            wants_lse ? *all[4].tensor : nothing(op, "lse", DType::kF32, all[4].view.device)};
  }
};

// All three are made on all ranks, who know nothing of what others need.
struct Backward {
  static constexpr const char* op = "ring_attention";
  static constexpr std::string_view schema =
      "ring_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, "
      "Tensor lse, " ANNULUS_RING_OPTIONS ", int needed) -> Tensor[]";

  static std::vector<Tensor> run(const Arguments<Backward>& a) {
    using Views = std::span<const TensorView>;
    Work work;
    work.operands = [&a] {
      return std::vector<Operand>{read(op, "q", a.get<"q">()),
                                  read(op, "k", a.get<"k">()),
                                  read(op, "v", a.get<"v">()),
                                  read(op, "o", a.get<"o">()),
                                  read(op, "lse", a.get<"lse">(), 2),
                                  read(op, "do", a.get<"do">()),
                                  read(op, "dlse", a.get<"dlse">(), 2),
                                  written(op, "dq", dense_like(op, a.view<"q">())),
                                  written(op, "dk", dense_like(op, a.view<"k">())),
                                  written(op, "dv", dense_like(op, a.view<"v">()))};
    };
    work.workspace = [](Views x, const Plan& plan, const Communicator& rank) {
      const auto bytes = [&](const auto& options) {
        return ring_attention_backward_workspace(x[0], x[1], x[2], options, plan.ring, rank.size(),
                                                 rank.rank());
      };
      return std::visit(bytes, plan.options);
    };
    work.compute = [](Views x, const Plan& plan, Communicator& rank, Context& context) {
      const auto call = [&](const auto& options) {
        ring_attention_backward(x[5], x[6], x[0], x[1], x[2], x[3], x[4], x[7], x[8], x[9], options,
                                plan.ring, rank, context);
      };
      std::visit(call, plan.options);
    };
    const std::vector<Operand> all = run_ring(a, work);
    std::vector<Tensor> result;
    for (std::size_t i = 0; i < 3; ++i) {
      if ((a.get<"needed">() >> i & 1) != 0) result.push_back(*all[7 + i].tensor);
    }
    return result;
  }
};

// A call that Python refused, of which the other ranks of the group learn here.
void refuse(std::int64_t handle, double deadline_s, std::string why) {
  try {
    const auto group = group_of(Forward::op, handle);
    const std::lock_guard lock(group->mutex);
    Communicator& rank = *group->communicator;
    try {
      rank.set_deadline_s(deadline_s);  // all ranks have the same
    } catch (const InvalidArgument&) {
    }
    tokens_of_all(Forward::op, rank, -1, std::make_exception_ptr(InvalidArgument(why)));
  } catch (const dist::Interrupted&) {
    throw;
  } catch (const std::exception&) {  // that same rule, or there is nobody left to tell
  }
}

ANNULUS_TORCH_OPS(Forward, Backward)

}  // namespace
}  // namespace annulus::torch_glue

STABLE_TORCH_LIBRARY_FRAGMENT(annulus, m) {
  m.def("_ring_refuse(int group, float deadline_s, str why) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("_ring_refuse", TORCH_BOX(&annulus::torch_glue::refuse));
}
