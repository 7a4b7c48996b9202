// The limits are what reliability promises, and nothing but the source can change them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "testing/limits.h"

namespace annulus::testing {
namespace {

// Evaluated by the compiler: what is a constant here cannot depend on the environment it runs in.
static_assert(kPolicy.ratio_forward == 2 && kPolicy.ratio_backward == 3 && kPolicy.slack_ulps == 2);
static_assert(kPolicy.baseline_draws == 8);
static_assert(guard_of(DType::kF64) == 1e-12 && guard_of(DType::kF32) == 1e-6);
static_assert(guard_of(DType::kF16) == 2e-3 && guard_of(DType::kBF16) == 1e-2);
static_assert(kPolicy.guard_backward_factor == 2);
static_assert(kPolicy.mistrusted_share == 0.9 && kPolicy.mistrusted_cases == 0.01);
static_assert(kPolicy.finite_difference == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kAuto) == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kFp32) == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kBf16x6) == 1e-6);
static_assert(guard_of(DType::kF32, Precision::kF16) == 2e-3);
static_assert(guard_of(DType::kF32, Precision::kBf16) == 1e-2);
static_assert(guard_of(DType::kF16, Precision::kBf16) == 1e-2);
static_assert(guard_of(DType::kBF16, Precision::kBf16) == 1e-2);
static_assert(guard_of(DType::kF32, Precision::kTf32) == 2e-3);
static_assert(guard_of(DType::kF32, Precision::kBf16x3) == 1e-5);
static_assert(guard_of(DType::kF16, Precision::kBf16x3) == 2e-3);

// The only variable the tests read is how many cases to fuzz, and only operators_test.cpp reads it; the
// library reads whether to say what runs, which changes nothing else.
TEST(Limits, NoOtherEnvironmentVariableIsRead) {
  namespace fs = std::filesystem;
  const fs::path here = fs::path(__FILE__).parent_path();
  const std::string call = std::string("get") + "env";
  int files = 0;
  const fs::path library = here.parent_path() / "annulus";
  if (!fs::exists(library)) GTEST_SKIP() << "the sources are not where they were compiled";
  std::vector<fs::path> roots = {here};
  for (const fs::directory_entry& entry : fs::directory_iterator(library)) {
    if (entry.is_directory()) roots.push_back(entry.path());
  }
  for (const fs::path& root : roots) {
    for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".cpp" && extension != ".h" && extension != ".cu" && extension != ".cuh") {
        continue;
      }
      ++files;
      std::ifstream in(entry.path());
      std::stringstream text;
      text << in.rdbuf();
      const std::string content = text.str();
      std::size_t count = 0;
      for (std::size_t at = content.find(call); at != std::string::npos;
           at = content.find(call, at + 1)) {
        ++count;
        const std::string file = entry.path().filename().string();
        EXPECT_TRUE(file == "operators_test.cpp" || file == "context.cpp") << entry.path();
        const std::string variable = file == "context.cpp" ? "ANNULUS_LOG" : "ANNULUS_FUZZ_CASES";
        const std::string whole = call + "(\"" + variable + "\")";
        EXPECT_EQ(content.substr(at, whole.size()), whole);
      }
      EXPECT_LE(count, 1u) << entry.path();
    }
  }
  EXPECT_GT(files, 10);
}

TEST(Limits, Ulps) {
  EXPECT_EQ(ulp_at(1.0, DType::kBF16), 0x1p-7);
  EXPECT_EQ(ulp_at(-1.99, DType::kBF16), 0x1p-7);
  EXPECT_EQ(ulp_at(2.0, DType::kBF16), 0x1p-6);
  EXPECT_EQ(ulp_at(1.0, DType::kF32), 0x1p-23);
  EXPECT_EQ(ulp_at(1.0, DType::kF64), 0x1p-52);
  EXPECT_EQ(ulp_at(0.0, DType::kF16), 0x1p-24);  // the floor: spacing of the subnormals
  EXPECT_EQ(ulp_at(1e-9, DType::kF16), 0x1p-24);
  EXPECT_EQ(ulp_at(65504.0, DType::kF16), 32.0);
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kFp32), 0x1p-23);
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kBf16), 0x1p-7);
  EXPECT_EQ(ulp_at(1.5, DType::kBF16, Precision::kBf16x3), 0x1p-7);
  EXPECT_EQ(ulp_at(1e-39, DType::kF32, Precision::kFp32), 0x1p-149);
  EXPECT_EQ(ulp_at(1e-39, DType::kF32, Precision::kBf16x6), 0x1p-133);  // bf16's least number
  EXPECT_EQ(ulp_at(1e-30, DType::kF32, Precision::kBf16x6), ulp_at(1e-30, DType::kF32));
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kBf16x3), 0x1p-15);
  EXPECT_EQ(ulp_at(1.5, DType::kF32, Precision::kTf32), 0x1p-10);
  EXPECT_EQ(ulp_at(0.0, DType::kF32, Precision::kBf16), 0x1p-149);
}

}  // namespace
}  // namespace annulus::testing
