// The only code that moves data between host and devices. A shard is a strided window of the host array, so the host
// does not split arrays before a transfer. On the way back each distinct shard is copied once, from one device that has
// it. Axes that a device stores in another order are transposed by the plugin on the way to the device and by this file
// on the way back, because not every plugin supports a requested layout.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {
namespace {

std::vector<int64_t> dense_strides(const Shape& shape) {
  std::vector<int64_t> strides(shape.dims.size());
  auto step = static_cast<int64_t>(size_of(shape.dtype));
  for (size_t i = strides.size(); i-- > 0;) {
    strides[i] = step;
    step *= shape.dims[i];
  }
  return strides;
}

int64_t offset_of(const Slice& slice, const std::vector<int64_t>& strides) {
  int64_t offset = 0;
  for (size_t i = 0; i < strides.size(); ++i) offset += slice.start[i] * strides[i];
  return offset;
}

/// Bytes of a shard in host memory; empty strides: dense. `zero_copy`: sole owner.
struct Source {
  const std::byte* data;
  std::vector<int64_t> strides;
  std::shared_ptr<const void> owner;
  bool zero_copy = false;
};

/// `source` is called once for each distinct slice of this process.
Array put_shards(const Devices& devices, const Shape& shape, const Sharding& sharding, const std::string& name,
                 const std::function<Source(const Slice&)>& source) {
  check(sharding.dims.size() <= shape.dims.size(), Code::invalid_config, "{}: sharding of {} dims for {}", name,
        sharding.dims.size(), to_string(shape));
  std::vector<std::pair<Slice, Source>> sources;
  std::vector<pjrt::Buffer> shards;
  std::vector<Slice> slices;
  for (int64_t i : devices.local()) slices.push_back(shard_of(devices.mesh(), sharding, shape.dims, i, name));
  for (size_t k = 0; k < slices.size(); ++k) {
    const int id = devices.mesh().device_ids()[static_cast<size_t>(devices.local()[k])];
    const Slice& slice = slices[k];
    auto from = std::ranges::find(sources, slice, &std::pair<Slice, Source>::first);
    if (from == sources.end()) from = sources.insert(from, {slice, source(slice)});
    try {
      const Source& s = from->second;
      Shape shard{shape.dtype, slice.size};
      std::vector<int64_t> strides = s.strides;
      if (!sharding.order.empty()) {
        strides = in_order(strides.empty() ? dense_strides(shard) : strides, sharding.order);
        shard.dims = in_order(shard.dims, sharding.order);
      }
      const bool zero_copy = s.zero_copy && strides.empty() && std::ranges::count(slices, slice) == 1;
      shards.push_back(devices.client().put(id, shard, s.data, strides, s.owner, zero_copy, sharding.in_host_memory));
    } catch (Error& e) {
      e.note(fmt::format("copying '{}' {}, {} of it to device {}", name, to_string(shape), to_string(slice), id));
      throw;
    }
  }
  return Array(shape, sharding, std::move(shards));
}

}  // namespace

Array Devices::put(const HostArray& a, const Sharding& sharding, const std::string& name) const {
  check(static_cast<bool>(a), Code::internal, "{}: an empty host array cannot be put on devices", name);
  const std::vector<int64_t> strides = dense_strides(a.shape());
  return put_shards(*this, a.shape(), sharding, name, [&](const Slice& slice) {
    const bool whole = slice.size == a.dims();
    return Source{a.data() + offset_of(slice, strides), whole ? std::vector<int64_t>{} : strides, a.owner()};
  });
}

Array Devices::put(const Shape& shape, const std::function<HostArray(const Slice&)>& values, const Sharding& sharding,
                   const std::string& name) const {
  return put_shards(*this, shape, sharding, name, [&](const Slice& slice) {
    const HostArray a = values(slice);
    const bool zero_copy = a.sole();
    const Shape expected{shape.dtype, slice.size};
    check(a && a.shape() == expected, Code::internal, "{}: {} of {} was given as {}; expected {}", name,
          to_string(slice), to_string(shape), a ? to_string(a.shape()) : "nothing", to_string(expected));
    return Source{a.data(), {}, a.owner(), zero_copy};
  });
}

namespace {

using Clock = std::chrono::steady_clock;

/// Kept by a copy until it ends: what it writes to, and where its end is noted.
struct EndOfCopy {
  std::shared_ptr<const void> target;
  std::shared_ptr<std::atomic<Clock::rep>> at;
  EndOfCopy(std::shared_ptr<const void> to, std::shared_ptr<std::atomic<Clock::rep>> noted)
      : target(std::move(to)), at(std::move(noted)) {}
  EndOfCopy(const EndOfCopy&) = delete;
  EndOfCopy& operator=(const EndOfCopy&) = delete;
  ~EndOfCopy() { at->store(Clock::now().time_since_epoch().count()); }
};

}  // namespace

struct PendingShards::State {
  ShardedArray array;
  std::shared_ptr<std::atomic<Clock::rep>> ended = std::make_shared<std::atomic<Clock::rep>>(0);
  std::vector<pjrt::Event> done;
  Axes order;  // of axes of `arrived`
  std::vector<HostArray> arrived;
  std::once_flag turned;
};

/// Calls take(slice, buffer) for each distinct shard of `which`.
template <class Take>
static void each_shard(const Devices& devices, const Array& a, Which which, Take&& take) {
  check(static_cast<bool>(a), Code::device, "fetch: the array is empty (donated to a program, or never filled)");
  std::vector<Slice> visited;
  for (size_t k = 0; k < a.shards().size(); ++k) {
    const int64_t device = devices.local()[k];
    if (which == Which::owned && !is_first_holder(devices.mesh(), a.sharding(), device)) continue;
    Slice slice = shard_of(devices.mesh(), a.sharding(), a.shape().dims, device);
    if (std::ranges::count(visited, slice)) continue;
    take(visited.emplace_back(std::move(slice)), a.shards()[k]);
  }
}

static std::shared_ptr<PendingShards::State> new_state(const Array& a) {
  auto state = std::make_shared<PendingShards::State>();
  state->array.shape = a.shape();
  state->order = a.sharding().order;
  return state;
}

static void start_copy(PendingShards::State& state, const Slice& slice, const pjrt::Buffer& buffer) {
  HostArray bytes(Shape{state.array.shape.dtype, in_order(slice.size, state.order)});
  pjrt::Event done = buffer.copy_to_host(bytes.mutable_data(), bytes.bytes(), state.array.shape.rank());
  done.keep_alive(std::make_shared<EndOfCopy>(bytes.owner(), state.ended));  // the caller may drop the result before
  state.array.shards.push_back({slice, {}});
  state.arrived.push_back(std::move(bytes));
  state.done.push_back(std::move(done));
}

static std::shared_ptr<PendingShards::State> start_copies(const Devices& devices, const Array& a, Which which) {
  auto state = new_state(a);
  each_shard(devices, a, which,
             [&](const Slice& slice, const pjrt::Buffer& buffer) { start_copy(*state, slice, buffer); });
  return state;
}

ShardedArray shards_in_place(const Devices& devices, const Array& a, Which which) {
  const bool on_host = devices.platform() == Platform::cpu && a.sharding().order.empty();
  ShardedArray out(a.shape(), {});
  each_shard(devices, a, which, [&](const Slice& slice, const pjrt::Buffer& buffer) {
    const auto read = [&a, &buffer, slice, on_host] {
      const Shape shape{a.shape().dtype, slice.size};
      if (on_host && shape.bytes() > 0 && buffer.bytes_on_device() == shape.bytes()) {
        buffer.wait();
        return HostArray(shape, {}, reinterpret_cast<const void*>(buffer.address()));  // NOLINT: the plugin's number
      }
      auto state = new_state(a);
      start_copy(*state, slice, buffer);
      return PendingShards(std::move(state)).wait().shards[0].values;
    };
    out.shards.push_back({slice, {}, read});
  });
  return out;
}

PendingShards fetch_shards(const Devices& devices, const Array& a, Which which) {
  return PendingShards(start_copies(devices, a, which));
}

PendingArray fetch(const Devices& devices, const Array& a) {
  auto state = start_copies(devices, a, Which::local);
  int64_t local = 0;
  for (const Shard& p : state->array.shards) local += p.slice.elements();
  check(local == a.shape().elements(), Code::device, "fetch: {} of {} elements of {} are on devices of this process",
        local, a.shape().elements(), to_string(a.shape()));
  return PendingArray(PendingShards(std::move(state)));
}

bool PendingShards::ready() const { return std::ranges::all_of(state_->done, &pjrt::Event::ready); }

ShardedArray PendingShards::wait() const {
  Span span("wait for device");
  for (const auto& done : state_->done) done.wait();
  std::call_once(state_->turned, [this] {
    const Axes back = inverse(state_->order);
    for (size_t i = 0; i < state_->arrived.size(); ++i)
      state_->array.shards[i].values =
          back.empty() ? std::move(state_->arrived[i]) : with_axes(state_->arrived[i], back);
    state_->arrived.clear();
  });
  return state_->array;
}

Clock::time_point PendingShards::ended() const {
  const Clock::rep at = state_->ended->load();
  return at == 0 ? Clock::now() : Clock::time_point(Clock::duration(at));
}

HostArray Devices::get(const Array& a) const { return fetch(*this, a).wait(); }

}  // namespace md
