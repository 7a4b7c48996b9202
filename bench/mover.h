// The `move` implementation of a row: the row's own bytes, moved and nothing else.
//   CPU   a 1:1 copy of the same number of bytes on all threads (half read, half written);
//   CUDA  the row's own tensors, streamed: the forward reads one and writes two, the backward reads
//         two and writes one.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "annulus/core/device.h"
#include "bench/problem.h"

namespace annulus::bench {

struct Mover {
  std::function<void()> run;
  double bytes = 0;                     // read plus written
  std::function<double()> wrong_share;  // of the bytes checked after a run
  std::string description;              // "copy 1:1", "read 1, write 2"
};

// Nothing and the reason when nothing moves that combination of tensors.
std::optional<Mover> make_mover(Problem& problem, Device device, std::string* why_not);
// Memory it needs beyond the problem's own.
std::size_t mover_bytes(const testing::Case& problem, const std::vector<std::string>& calls,
                        Device device);

// Copies `bytes` from one place to another on all threads of the process, by memcpy.
void copy_parallel(void* to, const void* from, std::size_t bytes);

// Reads `bytes` on all threads, so that the caches hold nothing else. Reading leaves the lines
// clean: what a timed call evicts afterwards costs no write-back.
void sweep_caches(const void* data, std::size_t bytes);

// The largest cache of this machine, from sysfs; 32 MiB when it does not say.
std::size_t last_level_cache_bytes();

}  // namespace annulus::bench
