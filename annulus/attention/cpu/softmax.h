// The elementwise part of attention's tiles on the CPU, compiled for each instruction set in softmax.cpp. A tile of scores is
// turned: rows are keys, lanes are queries, so that maxima and sums run down the rows and no vector is summed across.
#pragma once

#include <cstdint>

#include "annulus/cpu/tile.h"

namespace annulus::attention::cpu {

// Of elements beyond it a sum of 256 products might not be finite.
inline constexpr float kTame = 1e15f;

// Which entries of a tile count: those of lane c in rows lo[c] .. hi[c]-1 (nullptr: all), of which keep[r * ld + c] is not 0
// (nullptr: all).
struct Mask {
  const std::int32_t* lo = nullptr;
  const std::int32_t* hi = nullptr;
  const std::uint8_t* keep = nullptr;
};

struct Tile {
  float* s;                 // rows `ld` apart
  std::int64_t ld;          // also of keep and of the tiles beside it
  std::int64_t first, end;  // rows
  int lanes;                // a multiple of what a tile of the products has for columns
  Mask mask;
  bool tame;    // every score is finite, so that none of the tests for others is needed
  bool coarse;  // weights are rounded to bf16 after
  // No score of lane c is larger than reach[c] * far, either sign (nullptr: not known).
  const float* reach = nullptr;
  float far = 0;
  // Bits must not depend on what lanes lie beside each other.
  bool fixed = false;
};

struct Softmax {
  // Scores become weights: m, l (of each lane) take in scale * s, s = exp(scale s) / 2^m, and factor = 2^(m before - m), by which
  // what was summed before has to be multiplied. m is a whole number, the next or one that no score exceeds. Returns whether any factor is not 1. With a
  // panel (tame, coarse tiles alone; see writes_panels()) weights go there instead, those of rows before the first of its unit not.
  bool (*weigh)(const Tile& tile, float scale, float* m, float* l, float* factor,
                std::uint16_t* panel);
  // s = exp(scale s - lse); g = scale s (g - delta), g lying beside s: the weights, and the gradients of q k. With z (beside
  // it, too: what dropout makes of a weight), s = z exp(...) and g = scale exp(...) (z g - delta).
  void (*differentiate)(const Tile& tile, float scale, const float* lse, const float* delta,
                        const float* z, float* g);
  // Every row of a tile by its lane's factor.
  void (*rescale)(float* x, std::int64_t rows, int lanes, const float* factor);
  // Whether no product of two rows of at most 256 such elements can be infinite or no number.
  bool (*tame)(const annulus::cpu::Matrix& x, std::int64_t rows, std::int64_t columns);
  // Euclidean norms of rows (nullptr: not kept), and the largest.
  float (*norms)(const annulus::cpu::Matrix& x, std::int64_t rows, std::int64_t columns,
                 float* norm);
  // y += x, n of them.
  void (*add)(const float* x, std::int64_t n, float* y);
};

const Softmax& softmax();

}  // namespace annulus::attention::cpu
