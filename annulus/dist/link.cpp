// A Communicator over any link: the handshake, what message is due next, the deadline, and who is to blame when it
// passes. A rank that has waited for a while tells the others for whom and at which step. One whose deadline passes
// follows these: the rank that is waited for and does not wait itself is lost. Where they close a circle a message
// vanished, and the wait at the earliest step is nearest to it. The verdict goes to all; each rank that hears one
// passes it on, listens a moment longer for others, and takes the first of them (before()), so that all take the same.
#include "annulus/dist/link.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <utility>

#include "annulus/core/info.h"

namespace annulus::dist {

namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

constexpr int kSend = 0, kReceive = 1;  // Notice::direction
constexpr double kGrace = 0.1;  // for what a rank sent before it said that it leaves, in seconds

// A shift under way. Its transfer and the messages it is due share it.
struct Pending {
  std::uint64_t step = 0;
  Header header;  // op and hop
  int to = 0, from = 0;
  int missing = 0;            // parts to receive
  std::uint64_t sent_to = 0;  // messages to `to`, this shift's included
  bool given_up = false;
};

struct Due {
  Header header;
  std::byte* into;
  std::shared_ptr<Pending> of;
};

class LinkCommunicator final : public Communicator {
 public:
  LinkCommunicator(std::unique_ptr<Link> link, const CommunicatorOptions& options)
      : link_(std::move(link)), options_(options), peers_(index(link_->size())) {
    check_deadline(options.deadline_s);
  }
  ~LinkCommunicator() override {
    if (!closed_) link_->notify(notice(Notice::Kind::kLeft, rank(), kSend, "it has left"));
  }

  int rank() const override { return link_->rank(); }
  int size() const override { return link_->size(); }
  double deadline_s() const override { return options_.deadline_s; }
  void set_deadline_s(double seconds) override {
    check_deadline(seconds);
    options_.deadline_s = seconds;
  }
  Traffic traffic() const override { return traffic_; }

  void agree(std::string_view op, std::string_view what) override { meet(op, what, false); }
  void refuse(std::string_view op, std::string_view why) override { meet(op, why, true); }
  std::unique_ptr<Transfer> shift(const Hop& hop, std::span<const Part> parts) override;
  void abandon(const std::string& why) noexcept override;
  void wait(Pending& pending, bool received_is_enough = false);

 private:
  struct Peer {
    std::uint64_t sent = 0;   // messages
    std::uint64_t asked = 0;  // messages from it that were due so far
    std::deque<Due> due;
    std::optional<Notice> waiting;
    std::optional<Clock::time_point> left;
    std::string why_left;
  };
  Peer& peer(int r) { return peers_[index(r)]; }

  void check_open() const;
  void meet(std::string_view op, std::string_view text, bool refuses);
  std::shared_ptr<Pending> begin(const Hop& hop, std::span<const Part> parts, bool data);
  Notice notice(Notice::Kind kind, int about, int direction, const std::string& why);
  Notice notice_of(const Pending& p, int about, int direction, double waited,
                   const std::string& why);
  void tell(const Notice& notice) noexcept;
  void receive(double waited);
  bool sent(const Pending& p, double waited);
  void listen();
  Notice blame(const Notice& mine);
  [[noreturn]] void lose(Notice verdict);

  std::unique_ptr<Link> link_;
  CommunicatorOptions options_;
  std::vector<Peer> peers_;
  Traffic traffic_;
  bool met_ = false;
  std::uint64_t step_ = 0;       // shifts begun
  std::uint64_t agreement_ = 0;  // digest
  Header last_;                  // op and hop of the last shift begun
  std::optional<RankLost> closed_;
  bool gave_up_ = false;
};

class LinkTransfer final : public Transfer {
 public:
  LinkTransfer(LinkCommunicator& owner, std::shared_ptr<Pending> pending)
      : owner_(owner), pending_(std::move(pending)) {}
  ~LinkTransfer() override { pending_->given_up = true; }
  void receive() override { owner_.wait(*pending_, true); }
  void wait() override { owner_.wait(*pending_); }

 private:
  LinkCommunicator& owner_;
  std::shared_ptr<Pending> pending_;
};

void LinkCommunicator::check_open() const {
  if (closed_) {
    throw RankLost("the communicator is closed: " + std::string(closed_->what()), closed_->rank,
                   closed_->hop, closed_->direction, closed_->waited_s);
  }
  if (gave_up_)
    throw RankLost("the communicator is closed: it gave up", rank(), -1, RankLost::Direction::kSend,
                   0);
}

Notice LinkCommunicator::notice(Notice::Kind kind, int about, int direction,
                                const std::string& why) {
  Notice n;
  n.kind = kind;
  n.by = rank();
  n.rank = about;
  n.hop = last_.hop;
  n.direction = direction;
  n.step = step_;
  put(n.op, text_of(last_.op));
  put(n.why, why);
  return n;
}

Notice LinkCommunicator::notice_of(const Pending& p, int about, int direction, double waited,
                                   const std::string& why) {
  Notice n = notice(Notice::Kind::kLost, about, direction, why);
  n.hop = p.header.hop;
  n.step = p.step;
  n.waited_s = waited;
  put(n.op, text_of(p.header.op));
  return n;
}

void LinkCommunicator::tell(const Notice& notice) noexcept {
  link_->notify(notice);
  traffic_.overhead_bytes += sizeof notice * index(size() - 1);
}

// --- what a caller sees ---

void LinkCommunicator::meet(std::string_view op, std::string_view text, bool refuses) {
  check_open();
  met_ = true;
  std::vector<Hello> hellos(index(size()));
  Hello& mine = hellos[index(rank())] = hello(op, text, refuses);
  mine.rank = rank();
  mine.size = size();
  mine.checksum = options_.checksum ? 1 : 0;
  mine.deadline_s = options_.deadline_s;
  std::vector<std::shared_ptr<Pending>> all;
  all.reserve(index(size()));
  try {
    for (int d = 1; d < size(); ++d) {
      const Part part{&mine, sizeof mine, &hellos[index((rank() + size() - d) % size())],
                      sizeof mine};
      all.push_back(begin({.op = kHelloOp, .hop = -1, .distance = d}, {&part, 1}, false));
    }
    for (const auto& pending : all) wait(*pending);
  } catch (...) {
    for (const auto& pending : all) pending->given_up = true;  // their buffers end here
    throw;
  }
  if (const auto found = compare(hellos)) {
    put(last_.op, op);
    Notice lost = notice(Notice::Kind::kLost, found->rank, kReceive, found->what);
    lost.proven = 1;
    lose(lost);
  }
  agreement_ = mine.digest;
}

std::unique_ptr<Transfer> LinkCommunicator::shift(const Hop& hop, std::span<const Part> parts) {
  check_open();
  if (!met_) agree("", "");
  return std::make_unique<LinkTransfer>(*this, begin(hop, parts, true));
}

void LinkCommunicator::abandon(const std::string& why) noexcept {
  if (closed_) return;
  gave_up_ = true;  // whatever memory there is for the rest
  try {
    Notice lost = notice(Notice::Kind::kLost, rank(), kSend, "it gave up: " + why);
    lost.proven = 1;
    tell(lost);
    closed_.emplace(error_of(lost, rank()));
  } catch (const std::exception&) {  // no memory even for that: the others have their deadline
  }
}

// --- messages ---

std::shared_ptr<Pending> LinkCommunicator::begin(const Hop& hop, std::span<const Part> parts,
                                                 bool data) {
  const int P = size();
  auto pending = std::make_shared<Pending>();
  pending->step = ++step_;
  put(pending->header.op, hop.op);
  pending->header.hop = hop.hop;
  const auto peer_of = [&](int named, int distance) {
    if (named != Hop::kByDistance && named != Hop::kNobody &&
        (named < 0 || named >= P || named == rank())) {
      throw InvalidArgument("[communicator] to and from must be other ranks below " +
                            std::to_string(P) + " but one is " + std::to_string(named));
    }
    return named == Hop::kByDistance ? ((rank() + distance) % P + P) % P : named;
  };
  pending->to = peer_of(hop.to, hop.distance);
  pending->from = peer_of(hop.from, -hop.distance);
  last_ = pending->header;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    if (pending->to == rank()) {  // a ring of one, or all the way around
      if (part.send_bytes != part.receive_bytes) {
        throw InvalidArgument("[communicator] a part that stays on its rank must receive the " +
                              std::to_string(part.send_bytes) + " bytes it sends but receives " +
                              std::to_string(part.receive_bytes));
      }
      if (part.send_bytes > 0) std::memmove(part.receive, part.send, part.send_bytes);
      continue;
    }
    Header header = pending->header;
    header.part = static_cast<std::int32_t>(i);
    header.agreement = agreement_;

    if (pending->from != Hop::kNobody) {
      Header due = header;
      due.from = pending->from;
      due.to = rank();
      due.bytes = part.receive_bytes;
      due.has_sum = options_.checksum ? 1 : 0;
      due.sequence = peer(pending->from).asked++;
      peer(pending->from).due.push_back({due, static_cast<std::byte*>(part.receive), pending});
      ++pending->missing;
    }
    try {
      if (pending->from != Hop::kNobody) link_->expect(pending->from, part.receive_bytes);
      if (pending->to == Hop::kNobody) continue;
      header.from = rank();
      header.to = pending->to;
      header.sequence = peer(pending->to).sent++;
      link_->send(pending->to,
                  make_message(header, {static_cast<const std::byte*>(part.send), part.send_bytes},
                               options_.checksum, link_->pool()));
    } catch (const LinkError& e) {
      pending->given_up = true;
      Notice lost = notice_of(*pending, e.rank, kSend, 0, e.what());
      lost.proven = 1;
      lose(lost);
    } catch (
        ...) {  // the caller's memory ran out: sequence numbers no longer fit, nor do its buffers stay
      pending->given_up = true;
      throw;
    }
    ++traffic_.messages;
    (data ? traffic_.bytes : traffic_.overhead_bytes) += part.send_bytes;
    traffic_.overhead_bytes += sizeof(Header);
  }
  if (pending->to != Hop::kNobody) pending->sent_to = peer(pending->to).sent;
  return pending;
}

// Takes what has come, of any shift that is under way.
void LinkCommunicator::receive(double waited) {
  for (int from = 0; from < size(); ++from) {
    std::deque<Due>& due = peer(from).due;
    while (!due.empty()) {
      std::string wrong;
      std::optional<Message> message;
      try {
        message = link_->take(from);
        if (!message) break;
        wrong = why_not(*message, due.front().header);
      } catch (const LinkError& e) {
        wrong = e.what();
      }
      const Due first = std::move(due.front());
      due.pop_front();
      if (!wrong.empty()) {
        Notice lost = notice_of(*first.of, from, kReceive, waited, wrong);
        lost.proven = 1;
        lose(lost);
      }
      if (!first.of->given_up && first.header.bytes > 0) {
        std::memcpy(first.into, message->payload().data(), first.header.bytes);
      }
      --first.of->missing;
    }
  }
}

bool LinkCommunicator::sent(const Pending& p, double waited) {
  if (p.to == rank() || p.to == Hop::kNobody) return true;
  try {
    return link_->delivered(p.to) >= p.sent_to;
  } catch (const LinkError& e) {
    Notice lost = notice_of(p, p.to, kSend, waited, e.what());
    lost.proven = 1;
    lose(lost);
  }
}

void LinkCommunicator::listen() {
  while (const std::optional<Notice> heard = link_->heard()) {
    const auto is_rank = [&](int r) { return r >= 0 && r < size(); };
    if (!is_rank(heard->by)) continue;
    if (heard->kind == Notice::Kind::kWaiting && !is_rank(heard->rank)) continue;
    Peer& by = peer(heard->by);
    switch (heard->kind) {
      case Notice::Kind::kWaiting:
        by.waiting = heard;
        break;
      case Notice::Kind::kBusy:
        by.waiting.reset();
        break;
      case Notice::Kind::kLeft:
        by.waiting.reset();
        by.left = Clock::now();
        by.why_left = text_of(heard->why);
        break;
      case Notice::Kind::kLost:
        lose(*heard);
    }
  }
}

void LinkCommunicator::wait(Pending& p, bool received_is_enough) {
  check_open();
  Clock::time_point start = Clock::now(), seen = start;
  const double deadline = options_.deadline_s;
  double overslept = 0;
  int told = -1;  // for whom this rank waits, as the others know it
  for (;;) {
    listen();
    receive(since(start));
    const bool received = p.missing == 0;
    if (received && (received_is_enough || sent(p, since(start)))) break;

    // A rank that was itself stopped meanwhile has not waited, and hears first what became of the others.
    const double absent = since(seen) + overslept;
    if (absent > deadline / 8) {
      start += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(absent));
    }
    const double waited = since(start);
    const int on = received ? p.to : p.from;
    const int direction = received ? kSend : kReceive;
    if (peer(on).left && since(*peer(on).left) >= kGrace) {
      Notice lost = notice_of(p, on, direction, waited, peer(on).why_left);
      lost.proven = 1;
      lose(lost);
    }
    Notice mine = notice_of(p, on, direction, waited, "it did not answer within the deadline");
    mine.kind = Notice::Kind::kWaiting;
    // Before the deadline, so that it is known by then; not at once, so that a ring at work says nothing.
    if (told != on && waited >= deadline / 8) {
      tell(mine);
      told = on;
    }
    if (waited >= deadline) lose(blame(mine));
    double next = (told >= 0 ? deadline : deadline / 8) - waited;
    if (peer(on).left) next = std::min(next, kGrace / 4);
    const Clock::time_point paused = Clock::now();
    link_->pause(std::max(next, 1e-4));
    overslept = std::max(since(paused) - next, 0.0);
    seen = Clock::now();
  }
  if (told >= 0) tell(notice(Notice::Kind::kBusy, rank(), kSend, ""));
}

// --- losses ---

Notice LinkCommunicator::blame(const Notice& mine) {
  peer(rank()).waiting = mine;
  std::vector<Notice> chain{mine};
  for (;;) {
    const std::optional<Notice>& next = peer(chain.back().rank).waiting;
    if (!next) break;
    const auto seen =
        std::find_if(chain.begin(), chain.end(), [&](const Notice& n) { return n.by == next->by; });
    if (seen != chain.end()) {
      const auto first = std::min_element(seen, chain.end(), before);
      std::swap(*first, chain.back());
      break;
    }
    chain.push_back(*next);
  }
  Notice lost = chain.back();
  lost.kind = Notice::Kind::kLost;
  lost.waited_s = std::max(lost.waited_s, mine.waited_s);
  return lost;
}

void LinkCommunicator::lose(Notice verdict) {
  const double settle = std::clamp(options_.deadline_s / 5, 0.02, 0.2);
  tell(verdict);
  const Clock::time_point start = Clock::now();
  for (double waited = 0; waited < settle; waited = since(start)) {
    while (const std::optional<Notice> other = link_->heard()) {
      if (other->kind == Notice::Kind::kLost && before(*other, verdict)) {
        verdict = *other;
        tell(verdict);
      }
    }
    link_->pause(settle - waited);
  }
  for (Peer& p : peers_) {
    for (Due& due : p.due) due.of->given_up = true;
  }
  closed_.emplace(error_of(verdict, rank()));
  throw *closed_;
}

}  // namespace

void check_deadline(double seconds) {
  if (!(seconds > 0 && std::isfinite(seconds))) {
    throw InvalidArgument("[communicator] deadline_s must be positive and finite but is " +
                          std::to_string(seconds));
  }
}

std::unique_ptr<Communicator> communicator_over(std::unique_ptr<Link> link,
                                                const CommunicatorOptions& options) {
  return std::make_unique<LinkCommunicator>(std::move(link), options);
}

}  // namespace annulus::dist
