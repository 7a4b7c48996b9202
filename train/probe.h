// What a trained ring does when it is left alone, turned evenly, or disturbed.
#pragma once

#include <vector>

#include "train/network/model.h"

namespace annulus::train {

// How far the decoded angle is from the start after every step without any velocity, in radians: the
// mean and the most over starts all around the circle.
struct Drift {
  std::int64_t starts = 0;
  std::vector<double> mean, most;
};
Drift drift_at_rest(RingModel& model, std::int64_t starts, std::int64_t steps);

// The gain curve: radians a step that the bump turns when it is told the same velocity all the time,
// over the second half of 100 steps.
struct TurnCurve {
  std::vector<double> told, turned;
};
TurnCurve turn_curve(RingModel& model);

// The mean error over `steps` at each level of one kind of noise. `integrator`: of one that adds up what
// it is told and makes no mistake of its own, wrong by the noise in the velocity alone.
struct NoiseCurve {
  std::vector<double> level, error, integrator;
};
NoiseCurve velocity_noise_curve(RingModel& model, std::int64_t sequences, std::int64_t steps);
NoiseCurve state_noise_curve(RingModel& model, std::int64_t sequences, std::int64_t steps);

}  // namespace annulus::train
