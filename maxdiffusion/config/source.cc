// Sources of keys: a YAML file, its parents named by `base:`, and command-line words, merged in that order.
#include <filesystem>
#include <sstream>
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
  ConfigValue v{.text = {}, .where = place(file, node.Mark())};
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

/// The line, from 1, after which a second document begins; 0: there is none.
int64_t second_document(const std::string& yaml) {
  std::istringstream lines(yaml);
  int64_t number = 0, ended = 0;
  bool begun = false;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const bool marker = line.starts_with("---") || line.starts_with("...");
    if (marker && line.find_first_not_of("-. \r") == std::string::npos) {
      if (begun) ended = number;
      continue;
    }
    const size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#' || line[0] == '%') continue;
    if (begun && line.starts_with("--- ")) return number;
    if (ended) return ended;
    begun = true;
  }
  return 0;
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
  bool cyclic = false;
  for (const auto& other : chain) cyclic |= fs::weakly_canonical(other) == fs::weakly_canonical(name);
  chain.push_back(name);
  if (cyclic) {
    throw Error(Code::invalid_config, fmt::format("config: `base:` is cyclic: {}", chain_text(chain)));
  }
  std::string text;
  try {
    text = read_file(name);
  } catch (Error& e) {
    Error error(Code::invalid_config, fmt::format("config: cannot read {}", name));
    error.note(e.message());
    if (chain.size() > 1)
      error.note("named by `base:` in " + chain[chain.size() - 2]);
    else
      error.note("try: a config file such as configs/quickstart.yml, or the folder of a run");
    throw error;
  }
  merge_text(text, name, chain);
}

void ConfigSource::merge_text(const std::string& yaml, const std::string& file, const std::vector<std::string>& chain) {
  YAML::Node root;
  try {
    root = load_yaml(yaml);
  } catch (const YAML::Exception& e) {
    fail(Code::invalid_config, "config: {} cannot be read as YAML: {}", place(file, e.mark), e.msg);
  }
  if (const int64_t line = second_document(yaml))
    fail(Code::invalid_config, "config: {}:{}: a second YAML document begins; expected one", file, line);
  if (root.IsNull()) return;  // empty, or only comments
  check(root.IsMap(), Code::invalid_config, "config: {} holds {} at its top level, expected a mapping of `key: value`",
        file, root.IsSequence() ? "a list" : "a single value");

  std::map<std::string, ConfigValue> file_values;
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
    value.where = where;  // the key's line, where users look, also for values over several lines
    if (auto old = file_values.find(key); old != file_values.end()) {
      log_warning("config: {} is written twice: {} and {}; the last wins", key, old->second.where, where);
    }
    file_values[key] = std::move(value);
  }
  if (!parent.empty()) {
    fs::path folder = chain.empty() ? fs::path() : fs::path(chain.back()).parent_path();
    merge_file((folder / parent).string(), chain);
  }
  ++layers_;
  for (auto& [key, value] : file_values) {
    if (!chain.empty()) value.folder = fs::path(file).parent_path();
    value.layer = layers_;
    values_[key] = std::move(value);
  }
}

namespace {

/// A word for messages; a token of the Hugging Face hub is not printed.
std::string shown_word(const std::string& word) {
  const bool token = word.starts_with("hf_") && word != "hf_access_token";
  return token ? "a token of the Hugging Face hub" : "'" + word + "'";
}

}  // namespace

void ConfigSource::merge_words(const std::vector<std::string>& overrides) {
  ++layers_;
  for (const auto& word : overrides) {
    const size_t split = word.find('=');
    if (split == std::string::npos || split == 0) {
      Error error(Code::invalid_config,
                  fmt::format("config: command line: {} is not of the form key=value", shown_word(word)));
      if (word.ends_with(".yml") || word.ends_with(".yaml"))
        error.note("a command takes one config file; `base: OTHER.yml` in it names its parent");
      else if (word.starts_with('-'))
        error.note("try: key=value, --key=value or --key value; COMMAND --help prints the keys");
      else
        error.note("try: quote values that contain spaces, as in 'prompt=a red apple'");
      throw error;
    }
    ConfigValue& value = values_[word.substr(0, split)];
    if (!value.where.empty() && value.where != kCommandLine) overridden_[word.substr(0, split)] = value;
    value = {.text = word.substr(split + 1), .where = kCommandLine, .kind = ConfigValue::Kind::word, .layer = layers_};
  }
}

void ConfigSource::rename(const std::vector<KeyRename>& renames) {
  for (const KeyRename& r : renames)
    for (auto* values : {&values_, &overridden_}) {
      const bool logs = values == &values_;
      if (const auto former = r.former == r.key ? values->end() : values->find(r.former); former != values->end()) {
        if (logs) log_info("config: {}: `{}` is now `{}`", former->second.where, r.former, r.key);
        const ConfigValue value = former->second;
        values->erase(former);
        const auto [at, is_new] = values->try_emplace(r.key, value);
        if (!is_new && at->second.layer < value.layer) at->second = value;
      }
      const auto at = values->find(r.key);
      if (at == values->end()) continue;
      ConfigValue& v = at->second;
      if (const auto now = r.values.find(v.text); now != r.values.end()) {
        if (logs) log_info("config: {}: `{}={}` is now `{}`", v.where, r.key, v.text, now->second);
        v.text = now->second;
      }
    }
}

}  // namespace md
