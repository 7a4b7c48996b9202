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

// Weights that are written as a right panel of bf16 are written some rows at a time; of each unit a lane's lie together.
inline constexpr int kPanelRows = 4;
#if defined(__x86_64__)
inline constexpr int kPanelUnit = 2;  // AMX's units are of as many pairs, one below the other
inline constexpr bool kNarrows = true;
#else
inline constexpr int kPanelUnit = 4;
inline constexpr bool kNarrows = false;
#endif

// Where kNarrows, and the tile is tame and coarse: what a backward multiplies, rounded to bf16 as its products take it.
struct NarrowTile {
  std::uint16_t *p, *ds;  // rows as in the tile
  std::uint16_t* panel;   // ds as a right panel
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
  // panel (tame, coarse tiles alone; see writes_panels()) weights go there instead, those of rows before the first of kPanelRows and after the last not.
  bool (*weigh)(const Tile& tile, float scale, float* m, float* l, float* factor,
                std::uint16_t* panel);
  // s = exp(scale s - lse); g = scale s (g - delta), g lying beside s: the weights, and the gradients of q k. With z (beside
  // it, too: what dropout makes of a weight), s = z exp(...) and g = scale exp(...) (z g - delta). With `narrow` they
  // go there instead, and rows of kPanelRows that are written together but are not the tile's are 0.
  void (*differentiate)(const Tile& tile, float scale, const float* lse, const float* delta,
                        const float* z, float* g, const NarrowTile* narrow);
  // Every row of a tile by its lane's factor.
  void (*rescale)(float* x, std::int64_t rows, int lanes, const float* factor);
  // y[c * ldy + r] = x[r * ldx + c]
  void (*turn)(const float* x, std::int64_t ldx, std::int64_t rows, std::int64_t columns, float* y,
               std::int64_t ldy);
  // Whether no product of two rows of at most 256 such elements can be infinite or no number.
  bool (*tame)(const annulus::cpu::Matrix& x, std::int64_t rows, std::int64_t columns);
  // Euclidean norms of rows (nullptr: not kept), and the largest.
  float (*norms)(const annulus::cpu::Matrix& x, std::int64_t rows, std::int64_t columns,
                 float* norm);
  // One product after the other, as those of tiles are summed: where a query sees little but one key, <do, v> and <do, o> must be
  // rounded alike, as their difference is what counts.
  float (*dot)(const float* x, const float* y, std::int64_t n);
  // y += x, n of them.
  void (*add)(const float* x, std::int64_t n, float* y);
};

const Softmax& softmax();

}  // namespace annulus::attention::cpu
