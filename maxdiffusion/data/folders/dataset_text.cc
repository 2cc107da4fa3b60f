#include "maxdiffusion/data/folders/dataset_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/config/flow.h"

namespace md {
namespace {

using ValueKind = DatasetValue::Kind;
constexpr double kExact = 9007199254740992;  // 2⁵³

DatasetValue scalar_of_yaml(const YAML::Node& node, DatasetValue v) {
  v.kind = ValueKind::text, v.text = node.Scalar();
  if (node.Tag() == "!") return v;  // quoted
  const std::string& t = v.text;
  if (t.empty() || t == "~" || t == "null" || t == "Null" || t == "NULL") {
    v.kind = ValueKind::null;
  } else if (t == "true" || t == "True" || t == "false" || t == "False") {
    v.kind = ValueKind::boolean, v.boolean = t[0] == 't' || t[0] == 'T';
  } else {
    const char* end = t.data() + t.size();
    const auto [stop, error] = std::from_chars(t.data() + (t[0] == '+'), end, v.number);
    if (error == std::errc() && stop == end) v.kind = ValueKind::number;
  }
  return v;
}

DatasetValue of_yaml(const YAML::Node& node, const std::string& file) {
  DatasetValue v;
  v.line = node.Mark().line + 1;
  if (node.IsScalar()) return scalar_of_yaml(node, std::move(v));
  if (node.IsSequence()) {
    v.kind = ValueKind::list;
    for (const YAML::Node& item : node) v.items.push_back(of_yaml(item, file));
  } else if (node.IsMap()) {
    v.kind = ValueKind::table;
    for (const auto& member : node) {
      const std::string key = member.first.IsScalar() ? member.first.Scalar() : "";
      const int64_t line = member.first.Mark().line + 1;
      check(!key.empty(), Code::invalid_config, "{}:{}: a key that is no text", file, line);
      check(v.find(key) == nullptr, Code::invalid_config, "{}:{}: '{}' is given twice", file, line, key);
      v.members.push_back({key, of_yaml(member.second, file)});
      v.members.back().value.line = line;
    }
  }
  return v;
}

}  // namespace

const DatasetValue* DatasetValue::find(const std::string& key) const {
  const auto found = std::ranges::find(members, key, &DatasetMember::key);
  return found == members.end() ? nullptr : &found->value;
}

std::string DatasetValue::shown() const {
  switch (kind) {
    case ValueKind::null: return "null";
    case ValueKind::boolean: return boolean ? "true" : "false";
    case ValueKind::number: return fmt::format("{}", number);
    case ValueKind::text: return "'" + shortened(text, 60) + "'";
    case ValueKind::table: return "a table";
    case ValueKind::list: break;
  }
  std::string all;
  for (const DatasetValue& item : items) all += (all.empty() ? "" : ", ") + item.shown();
  return "[" + shortened(all, 60) + "]";
}

DatasetValue parse_dataset_text(const std::string& text, const std::string& file) {
  if (file.ends_with(".toml")) return parse_toml(text, file);
  std::string plain = text;
  if (file.ends_with(".json")) {
    try {
      parse_json(text);
    } catch (const nlohmann::json::parse_error& e) {
      const auto at = static_cast<std::ptrdiff_t>(std::min(e.byte, text.size()));
      fail(Code::invalid_config, "{}:{}: expected JSON: {}", file,
           1 + std::count(text.begin(), text.begin() + at, '\n'), e.what());
    } catch (const nlohmann::json::exception& e) {
      fail(Code::invalid_config, "{}: expected JSON: {}", file, e.what());
    }
    // JSON is parsed as YAML, which keeps line numbers; only tabs must be replaced.
    std::ranges::replace(plain, '\t', ' ');
  } else {
    check(file.ends_with(".yaml") || file.ends_with(".yml"), Code::invalid_config,
          "dataset_config: '{}'; expected a .toml, .json, .yaml or .yml file, or a folder", file);
  }
  try {
    return of_yaml(load_yaml(plain), file);
  } catch (const YAML::Exception& e) {
    fail(Code::invalid_config, "{}:{}: expected YAML: {}", file, e.mark.line + 1, e.msg);
  }
}

DatasetReader::DatasetReader(std::string file, std::vector<const DatasetValue*> levels)
    : file_(std::move(file)), levels_(std::move(levels)) {
  for (const DatasetValue* level : levels_)
    check(level->kind == ValueKind::table, Code::invalid_config, "{}:{}: {}; expected a table", file_, level->line,
          level->shown());
}

std::string DatasetReader::where(const std::string& key) const {
  int64_t line = levels_[0]->line;
  for (const DatasetValue* level : levels_)
    if (const DatasetValue* v = level->find(key)) {
      line = v->line;
      break;
    }
  return fmt::format("{}:{}", file_, line);
}

const DatasetValue* DatasetReader::value(const std::string& key) {
  known_.insert(key);
  for (const DatasetValue* level : levels_)
    if (const DatasetValue* v = level->find(key)) return v->kind == ValueKind::null ? nullptr : v;
  return nullptr;
}

void DatasetReader::fail_value(const std::string& key, const DatasetValue& v, const std::string& expected) const {
  fail(Code::invalid_config, "{}:{}: {} is {}; expected {}", file_, v.line, key, v.shown(), expected);
}

bool DatasetReader::flag(const std::string& key, bool otherwise) {
  const DatasetValue* v = value(key);
  if (!v) return otherwise;
  if (v->kind != ValueKind::boolean) fail_value(key, *v, "true or false");
  return v->boolean;
}

int64_t DatasetReader::whole(const std::string& key, int64_t otherwise, int64_t least) {
  const DatasetValue* v = value(key);
  if (!v) return otherwise;
  if (v->kind != ValueKind::number || v->number != std::floor(v->number) || std::abs(v->number) > kExact ||
      v->number < static_cast<double>(least))
    fail_value(key, *v, fmt::format("a whole number, {} or more", least));
  return static_cast<int64_t>(v->number);
}

double DatasetReader::number(const std::string& key, double otherwise, double least, double most) {
  const DatasetValue* v = value(key);
  if (!v) return otherwise;
  if (v->kind != ValueKind::number || !(v->number >= least && v->number <= most))
    fail_value(key, *v,
               std::isfinite(most) ? fmt::format("a number from {} to {}", least, most)
                                   : fmt::format("a number, {} or more", least));
  return v->number;
}

std::string DatasetReader::text(const std::string& key, const std::string& otherwise) {
  const DatasetValue* v = value(key);
  if (!v) return otherwise;
  if (v->kind != ValueKind::text) fail_value(key, *v, "a text");
  return v->text;
}

std::string DatasetReader::word(const std::string& key, const std::string& otherwise,
                                const std::vector<std::string>& words) {
  const DatasetValue* v = value(key);
  if (!v) return otherwise;
  if (v->kind != ValueKind::text || std::ranges::count(words, v->text) == 0)
    fail_value(key, *v, "one of: " + nearest_first(v->text, words));
  return v->text;
}

std::vector<int64_t> DatasetReader::wholes(const std::string& key) {
  const DatasetValue* v = value(key);
  if (!v) return {};
  const std::vector<DatasetValue> one = {*v};
  std::vector<int64_t> out;
  for (const DatasetValue& item : v->kind == ValueKind::list ? v->items : one) {
    if (item.kind != ValueKind::number || item.number != std::floor(item.number) || item.number < 1 ||
        item.number > kExact)
      fail_value(key, *v, "a whole number above 0, or a list of them");
    out.push_back(static_cast<int64_t>(item.number));
  }
  if (out.empty()) fail_value(key, *v, "a whole number above 0, or a list of them");
  return out;
}

std::optional<std::pair<int64_t, int64_t>> DatasetReader::size(const std::string& key) {
  const std::vector<int64_t> sides = wholes(key);
  if (sides.empty()) return {};
  if (sides.size() > 2) fail_value(key, *value(key), "a number, or [width, height]");
  return std::pair{sides.front(), sides.back()};
}

std::vector<std::string> DatasetReader::texts(const std::string& key) {
  const DatasetValue* v = value(key);
  if (!v) return {};
  const std::vector<DatasetValue> one = {*v};
  std::vector<std::string> out;
  for (const DatasetValue& item : v->kind == ValueKind::list ? v->items : one) {
    if (item.kind != ValueKind::text) fail_value(key, *v, "a text, or a list of them");
    out.push_back(item.text);
  }
  return out;
}

void DatasetReader::ignore(const std::vector<std::string>& keys, const std::string& why) {
  for (const std::string& key : keys)
    if (value(key)) log_warning("{}: {} is ignored: {}", where(key), key, why);
}

void DatasetReader::refuse(const std::string& key, const std::string& why, const std::string& usual) {
  const DatasetValue* v = value(key);
  if (!v || (v->kind == ValueKind::boolean && !v->boolean) || (v->kind == ValueKind::number && v->number == 0) ||
      (v->kind == ValueKind::text && v->text.empty()) || (v->kind == ValueKind::list && v->items.empty()))
    return;
  if (v->kind == ValueKind::text ? v->text == usual : v->shown() == usual) return;
  fail(Code::invalid_config, "{}: {} is {}; expected none{}: {}", where(key), key, v->shown(),
       usual.empty() ? "" : " or " + usual, why);
}

void DatasetReader::finish() const {
  const std::vector<std::string> known(known_.begin(), known_.end());
  for (const DatasetValue* level : levels_)
    for (const auto& [key, v] : level->members) {
      if (known_.contains(key)) continue;
      Error error(Code::invalid_config, fmt::format("{}:{}: unknown key '{}'", file_, v.line, key));
      if (const std::string near = nearest(key, known); !near.empty()) error.note(fmt::format("try: {}", near));
      throw error;
    }
}

}  // namespace md
