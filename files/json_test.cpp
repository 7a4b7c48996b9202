// The guard and the typed access that every reader of JSON goes through.
#include "files/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "files/words.h"

namespace annulus::files {
namespace {

std::string refusal(std::string_view text, const JsonLimits& limits = {}) {
  try {
    (void)parse_json(text, limits);
    return "accepted";
  } catch (const JsonError& e) {
    return e.what();
  }
}

TEST(Json, TheGuardCountsBeforeItParses) {
  EXPECT_EQ(refusal(R"({"a":[1,{"b":"c"}]})"), "accepted");
  EXPECT_EQ(refusal("[[[]]]", {.depth = 2}), "nested more than 2 deep");
  EXPECT_EQ(refusal("[1,2,3]", {.values = 2}), "more than 2 values");
  EXPECT_EQ(refusal(R"(["abc"])", {.string_bytes = 2}), "a string is longer than 2 bytes");
  EXPECT_EQ(refusal(R"(["[[[,,,\\\"[["])", {.depth = 1, .values = 1}), "accepted");
  EXPECT_EQ(refusal(R"({"a":1,"b":{"a":1}})"), "accepted");
  EXPECT_EQ(refusal(R"({"a":1,"\u0061":2})"), "key \"a\" appears twice");
  // A parser that takes a zero byte for the end would not see what follows it.
  EXPECT_EQ(refusal(std::string_view("{}\0[", 4)), "not valid JSON: a zero byte");
}

TEST(Json, SaysWhetherTheTextEndsTooEarly) {
  const auto at_end = [](std::string_view text) {
    try {
      (void)parse_json(text);
      return false;
    } catch (const JsonError& e) {
      return e.at_end;
    }
  };
  EXPECT_TRUE(at_end(R"({"a":)"));
  EXPECT_FALSE(at_end(R"({"a" 1})"));
}

TEST(Json, ValuesAreTakenByTypeAndRange) {
  const Json json = parse_json(
      R"({"i":-3,"u":18446744073709551615,"r":0.5,"s":"x","e":"","n":null,"inf":"Infinity",)"
      R"("l":[1,2],"f":[1.5],"o":{"k":1}})");
  const JsonObject o(json, "", {"i", "u", "r", "s", "e", "n", "inf", "l", "f", "o"});
  EXPECT_EQ(o.whole("i", -3, 0), -3);
  EXPECT_EQ(o.bits("u"), 18446744073709551615u);
  EXPECT_EQ(o.real("r"), 0.5);
  EXPECT_EQ(o.any_real("inf"), HUGE_VAL);
  EXPECT_EQ(o.text("s"), "x");
  EXPECT_EQ(o.text("e", true), "");
  EXPECT_EQ(o.one_of("s", {"y", "x"}), 1u);
  EXPECT_FALSE(o.has("n"));
  EXPECT_EQ(o.maybe_real("n"), std::nullopt);
  EXPECT_EQ(o.wholes("l", 2), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(o.reals("f", 1, 1, 0, 2), (std::vector<double>{1.5}));
  EXPECT_EQ(o.object("o", {"k"}).whole("k", 0, 1), 1);
  EXPECT_THROW((void)o.whole("i", -2, 0), JsonError);
  EXPECT_THROW((void)o.whole("u", 0, INT64_MAX), JsonError);
  EXPECT_THROW((void)o.whole("r", 0, 1), JsonError);
  EXPECT_THROW((void)o.bits("i"), JsonError);
  EXPECT_THROW((void)o.real("inf"), JsonError);
  EXPECT_THROW((void)o.real("i"), JsonError);
  EXPECT_THROW((void)o.text("e"), JsonError);
  EXPECT_THROW((void)o.text("n"), JsonError);
  EXPECT_THROW((void)o.one_of("s", {"y"}), JsonError);
  EXPECT_THROW((void)o.wholes("l", 1), JsonError);
  EXPECT_THROW((void)o.wholes("f", 1), JsonError);
  EXPECT_THROW((void)o.reals("f", 2, 3, 0, 2), JsonError);
  EXPECT_THROW((void)o.object("l", {}), JsonError);
}

TEST(Json, MessagesNameTheKeyAndWhatCame) {
  const Json json = parse_json(R"({"outer":{"steps":"many"}})");
  const JsonObject o = JsonObject(json, "", {"outer"}).object("outer", {"steps"});
  try {
    (void)o.whole("steps", 0, 9);
    FAIL();
  } catch (const JsonError& e) {
    EXPECT_STREQ(e.what(),
                 "\"outer.steps\" must be a whole number between 0 and 9 but is \"many\"");
  }
  try {
    const JsonObject unknown(json.at("outer"), "outer", {"step"});
    FAIL();
  } catch (const JsonError& e) {
    EXPECT_STREQ(e.what(), "unknown key \"outer.steps\", did you mean \"step\"?");
  }
}

TEST(Nearest, FindsTheNeighbourOrNothing) {
  EXPECT_EQ(nearest("devise", {"suite", "device", "dtype"}), "device");
  EXPECT_EQ(nearest("qqqqqqqqqq", {"suite", "device"}), "");
}

}  // namespace
}  // namespace annulus::files
