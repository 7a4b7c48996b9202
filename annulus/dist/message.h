// What travels between ranks: messages (a header and a payload), what ranks say of themselves before they send any
// (Hello), and what they say about each other (Notice). Plain bytes of one machine's order: a ring of machines that
// differ in it is refused by the magic number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "annulus/core/errors.h"

namespace annulus::dist {

constexpr std::uint32_t kMagic = 0x414e4c53;
constexpr std::uint32_t kProtocol = 2;  // of the layouts below and of who sends what when

// XXH64 with seed 0, as its specification has it. By hand: the library has no dependency for
// forty lines. Checkpoints of train/ have it, too.
std::uint64_t xxh64(std::span<const std::byte> bytes);

// Text in a field of N characters, cut where it is longer, but within no character of UTF-8: Python would not take it.
template <std::size_t N>
void put(char (&field)[N], std::string_view text) {
  std::size_t n = text.size() < N ? text.size() : N - 1;
  while (n > 0 && n < text.size() && (text[n] & '\xc0') == '\x80') --n;
  for (std::size_t i = 0; i < N; ++i) field[i] = i < n ? text[i] : '\0';
}
template <std::size_t N>
std::string_view text_of(const char (&field)[N]) {
  std::size_t n = 0;
  while (n < N && field[n] != '\0') ++n;
  return {field, n};
}

struct Header {
  std::uint32_t magic = kMagic;
  std::uint32_t protocol = kProtocol;
  char op[16] = {};
  std::int32_t hop = 0;
  std::int32_t part = 0;
  std::int32_t from = 0, to = 0;
  std::uint64_t sequence = 0;   // of messages from `from` to `to`
  std::uint64_t bytes = 0;      // of the payload
  std::uint64_t agreement = 0;  // digest of what was last agreed upon
  std::uint64_t has_sum = 0;
  std::uint64_t payload_sum = 0;
  std::uint64_t header_sum = 0;  // of all before it
};
static_assert(sizeof(Header) == 88);

// Memory of messages that are done with, for the next ones: fresh pages would cost as much as a copy, and MPI several.
class Pool {
 public:
  using Memory = std::unique_ptr<std::byte[]>;
  Memory take(std::size_t& bytes);  // uninitialised; bytes becomes what there is
  void give(Memory memory, std::size_t bytes) noexcept;

 private:
  static constexpr std::size_t kMost = 8;  // K and V, coming and going, of two hops
  std::mutex mutex_;                       // a message may end on the thread of another rank
  std::vector<std::pair<std::size_t, Memory>> free_;
};

struct ToPool {
  std::shared_ptr<Pool> pool;  // none: it is freed
  std::size_t bytes = 0;
  void operator()(std::byte* memory) const noexcept;
};

// A header and its payload in one piece of memory, which the message owns: what is in flight outlives the buffers of
// a caller that has given up.
class Message {
 public:
  Message() = default;
  explicit Message(std::size_t payload_bytes, std::shared_ptr<Pool> pool = {});  // uninitialised

  std::span<std::byte> bytes() { return {data_.get(), size_}; }
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }
  std::span<std::byte> payload() { return bytes().subspan(sizeof(Header)); }
  std::span<const std::byte> payload() const { return bytes().subspan(sizeof(Header)); }
  // Room behind the payload for a link's own word, which is no part of bytes().
  static constexpr std::size_t kTail = 16;
  std::span<std::byte> tail() { return {data_.get() + size_, kTail}; }
  Header header() const;
  void set_header(const Header& header);  // with its sum
  Message copy() const;

 private:
  std::unique_ptr<std::byte[], ToPool> data_;
  std::size_t size_ = 0;
};

Message make_message(Header header, std::span<const std::byte> payload, bool checksum,
                     std::shared_ptr<Pool> pool = {});

// Why `message` is not the one that `due` describes; empty where it is.
std::string why_not(const Message& message, const Header& due);

// --- before any data ---

struct Hello {
  std::uint32_t protocol = kProtocol;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::uint32_t checksum = 0;
  std::uint32_t refuses = 0;  // its own call: the text is why
  std::uint32_t unused = 0;
  double deadline_s = 0;
  std::uint64_t digest = 0;  // XXH64 of all of the text
  char version[24] = {};     // of the library
  char op[16] = {};
  char text[512] = {};  // as much as there is room for, to be read in an error
};
static_assert(sizeof(Hello) == 592);
constexpr std::string_view kHelloOp = "hello";
Hello hello(std::string_view op, std::string_view text, bool refuses);  // without rank and options

// What keeps these ranks from working together: the first that refuses its call where not all do, or a rank that differs
// from most, and how. All ranks see the same list and come to the same answer.
struct Disagreement {
  int rank;
  std::string what;
};
std::optional<Disagreement> compare(std::span<const Hello> hellos);

// --- beside the data ---

struct Notice {
  // In order of what they prove, where several come at once: kLost is the verdict of a rank, `by`.
  enum class Kind : std::int32_t { kWaiting, kBusy, kLeft, kLost };
  Kind kind = Kind::kBusy;
  std::int32_t by = 0;
  std::int32_t rank = 0;  // that is waited for, or lost
  std::int32_t hop = 0;
  std::int32_t direction = 0;  // RankLost::Direction
  std::int32_t proven = 0;     // not only that time was up
  std::uint64_t step =
      0;  // shifts that `by` had begun: comparable among ranks, who all make the same calls
  double waited_s = 0;
  char op[16] = {};
  char why[512] = {};
};

// Which of two verdicts all ranks adopt.
bool before(const Notice& a, const Notice& b);
RankLost error_of(const Notice& lost, int this_rank);

}  // namespace annulus::dist
