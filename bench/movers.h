// Implementations that move an operator's bytes and do nothing else: the yardstick beside every
// row.
#pragma once

#include <cstddef>

namespace annulus::bench {

// Copies `bytes` from one place to another on all threads of the process, by memcpy.
void copy_parallel(void* to, const void* from, std::size_t bytes);

// Reads `bytes` on all threads, so that the caches hold nothing else. Reading leaves the lines
// clean: what a timed call evicts afterwards costs no write-back.
void sweep_caches(const void* data, std::size_t bytes);

// The largest cache of this machine, from sysfs; 32 MiB when it does not say.
std::size_t last_level_cache_bytes();

}  // namespace annulus::bench
