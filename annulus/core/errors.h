// The four exceptions of the library. Each message names operator, argument, rule and what came:
//   [ring_rnn] Wa must have shape (16, 128, 128) but has (16, 128, 64)
// They are thrown at the API boundary, before any output is written, so after InvalidArgument or
// NotSupported every output still holds what it held, and the next call works.
#pragma once

#include <stdexcept>
#include <string>

#include "annulus/core/macros.h"

namespace annulus {

class ANNULUS_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The call breaks a rule of the operator's header.
class ANNULUS_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

// The call is right, but this build or this machine cannot run it; the message says what is
// missing.
class ANNULUS_API NotSupported : public Error {
 public:
  using Error::Error;
};

// The device failed: out of memory, a launch error, a lost GPU.
class ANNULUS_API DeviceError : public Error {
 public:
  using Error::Error;
};

// A peer of a distributed call did not answer within its deadline. Later calls on the same
// communicator throw it again.
class ANNULUS_API RankLost : public Error {
 public:
  enum class Direction { kSend, kReceive };

  RankLost(const std::string& message, int lost, int at_hop, Direction which, double seconds)
      : Error(message), rank(lost), hop(at_hop), direction(which), waited_s(seconds) {}

  int rank;
  int hop;
  Direction direction;
  double waited_s;
};

}  // namespace annulus
