#include "annulus/dist/callbacks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace annulus::dist {

namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Above what a program is likely to use beside us. Sizes are told apart up to 512 MiB; notices of another protocol, which may
// be longer, are not ours.
constexpr std::int32_t kDataTag = 1 << 30, kSizes = 1 << 29, kAckTag = kDataTag + kSizes + 1,
                       kNoticeTag = kAckTag + static_cast<std::int32_t>(kProtocol);
std::int32_t tag_of(std::size_t bytes) {
  return kDataTag + static_cast<std::int32_t>(bytes % static_cast<std::size_t>(kSizes));
}

// Notices that a rank may miss to hear: it hears only while it waits.
constexpr int kEars = 8;
constexpr double kPulse = 0.1;  // seconds

// How every message ends. What it counts lets the other end finish what it sent without waiting.
struct Tail {
  std::uint64_t acks =
      0;  // that came from the receiver so far; in an ack, messages that were taken
  std::uint32_t notices = 0;  // and notices
  std::uint32_t mark = 0;

  void seal() { mark = sum(); }
  bool sealed() const { return mark == sum(); }

 private:
  // The last byte is never 0, which is what waits for it there.
  std::uint32_t sum() const {
    const std::uint64_t mixed = (acks * 0x9E3779B185EBCA87 + notices + 1) * 0xC2B2AE3D27D4EB4F;
    return static_cast<std::uint32_t>(mixed >> 40) | 0xA5000000;
  }
};
static_assert(sizeof(Tail) == Message::kTail);

// The last byte of a receive that is under way, which another thread or a device may write.
void await(std::byte* end) { end[-1] = std::byte{0}; }
bool arrived(std::byte* end) {
  return std::atomic_ref<std::byte>(end[-1]).load(std::memory_order_acquire) != std::byte{0};
}

struct Flight {
  Message message;
  std::int64_t request = 0;

  std::byte* end() { return message.tail().data() + Message::kTail; }
  std::size_t size() const { return message.bytes().size() + Message::kTail; }
};

template <class Content>
struct Word {
  Content content;
  std::int64_t request = 0;

  std::byte* data() { return reinterpret_cast<std::byte*>(&content); }
  std::byte* end() { return data() + sizeof content; }
};
struct Said {
  Notice notice;
  Tail tail;
};
static_assert(sizeof(Said) == sizeof(Notice) + sizeof(Tail));

class CallbackLink final : public Link {
 public:
  explicit CallbackLink(LinkCallbacks& to)
      : call_(to), rank_(to.rank), size_(to.size), peers_(static_cast<std::size_t>(size_)) {
    for (int r = 0; r < size_; ++r) {
      for (int i = 0; i < kEars && r != rank_; ++i) listen(r);
    }
  }
  ~CallbackLink() override { call_.release(call_.self); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void send(int to, Message message) override {
    breathe();
    Peer& p = peer(to);
    // Before the message, whose receiver may answer and leave.
    Word<Tail>& ack = p.acks_due.emplace_back();
    await(ack.end());
    ack.request = receive(to, kAckTag, ack.data(), sizeof ack.content);
    Flight& flight = p.out.emplace_back();
    flight.message = std::move(message);
    const Tail tail = tail_to(p, p.delivered);
    std::memcpy(flight.message.tail().data(), &tail, sizeof tail);
    flight.request = begin(to, tag_of(flight.size()), flight.message.bytes().data(), flight.size());
  }
  std::uint64_t delivered(int to) override {
    Peer& p = peer(to);
    while (!p.acks_due.empty() && !p.out.empty() && arrived(p.acks_due.front().end())) {
      finish(to, p.acks_due.front().request);
      finish(to, p.out.front().request);
      const Tail tail = p.acks_due.front().content;
      p.acks_due.pop_front();
      p.out.pop_front();
      ++p.delivered;
      idle_ = 0;
      forget(to, tail, 0);
    }
    return p.delivered;
  }
  void expect(int from, std::size_t payload_bytes) override {
    breathe();
    Flight& flight = peer(from).in.emplace_back();
    flight.message = Message(payload_bytes, pool());
    await(flight.end());
    flight.request =
        receive(from, tag_of(flight.size()), flight.message.bytes().data(), flight.size());
  }
  std::optional<Message> take(int from) override {
    Peer& p = peer(from);
    if (p.in.empty() || !arrived(p.in.front().end())) return std::nullopt;
    finish(from, p.in.front().request);
    Message message = std::move(p.in.front().message);
    p.in.pop_front();
    idle_ = 0;
    Tail tail;
    std::memcpy(&tail, message.tail().data(), sizeof tail);
    forget(from, tail, tail.acks);
    Word<Tail>& ack = p.acks.emplace_back();
    ack.content = tail_to(p, ++p.taken);
    try {
      ack.request = begin(from, kAckTag, ack.data(), sizeof ack.content);
    } catch (const LinkError&) {  // it is gone, but its message is here
      p.acks.pop_back();
    }
    return message;
  }

  void notify(const Notice& notice) noexcept override {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      try {
        Peer& p = peer(r);
        Word<Said>& word = p.said.emplace_back();
        word.content.notice = notice;
        word.content.tail = tail_to(p, 0);
        try {
          word.request = begin(r, kNoticeTag, word.data(), sizeof word.content);
        } catch (const std::runtime_error&) {  // it is gone, or this rank is interrupted
          p.said.pop_back();
        }
      } catch (const std::exception&) {  // no memory: that rank finds out by its deadline
      }
    }
  }
  std::optional<Notice> heard() override {
    for (int r = 0; r < size_; ++r) {
      auto& ears = peer(r).ears;
      if (ears.empty() || !arrived(ears.front().end())) continue;
      try {
        finish(r, ears.front().request);
      } catch (const LinkError&) {  // its messages will say so, too
      }
      const Said said = ears.front().content;
      ears.pop_front();
      ++peer(r).heard;
      idle_ = 0;
      listen(r);
      if (said.tail.sealed()) return said.notice;
    }
    return std::nullopt;
  }

  // There is nothing to sleep on: a few rounds at full speed, then ever longer naps.
  void pause(double seconds) override {
    breathe();
    if (++idle_ < 16) return std::this_thread::yield();
    const double nap = std::min(1e-3, 1e-5 * static_cast<double>(idle_ - 15));
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, nap)));
  }

 private:
  struct Peer {  // elements stay where they are while others come and go at the ends
    std::deque<Flight> out, in;
    std::deque<Word<Tail>> acks_due, acks;  // of out; that were sent
    std::deque<Word<Said>> said, ears;
    std::uint64_t delivered = 0, taken = 0, acks_finished = 0;
    std::uint32_t heard = 0, said_finished = 0;
  };
  Peer& peer(int r) { return peers_[static_cast<std::size_t>(r)]; }
  static Tail tail_to(const Peer& p, std::uint64_t acks) {
    Tail tail{acks, p.heard};
    tail.seal();
    return tail;
  }

  void breathe() {
    if (since(pulse_) < kPulse) return;
    pulse_ = Clock::now();
    if (call_.pulse(call_.self) == 0) throw Interrupted("the call was interrupted");
  }
  std::int64_t checked(int peer, std::int64_t result) {
    if (result <= 0) {
      // Whoever interrupts this rank may do so in any callback, which is no fault of the peer's.
      if (call_.pulse(call_.self) == 0) throw Interrupted("the call was interrupted");
      call_.why[sizeof call_.why - 1] = '\0';
      throw LinkError(peer, call_.why);
    }
    return result;
  }
  std::int64_t begin(int to, std::int32_t tag, const void* data, std::size_t bytes) {
    return checked(to, call_.send(call_.self, to, tag, data, bytes));
  }
  std::int64_t receive(int from, std::int32_t tag, void* data, std::size_t bytes) {
    return checked(from, call_.receive(call_.self, from, tag, data, bytes));
  }
  void finish(int peer, std::int64_t request) { checked(peer, call_.finish(call_.self, request)); }

  void listen(int from) noexcept {
    auto& ears = peer(from).ears;
    try {
      Word<Said>& word = ears.emplace_back();
      await(word.end());
      try {
        word.request = receive(from, kNoticeTag, word.data(), sizeof word.content);
      } catch (const std::runtime_error&) {  // its messages will say so, too
        ears.pop_back();
      }
    } catch (const std::exception&) {  // no memory for an ear: deadlines remain
    }
  }
  // What the other end says it has: those requests are through.
  void forget(int from, const Tail& tail, std::uint64_t acks) {
    if (!tail.sealed()) throw LinkError(from, "the end of its message is damaged");
    Peer& p = peer(from);
    for (; p.acks_finished < acks && !p.acks.empty(); ++p.acks_finished) {
      finish(from, p.acks.front().request);
      p.acks.pop_front();
    }
    for (; p.said_finished < tail.notices && !p.said.empty(); ++p.said_finished) {
      finish(from, p.said.front().request);
      p.said.pop_front();
    }
  }

  LinkCallbacks& call_;
  int rank_, size_;
  std::vector<Peer> peers_;
  Clock::time_point pulse_ = Clock::now();
  int idle_ = 0;  // pauses since something came
};

}  // namespace

std::unique_ptr<Link> callback_link(LinkCallbacks& callbacks) {
  return std::make_unique<CallbackLink>(callbacks);
}

}  // namespace annulus::dist
