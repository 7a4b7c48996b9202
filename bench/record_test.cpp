// The record: what is written is what is read, and what is wrong is refused with file, line and
// key.
#include "bench/record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "files/file.h"
#include "files/json.h"
#include "testing/scratch_folder.h"

namespace annulus::bench {
namespace {

Record full_record() {
  Record r;
  r.suite = "lrpe-cosine";
  r.row = "fwd-1d-n256-l0-b12";
  r.op = "lrpe_cosine";
  r.impl = "annulus";
  r.device = "cpu";
  r.dtype = "bf16";
  r.params = {{"B", std::int64_t{12}},
              {"scale", 0.5},
              {"flag", true},
              {"note", std::string("a \"quoted\" <b>")},
              {"shape", std::vector<std::int64_t>{16, 16}}};
  r.time_ms = TimeMs{1.25, 1.0, 2.5, 30};
  r.error = ErrorFigure{"max", 3e-7};
  r.zero_rows = 0.25;
  r.flops_needed = 1e9;
  r.flops_executed = 2e9;
  r.bytes = 123456789;
  r.workspace_bytes = 0;
  r.peak_bytes = 1 << 20;
  r.floor_ms = 0.75;
  r.floor_kind = FloorKind::kBandwidth;
  r.ceiling = Ceiling{20.5, 100, Precision::kBf16, 0.95};
  r.original = OriginalFigure{0.163, "ms", "A800", {{"Torch", 0.4}, {"Triton", 0.163}}};
  r.hardware = "a CPU";
  r.commit = "abc123";
  r.date = "2025-01-01T00:00:00Z";
  return r;
}

// The line with one piece of text replaced; the test fails when the piece is not there.
std::string replaced(const std::string& from, const std::string& to) {
  std::string line = to_json_line(full_record());
  const auto at = line.find(from);
  EXPECT_NE(at, std::string::npos) << from << " in " << line;
  return line.replace(at, from.size(), to);
}

std::string refusal(const std::string& line) {
  try {
    parse_record(line);
  } catch (const files::JsonError& e) {
    return e.what();
  }
  return "accepted";
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content) { files::write_file(path_, content); }
  const std::string& path() const { return path_; }

 private:
  const testing::ScratchFolder folder_;
  const std::string path_ = folder_.path() + "/rows.jsonl";
};

std::string file_refusal(const std::string& content) {
  const TemporaryFile file(content);
  try {
    read_records(file.path());
  } catch (const files::FileError& e) {
    return std::string(e.what()).substr(file.path().size());
  }
  return "accepted";
}

TEST(Record, SurvivesTheRoundTrip) {
  const Record r = full_record();
  const std::string line = to_json_line(r);
  const Record back = parse_record(line);
  EXPECT_EQ(line, to_json_line(back));
  EXPECT_EQ(back.params, r.params);
  EXPECT_EQ(back.time_ms->n, 30);
  EXPECT_EQ(back.original->columns, r.original->columns);
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

// Files from before have the original's figure under another key.
TEST(Record, TheOriginalWasCalledSeed) {
  EXPECT_EQ(to_json_line(parse_record(replaced("\"original\"", "\"seed\""))),
            to_json_line(full_record()));
  EXPECT_NE(refusal(replaced("\"original\"", "\"seed\":{},\"original\"")).find("\"original\""),
            std::string::npos);
}

TEST(Record, NanAndInfinityAreStrings) {
  Record r = full_record();
  r.error->value = std::nan("");
  EXPECT_NE(to_json_line(r).find("\"value\":\"NaN\""), std::string::npos);
  EXPECT_TRUE(std::isnan(parse_record(to_json_line(r)).error->value));
  r.error->value = HUGE_VAL;
  EXPECT_EQ(parse_record(to_json_line(r)).error->value, HUGE_VAL);
  // A time has no such excuse.
  EXPECT_NE(refusal(replaced("\"median\":1.25", "\"median\":\"NaN\"")).find("time_ms.median"),
            std::string::npos);
}

TEST(Record, ASkippedRowHasAReasonAndNoTime) {
  Record r = full_record();
  r.time_ms.reset();
  r.error.reset();
  r.status = Status::kSkipped;
  r.reason = "needs 2 GPUs";
  EXPECT_EQ(parse_record(to_json_line(r)).reason, "needs 2 GPUs");
  r.reason.clear();
  EXPECT_NE(refusal(to_json_line(r)).find("reason"), std::string::npos);
}

TEST(Record, ARowWithoutAnErrorFigureIsRefused) {
  Record r = full_record();
  r.error.reset();
  EXPECT_NE(refusal(to_json_line(r)).find("error figure"), std::string::npos);
}

TEST(Record, AnUnknownKeyNamesItsNeighbour) {
  EXPECT_EQ(refusal(replaced("\"impl\"", "\"inpl\"")),
            "unknown key \"inpl\", did you mean \"impl\"?");
  EXPECT_EQ(refusal(replaced("\"median\"", "\"mediam\"")),
            "unknown key \"time_ms.mediam\", did you mean \"median\"?");
}

TEST(Record, TypesAndRangesAreChecked) {
  struct Bad {
    const char *from, *to, *named;
  };
  for (const Bad& b :
       {Bad{"\"suite\":\"lrpe-cosine\"", "\"suite\":3", "suite"},
        Bad{"\"suite\":\"lrpe-cosine\"", "\"suite\":\"\"", "suite"},
        Bad{"\"median\":1.25", "\"median\":-1", "time_ms.median"},
        Bad{"\"median\":1.25", "\"median\":1e300", "time_ms.median"},
        Bad{"\"median\":1.25", "\"median\":[1]", "time_ms.median"},
        Bad{"\"n\":30", "\"n\":0", "time_ms.n"},
        Bad{"\"n\":30", "\"n\":1.5", "time_ms.n"},
        Bad{"\"n\":30", "\"n\":99999999999999999999", "time_ms.n"},
        Bad{"\"min\":1,", "\"min\":1.3,", "time_ms"},
        Bad{"\"p95\":2.5", "\"p95\":1.2", "time_ms"},
        Bad{"\"value\":3e-07", "\"value\":-3e-07", "error.value"},
        Bad{"\"value\":3e-07", "\"value\":\"-Infinity\"", "error.value"},
        Bad{"\"zero_rows\":0.25", "\"zero_rows\":1.5", "zero_rows"},
        Bad{"\"floor_kind\":\"bandwidth\"", "\"floor_kind\":\"width\"", "floor_kind"},
        Bad{"\"status\":\"ok\"", "\"status\":\"fine\"", "status"},
        Bad{"\"status\":\"ok\"", "\"status\":null", "status"},
        Bad{"\"schema\":1", "\"schema\":2", "schema"},
        Bad{"\"B\":12", "\"B\":{\"a\":1}", "params.B"},
        Bad{"\"B\":12", "\"B\":18446744073709551615", "params.B"},
        Bad{"\"B\":12", "\"B\":[1,2.5]", "params.B"},
        Bad{"\"columns\":{", "\"columns\":{\"x\":\"y\",", "original.columns"}}) {
    const std::string message = refusal(replaced(b.from, b.to));
    EXPECT_NE(message.find(b.named), std::string::npos) << b.to << ": " << message;
  }
}

// What is refused before it is a record is in files/json_test.cpp; this is what JSON itself says.
TEST(Record, BrokenNumbersAndTextAreNoJson) {
  for (const std::string& line : {replaced("a CPU", "\xff\xfe"), replaced("1.25", "1e999"),
                                  replaced("1.25", "1e400"), std::string()}) {
    EXPECT_NE(refusal(line).find("JSON"), std::string::npos) << line;
  }
}

TEST(RecordFile, NamesFileAndLine) {
  const std::string good = to_json_line(full_record()) + "\n";
  EXPECT_EQ(file_refusal(good + good), "accepted");
  EXPECT_EQ(file_refusal(good + "\r\n" + good), "accepted");
  EXPECT_EQ(file_refusal(good + "{\n" + good).substr(0, 4), ":2: ");
  EXPECT_EQ(file_refusal(good + "[]\n").substr(0, 4), ":2: ");
  EXPECT_EQ(file_refusal(""), " holds no row");
  EXPECT_EQ(file_refusal(std::string(2 << 20, 'x')).substr(0, 4), ":1: ");
  EXPECT_THROW(read_records("/nonexistent/file.jsonl"), files::FileError);
  EXPECT_THROW(read_records("/dev/zero"), files::FileError);
}

TEST(RecordFile, ToleratesALastLineCutShortAndSaysSo) {
  const std::string good = to_json_line(full_record()) + "\n";
  for (std::size_t cut = 2; cut < good.size() - 1; cut += 7) {
    const TemporaryFile file(good + good.substr(0, cut));
    const RecordFile read = read_records(file.path());
    EXPECT_EQ(read.records.size(), 1u) << cut;
    ASSERT_EQ(read.warnings.size(), 1u) << cut;
    EXPECT_NE(read.warnings[0].find(":2: "), std::string::npos);
  }
  // Alone it is no results file; ended by a newline it is not cut short; garbage is not a
  // beginning.
  EXPECT_NE(file_refusal(good.substr(0, 50)), "accepted");
  EXPECT_NE(file_refusal(good + good.substr(0, 50) + "\n"), "accepted");
  EXPECT_NE(file_refusal(good + "garbage"), "accepted");
}

}  // namespace
}  // namespace annulus::bench
