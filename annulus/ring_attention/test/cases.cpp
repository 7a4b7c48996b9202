#include "annulus/ring_attention/test/cases.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/attention/check.h"
#include "annulus/attention/test/parts.h"
#include "annulus/core/buffer.h"
#include "annulus/core/info.h"
#include "annulus/ring_attention/call.h"
#include "annulus/ring_attention/test/shard.h"

namespace annulus::testing {

namespace {

using Form = AttentionProblem::Form;

template <class F>
void with_options(const RingProblem& p, const RingTensors& t, F&& f) {
  const AttentionProblem& a = p.attention;
  switch (a.form) {
    case Form::kDilated:
      return f(dilated_options(a));
    case Form::kBlocks:
      return f(block_options(a, t.row_ptr, t.col_idx, {}));
    default:
      return f(dense_options(a, {}, {}));
  }
}

std::size_t workspace_of(const RingProblem& p, const RingTensors& shard, int rank, bool backward) {
  std::size_t bytes = 0;
  with_options(p, shard, [&](const auto& options) {
    const auto f = [&](const auto& query) {
      return query(shard.q, shard.k, shard.v, options, p.options(), p.ranks, rank);
    };
    bytes = f([&](const auto&... a) {
      return backward ? ring_attention_backward_workspace(a...)
                      : ring_attention_forward_workspace(a...);
    });
  });
  return bytes;
}

RingTensors tensors_of(Views in, const std::vector<TensorSpec>& inputs, Views out,
                       const std::vector<TensorSpec>& outputs) {
  const auto get = [&](const char* name) {
    const TensorView v = pick(in, inputs, name);
    return v.defined() ? v : pick(out, outputs, name);
  };
  return {get("q"),    get("k"),  get("v"),  get("o"),  get("lse"),     get("do"),
          get("dlse"), get("dq"), get("dk"), get("dv"), get("row_ptr"), get("col_idx")};
}

}  // namespace

void on_ranks(int ranks, const std::function<void(int rank)>& f) {
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < thrown.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        f(static_cast<int>(r));
      } catch (...) {
        thrown[r] = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  std::exception_ptr first;
  for (const std::exception_ptr& e : thrown) {
    if (!e) continue;
    try {
      std::rethrow_exception(e);
    } catch (const RankLost&) {
      if (!first) first = e;
    } catch (...) {
      first = e;
      break;
    }
  }
  if (first) std::rethrow_exception(first);
}

void ring_forward(const RingProblem& p, const RingTensors& t, Communicator& group,
                  Context& context) {
  with_options(p, t, [&](const auto& options) {
    ring_attention_forward(t.q, t.k, t.v, t.o, t.lse, options, p.options(), group, context);
  });
}
void ring_backward(const RingProblem& p, const RingTensors& t, Communicator& group,
                   Context& context) {
  with_options(p, t, [&](const auto& options) {
    ring_attention_backward(t.do_, t.dlse, t.q, t.k, t.v, t.o, t.lse, t.dq, t.dk, t.dv, options,
                            p.options(), group, context);
  });
}

void run_ranks(const RingProblem& p, const RingTensors& whole, bool backward, const RankCall& f) {
  std::vector<RingShard> shards;
  for (int r = 0; r < p.ranks; ++r) shards.emplace_back(p, r, whole);
  std::exception_ptr thrown;
  try {
    on_ranks(p.ranks, [&](int r) { f(r, shards[static_cast<std::size_t>(r)].view()); });
  } catch (...) {
    thrown = std::current_exception();
  }
  for (RingShard& s : shards) s.join(backward);
  if (thrown) std::rethrow_exception(thrown);
}

void run_ranks(const RingProblem& p, const RingTensors& whole, bool backward, Context* first) {
  auto group = local_communicators(p.ranks, {.deadline_s = 60});
  if (p.ranks == 1 && first != nullptr) {  // on the tensors themselves, whatever is wrong with them
    return backward ? ring_backward(p, whole, *group[0], *first)
                    : ring_forward(p, whole, *group[0], *first);
  }
  run_ranks(p, whole, backward, [&](int rank, const RingTensors& shard) {
    Context own;
    own.threads = 1;
    Context& context = rank == 0 && first != nullptr ? *first : own;
    Communicator& mine = *group[static_cast<std::size_t>(rank)];
    backward ? ring_backward(p, shard, mine, context) : ring_forward(p, shard, mine, context);
  });
}

Case ring_attention_case(const RingProblem& problem) {
  RingProblem p = problem;
  p.attention.need_dq = p.attention.need_dkv = true;
  Case c = attention_case(p.attention);
  c.op = "ring_attention";
  c.params += " ranks=" + std::to_string(p.ranks) +
              (p.balance == Balance::kZigzag ? " zigzag" : " contiguous") +
              (p.deterministic ? " same_bits" : "") + " slice=" + std::to_string(p.slice);
  for (Call& call : c.calls) {
    const bool backward = call.name == "backward";
    // Of rank 0, whose context is the case's.
    call.workspace = [p, backward, inputs = call.inputs](Views in, Views) {
      const RingTensors whole = tensors_of(in, inputs, {}, {});
      return workspace_of(p, RingShard(p, 0, whole).view(), 0, backward);
    };
    call.run = [p, backward, inputs = call.inputs, outputs = call.outputs](Views in, Views out,
                                                                           Context& context) {
      run_ranks(p, tensors_of(in, inputs, out, outputs), backward, &context);
    };
    if (!backward) continue;
    call.prepare = [p, inputs = call.inputs](Views in, Context&) {
      run_ranks(p, tensors_of(in, inputs, {}, {}), false);
    };
  }
  return c;
}

namespace {

// Memory that stays, so that a benchmark does not time the system's: one block, grown where it is too small.
class KeepingAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device device, void*) override {
    if (memory_.bytes() < bytes) memory_ = Buffer(device, bytes);
    return memory_.data();
  }
  void deallocate(void*, std::size_t, Device, void*) noexcept override {}

 private:
  Buffer memory_;
};

struct LocalRanks {
  explicit LocalRanks(int ranks) : group(local_communicators(ranks)), memory(group.size()) {}
  std::vector<std::unique_ptr<Communicator>> group;
  std::vector<KeepingAllocator> memory;
};

// A rank's contiguous shard, where it lies in the whole.
RingTensors shard_of(const RingProblem& p, const RingTensors& whole, int rank) {
  const TokenRange rows = ring_shard(p.attention.Tq, p.ranks, rank, p.balance)[0];
  RingTensors shard = whole;
  using T = RingTensors;
  for (const auto member :
       {&T::q, &T::k, &T::v, &T::o, &T::lse, &T::do_, &T::dlse, &T::dq, &T::dk, &T::dv}) {
    TensorView& v = shard.*member;
    if (!v.defined()) continue;
    const std::size_t axis = member == &T::lse || member == &T::dlse ? 2 : 1;
    v.data = static_cast<char*>(v.data) + rows.first * v.stride[axis] * size_of(v.dtype);
    v.shape[axis] = rows.count();
  }
  return shard;
}

// With threads of its share of the machine.
void run_rank(const RingProblem& p, const RingTensors& shard, bool backward, Communicator& group,
              Context& context) {
  context.threads = std::max(1, cpu_threads() / p.ranks);
  backward ? ring_backward(p, shard, group, context) : ring_forward(p, shard, group, context);
}

// Each rank's rows of a tensor, to all ranks.
void gather_rows(const RingProblem& p, const TensorView& whole, std::size_t axis,
                 Communicator& group) {
  std::vector<TensorShard> shards;
  std::size_t most = 0;
  const auto bytes_of = [](const TensorShard& s) {
    return static_cast<std::size_t>(s.view().numel() * size_of(s.view().dtype));
  };
  for (int r = 0; r < p.ranks; ++r) {
    most = std::max(most, bytes_of(shards.emplace_back(p, r, whole, axis)));
  }
  std::vector<std::byte> mine(most), all(most * shards.size());
  TensorShard& own = shards[static_cast<std::size_t>(group.rank())];
  own.cut();
  copy_bytes(mine.data(), kCPU, own.view().data, own.view().device, bytes_of(own));
  group.all_gather(mine, all);
  for (std::size_t r = 0; r < shards.size(); ++r) {
    const TensorView& to = shards[r].view();
    copy_bytes(to.data, to.device, &all[r * most], kCPU, bytes_of(shards[r]));
    shards[r].join();
  }
}

// A case of attention whose calls are run(tensors, backward, context), of so much workspace(tensors, backward).
template <class Run, class Workspace>
Case over_ranks(const RingProblem& p, Case c, const Run& run, const Workspace& workspace) {
  c.op = "ring_attention";
  c.params += " ranks=" + std::to_string(p.ranks);
  for (Call& call : c.calls) {
    const bool backward = call.name == "backward";
    call.run = [=, inputs = call.inputs, outputs = call.outputs](Views in, Views out,
                                                                 Context& context) {
      run(tensors_of(in, inputs, out, outputs), backward, context);
    };
    call.prepare = [=, inputs = call.inputs](Views in, Context& context) {
      run(tensors_of(in, inputs, {}, {}), false, context);
    };
    call.workspace = [=, inputs = call.inputs](Views in, Views) {
      return workspace(tensors_of(in, inputs, {}, {}), backward);
    };
    if (!backward) call.prepare = nullptr;
  }
  return c;
}

}  // namespace

Case over_local_ranks(const AttentionProblem& attention, Case c, int ranks, bool deterministic) {
  const RingProblem p{attention, ranks, Balance::kContiguous, deterministic};
  const auto kept = std::make_shared<LocalRanks>(ranks);
  const auto run = [=](const RingTensors& whole, bool backward, Context&) {
    on_ranks(p.ranks, [&](int rank) {
      Context own;
      own.allocator = &kept->memory[static_cast<std::size_t>(rank)];
      run_rank(p, shard_of(p, whole, rank), backward, *kept->group[static_cast<std::size_t>(rank)],
               own);
    });
  };
  return over_ranks(p, std::move(c), run, [=](const RingTensors& whole, bool backward) {
    return workspace_of(p, shard_of(p, whole, 0), 0, backward);
  });
}

Case over_processes(const AttentionProblem& attention, Case c, Communicator& group,
                    bool deterministic, bool whole) {
  const RingProblem p{attention, group.size(), Balance::kContiguous, deterministic};
  const int rank = group.rank();
  for (Call& call : c.calls) {
    for (auto* specs : {&call.inputs, &call.outputs}) {
      for (TensorSpec& spec : *specs) {
        if (whole || spec.name == "row_ptr" || spec.name == "col_idx") continue;
        const bool lanes = spec.name == "lse" || spec.name == "dlse";
        spec.shape[lanes ? 2 : 1] = ring_shard(p.attention.Tq, p.ranks, rank, p.balance)[0].count();
      }
    }
  }
  if (!whole) c.seed += static_cast<std::uint64_t>(1000 * rank);  // no two shards alike
  const auto own = [=](const RingTensors& t) { return whole ? shard_of(p, t, rank) : t; };
  const auto run = [=, &group](const RingTensors& t, bool backward, Context& context) {
    run_rank(p, own(t), backward, group, context);
    if (!whole) return;
    using Axis = std::pair<TensorView, std::size_t>;
    for (const auto& [tensor, axis] : backward ? std::vector<Axis>{{t.dq, 1}, {t.dk, 1}, {t.dv, 1}}
                                               : std::vector<Axis>{{t.o, 1}, {t.lse, 2}}) {
      if (tensor.defined()) gather_rows(p, tensor, axis, group);
    }
  };
  return over_ranks(p, std::move(c), run, [=](const RingTensors& t, bool backward) {
    return workspace_of(p, own(t), rank, backward);
  });
}

namespace {

// A rank's state, and its engine.
struct HopOfRank {
  HopOfRank(const AttentionProblem& p, const RingTensors& t, bool backward, Context& context)
      : group(local_communicators(1)),
        hop(ring::largest_part(
            attention::plan_of(
                "ring_attention", {t.q, t.k, t.v, t.o, t.lse, t.do_, t.dlse, t.dq, t.dk, t.dv},
                dense_options(p, {}, {}),
                backward ? attention::Call::kBackward : attention::Call::kForward, &context),
            p.Tq, false)),
        engine(ring::make_engine(hop, backward)) {
    const auto floats = [&](std::int64_t rows, std::int64_t columns) {
      const std::int64_t count = engine->floats_of(p.B * rows, columns);
      memory.emplace_back(t.q.device, static_cast<std::size_t>(count) * sizeof(float));
      return static_cast<float*>(memory.back().data());
    };
    attention::Part& part = *hop.part;
    const std::int64_t queries = p.H * p.Tq, keys = p.Hkv * p.Tk;
    part.state = reinterpret_cast<attention::RowState*>(floats(queries, 2));
    part.acc = floats(queries, p.Dv);
    part.delta = floats(queries, 1);
    part.flag = reinterpret_cast<int*>(floats(1, 1));
    part.dq = backward ? floats(queries, p.D) : nullptr;
    part.dk = backward ? floats(keys, p.D) : nullptr;
    part.dv = backward ? floats(keys, p.Dv) : nullptr;
    engine->open(context, *group[0]);
    backward ? engine->fill_delta() : engine->begin();
    engine->close();
  }
  std::vector<std::unique_ptr<Communicator>> group;
  std::vector<Buffer> memory;
  attention::Plan hop;
  std::unique_ptr<ring::Engine> engine;
};

}  // namespace

Case one_hop(const AttentionProblem& p, Case c) {
  for (Call& call : c.calls) {
    const bool backward = call.name == "backward";
    const auto kept = std::make_shared<std::optional<HopOfRank>>();
    call.run = [=, inputs = call.inputs, outputs = call.outputs](Views in, Views out,
                                                                 Context& context) {
      const RingTensors t = tensors_of(in, inputs, out, outputs);
      if (!*kept || (*kept)->hop.q.data != t.q.data) kept->emplace(p, t, backward, context);
      (*kept)->engine->open(context, *(*kept)->group[0]);
      backward ? (*kept)->engine->backward() : (*kept)->engine->forward();
    };
    call.workspace = [](Views, Views) { return std::size_t{0}; };
  }
  return c;
}

}  // namespace annulus::testing
