// A suite is one table: its rows are problems of the operators' Cases, each with the value that the
// table which started it (the original) states. Suites register themselves; no list of them exists.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "annulus/core/device.h"
#include "annulus/core/dtype.h"
#include "annulus/dist/communicator.h"
#include "bench/ceilings.h"
#include "bench/record.h"
#include "testing/case.h"

namespace annulus::bench {

class Problem;

enum class Size { kQuick, kMachine, kFull };

// One row: which problem, which of its calls, what to compare with.
struct Row {
  // Unique in the suite together with the dtype and `impl`, and the same on every machine.
  std::string name;
  std::string op;
  // "annulus" is what a user gets who sets nothing; "annulus-tf32" is the same problem solved with
  // an option, which stands beside it.
  std::string impl = "annulus";
  DType dtype = DType::kF32;
  Params params;
  Work work;  // the floor: which multiply units, how many steps
  // Flops that the program makes of the needed ones, where it is known; else `work.passes` times as many.
  std::optional<double> flops_executed;
  std::function<testing::Case()> problem;  // one that throws NotSupported is skipped with its words
  // The same problem with fewer batch elements and heads, small enough for the fp64 reference. It
  // keeps length, positions, width and dtype, so it meets the same arithmetic.
  std::function<testing::Case()> error_problem;
  // Rows in a row that have the same text here (not empty) have the same error problem but for how
  // it is solved, so the reference is computed once.
  std::string same_expected;
  // What the timed problem itself shows after it ran, for the record's params; may be empty.
  std::function<Params(const Problem&)> observe;
  std::vector<std::string> calls;  // timed together: {"forward"}, {"backward"} or both
  bool with_move = true;           // a `move` row beside it
  std::optional<OriginalFigure> original;
  // Where the original also states the memory of this row: a second record, named so, of the same run.
  std::string memory_name;
  std::vector<std::string>
      memory_calls;  // whose tensors are all alive at once in the original's figure
  std::optional<OriginalFigure> memory_original;
};

struct SuiteRequest {
  Size size = Size::kQuick;
  DeviceType device = DeviceType::kCPU;
  std::size_t memory_bytes = 0;  // what a row of size `machine` may use
  // Processes under mpirun, of which this is one. Rows that run over all of them say so by params["transport"]; others are left out.
  Communicator* group = nullptr;
};

// What an implementation of a suite computes, in a sentence for the report: ours with an option, and the
// peers that `python -m annulus.peers` times (python/annulus/peers/<op>.py).
struct ImplementationWords {
  std::string impl, about;
};

struct Suite {
  std::string name;     // "lrpe-cosine"
  std::string summary;  // one line
  std::function<std::vector<Row>(const SuiteRequest&)> rows;
  std::vector<ImplementationWords> implementations = {};  // beyond annulus, annulus-torch and move
};

const std::vector<Suite>& all_suites();  // sorted by name

// Suite -> implementation -> what it computes; those that every suite has included.
std::map<std::string, std::map<std::string, std::string>> implementation_words();

class SuiteRegistration {
 public:
  explicit SuiteRegistration(Suite suite);
};

// Inputs, outputs and scratch of the row's calls; tensors of the same name are shared between
// calls.
std::size_t peak_bytes_of(const testing::Case& problem, const std::vector<std::string>& calls,
                          Device device);

}  // namespace annulus::bench
