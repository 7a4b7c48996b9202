// How good a trained ring is: sequences it has never seen, longer than those of the training. The
// sequences depend on their number and length alone, so that every recipe and every seed is judged
// on the same ones.
#pragma once

#include <cstdint>
#include <vector>

#include "train/model.h"

namespace annulus::train {

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
Evaluation evaluate(RingModel& model, std::int64_t sequences, std::int64_t T, double lead = kLead);

// The mean error, on the same sequences, of an integrator that makes no mistake but turns at once:
// the target is a step behind the input (task.h).
double error_of_turning_at_once(std::int64_t sequences, std::int64_t T);

// One of these sequences in full, for the figures: the one whose target turns farthest.
struct Example {
  std::vector<double> target;  // (T,)
  std::vector<float> decoded;  // (T,)
  std::vector<float> states;   // (T, N)
};
Example example(RingModel& model, std::int64_t sequences, std::int64_t T);

}  // namespace annulus::train
