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
  const double norm = clip_gradients(model_.parameters(), r.clip);
  if (!std::isfinite(figures.total) || !std::isfinite(norm)) {
    throw Diverged("[train] the loss of recipe \"" + r.name + "\" is not finite at step " +
                   std::to_string(step) + "; a smaller rate may help");
  }
  adam_step(model_.parameters(), step + 1, {.rate = rate_at(r.schedule, step, r.steps)});
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
