// The page: self-contained, small, markup from a file shown as text, right in what it says first.
#include "train/page/page.h"

#include <gtest/gtest.h>

#include <cmath>

#include "draw/html.h"

namespace annulus::train {
namespace {

std::size_t count(const std::string& page, const std::string& word) {
  std::size_t n = 0;
  for (auto at = page.find(word); at != std::string::npos; at = page.find(word, at + 1)) ++n;
  return n;
}

Results tiny_results() {
  Results results;
  for (Recipe r : {original_recipe(), default_recipe()}) {
    r.neurons = 12;
    r.batch = 4;
    r.steps = 6;
    r.length = r.first_length = 10;
    Trainer trainer(r, kCPU, 1);
    while (!trainer.finished()) trainer.step();
    results.recipes.push_back(collect(trainer, 4));
  }
  results.turning_at_once = 0.07;
  results.device = "cpu";
  return results;
}

TEST(TrainPage, IsSelfContainedAndSmall) {
  const std::string page = render_page(tiny_results());
  for (const char* word : {"http:", "https:", "src=", "href=", "url(", "@import", "<script",
                           "<link", "nan", "inf\""}) {
    EXPECT_EQ(count(page, word), 0u) << word;
  }
  EXPECT_EQ(count(page, "default-src 'none'; style-src 'unsafe-inline'; img-src data:"), 1u);
  EXPECT_EQ(count(page, "<svg"), count(page, "</svg>"));
  EXPECT_GE(count(page, "<svg"), 14u);
  // Every figure has its sentence; all but the matrices and the mark on top are drawn for both screens.
  EXPECT_EQ(count(page, "<div class=\"wide\">"), count(page, "<div class=\"narrow\">"));
  EXPECT_EQ(count(page, "<p class=\"look\">"), count(page, "<div class=\"wide\">") + 6);
  EXPECT_EQ(count(page, "<svg"), 2 * count(page, "<div class=\"wide\">") + 6 + 1);
  EXPECT_LE(page.size(), draw::kMaxPageBytes);
  for (const char* word : {"original recipe", "default recipe", "Wo, which always acts", "Loss",
                           "Decoded against true angle", "Error against sequence length",
                           "Velocity told", "Drift at rest", "Gain curve", "Noise in the velocity",
                           "Noise in the state", "y<sub>i</sub> = J<sub>0</sub>"}) {
    EXPECT_GE(count(page, word), 1u) << word;
  }
}

// Title, cards, table and the text at the end, by the mean error of the two recipes; NaN is no success.
TEST(TrainPage, SaysWhoLearnedAndWhoDidNot) {
  Results results = tiny_results();
  const auto page_of = [&](double original, double by_default) {
    results.recipes[0].test.mean = original;
    results.recipes[1].test.mean = by_default;
    return render_page(results);
  };
  const double good = kLearned * 0.99, bad = kLearned, none = std::nan("");
  std::string page = page_of(good, good);
  EXPECT_EQ(count(page, "<h1>A ring attractor that learned to keep its bearings</h1>"), 1u);
  EXPECT_EQ(count(page, "did not learn") + count(page, "tile failed"), 0u);
  EXPECT_EQ(count(page, "tile lead"), 1u);
  EXPECT_TRUE(what_did_not_learn(results).empty());
  EXPECT_EQ(count(results_table(results), "| default | yes |"), 2u);

  page = page_of(good, bad);
  EXPECT_EQ(count(page, "<h1>Keeping its bearings: original learned to, default did not</h1>"), 1u);
  EXPECT_EQ(count(page, "tile lead"), 0u);
  EXPECT_EQ(count(page, "tile failed"), 1u);
  EXPECT_EQ(count(page, "default recipe, which did not learn"), 1u);
  ASSERT_EQ(what_did_not_learn(results).size(), 1u);
  EXPECT_EQ(what_did_not_learn(results)[0],
            "default did not learn: mean error 0.20 rad over 500 steps, and learned is below 0.2 "
            "(guessing: 1.57)");
  EXPECT_EQ(count(results_table(results), "| default | no |"), 2u);
  EXPECT_EQ(count(results_json(results), "\"learned\": false"), 1u);

  page = page_of(none, 1.1);
  EXPECT_EQ(count(page, "<h1>A ring attractor that did not learn to keep its bearings</h1>"), 1u);
  EXPECT_EQ(count(page, "tile failed"), 2u);
  EXPECT_EQ(what_did_not_learn(results).size(), 2u);
}

TEST(TrainPage, ShowsMarkupAsText) {
  Results results = tiny_results();
  Peer peer;
  peer.name = peer.note = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>";
  peer.T = 500;
  peer.curve = {0.1, 0.2, 0.3};
  results.peers = {peer};
  const std::string page = render_page(results);
  EXPECT_EQ(count(page, "<script"), 0u);
  EXPECT_EQ(count(page, "<img"), 0u);
  EXPECT_EQ(count(page, "</style>"), 1u);
  EXPECT_GT(count(page, "&lt;script&gt;"), 0u);
}

TEST(TrainPage, StaysUnderAMegabyteWithManyNeurons) {
  Results results = tiny_results();
  Rng rng(1);
  for (RecipeResult& r : results.recipes) {
    const std::int64_t N = r.recipe.neurons = 700;
    r.Wa.resize(static_cast<std::size_t>(2 * N * N));
    r.Wo.resize(static_cast<std::size_t>(N * N));
    for (auto* w : {&r.Wa, &r.Wo}) {
      for (float& v : *w) v = static_cast<float>(rng.normal());
    }
    r.example.states.resize(r.example.target.size() * static_cast<std::size_t>(N));
    for (float& v : r.example.states) v = static_cast<float>(rng.uniform());
  }
  EXPECT_LE(render_page(results).size(), draw::kMaxPageBytes);
}

}  // namespace
}  // namespace annulus::train
