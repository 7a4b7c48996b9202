// The gain network: actions that are learned instead of given. For every step a small network looks
// at the velocity the ring is told and at the one before, and says how much of each turns it:
//
//   f      = (u_t, u_{t-1}) / (0.1 pi)                        u_{-1} = 0
//   h      = tanh(W1 f + b1)                                  W1 (H, 2), b1 (H,)
//   g      = W2 h + b2                                        W2 (2K, H), b2 (2K,)
//   A_tk   = g_k a_tk + g_{K+k} a_{t-1,k}                     a: the plain actions of task.h
//
// It starts at W2 = 0, b2 = (1, ..., 1, 0, ..., 0), where A = a. Training it needs dA, the gradient
// of the recurrence with respect to its actions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "train/network/adam.h"
#include "train/rng.h"

namespace annulus::train {

// W1, b1, W2, b2.
std::vector<NamedShape> gain_shapes(std::int64_t hidden, std::int64_t K);
// At their start; what `p` is below.
std::vector<Parameter> gain_network(std::int64_t hidden, std::int64_t K, Rng rng);

// velocity (B, T) and its plain actions (B, T, K) -> A (B, T, K).
void gain_forward(std::span<const Parameter> p, std::span<const float> velocity,
                  std::span<const float> plain, std::int64_t B, std::int64_t T, std::span<float> A,
                  int threads);
// Overwrites the four gradients.
void gain_backward(std::span<Parameter> p, std::span<const float> velocity,
                   std::span<const float> plain, std::int64_t B, std::int64_t T,
                   std::span<const float> dA, int threads);
// The 2K gains at one pair of velocities.
std::vector<double> gains_at(std::span<const Parameter> p, double now, double before);

}  // namespace annulus::train
