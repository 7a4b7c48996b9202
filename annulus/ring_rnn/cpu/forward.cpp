// Ring RNN on the CPU: the forward, and the weights packed for many calls. cpu/network.h says
// how a step is tiled; cpu/backward.cpp has the gradients.

#include "annulus/core/context.h"
#include "annulus/ring_rnn/cpu/network.h"

namespace annulus::ring_rnn::cpu {

namespace {

template <class Real>
struct Forward : Network<Real> {
  using Base = Network<Real>;
  using Base::B, Base::T, Base::N, Base::ld, Base::plan, Base::row, Base::tile;

  std::byte* panels_of_weights = nullptr;
  Real* y = nullptr;                          // [padded_B][ld]
  double *cosine = nullptr, *sine = nullptr;  // [N], for the readout

  using Base::Base;

  void lay_out(ScratchLayout& c) {
    Base::lay_out(c);
    c(y, this->padded_B * ld);
    c(panels_of_weights, plan.in.packed.defined() ? 0 : this->weight_bytes());
    c(cosine, plan.out.angle.defined() ? N : 0);
    c(sine, plan.out.angle.defined() ? N : 0);
  }
  std::size_t bytes() {
    if (B == 0) return 0;
    return scratch_bytes([this](ScratchLayout& c) { lay_out(c); });
  }

  // What is left of step t of one sample once the product is there.
  void finish(std::int64_t b, std::int64_t t) {
    Real* s = this->state + b * ld;
    Real* yb = y + b * ld;
    this->step(b, t, this->constant[b], plan.in.drive, yb);
    row.store(s, N, row_at(plan.out.out, b, t));
    const TensorView& saved = plan.out.saved;
    if (saved.defined() && plan.checkpoint == 0) row.store(yb, N, row_at(saved, t, b));
    if (plan.out.angle.defined()) {
      Population p;
      p.add(s, N, cosine, sine);
      const TensorView& angle = plan.out.angle;
      const TensorView& amplitude = plan.out.amplitude;
      write_element(angle, b * angle.stride[0] + t * angle.stride[1], p.angle());
      write_element(amplitude, b * amplitude.stride[0] + t * amplitude.stride[1], p.amplitude());
    }
  }

  // The state step t of one sample starts from.
  void begin(std::int64_t b, std::int64_t t) {
    Real* s = this->state + b * ld;
    const TensorView& saved = plan.out.saved;
    if (saved.defined() && plan.checkpoint > 0 && t % plan.checkpoint == 0) {
      row.store(s, N, row_at(saved, t / plan.checkpoint, b));
    }
    this->reset_where_asked(b, t);
    this->constant[b] = this->J0 * row.sum(s, N);
  }

  void run(Member& m) {
    // y of a masked step is saved, so it is computed; otherwise nobody sees it.
    this->fill_coefficients(m, !plan.out.saved.defined() || plan.checkpoint > 0);
    if (!plan.in.packed.defined()) {
      this->fill_any(m);
      this->pack_weights(m, false, this->any, panels_of_weights);
    }
    if (samples_are_enough(m)) return run_samples(m);
    for (std::int64_t t = 0; t <= T; ++t) {
      this->each_sample(
          m, [&](std::int64_t b) { between_steps(b, t); }, [&](std::int64_t i) { pack(i, t); });
      if (t < T) this->multiply(m, t, panels_of_weights, y);
    }
  }

  void between_steps(std::int64_t b, std::int64_t t) {
    if (t == 0) this->load_state(plan.in.r0, b, this->state + b * ld);
    if (t > 0) finish(b, t - 1);
    if (t < T) begin(b, t);
    if (t == T && plan.out.h_n.defined()) {
      row.store(this->state + b * ld, N, row_at(plan.out.h_n, b));
    }
  }
  void pack(std::int64_t i, std::int64_t t) {
    if (t < T) this->pack_left(i, this->state + i * tile.rows * ld);
  }

  // Samples do not depend on each other. Where there are many and a core's cache holds the weights, a
  // thread takes some of them through all steps and meets nobody. (Two Neoverse-V1 cores, whose second
  // caches have 1 MiB each: bf16, B 256, N 128, 2 live channels of 16 takes 1.62 ms instead of 1.77.)
  static constexpr std::int64_t kFewWeights = std::int64_t{1} << 20;  // bytes
  bool samples_are_enough(const Member& m) const {
    return this->weight_bytes() <= kFewWeights && this->batch_tiles >= 8 * m.size();
  }
  void run_samples(Member& m) {
    const std::int64_t most = this->batch_tiles / (4 * m.size());
    m.each(this->batch_tiles, most, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t t = 0; t <= T; ++t) {
        for (std::int64_t i = first; i < last; ++i) {
          for (int r = 0; r < this->count(i); ++r) between_steps(i * tile.rows + r, t);
          pack(i, t);
        }
        for (std::int64_t panel = 0; t < T && panel < this->panels; ++panel) {
          this->multiply_panel(t, panel, first, last, panels_of_weights, y);
        }
      }
    });
  }
};

}  // namespace

void forward(const Plan& plan, Context& context) {
  if (plan.B == 0) return;
  visit_real(plan, [&]<class Real>() {
    Forward<Real> f(plan);
    const Workspace workspace(context, plan.op, plan.device,
                              [&](ScratchLayout& c) { f.lay_out(c); });
    if (plan.in.packed.defined()) {
      f.panels_of_weights = static_cast<std::byte*>(plan.in.packed.data);
    }
    f.fill_parameters();
    if (plan.out.angle.defined()) Population::fill(0, plan.N, plan.N, f.cosine, f.sine);
    annulus::cpu::run_team(f.team(context.threads), [&](Member& m) { f.run(m); });
    context.ran_on(plan.op, DeviceType::kCPU, f.tile.name);
  });
}

std::size_t forward_workspace(const Plan& plan) {
  return visit_real(plan, [&]<class Real>() { return Forward<Real>(plan).bytes(); });
}

std::size_t pack_bytes(const Plan& plan) {
  return visit_real(plan, [&]<class Real>() {
    return static_cast<std::size_t>(Network<Real>(plan).weight_bytes());
  });
}

void pack(const Plan& plan, Context& context) {
  visit_real(plan, [&]<class Real>() {
    const Network<Real> n(plan);
    annulus::cpu::run_team(context.threads, [&](Member& m) {
      n.pack_weights(m, false, nullptr, static_cast<std::byte*>(plan.in.packed.data));
    });
  });
}

const char* why_not(Precision precision) {
  return precision == Precision::kTf32  ? "the CPU has no tf32"
         : precision == Precision::kF16 ? "the CPU multiplies f16 tensors in fp32"
                                        : "";
}

}  // namespace annulus::ring_rnn::cpu
