// The device that a command's --device names.
#pragma once

#include <string>

#include "annulus/core/device.h"

namespace annulus::cli {

// "cpu", "cuda", or "auto": cuda where there is one. Throws NotSupported, with the reason.
Device pick_device(const std::string& name);

}  // namespace annulus::cli
