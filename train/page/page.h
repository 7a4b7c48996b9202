// The run as one self-contained HTML page (draw/html.h): figures as inline SVG, light and dark, at most
// draw::kMaxPageBytes.
#pragma once

#include <cstddef>
#include <string>

#include "train/files/results.h"

namespace annulus::train {

std::string render_page(const Results& results);

// Its figures (page_figures.cpp). Colours: our recipe, the original, then peers; the same in all.
// A page has each twice, for a desk's screen and for a telephone's.
enum class Width { kFull, kHalf, kNarrow };
std::string loss_figure(const Results& results, Width width);
std::string training_error_figure(const Results& results, Width width);
std::string error_by_length_figure(const Results& results, Width width);
std::string rest_figure(const Results& results, Width width);
std::string turn_figure(const Results& results, Width width);
std::string noise_figure(const Results& results, Width width, bool velocity);
std::string gain_figure(const RecipeResult& result, Width width);  // empty without a gain network

// Of one sequence: what it is told; activity over time with the true angle drawn on it; the decoded and
// the true angle; how far they are apart.
std::string velocity_figure(const RecipeResult& result, Width width);
std::string bump_figure(const RecipeResult& result, Width width, std::size_t most_columns);
std::string angle_figure(const RecipeResult& result, Width width);
std::string example_error_figure(const Results& results, Width width);

// A weight matrix, and the mean of its diagonals: what a neuron gets from one that many degrees away.
std::string matrix_figure(const std::string& title, const float* weights, std::int64_t N,
                          std::size_t most_cells);
std::string profile_figure(const RecipeResult& result, Width width);

}  // namespace annulus::train
