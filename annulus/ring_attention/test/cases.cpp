#include "annulus/ring_attention/test/cases.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/attention/test/parts.h"
#include "annulus/cpu/parallel.h"
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

// Of rank 0.
std::size_t workspace_of(const RingProblem& p, const RingTensors& whole, const RingTensors& shard,
                         bool backward) {
  std::size_t bytes = 0;
  with_options(p, whole, [&](const auto& options) {
    const auto f = [&](const auto& query) {
      return query(shard.q, shard.k, shard.v, options, p.options(), p.ranks, 0);
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
      return workspace_of(p, whole, RingShard(p, 0, whole).view(), backward);
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
  void* allocate(std::size_t bytes, Device, void*) override {
    if (memory_.size() < bytes) memory_.resize(bytes);
    return memory_.data();
  }
  void deallocate(void*, std::size_t, Device, void*) noexcept override {}

 private:
  std::vector<std::byte> memory_;
};

// Ranks with threads of their share of the machine.
struct LocalRanks {
  explicit LocalRanks(int ranks) : group(local_communicators(ranks)), memory(group.size()) {}
  std::vector<std::unique_ptr<Communicator>> group;
  std::vector<KeepingAllocator> memory;
};

}  // namespace

Case over_local_ranks(const AttentionProblem& attention, Case c, int ranks, bool deterministic) {
  const RingProblem p{attention, ranks, Balance::kContiguous, deterministic};
  const auto kept = std::make_shared<LocalRanks>(ranks);
  const auto shard_of = [p](const RingTensors& whole, int rank) {
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
  };
  const auto run = [=](const RingTensors& whole, bool backward, Context& context) {
    const auto call = [&](int rank, Context& own) {
      Communicator& group = *kept->group[static_cast<std::size_t>(rank)];
      own.threads = std::max(1, cpu::resolve_threads(context.threads) / p.ranks);
      const RingTensors shard = shard_of(whole, rank);
      backward ? ring_backward(p, shard, group, own) : ring_forward(p, shard, group, own);
    };
    on_ranks(p.ranks, [&](int rank) {
      Context own;
      // (CUDA's allocator keeps what it had.)
      if (whole.q.device == kCPU) own.allocator = &kept->memory[static_cast<std::size_t>(rank)];
      call(rank, own);
    });
  };
  c.op = "ring_attention";
  c.params += " ranks=" + std::to_string(ranks);
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
      const RingTensors whole = tensors_of(in, inputs, {}, {});
      return workspace_of(p, whole, shard_of(whole, 0), backward);
    };
    if (!backward) call.prepare = nullptr;
  }
  return c;
}

}  // namespace annulus::testing
