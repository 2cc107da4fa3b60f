// One-line YAML: how scalars, lists and mappings are told apart, read and written as "flow" text. Understands what
// users paste from Python as well: True/False/None, single quotes, trailing commas, parentheses for lists.
#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <optional>
#include <string>

namespace md {

/// Parses one line of flow text. Throws YAML::Exception.
YAML::Node parse_flow(const std::string& text);
/// One line; reads back to the same node. Plain True/False/None become true/false/null.
std::string print_flow(const YAML::Node& node);
/// A string as YAML: bare where it reads back as the same string, quoted otherwise.
std::string print_string(const std::string& text);

bool is_quoted(const YAML::Node& scalar);
/// YAML 1.1, any case: true/false/yes/no/on/off.
std::optional<bool> read_bool(const std::string& text);
/// Decimal, optional sign, digits may be grouped by '_'.
std::optional<int64_t> read_int(const std::string& text);
/// 1, 1.5, 1.e-8, 1e-8, .5, inf, .inf, nan.
std::optional<double> read_double(const std::string& text);
/// Empty, ~, null or none, any case.
bool reads_as_null(const std::string& text);

}  // namespace md
