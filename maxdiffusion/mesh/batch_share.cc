#include "maxdiffusion/mesh/batch_share.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "maxdiffusion/base/error.h"

namespace md {

std::vector<int64_t> BatchShare::rows(int64_t batch) const {
  check(process >= 0 && process < processes, Code::internal, "batch: share {} of {}", process, processes);
  const std::vector<int64_t> mine = parts.empty() ? std::vector{process} : parts;
  const int64_t all = processes * static_cast<int64_t>(mine.size()), size = batch / all;
  check(batch > 0 && batch % all == 0, Code::invalid_config, "batch of {}: it does not divide into {} parts for {} {}",
        batch, all, processes, processes == 1 ? "process" : "processes");
  std::vector<int64_t> out;
  for (int64_t part : mine)
    for (int64_t i = 0; i < size; ++i) out.push_back(part * size + i);
  return out;
}

ShardedArray BatchShare::shards(const HostArray& rows) const {
  if (processes == 1) return rows;
  ShardedArray out{rows.shape(), {}};
  out.shape.dims.at(0) *= processes;
  const std::vector<int64_t> all = this->rows(out.shape.dims[0]);
  const int64_t n = rows.dims()[0];
  for (int64_t from = 0, to; from < n; from = to) {
    auto row = [&](int64_t i) { return all[static_cast<size_t>(i)]; };
    for (to = from + 1; to < n && row(to) == row(to - 1) + 1;) ++to;
    Slice slice = Slice::all(rows.dims());
    slice.size[0] = to - from;
    const Shape shape{rows.dtype(), slice.size};
    slice.start[0] = row(from);
    out.shards.push_back({slice, HostArray(shape, rows.owner(), rows.data() + shape.bytes() / (to - from) * from)});
  }
  return out;
}

BatchShare batch_share(const Mesh& mesh, const Sharding& batch, const std::vector<int>& processes, int process) {
  check(processes.size() == static_cast<size_t>(mesh.devices()), Code::internal, "{}: processes of {} devices",
        mesh.describe(), processes.size());
  const Sharding rows{batch.dims.empty() ? decltype(batch.dims){} : decltype(batch.dims){batch.dims[0]}};
  int64_t all = 1;
  if (!batch.dims.empty())
    for (const std::string& axis : batch.dims[0]) all *= mesh.size(axis);
  std::map<int, std::set<int64_t>> parts_of;
  for (int64_t i = 0; i < mesh.devices(); ++i)
    parts_of[processes[static_cast<size_t>(i)]].insert(shard_of(mesh, rows, {all}, i, "batch").start[0]);
  check(parts_of.contains(process), Code::internal, "{}: no device belongs to process {}", mesh.describe(), process);

  std::map<int64_t, std::set<int64_t>> shares;  // by the index of the first part
  int64_t covered = 0;
  for (const auto& [p, parts] : parts_of)
    if (shares.emplace(*parts.begin(), parts).second) covered += static_cast<int64_t>(parts.size());
  const std::set<int64_t>& mine = parts_of.at(process);
  const auto n = static_cast<int64_t>(shares.size());
  for (const auto& [p, parts] : parts_of)
    check(shares.at(*parts.begin()) == parts && parts.size() == mine.size() && covered == all, Code::invalid_config,
          "mesh {}: of {} parts of a batch process {} holds [{}] and process {} [{}]; expected the same parts in all "
          "processes, or as many different ones",
          mesh.describe(), all, process, fmt::join(mine, ","), p, fmt::join(parts, ","));
  BatchShare share{std::distance(shares.begin(), shares.find(*mine.begin())), n, {}};
  const bool block = *mine.rbegin() - *mine.begin() + 1 == all / n && *mine.begin() == share.process * (all / n);
  if (!block) share.parts.assign(mine.begin(), mine.end());
  return share;
}

}  // namespace md
