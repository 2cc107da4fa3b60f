#include "maxdiffusion/mesh/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"

namespace md {
namespace {

/// Index in `shard` of an element of the whole array.
int64_t index_in(const Slice& shard, const std::vector<int64_t>& element) {
  int64_t index = 0;
  for (size_t d = 0; d < shard.size.size(); ++d) index = index * shard.size[d] + element[d] - shard.start[d];
  return index;
}

/// The first dim of those that a contiguous run of `s` spans completely in all of `holders`.
size_t first_dim_of_run(const Slice& s, std::initializer_list<const Slice*> holders) {
  size_t d = s.size.size();
  while (d > 0) {
    --d;
    if (std::any_of(holders.begin(), holders.end(), [&](const Slice* h) { return h->size[d] != s.size[d]; })) break;
  }
  return d;
}

int64_t elements_from(const Slice& s, size_t dim) {
  return std::accumulate(s.size.begin() + static_cast<std::ptrdiff_t>(dim), s.size.end(), int64_t{1},
                         std::multiplies<>());
}

/// Calls act(first element, count) for each range of `part` that is contiguous in all of `holders`.
template <class Act>
void walk(const Slice& part, std::initializer_list<const Slice*> holders, Act&& act) {
  const size_t run_dim = first_dim_of_run(part, holders);
  const int64_t run = elements_from(part, run_dim), runs = run == 0 ? 0 : part.elements() / run;
  std::vector<int64_t> at = part.start;
  for (int64_t r = 0; r < runs; ++r) {
    act(at, run);
    for (size_t d = run_dim; d-- > 0;) {
      if (++at[d] < part.start[d] + part.size[d]) break;
      at[d] = part.start[d];
    }
  }
}

/// Copies the elements of `part`, which both slices contain.
void copy_part(const Slice& part, const Shard& from, const Slice& to_slice, std::byte* to) {
  const HostArray values = from.get();
  const size_t element = size_of(values.dtype());
  walk(part, {&from.slice, &to_slice}, [&](const std::vector<int64_t>& at, int64_t run) {
    std::memcpy(to + static_cast<size_t>(index_in(to_slice, at)) * element,
                values.data() + static_cast<size_t>(index_in(from.slice, at)) * element,
                static_cast<size_t>(run) * element);
  });
}

}  // namespace

ShardedArray::ShardedArray(HostArray whole) : shape(whole.shape()) {
  shards.push_back({Slice::all(shape.dims), std::move(whole)});
}

bool ShardedArray::complete() const {
  int64_t present = 0;
  for (const Shard& p : shards) present += p.slice.elements();
  return present == shape.elements() && !shards.empty();
}

HostArray ShardedArray::take(const Slice& slice) {
  const auto shard = std::ranges::find(shards, slice, &Shard::slice);
  if (shard == shards.end()) return read(slice);
  HostArray values = shard->make ? shard->make() : std::move(shard->values);
  shards.erase(shard);
  return values;
}

HostArray ShardedArray::read(const Slice& slice) const {
  const Shape slice_shape{shape.dtype, slice.size};
  check(slice.within(shape.dims), Code::internal, "{} is not a part of {}", to_string(slice), to_string(shape));
  HostArray out;
  int64_t found = 0;
  for (const Shard& p : shards) {
    const auto both = overlap(slice, p.slice);
    if (!both) continue;
    if (*both == slice && elements_from(slice, first_dim_of_run(slice, {&p.slice})) == slice.elements()) {
      const auto offset = static_cast<size_t>(index_in(p.slice, slice.start)) * size_of(shape.dtype);
      HostArray values = p.get();
      return offset == 0 && p.slice == slice ? values : HostArray(slice_shape, values.owner(), values.data() + offset);
    }
    if (!out) out = HostArray(slice_shape);
    copy_part(*both, p, slice, out.mutable_data());
    found += both->elements();
  }
  check(found == slice.elements(), Code::internal, "{} of {}: {} of its {} elements are here", to_string(slice),
        to_string(shape), found, slice.elements());
  return out ? out : HostArray(slice_shape);
}

NamedShards as_shards(HostArrays arrays) {
  NamedShards out;
  for (HostArrays::value_type& a : arrays) out.emplace(a.first, std::move(a.second));
  return out;
}

HostArrays as_arrays(const NamedShards& shards) {
  HostArrays out;
  for (const auto& [name, a] : shards) out[name] = a.whole();
  return out;
}

std::optional<Slice> overlap(const Slice& a, const Slice& b) {
  Slice both{std::vector<int64_t>(a.size.size()), std::vector<int64_t>(a.size.size())};
  for (size_t d = 0; d < a.size.size(); ++d) {
    both.start[d] = std::max(a.start[d], b.start[d]);
    both.size[d] = std::min(a.start[d] + a.size[d], b.start[d] + b.size[d]) - both.start[d];
    if (both.size[d] <= 0) return std::nullopt;
  }
  return both;
}

void each_run(const Slice& part, const Slice& holder, const std::function<void(int64_t first, int64_t count)>& run) {
  walk(part, {&holder}, [&](const std::vector<int64_t>& at, int64_t n) { run(index_in(holder, at), n); });
}

std::string tiling_fault(const Dims& dims, const std::vector<Slice>& slices) {
  int64_t present = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const Slice& s = slices[i];
    if (!s.within(dims)) return fmt::format("the shard {} is outside {}", to_string(s), to_string(dims));
    for (size_t k = 0; k < i; ++k)
      if (overlap(s, slices[k])) return fmt::format("the shards {} and {} overlap", to_string(slices[k]), to_string(s));
    present += s.elements();
  }
  const int64_t all = Slice::all(dims).elements();
  return present == all ? "" : fmt::format("the shards hold {} of {} elements of {}", present, all, to_string(dims));
}

ShardedArray ShardedArray::cast(DType to) const {
  ShardedArray out({to, shape.dims}, shards);
  if (to == shape.dtype) return out;
  for (Shard& p : out.shards)
    if (p.make)
      p.make = [make = std::move(p.make), to] { return make().cast(to); };
    else
      p.values = p.values.cast(to);
  return out;
}

ShardedArray ShardedArray::zeros() const {
  ShardedArray out(shape, shards);
  for (Shard& p : out.shards)
    p = {p.slice, {}, [made = Shape{shape.dtype, p.slice.size}] {
           HostArray zeros(made);
           std::fill_n(zeros.mutable_data(), zeros.bytes(), std::byte{0});
           return zeros;
         }};
  return out;
}

}  // namespace md
