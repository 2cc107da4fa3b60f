// Mesh: devices arranged along the named axes data, fsdp, fsdp_batch, context, tensor. Pure data.
// Source: MaxText and MaxDiffusion, `create_device_mesh` (ici_* and dcn_* sizes, one of them −1).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

/// Position of a device. DCN connects slices, ICI the devices of a slice.
struct DeviceInfo {
  int id = 0;
  int process = 0;
  int slice = 0;
  std::vector<int> coords;  // TPU torus coordinates, else empty
};
struct Topology {
  std::string platform;     // "cpu", "cuda", "tpu"
  std::string device_kind;  // "cpu", "NVIDIA H100 …", "TPU v5p", …
  std::vector<DeviceInfo> devices;
  double compute_capability = 0;  // of GPUs by NVIDIA
  int slices() const;
};

struct MeshAxis {
  std::string name;
  int64_t size = 1;
};

/// Sizes as in the config: product of ICI entries = devices of a slice, of DCN entries = slices; one −1 each.
struct MeshConfig {
  std::vector<std::string> mesh_axes = {"data", "fsdp", "context", "tensor"};
  int64_t ici_data_parallelism = -1, ici_fsdp_parallelism = 1, ici_context_parallelism = 1, ici_tensor_parallelism = 1;
  int64_t ici_fsdp_batch_parallelism = 1, dcn_fsdp_batch_parallelism = 1;
  int64_t dcn_data_parallelism = -1, dcn_fsdp_parallelism = 1, dcn_context_parallelism = 1, dcn_tensor_parallelism = 1;
  bool allow_split_physical_axes = false;

  /// Whether the axis fsdp_batch exists, which shards batches and weights as fsdp does.
  bool has_fsdp_batch() const { return ici_fsdp_batch_parallelism != 1 || dcn_fsdp_batch_parallelism != 1; }
  /// mesh_axes, with fsdp_batch if it is used.
  std::vector<std::string> axes() const;

  template <class V>
  void visit(V&& v) {
    v("mesh_axes", mesh_axes, "names of the mesh axes, in order");
    v("ici_data_parallelism", ici_data_parallelism, "devices per slice along data; -1: the rest");
    v("ici_fsdp_parallelism", ici_fsdp_parallelism, "devices per slice along fsdp; -1: the rest");
    v("ici_fsdp_batch_parallelism", ici_fsdp_batch_parallelism,
      "devices per slice that split the batch and, as fsdp, the weights; whole batches per device only; -1: the rest");
    v("ici_context_parallelism", ici_context_parallelism, "devices per slice along context; -1: the rest");
    v("ici_tensor_parallelism", ici_tensor_parallelism, "devices per slice along tensor; -1: the rest");
    v("dcn_data_parallelism", dcn_data_parallelism, "slices along data; -1: the rest");
    v("dcn_fsdp_parallelism", dcn_fsdp_parallelism, "slices along fsdp; -1: the rest");
    v("dcn_fsdp_batch_parallelism", dcn_fsdp_batch_parallelism, "slices along fsdp_batch; -1: the rest");
    v("dcn_context_parallelism", dcn_context_parallelism, "slices along context; -1: the rest");
    v("dcn_tensor_parallelism", dcn_tensor_parallelism, "slices along tensor; -1: the rest");
    v("allow_split_physical_axes", allow_split_physical_axes, "let one torus axis serve several mesh axes");
  }
};

class Mesh {
 public:
  /// Throws invalid_config for two −1, sizes that do not divide, or a product that is not the number of devices.
  static Mesh make(const MeshConfig& config, const Topology& topology);
  /// One device, all axes of size 1.
  static Mesh single();

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int64_t size(const std::string& axis) const;  // 1 when the mesh has no such axis
  int64_t devices() const;
  /// Device ids in mesh order (first axis slowest).
  const std::vector<int>& device_ids() const { return device_ids_; }
  /// Position along each axis of the i-th device in mesh order.
  std::vector<int64_t> position(int64_t device) const;
  /// Slice of the i-th device in mesh order.
  int slice(int64_t device) const { return slices_.at(static_cast<size_t>(device)); }
  /// "data 2 × fsdp 4 (8 devices)".
  std::string describe() const;

 private:
  std::vector<MeshAxis> axes_;
  std::vector<int> device_ids_, slices_;
};

}  // namespace md
