#include "daemon/scheduler/turn.h"

#include <algorithm>

namespace mlpo {

bool Turn::Allows(SessionId session, Direction direction) const {
  if (!on()) return true;
  if (rules_.one_direction && in_flight_[1 - IndexOf(direction)] > 0) return false;
  if (holder_ == 0 || left_ == 0) return true;  // it begins another
  return session == holder_ && (!rules_.one_direction || direction == direction_);
}

uint64_t Turn::Started(SessionId session, Direction direction, uint64_t queued) {
  if (!on()) return 0;
  if (holder_ == 0 || left_ == 0) {
    ++number_;
    holder_ = session;
    direction_ = direction;
    left_ = rules_.exclusive ? std::max<uint64_t>(1, queued) : rules_.blocks;
    own_in_flight_ = 0;
  }
  --left_;
  ++own_in_flight_;
  ++in_flight_[IndexOf(direction)];
  return number_;
}

void Turn::Ended(uint64_t turn, Direction direction) {
  if (!on()) return;
  --in_flight_[IndexOf(direction)];
  if (turn == number_) --own_in_flight_;
}

bool Turn::Yield() {
  if (holder_ == 0 || own_in_flight_ > 0) return false;
  holder_ = 0;
  return true;
}

}  // namespace mlpo
