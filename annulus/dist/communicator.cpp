// The collectives, as shifts.
#include "annulus/dist/communicator.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace annulus {

Transfer::~Transfer() = default;
Communicator::~Communicator() = default;

void Communicator::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  const auto P = static_cast<std::size_t>(size()), r = static_cast<std::size_t>(rank());
  const std::size_t n = mine.size();
  if (all.size() != P * n) {
    throw InvalidArgument("[all_gather] all must have " + std::to_string(P * n) +
                          " bytes but has " + std::to_string(all.size()));
  }
  if (n > 0) std::memcpy(&all[r * n], mine.data(), n);
  const auto piece = [&](std::size_t owner) { return all.data() + owner % P * n; };
  for (std::size_t hop = 0; hop + 1 < P; ++hop) {
    const Part part{piece(r + P - hop), n, piece(r + P - hop - 1), n};
    shift({.op = "all_gather", .hop = static_cast<int>(hop)}, {&part, 1})->wait();
  }
}

namespace {

// Rank p adds up the p-th piece, of which it gets every rank's share directly, then all gather the pieces: twice
// (P-1)/P of the values travel from each rank, and the order of the sum is that of the ranks.
template <class T>
void reduce(Communicator& group, std::span<T> values) {
  const int P = group.size(), r = group.rank();
  if (P == 1) return;
  const std::size_t n = values.size(), parts = static_cast<std::size_t>(P);
  const auto piece = [&](int p) {
    const auto i = static_cast<std::size_t>((p % P + P) % P);
    return values.subspan(i * n / parts, (i + 1) * n / parts - i * n / parts);
  };
  const std::size_t own = piece(r).size();
  std::vector<T> shares(own * parts);
  const auto share = [&](int p) {
    return std::span<T>(shares).subspan(static_cast<std::size_t>((p + P) % P) * own, own);
  };
  std::copy(piece(r).begin(), piece(r).end(), share(r).begin());
  for (int d = 1; d < P; ++d) {
    const Part part{piece(r + d).data(), piece(r + d).size_bytes(), share(r - d).data(),
                    share(r - d).size_bytes()};
    group.shift({.op = "all_reduce", .hop = d - 1, .distance = d}, {&part, 1})->wait();
  }
  for (std::size_t i = 0; i < own; ++i) {
    T sum = shares[i];
    for (std::size_t p = 1; p < parts; ++p) sum += shares[p * own + i];
    piece(r)[i] = sum;
  }
  for (int hop = 0; hop + 1 < P; ++hop) {
    const Part part{piece(r - hop).data(), piece(r - hop).size_bytes(), piece(r - hop - 1).data(),
                    piece(r - hop - 1).size_bytes()};
    group.shift({.op = "all_reduce", .hop = P - 1 + hop}, {&part, 1})->wait();
  }
}

}  // namespace

void Communicator::all_reduce(std::span<float> values) { reduce(*this, values); }
void Communicator::all_reduce(std::span<double> values) { reduce(*this, values); }

// After the round of distance d every rank knows that the 2d - 1 before it have come.
void Communicator::barrier() {
  const Part nothing;
  int round = 0;
  for (int d = 1; d < size(); d *= 2) {
    shift({.op = "barrier", .hop = round++, .distance = d}, {&nothing, 1})->wait();
  }
}

}  // namespace annulus
