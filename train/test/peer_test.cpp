// Peers' files: what the format says, and nothing else.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "annulus/core/errors.h"
#include "files/file.h"
#include "train/files/results.h"

namespace annulus::train {
namespace {

using json = nlohmann::ordered_json;

json good() {
  return {{"name", "GRU"},
          {"T", 500},
          {"mean", 0.5},
          {"std", 0.4},
          {"max", 3.1},
          {"final", 0.7},
          {"curve", {0.1, 0.2, 0.9}},
          {"steps", 1000},
          {"parameters", 49152},
          {"seconds", 61.5},
          {"note", "torch 2.10"}};
}

bool refused(const json& peers) {
  try {
    (void)parse_peers(peers.dump());
    return false;
  } catch (const InvalidArgument&) {
    return true;
  }
}

TEST(TrainPeer, ReadsOneOrAList) {
  const auto one = parse_peers(good().dump());
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].name, "GRU");
  EXPECT_EQ(one[0].T, 500);
  EXPECT_EQ(one[0].curve, (std::vector<double>{0.1, 0.2, 0.9}));
  EXPECT_EQ(one[0].parameters, 49152);
  EXPECT_EQ(parse_peers(json::array({good(), good()}).dump()).size(), 2u);
  json least = good();
  for (const char* key : {"steps", "parameters", "seconds", "note"}) least.erase(key);
  EXPECT_EQ(parse_peers(least.dump())[0].steps, 0);
}

TEST(TrainPeer, RefusesTheRest) {
  for (const char* text : {"[]", "null", "3", "\"x\"", "{}", "[[]]", "[1]"}) {
    EXPECT_TRUE(refused(json::parse(text))) << text;
  }
  for (const char* text : {"", "{"}) EXPECT_THROW((void)parse_peers(text), InvalidArgument) << text;
  const json whole = good();  // items() keeps no temporary alive
  for (const auto& [key, value] : whole.items()) {
    json bad = whole;
    bad[key + "x"] = value;
    EXPECT_TRUE(refused(bad)) << key << " misspelt";
    bad = whole;
    for (const json& wrong : {json(nullptr), json(true), json(-1), json(1e300), json::object()}) {
      bad[key] = wrong;
      EXPECT_TRUE(refused(bad)) << key << " = " << wrong.dump();
    }
    bad.erase(key);
    const bool optional =
        key == "steps" || key == "parameters" || key == "seconds" || key == "note";
    EXPECT_EQ(refused(bad), !optional) << "no " << key;
  }
  for (const std::size_t points : {1, 5000}) {
    json bad = whole;
    bad["curve"] = std::vector<double>(points, 0.1);
    EXPECT_TRUE(refused(bad)) << points;
  }
  EXPECT_TRUE(refused(std::vector<json>(17, whole)));
  EXPECT_THROW((void)read_peers("/nonexistent.json"), files::FileError);
  EXPECT_THROW((void)read_peers("/dev/zero"), files::FileError);
}

}  // namespace
}  // namespace annulus::train
