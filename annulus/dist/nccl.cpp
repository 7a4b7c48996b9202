// Shifts as ncclSend and ncclRecv in a group, collectives as ncclAllGather, on a stream of ours, and never waited for by
// NCCL or CUDA: a non-blocking communicator hands a group to the device when its connections stand, which
// ncclCommGetAsyncError says, and an event behind it says when it is through. Until the one before is with the device, the
// next group is not begun: so NCCL asks for it.
// What travels is a parcel (parcel.h): whatever NCCL may still read or write when a rank is lost is ours, not the caller's.
#include "annulus/dist/nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/core/info.h"
#include "annulus/cuda/check.h"
#include "annulus/dist/link.h"
#include "annulus/dist/parcel.h"

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0), "annulus_nccl needs NCCL 2.28");

namespace annulus::dist {

namespace {

using Clock = std::chrono::steady_clock;
using cuda::DeviceGuard;
double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

constexpr const char* kMake = "nccl_communicator";
constexpr int kSend = 0, kReceive = 1;  // Notice::direction
constexpr int kAll = -1;                // a flight's peer: every rank has a part in it
constexpr double kEnding = 0.5;         // seconds that ending NCCL's communicator may take
constexpr double kMoment = 1e-3;  // for a group to get to the device, where nobody is waited for

// A group of NCCL's, from the call that begins it until what came was taken.
struct Flight {
  enum class State { kQueued, kSubmitted, kLaunched, kDone };
  State state = State::kQueued;
  Header header;  // op and hop; of the message that is due, where one is
  int to = Hop::kNobody, from = Hop::kNobody;  // or kAll, both
  Block out, in;
  Event through;
  std::vector<Part> parts;
  bool taken = false;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(int rank, int size, int device, const CommunicatorOptions& options)
      : rank_(rank),
        size_(size),
        options_(options),
        staging_(std::make_shared<Staging>(device)),
        sent_(index(size)),
        asked_(index(size)) {}
  ~NcclCommunicator() override;
  void connect(const NcclId& id);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  double deadline_s() const override { return options_.deadline_s; }
  void set_deadline_s(double seconds) override {
    check_deadline(seconds);
    options_.deadline_s = seconds;
  }
  Traffic traffic() const override { return traffic_; }
  bool sends_device_memory() const override { return true; }

  void agree(std::string_view op, std::string_view what) override {
    agreement_ = meet(hello(op, what, false), -1);
  }
  void refuse(std::string_view op, std::string_view why) override {
    agreement_ = meet(hello(op, why, true), -1);
  }
  std::unique_ptr<Transfer> shift(const Hop& hop, std::span<const Part> parts) override;
  void abandon(const std::string& why) noexcept override;
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override;
  void barrier() override { meet(hello("barrier", "", false), 0); }
  void wait(Flight& flight);

 private:
  void check_open() const;
  void begin(const std::shared_ptr<Flight>& flight);
  void pack(Flight& flight, std::span<const Part> parts);
  void take_what_came(Flight& flight, double waited);
  std::uint64_t meet(Hello mine, int hop);
  void gather(const Header& header, std::span<const std::byte> mine, std::span<std::byte> all);

  template <class Done, class Late>
  double until(Done done, Late late);
  ncclResult_t state() const;
  std::string text_of_result(ncclResult_t result) const;
  void advance(double waited);
  void submit(Flight& flight);
  Notice notice(const Header& at, int about, int direction, double waited,
                const std::string& why) const;
  Notice notice_of(const Flight& flight, double waited, const std::string& why) const;
  [[noreturn]] void fail(ncclResult_t result, double waited);
  [[noreturn]] void lose(const Notice& lost);
  void end(bool gently) noexcept;

  int rank_, size_;
  CommunicatorOptions options_;
  std::shared_ptr<Staging> staging_;
  // NCCL may write there for as long as it makes the communicator.
  std::shared_ptr<ncclComm_t> comm_ = std::make_shared<ncclComm_t>(nullptr);
  std::deque<std::shared_ptr<Flight>> flights_;  // that are not through, in the order they began in
  std::vector<std::uint64_t> sent_, asked_;      // messages to and from each rank
  Traffic traffic_;
  std::uint64_t agreement_ = 0;  // digest
  Header last_;                  // op and hop of the last flight begun
  std::optional<RankLost> closed_;
};

// A flight whose transfer is gone has nobody to take what came: its blocks end with it when it is through.
class NcclTransfer final : public Transfer {
 public:
  NcclTransfer(NcclCommunicator& owner, std::shared_ptr<Flight> flight)
      : owner_(owner), flight_(std::move(flight)) {}
  void receive() override { owner_.wait(*flight_); }
  void wait() override { owner_.wait(*flight_); }

 private:
  NcclCommunicator& owner_;
  std::shared_ptr<Flight> flight_;
};

// --- making and ending ---

void NcclCommunicator::connect(const NcclId& id) {
  const DeviceGuard guard(staging_->device());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclUniqueId unique;
  static_assert(sizeof unique.internal == sizeof(NcclId));
  std::memcpy(unique.internal, id.data(), id.size());
  ncclResult_t result = ncclCommInitRankConfig(comm_.get(), size_, unique, rank_, &config);
  const auto lost = [&](double waited, const std::string& why) {
    end(false);
    throw RankLost("[" + std::string(kMake) + "] a rank is lost before any data: " + why, -1, -1,
                   RankLost::Direction::kReceive, waited);
  };
  const double waited = until(
      [&](double) {
        if (*comm_ != nullptr && (result == ncclSuccess || result == ncclInProgress)) {
          result = state();
        }
        return result != ncclInProgress;
      },
      [&](double late) {
        lost(late, "not all came within " + std::to_string(options_.deadline_s) + " s");
      });
  if (result == ncclSuccess) return;
  const std::string why = text_of_result(result);
  if (result == ncclInvalidUsage || result == ncclInvalidArgument) {
    end(false);
    throw NotSupported("[" + std::string(kMake) + "] NCCL refuses rank " + std::to_string(rank_) +
                       " of " + std::to_string(size_) + " on device " +
                       std::to_string(staging_->device()) + ": " + why);
  }
  if (result == ncclUnhandledCudaError) {
    end(false);
    throw DeviceError("[" + std::string(kMake) + "] " + why);
  }
  lost(waited, why);
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr) return;
  try {
    const DeviceGuard guard(staging_->device());
    advance(0);
    end(flights_.empty());
  } catch (const std::exception&) {  // what advance() found is nobody's any more, and ended it
    end(false);
  }
}

// On a thread of its own, which is left behind where NCCL does not return, with all it may touch. Gently: what NCCL
// still carries for others gets there, within the deadline.
void NcclCommunicator::end(bool gently) noexcept {
  const std::shared_ptr<ncclComm_t> comm = std::exchange(comm_, nullptr);
  if (comm == nullptr || *comm == nullptr) return;
  const double patience = gently ? options_.deadline_s : 0;
  const auto finish = [comm, gently, patience, device = staging_->device()] {
    (void)cudaSetDevice(device);
    ncclResult_t state = gently ? ncclCommFinalize(*comm) : ncclRemoteError;
    const Clock::time_point start = Clock::now();
    while (state == ncclSuccess || state == ncclInProgress) {
      if (ncclCommGetAsyncError(*comm, &state) != ncclSuccess) state = ncclSystemError;
      if (state != ncclInProgress || since(start) >= patience) break;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    (void)(state == ncclSuccess ? ncclCommDestroy(*comm) : ncclCommAbort(*comm));
  };
  try {
    auto left = std::make_unique<std::pair<std::shared_ptr<Staging>, decltype(flights_)>>(staging_,
                                                                                          flights_);
    std::promise<void> promise;
    const std::future<void> over = promise.get_future();
    std::thread([finish, promise = std::move(promise)]() mutable {
      finish();
      promise.set_value();
    }).detach();
    const std::chrono::duration<double> limit(patience + kEnding);
    if (over.wait_for(limit) != std::future_status::ready) (void)left.release();
  } catch (const std::exception&) {  // no memory, no thread
    finish();
  }
  flights_.clear();
}

void NcclCommunicator::check_open() const {
  if (!closed_ && comm_ != nullptr) return;
  if (!closed_) {
    throw RankLost("the communicator is closed", rank_, last_.hop, RankLost::Direction::kSend, 0);
  }
  throw RankLost("the communicator is closed: " + std::string(closed_->what()), closed_->rank,
                 closed_->hop, closed_->direction, closed_->waited_s);
}

// --- what a caller sees ---

std::unique_ptr<Transfer> NcclCommunicator::shift(const Hop& hop, std::span<const Part> parts) {
  check_open();
  const auto peer_of = [&](int named, int distance) {
    if (named != Hop::kByDistance && named != Hop::kNobody &&
        (named < 0 || named >= size_ || named == rank_)) {
      throw InvalidArgument("[communicator] to and from must be other ranks below " +
                            std::to_string(size_) + " but one is " + std::to_string(named));
    }
    return named == Hop::kByDistance ? ((rank_ + distance) % size_ + size_) % size_ : named;
  };
  const int to = peer_of(hop.to, hop.distance), from = peer_of(hop.from, -hop.distance);
  if ((to == rank_) != (from == rank_)) {
    throw InvalidArgument("[communicator] to and from must both be this rank, " +
                          std::to_string(rank_) + ", or neither but are " + std::to_string(to) +
                          " and " + std::to_string(from));
  }
  for (const Part& part : parts) {
    if (to == rank_ && part.send_bytes != part.receive_bytes) {
      throw InvalidArgument("[communicator] a part that stays on its rank must receive the " +
                            std::to_string(part.send_bytes) + " bytes it sends but receives " +
                            std::to_string(part.receive_bytes));
    }
  }
  const DeviceGuard guard(staging_->device());
  auto flight = std::make_shared<Flight>();
  put(flight->header.op, hop.op);
  flight->header.hop = hop.hop;
  flight->to = to;
  flight->from = from;
  if (to == Hop::kNobody && from == Hop::kNobody) {
    flight->taken = true;
  } else {
    pack(*flight, parts);
    begin(flight);
  }
  return std::make_unique<NcclTransfer>(*this, std::move(flight));
}

void NcclCommunicator::abandon(const std::string& why) noexcept {
  if (closed_) return;
  try {
    closed_.emplace(error_of(notice(last_, rank_, kSend, 0, "it gave up: " + why), rank_));
  } catch (const std::exception&) {  // no memory even for that: check_open() has words of its own
  }
  end(false);
}

void NcclCommunicator::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  if (all.size() != mine.size() * index(size_)) {
    throw InvalidArgument("[all_gather] all must have " +
                          std::to_string(mine.size() * index(size_)) + " bytes but has " +
                          std::to_string(all.size()));
  }
  // NCCL does not compare them.
  meet(hello("all_gather", std::to_string(mine.size()) + " bytes", false), 0);
  if (mine.empty()) return;
  Header header;
  put(header.op, "all_gather");
  gather(header, mine, all);
  traffic_.messages += index(size_ - 1);
  traffic_.bytes += mine.size() * index(size_ - 1);
}

// All say what they are about to do, and all see what all said. Returns the digest of `what`.
std::uint64_t NcclCommunicator::meet(Hello mine, int hop) {
  check_open();
  mine.rank = rank_;
  mine.size = size_;
  mine.checksum = options_.checksum ? 1 : 0;
  mine.deadline_s = options_.deadline_s;
  std::vector<Hello> hellos(index(size_));
  Header header;
  put(header.op, text_of(mine.op));
  header.hop = hop;
  gather(header, std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(hellos)));
  traffic_.overhead_bytes += sizeof mine * index(size_ - 1);
  if (const auto found = compare(hellos)) {
    lose(notice(header, found->rank, kReceive, 0, found->what));
  }
  return mine.digest;
}

void NcclCommunicator::gather(const Header& header, std::span<const std::byte> mine,
                              std::span<std::byte> all) {
  const DeviceGuard guard(staging_->device());
  const auto flight = std::make_shared<Flight>();
  flight->header = header;
  flight->to = flight->from = kAll;
  flight->out = take(staging_, mine.size());
  flight->in = take(staging_, all.size());
  staging_->copy(flight->out.at(0), mine.data(), mine.size());
  staging_->finish();
  flight->parts = {{nullptr, 0, all.data(), all.size()}};
  begin(flight);
  wait(*flight);
}

// --- messages ---

// A flight that throws here was never begun.
void NcclCommunicator::pack(Flight& flight, std::span<const Part> parts) {
  flight.parts.assign(parts.begin(), parts.end());
  flight.header.agreement = agreement_;
  if (flight.from != Hop::kNobody) flight.in = room_for(staging_, parts);
  if (flight.to != Hop::kNobody) {
    Header header = flight.header;
    header.from = rank_;
    header.to = flight.to;
    header.sequence = sent_[index(flight.to)];
    flight.out = packed(staging_, header, parts, options_.checksum);
    ++sent_[index(flight.to)];
  } else {
    staging_->finish();
  }
  if (flight.to != Hop::kNobody && flight.to != rank_) {
    ++traffic_.messages;
    for (const Part& part : parts) traffic_.bytes += part.send_bytes;
    traffic_.overhead_bytes += kFront;
  }
  if (flight.from != Hop::kNobody) {
    flight.header.from = flight.from;
    flight.header.to = rank_;
    flight.header.sequence = asked_[index(flight.from)]++;
  }
}

void NcclCommunicator::take_what_came(Flight& flight, double waited) {
  flight.taken = true;
  flight.out = {};
  if (flight.from == kAll) {
    staging_->copy(flight.parts[0].receive, flight.in.at(0), flight.in.bytes);
    staging_->finish();
  } else if (flight.from != Hop::kNobody) {
    const std::string wrong =
        unpack(*staging_, flight.in, flight.header, flight.parts, options_.checksum);
    if (!wrong.empty()) lose(notice_of(flight, waited, wrong));
  }
  flight.in = {};
}

// --- waiting ---

// Until done(waited); past the deadline late(waited), which throws. Returns how long it took.
template <class Done, class Late>
double NcclCommunicator::until(Done done, Late late) {
  Clock::time_point start = Clock::now(), seen = start;
  const double deadline = options_.deadline_s;
  for (int idle = 0; !done(since(start)); ++idle) {
    // A rank that was itself stopped meanwhile has not waited.
    if (since(seen) > std::max(deadline / 8, 0.01)) start += Clock::now() - seen;
    const double waited = since(start);
    if (waited >= deadline) late(waited);
    seen = Clock::now();
    // There is nothing to sleep on: at full speed first, as a hop takes tens of microseconds, then ever longer naps.
    if (idle < 256) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(idle - 255, 200)));
    }
  }
  return since(start);
}

void NcclCommunicator::wait(Flight& flight) {
  check_open();
  if (flight.taken) return;
  const DeviceGuard guard(staging_->device());
  const double waited = until(
      [&](double so_far) {
        advance(so_far);
        return flight.state == Flight::State::kDone;
      },
      [&](double late) {  // the first that is not through keeps all others
        const Flight& first = *flights_.front();
        lose(notice_of(first, late,
                       first.from == kAll ? "not all ranks came within the deadline"
                                          : "it did not answer within the deadline"));
      });
  take_what_came(flight, waited);
}

void NcclCommunicator::begin(const std::shared_ptr<Flight>& flight) {
  last_ = flight->header;
  flights_.push_back(flight);
  // Mostly it is with the device at once. Where connections are made first, that goes on whenever this rank waits.
  const Clock::time_point start = Clock::now();
  do {
    advance(0);
  } while (flight->state < Flight::State::kLaunched && since(start) < kMoment);
}

ncclResult_t NcclCommunicator::state() const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(*comm_, &state);
  return asked == ncclSuccess ? state : asked;
}

// Takes every flight as far as it gets by now.
void NcclCommunicator::advance(double waited) {
  ncclResult_t now = state();
  try {
    for (const auto& flight : flights_) {
      if (flight->state >= Flight::State::kLaunched) continue;
      if (flight->state == Flight::State::kQueued && now == ncclSuccess) {
        submit(*flight);
        now = state();
      }
      if (now != ncclSuccess) break;
      flight->through.record(staging_->transfers());
      flight->state = Flight::State::kLaunched;
    }
    if (now != ncclSuccess && now != ncclInProgress) fail(now, waited);
    while (!flights_.empty() && flights_.front()->state == Flight::State::kLaunched &&
           flights_.front()->through.passed()) {
      const auto flight = std::move(flights_.front());
      flights_.pop_front();
      flight->state = Flight::State::kDone;
    }
  } catch (const DeviceError& e) {
    abandon(e.what());
    throw;
  }
}

// In a group even where it is one call: alone, a call may say that all is well before it is with the device.
void NcclCommunicator::submit(Flight& flight) {
  const cudaStream_t stream = staging_->transfers();
  ncclResult_t first = ncclGroupStart();
  const auto call = [&](ncclResult_t result) {
    if (first == ncclSuccess || first == ncclInProgress) first = result;
  };
  if (flight.to == kAll) {
    call(ncclAllGather(flight.out.at(0), flight.in.at(0), flight.out.bytes, ncclUint8, *comm_,
                       stream));
  } else {
    if (flight.to != Hop::kNobody) {
      call(ncclSend(flight.out.at(0), flight.out.bytes, ncclUint8, flight.to, *comm_, stream));
    }
    if (flight.from != Hop::kNobody) {
      call(ncclRecv(flight.in.at(0), flight.in.bytes, ncclUint8, flight.from, *comm_, stream));
    }
  }
  call(ncclGroupEnd());
  flight.state = Flight::State::kSubmitted;
  if (first != ncclSuccess && first != ncclInProgress) fail(first, 0);
}

// --- losses ---

std::string NcclCommunicator::text_of_result(ncclResult_t result) const {
  std::string text = std::string("NCCL says: ") + ncclGetErrorString(result);
  const char* more = *comm_ == nullptr ? nullptr : ncclGetLastError(*comm_);
  if (more != nullptr && *more != '\0') text.append(": ").append(more);
  return text;
}

Notice NcclCommunicator::notice(const Header& at, int about, int direction, double waited,
                                const std::string& why) const {
  Notice lost;
  lost.kind = Notice::Kind::kLost;
  lost.by = rank_;
  lost.rank = about;
  lost.hop = at.hop;
  lost.direction = direction;
  lost.waited_s = waited;
  put(lost.op, text_of(at.op));
  put(lost.why, why);
  return lost;
}

// About the rank that the flight waits for: the one it receives from, where there is one.
Notice NcclCommunicator::notice_of(const Flight& flight, double waited,
                                   const std::string& why) const {
  const bool receives = flight.from != Hop::kNobody;
  return notice(flight.header, receives ? flight.from : flight.to, receives ? kReceive : kSend,
                waited, why);
}

void NcclCommunicator::fail(ncclResult_t result, double waited) {
  const std::string why = text_of_result(result);
  if (result == ncclUnhandledCudaError || flights_.empty()) {
    throw DeviceError("[communicator] " + why);
  }
  lose(notice_of(*flights_.front(), waited, why));
}

void NcclCommunicator::lose(const Notice& lost) {
  closed_.emplace(error_of(lost, rank_));
  end(false);
  throw *closed_;
}

}  // namespace

}  // namespace annulus::dist

namespace annulus {

NcclId nccl_unique_id() {
  ncclUniqueId unique;
  const ncclResult_t result = ncclGetUniqueId(&unique);
  if (result != ncclSuccess) {
    throw NotSupported(std::string("[nccl_unique_id] NCCL says: ") + ncclGetErrorString(result));
  }
  NcclId id;
  std::memcpy(id.data(), unique.internal, id.size());
  return id;
}

std::unique_ptr<Communicator> nccl_communicator(const NcclId& id, int rank, int size, int device,
                                                const CommunicatorOptions& options) {
  const auto refuse = [](const std::string& rule, int came) {
    throw InvalidArgument("[nccl_communicator] " + rule + " but is " + std::to_string(came));
  };
  if (size < 1) refuse("size must be at least 1", size);
  if (rank < 0 || rank >= size) {
    refuse("rank must be from 0 to " + std::to_string(size - 1), rank);
  }
  dist::check_deadline(options.deadline_s);
  int version = 0, devices = 0;
  const cudaError_t counted = cudaGetDeviceCount(&devices);
  if (counted != cudaSuccess || devices == 0) {
    (void)cudaGetLastError();
    throw NotSupported(std::string("[nccl_communicator] there is no CUDA device: ") +
                       cudaGetErrorString(counted));
  }
  if (device < 0 || device >= devices) {
    refuse("device must be from 0 to " + std::to_string(devices - 1), device);
  }
  if (ncclGetVersion(&version) != ncclSuccess || version < NCCL_VERSION(2, 28, 0)) {
    throw NotSupported("[nccl_communicator] NCCL 2.28 or later is needed, but version " +
                       std::to_string(version) + " was loaded");
  }
  auto group = std::make_unique<dist::NcclCommunicator>(rank, size, device, options);
  group->connect(id);
  group->agree("communicator", "");
  return group;
}

}  // namespace annulus
