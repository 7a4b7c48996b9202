// Ring RNN on the CPU: the gradients. With y saved, the states are in `out`, or follow from y element
// by element. Checkpointed, each segment of steps runs forward again from its saved state, to the
// same bits. Then the segment runs backward, and its share of dW is summed from the states and g it
// leaves.

#include "annulus/core/context.h"
#include "annulus/ring_rnn/cpu/dweights.h"
#include "annulus/ring_rnn/cpu/network.h"

namespace annulus::ring_rnn::cpu {

namespace {

template <class Real>
struct Backward : Network<Real> {
  using Base = Network<Real>;
  using Base::B, Base::T, Base::K, Base::N, Base::ld, Base::plan, Base::row, Base::tile;
  using Base::padded_B, Base::live, Base::is_reset;

  WeightGradients<Real> dweights;
  std::int64_t segment;  // steps of one
  std::int64_t window;   // steps whose states and g are kept
  bool dots;             // s . u_k is asked for

  std::byte* forward_panels = nullptr;   // of W, where steps run again
  std::byte* backward_panels = nullptr;  // of its transpose
  unsigned char* needed = nullptr;       // [K + 1] channels of those
  std::int32_t* needed_list = nullptr;   // [K + 2]
  Real* all_y = nullptr;                 // [segment][padded_B][ld], checkpointed
  Real* all_s = nullptr;                 // [window][padded_B][ld]
  Real* all_g = nullptr;                 // [window][padded_B][ld]
  Real* l = nullptr;                     // [padded_B][ld]
  Real* u = nullptr;                     // [padded_B][ld], sum_k c_k u_k
  Real* to_reset = nullptr;              // [padded_B][ld], gradient of the state of resets
  Real* partial = nullptr;               // [padded_B][K + 1][panels], parts of s . u_k
  double* sum_J0 = nullptr;              // [padded_B]
  double* sum_J1 = nullptr;              // [padded_B]
  double* sum_alpha = nullptr;           // [batch_tiles][ld]

  explicit Backward(const Plan& p)
      : Base(p),
        dweights(*this),
        segment(p.checkpoint > 0 ? std::min(p.checkpoint, p.T) : p.T),
        window(segment + (p.checkpoint > 0 && dweights.wanted ? dweights.block_steps - 1 : 0)),
        dots(p.grad.dA.defined() || p.grad.dJ1.defined()) {}

  void lay_out(ScratchLayout& c) {
    Base::lay_out(c);
    const std::int64_t states = padded_B * ld;
    c(forward_panels, plan.checkpoint > 0 ? this->weight_bytes() : 0);
    c(backward_panels, this->weight_bytes());
    c(needed, K + 1);
    c(needed_list, K + 2);
    c(all_y, plan.checkpoint > 0 ? segment * states : 0);
    c(all_s, window * states);
    c(all_g, window * states);
    c(l, states);
    c(u, states);
    c(to_reset, plan.in.reset.defined() ? states : 0);
    c(partial, dots ? this->panels * (K + 1) * padded_B : 0);
    c(sum_J0, padded_B);
    c(sum_J1, padded_B);
    c(sum_alpha, plan.grad.dalpha.defined() ? this->batch_tiles * ld : 0);
    dweights.lay_out(c);
  }
  std::size_t bytes() {
    return scratch_bytes([this](ScratchLayout& c) { lay_out(c); });
  }

  // --- the states of a segment, again ------------------------------------------------------------

  // The state step t starts from, kept at its place in the window.
  void begin(std::int64_t b, std::int64_t t, std::int64_t slot) {
    Real* s = this->state + b * ld;
    if (plan.checkpoint > 0 && t % plan.checkpoint == 0) {
      row.load(row_at(plan.out.saved, t / plan.checkpoint, b), N, s);
      std::fill(s + N, s + ld, Real(0));
    } else if (t == 0) {
      this->load_state(plan.in.r0, b, s);
    }
    this->reset_where_asked(b, t);
    std::copy_n(s, ld, all_s + (slot * padded_B + b) * ld);
  }

  // All states: `out` has them where it was not rounded, else they follow from y.
  void states_from_saved(std::int64_t b) {
    const bool exact = plan.dtype == dtype_of<Real>;
    for (std::int64_t t = 0; t < T; ++t) {
      begin(b, t, t);
      if (t + 1 == T || !live(b, t)) continue;
      if (exact) {
        row.load(row_at(plan.out.out, b, t), N, this->state + b * ld);
        continue;
      }
      // l is not in use yet: y of the step passes through it.
      row.load(row_at(plan.out.saved, t, b), N, l + b * ld);
      std::fill(l + b * ld + N, l + (b + 1) * ld, Real(0));
      this->step(b, t, Real(0), {}, l + b * ld);
    }
  }

  void run_again(Member& m, std::int64_t t0, std::int64_t t1) {
    for (std::int64_t t = t0; t <= t1; ++t) {
      const auto between_steps = [&](std::int64_t b) {
        if (t > t0) {
          this->step(b, t - 1, this->constant[b], plan.in.drive,
                     all_y + ((t - 1 - t0) * padded_B + b) * ld);
        }
        if (t == t1) return;
        begin(b, t, t - t0);
        this->constant[b] = this->J0 * row.sum(this->state + b * ld, N);
      };
      this->each_sample(m, between_steps, [&](std::int64_t i) {
        if (t < t1) this->pack_left(i, this->state + i * tile.rows * ld);
      });
      if (t < t1) this->multiply(m, t, forward_panels, all_y + (t - t0) * padded_B * ld);
    }
  }

  // --- backward ------------------------------------------------------------------------------------

  // l after the product of step t: dL/ds, which becomes dL/dr before the step.
  void finish(std::int64_t b, std::int64_t t) {
    Real* lb = l + b * ld;
    const bool on = live(b, t);
    // l = l + J0 sum(g) + u, as y is completed in the forward.
    if (on) {
      row.step(plan.activation, N, this->constant[b], u + b * ld, nullptr, nullptr, nullptr, lb,
               nullptr);
    }
    const auto dot = [&](std::int64_t k) {
      double sum = 0;
      const Real* parts = partial + (b * (K + 1) + k) * this->panels;
      for (std::int64_t p = 0; on && p < this->panels; ++p) sum += static_cast<double>(parts[p]);
      return sum;
    };
    if (plan.grad.dJ1.defined()) sum_J1[b] += dot(0);
    if (const TensorView& dA = plan.grad.dA; dA.defined()) {
      for (std::int64_t k = 0; k < K; ++k) {
        write_element(dA, b * dA.stride[0] + t * dA.stride[1] + k * dA.stride[2], dot(k + 1));
      }
    }
    if (is_reset(b, t)) {
      for (std::int64_t i = 0; i < N; ++i) to_reset[b * ld + i] += lb[i];
      std::fill_n(lb, ld, Real(0));
    }
  }

  // g of step t, and what of l does not pass through the weights.
  void begin_back(std::int64_t b, std::int64_t t, std::int64_t t0) {
    Real* lb = l + b * ld;
    Real* g = all_g + ((t - t0) * padded_B + b) * ld;
    const Real* s = all_s + ((t - t0) * padded_B + b) * ld;
    const bool on = live(b, t);
    double* moments = plan.grad.dalpha.defined() ? sum_alpha + b / tile.rows * ld : nullptr;
    alignas(64) Real run[kRun], moment[kRun];
    for (std::int64_t i = 0; i < N; i += kRun) {
      const std::int64_t n = std::min(kRun, N - i);
      if (plan.dout.defined()) {
        row.load(row_from(row_at(plan.dout, b, t), i), n, run);
        for (std::int64_t j = 0; j < n; ++j) lb[i + j] += run[j];
      }
      if (!on) {
        std::fill_n(g + i, n, Real(0));
        continue;
      }
      const Real* y = all_y + ((t - t0) * padded_B + b) * ld + i;
      if (plan.checkpoint == 0) {
        row.load(row_from(row_at(plan.out.saved, t, b), i), n, run);
        std::fill(run + n, run + std::min(kRun, round_up(n, kPad)), Real(0));
        y = run;
      }
      row.back(plan.activation, n, this->alpha + i, this->keep + i, y, s + i, lb + i, g + i,
               moments != nullptr ? moment : nullptr);
      for (std::int64_t j = 0; moments != nullptr && j < n; ++j) {
        moments[i + j] += static_cast<double>(moment[j]);
      }
    }
    std::fill(g + N, g + ld, Real(0));
    if (plan.grad.ddrive.defined()) row.store(g, N, row_at(plan.grad.ddrive, b, t));
    const Real sum = row.sum(g, N);
    this->constant[b] = this->J0 * sum;
    if (on && plan.grad.dJ0.defined()) {
      sum_J0[b] += static_cast<double>(sum) * static_cast<double>(row.sum(s, N));
    }
  }

  void run_back(Member& m, std::int64_t t0, std::int64_t t1) {
    for (std::int64_t t = t1 - 1; t >= t0 - 1; --t) {
      const auto between_steps = [&](std::int64_t b) {
        if (t + 1 < t1) finish(b, t + 1);
        if (t >= t0) begin_back(b, t, t0);
      };
      this->each_sample(m, between_steps, [&](std::int64_t i) {
        if (t >= t0) this->pack_left(i, all_g + ((t - t0) * padded_B + i * tile.rows) * ld);
      });
      if (t < t0) break;
      const typename Base::ChannelDots asked = {needed_list, all_s + (t - t0) * padded_B * ld,
                                                partial};
      this->multiply(m, t, backward_panels, u, dots ? &asked : nullptr);
    }
  }

  // --- the call ------------------------------------------------------------------------------------

  void start(Member& m) {
    this->fill_coefficients(m, true);
    this->fill_any(m);
    m.once([&] {
      needed_list[0] = 0;
      for (std::int64_t k = 0; k <= K; ++k) {
        const TensorView& asked = k == 0 ? plan.grad.dJ1 : plan.grad.dA;
        needed[k] = this->any[k] != 0 || asked.defined() ? 1 : 0;
        if (needed[k] != 0) needed_list[++needed_list[0]] = static_cast<std::int32_t>(k);
      }
    });
    this->pack_weights(m, true, needed, backward_panels);
    if (plan.checkpoint > 0) this->pack_weights(m, false, this->any, forward_panels);
    dweights.clear(m);
    const auto clear_sums = [&](std::int64_t i) {
      if (plan.grad.dalpha.defined()) std::fill_n(sum_alpha + i * ld, ld, 0.0);
    };
    this->each_sample(
        m, [&](std::int64_t b) { start(b); }, clear_sums);
  }

  // The states of one sample where they are saved, and the gradient that comes from the end.
  void start(std::int64_t b) {
    sum_J0[b] = sum_J1[b] = 0;
    std::fill_n(this->state + b * ld, ld, Real(0));
    if (plan.in.reset.defined()) std::fill_n(to_reset + b * ld, ld, Real(0));
    if (plan.checkpoint == 0) states_from_saved(b);
    if (plan.dh_n.defined()) {
      this->load_state(plan.dh_n, b, l + b * ld);
    } else {
      std::fill_n(l + b * ld, ld, Real(0));
    }
  }

  void run(Member& m) {
    start(m);
    const std::int64_t segments = segment > 0 ? ceil_div(T, segment) : 0;
    std::int64_t kept = 0;  // steps of an unfinished block, behind the segment
    for (std::int64_t n = segments - 1; n >= 0; --n) {
      const std::int64_t t0 = n * segment;
      const std::int64_t t1 = std::min(T, t0 + segment);
      if (n + 1 < segments) keep_steps(m, kept);
      if (plan.checkpoint > 0) run_again(m, t0, t1);
      run_back(m, t0, t1);
      dweights.add(m, t0, t1 + kept, t0, all_s, all_g);
      kept = std::min(t1 + kept, round_up(t0, dweights.block_steps)) - t0;
    }
    dweights.store(m);
    this->each_sample(
        m, [&](std::int64_t b) { write(b); }, [](std::int64_t) {});
    m.once([&] { write_sums(); });
  }

  // Moves the first `kept` steps of the window behind the next segment.
  void keep_steps(Member& m, std::int64_t kept) {
    if (!dweights.wanted || kept == 0) return;
    m.each(padded_B, 8, [&](std::int64_t begin, std::int64_t end) {
      // From the last on: the places may overlap.
      for (std::int64_t t = kept - 1; t >= 0; --t) {
        const std::int64_t from = (t * padded_B + begin) * ld;
        std::copy_n(all_s + from, (end - begin) * ld, all_s + from + segment * padded_B * ld);
        std::copy_n(all_g + from, (end - begin) * ld, all_g + from + segment * padded_B * ld);
      }
    });
  }

  void write(std::int64_t b) {
    const RingRnnGradients& grad = plan.grad;
    if (grad.dr0.defined()) {
      if (plan.in.reset.defined() && !plan.in.reset_state.defined()) {
        for (std::int64_t j = 0; j < N; ++j) l[b * ld + j] += to_reset[b * ld + j];
      }
      row.store(l + b * ld, N, row_at(grad.dr0, b));
    }
    if (grad.dreset_state.defined()) {
      row.store(to_reset + b * ld, N, row_at(grad.dreset_state, b));
    }
  }

  void write_sums() const {
    const RingRnnGradients& grad = plan.grad;
    double J0 = 0, J1 = 0;
    for (std::int64_t b = 0; b < B; ++b) {
      J0 += sum_J0[b];
      J1 += sum_J1[b];
    }
    if (grad.dJ0.defined()) write_element(grad.dJ0, 0, J0);
    if (grad.dJ1.defined()) write_element(grad.dJ1, 0, J1);
    if (!grad.dalpha.defined()) return;
    double all = 0;
    for (std::int64_t i = 0; i < N; ++i) {
      double own = 0;
      for (std::int64_t k = 0; k < this->batch_tiles; ++k) own += sum_alpha[k * ld + i];
      if (plan.alpha_per_neuron()) write_element(grad.dalpha, i * grad.dalpha.stride[0], own);
      all += own;
    }
    if (!plan.alpha_per_neuron()) write_element(grad.dalpha, 0, all);
  }
};

}  // namespace

void backward(const Plan& plan, Context& context) {
  visit_real(plan, [&]<class Real>() {
    Backward<Real> b(plan);
    const Workspace workspace(context, plan.op, plan.device,
                              [&](ScratchLayout& c) { b.lay_out(c); });
    b.fill_parameters();
    annulus::cpu::run_team(b.team(context.threads), [&](Member& m) { b.run(m); });
    context.ran_on(plan.op, DeviceType::kCPU, b.tile.name);
  });
}

std::size_t backward_workspace(const Plan& plan) {
  return visit_real(plan, [&]<class Real>() { return Backward<Real>(plan).bytes(); });
}

}  // namespace annulus::ring_rnn::cpu
