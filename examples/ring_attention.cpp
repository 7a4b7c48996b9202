// Attention whose sequence lies on four ranks, here threads of one process, against the same on one device: forward, gradients,
// the bytes that went around, and what happens when a rank does not come. Under mpirun: ring_attention_mpi.cpp.
//
//   a rank per thread       auto ring = annulus::local_communicators(4);    ring[p] belongs to thread p
//   its part of a sequence  annulus::ring_shard(tokens, ranks, p, balance)  which tokens rank p holds
//   the call                annulus::ring_attention_forward(q, k, v, o, lse, options, {.tokens = n}, *ring[p], context)
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "annulus/annulus.h"

namespace {

constexpr std::int64_t kTokens = 1000, kHeads = 4, kKvHeads = 2, kColumns = 32;
constexpr int kRanks = 4;
const annulus::AttentionOptions kOptions{.causal = true};
const annulus::RingOptions kRing{.tokens = kTokens};

// Of some tokens: (1, tokens, heads, columns) each, and lse (1, heads, tokens).
struct Tensors {
  explicit Tensors(std::int64_t rows) : tokens(rows) {
    for (auto* x : {&q, &o, &do_, &dq}) x->resize(size(kHeads));
    for (auto* x : {&k, &v, &dk, &dv}) x->resize(size(kKvHeads));
    lse.resize(static_cast<std::size_t>(kHeads * rows));
  }
  std::size_t size(std::int64_t heads) const {
    return static_cast<std::size_t>(tokens * heads * kColumns);
  }
  annulus::TensorView view(std::vector<float>& x) const {
    const auto heads =
        static_cast<std::int64_t>(x.size()) / std::max<std::int64_t>(tokens * kColumns, 1);
    return annulus::contiguous(x.data(), {1, tokens, heads, kColumns});
  }
  annulus::TensorView lse_view() { return annulus::contiguous(lse.data(), {1, kHeads, tokens}); }

  std::int64_t tokens;
  std::vector<float> q, k, v, o, do_, dq, dk, dv, lse;
};

// Rows of a shard from those of the whole sequence, or back.
void copy_rows(std::vector<float>& whole, std::vector<float>& shard, int rank, bool to_shard) {
  const auto row = static_cast<std::ptrdiff_t>(whole.size()) / kTokens;
  auto at = shard.begin();
  for (const annulus::TokenRange& chunk :
       annulus::ring_shard(kTokens, kRanks, rank, kRing.balance)) {
    const auto first = whole.begin() + chunk.first * row;
    const std::ptrdiff_t count = chunk.count() * row;
    if (to_shard) {
      std::copy_n(first, count, at);
    } else {
      std::copy_n(at, count, first);
    }
    at += count;
  }
}

// f(rank) on a thread each; what one threw is in the result.
std::vector<std::string> on_all_ranks(const std::function<void(int)>& f) {
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        f(rank);
      } catch (const std::exception& e) {
        errors[static_cast<std::size_t>(rank)] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return most;
}

int run() {
  // One device.
  Tensors one(kTokens);
  std::uint32_t state = 1;
  for (auto* x : {&one.q, &one.k, &one.v, &one.do_}) {
    for (float& value : *x) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
    }
  }
  annulus::Context context;
  annulus::attention_forward(one.view(one.q), one.view(one.k), one.view(one.v), one.view(one.o),
                             one.lse_view(), kOptions, context);
  annulus::attention_backward(one.view(one.do_), {}, one.view(one.q), one.view(one.k),
                              one.view(one.v), one.view(one.o), one.lse_view(), one.view(one.dq),
                              one.view(one.dk), one.view(one.dv), kOptions, context);

  // Four ranks, each with its tokens.
  Tensors ring(kTokens);
  auto ranks = annulus::local_communicators(kRanks, {.deadline_s = 30});
  std::vector<std::uint64_t> sent(kRanks);
  const auto errors = on_all_ranks([&](int rank) {
    const auto chunks = annulus::ring_shard(kTokens, kRanks, rank, kRing.balance);
    Tensors mine(chunks[0].count() + chunks[1].count());
    for (const auto x : {&Tensors::q, &Tensors::k, &Tensors::v, &Tensors::do_}) {
      copy_rows(one.*x, mine.*x, rank, true);
    }
    annulus::Communicator& group = *ranks[static_cast<std::size_t>(rank)];
    annulus::Context own;
    own.threads = 1;  // ranks share the cores of this machine
    annulus::ring_attention_forward(mine.view(mine.q), mine.view(mine.k), mine.view(mine.v),
                                    mine.view(mine.o), mine.lse_view(), kOptions, kRing, group,
                                    own);
    annulus::ring_attention_backward(mine.view(mine.do_), {}, mine.view(mine.q), mine.view(mine.k),
                                     mine.view(mine.v), mine.view(mine.o), mine.lse_view(),
                                     mine.view(mine.dq), mine.view(mine.dk), mine.view(mine.dv),
                                     kOptions, kRing, group, own);
    for (const auto x : {&Tensors::o, &Tensors::dq, &Tensors::dk, &Tensors::dv}) {
      copy_rows(ring.*x, mine.*x, rank, false);
    }
    sent[static_cast<std::size_t>(rank)] = group.traffic().bytes;
  });
  for (const std::string& e : errors) {
    if (!e.empty()) std::printf("a rank failed: %s\n", e.c_str());
  }
  double worst = 0;
  for (const auto& [name, x] : {std::pair("o", &Tensors::o),
                                {"dq", &Tensors::dq},
                                {"dk", &Tensors::dk},
                                {"dv", &Tensors::dv}}) {
    const double apart = largest_difference(one.*x, ring.*x);
    worst = std::max(worst, apart);
    std::printf("%-3s of %d ranks and of one device differ by %.1e at most\n", name, kRanks, apart);
  }

  // What was sent is what was planned.
  const annulus::RingPlan plan = annulus::plan_ring({.tokens = kTokens,
                                                     .heads = kHeads,
                                                     .kv_heads = kKvHeads,
                                                     .head_dim = kColumns,
                                                     .ranks = kRanks,
                                                     .dtype = annulus::DType::kF32,
                                                     .causal = true});
  double all = 0;
  for (const std::uint64_t bytes : sent) all += static_cast<double>(bytes);
  const double planned = (plan.forward.bytes.mean + plan.backward.bytes.mean) * kRanks;
  std::printf("sent: %.0f bytes, planned: %.0f\n", all, planned);

  // A rank that does not come: all others say so, and say who, instead of waiting for ever.
  auto short_of_one = annulus::local_communicators(kRanks, {.deadline_s = 0.3});
  std::vector<int> blamed(kRanks, -1);
  std::vector<float> first(kRanks, 0.0F);  // of its output
  on_all_ranks([&](int rank) {
    if (rank == 2) return;
    const auto chunks = annulus::ring_shard(kTokens, kRanks, rank, kRing.balance);
    Tensors mine(chunks[0].count() + chunks[1].count());
    annulus::Context own;
    try {
      annulus::ring_attention_forward(mine.view(mine.q), mine.view(mine.k), mine.view(mine.v),
                                      mine.view(mine.o), mine.lse_view(), kOptions, kRing,
                                      *short_of_one[static_cast<std::size_t>(rank)], own);
    } catch (const annulus::RankLost& lost) {
      blamed[static_cast<std::size_t>(rank)] = lost.rank;
    }
    first[static_cast<std::size_t>(rank)] = mine.o.front();
  });
  const auto told = std::count(blamed.begin(), blamed.end(), 2),
             poisoned =
                 std::count_if(first.begin(), first.end(), [](float x) { return std::isnan(x); });
  std::printf("rank 2 did not come: %d of 3 others were told so, %d have NaN for an output\n",
              static_cast<int>(told), static_cast<int>(poisoned));

  const bool right = worst < 1e-5 && std::fabs(all - planned) < 0.5 && told == 3 && poisoned == 3;
  std::printf("%s\n", right ? "all as it should be" : "WRONG");
  return right ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
