#include "maxdiffusion/mesh/sharding.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"

namespace md {

bool Sharding::replicated() const {
  return std::all_of(dims.begin(), dims.end(), [](const auto& axes) { return axes.empty(); });
}

Slice shard_of(const Mesh& mesh, const Sharding& sharding, const std::vector<int64_t>& dims, int64_t device,
               const std::string& name) {
  check(sharding.dims.size() <= dims.size(), Code::invalid_config, "{} [{}]: a sharding of {} dims for {} dims", name,
        fmt::join(dims, ","), sharding.dims.size(), dims.size());
  const auto at = mesh.position(device);
  Slice piece{std::vector<int64_t>(dims.size(), 0), dims};
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
    piece.size[d] = dims[d] / parts;
    piece.start[d] = index * piece.size[d];
  }
  return piece;
}

}  // namespace md
