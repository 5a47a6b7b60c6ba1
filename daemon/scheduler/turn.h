// Turn: who may use a path now, where its transfers are to come in turns: `blocks` blocks of one session after another,
// and, with one direction, only reads or only writes at a time; `exclusive`: all that the session had to move there
// when its turn began.
//
// A turn stands in nobody's way for long: it ends when its blocks have been started, and when its holder has nothing in
// flight on the path and nothing that can be started (Yield). So what waits for a turn waits for transfers in flight
// only, as everything does.
//
// Owner: the data thread. No system calls.
#pragma once

#include <cstdint>

#include "daemon/types/ids.h"
#include "daemon/types/transfer.h"

namespace mlpo {

struct TurnRules {
  uint32_t blocks = 0;         // of a turn; 0: no turns, unless exclusive
  bool one_direction = false;  // reads and writes not at the same time
  bool exclusive = false;      // instead of `blocks`: the session's whole queue
  bool on() const { return blocks > 0 || exclusive; }
};

class Turn {
 public:
  Turn() = default;
  explicit Turn(TurnRules rules) : rules_(rules) {}

  bool on() const { return rules_.on(); }
  // 0: nobody.
  SessionId holder() const { return holder_; }
  bool Allows(SessionId session, Direction direction) const;
  // A transfer that Allows let begin; `queued`: blocks that the session has to move on the path, this one included.
  // Returns the turn's number, for Ended.
  uint64_t Started(SessionId session, Direction direction, uint64_t queued);
  void Ended(uint64_t turn, Direction direction);
  // Nothing can be started now. Ends the turn if its holder has nothing in flight: true if it did.
  bool Yield();

 private:
  static size_t IndexOf(Direction direction) { return direction == Direction::kRead ? 0 : 1; }

  TurnRules rules_;
  SessionId holder_ = 0;
  Direction direction_ = Direction::kRead;
  uint64_t number_ = 0;
  uint64_t left_ = 0;           // blocks that the turn may still begin
  uint32_t own_in_flight_ = 0;  // that it has begun
  uint32_t in_flight_[2] = {};  // of all: a turn may begin while the last one's transfers end
};

}  // namespace mlpo
