// Expandable segments of the simulated allocator: ranges of addresses that it maps page by page.
#include <algorithm>

#include "allocator_pools.hpp"

namespace zeroplan::allocator {

Block* Allocator::grow_range(Pool& pool, i64 size) {
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

Block* Allocator::find_range(Pool& pool, i64 size) {
  for (Block* block : pool.unmapped) {
    Block* start = block->prev != nullptr && block->prev->is_free() ? block->prev : block;
    i64 room = 0;
    for (const Block* at = start; at != nullptr && at->is_free() && room < size; at = at->next) room += at->size;
    if (room >= size) return start;
  }
  // Without a limit a request may be larger than the device.
  const i64 room = round_up(std::max(config_.device_memory + config_.device_memory / 8, size), pool.page);
  Block* block = make(next_range_, room, &pool, nullptr, nullptr, next_range_);
  block->mapped = false;
  next_range_ += room;
  pool.unmapped.insert(block);
  return block;
}

bool Allocator::map(Block* block, i64 size) {
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

void Allocator::unmap(Block* block) {
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

}  // namespace zeroplan::allocator
