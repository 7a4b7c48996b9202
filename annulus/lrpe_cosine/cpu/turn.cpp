// LRPE-cosine on the CPU.
//
// A task is one head of one tensor and a run of tokens; it makes the anchors of a tile of 128 tokens once and
// turns the tile of all sequences, two at a time. Tasks are fixed by the problem, and each writes only what is its
// own, so the bits do not depend on the number of threads. Without an activation, with dense columns and no axis of a
// few columns between others, a row goes from x to y in registers; everything else goes through row buffers.
//
// lrpe_cosine.md has the figures and what limits them.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "annulus/lrpe_cosine/cpu/turn.cpp"
#if ANNULUS_HAVE_HWY && ANNULUS_HWY_DISPATCH
#include <hwy/foreach_target.h>  // compiles this file once per instruction set
#endif

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "annulus/core/dispatch.h"
#include "annulus/core/values.h"
#include "annulus/cpu/parallel.h"
#include "annulus/cpu/simd-inl.h"
#include "annulus/lrpe_cosine/cpu/apply-inl.h"
#include "annulus/lrpe_cosine/cpu/direct-inl.h"
#include "annulus/lrpe_cosine/cpu/phases-inl.h"
#include "annulus/lrpe_cosine/cpu/rows-inl.h"
#include "annulus/lrpe_cosine/cpu/scratch-inl.h"
#include "annulus/lrpe_cosine/plan.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {

// One task's place: which side and head, which tokens.
struct Place {
  int side = 0;
  std::int64_t head = 0, flat_head = 0, begin = 0, end = 0;
};

inline Place place_of(const Plan& plan, const Tasks& tasks, std::int64_t task) {
  Place p;
  p.flat_head = task / tasks.chunks;
  p.side = p.flat_head >= plan.side[0].heads ? 1 : 0;
  p.head = p.flat_head - (p.side == 1 ? plan.side[0].heads : 0);
  p.begin = (task % tasks.chunks) * tasks.chunk;
  p.end = std::min(plan.L, p.begin + tasks.chunk);
  return p;
}

// One worker: its buffers, and the loops over tokens and batch.
template <class Real>
class Worker {
 public:
  Worker(const Plan& plan, const Scratch<Real>& scratch, std::int64_t index)
      : plan_(plan),
        size_(size_of(plan.dtype)),
        row_access_(row_access<Real>(plan.dtype)),
        turn_tile_(direct_path(plan.dtype, scratch.segments)),
        scratch_(scratch),
        width_(scratch.width),
        base_(scratch.worker_reals + index * (scratch.phase_reals + Scratch<Real>::kRows * width_)),
        phase_(plan.axes, scratch.segments, scratch.tables, scratch.rounding, base_,
               scratch.worker_turns + index * scratch.phase_turns,
               scratch.worker_places + index * scratch.phase_places) {
    Real* p = base_ + scratch.phase_reals;
    for (Real** row : {&row_.cos, &row_.sin, &row_.x1, &row_.x2, &row_.g1, &row_.g2}) {
      *row = p;
      p += width_;
    }
    if (scratch.worker_sums != nullptr) sums_ = scratch.worker_sums + index * width_;
  }

  void forward(const Place& place) {
    const Side& side = plan_.side[place.side];
    phase_.start_head(place.head / side.heads_per_row);
    if constexpr (std::is_same_v<Real, float>) {
      if (!scratch_.buffered && turned_directly(place, side.x, side.y, Direction::kForward)) return;
    }
    for_tokens(place.begin, place.end, 0, plan_.B, [&](std::int64_t b, std::int64_t t, int) {
      const Pair x = at(side.x, b, place.head, t);
      load_activated(x, b, place);
      if (x.second) {
        turn_rows<Turn2::kRotate>(row_.x1, row_.x2);
      } else {
        turn_rows<Turn2::kSpread>(row_.x1, row_.x2);
      }
      store_rows(at(side.y, b, place.head, t));
    });
  }

  void backward(const Place& place, std::int64_t task) {
    const Side& side = plan_.side[place.side];
    phase_.start_head(place.head / side.heads_per_row);
    if constexpr (std::is_same_v<Real, float>) {
      if (!scratch_.buffered && side.dx.defined() &&
          turned_directly(place, side.dy, side.dx, Direction::kBackward)) {
        return;
      }
    }
    if (plan_.need_dtheta) std::fill_n(sums_, width_, 0.0);
    auto token_backward = [&](std::int64_t b, std::int64_t t, int token) {
      load_gradient(at(side.dy, b, place.head, t));
      if (scratch_.buffered) load_activated(at(side.x, b, place.head, t), b, place);
      if (plan_.need_dtheta && t >= plan_.prefix) add_dtheta(token);
      if (side.dx.defined()) {
        if (plan_.activation != LrpeActivation::kNone) {
          activation_backward(at(side.x, b, place.head, t), b, place);
        }
        store_rows(at(side.dx, b, place.head, t));
      }
    };
    for_tokens(place.begin, place.end, 0, plan_.B, token_backward);
    if (plan_.need_dtheta) std::copy_n(sums_, width_, scratch_.partial + task * width_);
  }

  // Softmax over tokens: maximum and reciprocal sum of each column of one (b, head).
  void column_statistics(const Place& place, std::int64_t b) {
    const Side& side = plan_.side[place.side];
    Real* high = scratch_.column_max + column_index(place.flat_head, b);
    Real* scale = scratch_.column_scale + column_index(place.flat_head, b);
    std::fill_n(high, plan_.C, -std::numeric_limits<Real>::infinity());
    std::fill_n(sums_, plan_.C, 0.0);  // in double: a column may have 2^31 terms
    for (std::int64_t t = 0; t < plan_.L; ++t) {
      row_access_.load(at(side.x, b, place.head, t).first, side.x.stride[3], plan_.C, row_.x1);
      for (std::int64_t c = 0; c < plan_.C; ++c) high[c] = max_with_nan(high[c], row_.x1[c]);
    }
    for (std::int64_t t = 0; t < plan_.L; ++t) {
      row_access_.load(at(side.x, b, place.head, t).first, side.x.stride[3], plan_.C, row_.x1);
      exp_minus(row_.x1, high, plan_.C);
      for (std::int64_t c = 0; c < plan_.C; ++c) sums_[c] += static_cast<double>(row_.x1[c]);
    }
    for (std::int64_t c = 0; c < plan_.C; ++c) scale[c] = static_cast<Real>(1 / sums_[c]);
  }

  // ... and sum(p g) of each column, for the backward.
  void column_dots(const Place& place, std::int64_t b) {
    const Side& side = plan_.side[place.side];
    phase_.start_head(place.head / side.heads_per_row);
    Real* dot = scratch_.column_dot + column_index(place.flat_head, b);
    std::fill_n(sums_, plan_.C, 0.0);
    for_tokens(0, plan_.L, b, b + 1, [&](std::int64_t, std::int64_t t, int) {
      load_gradient(at(side.dy, b, place.head, t));
      load_activated(at(side.x, b, place.head, t), b, place);
      for (const Segment& g : scratch_.segments) {
        for (std::int64_t k = 0; k < g.length; ++k) {
          sums_[g.column + k] += static_cast<double>(row_.x1[g.slot + k] * row_.g1[g.slot + k]);
        }
      }
    });
    for (std::int64_t c = 0; c < plan_.C; ++c) dot[c] = static_cast<Real>(sums_[c]);
  }

 private:
  // A row of the two components, columns `step` apart.
  struct Pair {
    char *first, *second;
    std::int64_t step;
  };
  Pair at(const Operand& o, std::int64_t b, std::int64_t h, std::int64_t t) const {
    const std::int64_t i = (b * o.stride[0] + h * o.stride[1] + t * o.stride[2]) * size_;
    return {static_cast<char*>(o.first) + i,
            o.second != nullptr ? static_cast<char*>(o.second) + i : nullptr, o.stride[3]};
  }
  // A component's columns from `g` on, in and out of a row buffer.
  void load(const char* p, std::int64_t step, const Segment& g, Real* row) const {
    row_access_.load(p + g.column * step * size_, step, g.length, row + g.slot);
  }
  void store(const Real* row, const Segment& g, char* p, std::int64_t step) const {
    row_access_.store(row + g.slot, g.length, p + g.column * step * size_, step);
  }

  std::int64_t column_index(std::int64_t flat_head, std::int64_t b) const {
    return (b * scratch_.tasks.heads + flat_head) * plan_.C;
  }

  void find_position(std::int64_t t, std::int64_t b, std::int64_t* position) const {
    std::int64_t s = t - plan_.prefix;
    for (int j = plan_.axes - 1; j > 0; --j) {
      position[j] = s % plan_.extent[j];
      s /= plan_.extent[j];
    }
    position[0] = plan_.axes == 1 ? wrapping_add(s, batch_offset(plan_, b)) : s;
  }
  // ... of the token `n` further on, which is on the same line of the last axis or the first of the next.
  void advance_position(std::int64_t n, std::int64_t* position) const {
    int j = plan_.axes - 1;
    position[j] = wrapping_add(position[j], n);
    for (; j > 0 && position[j] == plan_.extent[j]; --j) {
      position[j] = 0;
      ++position[j - 1];
    }
  }

  // f(first, last, t0) for every tile of [begin, end), with the tile's phases made: for
  // sequences [b0, b1) at once, or for each where each has its own positions.
  template <class F>
  void for_tiles(std::int64_t begin, std::int64_t end, std::int64_t b0, std::int64_t b1, F&& f) {
    const std::int64_t group = plan_.own_positions() ? 1 : b1 - b0;
    for (std::int64_t b = b0; b < b1; b += group) {
      std::int64_t position[LrpeGrid::kMaxAxes] = {};
      for (std::int64_t t0 = begin; t0 < end;) {
        const int tokens =
            make_phases(t0, static_cast<int>(std::min<std::int64_t>(kTile, end - t0)), b,
                        t0 == begin, position);
        f(b, b + group, t0);
        t0 += tokens;
      }
    }
  }

  // The phases of up to `most` tokens from t0 on, of which `position` is the first's unless it is `unknown`; moves
  // it on. Returns how many there are.
  HWY_NOINLINE int make_phases(std::int64_t t0, int most, std::int64_t b, bool unknown,
                               std::int64_t* position) {
    phase_.start_tile();
    if (plan_.position_ids.defined()) return make_phases_of_ids(t0, most, b, position);
    const auto prefix = static_cast<int>(std::clamp<std::int64_t>(plan_.prefix - t0, 0, most));
    phase_.set_zero_phase(prefix);
    int tokens = prefix;
    if (tokens < most && (unknown || tokens > 0 || t0 == plan_.prefix)) {
      find_position(t0 + tokens, b, position);
    }
    const int last = plan_.axes - 1;
    while (tokens < most) {
      const std::int64_t line = last > 0 ? plan_.extent[last] - position[last] : most;
      const int n = phase_.set_positions(
          static_cast<int>(std::min<std::int64_t>(line, most - tokens)), position);
      if (n == 0) break;
      if (plan_.need_dtheta) remember(tokens, n, position);
      advance_position(n, position);
      tokens += n;
    }
    return tokens;
  }

  // The same where tokens say where they are. Those that follow each other along the last axis, as in packed
  // sequences, go by the run.
  int make_phases_of_ids(std::int64_t t0, int most, std::int64_t b, std::int64_t* position) {
    constexpr int kShortestRun = 8;
    int tokens = 0;
    while (tokens < most) {
      load_ids(b, t0 + tokens, position);
      const int run = run_of_ids(b, t0 + tokens, most - tokens, position);
      const int n =
          run < kShortestRun ? phase_.set_position(position) : phase_.set_positions(run, position);
      if (n == 0) break;
      if (plan_.need_dtheta) remember(tokens, n, position);
      tokens += n;
    }
    return tokens;
  }
  void load_ids(std::int64_t b, std::int64_t t, std::int64_t* position) const {
    for (int j = 0; j < plan_.axes; ++j) position[j] = position_id(plan_.position_ids, b, t, j);
  }
  // How many of `most` tokens from t on, which is at `position`, go up along the last axis.
  int run_of_ids(std::int64_t b, std::int64_t t, int most, const std::int64_t* position) const {
    std::int64_t here[LrpeGrid::kMaxAxes];
    const int last = plan_.axes - 1;
    for (int n = 1; n < most; ++n) {
      load_ids(b, t + n, here);
      if (here[last] != wrapping_add(position[last], n) ||
          !std::equal(here, here + last, position)) {
        return n;
      }
    }
    return most;
  }

  // The direct path, where there is one: rows go from `in` to `out` without a stop, two sequences at a time.
  bool turned_directly(const Place& place, const Operand& in, const Operand& out,
                       Direction direction) {
    if (turn_tile_ == nullptr || in.stride[3] != 1 || out.stride[3] != 1) return false;
    // Two sequences at once share the making of the phases; not in place, and only where a block of columns
    // is whole lines (cpu/direct-inl.h).
    const bool two_at_once = whole_lines(out) && in.first != out.first;
    for_tiles(place.begin, place.end, 0, plan_.B,
              [&](std::int64_t first, std::int64_t last, std::int64_t t0) {
                std::int64_t b = first;
                for (int sequences = two_at_once ? 2 : 1; b < last; b += sequences) {
                  if (b + sequences > last) sequences = 1;
                  const Pair x = at(in, b, place.head, t0);
                  const Pair y = at(out, b, place.head, t0);
                  turn_tile_({scratch_.segments, phase_.runs(), phase_.sines(), x.first, x.second,
                              y.first, y.second, in.stride[2], out.stride[2], in.stride[0],
                              out.stride[0], sequences, direction});
                }
              });
    return true;
  }

  // Every row of the tensor starts on a cache line.
  bool whole_lines(const Operand& o) const {
    constexpr std::int64_t kLine = 64;
    const auto on_line = [](const void* p) {
      return reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
    };
    return on_line(o.first) && (o.second == nullptr || on_line(o.second)) &&
           o.stride[0] * size_ % kLine == 0 && o.stride[1] * size_ % kLine == 0 &&
           o.stride[2] * size_ % kLine == 0;
  }

  // f(b, t, token) for every token of every sequence, with its row of sines and cosines made.
  template <class F>
  void for_tokens(std::int64_t begin, std::int64_t end, std::int64_t b0, std::int64_t b1, F&& f) {
    for_tiles(begin, end, b0, b1, [&](std::int64_t first, std::int64_t last, std::int64_t t0) {
      phase_.for_rows(row_.cos, row_.sin, [&](int i) {
        for (std::int64_t b = first; b < last; ++b) f(b, t0 + i, i);
      });
    });
  }

  // x1 (and x2) = f(x), as row buffers.
  void load_activated(const Pair& x, std::int64_t b, const Place& place) {
    for (const Segment& g : scratch_.segments) {
      load(x.first, x.step, g, row_.x1);
      if (x.second) load(x.second, x.step, g, row_.x2);
    }
    const Real* high = nullptr;
    const Real* scale = nullptr;
    if (plan_.activation == LrpeActivation::kSoftmaxTokens) {
      high = scratch_.column_max + column_index(place.flat_head, b);
      scale = scratch_.column_scale + column_index(place.flat_head, b);
    }
    activate(plan_.activation, scratch_.segments, row_.x1, high, scale);
  }

  // (g1, g2) = (x1, x2) turned by the phase.
  template <Turn2 kTurn>
  void turn_rows(const Real* x1, const Real* x2) {
    for (const Segment& g : scratch_.segments) {
      turn_row<kTurn>(x1 + g.slot, x2 + g.slot, row_.cos + g.slot, row_.sin + g.slot, g.length,
                      row_.g1 + g.slot, row_.g2 + g.slot);
    }
  }

  // g = the gradient turned back by the phase.
  void load_gradient(const Pair& dy) {
    for (const Segment& g : scratch_.segments) {
      load(dy.first, dy.step, g, row_.g1);
      load(dy.second, dy.step, g, row_.g2);
    }
    turn_rows<Turn2::kRotateBack>(row_.g1, row_.g2);
  }

  // g1 = dx, from g1 and x (loaded again: the activated row is no longer x).
  void activation_backward(const Pair& x, std::int64_t b, const Place& place) {
    const Real* dot = plan_.activation == LrpeActivation::kSoftmaxTokens
                          ? scratch_.column_dot + column_index(place.flat_head, b)
                          : nullptr;
    for (const Segment& g : scratch_.segments) load(x.first, x.step, g, row_.g2);
    annulus::lrpe_cosine::HWY_NAMESPACE::activation_backward(plan_.activation, scratch_.segments,
                                                             row_.g2, row_.x1, dot, row_.g1);
  }

  void store_rows(const Pair& y) const {
    for (const Segment& g : scratch_.segments) {
      store(row_.g1, g, y.first, y.step);
      if (y.second) store(row_.g2, g, y.second, y.step);
    }
  }

  // dtheta = sum of s q, in double: s may be 2^31 and more, and the terms have both signs.
  void remember(int token, int tokens, const std::int64_t* position) {
    for (int j = 0; j < plan_.axes; ++j) {
      for (int t = 0; t < tokens; ++t) {
        const std::int64_t p = j == plan_.axes - 1 ? wrapping_add(position[j], t) : position[j];
        position_[j][token + t] = static_cast<double>(p);
      }
    }
  }

  void add_dtheta(int token) {
    for (const Segment& g : scratch_.segments) {
      add_moments(row_.x1 + g.slot, plan_.rotate ? row_.x2 + g.slot : nullptr, row_.g1 + g.slot,
                  row_.g2 + g.slot, position_[g.axis][token], g.length, sums_ + g.slot);
    }
  }

  struct Rows {
    Real *cos = nullptr, *sin = nullptr, *x1 = nullptr, *x2 = nullptr, *g1 = nullptr, *g2 = nullptr;
  };

  const Plan& plan_;
  std::int64_t size_;  // bytes of an element
  RowAccess<Real> row_access_;
  TurnTile turn_tile_;
  const Scratch<Real>& scratch_;
  std::int64_t width_;
  Real* base_;
  Phases<Real> phase_;
  Rows row_;
  double* sums_ = nullptr;
  double position_[LrpeGrid::kMaxAxes][kTile] = {};
};

// Which of the kWorkers pieces of scratch are free. The lowest goes first, so that few threads use few of them,
// over and over, and find them in their caches.
class FreeScratch {
 public:
  std::int64_t take() {
    std::uint64_t free = free_.load(std::memory_order_relaxed);
    while (!free_.compare_exchange_weak(free, free & (free - 1), std::memory_order_acquire)) {
    }
    return std::countr_zero(free);
  }
  void give_back(std::int64_t index) {
    free_.fetch_or(std::uint64_t{1} << index, std::memory_order_release);
  }

 private:
  static_assert(kWorkers == 64);  // no more run at once, so there is one for each
  std::atomic<std::uint64_t> free_{~std::uint64_t{0}};
};

// Runs body(worker, task) over all tasks: worker w takes a fixed share of them.
template <class Real, class F>
void for_tasks(const Plan& plan, const Scratch<Real>& scratch, std::int64_t tasks, int threads,
               F&& body) {
  const std::int64_t workers = std::min(kWorkers, tasks);
  FreeScratch free;
  annulus::cpu::parallel_for(workers, threads, [&](std::int64_t w) {
    const std::int64_t index = free.take();
    Worker<Real> worker(plan, scratch, index);
    for (std::int64_t i = w * tasks / workers; i < (w + 1) * tasks / workers; ++i) body(worker, i);
    free.give_back(index);  // bodies throw nothing
  });
}

// dtheta[row, k] = the partial sums of the row's heads in order, all axes that own column k.
template <class Real>
void sum_partials(const Plan& plan, const Scratch<Real>& scratch, int threads) {
  annulus::cpu::parallel_for(plan.theta_rows, threads, [&](std::int64_t row) {
    double* total = scratch.theta + row * scratch.theta_width;  // theta is no longer needed
    std::fill_n(total, plan.E, 0.0);
    for (int side = 0; side < plan.sides; ++side) {
      const std::int64_t heads = plan.side[side].heads_per_row;
      const std::int64_t first = (side == 1 ? plan.side[0].heads : 0) + row * heads;
      const std::int64_t chunks = scratch.tasks.chunks;
      for (std::int64_t task = first * chunks; task < (first + heads) * chunks; ++task) {
        const double* partial = scratch.partial + task * scratch.width;
        for (const Segment& g : scratch.segments) {
          for (std::int64_t k = 0; k < g.length; ++k) total[k] += partial[g.slot + k];
        }
      }
    }
    visit_floating(plan.dtheta.dtype, [&]<class U>() {
      const auto dtheta = as_strided<U, 2>(plan.dtheta);
      for (std::int64_t k = 0; k < plan.E; ++k) {
        const double exact = total[k] / static_cast<double>(scratch.rounding.scale);
        dtheta(row, k) = U(static_cast<compute_t<U>>(exact));
      }
    });
  });
}

template <class Real>
void run_as(const Plan& plan, Context& context) {
  Scratch<Real> scratch(plan);
  if (scratch.empty(plan)) {
    if (plan.need_dtheta) {
      store_values(plan.dtheta, std::vector<double>(static_cast<std::size_t>(plan.dtheta.numel())));
    }
    return;
  }
  const Workspace workspace(context, plan.op, plan.device,
                            [&](ScratchLayout& p) { scratch.lay_out(p); });
  scratch.connect_tables(plan);
  make_tables(plan, scratch, context.threads);
  const auto for_columns = [&](auto body) {
    for_tasks(plan, scratch, scratch.tasks.heads * plan.B, context.threads,
              [&](Worker<Real>& worker, std::int64_t i) {
                const std::int64_t task = i / plan.B * scratch.tasks.chunks;
                (worker.*body)(place_of(plan, scratch.tasks, task), i % plan.B);
              });
  };
  if (plan.activation == LrpeActivation::kSoftmaxTokens) {
    for_columns(&Worker<Real>::column_statistics);
    if (plan.backward) for_columns(&Worker<Real>::column_dots);
  }
  for_tasks(plan, scratch, scratch.tasks.count(), context.threads,
            [&](Worker<Real>& worker, std::int64_t task) {
              const Place place = place_of(plan, scratch.tasks, task);
              plan.backward ? worker.backward(place, task) : worker.forward(place);
            });
  if (plan.need_dtheta) sum_partials(plan, scratch, context.threads);
}

// What a call is computed in: double, or float with conversions at its rows' loads and stores.
template <class F>
decltype(auto) visit_real(const Plan& plan, F&& f) {
  return plan.dtype == DType::kF64 ? f.template operator()<double>()
                                   : f.template operator()<float>();
}

void run_plan(const Plan& plan, Context& context) {
  visit_real(plan, [&]<class Real>() { run_as<Real>(plan, context); });
}
std::size_t plan_bytes(const Plan& plan) {
  return visit_real(plan, [&]<class Real>() {
    Scratch<Real> scratch(plan);
    if (scratch.empty(plan)) return std::size_t{0};
    return scratch_bytes([&](ScratchLayout& p) { scratch.lay_out(p); });
  });
}

}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus::lrpe_cosine {

ANNULUS_CPU_EXPORT(run_plan);
ANNULUS_CPU_EXPORT(plan_bytes);

namespace cpu {
void run(const Plan& plan, Context& context) { ANNULUS_CPU_CALL(run_plan)(plan, context); }
std::size_t workspace(const Plan& plan) { return ANNULUS_CPU_CALL(plan_bytes)(plan); }
}  // namespace cpu

}  // namespace annulus::lrpe_cosine
#endif
