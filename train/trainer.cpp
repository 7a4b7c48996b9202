#include "train/trainer.h"

#include <chrono>
#include <cmath>

namespace annulus::train {
namespace {

constexpr std::uint64_t kBatchStream = 3;  // purposes of random streams; never renumber them

}  // namespace

Trainer::Trainer(const Recipe& recipe, Device device, int threads)
    : model_(recipe, device, threads) {}

LossFigures Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  const Recipe& r = recipe();
  const std::int64_t step = steps_done();
  const Sequences batch =
      draw_sequences(r.batch, length_at(r, step), r.lead,
                     Rng(r.seed, kBatchStream, static_cast<std::uint64_t>(step)));
  const LossFigures figures = model_.gradients(batch);
  // The gain network waits until there is a ring to steer: trained from the start, it helps to keep
  // the first, fading bumps alive and never finds its way back.
  const bool with_gain = step >= first_gain_step(r);
  const auto trained = with_gain ? std::span(model_.parameters()) : model_.ring_parameters();
  const double norm = clip_gradients(trained, r.clip);
  if (!std::isfinite(figures.total) || !std::isfinite(norm)) {
    throw Diverged("[train] the loss of recipe \"" + r.name + "\" is not finite at step " +
                   std::to_string(step) + "; a smaller rate may help");
  }
  const AdamOptions adam{.rate = rate_at(r.schedule, step, r.steps)};
  adam_step(model_.ring_parameters(), step + 1, adam);
  if (with_gain) adam_step(model_.gain_parameters(), step + 1 - first_gain_step(r), adam);
  history_.loss.push_back(static_cast<float>(figures.total));
  history_.error.push_back(static_cast<float>(figures.error));
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return figures;
}

void Trainer::restore(History history, double seconds) {
  history_ = std::move(history);
  seconds_ = seconds;
}

}  // namespace annulus::train
