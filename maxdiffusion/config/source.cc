// Where keys come from: a YAML file, its parents named by `base:`, and command-line words, merged in that order.
#include <filesystem>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/config/config.h"
#include "maxdiffusion/config/flow.h"

namespace md {
namespace {

namespace fs = std::filesystem;

/// "a.yml:12"; YAML counts lines from 0.
std::string place(const std::string& file, const YAML::Mark& mark) { return fmt::format("{}:{}", file, mark.line + 1); }

ConfigValue value_of(const YAML::Node& node, const std::string& file) {
  ConfigValue v{.text = {}, .where = place(file, node.Mark()), .kind = ConfigValue::Kind::plain, .is_null = false};
  switch (node.Type()) {
    case YAML::NodeType::Sequence: v.kind = ConfigValue::Kind::list; break;
    case YAML::NodeType::Map: v.kind = ConfigValue::Kind::mapping; break;
    case YAML::NodeType::Scalar:
      v.kind = is_quoted(node) ? ConfigValue::Kind::quoted : ConfigValue::Kind::plain;
      v.text = node.Scalar();
      return v;
    default: v.is_null = true;
  }
  v.text = print_flow(node);
  return v;
}

/// "a.yml → b.yml → a.yml".
std::string chain_text(const std::vector<std::string>& chain) {
  std::string out;
  for (const auto& file : chain) out += (out.empty() ? "" : " → ") + file;
  return out;
}

}  // namespace

ConfigSource ConfigSource::load(const std::string& file, const std::vector<std::string>& overrides) {
  ConfigSource source;
  source.merge_file(file, {});
  source.merge_words(overrides);
  return source;
}

ConfigSource ConfigSource::from_text(const std::string& yaml, const std::vector<std::string>& overrides) {
  ConfigSource source;
  source.merge_text(yaml, "text", {});
  source.merge_words(overrides);
  return source;
}

void ConfigSource::merge_file(const std::string& file, std::vector<std::string> chain) {
  std::string name = fs::path(file).lexically_normal().string();
  bool seen = false;
  for (const auto& other : chain) seen |= fs::weakly_canonical(other) == fs::weakly_canonical(name);
  chain.push_back(name);
  if (seen) {
    throw Error(Code::invalid_config, fmt::format("config: `base:` goes in a circle: {}", chain_text(chain)));
  }
  std::string text;
  try {
    text = read_file(name);
  } catch (Error& e) {
    Error error(Code::invalid_config, fmt::format("config: cannot read {}", name));
    error.note(e.message());
    if (chain.size() > 1) error.note("named by `base:` in " + chain[chain.size() - 2]);
    throw error;
  }
  merge_text(text, name, chain);
}

void ConfigSource::merge_text(const std::string& yaml, const std::string& file, const std::vector<std::string>& chain) {
  YAML::Node root;
  try {
    root = load_yaml(yaml);
  } catch (const YAML::Exception& e) {
    fail(Code::invalid_config, "config: {} is not YAML: {}", place(file, e.mark), e.msg);
  }
  if (root.IsNull()) return;  // an empty file, or comments alone
  check(root.IsMap(), Code::invalid_config, "config: {} holds {} at its top level, expected a mapping of `key: value`",
        file, root.IsSequence() ? "a list" : "a single value");

  std::map<std::string, ConfigValue> own;
  std::string parent;
  for (const auto& item : root) {
    std::string where = place(file, item.first.Mark());
    check(item.first.IsScalar(), Code::invalid_config, "config: {}: a key must be a word, found {}", where,
          print_flow(item.first));
    std::string key = item.first.Scalar();
    if (key == "base") {
      check(item.second.IsScalar(), Code::invalid_config, "config: {}: `base` must be one file name, found {}", where,
            print_flow(item.second));
      parent = item.second.Scalar();
      continue;
    }
    ConfigValue value = value_of(item.second, file);
    value.where = where;  // the key's line: where a person looks, also for values over several lines
    if (auto old = own.find(key); old != own.end()) {
      log_warning("config: {} is written twice: {} and {}; the last wins", key, old->second.where, where);
    }
    own[key] = std::move(value);
  }
  if (!parent.empty()) {
    fs::path folder = chain.empty() ? fs::path() : fs::path(chain.back()).parent_path();
    merge_file((folder / parent).string(), chain);
  }
  for (auto& [key, value] : own) values_[key] = std::move(value);
}

void ConfigSource::merge_words(const std::vector<std::string>& overrides) {
  for (const auto& word : overrides) {
    size_t split = word.find('=');
    if (split == std::string::npos || split == 0) {
      Error error(Code::invalid_config, fmt::format("config: command line: '{}' is not of the form key=value", word));
      throw error.note("try: quote values that contain spaces, as in 'prompt=a red apple'");
    }
    values_[word.substr(0, split)] = {word.substr(split + 1), kCommandLine, ConfigValue::Kind::word, false};
  }
}

}  // namespace md
