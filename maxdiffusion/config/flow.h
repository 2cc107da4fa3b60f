// One-line YAML ("flow" text): classification, parsing and printing of scalars, lists and mappings. Also accepts Python
// syntax: True/False/None, single quotes, trailing commas, parentheses for lists.
#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/load_yaml.h"
#include "maxdiffusion/base/seed.h"

namespace md {

/// Parses one line of flow text. Throws as load_yaml does.
YAML::Node parse_flow(const std::string& text);
/// One line of JSON, which is YAML as well. Unquoted words are typed: numbers, booleans (Python's too), null, None.
std::string print_json(const YAML::Node& node);
/// One line of YAML with unquoted words unchanged; reads back to the same node.
std::string print_flow(const YAML::Node& node);
/// The items of a list of quoted texts, if `text` is exactly that: ["a", "b"], ['a', 'b',], ('a',). Double-quoted texts
/// are JSON; single-quoted ones are literal, with '' for a quote.
std::optional<std::vector<std::string>> read_quoted_list(std::string_view text);
/// The items of a YAML list of at least two texts, if `text` is exactly that: [a, b].
std::optional<std::vector<std::string>> read_plain_list(const std::string& text);
/// A string as JSON writes it.
std::string quoted(const std::string& text);
/// A string as YAML: unquoted if it reads back as the same string.
std::string print_string(const std::string& text);

bool is_quoted(const YAML::Node& scalar);
/// YAML 1.1, any case: true/false/yes/no/on/off.
std::optional<bool> read_bool(const std::string& text);
/// Decimal, optional sign, digits may be grouped by '_'.
std::optional<int64_t> read_int(const std::string& text);
/// 1, 1.5, 1.e-8, 1e-8, .5, inf, .inf, nan.
std::optional<double> read_double(const std::string& text);
/// true or false as a key takes it: like read_bool; also 1 and 0.
std::optional<bool> read_switch(const std::string& text);
/// -1, or up to 2⁶⁴ − 1; also whole numbers in floating-point form.
std::optional<Seed> read_seed(const std::string& text);
/// A number as a key takes it: like read_double, but only is_number().
std::optional<double> read_number(const std::string& text);
/// Like read_int; also whole numbers in floating-point form: 1e3, 1000.0.
std::optional<int64_t> read_whole(const std::string& text);
/// Shortest text that reads back to the same double, never like an integer: 1.0, 1e-08, .inf.
std::string print_double(double d);
/// Empty, ~, null or none, any case.
bool reads_as_null(const std::string& text);

}  // namespace md
