// Segments of the simulated allocator: takes them from the device, returns them when it runs out, and collects old ones.
#include <algorithm>
#include <utility>
#include <vector>

#include "allocator.hpp"

namespace zeroplan::allocator {

Block* Allocator::grow(Pool& pool, i64 size, i64 segment) {
  if (segment > config_.allowed - reserved_) return nullptr;
  if (config_.expandable) return grow_range(pool, size);
  if (segment > config_.limit - reserved_) return nullptr;
  Block* block = make(addresses_.take(segment), segment, &pool, nullptr, nullptr, -1);
  note(segment, block->address);
  return block;
}

void Allocator::release(Block* block) {
  block->pool->cached.erase(block);
  addresses_.give_back(block->address);
  note(-block->size, block->address);
  spare_.push_back(block);
}

void Allocator::release_all() {
  process_events(true);
  for (const bool small : {false, true}) {
    for (auto& [key, pool] : pools_) {
      if (key.first != small) continue;
      for (const auto& [size, address, block] : pool.cached.rows()) {
        if (block->range_base >= 0)
          unmap(block);
        else if (!block->is_split())
          release(block);
      }
    }
  }
}

bool Allocator::release_oversize(Pool& pool, i64 size) {
  const i64 most = config_.max_split_size;
  if (most == kUnlimited) return false;
  size = std::max(size, most);
  const auto at = pool.cached.lower_bound(size);
  if (!(at == pool.cached.end()) && pool.cached[at].block->range_base < 0) {
    release(pool.cached[at].block);
    return true;
  }
  const auto rows = pool.cached.rows();
  i64 released = 0;
  for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
    if (row->size >= size) continue;
    if (released >= size || row->size < most) break;
    if (row->block->range_base < 0) {
      released += row->size;
      release(row->block);
    }
  }
  return released >= size;
}

void Allocator::collect_garbage() {
  if (reserved_ <= config_.collect_above) return;
  const i64 target = reserved_ - config_.collect_above;
  std::vector<std::pair<i64, Block*>> old;
  for (auto& [key, pool] : pools_)
    if (!key.first)
      for (const auto& row : pool.cached.rows())
        if (!row.block->is_split()) old.emplace_back(searches_[false] - row.block->age_base, row.block);
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

}  // namespace zeroplan::allocator
