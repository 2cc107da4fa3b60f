#include "maxdiffusion/runtime/collectives.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

namespace md {
namespace {

struct Reach {
  std::vector<bool> axes;
  bool between_slices = false;
};

/// The mesh axes along which members of a group differ, over all groups.
Reach reach_of(const pjrt::Collective& c, const Mesh& mesh) {
  Reach reach{std::vector<bool>(mesh.axes().size(), false)};
  std::vector<std::vector<int64_t>> groups = c.groups;
  if (groups.empty()) {
    std::set<int> slices;  // slices seen so far, for collectives between slices only
    groups.emplace_back();
    for (int64_t i = 0; i < mesh.devices(); ++i)
      if (!c.between_slices || slices.insert(mesh.slice(i)).second) groups[0].push_back(i);
  }
  for (const auto& group : groups)
    for (size_t k = 1; k < group.size(); ++k) {
      const auto first = mesh.position(group[0]), other = mesh.position(group[k]);
      for (size_t a = 0; a < first.size(); ++a)
        if (first[a] != other[a]) reach.axes[a] = true;
      if (mesh.slice(group[0]) != mesh.slice(group[k])) reach.between_slices = true;
    }
  return reach;
}

}  // namespace

std::vector<CollectiveSum> sum_collectives(const std::vector<pjrt::Collective>& operations, const Mesh& mesh) {
  std::map<std::pair<std::string, std::pair<std::vector<bool>, bool>>, CollectiveSum> sums;
  for (const pjrt::Collective& c : operations) {
    const Reach reach = reach_of(c, mesh);
    CollectiveSum& sum = sums[{c.kind, {reach.axes, reach.between_slices}}];
    if (sum.operations++ == 0) {
      sum.kind = c.kind;
      sum.between_slices = reach.between_slices;
      for (size_t a = 0; a < reach.axes.size(); ++a)
        if (reach.axes[a]) sum.axes.push_back(mesh.axes()[a].name);
    }
    sum.runs += c.times;
    sum.bytes += c.times * static_cast<double>(c.bytes);
    sum.bytes_of[c.name] += c.times * static_cast<double>(c.bytes);
    sum.at_least |= c.in_unknown_loop;
  }
  std::vector<CollectiveSum> out;
  for (auto& [key, sum] : sums) out.push_back(std::move(sum));
  std::ranges::stable_sort(out, std::ranges::greater(), &CollectiveSum::bytes);
  return out;
}

std::string to_string(const CollectiveSum& sum) {
  return fmt::format("{} over {}: {} operations, {:.0f} runs, {}{:.2f} MiB ({})", sum.kind,
                     sum.axes.empty() ? "no axis" : fmt::format("{}", fmt::join(sum.axes, " × ")), sum.operations,
                     sum.runs, sum.at_least ? "at least " : "", sum.bytes / (1 << 20),
                     sum.between_slices ? "DCN" : "ICI");
}

namespace {

/// The label of a fused operation, "of/(a:b:c)": the first name and the number of others.
std::string short_name(const std::string& name) {
  if (name.empty()) return "(no name)";
  const auto others = std::ranges::count(name, ':');
  if (others == 0) return name;
  std::string first = name.substr(0, name.find(':'));
  if (const size_t open = first.find('('); open != first.npos) first.erase(open, 1);
  return fmt::format("{} and {} more", first, others);
}

}  // namespace

std::string largest(const CollectiveSum& sum, size_t count) {
  std::vector<std::pair<std::string, double>> by_bytes(sum.bytes_of.begin(), sum.bytes_of.end());
  std::ranges::stable_sort(by_bytes, std::ranges::greater(), &std::pair<std::string, double>::second);
  if (by_bytes.size() > count) by_bytes.resize(count);
  std::vector<std::string> words;
  for (const auto& [name, bytes] : by_bytes)
    words.push_back(fmt::format("{} {:.2f} MiB", short_name(name), bytes / (1 << 20)));
  return fmt::format("{}", fmt::join(words, ", "));
}

}  // namespace md
