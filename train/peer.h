// Another model on the same task, measured elsewhere: a JSON file with one object or a list of at
// most 16 (README.md has the format). Unknown keys, wrong types and numbers out of range are refused
// with InvalidArgument that names the file and the key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/evaluate.h"

namespace annulus::train {

struct Peer : ErrorFigures {
  std::string name;
  std::int64_t parameters = 0;  // 0: not said
  std::int64_t steps = 0;       // of training; 0: not said
  double seconds = 0;           // of training; 0: not said
  std::string note;             // may be empty
};

std::vector<Peer> read_peers(const std::string& path);  // what is no file: files::FileError
std::vector<Peer> parse_peers(std::string_view json);

}  // namespace annulus::train
