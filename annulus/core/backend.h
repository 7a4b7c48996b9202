// Which kernels a call ran on.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "annulus/core/device.h"
#include "annulus/core/macros.h"

namespace annulus {

// What the last call of an operator ran on, in any thread of this process: "cpu, bfmmla 8x8", "cuda,
// tensor cores in clusters"; empty where there was none. Operators as their errors name them: "ring_rnn",
// "ring_rnn_backward", ... With ANNULUS_LOG=1 in the environment every change of it is a line on stderr.
ANNULUS_API std::string last_backend(std::string_view op);
// Of all operators that have been called, by name.
ANNULUS_API std::vector<std::pair<std::string, std::string>> last_backends();

// Operators say so when they have run: those with one implementation a device, and those with several.
// Both texts last as long as the process.
void ran_on(const char* op, DeviceType device);
void ran_on(const char* op, DeviceType device, const char* how);

}  // namespace annulus
