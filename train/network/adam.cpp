#include "train/network/adam.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace annulus::train {

Parameter::Parameter(std::string name, std::vector<std::int64_t> shape)
    : name(std::move(name)), shape(std::move(shape)) {
  std::size_t n = 1;
  for (const std::int64_t extent : this->shape) n *= static_cast<std::size_t>(extent);
  for (auto* v : {&value, &gradient, &mean, &square}) v->assign(n, 0.0f);
}

double clip_gradients(std::span<Parameter> parameters, double limit) {
  double squares = 0;
  for (const Parameter& p : parameters) {
    for (const float g : p.gradient) squares += static_cast<double>(g) * g;
  }
  const double norm = std::sqrt(squares);
  const double scale = limit / (norm + 1e-6);
  if (scale < 1) {
    for (Parameter& p : parameters) {
      for (float& g : p.gradient) g = static_cast<float>(g * scale);
    }
  }
  return norm;
}

void adam_step(std::span<Parameter> parameters, std::int64_t step, const AdamOptions& o) {
  const double first = 1 - std::pow(o.beta1, static_cast<double>(step));
  const double second = 1 - std::pow(o.beta2, static_cast<double>(step));
  for (Parameter& p : parameters) {
    for (std::size_t i = 0; i < p.value.size(); ++i) {
      const double g = p.gradient[i];
      const double mean = o.beta1 * p.mean[i] + (1 - o.beta1) * g;
      const double square = o.beta2 * p.square[i] + (1 - o.beta2) * g * g;
      p.mean[i] = static_cast<float>(mean);
      p.square[i] = static_cast<float>(square);
      p.value[i] = static_cast<float>(p.value[i] - o.rate * (mean / first) /
                                                       (std::sqrt(square / second) + o.epsilon));
    }
  }
}

double rate_at(const Schedule& s, std::int64_t step, std::int64_t steps) {
  const double t = static_cast<double>(step);
  if (step < s.warm_up) return s.rate * (t + 1) / static_cast<double>(s.warm_up);
  const double span = static_cast<double>(std::max<std::int64_t>(1, steps - 1 - s.warm_up));
  const double way = std::min(1.0, (t - static_cast<double>(s.warm_up)) / span);
  return s.rate * (s.final + (1 - s.final) * 0.5 * (1 + std::cos(std::numbers::pi * way)));
}

}  // namespace annulus::train
