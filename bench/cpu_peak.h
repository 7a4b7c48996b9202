// How fast this CPU multiplies and adds when every operand is in a register: no kernel is faster.
#pragma once

#include "bench/record.h"

namespace annulus::bench {

// All threads together, in GFLOP/s; the best instruction that this CPU has for the products. bf16
// products without one are made in fp32. 0 for products that a CPU does not make (tf32).
double cpu_peak_gflops(Precision products);

}  // namespace annulus::bench
