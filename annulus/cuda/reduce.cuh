// Sums (and the like) over the lanes of a warp and the threads of a block, in an order that is always the same.
#pragma once

namespace annulus::cuda {

// The warp's number in its block, said in a way the compiler understands: what depends on it alone is
// the same for all lanes.
__device__ __forceinline__ int uniform_warp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

// A number that all lanes of a warp have, said in a way the compiler understands: what is made of it
// then stays in uniform registers, where wgmma wants its descriptors, instead of being sent there by
// two instructions for each. It helps only where the compiler knows that warps stay together: a loop
// that it thinks lanes might leave one by one, anywhere before, undoes it.
__device__ __forceinline__ unsigned uniform(unsigned v) { return __reduce_or_sync(~0u, v); }
__device__ __forceinline__ int uniform(int v) {
  return static_cast<int>(uniform(static_cast<unsigned>(v)));
}

// What each aligned group of Lanes lanes combines to, in all of its lanes. All 32 lanes take part.
template <int Lanes = 32, class Real, class F>
__device__ __forceinline__ Real warp_reduce(Real v, F&& combine) {
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) {
    v = combine(v, __shfl_xor_sync(0xffffffffu, v, step));
  }
  return v;
}
template <int Lanes = 32, class Real>
__device__ __forceinline__ Real warp_sum(Real v) {
  return warp_reduce<Lanes>(v, [](Real a, Real b) { return a + b; });
}

// The sum over a one-dimensional block of Threads threads, in all of them. `scratch` holds
// Threads / 32 numbers in shared memory and may be used again at once.
template <int Threads, class Real>
__device__ __forceinline__ Real block_sum(Real v, Real* scratch) {
  static_assert(Threads % 32 == 0 && Threads <= 1024);
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  Real total = 0;
#pragma unroll
  for (int w = 0; w < Threads / 32; ++w) total += scratch[w];
  __syncthreads();
  return total;
}

}  // namespace annulus::cuda
