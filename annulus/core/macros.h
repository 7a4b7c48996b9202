// Annulus: the few macros every header needs.
#pragma once

// Functions that nvcc compiles for both sides; plain C++ compilers see an ordinary function.
#if defined(__CUDACC__)
#define ANNULUS_HD __host__ __device__
#else
#define ANNULUS_HD
#endif

// Symbols a user links against. Everything else is hidden (the build sets -fvisibility=hidden).
#define ANNULUS_API __attribute__((visibility("default")))
