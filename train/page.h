// The run as one self-contained HTML page (draw/html.h): figures as inline SVG, light and dark, at most
// draw::kMaxPageBytes.
#pragma once

#include <cstddef>
#include <string>

#include "train/results.h"

namespace annulus::train {

std::string render_page(const Results& results);

// Its figures (page_figures.cpp). Colours: our recipe, the original, then peers; the same in all.
std::string loss_figure(const Results& results);
std::string training_error_figure(const Results& results);
std::string error_by_length_figure(const Results& results);
std::string gain_figure(const RecipeResult& result);  // empty without a gain network

// Of one sequence: activity over time with the true angle drawn on it; the decoded and the true
// angle; how far they are apart.
std::string bump_figure(const RecipeResult& result, std::size_t most_columns);
std::string angle_figure(const RecipeResult& result);
std::string example_error_figure(const Results& results);

// A weight matrix, and the mean of its diagonals: what a neuron gets from one that many degrees away.
std::string matrix_figure(const std::string& title, const float* weights, std::int64_t N,
                          std::size_t most_cells);
std::string profile_figure(const RecipeResult& result);

}  // namespace annulus::train
