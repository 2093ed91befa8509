// The CUDA caching allocator, simulated: the compiled twin of zeroplan/simulate/allocator_python.py, equal to it event by
// event. The notes in allocator_segments.py say what the rules are; the columns are those of zeroplan/simulate/allocator_events.py.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "abi.h"

namespace {

using i64 = std::int64_t;

constexpr i64 kUnlimited = INT64_MAX;
constexpr i64 kMinBlock = 512;
constexpr i64 kSmallSize = 1 << 20;
constexpr i64 kSmallSegment = 2 << 20;
constexpr i64 kMinLargeAlloc = 10 << 20;
constexpr i64 kRoundLarge = 2 << 20;
constexpr int kRoundupIntervals = 16;
constexpr int kOpBits = 4;
constexpr i64 kRegion = 32 << 20;
constexpr i64 kRegionsEnd = i64(1) << 48;
constexpr i64 kFirstRange = i64(1) << 50;

enum Op { kAlloc, kFree, kRecordStream, kSync, kComplete, kEmptyCache, kMark, kResetPeak };
enum Status { kDone, kOutOfMemory, kUnknownOp, kBadRequest, kNotLive, kNotDeferred };
enum State : std::uint8_t { kNoBlock, kLive, kDeferred, kGone };

// Mirrors _settings() in zeroplan/simulate/native.py.
struct Config {
  i64 max_split_size, max_non_split_rounding, collect_above, allowed, limit, device_memory, expandable, large_segment;
  i64 divisions[kRoundupIntervals];
};

// Mirrors MarkTotals.
struct Totals {
  i64 event, allocated, peak_allocated, reserved, peak_reserved, requested, active, largest_free;
};

struct SegmentChange {
  i64 event, size, address;
};

// Mirrors _result() in zeroplan/simulate/native.py.
struct Summary {
  i64 status, event, operand, segment, top, top_event, top_reserved, top_reserved_event, retries, made, marked;
  Totals final_totals;
};

struct Pool;

struct Block {
  i64 address, size;
  Pool* pool;
  Block* prev;
  Block* next;
  i64 handle = -1;
  i64 requested = 0;
  i64 age_base = 0;
  i64 range_base = -1;
  int pending = 0;
  bool allocated = false;
  bool mapped = true;
  std::vector<i64> streams;

  bool is_free() const { return !allocated && pending == 0; }
  bool is_split() const { return prev != nullptr || next != nullptr; }
};

struct BySize {
  using is_transparent = void;
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
  bool operator()(const Block* a, i64 size) const { return a->size < size; }
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};

struct Pool {
  bool small;
  i64 stream, page;
  std::set<Block*, BySize> cached;
  std::set<Block*, ByAddress> unmapped;
};

i64 round_up(i64 size, i64 multiple) { return (size + multiple - 1) / multiple * multiple; }

int floor_log2(i64 value) { return 63 - __builtin_clzll(static_cast<unsigned long long>(value)); }

i64 round_size(i64 size, const i64* divisions) {
  if (size < kMinBlock) return kMinBlock;
  const i64 count = divisions[std::min(std::max(floor_log2(size) - 20, 0), kRoundupIntervals - 1)];
  if (count > 0 && size > kMinBlock * count) {
    if (count == 1) return size;
    const i64 step = (i64(1) << floor_log2(size)) >> floor_log2(count);
    return round_up(size, step);
  }
  return round_up(size, kMinBlock);
}

class Addresses {
 public:
  Addresses(const i64* given, i64 count) : given_(given), left_(count) {}

  i64 take(i64 size) {
    if (left_ > 0) {
      --left_;
      return *given_++;
    }
    size = round_up(size, kRoundLarge);
    i64 start;
    auto gap = std::find_if(gaps_.begin(), gaps_.end(),
                            [size](const auto& range) { return range.second - range.first >= size; });
    if (gap != gaps_.end()) {
      start = gap->first;
      const i64 end = gap->second;
      gap = gaps_.erase(gap);
      if (end - start > size) gaps_.emplace_hint(gap, start + size, end);
    } else {
      const i64 end = lowest_;
      start = lowest_ = end - round_up(size, kRegion);
      if (end - start > size) add_gap(start + size, end);
    }
    taken_.emplace(start, size);
    return start;
  }

  void give_back(i64 address) {
    const auto found = taken_.find(address);
    if (found == taken_.end()) return;
    const i64 end = address + found->second;
    taken_.erase(found);
    add_gap(address, end);
  }

 private:
  void add_gap(i64 start, i64 end) {
    auto after = gaps_.lower_bound(start);
    if (after != gaps_.end() && after->first == end) {
      end = after->second;
      after = gaps_.erase(after);
    }
    if (after != gaps_.begin()) {
      const auto before = std::prev(after);
      if (before->second == start) {
        before->second = end;
        return;
      }
    }
    gaps_.emplace_hint(after, start, end);
  }

  const i64* given_;
  i64 left_;
  i64 lowest_ = kRegionsEnd;
  std::map<i64, i64> taken_;  // start: size
  std::map<i64, i64> gaps_;   // start: end
};

i64 growable(const Block* block) {
  return block->size + (block->next != nullptr && !block->next->mapped ? block->next->size : 0);
}

class Allocator {
 public:
  Allocator(const Config& config, const i64* addresses, i64 address_count, i64* block_sizes, Totals* marks,
            SegmentChange* segments, i64 segment_capacity)
      : config_(config), addresses_(addresses, address_count), block_sizes_(block_sizes), marks_(marks),
        segments_(segments), segment_capacity_(segment_capacity) {}

  void run(const i64* code, const i64* value, i64 count, Summary& summary) {
    Status status = kDone;
    i64 operand = 0;
    for (event_ = 0; event_ < count && status == kDone; ++event_) {
      operand = value[event_];
      status = handle(static_cast<int>(code[event_] & ((1 << kOpBits) - 1)), code[event_] >> kOpBits, operand);
    }
    if (status != kDone) --event_;
    if (status == kUnknownOp) operand = code[event_] & ((1 << kOpBits) - 1);
    summary = {status, event_, operand, failed_segment_, top_allocated_, top_event_, top_reserved_,
               top_reserved_event_, retries_, made_, marked_, totals()};
  }

  i64 changes() const { return changes_; }

 private:
  Status handle(int op, i64 stream, i64 operand) {
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
        if (states_[operand] == kNoBlock) return kDone;
        if (states_[operand] != kDeferred) return kNotDeferred;
        reclaim(blocks_[operand]);
        return kDone;
      }
      case kEmptyCache:
        release_all();
        return kDone;
      case kMark:
        marks_[marked_++] = totals();
        [[fallthrough]];
      case kResetPeak:
        peak_allocated_ = allocated_;
        peak_reserved_ = reserved_;
        return kDone;
      default:
        return kUnknownOp;
    }
  }

  bool known(i64 handle) const { return handle >= 0 && handle < made_; }

  Totals totals() const {
    i64 largest = 0;
    for (const auto& [key, pool] : pools_)
      if (!pool.cached.empty()) largest = std::max(largest, (*pool.cached.rbegin())->size);
    return {event_, allocated_, peak_allocated_, reserved_, peak_reserved_, requested_, active_, largest};
  }

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

  // Allocating

  Status alloc(i64 requested, i64 stream) {
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

  Pool& pool_of(bool small, i64 stream) {
    const auto key = std::make_pair(small, stream);
    auto found = pools_.find(key);
    if (found == pools_.end())
      found = pools_.emplace(key, Pool{small, stream, small ? kSmallSegment : config_.large_segment, {}, {}}).first;
    return found->second;
  }

  Block* best_fit(Pool& pool, i64 size) {
    ++searches_[pool.small];
    auto at = pool.cached.lower_bound(size);
    if (at == pool.cached.end()) return nullptr;
    if ((*at)->range_base >= 0) {
      for (auto following = std::next(at);
           following != pool.cached.end() && growable(*following) < growable(*at); ++following)
        at = following;
    }
    Block* block = *at;
    const i64 most = config_.max_split_size;
    if (size < most && block->size >= most) return nullptr;
    if (size >= most && block->size >= size + config_.max_non_split_rounding) return nullptr;
    pool.cached.erase(at);
    return block;
  }

  void hand_out(Block* block, i64 size, i64 requested, i64 handle) {
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

  void cache(Block* block) {
    block->age_base = searches_[block->pool->small];
    block->pool->cached.insert(block);
  }

  // Freeing

  void record_stream(Block* block, i64 stream) {
    auto& streams = block->streams;
    if (stream != block->pool->stream && std::find(streams.begin(), streams.end(), stream) == streams.end())
      streams.push_back(stream);
  }

  void free(Block* block) {
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

  void reclaim(Block* block) {
    states_[block->handle] = kGone;
    block->pending = 0;
    active_ -= block->size;
    requested_ -= block->requested;
    merge(block, block->prev);
    merge(block, block->next);
    cache(block);
  }

  void merge(Block* block, Block* other) {
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

  void process_events(bool everything) {
    for (auto& [stream, waiting] : pending_) {
      i64 count = static_cast<i64>(waiting.size());
      if (!everything) {
        const auto found = ready_.find(stream);
        count = found == ready_.end() ? 0 : found->second;
      }
      for (; count > 0; --count) {
        const auto [handle, block] = waiting.front();
        waiting.pop_front();
        if (states_[handle] == kDeferred && --block->pending == 0) reclaim(block);
      }
    }
    ready_.clear();
  }

  // Segments

  void note(i64 size, i64 address) {
    reserved_ += size;
    if (changes_ < segment_capacity_) segments_[changes_] = {event_, size, address};
    ++changes_;
    peak_reserved_ = std::max(peak_reserved_, reserved_);
    if (reserved_ > top_reserved_) {
      top_reserved_ = reserved_;
      top_reserved_event_ = event_;
    }
  }

  Block* grow(Pool& pool, i64 size, i64 segment) {
    if (segment > config_.allowed - reserved_) return nullptr;
    if (config_.expandable) return grow_range(pool, size);
    if (segment > config_.limit - reserved_) return nullptr;
    Block* block = make(addresses_.take(segment), segment, &pool, nullptr, nullptr, -1);
    note(segment, block->address);
    return block;
  }

  void release(Block* block) {
    block->pool->cached.erase(block);
    addresses_.give_back(block->address);
    note(-block->size, block->address);
    spare_.push_back(block);
  }

  void release_all() {
    process_events(true);
    for (const bool small : {false, true}) {
      for (auto& [key, pool] : pools_) {
        if (key.first != small) continue;
        const std::vector<Block*> blocks(pool.cached.begin(), pool.cached.end());
        for (Block* block : blocks) {
          if (block->range_base >= 0)
            unmap(block);
          else if (!block->is_split())
            release(block);
        }
      }
    }
  }

  bool release_oversize(Pool& pool, i64 size) {
    const i64 most = config_.max_split_size;
    if (most == kUnlimited) return false;
    size = std::max(size, most);
    auto at = pool.cached.lower_bound(size);
    if (at != pool.cached.end() && (*at)->range_base < 0) {
      release(*at);
      return true;
    }
    const std::vector<Block*> smaller(pool.cached.begin(), at);
    i64 released = 0;
    for (auto block = smaller.rbegin(); block != smaller.rend(); ++block) {
      if (released >= size || (*block)->size < most) break;
      if ((*block)->range_base < 0) {
        released += (*block)->size;
        release(*block);
      }
    }
    return released >= size;
  }

  void collect_garbage() {
    if (reserved_ <= config_.collect_above) return;
    const i64 target = reserved_ - config_.collect_above;
    std::vector<std::pair<i64, Block*>> old;
    for (auto& [key, pool] : pools_)
      if (!key.first)
        for (Block* block : pool.cached)
          if (!block->is_split()) old.emplace_back(searches_[false] - block->age_base, block);
    i64 freed = 0;
    while (!old.empty() && freed < target) {
      i64 total = 0;
      for (const auto& entry : old) total += entry.first;
      const double average = static_cast<double>(total) / static_cast<double>(old.size());
      std::vector<std::pair<i64, Block*>> young;
      for (const auto& [age, block] : old) {
        if (static_cast<double>(age) >= average) {
          freed += block->size;
          release(block);
        } else {
          young.emplace_back(age, block);
        }
      }
      old = std::move(young);
    }
  }

  // Expandable segments

  Block* grow_range(Pool& pool, i64 size) {
    Block* block = find_range(pool, size);
    if (!block->mapped && !map(block, std::min(block->size, size))) return nullptr;
    while (block->size < size) {
      Block* following = block->next;
      if (!map(following, std::min(size - block->size, following->size))) return nullptr;
      block = following;
    }
    pool.cached.erase(block);
    return block;
  }

  Block* find_range(Pool& pool, i64 size) {
    for (Block* block : pool.unmapped) {
      Block* start = block->prev != nullptr && block->prev->is_free() ? block->prev : block;
      i64 room = 0;
      for (const Block* at = start; at != nullptr && at->is_free() && room < size; at = at->next) room += at->size;
      if (room >= size) return start;
    }
    const i64 room = round_up(config_.device_memory + config_.device_memory / 8, pool.page);
    Block* block = make(next_range_, room, &pool, nullptr, nullptr, next_range_);
    block->mapped = false;
    next_range_ += room;
    pool.unmapped.insert(block);
    return block;
  }

  bool map(Block* block, i64 size) {
    Pool* pool = block->pool;
    size = round_up(size, pool->page);
    if (size > config_.limit - reserved_) return false;
    pool->unmapped.erase(block);
    const i64 start = block->address;
    block->mapped = true;
    if (size < block->size) {
      Block* tail = make(start + size, block->size - size, pool, block, block->next, block->range_base);
      tail->mapped = false;
      if (block->next != nullptr) block->next->prev = tail;
      block->next = tail;
      pool->unmapped.insert(tail);
      block->size = size;
    }
    merge(block, block->prev);
    merge(block, block->next);
    cache(block);
    note(size, start);
    return true;
  }

  void unmap(Block* block) {
    Pool* pool = block->pool;
    const i64 base = block->range_base, finish = block->address + block->size;
    const i64 start = base + round_up(block->address - base, pool->page);
    const i64 end = base + (finish - base) / pool->page * pool->page;
    if (start >= end) return;
    pool->cached.erase(block);
    if (start > block->address) {
      Block* head = make(block->address, start - block->address, pool, block->prev, block, base);
      if (block->prev != nullptr) block->prev->next = head;
      block->prev = head;
      cache(head);
    }
    if (finish > end) {
      Block* tail = make(end, finish - end, pool, block, block->next, base);
      if (block->next != nullptr) block->next->prev = tail;
      block->next = tail;
      cache(tail);
    }
    block->address = start;
    block->size = end - start;
    block->mapped = false;
    merge(block, block->prev);
    merge(block, block->next);
    if (block->is_split())
      pool->unmapped.insert(block);
    else
      spare_.push_back(block);
    note(start - end, start);
  }

  const Config config_;
  Addresses addresses_;
  i64* block_sizes_;
  Totals* marks_;
  SegmentChange* segments_;
  const i64 segment_capacity_;

  std::map<std::pair<bool, i64>, Pool> pools_;
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
  i64 top_allocated_ = 0, top_event_ = -1, top_reserved_ = 0, top_reserved_event_ = -1;
};

}  // namespace

// Counts what zeroplan_allocator_run will fill: counts[0] handles, counts[1] marks.
ZEROPLAN_API void zeroplan_allocator_count(const i64* code, i64 events, i64* counts) {
  i64 allocs = 0, marks = 0;
  for (i64 at = 0; at < events; ++at) {
    const i64 op = code[at] & ((1 << kOpBits) - 1);
    allocs += op == kAlloc;
    marks += op == kMark;
  }
  counts[0] = allocs;
  counts[1] = marks;
}

// Runs a stream of events. Returns how many changes of segments there were, of which the first `segment_capacity` are in
// `segments`, or -1 if this machine's own memory did not suffice.
ZEROPLAN_API i64 zeroplan_allocator_run(const i64* config, const i64* code, const i64* value, i64 events,
                                        const i64* addresses, i64 address_count, i64* block_sizes, i64* marks,
                                        i64* segments, i64 segment_capacity, i64* summary) {
  try {
    Allocator allocator(*reinterpret_cast<const Config*>(config), addresses, address_count, block_sizes,
                        reinterpret_cast<Totals*>(marks), reinterpret_cast<SegmentChange*>(segments), segment_capacity);
    allocator.run(code, value, events, *reinterpret_cast<Summary*>(summary));
    return allocator.changes();
  } catch (...) {
    return -1;
  }
}
