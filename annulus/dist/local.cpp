// Ranks as threads of one process: messages change hands on a board that all share.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/dist/communicator.h"
#include "annulus/dist/link.h"

namespace annulus::dist {

namespace {

struct Board {
  explicit Board(std::size_t size) : places(size) {
    for (Place& place : places) place.from = std::vector<Mail>(size);
  }

  struct Mail {
    std::deque<Message> messages;
    std::uint64_t taken = 0;
  };
  struct Place {  // of one rank
    std::vector<Mail> from;
    std::deque<Notice> notices;
    std::condition_variable changed;
    std::uint64_t changes = 0;
  };
  void touch(Place& place) {
    ++place.changes;
    place.changed.notify_all();
  }

  std::mutex mutex;  // of all below
  std::vector<Place> places;
};

class LocalLink final : public Link {
 public:
  LocalLink(std::shared_ptr<Board> board, int rank) : board_(std::move(board)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(board_->places.size()); }

  void send(int to, Message message) override {
    const std::lock_guard lock(board_->mutex);
    place(to).from[index(rank_)].messages.push_back(std::move(message));
    board_->touch(place(to));
  }
  std::uint64_t delivered(int to) override {
    const std::lock_guard lock(board_->mutex);
    return place(to).from[index(rank_)].taken;
  }
  void expect(int, std::size_t) override {}
  std::optional<Message> take(int from) override {
    const std::lock_guard lock(board_->mutex);
    Board::Mail& mail = place(rank_).from[index(from)];
    if (mail.messages.empty()) return std::nullopt;
    Message message = std::move(mail.messages.front());
    mail.messages.pop_front();
    ++mail.taken;
    board_->touch(place(from));
    return message;
  }

  void notify(const Notice& notice) noexcept override {
    const std::lock_guard lock(board_->mutex);
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      try {
        place(r).notices.push_back(notice);
      } catch (const std::exception&) {  // no memory: that rank finds out by its deadline
      }
      board_->touch(place(r));
    }
  }
  std::optional<Notice> heard() override {
    const std::lock_guard lock(board_->mutex);
    std::deque<Notice>& notices = place(rank_).notices;
    if (notices.empty()) return std::nullopt;
    const Notice notice = notices.front();
    notices.pop_front();
    return notice;
  }

  void pause(double seconds) override {
    std::unique_lock lock(board_->mutex);
    Board::Place& mine = place(rank_);
    mine.changed.wait_for(lock, std::chrono::duration<double>(seconds),
                          [&] { return mine.changes != seen_; });
    seen_ = mine.changes;
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  Board::Place& place(int rank) { return board_->places[index(rank)]; }

  std::shared_ptr<Board> board_;
  int rank_;
  std::uint64_t seen_ = 0;  // changes of this rank's place
};

}  // namespace

std::vector<std::unique_ptr<Link>> local_links(int size) {
  if (size < 1) {
    throw InvalidArgument("[local_communicators] size must be at least 1 but is " +
                          std::to_string(size));
  }
  const auto board = std::make_shared<Board>(static_cast<std::size_t>(size));
  std::vector<std::unique_ptr<Link>> links;
  for (int r = 0; r < size; ++r) links.push_back(std::make_unique<LocalLink>(board, r));
  return links;
}

}  // namespace annulus::dist

namespace annulus {

std::vector<std::unique_ptr<Communicator>> local_communicators(int size,
                                                               const CommunicatorOptions& options) {
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (auto& link : dist::local_links(size)) {
    ranks.push_back(dist::communicator_over(std::move(link), options));
  }
  return ranks;
}

}  // namespace annulus
