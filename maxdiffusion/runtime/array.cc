// Array: the shards of one value.
#include "maxdiffusion/runtime/runtime.h"

namespace md {

Array::Array(Shape shape, Sharding sharding, std::vector<pjrt::Buffer> shards)
    : shape_(std::move(shape)), sharding_(std::move(sharding)), shards_(std::move(shards)) {}

int64_t Array::bytes_per_device() const { return shards_.empty() ? 0 : shards_.front().bytes_on_device(); }

}  // namespace md
