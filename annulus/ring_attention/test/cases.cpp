#include "annulus/ring_attention/test/cases.h"

#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/attention/test/parts.h"
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
  const auto P = static_cast<std::size_t>(p.ranks);
  std::vector<RingShard> shards;
  for (int r = 0; r < p.ranks; ++r) shards.emplace_back(p, r, whole);
  std::vector<std::exception_ptr> thrown(P);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < P; ++r) {
    threads.emplace_back([&, r] {
      try {
        f(static_cast<int>(r), shards[r].view());
      } catch (...) {
        thrown[r] = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (RingShard& s : shards) s.join(backward);
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

void run_ranks(const RingProblem& p, const RingTensors& whole, bool backward, Context* first) {
  auto group = local_communicators(p.ranks, {.deadline_s = 60});
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
      const RingShard shard(p, 0, whole);
      std::size_t bytes = 0;
      with_options(p, whole, [&](const auto& options) {
        const auto query = [&](auto f) {
          return f(shard.view().q, shard.view().k, shard.view().v, options, p.options(), p.ranks,
                   0);
        };
        bytes = query([&](const auto&... a) {
          return backward ? ring_attention_backward_workspace(a...)
                          : ring_attention_forward_workspace(a...);
        });
      });
      return bytes;
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

}  // namespace annulus::testing
