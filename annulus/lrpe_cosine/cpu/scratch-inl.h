// How a CPU call is cut into tasks, the scratch they need, and the tables of theta they share.
#if defined(ANNULUS_LRPE_COSINE_SCRATCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_LRPE_COSINE_SCRATCH_INL_H_
#undef ANNULUS_LRPE_COSINE_SCRATCH_INL_H_
#else
#define ANNULUS_LRPE_COSINE_SCRATCH_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "annulus/core/dispatch.h"
#include "annulus/core/scratch.h"
#include "annulus/cpu/parallel.h"
#include "annulus/lrpe_cosine/cpu/phases-inl.h"
#include "annulus/lrpe_cosine/cpu/rows-inl.h"
#include "annulus/lrpe_cosine/plan.h"

HWY_BEFORE_NAMESPACE();
namespace annulus::lrpe_cosine::HWY_NAMESPACE {

// Scratch is laid out per worker, not per thread: the number of workers is fixed, so the workspace
// is the same for every number of threads.
inline constexpr std::int64_t kWorkers = 64;

// How the work is cut: `chunks` runs of `chunk` tokens for each head of each side.
struct Tasks {
  std::int64_t chunk = 1, chunks = 0, heads = 0;
  std::int64_t count() const { return chunks * heads; }
};

inline Tasks make_tasks(const Plan& plan) {
  constexpr std::int64_t kTasks = 128;  // enough to balance tens of threads
  Tasks t;
  t.heads = plan.heads();
  t.chunk = std::max<std::int64_t>(
      64, round_up(ceil_div(plan.L * std::max<std::int64_t>(t.heads, 1), kTasks), 64));
  t.chunks = ceil_div(plan.L, t.chunk);
  return t;
}

inline std::int64_t batch_offset(const Plan& plan, std::int64_t b) {
  if (!plan.offsets.defined()) return plan.offset;
  return wrapping_add(plan.offset, integer_at(plan.offsets, b * plan.offsets.stride[0]));
}
inline std::int64_t position_id(const TensorView& ids, std::int64_t b, std::int64_t t, int axis) {
  return integer_at(ids, b * ids.stride[0] + t * ids.stride[1] + axis * ids.stride[2]);
}

// Whether positions may be anything, not only what lies within a grid's extents.
inline bool unbounded(const Plan& plan) { return plan.axes == 1 || plan.position_ids.defined(); }
// Whether a coarse position other than 0 can occur.
inline bool has_anchors(const Plan& plan, std::int64_t fine_count) {
  return unbounded(plan) || longest_axis(plan) > fine_count;
}

// Which of the fine rows some token will use.
inline std::uint64_t fine_rows_of(const Plan& plan, std::int64_t fine_count) {
  const std::uint64_t all = ~std::uint64_t{0} >> (64 - fine_count);
  if (!unbounded(plan)) {
    const std::int64_t longest = longest_axis(plan);
    return longest >= fine_count ? all : (std::uint64_t{1} << longest) - 1;
  }
  const std::int64_t tokens = plan.L - plan.prefix;
  // Of many tokens all are taken to be in use: to ask each would take longer than to make them.
  constexpr std::int64_t kFewTokens = 256;
  const std::int64_t few = plan.position_ids.defined() ? kFewTokens : fine_count - 1;
  if (tokens > few) return all;
  std::uint64_t mask = 0;
  const std::int64_t sequences = plan.own_positions() ? plan.B : 1;
  for (std::int64_t b = 0; b < sequences; ++b) {
    for (std::int64_t t = 0; t < tokens && mask != all; ++t) {
      for (int j = 0; j < plan.axes; ++j) {
        const std::int64_t s = plan.position_ids.defined() ? position_id(plan.position_ids, b, t, j)
                                                           : wrapping_add(batch_offset(plan, b), t);
        mask |= std::uint64_t{1} << (s & (fine_count - 1));
      }
    }
  }
  return mask;
}

// Byte counts of one call's scratch, and its pieces once there is memory.
template <class Real>
struct Scratch {
  static constexpr int kRows = 6;  // cos, sin, x1, x2, g1, g2

  explicit Scratch(const Plan& plan)
      : rounding(rounding_of(plan.dtype)),
        segments(make_segments(plan)),
        tasks(make_tasks(plan)),
        width(segments.width) {
    tables.columns = std::min(plan.E, plan.C);  // of theta, the ones that are used
    tables.width = round_up(tables.columns, kRowPad);
    if constexpr (std::is_same_v<Real, float>) {
      tables.fine_bits = fine_bits_of(plan);
      fine_count = tables.fine_count();
      phase_reals = Phases<float>::reals(segments.count, tables.width);
      phase_turns = segments.count * tables.width;
      const bool places = rounding.near_zero > 0 && has_anchors(plan, fine_count);
      phase_places = places ? tables.width : 0;
    }
    buffered = plan.activation != LrpeActivation::kNone || plan.need_dtheta;
    columns = plan.activation == LrpeActivation::kSoftmaxTokens ? plan.B * tasks.heads * plan.C : 0;
    dot_columns = plan.backward ? columns : 0;
    partials = plan.need_dtheta ? tasks.count() * width : 0;
    rows = plan.theta_rows;
    theta_width = plan.E;
  }

  // Whether there is nothing to do, and so no need of any.
  bool empty(const Plan& plan) const { return plan.B == 0 || plan.C == 0 || tasks.count() == 0; }

  void lay_out(ScratchLayout& p) {
    constexpr bool kDouble = std::is_same_v<Real, double>;
    p(steps, rows * tables.width * (kDouble ? 2 : 1));
    p(tables_real,
      kDouble ? rows * tables.width : 2 * (rows * tables.width * fine_count + kRowPad));
    p(theta, rows * theta_width);
    p(table_turns, rows * tables.width);
    // Dense column strides are known only at run time, so the row buffers are always counted.
    p(worker_reals, kWorkers * (phase_reals + kRows * width));
    p(worker_turns, kWorkers * phase_turns);
    p(worker_places, kWorkers * phase_places);
    p(table_places, phase_places > 0 ? rows * tables.width * fine_count : 0);
    p(worker_sums, partials > 0 || columns > 0 ? kWorkers * width : 0);
    p(column_max, columns);
    p(column_scale, columns);
    p(column_dot, dot_columns);
    p(partial, partials);
  }

  // Once the block is there.
  void connect_tables(const Plan& plan) {
    if constexpr (std::is_same_v<Real, double>) {
      tables.step = reinterpret_cast<Turn*>(steps);
      tables.poison = tables_real;
    } else {
      tables.step = steps;
      tables.fine = tables_real + kRowPad;
      tables.fine_rows = fine_rows_of(plan, fine_count);
      if (phase_places > 0) tables.near = table_places;
    }
  }

  Rounding rounding;
  Segments segments;
  Tasks tasks;
  std::int64_t width;
  std::int64_t phase_reals = 0, phase_turns = 0, phase_places = 0;  // a worker
  std::int64_t fine_count = 0;
  bool buffered = false;
  std::int64_t columns = 0, dot_columns = 0, partials = 0, rows = 0, theta_width = 0;
  ThetaTables<Real> tables;
  std::uint64_t *steps = nullptr, *table_turns = nullptr, *worker_turns = nullptr;
  std::uint16_t *table_places = nullptr, *worker_places = nullptr;
  Real *tables_real = nullptr, *worker_reals = nullptr;
  Real *column_max = nullptr, *column_scale = nullptr, *column_dot = nullptr;
  double *theta = nullptr, *worker_sums = nullptr, *partial = nullptr;
};

template <class Real>
void make_tables(const Plan& plan, const Scratch<Real>& scratch, int threads) {
  annulus::cpu::parallel_for(plan.theta_rows, threads, [&](std::int64_t row) {
    double* theta = scratch.theta + row * scratch.theta_width;
    visit_floating(plan.theta.dtype, [&]<class U>() {
      const auto view = as_strided<U, 2>(plan.theta);
      for (std::int64_t k = 0; k < plan.E; ++k) {
        theta[k] = static_cast<double>(static_cast<compute_t<U>>(view(row, k)));
      }
    });
    fill_tables(scratch.tables, row, theta, scratch.rounding,
                scratch.table_turns + row * scratch.tables.width);
  });
}

}  // namespace annulus::lrpe_cosine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggling guard
