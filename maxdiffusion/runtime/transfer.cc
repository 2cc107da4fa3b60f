// The only code that moves data between host and devices. A shard is a strided window of the host array, so nothing is
// cut up on the host before a transfer; on the way back each distinct piece is copied once, from one device that has
// it.
#include <cstring>

#include "maxdiffusion/base/error.h"
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

/// Writes a dense piece into its place in the whole.
void place(std::byte* whole, const std::vector<int64_t>& strides, const Slice& slice, const std::byte* piece,
           int64_t element) {
  const size_t rank = slice.size.size();
  const int64_t row = rank ? slice.size[rank - 1] * element : element;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < rank; ++i) rows *= slice.size[i];
  std::vector<int64_t> at(rank, 0);
  for (int64_t r = 0; r < rows; ++r, piece += row) {
    int64_t offset = offset_of(slice, strides);
    for (size_t i = 0; i + 1 < rank; ++i) offset += at[i] * strides[i];
    std::memcpy(whole + offset, piece, static_cast<size_t>(row));
    for (size_t i = rank ? rank - 1 : 0; i-- > 0;) {
      if (++at[i] < slice.size[i]) break;
      at[i] = 0;
    }
  }
}

}  // namespace

Array Devices::put(const HostArray& a, const Sharding& sharding, const std::string& name) const {
  check(static_cast<bool>(a), Code::internal, "{}: an empty host array cannot be put on devices", name);
  check(sharding.dims.size() <= a.dims().size(), Code::invalid_config, "{}: sharding of {} dims for {}", name,
        sharding.dims.size(), to_string(a.shape()));
  const std::vector<int64_t> strides = dense_strides(a.shape());
  std::vector<pjrt::Buffer> shards;
  for (int64_t i : local_) {
    const int id = mesh_.device_ids()[static_cast<size_t>(i)];
    const Slice slice = shard_of(mesh_, sharding, a.dims(), i, name);
    const bool whole = slice.size == a.dims();
    try {
      shards.push_back(client_->put(id, Shape{a.dtype(), slice.size}, a.data() + offset_of(slice, strides),
                                    whole ? std::vector<int64_t>{} : strides, a.owner()));
    } catch (Error& e) {
      e.note(
          fmt::format("copying '{}' {}, {} of it to device {}", name, to_string(a.shape()), to_string(slice.size), id));
      throw;
    }
  }
  return Array(a.shape(), sharding, std::move(shards));
}

struct PendingArray::State {
  struct Piece {
    Slice slice;
    HostArray bytes;
    pjrt::Event done;
  };
  Shape shape;
  std::vector<Piece> pieces;
};

PendingArray fetch(const Devices& devices, const Array& a) {
  check(static_cast<bool>(a), Code::device, "fetch: the array is empty (donated to a program, or never filled)");
  auto state = std::make_shared<PendingArray::State>();
  state->shape = a.shape();
  int64_t elements = 0;
  for (size_t k = 0; k < a.shards().size(); ++k) {
    Slice slice = shard_of(devices.mesh(), a.sharding(), a.shape().dims, devices.local()[k]);
    bool seen = false;
    for (const auto& p : state->pieces) seen |= p.slice == slice;
    if (seen) continue;
    HostArray bytes(Shape{a.shape().dtype, slice.size});
    elements += bytes.shape().elements();
    pjrt::Event done = a.shards()[k].copy_to_host(bytes.mutable_data(), bytes.bytes(), a.shape().rank());
    done.keep_alive(bytes.owner());  // whoever asked may lose interest before the copy ends
    state->pieces.push_back({std::move(slice), std::move(bytes), std::move(done)});
  }
  check(elements == a.shape().elements(), Code::device, "fetch: {} of {} elements of {} lie on devices of this process",
        elements, a.shape().elements(), to_string(a.shape()));
  return PendingArray(std::move(state));
}

bool PendingArray::ready() const {
  for (const auto& p : state_->pieces)
    if (!p.done.ready()) return false;
  return true;
}

HostArray PendingArray::wait() {
  Span span("wait for device");
  for (const auto& p : state_->pieces) p.done.wait();
  if (state_->pieces.size() == 1) return state_->pieces.front().bytes;
  HostArray whole(state_->shape);
  const std::vector<int64_t> strides = dense_strides(state_->shape);
  for (const auto& p : state_->pieces)
    place(whole.mutable_data(), strides, p.slice, p.bytes.data(), static_cast<int64_t>(size_of(state_->shape.dtype)));
  return whole;
}

HostArray Devices::get(const Array& a) const { return fetch(*this, a).wait(); }

}  // namespace md
