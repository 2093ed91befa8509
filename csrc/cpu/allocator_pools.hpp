// The simulated allocator's pools: finds the best fit for a request, splits blocks and merges them. The rules are those of
// zeroplan/simulate/allocator/rules.py and segments.py. A header, so that the compiler inlines it into the event loop: calls
// would cost 5 % of the loop's speed.
#pragma once
#include <algorithm>
#include <iterator>
#include <utility>

#include "allocator.hpp"

namespace zeroplan::allocator {

inline Status Allocator::alloc(i64 requested, i64 stream) {
  if (requested < 0) return kBadRequest;
  if (!ready_.empty()) process_events(false);
  const i64 handle = made_++;
  blocks_.push_back(nullptr);
  states_.push_back(kNoBlock);
  if (requested == 0) return kDone;
  const i64 size = round_size(requested, config_.divisions);
  Pool& pool = pool_of(size <= kSmallSize, stream);
  const i64 segment = pool.small             ? kSmallSegment
                      : size < kMinLargeAlloc ? config_.large_segment
                                              : round_up(size, kRoundLarge);
  Block* block = best_fit(pool, size);
  if (block == nullptr) {
    if (config_.collect_above != kUnlimited) collect_garbage();
    block = grow(pool, size, segment);
    if (block == nullptr && release_oversize(pool, size)) block = grow(pool, size, segment);
    if (block == nullptr) {
      release_all();
      ++retries_;
      block = grow(pool, size, segment);
    }
    if (block == nullptr) {
      failed_segment_ = segment;
      return kOutOfMemory;
    }
  }
  hand_out(block, size, requested, handle);
  return kDone;
}

inline Pool& Allocator::pool_of(bool small, i64 stream) {
  // A map never moves its nodes, so pointers to the pools of the first streams are kept.
  const bool near = stream >= 0 && stream < kNearStreams;
  if (near && near_[small][stream] != nullptr) return *near_[small][stream];
  const auto key = std::make_pair(small, stream);
  auto found = pools_.find(key);
  if (found == pools_.end())
    found = pools_.emplace(key, Pool{small, stream, small ? kSmallSegment : config_.large_segment, {}, {}}).first;
  if (near) near_[small][stream] = &found->second;
  return found->second;
}

inline Block* Allocator::best_fit(Pool& pool, i64 size) {
  ++searches_[pool.small];
  auto at = pool.cached.lower_bound(size);
  if (at == pool.cached.end()) return nullptr;
  Block* block = pool.cached[at].block;
  if (block->range_base >= 0) {
    for (auto following = pool.cached.after(at); !(following == pool.cached.end()); following = pool.cached.after(following)) {
      Block* next = pool.cached[following].block;
      if (growable(next) >= growable(block)) break;
      at = following;
      block = next;
    }
  }
  const i64 most = config_.max_split_size;
  if (size < most && block->size >= most) return nullptr;
  if (size >= most && block->size >= size + config_.max_non_split_rounding) return nullptr;
  pool.cached.erase(at);
  return block;
}

inline void Allocator::hand_out(Block* block, i64 size, i64 requested, i64 handle) {
  Pool* pool = block->pool;
  const i64 rest = block->size - size;
  const bool split = pool->small || config_.expandable ? rest >= kMinBlock
                                                       : size < config_.max_split_size && rest > kSmallSize;
  if (split) {
    Block* tail = make(block->address + size, rest, pool, block, block->next, block->range_base);
    if (block->next != nullptr) block->next->prev = tail;
    block->next = tail;
    block->size = size;
    cache(tail);
  }
  block->allocated = true;
  block->requested = requested;
  block->handle = handle;
  blocks_[handle] = block;
  states_[handle] = kLive;
  block_sizes_[handle] = block->size;
  allocated_ += block->size;
  active_ += block->size;
  requested_ += requested;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  if (allocated_ > top_allocated_) {
    top_allocated_ = allocated_;
    top_event_ = event_;
  }
}

inline void Allocator::record_stream(Block* block, i64 stream) {
  auto& streams = block->streams;
  if (stream != block->pool->stream && std::find(streams.begin(), streams.end(), stream) == streams.end())
    streams.push_back(stream);
}

inline void Allocator::free(Block* block) {
  block->allocated = false;
  allocated_ -= block->size;
  if (block->streams.empty()) {
    reclaim(block);
    return;
  }
  for (const i64 stream : block->streams) pending_[stream].emplace_back(block->handle, block);
  block->pending = static_cast<int>(block->streams.size());
  block->streams.clear();
  states_[block->handle] = kDeferred;
}

inline void Allocator::reclaim(Block* block) {
  states_[block->handle] = kGone;
  block->pending = 0;
  active_ -= block->size;
  requested_ -= block->requested;
  merge(block, block->prev);
  merge(block, block->next);
  cache(block);
}

inline void Allocator::merge(Block* block, Block* other) {
  if (other == nullptr || !other->is_free() || other->mapped != block->mapped) return;
  if (other->mapped)
    other->pool->cached.erase(other);
  else
    other->pool->unmapped.erase(other);
  if (block->prev == other) {
    block->address = other->address;
    block->prev = other->prev;
    if (block->prev != nullptr) block->prev->next = block;
  } else {
    block->next = other->next;
    if (block->next != nullptr) block->next->prev = block;
  }
  block->size += other->size;
  spare_.push_back(other);
}

}  // namespace zeroplan::allocator
