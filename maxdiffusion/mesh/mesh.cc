// Computes an order of devices from sizes in a config. The −1 rules and their messages are the documented ones. Devices
// are in id order within a slice, and slices are the outer factor of every axis.

#include "maxdiffusion/mesh/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/torus.h"

namespace md {
namespace {

constexpr std::array<const char*, 5> kAxes = {"data", "fsdp", "fsdp_batch", "context", "tensor"};
using Sizes = std::array<int64_t, kAxes.size()>;

std::string keys_and_values(const char* link, const Sizes& sizes) {
  std::string s;
  for (size_t i = 0; i < kAxes.size(); ++i)
    if (std::string_view(kAxes[i]) != "fsdp_batch" || sizes[i] != 1)
      s += fmt::format("{}{}_{}_parallelism={}", i ? ", " : "", link, kAxes[i], sizes[i]);
  return s;
}

int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// Replaces the one −1 so that the product is `target`. `link`: "ici" or "dcn" (the prefix of the keys).
Sizes fill(Sizes sizes, const char* link, int64_t target) {
  const bool ici = std::string(link) == "ici";
  const char* upper = ici ? "ICI" : "DCN";
  const char* what = ici ? "devices per slice" : "slices";
  auto with_notes = [&](std::string message, const std::string& advice) {
    Error e(Code::invalid_config, std::move(message));
    e.note(fmt::format("found {} for {} {}", keys_and_values(link, sizes), target, what));
    e.note("try: " + advice);
    return e;
  };
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0 || sizes[i] < -1)
      throw with_notes(fmt::format("{}_{}_parallelism is {}; expected 1 or more, or -1 for the remaining devices", link,
                                   kAxes[i], sizes[i]),
                       "1 leaves the axis unused");
  }
  const auto unspecified = std::count(sizes.begin(), sizes.end(), -1);
  if (unspecified > 1)
    throw with_notes(fmt::format("Found unspecified values (-1) for more than one {} parallelism axis. At most one "
                                 "axis can be unspecified.",
                                 upper),
                     fmt::format("keep one -1 and set the others to 1, e.g. {}_data_parallelism=1", link));
  if (unspecified == 1) {
    auto hole = std::find(sizes.begin(), sizes.end(), -1);
    const int64_t others = -product(sizes);
    if (others > target || target % others != 0)
      throw with_notes(
          fmt::format("Unspecified value unable to be determined with the given {} parallelism values", upper),
          fmt::format("sizes whose product divides {} ({} does not)", target, others));
    *hole = target / others;
  }
  if (product(sizes) != target)
    throw with_notes(fmt::format("Number of {} {} does not match the product of the {} parallelism {}", what, target,
                                 upper, product(sizes)),
                     fmt::format("-1 for one of them: {}_data_parallelism=-1 uses the remaining devices", link));
  return sizes;
}

/// mesh_axes may omit unused axes, but not add, repeat or reorder axes.
void check_axis_names(const std::vector<std::string>& names, const Sizes& ici, const Sizes& dcn) {
  std::vector<bool> listed(kAxes.size());
  size_t last = 0;
  for (const auto& name : names) {
    const auto at = std::find(kAxes.begin(), kAxes.end(), name);
    check(at != kAxes.end(), Code::invalid_config, "mesh_axes: unknown axis '{}'; expected one of: {}", name,
          fmt::join(kAxes, ", "));
    const auto i = static_cast<size_t>(at - kAxes.begin());
    check(!listed[i], Code::invalid_config, "mesh_axes: axis '{}' is listed twice", name);
    check(i >= last, Code::invalid_config,
          "mesh_axes: [{}] is out of order; the order is {} (first: slowest links, last: fastest)",
          fmt::join(names, ", "), fmt::join(kAxes, ", "));
    listed[i] = true;
    last = i;
  }
  for (size_t i = 0; i < kAxes.size(); ++i) {
    if (listed[i]) continue;
    for (auto [link, size] : {std::pair{"ici", ici[i]}, std::pair{"dcn", dcn[i]}}) {
      // dcn_data_parallelism=-1 is the default and means 1 on one slice, so only sizes above 1 are a contradiction.
      if (size == 1 || (size == -1 && std::string(link) == "dcn")) continue;
      Error e(Code::invalid_config,
              fmt::format("mesh_axes leaves out '{}', but {}_{}_parallelism is {}", kAxes[i], link, kAxes[i], size));
      e.note(fmt::format("try: add '{}' to mesh_axes, or {}_{}_parallelism=1", kAxes[i], link, kAxes[i]));
      throw e;
    }
  }
}

/// Devices of each slice, in id order. Slices must be equally large.
std::vector<std::vector<DeviceInfo>> by_slice(const Topology& topology) {
  std::vector<std::vector<DeviceInfo>> slices(static_cast<size_t>(topology.slices()));
  for (const auto& d : topology.devices) {
    check(d.slice >= 0, Code::invalid_config, "mesh: device {} has slice {}", d.id, d.slice);
    slices[static_cast<size_t>(d.slice)].push_back(d);
  }
  for (size_t i = 0; i < slices.size(); ++i) {
    check(slices[i].size() == slices[0].size(), Code::invalid_config,
          "mesh: slice {} has {} devices, slice 0 has {}; slices must be equally large", i, slices[i].size(),
          slices[0].size());
    std::sort(slices[i].begin(), slices[i].end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  }
  return slices;
}

Sizes unravel(int64_t index, const Sizes& sizes) {
  Sizes at{};
  for (size_t i = sizes.size(); i-- > 0;) {
    at[i] = index % sizes[i];
    index /= sizes[i];
  }
  return at;
}
int64_t ravel(const Sizes& at, const Sizes& sizes) {
  int64_t index = 0;
  for (size_t i = 0; i < sizes.size(); ++i) index = index * sizes[i] + at[i];
  return index;
}

}  // namespace

int Topology::slices() const {
  int n = 1;
  for (const auto& d : devices) n = std::max(n, 1 + d.slice);
  return n;
}

std::vector<std::string> MeshConfig::axes() const {
  std::vector<std::string> names = mesh_axes;
  if (has_fsdp_batch() && std::ranges::count(names, "fsdp_batch") == 0)
    names.insert(std::ranges::find_if(names, [](const std::string& n) { return n == "context" || n == "tensor"; }),
                 "fsdp_batch");
  return names;
}

Mesh Mesh::make(const MeshConfig& config, const Topology& topology) {
  check(!topology.devices.empty(), Code::invalid_config, "mesh: the topology has no devices");
  const Sizes requested_ici = {config.ici_data_parallelism, config.ici_fsdp_parallelism,
                               config.ici_fsdp_batch_parallelism, config.ici_context_parallelism,
                               config.ici_tensor_parallelism};
  const Sizes requested_dcn = {config.dcn_data_parallelism, config.dcn_fsdp_parallelism,
                               config.dcn_fsdp_batch_parallelism, config.dcn_context_parallelism,
                               config.dcn_tensor_parallelism};
  const std::vector<std::string> names = config.axes();
  check_axis_names(names, requested_ici, requested_dcn);
  const auto slices = by_slice(topology);
  const auto slice_count = static_cast<int64_t>(slices.size());
  const Sizes ici = fill(requested_ici, "ici", static_cast<int64_t>(slices[0].size()));
  // As in MaxDiffusion, the DCN sizes are ignored on one slice.
  const Sizes dcn = slice_count > 1 ? fill(requested_dcn, "dcn", slice_count) : Sizes{1, 1, 1, 1, 1};

  Mesh mesh;
  Sizes total{};
  for (size_t i = 0; i < kAxes.size(); ++i) total[i] = ici[i] * dcn[i];
  for (const auto& name : names) {
    const auto i = static_cast<size_t>(std::find(kAxes.begin(), kAxes.end(), name) - kAxes.begin());
    mesh.axes_.push_back({name, total[i]});
  }
  mesh.device_ids_.resize(topology.devices.size());
  mesh.slices_.resize(topology.devices.size());
  for (int64_t s = 0; s < slice_count; ++s) {
    const auto outer = unravel(s, dcn);
    const auto order =
        torus_order(slices[static_cast<size_t>(s)], {ici.begin(), ici.end()}, config.allow_split_physical_axes);
    for (int64_t d = 0; d < static_cast<int64_t>(order.size()); ++d) {
      auto at = unravel(d, ici);
      for (size_t i = 0; i < at.size(); ++i) at[i] += outer[i] * ici[i];
      const auto place = static_cast<size_t>(ravel(at, total));
      mesh.device_ids_[place] = order[static_cast<size_t>(d)];
      mesh.slices_[place] = static_cast<int>(s);
    }
  }
  return mesh;
}

Mesh Mesh::single() {
  Topology one;
  one.devices = {DeviceInfo{}};
  return make({}, one);
}

int64_t Mesh::size(const std::string& axis) const {
  for (const auto& a : axes_)
    if (a.name == axis) return a.size;
  return 1;
}

int64_t Mesh::devices() const { return static_cast<int64_t>(device_ids_.size()); }

std::vector<int64_t> Mesh::position(int64_t device) const {
  check(device >= 0 && device < devices(), Code::internal, "mesh: position {} of {} devices", device, devices());
  std::vector<int64_t> at(axes_.size());
  for (size_t i = axes_.size(); i-- > 0;) {
    at[i] = device % axes_[i].size;
    device /= axes_[i].size;
  }
  return at;
}

std::string Mesh::describe() const {
  std::string s;
  for (const auto& a : axes_)
    if (a.size > 1) s += fmt::format("{}{} {}", s.empty() ? "" : " × ", a.name, a.size);
  return s.empty() ? "1 device" : fmt::format("{} ({} devices)", s, devices());
}

}  // namespace md
