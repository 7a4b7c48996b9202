// What is trained: a named tensor on the host with its gradient and Adam's two averages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus::train {

struct Parameter {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<float> value, gradient;
  std::vector<float> mean, square;  // Adam's averages of the gradient and of its square

  Parameter(std::string name, std::vector<std::int64_t> shape)
      : name(std::move(name)), shape(std::move(shape)) {
    std::size_t n = 1;
    for (const std::int64_t extent : this->shape) n *= static_cast<std::size_t>(extent);
    for (auto* v : {&value, &gradient, &mean, &square}) v->assign(n, 0.0f);
  }
};

}  // namespace annulus::train
