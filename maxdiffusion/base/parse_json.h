// JSON from text. The parser of nlohmann/json.hpp is a template that takes one to two seconds to compile wherever it is
// called; here it is compiled once. NaN, Infinity and -Infinity are numbers, as in what Python's json writes.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace md {

/// Throws nlohmann::json::parse_error, with the position, also for more than 512 levels of arrays and objects, or
/// out_of_range for a number beyond a double.
nlohmann::json parse_json(std::string_view text);
/// Throws as parse_json does for text with too many levels, for callers that need another parser of nlohmann's.
void check_json_depth(std::string_view text);
/// Returns a value that is_discarded() if the text is not JSON or has more levels.
nlohmann::json parse_json_or_discard(std::string_view text);
/// Formats as Python's json does, including NaN and Infinity. `indent`: as nlohmann's dump.
std::string dump_json(nlohmann::json value, int indent = -1);

}  // namespace md
