// One-line YAML ("flow" text): how scalars, lists and mappings are told apart, read and written. Understands what users
// paste from Python as well: True/False/None, single quotes, trailing commas, parentheses for lists.
#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace md {

/// Parses the first document. Throws YAML::Exception, also where an alias stands for what it is part of (`&a [*a]`),
/// where aliases make more than a million values of a few, and for tags other than those of YAML's own types.
YAML::Node load_yaml(const std::string& text);
/// Parses one line of flow text. Throws likewise.
YAML::Node parse_flow(const std::string& text);
/// One line of JSON, which is YAML as well. Unquoted words are typed: numbers, booleans (Python's too), null, None.
std::string print_json(const YAML::Node& node);
/// One line of YAML with unquoted words kept letter by letter; reads back to the same node.
std::string print_flow(const YAML::Node& node);
/// The members of a list of quoted texts, where `text` is that and nothing else: ["a", "b"], ['a', 'b',], ('a',).
/// Between double quotes a text is read as JSON, between single quotes letter by letter, '' for one quote.
std::optional<std::vector<std::string>> read_quoted_list(std::string_view text);
/// The members of a YAML list of at least two texts and nothing else, where `text` is that and nothing else: [a, b].
std::optional<std::vector<std::string>> read_plain_list(const std::string& text);
/// A string as JSON writes it.
std::string quoted(const std::string& text);
/// A string as YAML: bare where it reads back as the same string, quoted otherwise.
std::string print_string(const std::string& text);

bool is_quoted(const YAML::Node& scalar);
/// YAML 1.1, any case: true/false/yes/no/on/off.
std::optional<bool> read_bool(const std::string& text);
/// Decimal, optional sign, digits may be grouped by '_'.
std::optional<int64_t> read_int(const std::string& text);
/// 1, 1.5, 1.e-8, 1e-8, .5, inf, .inf, nan.
std::optional<double> read_double(const std::string& text);
/// As read_double, but nan is no number.
std::optional<double> read_number(const std::string& text);
/// As read_int; also what read_double reads where that is whole and exact: 1e3, 1000.0.
std::optional<int64_t> read_whole(const std::string& text);
/// Shortest text that reads back to the same double, never to a whole number: 1.0, 1e-08, .inf.
std::string print_double(double d);
/// Empty, ~, null or none, any case.
bool reads_as_null(const std::string& text);

}  // namespace md
