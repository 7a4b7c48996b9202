// Columns that partial rotary passes through, on the CPU: copied as they are.

#include <algorithm>
#include <cstdint>

#include "annulus/core/checked.h"
#include "annulus/core/dispatch.h"
#include "annulus/cpu/parallel.h"
#include "annulus/lrpe_cosine/plan.h"

namespace annulus::lrpe_cosine::cpu {

void pass(const Plan& plan, const Context& context) {
  constexpr std::int64_t kTokens = 256;  // of a task
  const std::int64_t pieces = ceil_div(plan.L, kTokens);
  for (int i = 0; i < plan.sides; ++i) {
    const Side& side = plan.side[i];
    if (!side.pass_to.defined()) continue;
    visit_floating(plan.dtype, [&]<class T>() {
      const auto from = as_strided<const T, 4>(side.pass_from);
      const auto to = as_strided<T, 4>(side.pass_to);
      annulus::cpu::parallel_for(
          plan.B * side.heads * pieces, context.threads, [&](std::int64_t task) {
            const std::int64_t row = task / pieces, begin = task % pieces * kTokens;
            const std::int64_t b = row / side.heads, h = row % side.heads;
            for (std::int64_t t = begin; t < std::min(plan.L, begin + kTokens); ++t) {
              const T* source = &from(b, h, t, 0);
              T* target = &to(b, h, t, 0);
              if (from.stride[3] == 1 && to.stride[3] == 1) {
                std::copy_n(source, to.size[3], target);
                continue;
              }
              for (std::int64_t c = 0; c < to.size[3]; ++c) {
                target[c * to.stride[3]] = source[c * from.stride[3]];
              }
            }
          });
    });
  }
}

}  // namespace annulus::lrpe_cosine::cpu
