// The guard and the typed access that every reader of JSON goes through.
#include "files/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "files/words.h"

namespace annulus::files {
namespace {

// The message of the error.
template <class F>
std::string refusal(F&& f) {
  try {
    (void)f();
    return "accepted";
  } catch (const JsonError& e) {
    return e.what() + std::string(e.at_end ? " (cut short)" : "");
  }
}

TEST(Json, WhatIsNoJsonOrTooMuchIsRefused) {
  using namespace std::string_literals;
  const auto repeated = [](std::size_t n, const char* word) {
    std::string s;
    while (n-- > 0) s += word;
    return s;
  };
  for (const auto& [text, words] : std::vector<std::pair<std::string, std::string>>{
           {R"({"a":[1,{"b":"c"}]})", "accepted"},
           {R"({"a":1,"b":{"a":1}})", "accepted"},
           {repeated(16, "[") + repeated(16, "]"), "accepted"},
           {repeated(17, "[") + repeated(17, "]"), "nested more than 16 deep"},
           {repeated(100000, "{\"a\":"), "nested more than 16 deep"},
           {"[0" + repeated(4095, ",0") + "]", "accepted"},
           {"[0" + repeated(4096, ",0") + "]", "more than 4096 values"},
           {"[\"" + repeated(65536, "x") + "\"]", "accepted"},
           {"[\"" + repeated(65537, "x") + "\"]", "a string is longer than 65536 bytes"},
           {R"(["[[[,,,)" + repeated(5000, ",[\\\"") + "\"]", "accepted"},  // all of it in a string
           {R"({"a":1,"\u0061":2})", "key \"a\" appears twice"},
           // A parser that takes a zero byte for the end would not see what follows it.
           {"{}\0["s, "not valid JSON: a zero byte"},
           {R"({"a":)", "(cut short)"},
           {R"({"abc)", "(cut short)"},
           {"", "not valid JSON"},
           {"{}{}", "not valid JSON"},
           {R"({"a":{},})", "not valid JSON"},
           {R"({"a" 1})", "not valid JSON"},
           {"[02]", "not valid JSON"},
           {"{} // all good", "not valid JSON"},
           {R"(["\x41"])", "not valid JSON"},
           {"[\"a\nb\"]", "control character"},
           {R"(["\ud800"])", "surrogate"},
           {R"(["\udc00"])", "surrogate"},
           {"[\"a\xc3\x28\"]", "UTF-8"},
           {"[\"\xc0\xaf\"]", "UTF-8"},             // longer than it needs
           {"[\"\xed\xa0\x80\"]", "UTF-8"},         // a surrogate
           {"[\"\xf5\x80\x80\x80\"]", "UTF-8"}}) {  // above U+10FFFF
    const std::string message = refusal([&, &text = text] { return parse_json(text); });
    EXPECT_NE(message.find(words), std::string::npos) << text.substr(0, 60) << ": " << message;
  }
  const std::string wrong_inside = refusal([] { return parse_json(R"({"a" 1})"); });
  EXPECT_EQ(wrong_inside.find("cut short"), std::string::npos) << wrong_inside;
}

TEST(Json, ValuesAreTakenByTypeAndRange) {
  const Json json = parse_json(
      R"({"i":-3,"u":18446744073709551615,"r":0.5,"s":"x","e":"","n":null,"inf":"Infinity",)"
      R"("f":[1.5],"o":{"k":1}})");
  const JsonObject o(json, "", {"i", "u", "r", "s", "e", "n", "inf", "f", "o"});
  EXPECT_EQ(o.whole("i", -3, 0), -3);
  EXPECT_EQ(o.bits("u"), 18446744073709551615u);
  EXPECT_EQ(o.real("r"), 0.5);
  EXPECT_EQ(o.any_real("inf"), HUGE_VAL);
  EXPECT_EQ(o.text("s"), "x");
  EXPECT_EQ(o.text("e", true), "");
  EXPECT_EQ(o.one_of("s", {"y", "x"}), 1u);
  EXPECT_FALSE(o.has("n"));
  EXPECT_EQ(o.maybe_real("n"), std::nullopt);
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
  EXPECT_THROW((void)o.reals("f", 2, 3, 0, 2), JsonError);
  EXPECT_THROW((void)o.object("f", {}), JsonError);
}

TEST(Json, MessagesNameTheKeyAndWhatCame) {
  const Json json = parse_json(R"({"outer":{"steps":"many"}})");
  const JsonObject o = JsonObject(json, "", {"outer"}).object("outer", {"steps"});
  EXPECT_EQ(refusal([&] { return o.whole("steps", 0, 9); }),
            "\"outer.steps\" must be a whole number between 0 and 9 but is \"many\"");
  EXPECT_EQ(refusal([&] { return JsonObject(json.at("outer"), "outer", {"step"}); }),
            "unknown key \"outer.steps\", did you mean \"step\"?");
}

TEST(Words, TheNeighbourIsMeantOrNothing) {
  EXPECT_EQ(meant("devise", {"suite", "device", "dtype"}), ", did you mean \"device\"?");
  EXPECT_EQ(meant("qqqqqqqqqq", {"suite", "device"}), "");
}

TEST(Words, NoControlCharacterIsPrinted) {
  const std::string text =
      "a\x1b]0;t\x07\x7f\xc2\x9b"
      "31m \xc3\xa9|\n";
  EXPECT_EQ(escaped(text), "a\\x1b]0;t\\x07\\x7f\\x9b31m \xc3\xa9|\\x0a");
  EXPECT_EQ(printable(text), "a\\x1b]0;t\\x07\\x7f\\xc2\\x9b31m \\xc3\\xa9|\\x0a");
  EXPECT_EQ(printable("abc", 2), "ab...");
}

}  // namespace
}  // namespace annulus::files
