#include "train/page_figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "train/figure.h"

namespace annulus::train {
namespace {

constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
constexpr double kDegrees = 180 / std::numbers::pi;
constexpr std::size_t kBlocks = 240;  // points of a curve of training

// The curve in blocks: the mean, and the least and most beside it.
Line blocked(const std::vector<float>& values, std::string name, int style) {
  Line line;
  line.name = std::move(name);
  line.style = style;
  const std::size_t block = std::max<std::size_t>(1, (values.size() + kBlocks - 1) / kBlocks);
  for (std::size_t i = 0; i < values.size(); i += block) {
    const std::size_t end = std::min(values.size(), i + block);
    double sum = 0, low = values[i], high = values[i];
    for (std::size_t k = i; k < end; ++k) {
      sum += values[k];
      low = std::min<double>(low, values[k]);
      high = std::max<double>(high, values[k]);
    }
    line.points.emplace_back(static_cast<double>(i + end + 1) / 2,
                             sum / static_cast<double>(end - i));
    line.band.emplace_back(low, high);
  }
  return line;
}

// The least and most over all lines, widened by 8 %.
void fit(Axis& axis, const std::vector<Line>& lines) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const Line& line : lines) {
    for (const auto& p : line.points) {
      if (!std::isfinite(p.second) || (axis.log && !(p.second > 0))) continue;
      low = std::min(low, p.second);
      high = std::max(high, p.second);
    }
  }
  if (!(high >= low)) {
    low = axis.log ? 0.1 : 0;
    high = 1;
  }
  if (axis.log) {
    axis.low = low / 1.25;
    axis.high = high * 1.25;
  } else {
    const double room = std::max(high - low, 1e-9) * 0.08;
    axis.low = low - room;
    axis.high = high + room;
  }
}

LineChart training_chart(const Results& results, const char* title, const char* unit,
                         std::vector<float> History::*curve) {
  LineChart c;
  c.title = title;
  c.width = 552;
  c.height = 300;
  c.right = 72;
  c.left = 50;
  double steps = 1;
  for (std::size_t i = 0; i < results.recipes.size(); ++i) {
    const RecipeResult& r = results.recipes[i];
    c.lines.push_back(blocked(r.history.*curve, r.recipe.name, style_of_recipe(results, i)));
    steps = std::max(steps, static_cast<double>(r.recipe.steps));
  }
  c.x = {.low = 0, .high = steps, .log = false, .label = "step of training", .ticks = {}};
  c.y = {.low = 0, .high = 1, .log = true, .label = unit, .ticks = {}};
  fit(c.y, c.lines);
  return c;
}

double turns(double angle) {  // of the circle, in [0, 1)
  const double t = angle / (2 * std::numbers::pi);
  return t - std::floor(t);
}

// Angles in degrees over the steps, broken where the circle closes.
std::vector<std::pair<double, double>> angle_points(const std::vector<double>& angles) {
  std::vector<std::pair<double, double>> points;
  double last = 0;
  for (std::size_t t = 0; t < angles.size(); ++t) {
    const double a = turns(angles[t]) * 360;
    if (t > 0 && std::fabs(a - last) > 180) points.emplace_back(kGap, kGap);
    points.emplace_back(static_cast<double>(t + 1), a);
    last = a;
  }
  return points;
}

// Means over windows, which the noise of 200 sequences needs.
std::vector<std::pair<double, double>> windowed(const std::vector<double>& curve, double step,
                                                std::size_t window) {
  std::vector<std::pair<double, double>> points;
  for (std::size_t i = 0; i < curve.size(); i += window) {
    const std::size_t end = std::min(curve.size(), i + window);
    double sum = 0;
    for (std::size_t k = i; k < end; ++k) sum += curve[k];
    points.emplace_back(static_cast<double>(i + end + 1) / 2 * step,
                        sum / static_cast<double>(end - i));
  }
  return points;
}

Axis steps_axis(double T) {
  return {.low = 0, .high = T, .log = false, .label = "step of the sequence", .ticks = {}};
}

}  // namespace

int style_of_recipe(const Results& results, std::size_t recipe) {
  // Ours is the first colour, whichever recipes ran.
  return results.recipes[recipe].recipe.name == "seed" ? 1 : 0;
}

std::string loss_figure(const Results& results) {
  return draw(training_chart(results, "Loss", "mean of a batch, log scale", &History::loss));
}

std::string training_error_figure(const Results& results) {
  LineChart c =
      training_chart(results, "Angle error while training", "rad, log scale", &History::error);
  if (results.turning_at_once > 0)
    c.rules.push_back({false, results.turning_at_once, "turning at once"});
  return draw(c);
}

std::string error_by_length_figure(const Results& results) {
  LineChart c;
  c.title = "Error against sequence length";
  c.height = 340;
  c.right = 110;
  double T = 0, length = 0;
  for (std::size_t i = 0; i < results.recipes.size(); ++i) {
    const RecipeResult& r = results.recipes[i];
    Line line;
    line.name = r.recipe.name;
    line.style = style_of_recipe(results, i);
    line.width = 2.2;
    line.points = windowed(r.long_test.curve, 1, 20);
    c.lines.push_back(std::move(line));
    T = std::max(T, static_cast<double>(r.long_test.T));
    length = std::max(length, static_cast<double>(r.recipe.length));
  }
  int style = 2;
  for (const Peer& p : results.peers) {
    // Of a model that was measured at several lengths, the longest.
    const bool longest = std::none_of(
        results.peers.begin(), results.peers.end(),
        [&](const Peer& o) { return o.name == p.name && (o.T > p.T || (o.T == p.T && &o < &p)); });
    if (!longest) continue;
    Line line;
    line.name = p.name;
    line.style = style++ % 9;
    line.width = 2.2;
    const double step = static_cast<double>(p.T) / static_cast<double>(p.curve.size());
    line.points = windowed(p.curve, step, std::max<std::size_t>(1, p.curve.size() / 50));
    c.lines.push_back(std::move(line));
    T = std::max(T, static_cast<double>(p.T));
  }
  c.x = steps_axis(T);
  // A network that loses its way is wrong a hundred times as much as one that does not.
  c.y.log = true;
  fit(c.y, c.lines);
  c.y.label = "mean circular error at that step, rad, log scale";
  c.rules.push_back({true, length, "training length"});
  c.rules.push_back({false, results.turning_at_once, "turning at once"});
  return draw(c);
}

std::string gain_figure(const RecipeResult& r) {
  if (r.gains.velocity.empty()) return "";
  LineChart c;
  c.title = "What the gain network learned";
  c.width = 552;
  c.height = 300;
  c.left = 50;
  c.right = 100;
  for (const bool now : {true, false}) {
    Line line;
    line.name = now ? "told now" : "told before";
    line.style = now ? 4 : 0;
    line.width = 2.2;
    const auto& gains = now ? r.gains.now : r.gains.before;
    for (std::size_t i = 0; i < gains.size(); ++i) {
      line.points.emplace_back(r.gains.velocity[i] * kDegrees, gains[i]);
    }
    c.lines.push_back(std::move(line));
  }
  c.x = {.low = 0,
         .high = kFastest * kDegrees,
         .log = false,
         .label = "speed, degrees a step",
         .ticks = {}};
  fit(c.y, c.lines);
  c.y.low = std::min(c.y.low, 0.0);
  c.y.high = std::max(c.y.high, 1.1);
  c.y.label = "gain of a turn to the right";
  c.rules.push_back({false, 0, ""});
  return draw(c);
}

std::string bump_figure(const RecipeResult& r, std::size_t most_columns) {
  const auto N = static_cast<std::size_t>(r.recipe.neurons);
  const std::size_t T = r.example.target.size();
  HeatMap m;
  m.title = fmt::format("Activity of the {} neurons", N);
  m.width = 1120;
  m.height = 300;
  m.left = 58;
  m.right = 96;
  m.rows = N;
  m.columns = T;
  m.values.resize(N * T);
  for (std::size_t t = 0; t < T; ++t) {
    for (std::size_t i = 0; i < N; ++i) {
      // The last neuron on top, as an axis of angles runs upward.
      m.values[(N - 1 - i) * T + t] = r.example.states[t * N + i];
    }
  }
  const double neurons = static_cast<double>(N);
  for (int quarter = 0; quarter <= 4; ++quarter) {
    m.y_ticks.emplace_back(neurons * (1 - quarter / 4.0), fmt::format("{}°", 90 * quarter));
  }
  for (const double t : linear_ticks(0, static_cast<double>(T), 12)) {
    m.x_ticks.emplace_back(t, fmt::format("{:g}", t));
  }
  m.x_label = "step of the sequence";
  m.y_label = "line: the true angle";
  double last = 0;
  for (std::size_t t = 0; t < T; ++t) {
    const double turn = turns(r.example.target[t]);
    if (t > 0 && std::fabs(turn - last) > 0.5) m.trace.emplace_back(kGap, kGap);
    m.trace.emplace_back(static_cast<double>(t) + 0.5, neurons * (1 - turn) - 0.5);
    last = turn;
  }
  return draw(pooled(m, 128, most_columns));
}

std::string angle_figure(const Results& results, std::size_t recipe) {
  const RecipeResult& r = results.recipes[recipe];
  LineChart c;
  c.title = "Decoded against true angle";
  c.height = 250;
  Line truth, decoded;
  truth.name = "true";
  truth.style = 4;
  truth.width = 5;
  truth.soft = true;
  truth.points = angle_points(r.example.target);
  decoded.name = "decoded";
  decoded.style = style_of_recipe(results, recipe);
  decoded.width = 1.5;
  decoded.points = angle_points({r.example.decoded.begin(), r.example.decoded.end()});
  c.lines = {std::move(truth), std::move(decoded)};
  c.x = steps_axis(static_cast<double>(r.example.target.size()));
  c.y = {.low = 0,
         .high = 360,
         .log = false,
         .label = "",
         .ticks = {{0, "0°"}, {90, "90°"}, {180, "180°"}, {270, "270°"}, {360, "360°"}}};
  return draw(c);
}

std::string example_error_figure(const Results& results) {
  LineChart c;
  c.title = "How far apart";
  c.height = 210;
  for (std::size_t i = 0; i < results.recipes.size(); ++i) {
    const RecipeResult& r = results.recipes[i];
    Line line;
    line.name = r.recipe.name;
    line.style = style_of_recipe(results, i);
    line.width = 1.3;
    for (std::size_t t = 0; t < r.example.target.size(); ++t) {
      line.points.emplace_back(
          static_cast<double>(t + 1),
          circular_distance(r.example.decoded[t], r.example.target[t]) * kDegrees);
    }
    c.lines.push_back(std::move(line));
  }
  c.x = steps_axis(static_cast<double>(kTestLength));
  fit(c.y, c.lines);
  c.y.low = 0;
  c.y.label = "circular error, degrees";
  return draw(c);
}

std::string matrix_figure(const std::string& title, const float* weights, std::int64_t N,
                          std::size_t most_cells) {
  HeatMap m;
  m.title = title;
  m.width = 360;
  m.height = 410;
  m.left = 40;
  m.right = 12;
  m.rows = m.columns = static_cast<std::size_t>(N);
  m.values.assign(weights, weights + N * N);
  m.diverging = true;
  // The full colour at the value that 1 in 200 passes: single large weights must not pale the rest.
  std::vector<double> sizes(m.values.size());
  std::transform(m.values.begin(), m.values.end(), sizes.begin(),
                 [](double v) { return std::fabs(v); });
  const auto rank = static_cast<std::ptrdiff_t>(static_cast<double>(sizes.size() - 1) * 0.995);
  std::nth_element(sizes.begin(), sizes.begin() + rank, sizes.end());
  m.most = sizes[static_cast<std::size_t>(rank)];
  const double n = static_cast<double>(N);
  m.x_ticks = {{0, "0°"}, {n / 2, "180°"}, {n, "360°"}};
  m.y_ticks = m.x_ticks;
  m.x_label = "from";
  m.y_label = "rows: to";
  return draw(pooled(m, most_cells, most_cells));
}

std::string profile_figure(const RecipeResult& r) {
  const std::int64_t N = r.recipe.neurons;
  LineChart c;
  c.title = "Weight by distance around the ring";
  c.width = 552;
  c.height = 300;
  c.left = 50;
  c.right = 100;
  const auto profile = [&](const float* W, double scale, const char* name, int style) {
    Line line;
    line.name = name;
    line.style = style;
    line.width = 2.2;
    // d: to minus from, from half a turn behind to half a turn ahead.
    for (std::int64_t d = -N / 2; d <= N / 2; ++d) {
      double sum = 0;
      for (std::int64_t j = 0; j < N; ++j) sum += W[((j + d) % N + N) % N * N + j];
      line.points.emplace_back(360.0 * static_cast<double>(d) / static_cast<double>(N),
                               scale * sum / static_cast<double>(N));
    }
    c.lines.push_back(std::move(line));
  };
  profile(r.Wo.data(), 1, "Wo", 4);
  if (r.recipe.encoding == Encoding::kTurns) {
    profile(r.Wa.data(), 1, "Wa left", 7);
    profile(r.Wa.data() + N * N, 1, "Wa right", 2);
  } else {
    profile(r.Wa.data(), 1, "Wa first", 7);
    profile(r.Wa.data() + (r.recipe.actions - 1) * N * N, 1, "Wa last", 2);
  }
  c.x = {.low = -180,
         .high = 180,
         .log = false,
         .label = "to minus from, degrees",
         .ticks = {{-180, "-180"}, {-90, "-90"}, {0, "0"}, {90, "90"}, {180, "180"}}};
  fit(c.y, c.lines);
  c.y.label = "mean of a diagonal";
  return draw(c);
}

}  // namespace annulus::train
