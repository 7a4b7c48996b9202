// safetensors: what is written comes back; every one of some thousand damaged files is refused with
// the typed error, and none is read beyond its end (run under AddressSanitizer in `make sanitize`).
#include "train/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "train/files.h"
#include "train/rng.h"
#include "train/safetensors_header.h"
#include "train/xxh64.h"

namespace annulus::train {
namespace {

std::vector<std::byte> bytes_of_text(std::string_view text) {
  const auto view = std::as_bytes(std::span(text.data(), text.size()));
  return {view.begin(), view.end()};
}

// A file with this header and so many bytes of data.
std::vector<std::byte> file_with(std::string_view header, std::size_t data) {
  std::vector<std::byte> bytes(8 + header.size() + data);
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(header.size() >> (8 * i));
  if (!header.empty()) std::memcpy(bytes.data() + 8, header.data(), header.size());
  return bytes;
}

const std::string kGood =
    R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("none":{"dtype":"I64","shape":[0,7],"data_offsets":[24,24]},)"
    R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})";
constexpr std::size_t kGoodData = 26;

std::vector<std::byte> good() { return file_with(kGood, kGoodData); }

// The message of the error, empty when there is none.
std::string refusal(std::vector<std::byte> bytes) {
  try {
    SafetensorsFile::parse(std::move(bytes));
    return "";
  } catch (const SafetensorsError& e) {
    return e.what();
  }
}

TEST(Xxh64, KnownAnswers) {
  EXPECT_EQ(xxh64({}), 0xEF46DB3751D8E999ull);
  EXPECT_EQ(xxh64(bytes_of_text("a")), 0xD24EC4F1A98C6E5Bull);
  EXPECT_EQ(xxh64(bytes_of_text("abc")), 0x44BC2CF5AD770999ull);
  EXPECT_EQ(xxh64(bytes_of_text("Nobody inspects the spammish repetition")), 0xFBCEA83C8A378BF1ull);
}

TEST(Safetensors, ReadsWhatTheFormatAllows) {
  const SafetensorsFile f = SafetensorsFile::parse(good());
  ASSERT_EQ(f.tensors().size(), 3u);
  EXPECT_EQ(f.metadata().at("format"), "pt");
  EXPECT_EQ(f.find("a")->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(f.find("a")->data.size(), 24u);
  EXPECT_EQ(f.find("none")->data.size(), 0u);
  EXPECT_EQ(f.find("b")->data.size(), 2u);
  EXPECT_EQ(f.find("c"), nullptr);
  EXPECT_EQ(SafetensorsFile::parse(file_with("{}", 0)).tensors().size(), 0u);
  EXPECT_EQ(SafetensorsFile::parse(file_with("  {\n}\t ", 0)).tensors().size(), 0u);
  // Names may be any text, escapes included, and order in the header does not matter.
  const SafetensorsFile g = SafetensorsFile::parse(
      file_with(R"({"\u00fc\n\ud83d\ude00":{"data_offsets":[1,2],"shape":[1],"dtype":"U8"},)"
                R"("x":{"dtype":"BOOL","shape":[1,1],"data_offsets":[0,1]}})",
                2));
  EXPECT_EQ(g.tensors()[1].name, "ü\n😀");
}

TEST(Safetensors, WhatIsWrittenComesBack) {
  const std::vector<float> a = {1, -2.5f, 3e-40f, 4, 5, 6};
  const std::vector<float> none;
  const std::vector<SafeTensor> tensors = {
      {"layer.\"weight\"\n", SafeDType::kF32, {2, 3}, std::as_bytes(std::span(a))},
      {"empty", SafeDType::kF32, {0, 4}, std::as_bytes(std::span(none))},
      {"ü", SafeDType::kF32, {6}, std::as_bytes(std::span(a))}};
  const auto bytes = write_safetensors(tensors, {{"key", "val\\ue"}, {"k2", ""}});
  const SafetensorsFile f = SafetensorsFile::parse(bytes);
  const std::array<std::int64_t, 2> shape = {2, 3};
  EXPECT_EQ(f.f32("layer.\"weight\"\n", shape), a);
  EXPECT_EQ(f.metadata().at("key"), "val\\ue");
  EXPECT_EQ(f.metadata().at("k2"), "");
  EXPECT_EQ(f.tensors().size(), 3u);
  EXPECT_EQ(write_safetensors(f.tensors(), f.metadata()), bytes);
  const std::array<std::int64_t, 2> other = {3, 2};
  EXPECT_THROW(f.f32("layer.\"weight\"\n", other), SafetensorsError);
  EXPECT_THROW(f.f32("no", shape), SafetensorsError);
}

TEST(Safetensors, RefusesByRule) {
  const auto tensor = [](const std::string& body) { return "{\"a\":{" + body + "}}"; };
  const std::string dtype = R"("dtype":"F32",)", shape = R"("shape":[2],)";
  const std::string offsets = R"("data_offsets":[0,8])";
  struct Row {
    const char* why;
    std::string header;
    std::size_t data;
    const char* message;
  };
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  const std::vector<Row> rows = {
      {"nothing", "", 0, "expected"},
      {"an array", "[]", 0, "expected"},
      {"two objects", "{}{}", 0, "after"},
      {"a comma at the end", R"({"__metadata__":{},})", 0, "expected"},
      {"no colon", R"({"a" 1})", 0, "expected"},
      {"a number for a tensor", R"({"a":1})", 0, "expected"},
      {"depth", deep, 0, "expected"},
      {"no dtype", tensor(shape + offsets), 8, "lacks"},
      {"no shape", tensor(dtype + offsets), 8, "lacks"},
      {"no offsets", tensor(R"("dtype":"F32","shape":[2])"), 8, "lacks"},
      {"an unknown key", tensor(dtype + shape + offsets + ",\"x\":1"), 8, "other than"},
      {"a key twice", tensor(dtype + dtype + shape + offsets), 8, "twice"},
      {"an unknown dtype", tensor(R"("dtype":"F31",)" + shape + offsets), 8, "dtype"},
      {"a dtype that is no text", tensor(R"("dtype":9,)" + shape + offsets), 8, "expected"},
      {"a negative extent", tensor(dtype + R"("shape":[-2],)" + offsets), 8, "whole number"},
      {"a fraction", tensor(dtype + R"("shape":[2.0],)" + offsets), 8, "expected"},
      {"an exponent", tensor(dtype + R"("shape":[2e0],)" + offsets), 8, "expected"},
      {"a leading zero", tensor(dtype + R"("shape":[02],)" + offsets), 8, "leading zero"},
      {"above 2^63", tensor(dtype + R"("shape":[9223372036854775808],)" + offsets), 8, "2^63"},
      {"a product above 2^63",
       tensor(dtype + R"("shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0, "63 bits"},
      {"a product that wraps to the right size",
       tensor(dtype + R"("shape":[4611686018427387905,2],"data_offsets":[0,8])"), 8, "63 bits"},
      {"a product above 2^63 beside a zero",
       tensor(dtype + R"("shape":[4294967296,4294967296,0],"data_offsets":[0,0])"), 0, "63 bits"},
      {"rank 9", tensor(dtype + R"("shape":[1,1,1,1,1,1,1,1,2],)" + offsets), 8, "more than 8"},
      {"three offsets", tensor(dtype + shape + R"("data_offsets":[0,8,8])"), 8, "more than 2"},
      {"one offset", tensor(dtype + shape + R"("data_offsets":[0])"), 8, "two numbers"},
      {"offsets that run backwards", tensor(dtype + shape + R"("data_offsets":[8,0])"), 8,
       "within"},
      {"beyond the end", tensor(dtype + shape + R"("data_offsets":[0,8])"), 7, "within"},
      {"more data than tensors", tensor(dtype + shape + offsets), 9, "end at byte"},
      {"a hole in front", tensor(dtype + shape + R"("data_offsets":[1,9])"), 9, "hole"},
      {"offsets that do not fit the shape", tensor(dtype + shape + R"("data_offsets":[0,4])"), 4,
       "takes 8 bytes"},
      {"overlap",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "hole or an overlap"},
      {"the same place twice",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "hole or an overlap"},
      {"an empty tensor inside another",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
       4, "hole or an overlap"},
      {"an empty tensor beyond the end", R"({"b":{"dtype":"U8","shape":[0],"data_offsets":[9,9]}})",
       4, "within"},
      {"a name twice",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "twice"},
      {"a name twice, once by an escape",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "twice"},
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
      {"a metadata key twice", R"({"__metadata__":{"a":"1","a":"2"}})", 0, "twice"},
      {"metadata that is no text", R"({"__metadata__":{"a":1}})", 0, "expected"},
      {"metadata in depth", R"({"__metadata__":{"a":{"b":"c"}}})", 0, "expected"},
      {"a long name", "{\"" + std::string(70000, 'x') + "\":1}", 0, "more than 65536 bytes"},
      {"bad UTF-8", "{\"a\xc3\x28\":1}", 0, "UTF-8"},
      {"UTF-8 in a longer form than it needs", "{\"\xc0\xaf\":1}", 0, "UTF-8"},
      {"a surrogate in UTF-8", "{\"\xed\xa0\x80\":1}", 0, "UTF-8"},
      {"above U+10FFFF", "{\"\xf5\x80\x80\x80\":1}", 0, "UTF-8"},
      {"half a surrogate pair", R"({"\ud800":1})", 0, "surrogate"},
      {"the other half", R"({"\udc00":1})", 0, "surrogate"},
      {"an unknown escape", R"({"\x41":1})", 0, "escape"},
      {"a raw newline in a name", "{\"a\nb\":1}", 0, "control"},
      {"a name without its end", R"({"abc)", 0, "without its end"},
      {"true", R"({"a":true})", 0, "expected"},
      {"a comment", "{} // all good", 0, "after"},
  };
  for (const Row& row : rows) {
    const std::string message = refusal(file_with(row.header, row.data));
    EXPECT_NE(message.find(row.message), std::string::npos) << row.why << ": \"" << message << "\"";
  }
}

TEST(Safetensors, RefusesSizesThatLie) {
  const std::vector<std::byte> file = good();
  for (std::size_t n = 0; n < file.size(); ++n) {  // every way to cut it short
    EXPECT_NE(refusal({file.begin(), file.begin() + static_cast<std::ptrdiff_t>(n)}), "") << n;
  }
  for (const std::uint64_t size :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{kGood.size() - 1},
        std::uint64_t{kGood.size() + 1}, std::uint64_t{1} << 24, (std::uint64_t{1} << 24) + 1,
        std::uint64_t{1} << 32, std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{7}}) {
    std::vector<std::byte> lying = file;
    for (std::size_t i = 0; i < 8; ++i) lying[i] = static_cast<std::byte>(size >> (8 * i));
    EXPECT_NE(refusal(lying), "") << size;
  }
  std::vector<std::byte> longer = file;
  longer.push_back(std::byte{0});
  EXPECT_NE(refusal(longer), "");
}

TEST(Safetensors, MoreTensorsThanAllowedAreRefused) {
  std::string header = "{";
  for (int i = 0; i <= 65536; ++i) {
    header += (i ? ",\"" : "\"") + std::to_string(i) +
              R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  EXPECT_NE(refusal(file_with(header + "}", 0)).find("more than 65536 tensors"), std::string::npos);
  SafetensorsLimits limits;
  limits.header_bytes = 10;
  EXPECT_THROW(SafetensorsFile::parse(good(), limits), SafetensorsError);
  limits = {};
  limits.file_bytes = 100;
  EXPECT_THROW(SafetensorsFile::parse(good(), limits), SafetensorsError);
}

// Bytes changed, swapped, doubled, dropped at random. Some files stay legal; then all of what they
// hold must lie within them and be written back to the same tensors.
TEST(Safetensors, TwoThousandMutantsDoNoHarm) {
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(seed);
    std::vector<std::byte> file = good();
    const std::int64_t changes = 1 + rng.below(3);
    for (std::int64_t c = 0; c < changes; ++c) {
      // Mostly in the header, where the meaning is.
      const auto at = static_cast<std::size_t>(
          rng.below(static_cast<std::int64_t>(rng.below(8) == 0 ? file.size() : 8 + kGood.size())));
      const std::size_t from = std::min(at, file.size() - 1);
      constexpr std::string_view kTokens = "{}[]\",:0123456789-.eEtfn\\u \xff\x00";
      switch (rng.below(5)) {
        case 0:
          file[from] = static_cast<std::byte>(rng.below(256));
          break;
        case 1:
          file[from] =
              static_cast<std::byte>(kTokens[static_cast<std::size_t>(rng.below(kTokens.size()))]);
          break;
        case 2:
          file.erase(file.begin() + static_cast<std::ptrdiff_t>(from));
          break;
        case 3:
          file.insert(file.begin() + static_cast<std::ptrdiff_t>(from), file[from]);
          break;
        default:
          std::swap(
              file[from],
              file[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(file.size())))]);
      }
    }
    try {
      const SafetensorsFile f = SafetensorsFile::parse(file);
      unsigned sum = 0;
      for (const SafeTensor& t : f.tensors()) {
        for (const std::byte b : t.data) sum += std::to_integer<unsigned>(b);
      }
      const auto again = SafetensorsFile::parse(write_safetensors(f.tensors(), f.metadata()));
      EXPECT_EQ(again.tensors().size(), f.tensors().size());
      EXPECT_GE(sum, 0u);
    } catch (const SafetensorsError& e) {
      ++refused;
      EXPECT_GT(std::strlen(e.what()), 5u);
    }
  }
  EXPECT_GT(refused, 1500);
}

TEST(Safetensors, FilesThatAreNoFiles) {
  EXPECT_THROW(SafetensorsFile::read("/nonexistent/x.safetensors"), SafetensorsError);
  EXPECT_THROW(SafetensorsFile::read("/"), SafetensorsError);
  EXPECT_THROW(SafetensorsFile::read("/dev/zero"), SafetensorsError);
}

}  // namespace
}  // namespace annulus::train
