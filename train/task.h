// The task: keep an angle by adding up angular velocities.
//
//   start   theta0, uniform on the circle
//   v_t     t = 0 .. T-1, radians a step: zero for the first floor(lead * T) steps; then zero with
//           probability p (one of 0.2, 0.5, 0.8 for the whole sequence), else uniform on
//           [-0.1 pi, 0.1 pi)
//   target  after step t: theta0 + v_0 + ... + v_{t-1}. The sum is a step behind the input: v_t is
//           seen at step t and wanted in the angle at step t + 1, the target of step 0 is theta0.
//           A network that turns by v_t at once is therefore wrong by |v_t|, 0.078 rad on average.
//   bump    the state before step 0: exp(-d^2 / (2 w^2)) with d the distance on the ring, in neurons,
//           from theta0 N / (2 pi), w = N / 10; scaled to length 1
#pragma once

#include <cstdint>
#include <numbers>
#include <span>
#include <vector>

#include "train/rng.h"

namespace annulus::train {

inline constexpr double kFastest = 0.1 * std::numbers::pi;  // radians a step
inline constexpr double kLead = 0.1;                        // the task's

// What a ring is disturbed by, normal and new in every step: the velocity it is told, in radians, and
// what every neuron receives (the drive of ring_rnn.h), as a share of the highest peak of a bump.
struct Noise {
  double velocity = 0, state = 0;  // standard deviations
};

struct Sequences {
  std::int64_t B = 0, T = 0;
  std::vector<float> velocity;  // (B, T)
  std::vector<double> start;    // (B,)
  std::vector<double> target;   // (B, T), not wrapped
  double state_noise = 0;
  std::uint64_t noise_seed = 0;
};
Sequences draw_sequences(std::int64_t B, std::int64_t T, double lead, Rng rng);

// Targets stay those of the velocities without noise.
void add_noise(Sequences& s, const Noise& noise, Rng rng);
// Of steps t .. t + steps - 1 for N neurons, (B, steps, N); empty without noise. The noise of a step
// is the same however a sequence is cut, and for every number of threads.
std::vector<float> drive_noise(const Sequences& s, std::int64_t t, std::int64_t steps,
                               std::int64_t N, int threads);

// How a velocity becomes K >= 2 actions.
enum class Encoding : std::uint8_t {
  kTurns,   // [relu(-v), relu(v), 0, ...]: left, right, and channels that are never used
  kSpread,  // relu(v s_k), s_k evenly spaced from -1 to 1
};
// velocity (n,) -> actions (n, K)
std::vector<float> encode(std::span<const float> velocity, std::int64_t K, Encoding encoding);

// Every sequence `delay` steps later, zeros first: what a ring is told whose target is behind its
// input. (B, T) -> (B, T)
std::vector<float> delayed(std::span<const float> velocity, std::int64_t B, std::int64_t T,
                           std::int64_t delay);

// (B,) -> (B, N)
std::vector<float> initial_bumps(std::span<const double> start, std::int64_t N);

// The distance of two angles on the circle, in [0, pi].
double circular_distance(double a, double b);

}  // namespace annulus::train
