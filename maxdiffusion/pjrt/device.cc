// Descriptions of devices, attached or only of a topology.
#include "maxdiffusion/pjrt/device.h"

#include <cstdlib>

namespace md::pjrt {

Device describe(const PJRT_Api* api, PJRT_DeviceDescription* description) {
  Device d;
  PJRT_DeviceDescription_Id_Args id{};
  id.device_description = description;
  PJRT_CALL(api, PJRT_DeviceDescription_Id, id);
  d.id = id.id;
  PJRT_DeviceDescription_ProcessIndex_Args process{};
  process.device_description = description;
  PJRT_CALL(api, PJRT_DeviceDescription_ProcessIndex, process);
  d.process = process.process_index;
  PJRT_DeviceDescription_Kind_Args kind{};
  kind.device_description = description;
  PJRT_CALL(api, PJRT_DeviceDescription_Kind, kind);
  d.kind.assign(kind.device_kind, kind.device_kind_size);
  PJRT_DeviceDescription_Attributes_Args attributes{};
  attributes.device_description = description;
  PJRT_CALL(api, PJRT_DeviceDescription_Attributes, attributes);
  const Options values = from_named_values(attributes.attributes, attributes.num_attributes);
  if (auto it = values.find("slice_index"); it != values.end())
    if (auto* v = std::get_if<int64_t>(&it->second)) d.slice = static_cast<int>(*v);
  if (auto it = values.find("device_memory_bytes_limit"); it != values.end())
    if (auto* v = std::get_if<int64_t>(&it->second)) d.memory_limit = *v;
  if (auto it = values.find("compute_capability"); it != values.end())
    if (auto* v = std::get_if<std::string>(&it->second)) d.compute_capability = std::strtod(v->c_str(), nullptr);
  // A GPU's coordinates are partition, host and card, not positions on a torus.
  if (auto it = values.find("coords"); it != values.end() && d.compute_capability == 0)
    if (auto* v = std::get_if<std::vector<int64_t>>(&it->second)) d.coords.assign(v->begin(), v->end());
  return d;
}

}  // namespace md::pjrt
