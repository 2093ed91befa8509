// Runs the simulated allocator's events one by one: requests, frees and marks.
#include <algorithm>

#include "allocator_pools.hpp"

namespace zeroplan::allocator {

void Allocator::run(const i64* code, const i64* value, i64 count, Summary& summary) {
  Status status = kDone;
  i64 operand = 0;
  blocks_.reserve(count / 2 + 1);
  states_.reserve(count / 2 + 1);
  for (event_ = 0; event_ < count && status == kDone; ++event_) {
    operand = value[event_];
    status = handle(static_cast<int>(code[event_] & ((1 << kOpBits) - 1)), code[event_] >> kOpBits, operand);
  }
  if (status != kDone) --event_;
  if (status == kUnknownOp) operand = code[event_] & ((1 << kOpBits) - 1);
  summary = {status,   event_, operand, failed_segment_, top_allocated_, top_event_, top_reserved_,
             retries_, made_,  marked_, totals()};
}

Status Allocator::handle(int op, i64 stream, i64 operand) {
  switch (op) {
    case kAlloc:
      return alloc(operand, stream);
    case kFree: {
      if (!known(operand)) return kNotLive;
      if (states_[operand] == kNoBlock) return kDone;
      if (states_[operand] != kLive) return kNotLive;
      free(blocks_[operand]);
      return kDone;
    }
    case kRecordStream: {
      if (!known(operand)) return kNotLive;
      if (states_[operand] == kNoBlock) return kDone;
      if (states_[operand] != kLive) return kNotLive;
      record_stream(blocks_[operand], stream);
      return kDone;
    }
    case kSync: {
      const auto found = pending_.find(stream);
      ready_[stream] = found == pending_.end() ? 0 : static_cast<i64>(found->second.size());
      return kDone;
    }
    case kComplete: {
      if (!known(operand)) return kNotDeferred;
      if (states_[operand] == kNoBlock || states_[operand] == kSettled) return kDone;
      if (states_[operand] != kDeferred) return kNotDeferred;
      reclaim(blocks_[operand]);
      return kDone;
    }
    case kEmptyCache:
      release_all();
      return kDone;
    case kMark:
      marks_[marked_++] = totals();
      peak_allocated_ = allocated_;
      peak_reserved_ = reserved_;
      return kDone;
    default:
      return kUnknownOp;
  }
}

Totals Allocator::totals() const {
  i64 largest = 0;
  for (const auto& [key, pool] : pools_) largest = std::max(largest, pool.cached.largest());
  return {event_, allocated_, peak_allocated_, reserved_, peak_reserved_, requested_, active_, largest};
}

void Allocator::process_events(bool everything) {
  for (auto& [stream, waiting] : pending_) {
    i64 count = static_cast<i64>(waiting.size());
    if (!everything) {
      const auto found = ready_.find(stream);
      count = found == ready_.end() ? 0 : found->second;
    }
    for (; count > 0; --count) {
      const auto [handle, block] = waiting.front();
      waiting.pop_front();
      if (states_[handle] != kDeferred || --block->pending != 0) continue;
      reclaim(block);
      if (everything) states_[handle] = kSettled;
    }
  }
  ready_.clear();
}

}  // namespace zeroplan::allocator
