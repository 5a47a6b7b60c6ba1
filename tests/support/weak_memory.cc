#include "tests/support/weak_memory.h"

namespace mlpo::test {

// Runs a thread up to its next access, or to its end.
void WeakMemory::Advance(State* state, size_t index) {
  Thread& thread = state->threads[index];
  running_ = this;
  log_ = &thread.log;
  cursor_ = 0;
  digest_ = {index, ~index};
  try {
    thread.result = bodies_[index]();
    thread.status = Status::kFinished;
    digest_ = Mix({index, 0}, thread.result);
  } catch (const Pause&) {
    thread.next = next_;
    thread.status = Status::kReady;
  } catch (const Violation& violation) {
    state->violation = thread_names_[index] + ": " + violation.what;
  }
  running_ = nullptr;
  thread.digest = digest_;
}

std::vector<WeakMemory::Move> WeakMemory::Moves(const State& state) const {
  std::vector<Move> moves;
  for (size_t i = 0; i < state.threads.size(); ++i) {
    const Thread& thread = state.threads[i];
    if (thread.status != Status::kReady) continue;
    const Op& op = thread.next;
    uint32_t first = 0, count = 1;
    if (op.kind == Op::kLoad) {
      first = thread.view[op.word];
      if (op.order == Order::seq_cst) first = std::max<uint32_t>(first, state.newest_sc[op.word]);
      count = static_cast<uint32_t>(state.words[op.word].size()) - first;
    } else if (op.kind == Op::kChoose) {
      count = static_cast<uint32_t>(op.value);
    } else if (op.kind == Op::kAwait) {
      count = state.events[op.word] ? 1 : 0;
    }
    for (uint32_t choice = first; choice < first + count; ++choice) moves.push_back({static_cast<uint8_t>(i), choice});
  }
  return moves;
}

void WeakMemory::Claim(State* state, size_t thread, uint8_t word, uint8_t as) {
  if (state->writers[word] == kNobody) state->writers[word] = as;
  if (state->writers[word] != as)
    state->violation = thread_names_[thread] + " is the second thread that stores to " + word_names_[word];
}

// A new entry of a word; `goes_on`: with the view of the entry that it replaces.
void WeakMemory::Append(State* state, size_t index, Op op, uint64_t value, const View* goes_on) {
  Thread& thread = state->threads[index];
  std::vector<Entry>& entries = state->words[op.word];
  Expect(entries.size() < 0xff, "a word's history is too long");
  const auto place = static_cast<uint8_t>(entries.size());
  thread.view[op.word] = place;
  Entry entry;
  entry.value = value;
  if (goes_on != nullptr) entry.view = *goes_on;
  if (Releases(op.order)) Join(&entry.view, thread.view);
  entry.view[op.word] = place;
  entries.push_back(entry);
  if (op.order == Order::seq_cst) state->newest_sc[op.word] = place;
}

void WeakMemory::Apply(State* state, const Move& move) {
  Thread& thread = state->threads[move.thread];
  const Op op = thread.next;
  uint64_t value = 0;
  switch (op.kind) {
    case Op::kLoad: {
      const Entry& entry = state->words[op.word][move.choice];
      const auto place = static_cast<uint8_t>(move.choice);
      value = entry.value;
      thread.view[op.word] = place;
      if (Acquires(op.order)) Join(&thread.view, entry.view);
      if (op.order == Order::seq_cst) state->newest_sc[op.word] = std::max(state->newest_sc[op.word], place);
      break;
    }
    case Op::kStore:
      Claim(state, move.thread, op.word, move.thread);
      Append(state, move.thread, op, op.value, nullptr);
      break;
    case Op::kAdd: {
      Claim(state, move.thread, op.word, kAdders);
      const Entry newest = state->words[op.word].back();
      value = newest.value;
      if (Acquires(op.order)) Join(&thread.view, newest.view);
      Append(state, move.thread, op, static_cast<uint32_t>(newest.value + op.value), &newest.view);
      break;
    }
    case Op::kFutexWait: {
      const std::vector<Entry>& entries = state->words[op.word];
      if (entries.back().value == op.value) {
        thread.status = Status::kAsleep;
        return Forget(state);
      }
      thread.view[op.word] = static_cast<uint8_t>(entries.size() - 1);
      break;
    }
    case Op::kFutexWake:
      for (size_t i = 0; i < state->threads.size(); ++i) {
        Thread& sleeper = state->threads[i];
        if (sleeper.status != Status::kAsleep || sleeper.next.word != op.word) continue;
        sleeper.log.push_back(1);
        Advance(state, i);
      }
      break;
    case Op::kSignal:
      state->events[op.word] = true;
      break;
    case Op::kAwait:
      state->events[op.word] = false;
      break;
    case Op::kChoose:
      value = move.choice;
      break;
  }
  thread.log.push_back(value);
  if (state->violation.empty()) Advance(state, move.thread);
  Forget(state);
}

// Drops what no thread can see any more and counts anew, so that equal futures are equal states.
void WeakMemory::Forget(State* state) const {
  View first;
  for (size_t w = 0; w < word_names_.size(); ++w) {
    auto newest = static_cast<uint8_t>(state->words[w].size() - 1);
    first[w] = newest;
    for (Thread& thread : state->threads) {
      if (thread.status == Status::kFinished) thread.view[w] = newest;
      first[w] = std::min(first[w], thread.view[w]);
    }
  }
  const auto shift = [&](View* view) {
    for (size_t w = 0; w < word_names_.size(); ++w)
      (*view)[w] = static_cast<uint8_t>(std::max((*view)[w], first[w]) - first[w]);
  };
  for (size_t w = 0; w < word_names_.size(); ++w) {
    std::vector<Entry>& entries = state->words[w];
    entries.erase(entries.begin(), entries.begin() + first[w]);
    for (Entry& entry : entries) shift(&entry.view);
  }
  for (Thread& thread : state->threads) shift(&thread.view);
  shift(&state->newest_sc);
}

WeakMemory::Digest WeakMemory::Key(const State& state) const {
  Digest digest = {1, 2};
  const auto add_view = [&](const View& view) {
    for (size_t w = 0; w < word_names_.size(); ++w) digest = Mix(digest, view[w]);
  };
  for (size_t w = 0; w < word_names_.size(); ++w) {
    digest = Mix(digest, state.words[w].size());
    for (const Entry& entry : state.words[w]) {
      digest = Mix(digest, entry.value);
      add_view(entry.view);
    }
  }
  add_view(state.newest_sc);
  for (const bool event : state.events) digest = Mix(digest, event);
  for (const Thread& thread : state.threads) {
    digest = Mix(Mix(digest, thread.digest.first), thread.digest.second);
    digest = Mix(digest, static_cast<uint64_t>(thread.status));
    add_view(thread.view);
  }
  return digest;
}

std::string WeakMemory::Tell(const State& before, const State& after, const Move& move) const {
  const Op& op = before.threads[move.thread].next;
  const std::vector<uint64_t>& log = after.threads[move.thread].log;
  const std::string value = log.empty() ? "" : std::to_string(log.back());
  const std::string name = op.kind < Op::kSignal ? word_names_[op.word] : std::to_string(op.word);
  static const char* const kOrders[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};
  const std::string order = std::string(" (") + kOrders[static_cast<int>(op.order)] + ")";
  std::string text = "  " + thread_names_[move.thread] + ": ";
  switch (op.kind) {
    case Op::kLoad:
      return text + "load " + name + " = " + value + order;
    case Op::kStore:
      return text + "store " + name + " = " + std::to_string(op.value) + order;
    case Op::kAdd:
      return text + "add " + std::to_string(static_cast<int32_t>(op.value)) + " to " + name + ", was " + value + order;
    case Op::kFutexWait:
      return text + "futex wait while " + name + " = " + std::to_string(op.value);
    case Op::kFutexWake:
      return text + "futex wake of " + name;
    case Op::kSignal:
      return text + "signal event " + name;
    case Op::kAwait:
      return text + "event " + name + " has come";
    case Op::kChoose:
      return text + "choose " + value;
  }
  return text;
}

std::string WeakMemory::Stuck(const State& state) const {
  std::string text = "nobody wakes";
  for (size_t i = 0; i < state.threads.size(); ++i) {
    if (state.threads[i].status != Status::kFinished) text += " " + thread_names_[i];
  }
  return text;
}

WeakMemory::Result WeakMemory::Explore(uint64_t most_states) {
  Result result;
  State start;
  start.writers.fill(kNobody);
  start.events.resize(events_);
  start.threads.resize(bodies_.size());
  for (size_t w = 0; w < word_names_.size(); ++w) start.words[w].push_back({start_values_[w], {}});
  for (size_t i = 0; i < bodies_.size(); ++i) Advance(&start, i);
  std::unordered_set<Digest, DigestHash> seen = {Key(start)};
  std::vector<Frame> stack;
  const auto enter = [&](State state) {
    ++result.states;
    std::vector<Move> moves = state.violation.empty() ? Moves(state) : std::vector<Move>();
    if (moves.empty() && state.violation.empty()) {
      std::vector<uint64_t> outcome;
      bool finished = true;
      for (const Thread& thread : state.threads) {
        finished = finished && thread.status == Status::kFinished;
        outcome.push_back(thread.result);
      }
      if (finished) result.outcomes.insert(outcome);
      if (!finished) state.violation = Stuck(state);
    }
    stack.push_back({std::move(state), std::move(moves), 0});
  };
  enter(std::move(start));
  while (!stack.empty()) {
    Frame& frame = stack.back();
    if (!frame.state.violation.empty()) {
      result.violation = frame.state.violation + ", after\n";
      for (size_t i = 0; i + 1 < stack.size(); ++i)
        result.violation += Tell(stack[i].state, stack[i + 1].state, stack[i].moves[stack[i].next - 1]) + "\n";
      return result;
    }
    if (frame.next == frame.moves.size()) {
      stack.pop_back();
      continue;
    }
    if (result.states >= most_states) return result;
    State after = frame.state;
    Apply(&after, frame.moves[frame.next++]);
    if (seen.insert(Key(after)).second || !after.violation.empty()) enter(std::move(after));
  }
  result.complete = true;
  return result;
}

}  // namespace mlpo::test
