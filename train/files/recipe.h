// A recipe: everything that decides the result of a training, and nothing else. Two runs with equal
// recipes on the same kind of machine give the same bits, whatever the number of threads.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "annulus/ring_rnn/ring_rnn.h"
#include "train/network/adam.h"
#include "train/task.h"

namespace annulus::train {

struct Recipe {
  std::string name;
  std::int64_t neurons = 128, actions = 2;
  Encoding encoding = Encoding::kTurns;
  RingRnnActivation activation = RingRnnActivation::kGelu;
  double J0 = -0.1, J1 = 0.1, alpha = 0.15;  // ring_rnn.h
  std::int64_t batch = 128, steps = 1000;
  std::int64_t length = 100;        // steps of a training sequence
  std::int64_t first_length = 100;  // at the start; it grows evenly to `length` over `growth`
  double growth = 0;                // of all steps, as a share
  Schedule schedule = {};
  double lead = kLead;  // share of a training sequence that is still at first
  Noise noise = {};     // of the training
  double clip = 1.0;
  double amplitude_weight = 0.2;
  std::int64_t delay = 0;        // steps by which the ring hears of a velocity later
  double spread = 1;             // of the weights at the start, times 1 / sqrt(neurons)
  std::int64_t gain_hidden = 0;  // neurons of the gain network; 0: there is none
  double gain_start = 0;         // share of the steps before the gain network is trained
  std::uint64_t seed = 0;
};

// The papers': 1000 steps of Adam at 1e-3, no gain network.
Recipe original_recipe();
// Ours; README.md says why and what it gains.
// Beyond 128 neurons J0 is smaller by as much: the inhibition of the first bump, J0 0.6 sqrt(N) against a
// peak that falls as sqrt(N), would lie where gelu is flat and its slope has the wrong sign.
Recipe default_recipe(std::int64_t neurons = 128);

// The same to more steps, or fewer: what is a share of them begins and ends in the step it did, and
// the rate falls to its end in the new last one.
Recipe with_steps(Recipe recipe, std::int64_t steps);

// The channel that turns to the right: 1, or the last where a velocity is spread over all.
std::int64_t right_action(const Recipe& recipe);

// The first step in which the gain network is trained.
std::int64_t first_gain_step(const Recipe& recipe);

// Length of the sequences of a step, a multiple of 10.
std::int64_t length_at(const Recipe& recipe, std::int64_t step);

// Throws InvalidArgument that names the field and the rule.
void check(const Recipe& recipe);

// For manifests and results. The reader wants every key, no other, of the right type
// (files::JsonError) and in range (InvalidArgument); both name the key.
nlohmann::ordered_json to_json(const Recipe& recipe);
Recipe recipe_from_json(const nlohmann::ordered_json& json);

// The first field in which two recipes differ, as "steps 1000, not 500"; empty when none does.
std::string difference(const Recipe& saved, const Recipe& asked);

std::string name_of(RingRnnActivation a);
RingRnnActivation activation_of(const std::string& name);  // one of kActivations
extern const std::vector<std::string> kActivations;

}  // namespace annulus::train
