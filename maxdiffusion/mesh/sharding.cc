#include "maxdiffusion/mesh/sharding.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"

namespace md {

bool Sharding::replicated() const {
  return std::all_of(dims.begin(), dims.end(), [](const auto& axes) { return axes.empty(); });
}

int64_t Slice::elements() const {
  int64_t n = 1;
  for (int64_t s : size) n *= s;
  return n;
}

bool Slice::within(const std::vector<int64_t>& dims) const {
  bool inside = start.size() == dims.size() && size.size() == dims.size();
  for (size_t d = 0; inside && d < dims.size(); ++d)
    inside = start[d] >= 0 && size[d] >= 0 && size[d] <= dims[d] && start[d] <= dims[d] - size[d];
  return inside;
}

std::string to_string(const Slice& s) {
  std::string text;
  for (size_t d = 0; d < s.size.size(); ++d)
    text += fmt::format("{}{}:{}", d ? "," : "", s.start[d], s.start[d] + s.size[d]);
  return "[" + text + "]";
}

Slice shard_of(const Mesh& mesh, const Sharding& sharding, const std::vector<int64_t>& dims, int64_t device,
               const std::string& name) {
  check(sharding.dims.size() <= dims.size(), Code::invalid_config, "{} [{}]: a sharding of {} dims for {} dims", name,
        fmt::join(dims, ","), sharding.dims.size(), dims.size());
  const auto at = mesh.position(device);
  Slice shard{std::vector<int64_t>(dims.size(), 0), dims};
  for (size_t d = 0; d < sharding.dims.size(); ++d) {
    int64_t parts = 1, index = 0;
    for (const auto& axis : sharding.dims[d]) {
      const auto found =
          std::find_if(mesh.axes().begin(), mesh.axes().end(), [&](const MeshAxis& a) { return a.name == axis; });
      check(found != mesh.axes().end(), Code::invalid_config, "{} [{}]: dim {} is split over '{}', and the mesh is {}",
            name, fmt::join(dims, ","), d, axis, mesh.describe());
      parts *= found->size;
      index = index * found->size + at[static_cast<size_t>(found - mesh.axes().begin())];
    }
    check(dims[d] % parts == 0, Code::invalid_config, "{} [{}]: dim {} of size {} does not divide into {} parts ({})",
          name, fmt::join(dims, ","), d, dims[d], parts, fmt::join(sharding.dims[d], " × "));
    shard.size[d] = dims[d] / parts;
    shard.start[d] = index * shard.size[d];
  }
  return shard;
}

bool is_first_holder(const Mesh& mesh, const Sharding& sharding, int64_t device) {
  const auto at = mesh.position(device);
  for (size_t i = 0; i < at.size(); ++i) {
    const bool splits = std::any_of(sharding.dims.begin(), sharding.dims.end(), [&](const auto& axes) {
      return std::find(axes.begin(), axes.end(), mesh.axes()[i].name) != axes.end();
    });
    if (!splits && at[i] != 0) return false;
  }
  return true;
}

}  // namespace md
