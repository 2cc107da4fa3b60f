// Shared by kernels over lists of arrays: addresses, elements as float, and chunks of work for threads.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "maxdiffusion/base/half.h"

namespace md {

namespace ffi = xla::ffi;

inline float load(float v) { return v; }
inline float load(uint16_t v) { return std::bit_cast<float>(uint32_t{v} << 16); }  // bf16
inline void store(float& to, float v) { to = v; }
inline void store(uint16_t& to, float v) { to = float_to_bf16(v); }

struct Chunk {
  size_t array;
  int64_t start, size;
};

/// Splits arrays into chunks; one array's part of a chunk is a quarter of a second-level cache.
inline std::vector<Chunk> chunks_of(const std::vector<int64_t>& sizes) {
  constexpr int64_t kChunk = 1 << 16;  // elements
  std::vector<Chunk> chunks;
  for (size_t a = 0; a < sizes.size(); ++a)
    for (int64_t at = 0; at < sizes[a]; at += kChunk) chunks.push_back({a, at, std::min(kChunk, sizes[a] - at)});
  return chunks;
}

/// Addresses and sizes of consecutive operands.
struct Arrays {
  std::vector<void*> data;
  std::vector<int64_t> sizes;
};
inline ffi::ErrorOr<Arrays> arrays_of(const ffi::RemainingArgs& args, size_t from, size_t count) {
  Arrays out;
  for (size_t i = from; i < from + count; ++i) {
    auto in = args.get<ffi::AnyBuffer>(i);
    if (in.has_error()) return ffi::Unexpected(in.error());
    out.data.push_back(in->untyped_data());
    out.sizes.push_back(static_cast<int64_t>(in->element_count()));
  }
  return out;
}

/// Points `arrays` at the memory of the results, copying an array there unless its operand and result share memory.
inline ffi::Error move_to_results(Arrays& arrays, const ffi::RemainingRets& rets, size_t from) {
  for (size_t i = 0; i < arrays.data.size(); ++i) {
    auto to = rets.get<ffi::AnyBuffer>(from + i);
    if (to.has_error()) return to.error();
    if (const void* old = std::exchange(arrays.data[i], (*to)->untyped_data()); old != arrays.data[i])
      std::memcpy(arrays.data[i], old, (*to)->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace md
