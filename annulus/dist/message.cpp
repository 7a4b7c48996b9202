#include "annulus/dist/message.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <utility>

#include "annulus/core/info.h"

namespace annulus::dist {

namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                        kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                        kPrime5 = 0x27D4EB2F165667C5;

template <class T>
T read(const std::byte* at) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::uint64_t round_of(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::byte> bytes) {
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t hash = kPrime5;
  if (left >= 32) {
    std::uint64_t lanes[4] = {kPrime1 + kPrime2, kPrime2, 0, std::uint64_t{0} - kPrime1};
    for (; left >= 32; left -= 32) {
      for (std::uint64_t& lane : lanes) {
        lane = round_of(lane, read<std::uint64_t>(at));
        at += 8;
      }
    }
    hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
           std::rotl(lanes[3], 18);
    for (const std::uint64_t lane : lanes) hash = (hash ^ round_of(0, lane)) * kPrime1 + kPrime4;
  }
  hash += bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    hash = std::rotl(hash ^ round_of(0, read<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ read<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    left -= 4, at += 4;
  }
  for (; left > 0; --left, ++at) {
    hash = std::rotl(hash ^ std::to_integer<std::uint64_t>(*at) * kPrime5, 11) * kPrime1;
  }
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

// --- messages ---

Pool::Memory Pool::take(std::size_t& bytes) {
  {
    const std::lock_guard lock(mutex_);
    for (auto& [there, memory] : free_) {
      if (there < bytes || there > bytes + bytes / 4) continue;  // large enough, and little wasted
      bytes = there;
      Memory taken = std::move(memory);
      std::swap(there, free_.back().first);
      std::swap(memory, free_.back().second);
      free_.pop_back();
      return taken;
    }
  }
  return std::make_unique_for_overwrite<std::byte[]>(bytes);
}

void Pool::give(Memory memory, std::size_t bytes) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (free_.size() == kMost) free_.erase(free_.begin());  // shapes have changed: the oldest goes
    free_.emplace_back(bytes, std::move(memory));
  } catch (const std::exception&) {  // no room in the list: it is freed
  }
}

void ToPool::operator()(std::byte* memory) const noexcept {
  Pool::Memory owned(memory);
  if (pool) pool->give(std::move(owned), bytes);
}

Message::Message(std::size_t payload_bytes, std::shared_ptr<Pool> pool)
    : size_(sizeof(Header) + payload_bytes) {
  // Small ones come as fast from the allocator.
  constexpr std::size_t kSmall = 1 << 15;
  if (size_ < kSmall) pool.reset();
  std::size_t bytes = size_ + kTail;
  Pool::Memory memory =
      pool ? pool->take(bytes) : std::make_unique_for_overwrite<std::byte[]>(bytes);
  data_ = std::unique_ptr<std::byte[], ToPool>(memory.release(), ToPool{std::move(pool), bytes});
}

Header Message::header() const {
  Header header;
  std::memcpy(&header, data_.get(), sizeof header);
  return header;
}

void Message::set_header(const Header& header) {
  std::memcpy(data_.get(), &header, sizeof header);
  const std::uint64_t sum = xxh64(bytes().first(offsetof(Header, header_sum)));
  std::memcpy(data_.get() + offsetof(Header, header_sum), &sum, sizeof sum);
}

Message Message::copy() const {
  Message other(payload().size());
  std::memcpy(other.data_.get(), data_.get(), size_);
  return other;
}

Message make_message(Header header, std::span<const std::byte> payload, bool checksum,
                     std::shared_ptr<Pool> pool) {
  Message message(payload.size(), std::move(pool));
  // The sum is of the copy: what was sent is what was summed, whatever its owner does meanwhile.
  if (!payload.empty()) std::memcpy(message.payload().data(), payload.data(), payload.size());
  header.bytes = payload.size();
  header.has_sum = checksum ? 1 : 0;
  header.payload_sum = checksum ? xxh64(message.payload()) : 0;
  message.set_header(header);
  return message;
}

std::string why_not(const Message& message, const Header& due) {
  const auto differs = [](const char* what, auto came, auto expected) {
    return std::string("its message has ") + what + " " + std::to_string(came) + " where " +
           std::to_string(expected) + " was due";
  };
  if (message.bytes().size() < sizeof(Header)) return "its message is shorter than a header";
  const Header h = message.header();
  if (h.magic != kMagic) return "its message does not begin with the magic number";
  if (h.header_sum != xxh64(message.bytes().first(offsetof(Header, header_sum)))) {
    return "the header of its message is damaged (checksum)";
  }
  // What a rank of another protocol says of itself in the handshake is read where it is as long as ours.
  if (h.protocol != kProtocol && text_of(h.op) != kHelloOp) {
    return differs("protocol", h.protocol, kProtocol);
  }
  if (h.from != due.from) return differs("sender", h.from, due.from);
  if (h.to != due.to) return differs("receiver", h.to, due.to);
  if (h.sequence != due.sequence) {
    return differs("sequence number", h.sequence, due.sequence) +
           (h.sequence > due.sequence ? ": one is missing, or comes late"
                                      : ": it came before, or late");
  }
  if (text_of(h.op) != text_of(due.op)) {
    return "its message is of '" + std::string(text_of(h.op)) + "', this rank is in '" +
           std::string(text_of(due.op)) + "'";
  }
  if (h.hop != due.hop) return differs("hop", h.hop, due.hop);
  if (h.part != due.part) return differs("part", h.part, due.part);
  if (h.agreement != due.agreement) {
    return "its message follows another agreement (shapes, options)";
  }
  if (h.bytes != due.bytes) return differs("bytes", h.bytes, due.bytes);
  if (message.payload().size() != h.bytes) {
    return differs("a payload of bytes", message.payload().size(), h.bytes);
  }
  if (h.has_sum != due.has_sum) return differs("checksums", h.has_sum, due.has_sum);
  if (h.has_sum != 0 && h.payload_sum != xxh64(message.payload())) {
    return "the payload of its message is damaged (checksum)";
  }
  return "";
}

// --- before any data ---

Hello hello(std::string_view op, std::string_view text, bool refuses) {
  Hello h;
  h.refuses = refuses ? 1 : 0;
  // What follows goes by the digest, which is the same where all refuse for reasons of their own.
  h.digest = refuses ? 0 : xxh64(std::as_bytes(std::span(text)));
  put(h.version, build_info().version);
  put(h.op, op);
  put(h.text, text);
  return h;
}

// The clause in which `text` first differs from `other`, nothing where it has one less; texts are clauses between ", ".
static std::string clause_of(std::string text, std::string other) {
  text += ", ";
  other += ", ";
  const auto differ = std::ranges::mismatch(text, other).in1 - text.begin();
  const std::size_t comma = text.substr(0, static_cast<std::size_t>(differ)).rfind(", ");
  const std::size_t first = comma == std::string::npos ? 0 : comma + 2;
  return text.substr(first, text.find(", ", first) - first);
}

std::optional<Disagreement> compare(std::span<const Hello> hellos) {
  for (std::size_t i = 0; i < hellos.size(); ++i) {
    if (hellos[i].rank != static_cast<std::int32_t>(i)) {
      return Disagreement{static_cast<int>(i),
                          "says that it is rank " + std::to_string(hellos[i].rank)};
    }
  }
  std::optional<Disagreement> found;
  std::string most;
  // `of` gives a field as text. The first rank that has not what most have; of two halves that of rank 0 counts.
  const auto same = [&](const char* name, auto of) {
    if (found) return false;
    const auto count = [&](const std::string& value) {
      return std::count_if(hellos.begin(), hellos.end(),
                           [&](const Hello& h) { return of(h) == value; });
    };
    most.clear();
    std::ptrdiff_t votes = 0;
    for (const Hello& h : hellos) {
      const std::string value = of(h);
      if (count(value) > votes) most = value, votes = count(value);
    }
    for (const Hello& h : hellos) {
      if (of(h) == most) continue;
      found = {h.rank, std::string("has ") + name + " " + of(h) + ", most have " + most};
      return true;
    }
    return false;
  };
  const auto refuses = [](const Hello& h) { return h.refuses != 0; };
  same("protocol", [](const Hello& h) { return std::to_string(h.protocol); });
  same("library version", [](const Hello& h) { return std::string(text_of(h.version)); });
  same("P", [](const Hello& h) { return std::to_string(h.size); });
  if (found || std::ranges::all_of(hellos, refuses)) return found;
  if (const auto first = std::ranges::find_if(hellos, refuses); first != hellos.end()) {
    return Disagreement{first->rank, "refuses its own call: " + std::string(text_of(first->text))};
  }
  same("checksums", [](const Hello& h) { return std::string(h.checksum != 0 ? "on" : "off"); });
  // Ranks that meet before any call may still have to hear that one of them has no good deadline.
  const auto nameless = [](const Hello& h) { return text_of(h.op).empty(); };
  if (!std::ranges::all_of(hellos, nameless)) {
    same("deadline_s", [](const Hello& h) { return number(h.deadline_s); });
  }
  same("operator", [](const Hello& h) { return "'" + std::string(text_of(h.op)) + "'"; });
  // Only what differs of two calls: all of them may be long.
  if (same("call", [](const Hello& h) { return std::string(text_of(h.text)); })) {
    const std::string other(text_of(hellos[static_cast<std::size_t>(found->rank)].text));
    found->what =
        "has call '" + clause_of(other, most) + "', most have '" + clause_of(most, other) + "'";
  }
  if (same("digest", [](const Hello& h) { return std::to_string(h.digest); })) {
    found->what = "has a call that differs from most after its first " +
                  std::to_string(sizeof(Hello::text) - 1) + " characters";
  }
  return found;
}

// --- beside the data ---

// The earliest step is nearest to the cause; there a proof before a deadline that passed.
bool before(const Notice& a, const Notice& b) {
  const auto key = [](const Notice& n) {
    return std::make_tuple(n.step, -n.proven, n.rank, n.direction, n.by);
  };
  return key(a) < key(b);
}

RankLost error_of(const Notice& lost, int this_rank) {
  const auto direction =
      lost.direction == 0 ? RankLost::Direction::kSend : RankLost::Direction::kReceive;
  const std::string_view op = text_of(lost.op);
  std::string message = "[" + std::string(op.empty() ? "communicator" : op) + "] " +
                        (lost.rank < 0 ? "a rank" : "rank " + std::to_string(lost.rank)) +
                        (lost.rank == this_rank ? " (this rank) is lost" : " is lost") +
                        (lost.hop < 0 ? " before any data" : " at hop " + std::to_string(lost.hop));
  message += ": " + std::string(text_of(lost.why)) + " (found by rank " + std::to_string(lost.by) +
             (direction == RankLost::Direction::kSend ? ", sending" : ", receiving") +
             ", after a wait of " + number(lost.waited_s) + " s)";
  return RankLost(message, lost.rank, lost.hop, direction, lost.waited_s);
}

}  // namespace annulus::dist
