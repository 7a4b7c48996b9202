// Messages by MPI_Isend and MPI_Irecv, tested and never waited for. Messages own their memory (link.h), which here is
// a copy each way: what a rank that stops answering may still write to or read from is ours, not the caller's.
#include "annulus/dist/mpi.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <iostream>
#include <list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/core/errors.h"
#include "annulus/dist/link.h"

namespace annulus::dist {

namespace {

constexpr const char *kSending = "sending to it failed", *kReceiving = "receiving from it failed";
constexpr int kDataTag = 1, kNoticeTag = 2;
constexpr std::size_t kPiece = std::size_t{1} << 30;  // MPI counts in int

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string text_of_error(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {text, static_cast<std::size_t>(length)};
}

void check(int code, int peer, const char* what) {
  if (code != MPI_SUCCESS) throw LinkError(peer, std::string(what) + ": " + text_of_error(code));
}

// A message on its way, in as many pieces as MPI can count.
struct Flight {
  std::size_t bytes = 0;  // header included
  Message message;
  std::size_t begun = 0;  // of the bytes
  std::vector<MPI_Request> requests;

  // True when all that was begun is through.
  bool test(int peer, const char* what) {
    while (!requests.empty()) {
      int done = 0;
      MPI_Request request = requests.back();
      const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done || code != MPI_SUCCESS) requests.pop_back();
      check(code, peer, what);
      if (!done) return false;
    }
    return true;
  }
};

// The next piece of a message.
std::span<std::byte> piece_of(Flight& flight) {
  const auto rest = flight.message.bytes().subspan(flight.begun);
  return rest.first(std::min(rest.size(), kPiece));
}

class MpiLink final : public Link {
 public:
  MpiLink(MPI_Comm of, double deadline_s) {
    MPI_Errhandler handler;
    MPI_Comm_get_errhandler(of, &handler);
    MPI_Comm_set_errhandler(of, MPI_ERRORS_RETURN);
    const Clock::time_point start = Clock::now();
    // Of all ranks, of which one may never come: begun, tested, given up.
    auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_Comm_idup(of, made.get(), &request), done = 0;
    while (code == MPI_SUCCESS && !done && since(start) < deadline_s) {
      code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (!done) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    MPI_Comm_set_errhandler(of, handler);
    MPI_Errhandler_free(&handler);
    if (code != MPI_SUCCESS || !done) {
      (void)made.release();  // MPI may still write there
      throw RankLost(
          "[mpi_communicator] a rank is lost before any data: " +
              (code != MPI_SUCCESS ? text_of_error(code)
                                   : "not all came within " + std::to_string(deadline_s) + " s"),
          -1, -1, RankLost::Direction::kReceive, since(start));
    }
    comm_ = *made;
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    peers_ = std::vector<Peer>(static_cast<std::size_t>(size_));
    listen();
  }
  ~MpiLink() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void send(int to, Message message) override {
    Flight& flight = peer(to).out.emplace_back();
    flight.bytes = message.bytes().size();
    flight.message = std::move(message);
    while (flight.begun < flight.bytes) {
      const auto piece = piece_of(flight);
      MPI_Request request = MPI_REQUEST_NULL;
      check(MPI_Isend(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, to, kDataTag, comm_,
                      &request),
            to, kSending);
      flight.requests.push_back(request);
      flight.begun += piece.size();
    }
  }
  std::uint64_t delivered(int to) override {
    Peer& p = peer(to);
    while (!p.out.empty() && p.out.front().test(to, kSending)) {
      p.out.pop_front();
      ++p.delivered;
      idle_ = 0;
    }
    return p.delivered;
  }
  void expect(int from, std::size_t payload_bytes) override {
    peer(from).in.emplace_back().bytes = sizeof(Header) + payload_bytes;
  }
  std::optional<Message> take(int from) override {
    std::deque<Flight>& in = peer(from).in;
    begin_receiving(from);
    if (in.empty() || in.front().begun < in.front().bytes || !in.front().test(from, kReceiving)) {
      return std::nullopt;
    }
    Message message = std::move(in.front().message);
    in.pop_front();
    idle_ = 0;
    return message;
  }

  void notify(const Notice& notice) noexcept override {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      try {
        Word& word = words_.emplace_back();
        word.notice = notice;
        MPI_Isend(&word.notice, sizeof word.notice, MPI_BYTE, r, kNoticeTag, comm_, &word.request);
      } catch (const std::exception&) {  // no memory: that rank finds out by its deadline
      }
    }
  }
  std::optional<Notice> heard() override {
    forget_said();
    int done = 0;
    if (MPI_Test(&ear_->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done) {
      return std::nullopt;
    }
    const Notice notice = ear_->notice;
    listen();
    idle_ = 0;
    return notice;
  }

  // There is nothing to sleep on: a few rounds at full speed, then ever longer naps, so that more ranks than cores
  // get on.
  void pause(double seconds) override {
    if (++idle_ < 64) return std::this_thread::yield();
    const double nap = std::min(1e-3, 1e-5 * static_cast<double>(idle_ - 63));
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, nap)));
  }

 private:
  struct Word {
    Notice notice;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Peer {
    std::deque<Flight> out, in;
    std::uint64_t delivered = 0;
  };
  Peer& peer(int r) { return peers_[static_cast<std::size_t>(r)]; }

  // Looks at the size of what has come before it makes room for it: given less room than a message has bytes, as one
  // that is not due may have, Open MPI 4.1.4 returns MPI_ERR_TRUNCATE and has written past the end (above the eager
  // size, on one machine). Nothing is lost by not receiving earlier: MPI moves large messages only while it is called.
  void begin_receiving(int from) {
    for (Flight& flight : peer(from).in) {
      while (flight.begun < flight.bytes) {
        int there = 0, bytes = 0;
        MPI_Message found;
        MPI_Status status;
        check(MPI_Improbe(from, kDataTag, comm_, &there, &found, &status), from, kReceiving);
        if (!there) return;
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        const std::size_t due = std::min(flight.bytes - flight.begun, kPiece);
        if (static_cast<std::size_t>(bytes) != due) {
          throw LinkError(from, "its message has " + std::to_string(bytes) + " bytes where " +
                                    std::to_string(due) + " were due");
        }
        if (flight.begun == 0) {
          flight.message = Message(flight.bytes - sizeof(Header), pool());
        }
        const auto piece = piece_of(flight);
        MPI_Request request = MPI_REQUEST_NULL;
        check(MPI_Imrecv(piece.data(), bytes, MPI_BYTE, &found, &request), from, kReceiving);
        flight.requests.push_back(request);
        flight.begun += piece.size();
      }
    }
  }
  void listen() {
    MPI_Irecv(&ear_->notice, sizeof ear_->notice, MPI_BYTE, MPI_ANY_SOURCE, kNoticeTag, comm_,
              &ear_->request);
  }
  void forget_said() {
    std::erase_if(words_, [](Word& word) {
      int done = 0;
      return MPI_Test(&word.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done;
    });
  }
  bool quiet();

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::vector<Peer> peers_;
  std::list<Word> words_;  // that were said and may not have left yet
  std::unique_ptr<Word> ear_ = std::make_unique<Word>();
  int idle_ = 0;  // pauses since something came
};

// Nothing is under way any more.
bool MpiLink::quiet() {
  forget_said();
  bool all = words_.empty();
  for (int r = 0; r < size_; ++r) {
    for (std::deque<Flight>* flights : {&peer(r).out, &peer(r).in}) {
      std::erase_if(*flights, [&](Flight& f) {
        try {
          return f.test(r, kReceiving);
        } catch (const LinkError&) {
          return true;
        }
      });
      all = all && flights->empty();
    }
  }
  return all;
}

// The communicator is not freed. MPI would give its number to a later one, which then takes what a rank still sends on
// this one, a notice for one, for its own: Open MPI 4.1.4 dropped messages of the later one.
MpiLink::~MpiLink() {
  int over = 0;
  MPI_Finalized(&over);
  if (over) return;
  try {
    MPI_Cancel(&ear_->request);
    int deaf = 0;
    const Clock::time_point start = Clock::now();
    while (!(quiet() && deaf) && since(start) < 0.1) {
      if (!deaf) MPI_Test(&ear_->request, &deaf, MPI_STATUS_IGNORE);
    }
    // What MPI may still touch, as it may when a rank is lost, stays as long as the process does.
    if (!deaf) (void)ear_.release();
    if (!quiet()) {
      new std::vector<Peer>(std::move(peers_));
      new std::list<Word>(std::move(words_));
    }
  } catch (const std::exception&) {
  }
}

}  // namespace

std::unique_ptr<Link> mpi_link(double deadline_s, int fortran_handle) {
  int ready = 0;
  MPI_Initialized(&ready);
  if (!ready) throw InvalidArgument("[mpi_communicator] MPI_Init must be called before it");
  return std::make_unique<MpiLink>(fortran_handle == kMpiWorld
                                       ? MPI_COMM_WORLD
                                       : MPI_Comm_f2c(static_cast<MPI_Fint>(fortran_handle)),
                                   deadline_s);
}

}  // namespace annulus::dist

namespace annulus {

std::unique_ptr<Communicator> mpi_communicator(const CommunicatorOptions& options,
                                               int fortran_handle) {
  auto group = dist::communicator_over(dist::mpi_link(options.deadline_s, fortran_handle), options);
  group->agree("communicator", "");
  return group;
}

void mpi_leave(int code) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace annulus
