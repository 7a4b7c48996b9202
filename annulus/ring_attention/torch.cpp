// Ring attention as an op of torch. Autograd and fake kernels are in python/annulus/ring_attention.py.
//
// One op serves the ranks of a group, each with its shards (group, world_size 0), and ranks that are threads of this process, with
// whole tensors that are cut and put together here (world_size P, group 0). Segments, or lists of blocks, say which attention it is.
#include <algorithm>
#include <array>
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

// A tensor of the call: whole, or this rank's shard.
struct Operand {
  std::optional<Tensor> tensor;  // none where it is left out
  TensorView view;
  int dim;  // that counts tokens
  bool written = false;
};

using Compute =
    std::function<void(std::span<const TensorView>, const Plan&, Communicator&, Context&)>;

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

// What a rank runs in. Scratch is the library's own: how much there is depends on what other ranks send.
class Setting {
 public:
  Setting(const char* op, Device device, int threads, const Plan& plan) : current_(op, device) {
    context.stream = current_.stream();
    context.threads = threads;
    context.deterministic = plan.ring.deterministic;
  }
  ~Setting() { keep_backends(context); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

  Context context;

 private:
  CurrentDevice current_;
};

// A rank that cannot go on says so to the others. Rules that a call breaks are the operator's to tell them.
template <class F>
void on_rank(Communicator& rank, F&& compute) {
  try {
    compute();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    rank.abandon(e.what());
    throw;
  }
}

// --- ranks of a group ---

// The tokens of all ranks together. One whose call is bad has none to tell, and the others hear why; where all calls are bad
// nobody has to.
std::int64_t tokens_of_all(Communicator& group, std::int64_t mine, const std::exception_ptr& bad) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(group.size()));
  if (bad) mine = -1;
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  if (bad) {
    try {
      std::rethrow_exception(bad);
    } catch (const std::exception& e) {
      if (std::ranges::any_of(all, [](std::int64_t n) { return n >= 0; })) group.abandon(e.what());
      throw;
    }
  }
  std::int64_t sum = 0;
  for (const std::int64_t n : all) sum = checked_add(sum, std::max<std::int64_t>(n, 0), "tokens");
  return sum;
}

template <class Op>
void run_on_group(const Arguments<Op>& a, const std::function<std::vector<Operand>()>& operands,
                  const Compute& compute, std::vector<Operand>& made) {
  const char* op = Op::op;
  const auto group = group_of(op, a.template get<"group">());
  const std::lock_guard lock(group->mutex);
  Communicator& rank = *group->communicator;
  rank.set_deadline_s(a.template get<"deadline_s">());
  on_rank(rank, [&] {
    Plan plan;
    std::exception_ptr bad;
    std::int64_t mine = 0;
    try {
      plan = plan_of(a);
      mine = a.template view<"q">().shape[1];
      made = operands();
    } catch (const std::exception&) {
      bad = std::current_exception();
    }
    plan.ring.tokens = tokens_of_all(rank, mine, bad);
    std::vector<TensorView> views;
    for (const Operand& x : made) views.push_back(x.view);
    Setting setting(op, views[0].device, call_threads(), plan);
    compute(views, plan, rank, setting.context);
  });
}

// --- ranks of this process ---

// What one rank holds of the operands: a view where its tokens lie together, else a copy.
class Shard {
 public:
  Shard(const char* op, std::span<Operand> operands, std::array<TokenRange, 2> chunks)
      : chunks_(chunks) {
    if (chunks_[0].end == chunks_[1].first) chunks_ = {TokenRange{chunks[0].first, chunks[1].end}};
    for (Operand& whole : operands) {
      TensorView view = whole.view;
      Tensor copy;
      if (view.defined()) {
        const auto dim = static_cast<std::size_t>(whole.dim);
        view.shape[dim] = chunks_[0].count() + chunks_[1].count();
        if (chunks_[1].count() == 0) {
          if (view.data != nullptr) {
            const std::int64_t skipped = chunks_[0].first * view.stride[dim] * size_of(view.dtype);
            view.data = static_cast<std::byte*>(view.data) + skipped;
          }
        } else {
          view = dense_like(op, view);
          copy = allocate(op, "a shard", view);
          if (!whole.written) move(whole, copy, true);
        }
      }
      views.push_back(view);
      copies_.push_back(std::move(copy));
    }
  }
  void put(std::span<Operand> operands) {
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (operands[i].written && copies_[i].defined()) move(operands[i], copies_[i], false);
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
  std::vector<Tensor> copies_;
};

// rank(p) on a thread for each; the first error that is not for another's loss is the call's.
void on_threads(std::span<const std::unique_ptr<Communicator>> ranks,
                const std::function<void(std::size_t)>& rank) {
  std::vector<std::exception_ptr> errors(ranks.size());
  const auto guarded = [&](std::size_t p) {
    try {
      on_rank(*ranks[p], [&] { rank(p); });
    } catch (...) {
      errors[p] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::size_t p = 1; p < ranks.size(); ++p) threads.emplace_back(guarded, p);
    guarded(0);
  } catch (const std::system_error&) {
    ranks[threads.size() + 1]->abandon("its thread could not be started");
    errors[0] = std::make_exception_ptr(
        DeviceError("[ring_attention] world_size threads could not be started"));
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
void run_locally(const Arguments<Op>& a, const std::function<std::vector<Operand>()>& operands,
                 const Compute& compute, std::vector<Operand>& made) {
  const char* op = Op::op;
  const std::int64_t P = a.template get<"world_size">();
  if (P < 1 || P > kMostThreads) {
    throw InvalidArgument(argument(op, "world_size") + " must be 1 to " +
                          std::to_string(kMostThreads) + " but is " + std::to_string(P));
  }
  Plan plan = plan_of(a);
  const TensorView q = a.template view<"q">();
  plan.ring.tokens = q.shape[1];
  made = operands();
  constexpr std::array names{"k", "v"};
  for (std::size_t i = 0; i < names.size(); ++i) {  // before they are cut as q is
    const std::int64_t rows = (i == 0 ? a.template view<"k">() : a.template view<"v">()).shape[1];
    if (rows != q.shape[1]) {
      throw InvalidArgument(argument(op, names[i]) + " must have q's " +
                            std::to_string(q.shape[1]) + " rows but has " + std::to_string(rows));
    }
  }
  auto ranks =
      local_communicators(static_cast<int>(P), {.deadline_s = a.template get<"deadline_s">()});
  std::vector<Shard> shards;
  for (int p = 0; p < P; ++p) {
    shards.emplace_back(op, made,
                        ring_shard(plan.ring.tokens, static_cast<int>(P), p, plan.ring.balance));
  }
  const int threads = std::max(1, call_threads() / static_cast<int>(P));
  on_threads(ranks, [&](std::size_t p) {
    Setting setting(op, q.device, threads, plan);
    compute(shards[p].views, plan, *ranks[p], setting.context);
  });
  for (Shard& shard : shards) shard.put(made);
}

// operands: made once the call is known to be good, and kept in the result.
template <class Op>
std::vector<Operand> run(const Arguments<Op>& a,
                         const std::function<std::vector<Operand>()>& operands,
                         const Compute& compute) {
  std::vector<Operand> made;
  if (a.template get<"world_size">() != 0) {
    run_locally(a, operands, compute, made);
  } else {
    run_on_group(a, operands, compute, made);
  }
  return made;
}

Operand read(const char* op, const char* name, const OptionalTensor& t, int dim = 1) {
  return {t, view_of(op, name, t), dim};
}
Operand written(const char* op, const char* name, TensorView view, int dim = 1) {
  Tensor t = allocate(op, name, view);
  return {std::move(t), view, dim, true};
}

struct Forward {
  static constexpr const char* op = "ring_attention";
  static constexpr std::string_view schema =
      "ring_attention(Tensor q, Tensor k, Tensor v, " ANNULUS_RING_OPTIONS
      ", bool return_lse, bool keep) -> (Tensor o, Tensor lse)";

  static std::tuple<Tensor, Tensor> run(const Arguments<Forward>& a) {
    const auto operands = [&a] {
      const TensorView q = a.view<"q">(), v = a.view<"v">();
      const auto [B, T, H, D] = std::tuple{q.shape[0], q.shape[1], q.shape[2], v.shape[3]};
      return std::vector<Operand>{
          read(op, "q", a.get<"q">()), read(op, "k", a.get<"k">()), read(op, "v", a.get<"v">()),
          written(op, "o", dense(op, {B, T, H, D}, q.dtype, q.device)),
          written(op, "lse", dense(op, {B, H, T}, DType::kF32, q.device), 2)};
    };
    std::vector<Operand> all = torch_glue::run(
        a, operands,
        [](std::span<const TensorView> x, const Plan& plan, Communicator& rank, Context& context) {
          std::visit(
              [&](const auto& options) {
                ring_attention_forward(x[0], x[1], x[2], x[3], x[4], options, plan.ring, rank,
                                       context);
              },
              plan.options);
        });
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
    const auto operands = [&a] {
      const auto like = [](const TensorView& x) { return dense_like(op, x); };
      return std::vector<Operand>{read(op, "do", a.get<"do">()),
                                  read(op, "dlse", a.get<"dlse">(), 2),
                                  read(op, "q", a.get<"q">()),
                                  read(op, "k", a.get<"k">()),
                                  read(op, "v", a.get<"v">()),
                                  read(op, "o", a.get<"o">()),
                                  read(op, "lse", a.get<"lse">(), 2),
                                  written(op, "dq", like(a.view<"q">())),
                                  written(op, "dk", like(a.view<"k">())),
                                  written(op, "dv", like(a.view<"v">()))};
    };
    std::vector<Operand> all = torch_glue::run(
        a, operands,
        [](std::span<const TensorView> x, const Plan& plan, Communicator& rank, Context& context) {
          std::visit(
              [&](const auto& options) {
                ring_attention_backward(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9],
                                        options, plan.ring, rank, context);
              },
              plan.options);
        });
    std::vector<Tensor> result;
    for (std::size_t i = 0; i < 3; ++i) {
      if ((a.get<"needed">() >> i & 1) != 0) result.push_back(*all[7 + i].tensor);
    }
    return result;
  }
};

ANNULUS_TORCH_OPS(Forward, Backward)

}  // namespace
}  // namespace annulus::torch_glue
