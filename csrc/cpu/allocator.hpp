// Simulates the CUDA caching allocator: the compiled twin of zeroplan/simulate/allocator/python_twin.py, equal to it event by
// event. Note [Caching allocator] in segments.py of that folder states the rules, Note [Event columns] in its events.py the
// columns.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "allocator_addresses.hpp"

namespace zeroplan::allocator {

class Allocator {
 public:
  Allocator(const Config& config, const i64* addresses, i64 address_count, i64* block_sizes, Totals* marks,
            SegmentChange* segments, i64 segment_capacity)
      : config_(config), addresses_(addresses, address_count), block_sizes_(block_sizes), marks_(marks),
        segments_(segments), segment_capacity_(segment_capacity) {}

  // Runs the events of both columns. Stops at the first impossible one.
  void run(const i64* code, const i64* value, i64 count, Summary& summary);

  i64 changes() const { return changes_; }

 private:
  // Events: allocator_events.cpp.
  Status handle(int op, i64 stream, i64 operand);
  bool known(i64 handle) const { return handle >= 0 && handle < made_; }
  Totals totals() const;
  void process_events(bool everything);

  // Finding, splitting and merging blocks: allocator_pools.hpp.
  Status alloc(i64 requested, i64 stream);
  Pool& pool_of(bool small, i64 stream);
  Block* best_fit(Pool& pool, i64 size);
  void hand_out(Block* block, i64 size, i64 requested, i64 handle);
  void record_stream(Block* block, i64 stream);
  void free(Block* block);
  void reclaim(Block* block);
  void merge(Block* block, Block* other);

  // Segments: allocator_segments.cpp.
  Block* grow(Pool& pool, i64 size, i64 segment);
  void release(Block* block);
  void release_all();
  bool release_oversize(Pool& pool, i64 size);
  void collect_garbage();

  // Expandable segments: allocator_ranges.cpp.
  Block* grow_range(Pool& pool, i64 size);
  Block* find_range(Pool& pool, i64 size);
  bool map(Block* block, i64 size);
  void unmap(Block* block);

  // `arena_` owns the blocks, which are reused.
  Block* make(i64 address, i64 size, Pool* pool, Block* prev, Block* next, i64 range_base) {
    Block* block;
    if (spare_.empty()) {
      arena_.emplace_back();
      block = &arena_.back();
    } else {
      block = spare_.back();
      spare_.pop_back();
      *block = Block();
    }
    block->address = address;
    block->size = size;
    block->pool = pool;
    block->prev = prev;
    block->next = next;
    block->range_base = range_base;
    return block;
  }

  // Puts a free block into its pool. From here on each search makes it one older.
  void cache(Block* block) {
    block->age_base = searches_[block->pool->small];
    block->pool->cached.insert(block);
  }

  // Notes that the device gave or took memory: a segment, or a mapped part of a range.
  void note(i64 size, i64 address) {
    reserved_ += size;
    if (changes_ < segment_capacity_) segments_[changes_] = {event_, size, address};
    ++changes_;
    peak_reserved_ = std::max(peak_reserved_, reserved_);
    top_reserved_ = std::max(top_reserved_, reserved_);
  }

  const Config config_;
  Addresses addresses_;
  i64* block_sizes_;
  Totals* marks_;
  SegmentChange* segments_;
  const i64 segment_capacity_;

  static constexpr i64 kNearStreams = 4;
  std::map<std::pair<bool, i64>, Pool> pools_;
  Pool* near_[2][kNearStreams] = {};
  std::deque<Block> arena_;
  std::vector<Block*> spare_;
  std::vector<Block*> blocks_;  // by handle
  std::vector<State> states_;   // by handle
  std::map<i64, std::deque<std::pair<i64, Block*>>> pending_;
  std::map<i64, i64> ready_;
  i64 searches_[2] = {0, 0};
  i64 next_range_ = kFirstRange;
  i64 event_ = 0, retries_ = 0, made_ = 0, marked_ = 0, changes_ = 0, failed_segment_ = 0;
  i64 allocated_ = 0, reserved_ = 0, requested_ = 0, active_ = 0;
  i64 peak_allocated_ = 0, peak_reserved_ = 0;
  i64 top_allocated_ = 0, top_event_ = -1, top_reserved_ = 0;
};

}  // namespace zeroplan::allocator
