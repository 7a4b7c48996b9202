// XXH64, the checksum of a checkpoint's files: finds what a disk or a copy spoils, and is no defence
// against someone who forges both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace annulus::train {

std::uint64_t xxh64(std::span<const std::byte> data, std::uint64_t seed = 0);

}  // namespace annulus::train
