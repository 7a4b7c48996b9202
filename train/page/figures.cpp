// The figures of the page, one function each.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "draw/charts.h"
#include "train/page/page.h"

namespace annulus::train {
namespace {

using draw::Axis;
using draw::HeatMap;
using draw::Line;
using draw::LineChart;
using draw::Points;

// A figure beside another or alone on a desk's screen, or on a telephone's, where its letters stay as
// large and a name at the end of a line is shorter.
draw::Frame frame_of(Width width, double height = 300) {
  if (width == Width::kNarrow) {
    return {.width = 360, .height = 270, .left = 44, .right = 80, .top = 46, .bottom = 46};
  }
  if (width == Width::kHalf) return {.width = 552, .height = height, .left = 50, .right = 100};
  return {.height = height, .right = 110};
}
constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
constexpr double kDegrees = 180 / std::numbers::pi;
constexpr std::size_t kBlocks = 240;  // points of a curve of training

// Ours is the first colour, whichever recipes ran.
int style_of(const Recipe& recipe) { return recipe.name == "original" ? 1 : 0; }

// The means over windows of so many values, which lie `step` apart.
template <class T>
Points windowed(const std::vector<T>& curve, double step, std::size_t window) {
  Points points;
  for (std::size_t i = 0; i < curve.size(); i += window) {
    const std::size_t end = std::min(curve.size(), i + window);
    double sum = 0;
    for (std::size_t k = i; k < end; ++k) sum += curve[k];
    points.emplace_back(static_cast<double>(i + end + 1) / 2 * step,
                        sum / static_cast<double>(end - i));
  }
  return points;
}

// The curve of a training in blocks: the mean, and the least and most beside it.
Line blocked(const std::vector<float>& values, const Recipe& recipe) {
  const std::size_t block = std::max<std::size_t>(1, (values.size() + kBlocks - 1) / kBlocks);
  Line line{.name = recipe.name, .style = style_of(recipe), .points = windowed(values, 1, block)};
  for (std::size_t i = 0; i < values.size(); i += block) {
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(i);
    const auto [low, high] = std::minmax_element(
        first, first + static_cast<std::ptrdiff_t>(std::min(block, values.size() - i)));
    line.band.emplace_back(*low, *high);
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

LineChart training_chart(const Results& results, Width width, const char* title, const char* unit,
                         std::vector<float> History::*curve) {
  LineChart c{.title = title, .frame = frame_of(width)};
  double steps = 1;
  for (const RecipeResult& r : results.recipes) {
    c.lines.push_back(blocked(r.history.*curve, r.recipe));
    steps = std::max(steps, static_cast<double>(r.recipe.steps));
  }
  c.x = {.high = steps, .label = "step of training"};
  c.y = {.log = true, .label = unit};
  fit(c.y, c.lines);
  return c;
}

// Angles over the steps, the first at x: from `zero` to `full` once around the circle, broken where it
// closes.
template <class T>
Points angle_points(const std::vector<T>& angles, double x, double zero, double full) {
  Points points;
  double last = 0;
  for (const double angle : angles) {
    const double t = angle / (2 * std::numbers::pi), turn = t - std::floor(t);
    if (!points.empty() && std::fabs(turn - last) > 0.5) points.emplace_back(kGap, kGap);
    points.emplace_back(x++, zero + (full - zero) * turn);
    last = turn;
  }
  return points;
}

Axis steps_axis(double T) { return {.high = T, .label = "step of the sequence"}; }

}  // namespace

std::string loss_figure(const Results& results, Width width) {
  return svg_of(
      training_chart(results, width, "Loss", "mean of a batch, log scale", &History::loss));
}

std::string training_error_figure(const Results& results, Width width) {
  LineChart c = training_chart(results, width, "Angle error while training", "rad, log scale",
                               &History::error);
  if (results.turning_at_once > 0)
    c.rules.push_back({false, results.turning_at_once, "turning at once"});
  return svg_of(c);
}

std::string error_by_length_figure(const Results& results, Width width) {
  LineChart c{.title = "Error against sequence length", .frame = frame_of(width, 340)};
  double T = 0, length = 0;
  for (const RecipeResult& r : results.recipes) {
    c.lines.push_back({.name = r.recipe.name,
                       .style = style_of(r.recipe),
                       .points = windowed(r.long_test.curve, 1, 20),
                       .width = 2.2});
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
    const double step = static_cast<double>(p.T) / static_cast<double>(p.curve.size());
    c.lines.push_back(
        {.name = p.name,
         .style = style++ % 9,
         .points = windowed(p.curve, step, std::max<std::size_t>(1, p.curve.size() / 50)),
         .width = 2.2});
    T = std::max(T, static_cast<double>(p.T));
  }
  c.x = steps_axis(T);
  // A network that loses its way is wrong a hundred times as much as one that does not.
  c.y.log = true;
  fit(c.y, c.lines);
  c.y.label = "mean circular error at that step, rad, log scale";
  c.rules.push_back({true, length, "training length"});
  c.rules.push_back({false, results.turning_at_once, "turning at once"});
  return svg_of(c);
}

std::string gain_figure(const RecipeResult& r, Width width) {
  if (r.gains.velocity.empty()) return "";
  LineChart c{.title = "Gain network", .frame = frame_of(width)};
  for (const bool now : {true, false}) {
    Line line{.name = now ? "told now" : "told before", .style = now ? 4 : 0, .width = 2.2};
    const auto& gains = now ? r.gains.now : r.gains.before;
    for (std::size_t i = 0; i < gains.size(); ++i) {
      line.points.emplace_back(r.gains.velocity[i] * kDegrees, gains[i]);
    }
    c.lines.push_back(std::move(line));
  }
  c.x = {.high = kFastest * kDegrees, .label = "speed, degrees a step"};
  fit(c.y, c.lines);
  c.y.low = std::min(c.y.low, 0.0);
  c.y.high = std::max(c.y.high, 1.1);
  c.y.label = "gain of a turn to the right";
  c.rules.push_back({false, 0, ""});
  return svg_of(c);
}

std::string rest_figure(const Results& results, Width width) {
  LineChart c{.title = "Drift at rest", .frame = frame_of(width)};
  double steps = 1;
  for (const RecipeResult& r : results.recipes) {
    Line line{.name = r.recipe.name, .style = style_of(r.recipe), .width = 2.2};
    const std::size_t n = r.rest.mean.size();
    for (std::size_t t = 0; t < n; t += 20) {
      line.points.emplace_back(static_cast<double>(t + 1), r.rest.mean[t] * kDegrees);
      line.band.emplace_back(0, r.rest.most[t] * kDegrees);
      c.y.high = std::max(c.y.high, r.rest.most[t] * kDegrees * 1.05);
    }
    steps = std::max(steps, static_cast<double>(n));
    c.lines.push_back(std::move(line));
  }
  c.x = {.high = steps, .label = "steps without any velocity"};
  c.y.label = "degrees from the start: mean, and up to the most";
  return svg_of(c);
}

std::string turn_figure(const Results& results, Width width) {
  LineChart c{.title = "Gain curve", .frame = frame_of(width)};
  const double fastest = kFastest * kDegrees;
  c.lines.push_back({.name = "as told",
                     .style = 4,
                     .points = {{-fastest, -fastest}, {fastest, fastest}},
                     .width = 6,
                     .soft = true});
  for (const RecipeResult& r : results.recipes) {
    Line line{.name = r.recipe.name, .style = style_of(r.recipe)};
    for (std::size_t i = 0; i < r.turning.told.size(); ++i) {
      line.points.emplace_back(r.turning.told[i] * kDegrees, r.turning.turned[i] * kDegrees);
    }
    c.lines.push_back(std::move(line));
  }
  c.x = {.low = -fastest, .high = fastest, .label = "told, degrees a step"};
  fit(c.y, c.lines);
  c.y.label = "turned, degrees a step";
  return svg_of(c);
}

std::string noise_figure(const Results& results, Width width, bool velocity) {
  LineChart c{.title = velocity ? "Noise in the velocity" : "Noise in the state",
              .frame = frame_of(width)};
  const auto curve = velocity ? &RecipeResult::velocity_noise : &RecipeResult::state_noise;
  const auto points = [&](const NoiseCurve& n, const std::vector<double>& errors) {
    Points p;
    for (std::size_t i = 0; i < n.level.size(); ++i) {
      const double level = velocity ? n.level[i] * kDegrees : n.level[i] * 100;
      p.emplace_back(level, errors[i] * kDegrees);
      c.x.high = std::max(c.x.high, level);
    }
    return p;
  };
  for (const RecipeResult& r : results.recipes) {
    const NoiseCurve& n = r.*curve;
    if (velocity && c.lines.empty()) {
      c.lines.push_back({.name = "perfect",
                         .style = 4,
                         .points = points(n, n.integrator),
                         .width = 6,
                         .soft = true});
    }
    c.lines.push_back({.name = r.recipe.name,
                       .style = style_of(r.recipe),
                       .points = points(n, n.error),
                       .width = 2.2});
  }
  c.x.label = velocity ? "standard deviation, degrees a step"
                       : "standard deviation, % of the first bump's peak";
  fit(c.y, c.lines);
  c.y.low = 0;
  c.y.label = "mean error, degrees";
  return svg_of(c);
}

std::string velocity_figure(const RecipeResult& r, Width width) {
  LineChart c{.title = "Velocity told", .frame = frame_of(width, 170)};
  Line line{.style = 7, .width = 1.2};
  for (std::size_t t = 0; t < r.example.velocity.size(); ++t) {
    line.points.emplace_back(static_cast<double>(t + 1), r.example.velocity[t] * kDegrees);
  }
  c.lines.push_back(std::move(line));
  c.x = steps_axis(static_cast<double>(r.example.velocity.size()));
  c.y = {.low = -20,
         .high = 20,
         .label = "degrees a step",
         .ticks = {{-18, "-18"}, {0, "0"}, {18, "18"}}};
  return svg_of(c);
}

std::string bump_figure(const RecipeResult& r, Width width, std::size_t most_columns) {
  const auto N = static_cast<std::size_t>(r.recipe.neurons);
  const std::size_t T = r.example.target.size();
  HeatMap m{.title = fmt::format("Activity of the {} neurons", N),
            .frame = frame_of(width),
            .rows = N,
            .columns = T};
  m.frame.bottom = 66;
  m.frame.right = width == Width::kNarrow ? 8 : m.frame.right;
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
  for (const double t : draw::linear_ticks(0, static_cast<double>(T), 12)) {
    m.x_ticks.emplace_back(t, draw::number_label(t));
  }
  m.x_label = "step of the sequence";
  m.y_label = "line: the true angle";
  m.trace = angle_points(r.example.target, 0.5, neurons - 0.5, -0.5);
  return svg_of(pooled(m, 128, most_columns));
}

std::string angle_figure(const RecipeResult& r, Width width) {
  LineChart c{.title = "Decoded against true angle", .frame = frame_of(width, 250)};
  c.lines = {{.name = "true",
              .style = 4,
              .points = angle_points(r.example.target, 1, 0, 360),
              .width = 5,
              .soft = true},
             {.name = "decoded",
              .style = style_of(r.recipe),
              .points = angle_points(r.example.decoded, 1, 0, 360),
              .width = 1.5}};
  c.x = steps_axis(static_cast<double>(r.example.target.size()));
  c.y = {.high = 360,
         .ticks = {{0, "0°"}, {90, "90°"}, {180, "180°"}, {270, "270°"}, {360, "360°"}}};
  return svg_of(c);
}

std::string example_error_figure(const Results& results, Width width) {
  LineChart c{.title = "How far apart", .frame = frame_of(width, 210)};
  for (const RecipeResult& r : results.recipes) {
    Line line{.name = r.recipe.name, .style = style_of(r.recipe), .width = 1.3};
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
  return svg_of(c);
}

std::string matrix_figure(const std::string& title, const float* weights, std::int64_t N,
                          std::size_t most_cells) {
  HeatMap m{.title = title};
  m.frame.height = 410;
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
  return svg_of(pooled(m, most_cells, most_cells));
}

std::string profile_figure(const RecipeResult& r, Width width) {
  const std::int64_t N = r.recipe.neurons;
  LineChart c{.title = "Weight by distance around the ring", .frame = frame_of(width)};
  const auto profile = [&](const float* W, const char* name, int style) {
    Line line{.name = name, .style = style, .width = 2.2};
    // d: to minus from, from half a turn behind to half a turn ahead.
    for (std::int64_t d = -N / 2; d <= N / 2; ++d) {
      double sum = 0;
      for (std::int64_t j = 0; j < N; ++j) sum += W[((j + d) % N + N) % N * N + j];
      line.points.emplace_back(360.0 * static_cast<double>(d) / static_cast<double>(N),
                               sum / static_cast<double>(N));
    }
    c.lines.push_back(std::move(line));
  };
  const bool turning = r.recipe.encoding == Encoding::kTurns;
  profile(r.Wo.data(), "Wo", 4);
  profile(r.Wa.data(), turning ? "Wa left" : "Wa first", 7);
  profile(r.Wa.data() + right_action(r.recipe) * N * N, turning ? "Wa right" : "Wa last", 2);
  c.x = {.low = -180,
         .high = 180,
         .label = "to minus from, degrees",
         .ticks = {{-180, "-180"}, {-90, "-90"}, {0, "0"}, {90, "90"}, {180, "180"}}};
  fit(c.y, c.lines);
  c.y.label = "mean of a diagonal";
  return svg_of(c);
}

}  // namespace annulus::train
