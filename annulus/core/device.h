// Where a tensor's memory lives.
#pragma once

#include <cstdint>
#include <string>

namespace annulus {

enum class DeviceType : std::uint8_t { kCPU, kCUDA };

struct Device {
  DeviceType type = DeviceType::kCPU;
  int index = 0;

  friend constexpr bool operator==(Device, Device) = default;
};

inline constexpr Device kCPU{DeviceType::kCPU, 0};
constexpr Device cuda_device(int index = 0) { return {DeviceType::kCUDA, index}; }

inline std::string to_string(Device d) {
  return d.type == DeviceType::kCPU ? "cpu" : "cuda:" + std::to_string(d.index);
}

}  // namespace annulus
