// The page: self-contained, small, markup from a file shown as text, right in what it says first;
// and the run around it: files, stopping and going on, refusals.
#include "train/page.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "annulus/core/errors.h"
#include "draw/html.h"
#include "files/file.h"
#include "testing/scratch_folder.h"
#include "train/run.h"

namespace annulus::train {
namespace {

std::size_t count(const std::string& page, const std::string& word) {
  std::size_t n = 0;
  for (auto at = page.find(word); at != std::string::npos; at = page.find(word, at + 1)) ++n;
  return n;
}

Recipe tiny(Recipe r) {
  r.neurons = 12;
  r.batch = 4;
  r.steps = 6;
  r.length = r.first_length = 10;
  r.growth = 0;
  return r;
}

Results tiny_results() {
  Results results;
  for (const Recipe& r : {tiny(seed_recipe()), tiny(default_recipe())}) {
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
  EXPECT_LE(page.size(), draw::kMaxPageBytes);
  for (const char* word : {"seed recipe", "default recipe", "Wo, which always acts", "Loss",
                           "Decoded against true angle", "Error against sequence length"}) {
    EXPECT_GE(count(page, word), 1u) << word;
  }
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

class TrainRun : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.out = folder_ + "/a/b";
    options_.recipes = {tiny(seed_recipe()), tiny(default_recipe())};
    options_.checkpoint_every = 4;
    options_.test_sequences = 3;
    watcher_.begin = [](const Trainer&) {};
    watcher_.step = [this](const Trainer&, const LossFigures&) { ++steps_; };
    watcher_.evaluating = [](const Trainer&) {};
    watcher_.stop = [this] { return steps_ == stop_at_; };
    watcher_.note = [](const std::string&) {};
  }
  std::string text(const std::string& path) const {
    return files::read_file(path, std::size_t{1} << 24);
  }
  // Time and page apart, a run is a function of its recipes.
  static std::string without_seconds(std::string json) {
    for (auto at = json.find("\"seconds\""); at != std::string::npos;
         at = json.find("\"seconds\"", at + 1)) {
      json.erase(at, json.find('\n', at) - at);
    }
    return json;
  }

  const testing::ScratchFolder scratch_;
  const std::string folder_ = scratch_.path();
  RunOptions options_;
  RunWatcher watcher_;
  int steps_ = 0, stop_at_ = -1;
};

TEST_F(TrainRun, StoppedAnywhereItEndsWithTheSameFiles) {
  const RunOutcome whole = run(options_, watcher_);
  EXPECT_FALSE(whole.stopped);
  EXPECT_EQ(steps_, 12);
  const std::vector<std::string> files = {"/seed/model.safetensors", "/default/model.safetensors",
                                          "/seed/curve.csv", "/default/curve.csv"};
  std::vector<std::string> expected;
  for (const std::string& f : files) expected.push_back(text(options_.out + f));
  const std::string results = without_seconds(text(options_.out + "/results.json"));
  EXPECT_NE(text(whole.page).find("</html>"), std::string::npos);

  for (const int at : {1, 5, 6, 7, 11, 12}) {
    options_.out = folder_ + "/stopped" + std::to_string(at);
    options_.resume = false;
    steps_ = 0;
    stop_at_ = at;
    const RunOutcome first = run(options_, watcher_);
    // A stop asked for in the last step of a recipe takes effect in the next.
    if (at == 12) {
      EXPECT_FALSE(first.stopped);
      continue;
    }
    if (at != 6) {
      ASSERT_TRUE(first.stopped);
      EXPECT_EQ(first.stopped->recipe, at < 6 ? "seed" : "default");
      EXPECT_EQ(first.stopped->step, at < 6 ? at : at - 6);
    }
    stop_at_ = -1;
    options_.resume = true;
    options_.threads = 2;
    EXPECT_FALSE(run(options_, watcher_).stopped);
    EXPECT_EQ(steps_, 12);
    for (std::size_t i = 0; i < files.size(); ++i) {
      EXPECT_EQ(text(options_.out + files[i]), expected[i]) << at << files[i];
    }
    EXPECT_EQ(without_seconds(text(options_.out + "/results.json")), results) << at;
  }
}

TEST_F(TrainRun, ARunIsNotOverwrittenUnasked) {
  (void)run(options_, watcher_);
  EXPECT_THROW((void)run(options_, watcher_), InvalidArgument);
  options_.overwrite = true;
  EXPECT_NO_THROW((void)run(options_, watcher_));
}

TEST_F(TrainRun, ContinuesOnlyWhatWasStarted) {
  options_.resume = true;
  EXPECT_THROW((void)run(options_, watcher_), InvalidArgument);  // nothing there
  options_.resume = false;
  stop_at_ = 2;
  (void)run(options_, watcher_);
  options_.resume = true;
  options_.recipes[0].batch = 5;
  try {
    (void)run(options_, watcher_);
    FAIL() << "another recipe was taken";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("batch 4, not 5"), std::string::npos) << e.what();
  }
}

TEST_F(TrainRun, AnImpossibleRecipeIsRefusedBeforeAnythingIsWritten) {
  options_.recipes[1].neurons = 0;
  EXPECT_THROW((void)run(options_, watcher_), InvalidArgument);
  EXPECT_FALSE(files::exists(options_.out));
}

}  // namespace
}  // namespace annulus::train
