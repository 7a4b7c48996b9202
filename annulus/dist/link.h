// A link: what a transport of messages must be able to do, so that LinkCommunicator makes a Communicator of it.
// Nothing here waits for a peer. Messages from one rank to another arrive in the order they were sent in, or not at
// all; what is wrong with them, and that they do not come, the communicator finds out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "annulus/dist/communicator.h"
#include "annulus/dist/message.h"

namespace annulus::dist {

// The transport itself says that it cannot send to or receive from this rank.
class LinkError : public std::runtime_error {
 public:
  LinkError(int peer, const std::string& what) : std::runtime_error(what), rank(peer) {}
  int rank;
};

class Link {
 public:
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  virtual ~Link() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual void send(int to, Message message) = 0;
  // Of the messages sent to that rank, how many it has taken (or are out of this rank's hands for good).
  virtual std::uint64_t delivered(int to) = 0;
  // A message with that much payload is due; it is take()n after those announced before it.
  virtual void expect(int from, std::size_t payload_bytes) = 0;
  virtual std::optional<Message> take(int from) = 0;

  // Notices go beside the messages, to all other ranks; those to a rank that is gone are lost.
  virtual void notify(const Notice& notice) noexcept = 0;
  virtual std::optional<Notice> heard() = 0;

  // Until something may have come, and at most that long.
  virtual void pause(double seconds) = 0;

  // Where messages of this rank get their memory.
  const std::shared_ptr<Pool>& pool() const { return pool_; }

 private:
  std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();
};

std::vector<std::unique_ptr<Link>> local_links(int size);

// Throws InvalidArgument where it is none.
void check_deadline(double seconds);

// The handshake is part of its first call.
std::unique_ptr<Communicator> communicator_over(std::unique_ptr<Link> link,
                                                const CommunicatorOptions& options);

}  // namespace annulus::dist
