#include "maxdiffusion/base/load_yaml.h"

#include <fmt/format.h>

#include <string_view>
#include <vector>

namespace md {
namespace {

/// A value of few letters takes a few hundred bytes of memory.
constexpr size_t kMostText = size_t{16} << 20;

/// The tags of YAML's own types, which are implied by the value.
bool is_plain_tag(const std::string& tag) {
  constexpr std::string_view kCore = "tag:yaml.org,2002:";
  if (!tag.starts_with(kCore)) return false;
  const std::string type = tag.substr(kCore.size());
  return type == "str" || type == "int" || type == "float" || type == "bool" || type == "null" || type == "seq" ||
         type == "map";
}

/// `above`: the ancestors of this node. `count`: values visited, with aliases expanded.
void check_tree(const YAML::Node& node, std::vector<YAML::Node>& above, int64_t& count) {
  constexpr int64_t kMost = 1'000'000;
  constexpr size_t kMostLevels = 512;  // yaml-cpp limits brackets, but not what aliases nest
  if (++count > kMost) throw YAML::ParserException(node.Mark(), "aliases make more than a million values of it");
  if (const std::string& tag = node.Tag(); tag.size() > 1 && !is_plain_tag(tag))
    throw YAML::ParserException(node.Mark(), "the tag " + tag + " is not known");
  if (!node.IsSequence() && !node.IsMap()) return;
  if (above.size() >= kMostLevels)
    throw YAML::ParserException(node.Mark(), fmt::format("values nest more than {} levels deep", kMostLevels));
  for (const YAML::Node& other : above)
    if (other.is(node)) throw YAML::ParserException(node.Mark(), "an alias refers to a node that contains it");
  above.push_back(node);
  for (const auto& item : node) {
    if (node.IsMap()) {
      check_tree(item.first, above, count);
      check_tree(item.second, above, count);
    } else {
      check_tree(item, above, count);
    }
  }
  above.pop_back();
}

}  // namespace

YAML::Node load_yaml(const std::string& text) {
  if (text.size() > kMostText)
    throw YAML::ParserException(YAML::Mark(),
                                fmt::format("the text has {} bytes, more than {}", text.size(), kMostText));
  YAML::Node root = YAML::Load(text);
  std::vector<YAML::Node> above;
  int64_t count = 0;
  check_tree(root, above, count);
  return root;
}

}  // namespace md
