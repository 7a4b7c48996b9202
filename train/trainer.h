// The loop, one step at a time: draw a batch, gradients, clip, Adam. What it needs to go on is the
// parameters, Adam's averages and the number of the step; batches are drawn by number (rng.h).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "train/network/model.h"

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

// How good a trained ring is: sequences it has never seen, longer than those of the training. They
// depend on their number and length alone, so that every recipe and every seed is judged on the same
// ones.

// Of the circular error |decoded - target| in radians, over all sequences and steps.
struct ErrorFigures {
  std::int64_t T = 0;
  double mean = 0, std = 0, max = 0;
  double final = 0;           // mean over the sequences at the last step
  std::vector<double> curve;  // mean over the sequences, value i of n at step (i + 1) T / n
};

struct Evaluation : ErrorFigures {  // its curve has T values
  std::int64_t sequences = 0;
};
Evaluation evaluate(RingModel& model, std::int64_t sequences, std::int64_t T, double lead = kLead,
                    const Noise& noise = {});

// The mean error, on the same sequences, of an integrator that makes no mistake but turns at once:
// the target is a step behind the input (task.h).
double error_of_turning_at_once(std::int64_t sequences, std::int64_t T);

// The same of one that is told with this noise and turns when it should.
double error_of_integrating(std::int64_t sequences, std::int64_t T, const Noise& noise);

// One of these sequences in full, for the figures: the one whose target turns farthest.
struct Example {
  std::vector<float> velocity;  // (T,)
  std::vector<double> target;   // (T,)
  std::vector<float> decoded;   // (T,)
  std::vector<float> states;    // (T, N)
};
Example example(RingModel& model, std::int64_t sequences, std::int64_t T);

}  // namespace annulus::train
