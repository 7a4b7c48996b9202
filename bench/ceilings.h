// What this machine can do at most, measured on the spot, and the floor that follows for a problem.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "annulus/core/device.h"
#include "bench/record.h"

namespace annulus::bench {

struct Ceilings {
  double copy_gbs = 0;
  std::array<double, kPrecisions.size()> gemm{};  // GFLOP/s, by Precision; 0: not measured
  double launch_ms = 0;                           // an empty launch; 0 on the CPU
  double barrier_ms = 0;        // every block of a full grid waits for every other; 0 on the CPU
  double small_barrier_ms = 0;  // the blocks of one cluster; 0: there are no clusters
  double small_bytes = 0;       // weights up to this size fit a cluster's shared memory
  double on_chip_bytes = 0;     // what may stay in caches, shared memory and registers
  bool blas_missing = false;    // built for OpenBLAS, which could not be loaded here

  double& rate(Precision p) { return gemm[static_cast<std::size_t>(p)]; }
  double gemm_gflops(Precision p) const { return gemm[static_cast<std::size_t>(p)]; }
  // What passes between two steps that read `step_bytes` of weights each.
  double step_ms(double step_bytes) const {
    return small_barrier_ms > 0 && step_bytes <= small_bytes ? small_barrier_ms : barrier_ms;
  }
};

// CPU: a copy far larger than the caches on all threads; fp32 and bf16 products as fast as the
// multiply units make them (OpenBLAS's sgemm where that is faster still). CUDA: a copy kernel,
// cuBLAS's GEMM of bf16, tf32 and fp32, barriers. Takes a second or two.
Ceilings measure_ceilings(DeviceType device);
// A rank of several that compute together: where it is, and what can be done there.
struct RankCeilings {
  std::uint64_t place = 0;  // the same for ranks that share processors, or a GPU
  double at_most = 1;       // ranks that find room there side by side
  Ceilings ceilings;        // of the place's first rank alone; of the others it is not read
};
// What they do at most: every place as often as there are ranks side by side in it.
Ceilings together(std::span<const RankCeilings> ranks);
// How fast this CPU multiplies and adds when every operand is in a register: no kernel is faster. All
// threads together, in GFLOP/s; the best instruction that it has for the products. bf16 products
// without one are made in fp32. 0 for products that a CPU does not make (tf32).
double cpu_peak_gflops(Precision products);
// "copy 20.1 GB/s, GEMM fp32 83, bf16 332 GFLOP/s": what was measured, in one line.
std::string to_string(const Ceilings& ceilings);

// How an operator's flops are made, beyond their number.
struct Work {
  Precision products = Precision::kFp32;
  double passes = 1;       // products made for each one that is needed: three in bf16x3
  std::int64_t steps = 0;  // that each need all of the one before; 0: not a recurrence
  double step_bytes = 0;   // what every step reads again: the weights
};

struct Floor {
  double ms = 0;
  FloorKind kind = FloorKind::kBandwidth;
};
// No implementation can be faster:
//   max(passes * flops / gemm, moved / copy) + steps * barrier, and never less than a launch,
//   moved = bytes + (steps - 1) * the part of step_bytes that the chip cannot hold.
// Steps cannot overlap, so what passes between two of them comes on top: a barrier across the grid,
// or across a cluster where that could hold the weights (samples do not depend on each other). The
// kind is the largest term.
Floor floor_of(double bytes, double flops, const Work& work, const Ceilings& ceilings);

}  // namespace annulus::bench
