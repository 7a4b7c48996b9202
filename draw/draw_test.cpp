// Text, scales and figures.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "draw/charts.h"
#include "draw/html.h"
#include "draw/scale.h"

namespace annulus::draw {
namespace {

TEST(Html, EscapesEverythingThatCouldBeMarkup) {
  EXPECT_EQ(text("<b a='1' c=\"2\">&"), "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;");
  EXPECT_EQ(text("a\x01\n\x7f"), "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(text("x\xE2\x80\xAEy"), "x\xEF\xBF\xBDy");  // right-to-left override
  EXPECT_EQ(text("ü€"), "ü€");
  EXPECT_EQ(text("aü€", 3), "aü…");  // never half a character
  EXPECT_EQ(text("aü€", 2), "a…");
}

TEST(Scale, MapsEndsAndMiddle) {
  const Scale s(1, 100, 0, 200, true);
  EXPECT_DOUBLE_EQ(s(1), 0);
  EXPECT_DOUBLE_EQ(s(10), 100);
  EXPECT_DOUBLE_EQ(s(100), 200);
  EXPECT_EQ(s.ticks(20), (std::vector<double>{1, 2, 5, 10, 20, 50, 100}));
  EXPECT_EQ(s.ticks(50), (std::vector<double>{1, 10, 100}));
  EXPECT_EQ(Scale(2, 9, 0, 50, true).ticks(50),
            (std::vector<double>{2, 5}));  // better two than none
  EXPECT_EQ(Scale(1e-3, 1e3, 0, 600, true).ticks(50).size(), 7u);
  EXPECT_LE(Scale(1e-12, 1e12, 0, 300, true).ticks(50).size(), 7u);
  const Scale single(5, 5, 0, 10, true);
  EXPECT_DOUBLE_EQ(single(5), 5);
  // Less than a factor of two: plain steps say more than one power of ten.
  EXPECT_EQ(Scale(5.5, 8.2, 0, 200, true).ticks(50), (std::vector<double>{6, 7, 8}));
  const Scale down(4, 0, 0, 100, false);  // rows of a matrix, the first on top
  EXPECT_DOUBLE_EQ(down(3), 25);
  EXPECT_DOUBLE_EQ(down.inside(5), 4);
  EXPECT_TRUE(down.holds(0) && !down.holds(-1));
}

TEST(Scale, DurationsReadWell) {
  EXPECT_EQ(duration_label(0.0005), "0.5 µs");
  EXPECT_EQ(duration_label(20), "20 ms");
  EXPECT_EQ(duration_label(3000), "3 s");
}

TEST(Figure, TicksAreRound) {
  EXPECT_EQ(linear_ticks(0, 1000, 5), (std::vector<double>{0, 200, 400, 600, 800, 1000}));
  EXPECT_EQ(linear_ticks(-1, 1, 4), (std::vector<double>{-1, -0.5, 0, 0.5, 1}));
  EXPECT_TRUE(linear_ticks(1, 1, 4).empty());
  EXPECT_TRUE(linear_ticks(0, std::numeric_limits<double>::infinity(), 4).empty());
}

TEST(Figure, PoolingTakesMeansOfBlocks) {
  const HeatMap m{
      .rows = 2, .columns = 5, .values = {1, 2, 3, 4, 5, 3, 4, 5, 6, 9}, .x_ticks = {{4, "x"}}};
  const HeatMap p = pooled(m, 1, 3);
  EXPECT_EQ(p.rows, 1u);
  EXPECT_EQ(p.columns, 3u);
  EXPECT_EQ(p.values, (std::vector<double>{2.5, 4.5, 7}));
  EXPECT_EQ(p.x_ticks[0].first, 2);
  EXPECT_EQ(pooled(m, 2, 5).values, m.values);
}

TEST(Figure, CellsBecomeStrokesOfOneColourEach) {
  const std::string svg = svg_of(
      HeatMap{.rows = 2, .columns = 4, .values = {1, 1, 0, -1, 0, 1, 1, 1}, .diverging = true});
  EXPECT_NE(svg.find("class=\"hp\" stroke-opacity=\"1\" d=\"m0 0h2m-1 1h3\""), std::string::npos)
      << svg;
  EXPECT_NE(svg.find("class=\"hm\" stroke-opacity=\"1\" d=\"m3 0h1\""), std::string::npos) << svg;
}

TEST(Figure, CopesWithNothingAndWithWhatIsNoNumber) {
  EXPECT_NE(svg_of(LineChart{}).find("</svg>"), std::string::npos);
  EXPECT_NE(svg_of(HeatMap{}).find("</svg>"), std::string::npos);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const LineChart c{.lines = {{.points = {{0, 0}, {0.5, nan}, {1, 1e300}},
                               .band = {{0, 1}, {nan, nan}, {0, 1}}}}};
  EXPECT_EQ(svg_of(c).find("nan"), std::string::npos);
  const HeatMap m{.rows = 1, .columns = 1, .values = {nan}};
  EXPECT_EQ(svg_of(m).find("nan"), std::string::npos);
}

TEST(Figure, NamesAtTheEndAreApart) {
  LineChart c;
  for (const char* name : {"one", "two", "three"}) {
    c.lines.push_back({.name = name, .points = {{0, 0.5}, {1, 0.5}}});
  }
  const std::string svg = svg_of(c);
  std::vector<double> heights;
  for (auto at = svg.find("class=\"fn"); at != std::string::npos;
       at = svg.find("class=\"fn", at + 1)) {
    heights.push_back(std::stod(svg.substr(svg.find("y=\"", at) + 3)));
  }
  ASSERT_EQ(heights.size(), 3u);
  for (std::size_t i = 1; i < 3; ++i) EXPECT_GE(heights[i] - heights[i - 1], 13.9);
}

// What the y axis shows stands beside the title, and below it where both have no room on one line.
TEST(Drawing, TitleAndUnitDoNotTouch) {
  const Axis y{.label = "mean circular error at that step, rad"};
  const auto drawn = [&](double width) {
    return Drawing({.width = width, .top = 46}, {}, y, "Error against sequence length").finish();
  };
  EXPECT_NE(drawn(1120).find("text-anchor=\"end\" x=\"1024.0\" y=\"17.0\">mean"),
            std::string::npos);
  EXPECT_NE(drawn(360).find("class=\"fl\" x=\"58.0\" y=\"34.0\">mean"), std::string::npos);
}

}  // namespace
}  // namespace annulus::draw
