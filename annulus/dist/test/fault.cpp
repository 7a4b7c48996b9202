#include "annulus/dist/test/fault.h"

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <thread>
#include <utility>

namespace annulus::dist::testing {

namespace {

constexpr std::pair<FaultKind, const char*> kNames[] = {
    {FaultKind::kNone, "none"},
    {FaultKind::kKill, "kill"},
    {FaultKind::kStop, "stop"},
    {FaultKind::kExit, "exit"},
    {FaultKind::kDelayHalf, "delay-half"},
    {FaultKind::kDelayTwice, "delay-twice"},
    {FaultKind::kNoMemory, "no-memory"},
    {FaultKind::kDrop, "drop"},
    {FaultKind::kDuplicate, "duplicate"},
    {FaultKind::kReorder, "reorder"},
    {FaultKind::kFlipPayload, "flip-payload"},
    {FaultKind::kFlipHeader, "flip-header"},
    {FaultKind::kWrongBytes, "wrong-bytes"},
    {FaultKind::kMute, "mute"},
    {FaultKind::kVersion, "version"},
    {FaultKind::kSize, "size"},
    {FaultKind::kSameRank, "same-rank"},
    {FaultKind::kShape, "shape"},
};

bool of_handshake(FaultKind kind) { return kind >= FaultKind::kVersion; }
bool of_message(FaultKind kind) { return kind >= FaultKind::kDrop && kind <= FaultKind::kMute; }

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

class FaultyLink final : public Link {
 public:
  FaultyLink(std::unique_ptr<Link> link, Fault fault)
      : link_(std::move(link)), fault_(std::move(fault)) {}

  int rank() const override { return link_->rank(); }
  int size() const override { return link_->size(); }
  void expect(int from, std::size_t bytes) override { link_->expect(from, bytes); }
  std::optional<Notice> heard() override { return link_->heard(); }
  void pause(double seconds) override { link_->pause(seconds); }
  void notify(const Notice& notice) noexcept override {
    if (!dead_) link_->notify(notice);
  }
  // A message that vanished on its way is off its sender's hands.
  std::uint64_t delivered(int to) override { return link_->delivered(to) + vanished_; }

  void send(int to, Message message) override {
    if (dead_) return;
    std::deque<Message> out = through(std::move(message), false, to);
    for (Message& m : out) link_->send(to, std::move(m));
  }
  std::optional<Message> take(int from) override {
    if (dead_) return std::nullopt;
    std::deque<Message>& arrived = arrived_[from];
    if (arrived.empty()) {
      std::optional<Message> message = link_->take(from);
      if (!message) return std::nullopt;
      arrived = through(std::move(*message), true, from);
      if (arrived.empty()) return std::nullopt;
    }
    Message first = std::move(arrived.front());
    arrived.pop_front();
    return first;
  }

 private:
  bool hits(const Header& h, bool receiving) const {
    return fault_.rank == rank() && fault_.receiving == receiving && text_of(h.op) == fault_.op &&
           h.hop == fault_.hop;
  }

  // What becomes of a message: nothing, itself, or several.
  std::deque<Message> through(Message message, bool receiving, int peer) {
    std::deque<Message> out;
    if (held_) {  // the one after the one held back
      if (receiving == fault_.receiving && peer == held_peer_) {
        out.push_back(std::move(message));
        out.push_back(std::move(*held_));
        held_.reset();
        return out;
      }
    } else if (muted_ && receiving == fault_.receiving && (!receiving || peer == held_peer_)) {
      vanish();
      return out;
    } else if (hits(message.header(), receiving) && (!fired_ || of_handshake(fault_.kind))) {
      fired_ = true;
      held_peer_ = peer;
      act_on(std::move(message), out);
      return out;
    }
    out.push_back(std::move(message));
    return out;
  }

  void vanish() {
    if (!fault_.receiving) ++vanished_;
  }

  void act_on(Message message, std::deque<Message>& out) {
    switch (fault_.kind) {
      case FaultKind::kKill:
        if (fault_.kill) fault_.kill();
        dead_ = true;
        throw Killed{};
      case FaultKind::kExit:
        if (fault_.exit) fault_.exit();
        throw Exited{};
      case FaultKind::kNoMemory:
        throw std::bad_alloc();
      case FaultKind::kStop:
        fault_.stop ? fault_.stop() : sleep_for(3 * fault_.deadline_s);
        break;
      case FaultKind::kDelayHalf:
        sleep_for(0.5 * fault_.deadline_s);
        break;
      case FaultKind::kDelayTwice:
        sleep_for(2 * fault_.deadline_s);
        break;
      case FaultKind::kDrop:
        return vanish();
      case FaultKind::kMute:
        muted_ = true;
        return vanish();
      case FaultKind::kReorder:
        held_ = std::move(message);
        return;
      case FaultKind::kDuplicate:
        out.push_back(message.copy());
        break;
      case FaultKind::kFlipPayload:
        flip(message.payload());
        break;
      case FaultKind::kFlipHeader:
        flip(message.bytes().first(sizeof(Header)));
        break;
      case FaultKind::kWrongBytes: {
        Header header = message.header();
        const auto payload = message.payload();
        message = make_message(header, payload.first(payload.size() - 8), header.has_sum != 0);
        break;
      }
      case FaultKind::kVersion:
        say_otherwise(message, [](Hello& h) { put(h.version, "0.0.0"); });
        break;
      case FaultKind::kSize:
        say_otherwise(message, [](Hello& h) { ++h.size; });
        break;
      case FaultKind::kSameRank:
        say_otherwise(message, [](Hello& h) { h.rank = (h.rank + 1) % h.size; });
        break;
      case FaultKind::kShape:
        say_otherwise(message, [](Hello& h) { put(h.text, "another shape"), ++h.digest; });
        break;
      case FaultKind::kNone:
        break;
    }
    out.push_back(std::move(message));
  }

  // One bit, somewhere that depends on the hop.
  void flip(std::span<std::byte> bytes) {
    const std::size_t at = (static_cast<std::size_t>(fault_.hop) * 37 + 11) % bytes.size();
    bytes[at] ^= std::byte{1} << (fault_.hop + 8) % 8;
  }

  template <class F>
  void say_otherwise(Message& message, F&& change) {
    Hello hello;
    std::memcpy(&hello, message.payload().data(), sizeof hello);
    change(hello);
    const Header header = message.header();
    message = make_message(header, std::as_bytes(std::span(&hello, 1)), header.has_sum != 0);
  }

  std::unique_ptr<Link> link_;
  Fault fault_;
  bool fired_ = false, dead_ = false, muted_ = false;
  std::optional<Message> held_;
  int held_peer_ = 0;
  std::map<int, std::deque<Message>> arrived_;  // by sender
  std::uint64_t vanished_ = 0;
};

}  // namespace

const char* name_of(FaultKind kind) {
  for (const auto& [k, name] : kNames) {
    if (k == kind) return name;
  }
  return "?";
}

bool find_fault(const std::string& name, FaultKind& kind) {
  for (const auto& [k, n] : kNames) {
    if (name == n) {
      kind = k;
      return true;
    }
  }
  return false;
}

std::string Fault::text() const {
  return std::string(name_of(kind)) + " at rank " + std::to_string(rank) + ", " + op + " hop " +
         std::to_string(hop) + (receiving ? ", receiving" : ", sending");
}

int Fault::lost(int size) const {
  return receiving && of_message(kind) ? ((rank - distance) % size + size) % size : rank;
}

std::unique_ptr<Link> with_fault(std::unique_ptr<Link> link, Fault fault) {
  return std::make_unique<FaultyLink>(std::move(link), std::move(fault));
}

std::vector<Fault> every_fault(int size, const std::vector<Stage>& stages, double deadline_s) {
  std::vector<Fault> faults;
  int n = 0;
  const auto add = [&](FaultKind kind, const std::string& op, int hop, bool receiving,
                       int distance = 1) {
    faults.push_back({.kind = kind,
                      .rank = n++ % size,
                      .op = op,
                      .hop = hop,
                      .receiving = receiving,
                      .distance = distance,
                      .deadline_s = deadline_s,
                      .kill = {},
                      .stop = {},
                      .exit = {}});
  };
  for (const Stage& stage : stages) {
    for (int hop = stage.first; hop < stage.first + stage.hops; ++hop) {
      for (const auto& [kind, name] : kNames) {
        if (kind == FaultKind::kNone || of_handshake(kind)) continue;
        add(kind, stage.op, hop, (n / size + hop) % 2 == 1, stage.distance(hop));
      }
    }
  }
  for (const auto& [kind, name] : kNames) {
    const bool here = of_handshake(kind) || kind == FaultKind::kKill || kind == FaultKind::kExit ||
                      kind == FaultKind::kDelayTwice || kind == FaultKind::kNone;
    // Of two ranks that differ rank 0 is taken to be right.
    if (here && n % size == 0 && size == 2) ++n;
    if (here) add(kind, std::string(kHelloOp), -1, false);
  }
  return faults;
}

}  // namespace annulus::dist::testing
