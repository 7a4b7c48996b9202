// Adam on the host: a few hundred thousand numbers a step, nothing beside the recurrence.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace annulus::train {

struct NamedShape {
  std::string name;
  std::vector<std::int64_t> shape;
};

// What is trained: a named tensor on the host with its gradient and Adam's two averages.
struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<float> value, gradient;
  std::vector<float> mean, square;  // Adam's averages of the gradient and of its square

  Parameter(std::string name, std::vector<std::int64_t> shape);  // all zeros
};

struct AdamOptions {
  double rate = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
};

// Scales all gradients by min(1, limit / (norm + 1e-6)), norm over all of them; returns the norm.
double clip_gradients(std::span<Parameter> parameters, double limit);

// The update of step 1, 2, ...: the corrections for the averages' start depend on it.
void adam_step(std::span<Parameter> parameters, std::int64_t step, const AdamOptions& options);

// rate * min(1, (step + 1) / warm_up), then down a half cosine to rate * final at the last step.
// final = 1: constant.
struct Schedule {
  double rate = 1e-3;
  std::int64_t warm_up = 0;
  double final = 1;
};
double rate_at(const Schedule& schedule, std::int64_t step, std::int64_t steps);

}  // namespace annulus::train
