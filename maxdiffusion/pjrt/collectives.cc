#include "maxdiffusion/pjrt/collectives.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/pjrt/hlo.pb.h"

namespace md::pjrt {
namespace {

constexpr const char* kKinds[] = {"all-gather", "all-reduce",         "reduce-scatter",
                                  "all-to-all", "collective-permute", "collective-broadcast"};

/// The kind of collective of an opcode; asynchronous ones count at their start, not their end.
std::string kind_of(std::string opcode) {
  constexpr std::string_view start = "-start";
  if (opcode.ends_with(start)) opcode.resize(opcode.size() - start.size());
  if (opcode == "ragged-all-to-all") return "all-to-all";
  return std::ranges::count(kKinds, opcode) ? opcode : "";
}

/// The kind of collective between slices, "ALL_REDUCE", for which libtpu emits sends to hosts; empty for other
/// instructions.
std::string kind_between_slices(const proto::HloInstruction& op) {
  const auto& attributes = op.frontend_attributes().map();
  const auto handler = attributes.find("_xla_host_transfer_handler_name"),
             type = attributes.find("_xla_megascale_transfer_type");
  if (op.opcode() != "send" || handler == attributes.end() || handler->second != "xla_megascale_runtime") return "";
  std::string kind = type == attributes.end() ? "send" : type->second;
  for (char& c : kind) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return kind == "one-to-one" ? "collective-permute" : kind;
}

/// Bits of XLA's PrimitiveType; 0: it holds no data.
int64_t bits_of(int32_t type) {
  switch (type) {
    case 1:
    case 2:
    case 6:
    case 19:
    case 20:
    case 23:
    case 24:
    case 25:
    case 28:
    case 29:
    case 33: return 8;
    case 3:
    case 7:
    case 10:
    case 16: return 16;
    case 4:
    case 8:
    case 11: return 32;
    case 5:
    case 9:
    case 12:
    case 15: return 64;
    case 18: return 128;
    case 21:
    case 22:
    case 32: return 4;
    default: return 0;
  }
}

int64_t bytes_of(const proto::HloShape& shape) {
  int64_t bytes = 0;
  for (const auto& part : shape.tuple_shapes()) bytes += bytes_of(part);
  int64_t elements = 1;
  for (int64_t d : shape.dimensions()) elements *= d;
  return bytes + (elements * bits_of(shape.element_type()) + 7) / 8;
}

/// Axes with more than one element in memory order, innermost first.
std::vector<int64_t> order_of(const proto::HloShape& shape) {
  std::vector<int64_t> order;
  for (int64_t axis : shape.layout().minor_to_major())
    if (shape.dimensions(static_cast<int>(axis)) > 1) order.push_back(axis);
  return order;
}

/// Whether a copy or transpose changes the order of elements in memory; of a transpose, axes are numbered as the
/// operand's.
bool turns(const proto::HloInstruction& op, const proto::HloShape& from) {
  std::vector<int64_t> order = order_of(op.shape());
  if (op.opcode() == "transpose")
    for (int64_t& axis : order) axis = op.dimensions(static_cast<int>(axis));
  return order != order_of(from);
}

/// Type names as in StableHLO; "?" for types that products are not counted for.
const char* type_name(int32_t type) {
  switch (type) {
    case 2: return "s8";
    case 4: return "s32";
    case 10: return "f16";
    case 11: return "f32";
    case 12: return "f64";
    case 16: return "bf16";
    case 19: return "f8e5m2";
    case 20: return "f8e4m3fn";
    default: return "?";
  }
}

using Groups = std::vector<std::vector<int64_t>>;

/// Positions in an array of ids 0, 1, … that was reshaped and transposed.
Groups iota_groups(const proto::HloIotaGroups& list) {
  const std::vector<int64_t> dims(list.iota_reshape_dims().begin(), list.iota_reshape_dims().end());
  std::vector<size_t> order(list.iota_transpose_perm().begin(), list.iota_transpose_perm().end());
  check(order.empty() || order.size() == dims.size(), Code::device,
        "a compiled program has replica groups of an unknown form");
  if (order.empty())
    for (size_t i = 0; i < dims.size(); ++i) order.push_back(i);
  std::vector<int64_t> stride(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) stride[i - 1] = stride[i] * dims[i];
  const int64_t size = std::max<int64_t>(list.num_devices_per_group(), 1);
  Groups groups(static_cast<size_t>(list.num_replica_groups()));
  for (int64_t n = 0; n < list.num_replica_groups() * size; ++n) {
    int64_t rest = n, id = 0;
    for (size_t i = order.size(); i-- > 0;) {
      id += rest % dims.at(order[i]) * stride[order[i]];
      rest /= dims[order[i]];
    }
    groups[static_cast<size_t>(n / size)].push_back(id);
  }
  return groups;
}

Groups mesh_groups(const proto::HloMeshGroups& list) {
  const auto& axes = list.mesh().axes();
  std::vector<int64_t> stride(static_cast<size_t>(axes.size()), 1);
  for (int i = axes.size() - 1; i > 0; --i)
    stride[static_cast<size_t>(i) - 1] = stride[static_cast<size_t>(i)] * axes[i].size();
  int64_t devices = 1;
  for (const auto& axis : axes) devices *= axis.size();
  std::map<int64_t, std::map<int64_t, int64_t>> found;  // by the group's first position: devices in group order
  for (int64_t p = 0; p < devices; ++p) {
    int64_t first = p, order = 0;
    for (const auto& ref : list.axes()) {
      check(ref.axis() >= 0 && ref.axis() < axes.size(), Code::device,
            "a compiled program has replica groups along an axis that its mesh lacks");
      const int64_t whole = axes[static_cast<int>(ref.axis())].size(),
                    size = ref.has_part() ? ref.part().size() : whole,
                    inner = ref.has_part() ? whole / std::max<int64_t>(ref.part().before() * size, 1) : 1,
                    step = std::max<int64_t>(stride[static_cast<size_t>(ref.axis())] * inner, 1),
                    at = p / step % std::max<int64_t>(size, 1);
      first -= at * step;
      order = order * size + at;
    }
    const auto& ids = list.mesh().device_ids();
    found[first][order] = ids.empty() ? p : ids.at(static_cast<int>(p));
  }
  Groups groups;
  for (const auto& [first, members] : found) {
    groups.emplace_back();
    for (const auto& [order, id] : members) groups.back().push_back(id);
  }
  return groups;
}

Groups groups_of(const proto::HloInstruction& op) {
  if (op.has_mesh_groups()) return mesh_groups(op.mesh_groups());
  if (op.has_iota_groups()) return iota_groups(op.iota_groups());
  if (op.collective_device_list().has_iota_replica_group_list())
    return iota_groups(op.collective_device_list().iota_replica_group_list());
  Groups groups;
  for (const auto& pair : op.source_target_pairs()) groups.push_back({pair.source(), pair.target()});
  const auto& listed = op.replica_groups().empty() ? op.collective_device_list().replica_groups() : op.replica_groups();
  for (const auto& group : listed) groups.emplace_back(group.replica_ids().begin(), group.replica_ids().end());
  return groups;
}

struct Reader {
  std::map<int64_t, const proto::HloComputation*> computations;
  proto::HloSchedule schedule;
  Operations found;

  const proto::HloComputation& computation(int64_t id) const {
    const auto it = computations.find(id);
    check(it != computations.end(), Code::device, "a compiled program calls computation {}, which it does not have",
          id);
    return *it->second;
  }

  /// The compiler's trip count, or the one that follows from the condition: a counter from 0 compared with a constant.
  std::optional<double> trips_of(const proto::HloInstruction& loop) const {
    const auto config = parse_json_or_discard(loop.backend_config());
    if (config.is_object() && config.contains("known_trip_count")) {
      const nlohmann::json n = config["known_trip_count"].value("n", nlohmann::json());
      if (n.is_string()) return std::stod(n.get<std::string>());
      if (n.is_number()) return n.get<double>();
    }
    if (loop.called_computation_ids_size() != 2) return {};
    std::map<int64_t, double> constants;
    for (const auto& op : computation(loop.called_computation_ids(1)).instructions()) {
      if (op.opcode() == "constant" && op.literal().s32s_size() == 1) constants[op.id()] = op.literal().s32s(0);
      if (op.opcode() == "compare" && op.comparison_direction() == "LT" && op.operand_ids_size() == 2 &&
          constants.contains(op.operand_ids(1)))
        return constants[op.operand_ids(1)];
    }
    return {};
  }

  /// libtpu's estimates of an instruction that runs `times` times.
  void read_cost(const proto::HloInstruction& op, double times) {
    const std::string& text = op.backend_config();
    const bool kernel = op.opcode() == "custom-call";
    if (text.find(kernel ? "\"cost_estimate\"" : "\"estimated_cycles\"") == text.npos) return;
    const auto config = parse_json_or_discard(text);
    const auto number = [&](const char* group, const char* key) -> double {  // integers of 64 bits are texts
      const nlohmann::json& in = kernel ? config.value("custom_call_config", nlohmann::json::object()) : config;
      if (!in.is_object() || !in.contains(group) || !in[group].is_object()) return 0;
      const nlohmann::json value = in[group].value(key, nlohmann::json());
      if (value.is_number()) return value.get<double>();
      return value.is_string() ? std::strtod(value.get<std::string>().c_str(), nullptr) : 0;
    };
    if (!config.is_object()) return;
    (kernel ? found.kernel_flops : found.cycles) +=
        times * (kernel ? number("cost_estimate", "flops") : number("window_config", "estimated_cycles"));
  }

  static bool moves_nothing(const proto::HloInstruction& op) {
    constexpr std::string_view kNames[] = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"};
    return std::ranges::count(kNames, op.opcode()) > 0;
  }

  bool only_changes_type(const proto::HloInstruction& op) const {
    if (op.opcode() == "convert") return true;
    if (op.opcode() != "fusion" || op.called_computation_ids_size() != 1) return false;
    const auto& inside = computation(op.called_computation_ids(0)).instructions();
    return std::ranges::all_of(inside, [](const auto& i) { return i.opcode() == "convert" || moves_nothing(i); }) &&
           std::ranges::any_of(inside, [](const auto& i) { return i.opcode() == "convert"; });
  }

  /// Whether this is a matrix product or a convolution, also of a library or inside a fusion.
  bool is_product(const proto::HloInstruction& op) const {
    if (op.opcode() == "custom-call") return op.custom_call_target().starts_with("__cu");  // cuBLAS, cuDNN
    if (op.opcode() == "fusion" && op.called_computation_ids_size() == 1)
      return std::ranges::any_of(computation(op.called_computation_ids(0)).instructions(),
                                 [this](const auto& inside) { return is_product(inside); });
    return op.opcode() == "dot" || op.opcode() == "convolution";
  }

  /// Reads the copies from the host's memory that a computation starts, in its schedule.
  void read_host_copies(int64_t id, double times) {
    constexpr int64_t kHost = 5;  // Layout::kHostMemorySpace
    constexpr std::string_view kWork[] = {"fusion", "custom-call", "dot", "convolution", "while", "call"};
    std::map<int64_t, const proto::HloInstruction*> by_id;
    for (const auto& op : computation(id).instructions()) by_id[op.id()] = &op;
    std::map<int64_t, size_t> running;  // by the id of the start
    int64_t products_before = 0;
    const auto sequence = schedule.sequences().find(id);
    if (sequence == schedule.sequences().end()) return;
    for (int64_t op_id : sequence->second.instruction_ids()) {
      const auto found_op = by_id.find(op_id);
      if (found_op == by_id.end()) continue;
      const proto::HloInstruction& op = *found_op->second;
      if (std::ranges::count(kWork, op.opcode()))
        for (const auto& [start, copy] : running) ++found.host_copies[copy].overlapped;
      products_before += is_product(op);
      if ((op.opcode() == "async-start" || op.opcode() == "copy-start") && op.operand_ids_size() > 0) {
        const proto::HloShape& parts = op.shape();
        const bool is_async = op.opcode() == "async-start";
        if (parts.tuple_shapes_size() < 2) continue;
        const proto::HloShape &from = is_async && parts.tuple_shapes(0).tuple_shapes_size() > 0
                                          ? parts.tuple_shapes(0).tuple_shapes(0)
                                          : parts.tuple_shapes(is_async ? 0 : 1),
                              &to = parts.tuple_shapes(is_async ? 1 : 0);
        if (from.layout().memory_space() != kHost || to.layout().memory_space() == kHost) continue;
        running[op.id()] = found.host_copies.size();
        found.host_copies.push_back({.bytes = bytes_of(to), .times = times, .after = products_before});
      }
      if ((op.opcode() == "async-done" || op.opcode() == "copy-done") && op.operand_ids_size() > 0)
        running.erase(op.operand_ids(0));
    }
  }

  /// `started`: whether the program starts the computation's instructions individually, not inside a fusion.
  void read(int64_t id, double times, bool unknown, bool started) {
    if (started) read_host_copies(id, times);
    std::map<int64_t, const proto::HloInstruction*> by_id;
    for (const auto& op : computation(id).instructions()) {
      by_id[op.id()] = &op;
      if (started && !moves_nothing(op)) {
        read_cost(op, times);
        ++found.instructions;
        found.type_changes += only_changes_type(op);
      }
      if (std::string kind = kind_of(op.opcode()); !kind.empty()) {
        Collective c{.kind = std::move(kind),
                     .groups = groups_of(op),
                     .times = times,
                     .in_unknown_loop = unknown,
                     .name = op.metadata().op_name()};
        if (c.kind == "all-gather") {  // a start's result includes its operand
          const bool starts = op.opcode() != c.kind && op.shape().tuple_shapes_size() > 1;
          c.bytes = bytes_of(starts ? op.shape().tuple_shapes(1) : op.shape());
        } else {
          for (int64_t operand : op.operand_ids())
            if (auto known = by_id.find(operand); known != by_id.end()) c.bytes += bytes_of(known->second->shape());
        }
        found.collectives.push_back(std::move(c));
        continue;  // a reduction's computation adds two numbers
      }
      if (std::string kind = kind_between_slices(op); !kind.empty()) {
        const auto known = by_id.find(op.operand_ids(0));
        found.collectives.push_back({.kind = std::move(kind),
                                     .bytes = known == by_id.end() ? 0 : bytes_of(known->second->shape()),
                                     .times = times,
                                     .in_unknown_loop = unknown,
                                     .between_slices = true,
                                     .name = op.metadata().op_name()});
        continue;
      }
      auto operand = [&](int i) -> const proto::HloShape& { return by_id.at(op.operand_ids(i))->shape(); };
      if ((op.opcode() == "copy" || op.opcode() == "transpose") && turns(op, operand(0)))
        found.turned.push_back({{op.shape().dimensions().begin(), op.shape().dimensions().end()},
                                bytes_of(op.shape()),
                                times,
                                op.metadata().op_name()});
      if (op.opcode() == "dot" || op.opcode() == "convolution")
        ++found.products[fmt::format("{} × {} → {}", type_name(operand(0).element_type()),
                                     type_name(operand(1).element_type()), type_name(op.shape().element_type()))];
      if (op.opcode() == "custom-call") {
        auto count = [&](const std::string& target) {
          CustomCalls& calls = found.custom_calls[target];
          ++calls.operations;
          calls.runs += times;
        };
        count(op.custom_call_target());
        // Fused kernel calls (kernels/kernels.h, kFusedCallsKernel) contain the names of their kernels.
        constexpr std::string_view kNames = "kernel = \"";
        const std::string& config = op.backend_config();
        for (size_t at = config.find(kNames); at != config.npos; at = config.find(kNames, at)) {
          at += kNames.size();
          count(config.substr(at, config.find('"', at) - at));
        }
      }
      if (op.opcode() == "async-update" || op.opcode() == "async-done") continue;  // counted at the start
      double inside = times;
      bool lost = unknown;
      if (op.opcode() == "while") {
        const std::optional<double> trips = trips_of(op);
        inside *= trips.value_or(1);
        lost |= !trips;
      }
      const bool bodies = started && (op.opcode() == "while" || op.opcode() == "conditional");
      for (int64_t called : op.called_computation_ids()) read(called, inside, lost, bodies);
    }
  }
};

}  // namespace

Operations read_operations(std::string_view program, std::string_view format) {
  proto::HloModule module;
  bool read = false;
  if (format == "hlo_with_config") {
    proto::HloModuleWithConfig whole;
    read = whole.ParseFromArray(program.data(), static_cast<int>(program.size()));
    module = std::move(*whole.mutable_hlo_module());
  } else if (format == "hlo") {
    read = module.ParseFromArray(program.data(), static_cast<int>(program.size()));
  }
  check(read, Code::device, "the plugin's form of a compiled program, '{}' of {} bytes, is not HLO", format,
        program.size());
  Reader reader;
  reader.schedule = module.schedule();
  for (const auto& c : module.computations()) reader.computations[c.id()] = &c;
  reader.read(module.entry_computation_id(), 1, false, true);
  return std::move(reader.found);
}

}  // namespace md::pjrt
