// What `annulus bench` prints: a Markdown table, CSV, or JSON with Google Benchmark's top level.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "bench/ceilings.h"
#include "bench/record.h"

namespace annulus::bench {

struct OutputContext {
  std::string hardware, device, version, commit, compiler, date;
  Ceilings ceilings;
};

// Rows appear as they are measured where the format allows it.
class Output {
 public:
  virtual ~Output() = default;
  virtual void begin(const OutputContext& context) = 0;
  virtual void rows(const std::vector<Record>& records) = 0;  // all implementations of one row
  virtual void end() {}
};

// format: md, csv or json.
std::unique_ptr<Output> make_output(const std::string& format, std::ostream& out);

}  // namespace annulus::bench
