// The loop, one step at a time: draw a batch, gradients, clip, Adam. What it needs to go on is the
// parameters, Adam's averages and the number of the step; batches are drawn by number (rng.h).
#pragma once

#include <stdexcept>
#include <vector>

#include "train/model.h"

namespace annulus::train {

// The loss is no number any more.
class Diverged : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a step leaves behind for the curves.
struct History {
  std::vector<float> loss;   // the total
  std::vector<float> error;  // mean circular error of the batch in radians
};

class Trainer {
 public:
  Trainer(const Recipe& recipe, Device device, int threads);

  LossFigures step();
  std::int64_t steps_done() const { return static_cast<std::int64_t>(history_.loss.size()); }
  bool finished() const { return steps_done() >= recipe().steps; }

  const Recipe& recipe() const { return model_.recipe(); }
  RingModel& model() { return model_; }
  const RingModel& model() const { return model_; }
  const History& history() const { return history_; }
  double seconds() const { return seconds_; }  // spent in step(), earlier runs included

  // Takes over a state that was saved: parameters are already in the model.
  void restore(History history, double seconds);

 private:
  RingModel model_;
  History history_;
  double seconds_ = 0;
};

}  // namespace annulus::train
