// The population vector and its gradient on the CPU, in double: two dot products a state. A task is
// some states; the cosines of a run of neurons are made once for all of them.

#include <numbers>

#include "annulus/cpu/parallel.h"
#include "annulus/ring_rnn/cpu/rows.h"

namespace annulus::ring_rnn::cpu {

namespace {

constexpr std::int64_t kStates = 64;  // of a task

template <class T>
struct Readout {
  using Real = compute_t<T>;
  static constexpr std::int64_t kNeurons = 256;  // a run

  const ReadoutPlan& plan;
  std::int64_t first, last;  // states b T + t of this task
  Population sum[kStates] = {};
  double cosine[kNeurons], sine[kNeurons];
  Real run[kNeurons];

  Readout(const ReadoutPlan& p, std::int64_t f, std::int64_t l) : plan(p), first(f), last(l) {}

  Row row(const TensorView& v, std::int64_t state, std::int64_t i) const {
    return row_from(row_at(v, state / plan.T, state % plan.T), i);
  }
  std::int64_t offset(const TensorView& v, std::int64_t state) const {
    return state / plan.T * v.stride[0] + state % plan.T * v.stride[1];
  }

  void add_all() {
    for (std::int64_t i = 0; i < plan.N; i += kNeurons) {
      const std::int64_t n = std::min(kNeurons, plan.N - i);
      Population::fill(i, n, plan.N, cosine, sine);
      for (std::int64_t state = first; state < last; ++state) {
        annulus::cpu::rows<Real>().load(row(plan.states, state, i), n, run);
        sum[state - first].add(run, n, cosine, sine);
      }
    }
  }

  void forward() {
    add_all();
    for (std::int64_t state = first; state < last; ++state) {
      const Population& p = sum[state - first];
      write_element(plan.angle, offset(plan.angle, state), p.angle());
      write_element(plan.amplitude, offset(plan.amplitude, state), p.amplitude());
    }
  }

  void backward() {
    add_all();
    double dX[kStates], dY[kStates];
    for (std::int64_t state = first; state < last; ++state) {
      const auto gradient = [&](const TensorView& v) {
        return v.defined() ? read_element<double>(v, offset(v, state)) : 0.0;
      };
      const Population& p = sum[state - first];
      const double X = p.X(), Y = p.Y(), length = p.amplitude();
      const std::int64_t k = state - first;
      dX[k] = dY[k] = 0;
      if (length == 0) continue;
      const double da = gradient(plan.dangle) / length;
      const double dm = gradient(plan.damplitude);
      dX[k] = dm * (X / length) - da * (Y / length);
      dY[k] = dm * (Y / length) + da * (X / length);
    }
    for (std::int64_t i = 0; i < plan.N; i += kNeurons) {
      const std::int64_t n = std::min(kNeurons, plan.N - i);
      Population::fill(i, n, plan.N, cosine, sine);
      for (std::int64_t state = first; state < last; ++state) {
        for (std::int64_t j = 0; j < n; ++j) {
          run[j] = static_cast<Real>(dX[state - first] * cosine[j] + dY[state - first] * sine[j]);
        }
        annulus::cpu::rows<Real>().store(run, n, row(plan.dstates, state, i));
      }
    }
  }
};

template <class F>
void for_tasks(const ReadoutPlan& plan, Context& context, F&& f) {
  const std::int64_t states = plan.B * plan.T;
  annulus::cpu::parallel_for(
      (states + kStates - 1) / kStates, context.threads,
      [&](std::int64_t task) { f(task * kStates, std::min(states, (task + 1) * kStates)); });
}

}  // namespace

// The angle is brought into the first eighth of the circle in whole numbers before it is rounded:
// the quarter turns are exactly 0 and +-1.
void Population::fill(std::int64_t first, std::int64_t count, std::int64_t n, double* cosine,
                      double* sine) {
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t i = first + j;
    const std::int64_t quarter = (8 * i + n) / (2 * n);  // nearest multiple of pi / 2
    const double rest =
        std::numbers::pi / 2 * static_cast<double>(4 * i - quarter * n) / static_cast<double>(n);
    const double c = std::cos(rest), s = std::sin(rest);
    const double turned[4][2] = {{c, s}, {-s, c}, {-c, -s}, {s, -c}};
    cosine[j] = turned[quarter % 4][0];
    sine[j] = turned[quarter % 4][1];
  }
}

void readout_forward(const ReadoutPlan& plan, Context& context) {
  visit_floating(plan.states.dtype, [&]<class T>() {
    for_tasks(plan, context, [&](std::int64_t first, std::int64_t last) {
      Readout<T>(plan, first, last).forward();
    });
  });
}

void readout_backward(const ReadoutPlan& plan, Context& context) {
  visit_floating(plan.states.dtype, [&]<class T>() {
    for_tasks(plan, context, [&](std::int64_t first, std::int64_t last) {
      Readout<T>(plan, first, last).backward();
    });
  });
}

}  // namespace annulus::ring_rnn::cpu
